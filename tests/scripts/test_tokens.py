"""Quality by calibration tokens: what is run for a number of tokens, and what the page says of the records."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.reporting.pages.tokens import calibration_tokens, tokens_page
from experiments.reporting.record import Record
from scripts.benchmarks import tokens

from ..experiments.helpers import FULL, method, row
from .test_make_tables import compared

WAVE = 0.1 * np.sin(np.arange(50))


def at(n_tokens, **nlls):
    """A record of searches with these losses, each with three seeds."""
    rows = [
        row(method(name), nll + 0.001 * seed + WAVE, 5.0, seed=seed, search_seconds=20.0)
        for name, nll in nlls.items()
        for seed in range(3)
    ]
    made = compared(row(FULL, 3.0 + WAVE, None, seed=None), *rows, settings={"units": "fused"})
    calibration = replace(made.data["calibration"], batches=n_tokens // 512, batch_shape=(1, 512))
    return replace(made, data={**made.data, "calibration": calibration})


def test_the_page_says_where_adaptive_is_worse_than_an_opponent():
    good = at(2048, fisher=3.4, kl_per_bit=3.3, adaptive=3.3)
    bad = at(512, fisher=3.3, kl_per_bit=3.4, adaptive=3.4)
    text, figures = tokens_page({"tokens_floor_2048": good, "tokens_floor_512": bad})
    assert calibration_tokens(good) == 2048 and list(figures) == ["tokens_floor.png"]
    assert "at 2 places of these curves: worse by more" in text
    assert "than fisher at 512 tokens." in text
    assert text.index("| 512 | ") < text.index("| 2,048 | ")
    assert f"| 2,048 | kl_per_bit (W+A) | 3 | {math.exp(3.301 + WAVE.mean()):.2f} ± " in text
    assert "| 20.0 |" in text and "| 40.0 |" in text  # adaptive reads the scan of kl_per_bit
    eight, _ = tokens_page(
        {"tokens_floor_4096": at(4096, fisher=3.4, kl_per_bit=3.3, adaptive=3.3)}
    )
    assert "| 60.0 |" in eight and "| 40.0 |" not in eight  # and of eight batches fisher's
    whole = replace(good, results=tuple(replace(r, score_seconds=5.0) for r in good.rows))
    text, _ = tokens_page({"tokens_floor_2048": whole})
    assert "| 20.0 |" in text and "| 40.0 |" not in text  # it is in the record
    alone, _ = tokens_page({"tokens_even_2048": good})
    assert "nowhere worse than fisher or kl_per_bit by more than 1 standard error" in alone
    assert "## Scale rule even" in alone


@pytest.mark.parametrize(
    ("n_tokens", "most", "rows", "batches", "scored"),
    [
        (512, 128, 1, 1, 1),
        (8192, 128, 1, 16, 16),
        (131072, 128, 2, 128, 32),
        (524288, 128, 8, 128, 8),
        (262144, 32, 16, 32, 4),
    ],
)
def test_a_cell_has_as_many_tokens_as_it_says(
    n_tokens, most, rows, batches, scored, tmp_path, monkeypatch
):
    command = (
        f"tokens --out {tmp_path} --searches fisher kl --most-batches {most} -- run.device=cpu"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    arguments = tokens.cell(n_tokens, "even", tmp_path, tokens.parse())
    said = dict(argument.split("=", 1) for argument in arguments)
    assert said["calibration.batch_size"] == str(rows)
    assert said["calibration.batches"] == str(batches)
    assert said["search.score_batches"] == str(scored) and said["searches"] == "[fisher,kl]"
    assert rows * batches * tokens.WINDOW == n_tokens
    assert scored * rows * tokens.WINDOW == min(n_tokens, tokens.SCANNED)
    assert said["search.scale_rules.input"] == "even" and arguments[-1] == "run.device=cpu"


def test_every_cell_is_given_to_compare_and_its_record_published(tmp_path, monkeypatch, capsys):
    out, records, ran, cells = tmp_path / "out", tmp_path / "records", [], {}
    records.mkdir()

    def run(command, **_):
        ran.append(command)
        folder = Path(next(a for a in command if a.startswith("run.folder=")).partition("=")[2])
        cells[folder.name] = at(int(folder.name.rpartition("_")[2]), fisher=3.3)
        cells[folder.name].save(folder / "record.json")
        return type("Done", (), {"returncode": 3 * (len(ran) > 1)})

    monkeypatch.setattr(tokens.subprocess, "run", run)
    asked = f"tokens --out {out} --records {records} --tokens 512 2048 --rules floor -- steps=1"
    monkeypatch.setattr(sys, "argv", asked.split())
    assert tokens.main() == 3 and len(ran) == 2 and ran[0][-1] == "steps=1"
    (copied,) = records.iterdir()  # of the one that did not fail
    assert copied.name == "tokens_floor_512.json"
    assert Record.load(copied) == cells["tokens_floor_512"]
    monkeypatch.setattr(sys, "argv", asked.split())
    with (
        tokens.claimed(out / "tokens_floor_512.lock"),
        tokens.claimed(out / "tokens_floor_2048.lock"),
    ):
        assert tokens.main() == 0 and len(ran) == 2
    assert capsys.readouterr().out.count("another process runs it") == 2
    for wrong in (
        ["--tokens", "700"],
        ["--tokens", "2048", "--most-batches", "0"],
        ["--out", "/proc/none"],
        ["--records", "/proc/none"],
    ):
        monkeypatch.setattr(sys, "argv", [*asked.split()[:5], *wrong])
        with pytest.raises(SystemExit):
            tokens.main()
        said = capsys.readouterr().err
        assert f"{wrong[-2]} {wrong[-1]}: " in said and "run.folder" not in said
