"""What identifies a result: labels, comparisons, and files that are read strictly."""

import dataclasses
import json
from dataclasses import dataclass
from typing import get_type_hints

import pytest

from dmx.errors import RunError
from experiments.reporting import record as records
from experiments.reporting import stored
from experiments.reporting.groups import group_rows
from experiments.reporting.plots.pareto import pareto
from experiments.reporting.pooling import Table
from experiments.reporting.record import (
    SCHEMA,
    Device,
    Limit,
    Method,
    ModelFacts,
    Record,
    Row,
    TaskResult,
    Verdict,
    dimension,
)
from experiments.reporting.tables import results_table
from experiments.reporting.verdicts import verdicts

DMX = Method(search="differentiable", quantized="W+A", family="mxfp6_mxfp4", units="layer")
FULL = dataclasses.replace(
    DMX, polish=True, transform="hadamard_block", weights="gptq", net=True, choices="separate"
)


def row(method=DMX, **fields):
    """A row with two windows."""
    known = {f.name: None for f in dataclasses.fields(Row)}
    measured = {
        "budget": Limit(4.5, "element_bits"),
        "seed": 0,
        "element_bits": 4.5,
        "nll": 1.5,
        "windows": 2,
        "perplexity": 4.48,
        "tokens": 126,
        "window_nll": (1.0, 2.0),
        "reasons": {"zero_shot": "no"},
    }
    return Row(**known | {"method": method} | measured | fields)


def record(*results, **fields):
    """A record of a run that measured these rows."""
    return Record(
        **{
            "command": "compare",
            "started": "a",
            "finished": "b",
            "wall_seconds": 2.0,
            "versions": {"dmx": "0"},
            "device": Device("cpu", "cpu", 1),
            "peak_memory_bytes": 1,
            "seed": None,
            "requested": {"search": {"steps": 3}},
            "actual": {},
            "data": {},
            "model": ModelFacts("m", None, "float32", "0", None),
            "results": results,
            "verdict": None,
            "warnings": ("w",),
        }
        | fields
    )


def test_labels_say_what_is_unusual_and_nothing_else():
    assert Method().label == "bf16" and Method().is_unquantized
    uniform = Method(search="uniform", format="mxfp4", quantized="W")
    assert (uniform.label, uniform.name) == ("uniform mxfp4", "uniform mxfp4 (W)")
    assert (DMX.label, DMX.name) == ("dMX", "dMX (W+A)")
    assert FULL.label == "dMX + polish + hadamard block + gptq + net, separate choices"
    assert FULL.short_label == "dMX + polish + net"
    assert dataclasses.replace(DMX, settings="steps=400 lr=2").short_label == "dMX steps=400 lr=2"
    assert dataclasses.replace(DMX, origin="files out", net=True).label == "files out + net"


def test_a_title_names_what_the_rows_of_a_table_have_in_common():
    assert DMX.titles() == {
        "transform": "transform none",
        "weights": "weights nearest",
        "stage": "",
        "quantized": "W+A",
        "family": "",
        "units": "",
        "experts": "",
        "choices": "",
        "input_format": "",
        "scale_rules": "",
    }
    full, without, dmx = (
        Table.of("m", "text", m) for m in (FULL, FULL.without("polish", "net"), DMX)
    )
    assert full == without != dmx


def test_methods_are_compared_where_all_but_the_search_is_alike():
    kl = dataclasses.replace(DMX, search="kl")
    assert kl.is_heuristic and not DMX.is_heuristic and DMX.is_dmx
    assert kl.kind == DMX.kind == dataclasses.replace(DMX, polish=True).kind
    for change in ({"net": True}, {"weights": "gptq"}, {"quantized": "W"}, {"units": "fused"}):
        assert dataclasses.replace(kl, **change).kind != DMX.kind
    assert not dataclasses.replace(kl, polish=True).is_heuristic
    assert FULL.without("net", "choices").net is False
    with pytest.raises(ValueError, match="no fields of Method"):
        FULL.without("rotation")


def test_a_record_comes_back_as_it_was_saved(tmp_path):
    task = TaskResult("acc", 0.5, None, 2, (1.0, 0.0), "DMX_DATA", "0", "0.4")
    counts = {"weight": {"q": {"mxfp4": 3}}}
    saved = record(
        row(FULL, zero_shot={"arc_easy": task}, format_counts=counts, safety={"rate": 0.1}),
        row(Method(), budget=None, seed=None),
        verdict=Verdict(text="t", difference_nats=-0.1, budget=Limit(4.5, "element_bits")),
    )
    path = saved.save(tmp_path / "record.json")
    assert Record.load(path) == saved and json.loads(path.read_text())["schema"] == SCHEMA
    assert len(saved.rows) == 2 and saved.training_rows == ()


def test_a_missing_metric_has_its_reason():
    assert (row().metric("nll"), row().reason("nll")) == (1.5, "")
    assert (row().metric("zero_shot_seconds"), row().reason("zero_shot")) == (None, "no")
    assert row().reason("eval_seconds") == "not in the record"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda body: body.update(schema="dmx.record/1"),
            r"schema is 'dmx\.record/1'.*Run the com",
        ),
        (lambda body: body.pop("seed"), r"Record misses keys \['seed'\]"),
        (
            lambda body: body["results"][0].update(label="x"),
            r"results\[0\].*unknown keys \['label'\]",
        ),
        (lambda body: body["results"][0].pop("nll"), r"results\[0\]: Row misses keys \['nll'\]"),
        (
            lambda body: body["results"][0].update(nll="1"),
            r"results\[0\]\.nll is '1', expected float",
        ),
        (lambda body: body["results"][0]["method"].update(polish=1), r"polish is 1, expected bool"),
        (lambda body: body.update(device="cpu"), r"device is 'cpu', expected an object"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_by_file_and_key(change, words, tmp_path):
    path = record(row()).save(tmp_path / "record.json")
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    with pytest.raises(RunError, match=rf"{path}.*{words}"):
        Record.load(path)


def test_a_file_that_is_no_record_says_what_to_do(tmp_path):
    with pytest.raises(RunError, match=r"does not exist: .*finish the run first"):
        Record.load(tmp_path / "record.json")
    (tmp_path / "record.json").write_text("[1]")
    with pytest.raises(RunError, match=r"is not a JSON object \(list\)"):
        Record.load(tmp_path / "record.json")


@dataclass(frozen=True)
class Salted(Method):
    """A method with another dimension: one field, as a new one would be written."""

    salt: str = dimension("none", label=lambda name: f"{name} salt", title=lambda s: f"salt {s}")


def test_another_dimension_is_one_field(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "Method", Salted)
    monkeypatch.setattr(stored, "_hints", get_type_hints)  # which keeps a class's types
    plain = Salted(search="differentiable", quantized="W+A")
    salted, kl = (
        dataclasses.replace(plain, salt="sea"),
        dataclasses.replace(plain, search="kl", salt="sea"),
    )
    saved = record(row(plain), row(salted), row(kl))
    assert Record.load(saved.save(tmp_path / "record.json")) == saved
    old = saved.to_dict()
    del old["results"][0]["method"]["salt"]
    assert Record.from_dict(old, "of before its time") == saved
    assert (salted.label, salted.short_label) == ("dMX + sea salt", "dMX")
    assert salted.titles()["salt"] == "salt sea"
    assert salted.kind == kl.kind != plain.kind and salted.without("salt") == plain
    # and what is written about results: groups, table, legend, comparison, titles of pooled tables
    groups = group_rows(saved.rows)
    assert [group.label for group in groups] == ["dMX", "dMX + sea salt", "kl + sea salt"]
    page = str(results_table(groups))
    assert "dMX + sea salt" in page and "kl + sea salt" in page
    (claim,) = verdicts(saved.rows)
    assert claim.against == "kl + sea salt" and "dMX + sea salt" in claim.text
    figure = pareto(groups)
    texts = [text.get_text() for axes in figure.axes for text in (*axes.texts, *legend(axes))]
    assert any("dMX + sea salt" in text for text in texts)
    titles = [Table.of("m", "text", group.method).title for group in groups]
    assert "salt sea" in titles[1] and titles[0] != titles[1] == titles[2]


def legend(axes):
    """Texts of an axes' legend."""
    found = axes.get_legend()
    return [] if found is None else found.get_texts()
