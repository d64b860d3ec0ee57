"""nvfp4, fp8 and bf16 as candidates: every search, its budget and its assignment, and what comes after."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import dmx
import dmx.applying.apply
import dmx.models.running
import dmx.searching
from dmx.applying.linear import quantized_layers
from dmx.assignment.assignment import Assignment, make_assignment
from dmx.assignment.budget import Budget
from dmx.assignment.projection import is_maximal, project
from dmx.assignment.rules import ScaleRulesConfig
from dmx.assignment.space import build_space
from dmx.errors import AssignmentError, FormatError
from dmx.formats import BIT_UNITS, FP8, MXFP4, NVFP4, get_family
from dmx.numerics import fake_quant
from dmx.searching.config import (
    DESCENDING,
    SEARCHES,
    PolishConfig,
    RotationConfig,
    SearchConfig,
    SearchConfigError,
)
from dmx.searching.scan import Scan
from experiments.running.rows import method_of, scale_rules_text

FAMILY = ["nvfp4", "fp8", "bf16"]


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (2, 16), generator=generator) for _ in range(2)]


def toy(**layers):
    model = nn.Module()
    model.block = nn.ModuleDict(layers)
    return model


def config(name, **settings):
    if name in DESCENDING:
        settings = {"steps": 2, **settings}
    return SearchConfig(name=name, family=FAMILY, **settings)


# ---------------------------------------------------------------- bits


def test_bits_count_the_scales_of_blocks_rows_and_tensors():
    shape = (24, 96)
    assert NVFP4.bits_per_element == 4.5 and FP8.bits_per_element == 8
    assert NVFP4.bits("bits_per_element", shape) == 4.5 + 32 / (24 * 96)
    assert FP8.bits("bits_per_element", shape) == 8 + 32 / 96
    assert [f.bits("element_bits", shape) for f in (NVFP4, FP8)] == [4, 8]
    assert MXFP4.bits("bits_per_element", shape) == 4.25


@pytest.mark.parametrize("weighting", ["elements", "layers"])
@pytest.mark.parametrize("unit", BIT_UNITS)
def test_budgets_hold_exactly_whatever_the_shapes(unit, weighting, generator):
    sizes = [(32, 96), (96, 64), (1, 32), (160, 32), (7, 224)]
    model = toy(**{f"l{i}": nn.Linear(n, m, bias=False) for i, (m, n) in enumerate(sizes)})
    space = build_space(model, get_family(FAMILY).formats, weighting=weighting)
    rng = np.random.default_rng(0)
    low, high = space.bounds(unit)
    for limit in rng.uniform(low, high, 20):
        budget, wish = Budget(float(limit), unit), rng.random((5, 2))
        choice = project(space, budget, rng.integers(0, 3, 5), wish)
        assert is_maximal(space, budget, choice)
        formats = [space.formats[i] for i in choice]
        weights = [m * n if weighting == "elements" else 1 for m, n in sizes]
        by_hand = sum(
            w * f.bits(unit, shape) for w, f, shape in zip(weights, formats, sizes, strict=True)
        ) / sum(weights)
        assert space.average(choice, unit) == pytest.approx(by_hand, rel=1e-6)
        made = make_assignment(replace(space, input_amax={}), choice, model)
        if weighting == "elements":
            assert made.average_bits()[unit] == pytest.approx(made.bits[unit], abs=1e-9)
    stored = made.bits["whole_model_bits_per_element"] * space.model_elements
    shaped = [
        m * n * f.bits("bits_per_element", (m, n)) for f, (m, n) in zip(formats, sizes, strict=True)
    ]
    assert stored == pytest.approx(sum(shaped))


# ---------------------------------------------------------------- searches


@pytest.mark.parametrize(
    ("name", "choices"),
    [(name, "joint") for name in SEARCHES] + [("kl", "separate"), ("differentiable", "separate")],
)
def test_every_search_takes_them_and_its_assignment_survives_its_file(
    tiny_random, batches, name, choices, tmp_path
):
    model = tiny_random.model
    limit = 8.1 if name == "uniform" else 9.0
    budget = Budget(limit, "bits_per_element" if name != "uniform" else "element_bits")
    result = dmx.search(model, batches, budget, config(name, choices=choices))
    found = result.assignment
    assert found.bits[budget.unit] <= limit
    assert found.search.family == tuple(FAMILY)
    loaded = Assignment.load(found.save(tmp_path / "assignment.json"))
    assert loaded == found
    inputs = {k for k, f in loaded.block_formats("input").items() if f is NVFP4}
    assert set(loaded.input_amax or {}) == inputs
    if name in DESCENDING:  # so few batches leave an adaptive search with its scores
        assert found.search.path == (None if name == "adaptive" else "line")
    with dmx.applying.apply.applied(model, loaded):
        assert dmx.models.running.model_logits(model, batches[0]).isfinite().all()
        for layer, quantized in quantized_layers(model).items():
            assert (quantized.weight_quantizer is None) == (loaded.formats[layer] == "bf16")


def test_bf16_costs_nothing_and_a_dear_budget_chooses_it_everywhere(tiny_random, batches):
    model = tiny_random.model
    with pytest.warns(UserWarning, match="holds no layer back from bf16"):
        found = dmx.search(model, batches, Budget(16.0), config("fisher")).assignment
    assert set(found.formats.values()) == {"bf16"} and found.bits["bits_per_element"] == 16
    assert found.input_amax is None and found.quantized == ()
    before = dmx.models.running.model_logits(model, batches[0])
    with dmx.applying.apply.applied(model, found):
        assert torch.equal(dmx.models.running.model_logits(model, batches[0]), before)
    space = dmx.searching.search_space(model, config("kl"))
    space = dmx.searching.seeing_inputs(model, space, batches)
    for kind in ("kl", "fisher", "weight_mse"):
        scan = Scan(model, batches, space, config("kl"), fingerprint={"batches": ""}, folder=None)
        scores = scan.kl(range(3)) if kind == "kl" else getattr(scan, kind)()
        assert (scores[:, 2] <= 1e-9).all() and (scores[:, 0] > scores[:, 1]).all()


@pytest.mark.parametrize("transform", ["hadamard_block", "hadamard_full"])
def test_transforms_polish_gptq_and_learned_weights_go_on_from_them(
    tiny_random, batches, transform, tmp_path
):
    model = tiny_random.model
    settings = config("kl_per_bit", transform=transform, polish=PolishConfig(rounds=1))
    found = dmx.search(model, batches, Budget(7.5), settings).assignment
    assert {"nvfp4", "fp8"} <= set(found.formats.values())
    rounded = dmx.gptq(model, found, batches)
    learned = dmx.learn_weights(model, found, batches, dmx.LearnConfig(steps=1, warmup=0))
    for done in (rounded, learned):
        loaded = Assignment.load(done.save(tmp_path / "assignment.json"))
        logits = []
        for one in (done, loaded):
            if one.folder is None:
                one = one.with_contents() if one.unsaved else one
            with dmx.applying.apply.applied(model, one):
                logits.append(dmx.models.running.model_logits(model, batches[0]))
        assert torch.equal(*logits) and logits[0].isfinite().all()


def test_gptq_gives_values_of_the_format_and_less_error_of_the_output(generator):
    from dmx.weights.columns import fixed_amax, inverse_factor, round_weight

    x = torch.randn(256, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    weight = torch.randn(48, 64, generator=generator)
    factor = inverse_factor(x.T @ x, 0.01)
    for block_format in (NVFP4, FP8):
        rounded = round_weight(weight, factor, block_format, block_format.rules[0])
        amax = fixed_amax(weight, block_format)
        assert torch.equal(fake_quant(rounded, block_format, amax=amax), rounded)
        error = (x @ (rounded - weight).T).norm()
        assert error < 0.8 * (x @ (fake_quant(weight, block_format) - weight).T).norm()


# ---------------------------------------------------------------- inputs


def test_the_range_of_inputs_is_measured_once_and_needed(tiny_random, batches):
    model = tiny_random.model
    plain = dmx.searching.uniform_assignment(model, NVFP4, SearchConfig(name="uniform"))
    assert plain.input_amax is None
    with pytest.raises(AssignmentError, match=r"input_amax says nothing of .*calibrate_inputs"):
        dmx.apply(model, plain)
    dmx.restore(dmx.apply(model, plain, inputs=False))
    done = dmx.calibrate_inputs(model, plain, batches)
    layer = "model.layers.0.mlp.down_proj"
    seen = []
    handle = model.get_submodule(layer).register_forward_pre_hook(
        lambda _m, args: seen.append(args[0].abs().max().item())
    )
    for batch in batches:
        dmx.models.running.model_logits(model, batch)
    handle.remove()
    assert done.input_amax[layer] == max(seen) and set(done.input_amax) == set(done.formats)
    with dmx.applying.apply.applied(model, done):
        both = dmx.models.running.model_logits(model, batches[0])
        one = dmx.models.running.model_logits(model, batches[0][:1])
    torch.testing.assert_close(both[:1], one)  # no row depends on the others of its batch
    other = dmx.searching.uniform_assignment(model, FP8, SearchConfig(name="uniform"))
    assert dmx.calibrate_inputs(model, other, batches) is other


def test_inputs_in_one_format_are_measured_too(tiny_random, batches):
    found = dmx.search(
        tiny_random.model,
        batches,
        Budget(6.0),
        SearchConfig(name="differentiable", steps=2, family=["mxfp4", "fp8"], input_format="nvfp4"),
    ).assignment
    assert set(found.input_formats.values()) == {"nvfp4"}
    assert set(found.input_amax) == set(found.formats)


# ---------------------------------------------------------------- settings and labels


def test_rules_belong_to_formats(tiny_random, batches):
    rules = ScaleRulesConfig(weight="mse", input={"mxfp4": "even"}).by_format()
    assert rules["weight"]["nvfp4"] == rules["weight"]["mxfp4"] == "mse"
    assert rules["weight"]["fp8"] == "amax/448" and rules["input"]["nvfp4"] == "amax/6"
    assert rules["input"]["fp8"] == "amax/448_float32"
    with pytest.raises(
        FormatError, match=r"weight\.nvfp4='even' is not allowed.*amax/6, 4over6, mse"
    ):
        ScaleRulesConfig(weight={"nvfp4": "even"})
    with pytest.raises(FormatError, match=r"input='4over6' is not allowed"):
        ScaleRulesConfig(input="4over6")
    with pytest.raises(FormatError, match=r"weight='amax/448_float32' is not allowed"):
        ScaleRulesConfig(weight="amax/448_float32")
    with pytest.raises(
        FormatError, match=r"scale_rules\.weight=even is a rule of none .*nvfp4: amax/6"
    ):
        config("kl", scale_rules=ScaleRulesConfig(weight="even"))
    wanted = ScaleRulesConfig(weight={"nvfp4": "4over6"})
    found = dmx.search(
        tiny_random.model, batches, Budget(5.0), config("random", scale_rules=wanted)
    ).assignment
    assert found.scale_rules["weight"]["nvfp4"] == "4over6"
    assert found.scale_rules["input"]["nvfp4"] == "amax/6"
    mse = found.with_rule("weight", "mse")
    assert mse.scale_rules["weight"] == {"fp8": "amax/448", "nvfp4": "mse"}
    with pytest.raises(FormatError, match="rule of none of the formats of the assignment"):
        found.with_rule("weight", "even")
    text = "weight: nvfp4 4over6; input: floor"
    assert scale_rules_text(found.scale_rules) == text
    assert scale_rules_text({"weight": {"nvfp4": "amax/6", "fp8": "amax/448"}}) == "floor"
    assert scale_rules_text({"input": {"fp8": "amax/448_float32"}}) == "floor"
    method = method_of(found, quantized="W+A")
    assert method.family == "nvfp4 fp8 bf16" and method.scale_rules == text


def test_what_learns_rotations_cannot_have_fixed_ranges():
    with pytest.raises(SearchConfigError, match="global scale of nvfp4 inputs is fixed"):
        config("differentiable", transform="learned")
    with pytest.raises(FormatError, match="element path"):
        config("differentiable", descent=dmx.searching.config.DescentConfig(path="element"))
    assert RotationConfig().file is None


def test_weights_in_bf16_beside_quantized_inputs_do_not_learn(tiny_random, batches):
    model = tiny_random.model
    made = dmx.searching.uniform_assignment(model, FP8, SearchConfig(name="uniform"))
    layer = "model.layers.0.mlp.down_proj"
    mixed = replace(made, input_formats=dict(made.formats), formats={**made.formats, layer: "bf16"})
    assert layer in mixed.transformed and layer not in mixed.quantized
    with pytest.raises(
        AssignmentError, match="1 layers have a quantized input and a weight in bf16"
    ):
        dmx.learn_weights(model, mixed, batches)
