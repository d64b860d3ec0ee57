"""scripts/benchmarks/growth.py: its record on a tiny model, and what it says of shapes."""

import itertools
import json
import sys
from types import SimpleNamespace

import pytest

from dmx.searching import SearchConfig, search_space
from scripts.benchmarks import growth
from scripts.benchmarks.shapes import TINY, make_model


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--json", "{place}"], "is a folder: name a file"),
        (["--json", "/proc/none/growth.json"], "cannot write /proc/none"),
        (["--shapes", "0"], "argument --shapes: invalid choice"),
    ],
)
def test_what_cannot_be_measured_is_said_before_a_model_is_made(
    wrong, why, tmp_path, monkeypatch, capsys
):
    given = ["--device", "cpu", "--json", str(tmp_path / "growth.json"), *wrong]
    monkeypatch.setattr(sys, "argv", ["growth", *(a.format(place=tmp_path) for a in given)])
    with pytest.raises(SystemExit):
        growth.parse()
    assert why in capsys.readouterr().err


def test_a_run_that_is_cut_leaves_its_rows_and_what_a_fit_needs(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr(growth, "time", clock)
    path = tmp_path / "growth.json"
    # The clock is read before the run and twice a row: of three rows the second is the last.
    record = growth.measure((TINY,), "cpu", 3.0, path, tiny=True)
    assert json.loads(path.read_text()) == record
    assert record["processes"] == 1 and record["steps"] == 5
    assert record["machine"]["torch"] and record["machine"]["when"]
    first, second = record["rows"]
    assert first["way"] == "alone" and (first["rows"], first["length"]) == (2, 32)
    assert first["search_seconds"] > 0 and first["plain_seconds"] > 0
    assert second["settings"] == {"objective": "kl", "keep_reference": "off", "cuda_graph": "off"}
    parameters = first["quantized"] + first["outer"]
    assert first["weights_mib"] * growth.MIB == pytest.approx(4 * parameters, rel=0.01)
    assert first["quantized"] == search_space(make_model(TINY, "cpu"), SearchConfig()).total_weight
