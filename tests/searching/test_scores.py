"""Score files are used when everything that they depend on is the same, and never otherwise."""

import json
import time

import numpy as np
import pytest
import torch

import dmx
from dmx.assignment.budget import Budget
from dmx.assignment.rules import ScaleRulesConfig
from dmx.assignment.space import build_space
from dmx.errors import RunError
from dmx.formats import get_family
from dmx.searching.knapsack import solve_knapsack
from dmx.searching.scan import Scan
from tests.settings import search_config


@pytest.fixture
def model(tiny_random):
    return tiny_random.model


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 250, (2, 32), generator=generator) for _ in range(3)]


@pytest.fixture
def scans(monkeypatch):
    """Counts scans of each kind."""
    counted = []
    for kind in ("_scan_kl", "_scan_fisher", "_scan_weights"):
        original = getattr(Scan, kind)

        def wrapped(self, *args, _original=original, _kind=kind):
            counted.append(_kind)
            return _original(self, *args)

        monkeypatch.setattr(Scan, kind, wrapped)
    return counted


def run(model, batches, folder, limit=5.0, **settings):
    config = search_config(**{"name": "kl_per_bit", "units": "layer"} | settings)
    return dmx.search(model, batches, Budget(limit), config, score_folder=folder)


def test_another_budget_or_method_of_the_same_scores_scans_nothing(model, batches, scans, tmp_path):
    run(model, batches, tmp_path)
    assert scans == ["_scan_kl"]
    run(model, batches, tmp_path, limit=4.5)
    run(model, batches, tmp_path, name="kl")
    assert scans == ["_scan_kl"]
    # Three candidates share two with the family before: only MXFP8 is new.
    run(model, batches, tmp_path, family="mxfp8_mxfp6_mxfp4")
    assert scans == ["_scan_kl", "_scan_kl"]
    assert len(list(tmp_path.glob("*.json"))) == 3


@pytest.mark.parametrize(
    "change", ["token", "scale_rules", "unit", "weights", "score_batches", "code"]
)
def test_a_changed_input_makes_a_score_file_unused(
    change, model, batches, scans, tmp_path, monkeypatch
):
    run(model, batches, tmp_path)
    settings = {}
    if change == "token":
        batches = [b.clone() for b in batches]
        batches[1][0, 3] += 1
    elif change == "scale_rules":
        settings["scale_rules"] = ScaleRulesConfig(input={"mxfp4": "ceil"})
    elif change == "unit":
        settings["units"] = "fused"
    elif change == "score_batches":
        settings["score_batches"] = 2
    elif change == "code":
        monkeypatch.setattr("dmx.searching.scan.code_version", lambda _: "another")
    weight = next(model.parameters())
    try:
        with torch.no_grad():
            weight[0, 0] += 0.5 if change == "weights" else 0.0
        run(model, batches, tmp_path, **settings)
    finally:
        with torch.no_grad():
            weight[0, 0] -= 0.5 if change == "weights" else 0.0
    assert scans == ["_scan_kl", "_scan_kl"]


@pytest.fixture
def slow(monkeypatch):
    """Makes every batch of a scan of the KL take at least so many seconds."""
    batch_seconds, original = 0.2, Scan._kl_sums

    def slowly(self, *args):
        time.sleep(batch_seconds)
        return original(self, *args)

    monkeypatch.setattr(Scan, "_kl_sums", slowly)
    return batch_seconds


def test_scores_that_are_taken_over_count_as_long_as_their_scan_took(
    model, batches, slow, tmp_path
):
    first = run(model, batches, tmp_path)
    assert 3 * slow <= first.score_seconds <= first.seconds
    again = run(model, batches, tmp_path, limit=4.5)
    assert again.score_seconds == pytest.approx(first.score_seconds)
    assert again.seconds >= first.score_seconds
    # Two formats were scanned together; `kl` reads one.
    share = run(model, batches, tmp_path, name="kl")
    assert share.score_seconds == pytest.approx(first.score_seconds / 2)
    assert share.seconds >= share.score_seconds
    # A third format is scanned by itself, the others are taken over.
    more = run(model, batches, tmp_path, family="mxfp8_mxfp6_mxfp4")
    assert more.score_seconds >= first.score_seconds + 3 * slow
    assert more.seconds >= more.score_seconds
    assert run(model, batches, tmp_path, name="random").score_seconds is None


def test_a_scan_that_was_stopped_counts_the_time_of_the_parts_that_are_kept(
    model, batches, slow, tmp_path, monkeypatch
):
    original = Scan._save_all

    def interrupted(self, *args):
        original(self, *args)
        if args[-1] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Scan, "_save_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, batches, tmp_path)
    monkeypatch.setattr(Scan, "_save_all", original)
    resumed = run(model, batches, tmp_path)
    assert 3 * slow <= resumed.score_seconds <= resumed.seconds


@pytest.mark.parametrize("damage", ["cut", "number", "done", "schema"])
def test_a_damaged_score_file_is_an_error_that_names_it(damage, model, batches, tmp_path):
    run(model, batches, tmp_path)
    path = sorted(tmp_path.glob("*.json"))[0]
    if damage == "cut":
        path.write_text(path.read_text()[:-40])
    else:
        body = json.loads(path.read_text())
        if damage == "number":
            body["result"]["values"][0] *= 2
        elif damage == "done":
            body["result"]["done"] -= 1
        else:
            body["schema"] = "other/1"
        path.write_text(json.dumps(body))
    with pytest.raises(RunError, match=path.name):
        run(model, batches, tmp_path)


@pytest.mark.parametrize("name", ["kl_per_bit", "fisher", "aumann_shapley"])
def test_an_interrupted_scan_goes_on_to_the_same_scores(
    name, model, batches, tmp_path, monkeypatch
):
    whole = run(model, batches, tmp_path / "whole", name=name)
    saves = []
    original = Scan._save

    def interrupted(self, *args):
        original(self, *args)
        saves.append(args[-1].done)
        if len(saves) == 4:  # two formats, two of three batches
            raise KeyboardInterrupt

    monkeypatch.setattr(Scan, "_save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, batches, tmp_path / "cut", name=name)
    monkeypatch.undo()
    resumed = run(model, batches, tmp_path / "cut", name=name)
    np.testing.assert_array_equal(resumed.preference, whole.preference)
    assert saves[-1] == 2


def test_the_knapsack_is_that_of_brute_force():
    generator = np.random.default_rng(0)
    for trial in range(60):
        family = get_family(("mxfp6_mxfp4", "mxfp8_mxfp6_mxfp4")[trial % 2])
        n = int(generator.integers(1, 8))
        sizes = generator.integers(1, 9, n)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32 * int(s)) for s in sizes))
        space = build_space(model, family.formats, units="layer")
        scores = np.sort(generator.random((n, len(family.formats))) ** 4, axis=1)[:, ::-1]
        low, high = space.bounds("element_bits")
        budget = Budget(float(generator.uniform(low, high)))
        choice = solve_knapsack(space, budget, scores)
        assert space.average(choice, "element_bits") <= budget.limit
        choices = np.stack(
            np.meshgrid(*[range(len(family.formats))] * n, indexing="ij"), -1
        ).reshape(-1, n)
        fitting = [c for c in choices if space.average(c, "element_bits") <= budget.limit]
        best = min(scores[np.arange(n), c].sum() for c in fitting)
        assert scores[np.arange(n), choice].sum() == pytest.approx(best, rel=1e-9, abs=1e-12)
