"""Searches over experts: their units, bits, scores and layers; applied, on disk and again."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

import dmx
from dmx.assignment.projection import is_maximal
from dmx.errors import AssignmentError, FormatError, ModelError
from dmx.formats import MXFP4
from dmx.searching import search_space, uniform_assignment
from dmx.searching.config import SearchConfig
from tests.mixtures import BLOCKS, STACKED, logits, mixture, token_ids
from tests.settings import search_config

pytestmark = pytest.mark.filterwarnings("ignore:.* experts are given fewer than")


def found(model, limit=5.0, *, folder=None, **settings):
    return dmx.search(
        model, token_ids(), dmx.Budget(limit), search_config(**settings), folder=folder
    )


@pytest.fixture(scope="module")
def model():
    return mixture()


@pytest.mark.parametrize(
    "settings, names",
    [
        ({}, STACKED),
        ({"units": "layer"}, STACKED),
        ({"target": "vllm", "family": "mxfp8_mxfp4"}, BLOCKS),
        (
            {"experts": "each"},
            [f"{b}.{e}.{k}" for b in BLOCKS for e in range(4) for k in ("{gate_proj,up_proj}", "down_proj")],
        ),
        (
            {"experts": "each", "units": "layer"},
            [f"{b}.{e}.{k}_proj" for b in BLOCKS for e in range(4) for k in ("gate", "up", "down")],
        ),
    ],
)  # fmt: skip
def test_units_of_experts(model, settings, names):
    space = search_space(model, SearchConfig(**settings))
    assert [u.name for u in space.units if "experts" in u.name] == names
    assert sum(u.elements for u in space.units if "experts" in u.name) == 2 * 4 * 3 * 32 * 64
    assert not any("gate." in name or name.endswith(".gate") for name in space.shapes)


@pytest.mark.parametrize("experts", ["block", "each"])
@pytest.mark.parametrize("name", ["kl_per_bit", "fisher", "weight_mse", "differentiable"])
def test_every_search_knows_experts(model, name, experts):
    before = logits(model)
    done = found(model, name=name, experts=experts, steps=3, penalty="exact", objective="kl")
    assignment = done.assignment
    space = search_space(model, SearchConfig(experts=experts))
    choice = space.choice_of(assignment.formats)
    assert space.average(choice, "element_bits") == assignment.bits["element_bits"] <= 5.0
    assert np.isfinite(done.preference).all()
    if experts == "block":
        assert is_maximal(space, dmx.Budget(5.0), choice)
        assert set(STACKED) <= set(assignment.formats)
        assert assignment.shapes[STACKED[0]] == (4 * 64, 64)
        assert assignment.experts == dict.fromkeys(STACKED, 4)
    assert torch.equal(logits(model), before)


def test_the_forms_agree_on_scores_and_on_a_whole_model(model):
    """The same model in the same format, said in both ways."""
    one = uniform_assignment(model, MXFP4, SearchConfig(name="uniform"))
    each = uniform_assignment(model, MXFP4, SearchConfig(name="uniform", experts="each"))
    assert one.bits == each.bits
    results = []
    for assignment in (one, each):
        dmx.apply(model, assignment)
        results.append(logits(model))
        dmx.restore(model)
    assert torch.equal(*results)
    assert not torch.equal(results[0], logits(model))
    scores = []
    for experts in ("block", "each"):
        space = search_space(model, SearchConfig(experts=experts))
        preference = found(model, name="weight_mse", experts=experts).preference[:, 0]
        gains = preference * space.weights * 2
        scores.append(sum(gains[i] for i, u in enumerate(space.units) if BLOCKS[0] in u.name))
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_gradients_of_experts_are_those_of_each_expert(model):
    """One step of the descent in both forms: a unit's gradient is the sum of those of its experts."""
    gradients = []
    for experts in ("block", "each"):
        done = found(
            model, name="differentiable", experts=experts, steps=1, momentum=0.0, nesterov=False, slope=0.0, raw_start=1.0,
        )  # fmt: skip
        moved = done.raw_offsets[1] - done.raw_offsets[0]
        gradients.append(sum(m for m, u in zip(moved, done.units, strict=True) if BLOCKS[1] in u))
    assert gradients[0] == pytest.approx(gradients[1], abs=5e-7)  # what 1 + x keeps of x
    assert abs(gradients[0]) > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fisher", "kl_per_bit", "differentiable"])
def test_on_a_card_both_forms_search_and_agree(dtype, name):
    model = mixture(dtype=dtype).cuda()
    before = logits(model)
    for experts in ("block", "each"):
        done = found(model, name=name, experts=experts, steps=2)
        dmx.apply(model, done.assignment)
        assert bool(logits(model).isfinite().all())
        dmx.restore(model)
        assert torch.equal(logits(model), before)
    seen = []
    for experts in ("block", "each"):
        config = SearchConfig(name="uniform", experts=experts)
        dmx.apply(model, uniform_assignment(model, MXFP4, config))
        seen.append(logits(model).float())
        dmx.restore(model)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert float((seen[0] - seen[1]).norm() / seen[0].norm()) < tolerance


def test_an_assignment_is_kept_checked_and_applied(model, tmp_path):
    done = found(model, name="random", folder=tmp_path / "run").assignment
    kept = dmx.Assignment.load(done.save(tmp_path / "assignment.json"))
    assert kept.experts == done.experts and kept.expert_tokens == done.expert_tokens
    assert list(kept.expert_tokens) == BLOCKS
    assert [sum(counts) for counts in kept.expert_tokens.values()] == [2 * 2 * 16 * 3] * 2
    assert kept.formats == done.formats
    known = json.loads((tmp_path / "run" / "unreached.json").read_text())
    assert known["expert_tokens"] == done.expert_tokens
    before = logits(model)
    dmx.apply(model, kept)
    assert not torch.equal(logits(model), before)
    dmx.restore(model)
    assert torch.equal(logits(model), before)
    body = json.loads((tmp_path / "assignment.json").read_text())
    body["experts"][STACKED[0]] = 3
    with pytest.raises(AssignmentError, match=rf"experts of {STACKED[0]} is 3, expected a divisor"):
        dmx.Assignment.from_dict(body)


def test_active_elements_weigh_experts_by_the_share_that_a_token_meets(model):
    plain, active = (
        search_space(model, SearchConfig(weighting=weighting))
        for weighting in ("elements", "active")
    )
    cheap, dear = 4.0, 6.0
    is_expert = np.array(["experts" in u.name for u in plain.units])
    choice = is_expert.astype(int)
    elements = np.array([u.elements for u in plain.units], dtype=float)
    for space, share in ((plain, 1.0), (active, 3 / 4)):
        weights = elements * np.where(is_expert, share, 1.0)
        wanted = (weights @ np.where(is_expert, dear, cheap)) / weights.sum()
        assert space.average(choice, "element_bits") == pytest.approx(wanted, abs=1e-12)
    done = found(model, name="kl_per_bit", weighting="active").assignment
    assert done.search.weighting == "active"
    assert done.bits["element_bits"] <= 5.0
    assert (
        active.average(active.choice_of(done.formats), "element_bits") == done.bits["element_bits"]
    )
    assert dmx.Assignment.from_dict(json.loads(json.dumps(body_of(done)))).bits == done.bits


def body_of(assignment):
    fields = {
        k: v
        for k, v in vars(assignment).items()
        if k not in ("folder", "unsaved") and v is not None
    }
    required = dict.fromkeys(("input_formats", "transform", "weights"))
    return {
        "schema": "dmx.assignment/2",
        **required,
        **fields,
        "search": assignment.search.to_dict(),
    }


def test_what_does_not_go_together_is_refused(model):
    with pytest.raises(FormatError, match=r"search\.target=vllm needs search\.experts=block"):
        SearchConfig(experts="each", target="vllm", family="mxfp8_mxfp4")
    told = {"target": "vllm_humming", "input_format": "bf16", "family": "mxfp8_mxfp4"}
    with pytest.raises(
        FormatError, match=r"quantized experts is not known here \(\d+ layers, first model"
    ):
        search_space(model, SearchConfig(**told))
    assert search_space(model, SearchConfig(**told, exclude=["*.experts.*"])).units
    with pytest.raises(FormatError, match=r"search\.experts='some'.*block, each"):
        SearchConfig(experts="some")
    dense = nn.Module()
    dense.experts = nn.ModuleList([nn.Sequential(nn.Linear(32, 32))])
    with pytest.raises(ModelError, match=r"weighting=active: .*num_experts_per_tok=None"):
        search_space(dense, SearchConfig(weighting="active"))


@pytest.mark.parametrize("experts", [None, 8])
def test_an_assignment_that_counts_other_experts_is_refused(model, experts):
    made = uniform_assignment(model, MXFP4, SearchConfig(name="uniform"))
    counts = experts and dict.fromkeys(made.experts, experts)
    with pytest.raises(
        AssignmentError, match=rf"experts .* says {experts} of .*gate_up_proj, and .* has 4"
    ):
        dmx.apply(model, dataclasses.replace(made, experts=counts))


def test_experts_of_whom_little_is_known_are_named(model):
    with pytest.warns(
        UserWarning, match=r"8 of 8 experts are given fewer than 64 .*fewest model\.layers"
    ):
        found(model, name="random", experts="each")


class Listed(nn.Module):
    """Experts as modules of linear layers, of which tokens reach the first alone."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.block = nn.Module()
        self.block.experts = nn.ModuleList(
            [nn.ModuleDict({"w1": nn.Linear(32, 32), "w2": nn.Linear(32, 32)}) for _ in range(3)]
        )
        for expert in self.block.experts:
            expert.forward = lambda x, e=expert: e["w2"](e["w1"](x))
        self.head = nn.Linear(32, 96)

    def forward(self, input_ids, **_):
        x = self.embed(input_ids)
        return type("Out", (), {"logits": self.head(x + self.block.experts[0](x))})()


@pytest.mark.filterwarnings("ignore:.*run by no calibration token")
def test_experts_that_are_modules_share_a_choice_or_have_their_own():
    block = found(Listed(), name="random")
    assert block.units == ("block.experts.*.{w1,w3}", "block.experts.*.w2", "head")
    assert block.assignment.expert_tokens == {"block.experts": [64, 0, 0]}
    each = found(Listed(), name="random", experts="each")
    assert each.units == ("block.experts.0.w1", "block.experts.0.w2", "head")
    assert "block.experts.2.w1" in each.assignment.unquantized


def test_learned_weights_and_gptq_of_stacked_experts(model):
    assignment = uniform_assignment(model, MXFP4, SearchConfig(name="uniform"))
    batches = token_ids()
    rounded = dmx.gptq(model, assignment, batches)
    each = uniform_assignment(model, MXFP4, SearchConfig(name="uniform", experts="each"))
    apart = dmx.gptq(model, each, batches)
    seen = []
    for one in (
        assignment,
        rounded,
        apart,
        dmx.learn_weights(model, assignment, batches, dmx.LearnConfig(steps=2)),
    ):
        dmx.apply(model, one)
        seen.append(logits(model))
        dmx.restore(model)
    assert torch.equal(seen[1], seen[2])  # one by one, and joined
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[3])
    assert rounded.formats == assignment.formats and rounded.weights["name"] == "gptq"
