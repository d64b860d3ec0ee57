"""compare: searches x budgets x seeds in one table; ablation; collecting; the safety net's rows."""

import csv
import json

import numpy as np
import pytest
import torch

import dmx
from dmx.assignment.assignment import Assignment, make_assignment
from dmx.assignment.space import build_space
from dmx.formats import get_family
from dmx.models.running import model_logits
from dmx.numerics import kl_divergence
from dmx.searching import SearchConfig
from dmx.searching.ablation import unit_ablation
from experiments import compare, evaluate
from experiments.reporting.agreement import agreement, raised_by_projection
from tests.settings import TINY, TINY_LAYERS


def test_every_search_budget_and_seed_is_a_row_within_its_budget(run, record_of, tmp_path):
    searches = ["uniform", "random", "kl", "kl_per_bit", "fisher", "weight_mse", "differentiable"]
    arguments = [
        *TINY_LAYERS,
        "search.steps=4",
        "budgets=[4.5,5.0]",
        f"searches=[{','.join(searches)}]",
        "seeds=2",
        f"run.folder={tmp_path}/run",
    ]
    code, _out, err = run(compare, *arguments)
    assert code == 0, err
    record = record_of(tmp_path / "run")
    searched = [r for r in record.rows if r.budget is not None]
    assert {(r.method.search, r.budget.limit, r.seed) for r in searched} == {
        (name, limit, seed) for name in searches for limit in (4.5, 5.0) for seed in (0, 1)
    }
    assert all(r.element_bits <= r.budget.limit for r in searched)
    rows = list(csv.DictReader((tmp_path / "run" / "results.csv").read_text().splitlines()))
    assert [float(r["perplexity"]) for r in rows] == [r.perplexity for r in record.rows]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Where searches agree" in page
    # One scan a seed and method serves both budgets.
    kinds = [json.loads(p.read_text())["key"]["kind"] for p in (tmp_path / "run/scores").iterdir()]
    assert sorted(kinds) == ["fisher"] * 4 + ["kl"] * 4 + ["weight_mse"] * 2


def test_another_seed_is_another_calibration_sample(run, tmp_path):
    code, _out, err = run(
        compare,
        *TINY_LAYERS,
        "budgets=[5.0]",
        "searches=[kl]",
        "seeds=2",
        f"run.folder={tmp_path}/run",
    )
    assert code == 0, err
    keys = [json.loads(p.read_text())["key"] for p in (tmp_path / "run/scores").iterdir()]
    assert len({key["batches"] for key in keys}) == 2


def test_the_safety_net_adds_a_row_that_is_no_seed_of_the_search(run, record_of, tmp_path):
    arguments = [
        *TINY_LAYERS,
        "budgets=[5.0]",
        "searches=[kl]",
        "safety=calibrated",
        "baselines=[nvfp4]",
    ]
    code, _out, err = run(compare, *arguments, f"run.folder={tmp_path}/run")
    assert code == 0, err
    uniform, bare, net = record_of(tmp_path / "run").rows
    assert uniform.label == "uniform nvfp4"
    assert (bare.label, bare.method.net, bare.safety) == ("kl", False, None)
    assert (net.label, net.method.search, net.method.net) == ("kl + net", "kl", True)
    assert net.safety["fallback_rate"] >= 0
    assert (tmp_path / "run" / "kl-5-seed0" / "assignment.safety.json").exists()
    code, _out, err = run(
        evaluate,
        *TINY,
        f"assignments=[{tmp_path}/run/kl-5-seed0/assignment.json]",
        "safety=calibrated",
        f"run.folder={tmp_path}/again",
    )
    assert code == 0, err
    again = record_of(tmp_path / "again").rows
    assert [r.nll for r in again] == [bare.nll, net.nll]


def test_polished_searches_are_rows_of_their_own(run, record_of, tmp_path):
    searches = "searches=[kl,kl+polish,differentiable,differentiable+polish]"
    arguments = [
        *TINY_LAYERS,
        "budgets=[4.7]",
        "baselines=[]",
        "search.steps=4",
        searches,
        "search.polish.rounds=2",
    ]
    code, _out, err = run(compare, *arguments, f"run.folder={tmp_path}/run")
    assert code == 0, err
    rows = record_of(tmp_path / "run").rows
    kinds = [(name, polish) for name in ("kl", "differentiable") for polish in (False, True)]
    assert [(r.method.search, r.method.polish) for r in rows] == kinds
    assert [r.method.is_heuristic for r in rows] == [True, False, False, False]
    assert [r.label for r in rows] == ["kl", "kl + polish", "dMX", "dMX + polish"]
    assert all(r.element_bits <= 4.7 and r.search_seconds > 0 for r in rows)
    for name in ("kl+polish", "differentiable+polish"):
        folder = tmp_path / "run" / f"{name}-4.7-seed0"
        log = [json.loads(line) for line in (folder / "polish.jsonl").read_text().splitlines()]
        assert log[-1]["kl"] == Assignment.load(folder / "assignment.json").search.kl
    code, _out, err = run(
        evaluate,
        *TINY,
        f"assignments=[{folder}/assignment.json]",
        f"run.folder={tmp_path}/again",
    )
    assert code == 0, err
    assert record_of(tmp_path / "again").rows[0].label == "dMX + polish"
    for options in (["searches=[kl]", "search.polish.rounds=2"], ["searches=[kl+polish]"]):
        code, _out, err = run(compare, *TINY_LAYERS, *options, f"run.folder={tmp_path}/bad")
        assert code and "polished if its name says so" in err
    bad = ["searches=[kl]", "search.steps=3"]
    code, _out, err = run(compare, *TINY_LAYERS, *bad, f"run.folder={tmp_path}/bad")
    assert code and "search.steps=3: none of searches=[kl] uses it" in err
    bad = ["searches=[uniform+polish]", "search.polish.rounds=2"]
    code, _out, err = run(compare, *TINY_LAYERS, *bad, f"run.folder={tmp_path}/bad")
    assert code and "search.polish.rounds=2 is not for search.name=uniform" in err


def test_separate_operands_are_rows_of_their_own_kind(run, record_of, tmp_path):
    """Searched, measured again from the files, ablated, and joined with the joint rows."""
    for operands in ("joint", "separate"):
        code, _out, err = run(
            compare,
            *TINY_LAYERS,
            "budgets=[5.0]",
            "searches=[random,differentiable]",
            "search.steps=4",
            "baselines=[]",
            f"search.choices={operands}",
            f"run.folder={tmp_path}/runs/{operands}",
        )
        assert code == 0, err
    rows = record_of(tmp_path / "runs/separate").rows
    assert [r.label for r in rows] == ["random, separate choices", "dMX, separate choices"]
    assert all((r.method.choices, r.method.quantized) == ("separate", "W+A") for r in rows)
    assert all(r.element_bits <= 5.0 for r in rows)
    path = tmp_path / "runs/separate" / rows[0].assignment
    assert Assignment.load(path).unequal
    code, _out, err = run(evaluate, *TINY, f"assignments=[{path}]", f"run.folder={tmp_path}/again")
    assert code == 0, err
    (again,) = record_of(tmp_path / "again").rows
    assert (again.nll, again.method) == (rows[0].nll, rows[0].method)
    code, _out, err = run(
        compare,
        *TINY_LAYERS,
        f"ablate={path}",
        "search.choices=separate",
        f"run.folder={tmp_path}/b",
    )
    assert code == 0, err
    written = json.loads((tmp_path / "b" / "ablation.json").read_text())
    assert len(written) == 2 * len(Assignment.load(path).formats)
    code, _out, err = run(compare, *TINY_LAYERS, f"ablate={path}", f"run.folder={tmp_path}/c")
    assert code and "search.choices=joint. Set them as they were" in err
    code, _out, err = run(compare, f"collect={tmp_path}/runs", f"run.folder={tmp_path}/joined")
    assert code == 0, err
    joined = record_of(tmp_path / "joined").rows
    assert [r.method.choices for r in joined] == ["joint"] * 2 + ["separate"] * 2
    assert "<h3>Separate choices</h3>" in (tmp_path / "joined" / "report.html").read_text()
    bad = ["searches=[weight_mse]", "search.choices=separate"]
    code, _out, err = run(compare, *TINY_LAYERS, *bad, f"run.folder={tmp_path}/bad")
    assert code and "search.choices=separate with search.name=weight_mse" in err


def test_records_of_different_models_are_not_joined(run, tmp_path):
    for name, model in (("a", "tiny_random"), ("b", "tiny_random")):
        extra = ["model.tiny.seed=7", "model.tiny.hidden_size=96"] if name == "b" else []
        code, _out, err = run(
            evaluate,
            *TINY,
            f"model={model}",
            *extra,
            "assignments=[bf16]",
            f"run.folder={tmp_path}/runs/{name}",
        )
        assert code == 0, err
    code, _out, err = run(compare, f"collect={tmp_path}/runs", f"run.folder={tmp_path}/joined")
    assert code == 2 and "another model" in err


def test_a_folder_without_runs_cannot_be_collected(run, tmp_path):
    (tmp_path / "empty").mkdir()
    code, _out, err = run(compare, f"collect={tmp_path}/empty", f"run.folder={tmp_path}/joined")
    assert code == 2 and "holds no finished run" in err


def test_ablation_measures_what_lowering_and_raising_a_unit_does(tiny_random, run, tmp_path):
    model = tiny_random.model
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 250, (2, 32), generator=generator) for _ in range(2)]
    config = SearchConfig(units="layer", objective="kl")
    space = build_space(model, get_family(config.family).formats, units="layer")
    choice = np.zeros(len(space.units), dtype=np.int64)
    choice[0] = 1
    rows = unit_ablation(model, batches, space, choice, config)
    assert [r["unit"] for r in rows] == [u.name for u in space.units]
    assert rows[0]["gain_if_raised"] is None
    assert all(r["loss_if_lowered"] is None for r in rows[1:])

    def loss(changed):
        """Mean KL to the full-precision model, by applying the assignment itself."""
        full = [model_logits(model, b).detach() for b in batches]
        dmx.apply(model, make_assignment(space, changed, model))
        try:
            quantized = [model_logits(model, b).detach() for b in batches]
        finally:
            dmx.restore(model)
        pairs = zip(full, quantized, strict=True)
        return np.mean([float(kl_divergence(f, q)) for f, q in pairs])

    lowered, raised = np.zeros_like(choice), choice.copy()
    raised[3] = 1
    base = loss(choice)
    # Rows' KLs are sums of float32 in another order: 1e-7 nats of rounding.
    assert rows[0]["loss_if_lowered"] == pytest.approx(loss(lowered) - base, abs=1e-7)
    assert rows[3]["gain_if_raised"] == pytest.approx(base - loss(raised), abs=1e-7)
    code, _out, _err = run(
        compare,
        *TINY_LAYERS,
        "budgets=[5.0]",
        "searches=[kl]",
        "baselines=[]",
        f"run.folder={tmp_path}/a",
    )
    path = tmp_path / "a" / "kl-5-seed0" / "assignment.json"
    code, out, err = run(compare, *TINY_LAYERS, f"ablate={path}", f"run.folder={tmp_path}/b")
    assert code == 0, err
    assert "raised" in out and "nats/token" in out
    written = json.loads((tmp_path / "b" / "ablation.json").read_text())
    assert len(written) == len(Assignment.load(path).formats)


def test_agreement_weighs_layers_by_their_weights():
    shapes = {"m.layers.0.q_proj": [32, 32], "m.layers.0.down_proj": [32, 96]}
    a = {
        "formats": {"m.layers.0.q_proj": "mxfp4", "m.layers.0.down_proj": "mxfp6_e2m3"},
        "shapes": shapes,
    }
    b = {
        "formats": {"m.layers.0.q_proj": "mxfp4", "m.layers.0.down_proj": "mxfp4"},
        "shapes": shapes,
    }
    assert agreement(a, b) == 0.25
    apart = a | {"input_formats": b["formats"]}
    assert agreement(a, apart) == agreement(apart, b) == 0.625
    assert raised_by_projection(apart) == {"q": 0.0, "down": 0.5}
    assert raised_by_projection(a) == {"q": 0.0, "down": 1.0}
