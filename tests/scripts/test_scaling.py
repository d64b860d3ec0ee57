"""The model of a step's seconds and memory: costs that are known are found, and records that say less are refused."""

import copy
import json

import pytest

from dmx.errors import RunError
from experiments.reporting.pages.scaling import scaling_page
from experiments.reporting.scaling import (
    MIB,
    SCHEMA,
    Facts,
    Growth,
    Step,
    fit_one_card,
    fit_several,
    own_step,
)
from scripts import make_tables
from scripts.benchmarks.growth import ALONE, ASKED, SHAPES, TOGETHER

LAUNCH, RATE, BLOCKS, MEETING = 2e-3, 2e11, 3.0, 1e-3


def seconds_of(s, tokens, length):
    """600 TFLOP/s, and what else a card might take."""
    flops = tokens * (8 * s["quantized"] + 6 * s["vocab"] * s["hidden"])
    inputs = s["layers"] * tokens * (6 * s["hidden"] + s["intermediate"])
    attention = s["layers"] * s["hidden"] * tokens * length
    return (
        2e-3
        + 1e-4 * s["layers"]
        + flops / 6e14
        + 5e-12 * s["quantized"]
        + 2e-11 * inputs
        + 3e-14 * attention
        + 1e-10 * tokens * s["vocab"]
    )


def activations_mib(s, tokens):
    """In MiB: 300, four bytes a number of the largest weight, and of activations."""
    by_layer = s["layers"] * tokens * (12 * s["hidden"] + 10 * s["intermediate"])
    return 300 + (4 * s["hidden"] * s["intermediate"] + by_layer + 14 * tokens * s["vocab"]) / MIB


def weights_mib(s):
    return 2 * (s["quantized"] + s["outer"]) / MIB


def made_row(s, way, rows, length, cards):
    tokens = rows * length // cards
    seconds, mib = seconds_of(s, tokens, length), activations_mib(s, tokens)
    held = weights_mib(s)
    if way == "whole":
        seconds += MEETING
    if way == "sharded":
        held /= cards
        over = 3 * 2 * (s["quantized"] + s["outer"]) * (1 - 1 / cards)
        seconds = max(seconds, LAUNCH * s["layers"]) + over / RATE
        mib += 2 * (s["outer"] + BLOCKS * s["quantized"] / s["layers"]) / MIB
    return s | {
        "way": way,
        "weights_mib": held,
        "rows": rows,
        "length": length,
        "settings": {"objective": "kl"},
        "search_seconds": seconds,
        "search_mib": held + mib,
        "graph": way != "sharded",
    }


def body(cards):
    ways = ("alone",) if cards == 1 else ("whole", "sharded")
    return {
        "schema": SCHEMA,
        "machine": {"name": "card", "torch": "2.11", "when": "2026-11-29"},
        "card_mib": 143000.0,
        "processes": cards,
        "asked": [shape.facts() for shape in ASKED],
        "rows": [
            made_row(shape.facts(), way, *batch, cards)
            for shape in SHAPES
            for way in ways
            for batch in (ALONE if cards == 1 else TOGETHER)
        ],
        "seconds": 100.0,
    }


def test_known_costs_are_found_and_carry_to_shapes_that_nobody_measured():
    alone = Growth.from_dict(body(1), "one")
    one = fit_one_card(alone.rows)
    assert one.seconds.costs["product"] == pytest.approx(1 / 6e14, rel=1e-3)
    assert one.seconds.costs["weight"] == pytest.approx(5e-12, rel=1e-3)
    assert one.mib.costs["intermediate"] == pytest.approx(10, rel=1e-3)
    large = ASKED[-1].facts()
    seconds, mib = one.cost(Step(Facts(**large), 2048, 1024), weights_mib(large))
    assert seconds == pytest.approx(seconds_of(large, 2048, 1024), rel=1e-3)
    assert mib == pytest.approx(weights_mib(large) + activations_mib(large, 2048), rel=1e-3)
    together = Growth.from_dict(body(2), "two")
    several = fit_several(one, together.rows, 2)
    assert several.meeting == pytest.approx(MEETING, rel=0.02)
    assert several.launch == pytest.approx(LAUNCH, rel=0.02)
    assert several.rate == pytest.approx(RATE, rel=0.05)
    assert several.blocks == pytest.approx(BLOCKS, rel=1e-2)
    for cards, way in ((8, "whole"), (64, "sharded")):
        expected = made_row(large, way, cards, 1024, cards)
        found = several.cost(Facts(**large), 1024, 1024, cards, way, several.rate)
        measured = expected["search_seconds"], expected["search_mib"]
        assert found == pytest.approx(measured, rel=0.02)
    assert own_step(together.rows[0], 2).tokens == together.rows[0].rows * 512


def test_the_page_says_how_far_off_the_unseen_size_is_and_what_does_not_fit(monkeypatch, tmp_path):
    one, two = body(1), body(2)
    for row in one["rows"]:
        if row["model"] == "Llama-3.1-8B":  # a card that is slower there than its terms say
            row["search_seconds"] *= 1.25
    one["rows"].append(one["rows"][0] | {"graph": False, "search_seconds": 0.5})
    one["rows"].append(one["rows"][0] | {"search_seconds": None, "search_mib": None, "graph": None})
    monkeypatch.setattr(make_tables, "RECORDS", tmp_path)
    monkeypatch.setattr(make_tables, "RESULTS", tmp_path)
    for name, record in {"growth_1": one, "growth_2": two}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    files = {
        path.name: data
        for path, data in make_tables.differing(make_tables.outputs(), check=False).items()
    }
    assert set(files) == {"README.md", "scaling.md", "scaling.png"}
    assert (
        files["scaling.png"].startswith(b"\x89PNG")
        and b"[scaling](scaling.md)" in files["README.md"]
    )
    text = files["scaling.md"].decode()
    assert (
        "it predicts those of Llama-3.1-8B within 20% of the seconds and 0% of the memory" in text
    )
    assert "](scaling.png)" in text
    assert "| Llama-3.1-8B | 4 | -20% | 20% | +0% | 0% |" in text
    assert text.count("out of memory") == 1 and "| no | – | 500.0 | – |" in text
    lines = {tuple(line.split(" | ")[:3]): line for line in text.splitlines()}
    assert "does not fit" in lines["| Llama-3.1-70B", "1", "alone"]
    assert "does not fit" not in lines["| Llama-3.1-70B", "8", "sharded"]
    assert "does not fit" in lines["| Llama-3.1-405B", "8", "sharded"]
    assert "objective=kl: `python" in text
    alone, _ = scaling_page({"growth_1": one | {"steps": 7}})
    assert "objective=kl, median of 7 steps: `python" in alone
    assert "| 64 |" not in alone and "Several cards were not measured" in alone


def test_records_that_do_not_carry_a_fit_are_refused():
    def refused(why, *bodies):
        with pytest.raises(RunError, match=why):
            scaling_page({f"growth_{i}": b for i, b in enumerate(bodies)})

    good, broken = body(1), copy.deepcopy(body(1))
    del broken["rows"][0]["layers"]
    refused(r"growth_0\.rows\[0\]: Measured misses keys \['layers'\]", broken)
    refused(r"growth_0\.card_mib is None", good | {"card_mib": None})
    refused("both of 1 cards", good, good)
    refused("wanted are one of 1 card", body(2))
    refused("of different cards", good, body(2) | {"machine": {"name": "other"}})
    few = "record growth_0: a fit of 7 terms to 4 measurements: .* or delete the record"
    refused(few, good | {"rows": good["rows"][:4]})
    few = "record growth_0: without Llama-3.2-1B: a fit of 7 terms to 4 measurements"
    refused(few, good | {"rows": good["rows"][:8]})
    few = "record growth_1: 0 rows with sharded weights"
    refused(few, good, body(2) | {"rows": body(2)["rows"][:2]})
    zero = [good["rows"][0] | {"search_mib": 0.0}, *good["rows"][1:]]
    refused("above zero: take the row out", good | {"rows": zero})
    for way in ("whole", "sharded"):
        two = body(2)
        next(row for row in two["rows"] if row["way"] == way)["search_seconds"] = None
        refused(f"{way}, 2 x 1024 has search_seconds=None", good, two)
