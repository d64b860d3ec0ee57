"""Records in the repository: the same numbers in less room, and nothing of the machine that made them."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dmx.errors import RunError
from experiments.reporting.packed import pack, pack_formats, unpack, unpack_formats
from experiments.reporting.pages.quality import quality_pages
from experiments.reporting.record import ModelFacts, Record
from scripts.publish_record import CUT, main, published, read_run

from ..experiments.helpers import DMX, FULL, answers, method, row, text, training_row
from .test_make_tables import PRESETS, compared, trained

LOSSES = np.float32(3 + 0.1 * np.sin(np.arange(50)))
MODEL, FOLDER = "/home/me/runs/train_llama/bf16-0/model", "/home/me/runs/llama_0"
ITEMS = [int(i % 3 == 0) for i in range(40)]


def asked(**sections: object) -> dict:
    """What the run's config.yaml has, beside the search."""
    return {
        "model": {"id": MODEL, "note": None},
        "data": {"evaluation": {"files": ["/tmp/w/data/pretrain/valid.jsonl.gz"]}},
        "calibration": {"batches": 128},
        "run": {"folder": FOLDER},
    } | sections


def whole(**fields: object) -> Record:
    """A finished run of a model trained here: losses are float32, as measured."""
    rows = [row(FULL, LOSSES, None, seed=None), row(method("kl_per_bit"), LOSSES + np.float32(0.2))]
    rows.append(row(DMX, np.float64(LOSSES) + 0.1, zero_shot=answers(arc=ITEMS)))
    made = compared(*rows, model=ModelFacts(MODEL, None, "bfloat16", "ab" * 32, None))
    return dataclasses.replace(made, requested=dict(made.requested) | asked(), **fields)


def published_by(tmp_path, *more: str) -> Record:
    assert main([str(tmp_path / "run"), "x", "--records", str(tmp_path), *more]) == 0
    return Record.load(tmp_path / "x.json")


# --- packed arrays ---------------------------------------------------------------------------------

numbers = st.one_of(
    st.lists(st.sampled_from([0.0, 1.0])),
    st.lists(st.floats(width=32)),
    st.lists(st.floats(0, 20).map(lambda x: round(x, 6))),
    st.lists(st.floats()),
    st.lists(st.sampled_from([0.0, -0.0, 1.0, 0.1, 5e-324, 1e300])),
)


@settings(max_examples=100, deadline=None)
@given(numbers)
def test_packed_numbers_come_back_to_the_bit(values):
    assert np.array(unpack(pack(values))).tobytes() == np.array(values, dtype=float).tobytes()


@pytest.mark.parametrize(
    ("values", "packed"),
    [
        ([1, 0, 1, 1, 0, 0, 0, 0, 1], "bits 9 sIA="),
        ([0.5, -2.0], "float32 2 AAAAPwAAAMA="),
        ([3.171912, 0.1], "decimal32 2 mwBLQM3MzD0="),
        ([1 / 3], "float64 1 VVVVVVVV1T8="),
    ],
)
def test_the_form_stays_what_records_are_written_in(values, packed):
    assert pack(values) == packed and unpack(packed) == tuple(values)


@pytest.mark.parametrize(
    "wrong",
    ["", "3.1", "bits 17 sIA=", "float32 2 AAAA", "float16 1 AAA=", "bits x sIA=", "bits 9 §"],
)
def test_a_damaged_array_is_named(tmp_path, wrong):
    body = json.loads(published(compared(row(DMX, LOSSES)).to_dict()))
    body["results"][0]["window_nll"] = wrong
    (tmp_path / "x.json").write_text(json.dumps(body))
    with pytest.raises(RunError, match=r"x\.json\.results\[0\]\.window_nll is .* expected numbers"):
        Record.load(tmp_path / "x.json")


LAYERS = st.builds(
    "{}.{}.{}".format, st.sampled_from(["model.layers", "h"]), st.integers(0, 12), st.sampled_from(["q", "mlp.experts.3.up"])
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(LAYERS | st.sampled_from(["lm_head", "of", "a.b"]), st.sampled_from(["mxfp4", "fp8", "bf16"])))  # fmt: skip
def test_packed_formats_come_back(formats):
    assert unpack_formats(pack_formats(formats)) == formats
    assert pack_formats(pack_formats(formats)) == pack_formats(formats)


def test_formats_are_packed_by_kind_of_layer_and_damaged_ones_named(tmp_path):
    formats = {f"model.layers.{i}.{k}": f"mxfp{4 + 4 * (i == 1)}" for i in range(3) for k in "qo"}
    kinds = {"of": ["mxfp4", "mxfp8"], "model.layers.*.q": "010", "model.layers.*.o": "010"}
    assert pack_formats(formats) == kinds and list(unpack_formats(kinds)) == list(formats)
    several = formats | {"model.layers.5.q": "mxfp4"}  # blocks between them have none
    assert pack_formats(several) == several
    made = compared(row(DMX, LOSSES))
    made = dataclasses.replace(made, actual={**made.actual, "formats": formats})
    body = json.loads(published(made.to_dict()))
    assert body["actual"]["formats"] == kinds
    for digits in ("012", 3, "0x0"):
        (tmp_path / "x.json").write_text(
            json.dumps(body | {"actual": {"formats": kinds | {"model.layers.*.q": digits}}})
        )
        with pytest.raises(RunError, match=r"x\.json\.actual\.formats is damaged: expected"):
            Record.load(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(json.dumps(body))
    assert Record.load(tmp_path / "x.json").actual["formats"] == formats
    assert published({**body}) == json.dumps(body, separators=(",", ":"), ensure_ascii=False) + "\n"


# --- what is published -----------------------------------------------------------------------------


def test_a_plain_record_and_its_published_one_give_the_same_pages(tmp_path):
    plain = whole()
    plain.save(tmp_path / "run" / "record.json")
    made = published_by(tmp_path, "--model", "Llama, trained here", "--note", "two passes")
    body = json.loads((tmp_path / "x.json").read_text())
    kinds = [r["window_nll"].split()[0] for r in body["results"]]
    assert kinds == ["float32", "float32", "float64"] and made.results == plain.results
    assert body["results"][2]["zero_shot"]["arc"]["items"].startswith("bits 40 ")
    assert body["results"][0]["perplexity"] == plain.rows[0].perplexity  # read as it is
    named = dataclasses.replace(plain, model=made.model)
    assert quality_pages([made], PRESETS).texts == quality_pages([named], PRESETS).texts
    assert made.model == dataclasses.replace(
        plain.model, id="Llama, trained here", note="two passes"
    )
    assert made.requested["model"] == {"id": "Llama, trained here", "note": "two passes"}
    assert made.requested["run"] == {"folder": "outputs/compare"}
    assert made.requested["data"]["evaluation"]["files"] == ["data/pretrain/valid.jsonl.gz"]
    # Published again, it stays what it is.
    assert published(body) == (tmp_path / "x.json").read_text()


def test_a_record_whose_settings_name_no_folder_is_published(tmp_path):
    usual = whole()
    run = {k: v for k, v in usual.requested["run"].items() if k != "folder"}
    dataclasses.replace(usual, requested=usual.requested | {"run": run}).save(
        tmp_path / "run" / "record.json"
    )
    assert published_by(tmp_path, "--model", "m").requested["run"] == run


def test_a_training_is_published_too():
    made = trained(training_row("bf16", window_nll=tuple(LOSSES.tolist())))
    body = json.loads(published(made.to_dict()))
    assert body["results"][0]["window_nll"].startswith("float32 50 ")
    assert Record.from_dict({k: body[k] for k in body if k != "schema"}, "x") == made


@pytest.mark.parametrize(
    ("fields", "more", "words"),
    [
        ({}, (), f"model.id is '{MODEL}'"),
        ({"warnings": (f"see {FOLDER}/x, /opt/own/y",)}, ("--model", "m"), r"warnings.0 = 'see outputs/compare/x, /opt"),
        ({"warnings": ("see [/opt/own/y]",)}, ("--model", "m"), "warnings.0 = 'see [/opt/own/y]'"),
        ({"warnings": ("/own",)}, ("--model", "m"), "warnings.0 = '/own'"),
        ({"warnings": ("x" * 100_000,)}, ("--model", "m"), "100,000 are allowed"),
        ({"command": 3}, ("--model", "m"), "the record.command is 3, expected str"),
        ({"results": ()}, ("--model", "m"), "the record has no rows"),
        ({}, ("--model", "a\nb"), "pages take a line without"),
        ({}, ("--model", "m", "--records", "pages/records"), "is the page of many records"),
        ({}, ("--model", "m", "--like", "z"), "Leave --like out"),
        ({}, ("--model", "m", "--records", "taken"), "is there already"),
    ],
)  # fmt: skip
def test_what_may_not_be_published_is_refused(tmp_path, monkeypatch, capsys, fields, more, words):
    monkeypatch.chdir(tmp_path)
    whole(**fields).save(tmp_path / "run" / "record.json")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x.json").write_text("old")
    (tmp_path / "pages" / "records").mkdir(parents=True)
    (tmp_path / "pages" / "x.md").touch()
    assert main(["run", "x", "--records", ".", *more]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "x.json").exists()
    assert (tmp_path / "taken" / "x.json").read_text() == "old"


def test_a_number_that_is_none_is_refused():
    made = whole().to_dict()
    with pytest.raises(RunError, match="holds a number that is none"):
        published(made | {"actual": {"seconds": float("nan")}}, model="m")


def test_force_replaces_and_other_paths_are_named(tmp_path):
    whole(warnings=("see /opt/own/y, not /opt/own-2",)).save(tmp_path / "run" / "record.json")
    (tmp_path / "x.json").write_text("old")
    more = ("--force", "--model", "m", "--replace", "/opt/own=a\\b", "--replace", "/opt/own-2=c")
    assert published_by(tmp_path, *more).warnings == ("see a\\b/y, not c",)
    for wrong in (["x.json", "../x"], ["x.json", "x.json"], ["x.json", "."]):
        assert main([str(tmp_path / wrong[0]), wrong[1], "--records", str(tmp_path)]) == 2


# --- a run that was cut off ------------------------------------------------------------------------


@pytest.fixture
def cut(tmp_path):
    """A folder of two rows without a record, and a finished run of the same texts."""
    full = whole()
    full.save(tmp_path / "like" / "record.json")
    (tmp_path / "run" / "rows").mkdir(parents=True)
    for name, of in (("bf16", full.rows[0]), ("kl", full.rows[1])):
        (tmp_path / "run" / "rows" / f"{name}.json").write_text(json.dumps(of.to_dict()))

    def config(**sections: object) -> None:
        settings = dict(full.requested) | {"search": {"steps": 7}} | sections
        OmegaConf.save(OmegaConf.create(settings), tmp_path / "run" / "config.yaml")

    config()
    return config


def test_rows_of_a_run_that_was_cut_off_become_a_record(tmp_path, cut):
    made = published_by(tmp_path, "--like", str(tmp_path / "like"), "--model", "m")
    full = whole()
    assert made.warnings == (CUT,) and made.requested["search"] == {"steps": 7}
    assert sorted(made.rows, key=lambda r: r.label) == list(full.rows[:2])
    assert (made.started, made.wall_seconds, made.device) == (None, None, full.device)
    assert made.data == full.data and "search" not in made.actual


def test_what_it_takes_from_another_run_must_be_of_the_same_model_and_texts(tmp_path, cut):
    run, like = tmp_path / "run", tmp_path / "like"
    settings = (run / "config.yaml").read_text()
    for wrong in ("a: [", None):
        (run / "config.yaml").unlink()
        if wrong is not None:
            (run / "config.yaml").write_text(wrong)
        with pytest.raises(RunError, match=r"config\.yaml is missing or damaged"):
            read_run(run, like)
    (run / "config.yaml").write_text(settings)
    with pytest.raises(RunError, match="its run was cut off"):
        read_run(run)
    cut(calibration={"batches": 8})
    with pytest.raises(RunError, match=r"calibration\.batches is 128 there and 8 in"):
        read_run(run, like)
    cut(mor={})
    with pytest.raises(RunError, match=r"another command or version .* \['mor'\]"):
        read_run(run, like)
    cut()
    learned = row(method(weights="learned"), LOSSES).to_dict()
    (run / "rows" / "learned.json").write_text(json.dumps(learned))
    with pytest.raises(RunError, match=r"read no text for learning"):
        read_run(run, like)
    full = whole()
    dataclasses.replace(full, data={**full.data, "training": text("files")}).save(
        like / "record.json"
    )
    assert read_run(run, like)["data"]["training"]["name"] == "files"
    (run / "rows" / "learned.json").unlink()
    assert "training" not in read_run(run, like)["data"]
