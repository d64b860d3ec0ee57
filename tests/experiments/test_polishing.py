"""What search.polish.rounds=auto, of the default search, becomes."""

from types import SimpleNamespace

import pytest
import torch

from experiments.compare import CompareRun
from experiments.running.composing import build_root
from experiments.running.polishing import automatic_rounds, polished_rounds
from tests.experiments.test_configs import built, composed


@pytest.mark.parametrize(
    ("weights", "batches", "device", "is_whole", "reason"),
    [
        ("nearest", 8, "cuda", True, ""),
        ("nearest", 7, "cuda", True, "7 calibration batches are too few (from 8 on)"),
        ("nearest", 8, "cpu", True, "not on a GPU"),
        ("nearest", 8, "cuda", False, "block by block or sharded"),
        *(
            (name, 8, "cuda", True, f"weights={name} changes")
            for name in ("mse", "gptq", "learned")
        ),
    ],
)
def test_auto_is_a_polish_where_its_gain_stays_and_costs_little(
    weights, batches, device, is_whole, reason
):
    rounds, because = automatic_rounds(weights, batches, torch.device(device), is_whole=is_whole)
    assert rounds == (0 if reason else polished_rounds()) and reason in because
    assert polished_rounds() == 12


def test_a_plan_takes_what_the_run_has_and_says_so():
    said = []
    run = SimpleNamespace(device=torch.device("cuda"), memory="all", shards=False, say=said.append)
    bench = SimpleNamespace(run=run, batches=lambda seed: [torch.zeros(1)] * 8)
    config = built("search.polish.batches=2", "calibration.batches=8")
    plan, facts = config.plan.settled(bench)
    assert (plan.search.polish.count, plan.search.polish.batches) == (12, 2)
    assert plan.search.for_search("adaptive").summary().polish_rounds == 12
    assert facts == {"polish": {"rounds": 12, "because": said[0].partition(": ")[2]}}
    assert said[0].startswith("search.polish.rounds=auto is 12: ")
    run.device = torch.device("cpu")
    plan, facts = config.plan.settled(bench)
    assert (plan.search.polish.count, plan.search.polish.batches) == (0, None)
    assert facts["polish"]["rounds"] == 0 and "not on a GPU" in said[1]
    asked = built("search.polish.rounds=3").plan
    assert asked.settled(bench) == (asked, {}) and asked.search.polish.count == 3
    assert len(said) == 2


@pytest.mark.parametrize(
    ("searches", "rounds"), [("kl_per_bit,adaptive", 0), ("adaptive,adaptive+polish", 12)]
)
def test_a_comparison_polishes_what_its_names_say(searches, rounds):
    asked = composed("compare", "search=adaptive", "data=synthetic", f"searches=[{searches}]")
    plan = build_root(CompareRun, asked).plan
    assert plan.settings.polish.count == rounds
    polished = [plan.of(asked, 0).polish.count for asked in plan.searches]
    assert polished == [0, rounds]
