"""Roundings that learn while the weights stay."""

import pytest
import torch

import dmx
from dmx.applying.linear import quantized_layers
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, RunError
from dmx.formats import FP8, MX_FORMATS, MXFP4
from dmx.numerics import fake_quant
from dmx.numerics.rounding import exact_power_of_two, grid_step
from dmx.numerics.scaling import block_to_scale_exponent
from dmx.weights.learn_config import LearnConfig
from dmx.weights.learned import learn_weights
from dmx.weights.learned_blocks import BlockLearning
from dmx.weights.learned_rounding import RoundingOffsets, sign_rate
from experiments.running.rows import method_of
from tests.weights.helpers import mixed, text_batches, uniform
from tests.weights.test_learned import BATCHES, mean_kl

SHORT = {"train": "rounding", "steps": 0, "block_steps": 6}


def offsets_of(weight, block_format, rule="even"):
    """Of one layer; what products see is `seen`."""

    class One:
        def block_formats(self, operand):
            return {"w": block_format}

        def rule(self, operand, block_format):
            return rule

        def amax_of_weight(self, name):
            return None

    return RoundingOffsets({"w": weight}, One())


def shown(offsets):
    offsets.quantize()
    return offsets.view_of(offsets.seen, "w").clone()


@pytest.mark.parametrize("rule", ["floor", "even", "mse"])
@pytest.mark.parametrize("block_format", MX_FORMATS, ids=str)
def test_they_start_at_nearest_and_mse_finds_any_rounding_again(block_format, rule, generator):
    weight = torch.randn(64, 64, generator=generator)
    weight *= 2.0 ** -torch.randint(0, 13, weight.shape, generator=generator)
    weight[0, :32], weight[1, :31] = 0.0, 0.0
    weight = weight.bfloat16()
    offsets = offsets_of(weight, block_format, rule)
    assert torch.equal(shown(offsets), fake_quant(weight, block_format, scale_rule=rule))
    offsets.values.copy_(torch.rand(offsets.values.shape, generator=generator) - 0.5)
    offsets.factors.copy_(0.5 + 0.5 * torch.rand(offsets.factors.shape, generator=generator))
    seen = shown(offsets)
    assert torch.equal(fake_quant(seen, block_format, scale_rule="mse"), seen)
    assert (seen[0, :32] == 0).all()
    offsets.factors.fill_(1)
    blocks, element = weight.float().unflatten(1, (-1, 32)), block_format.element
    scale = exact_power_of_two(block_to_scale_exponent(blocks, element, rule))[..., None]
    error = (shown(offsets).float().unflatten(1, (-1, 32)) - blocks).abs() / scale
    inside = (blocks / scale).abs() <= element.max_normal
    steps = (error / grid_step(blocks / scale, element))[inside]
    assert 0.5 < steps.max() <= 1, "one of the two neighbours"


def test_signs_of_gradients_move_them(generator):
    """An offset goes against its gradient; a factor where the errors of its block say; neither beyond its bounds."""
    weight = torch.randn(4, 64, generator=generator)
    offsets = offsets_of(weight, MXFP4)
    offsets.quantize()
    gradient = torch.randn(offsets.gradient.shape, generator=generator)
    offsets.gradient.copy_(gradient)
    seen = shown(offsets)
    offsets.move(0.1)
    moved = offsets.view_of(offsets.values, "w")
    free = moved != 0
    assert free.float().mean() > 0.9
    signs = gradient[: weight.numel()].view_as(weight).sign()
    assert torch.equal(moved[free], -0.1 * signs[free])
    assert ((offsets.factors - 1).abs() < 0.11).all() and (offsets.factors < 1).any()
    assert not torch.equal(shown(offsets), seen)
    for _ in range(20):
        offsets.move(0.1)
    assert offsets.values.abs().max() == 0.5 and offsets.factors.max() <= 1
    assert sum(sign_rate(i, 200) for i in range(200)) == pytest.approx(0.5, abs=0.01)


def test_kl_on_held_batches_falls(tiny_trained, tmp_path):
    model, batches = tiny_trained.model, text_batches(tiny_trained.tokenizer)
    assignment = uniform(model).with_rule("weight", "even")
    config = LearnConfig(**SHORT | {"block_steps": 20})
    done = learn_weights(model, assignment, batches, config)
    facts = done.weights
    assert facts["name"] == "learned_rounding" and facts["block_steps"] == 20
    assert facts["kl_after"] < 0.8 * facts["kl_before"]
    assert not {"lr", "warmup", "optimizer_state"} & facts.keys()
    loaded = Assignment.load(done.save(tmp_path / "assignment.json"))
    assert loaded == done and loaded.rule("weight", MXFP4) == "mse"
    held = batches[-2:]
    assert mean_kl(model, assignment, held) == pytest.approx(facts["kl_before"], rel=1e-3)
    assert mean_kl(model, loaded, held) == pytest.approx(facts["kl_after"], rel=1e-3)
    label = method_of(done, quantized="W+A").label
    assert label.endswith(" + learned rounding, 20 steps a block, from scales mxfp4 even")


def test_a_stopped_run_ends_as_one_that_was_not(tiny_random, tmp_path, monkeypatch):
    model, assignment = tiny_random.model, mixed(tiny_random.model)
    config, learn = LearnConfig(**SHORT), BlockLearning._learn
    whole = learn_weights(model, assignment, BATCHES, config)

    def stop(self, block, *rest):
        if block == 1:
            raise KeyboardInterrupt
        learn(self, block, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BlockLearning, "_learn", stop)
        learn_weights(model, assignment, BATCHES, config, folder=tmp_path)
    again = learn_weights(model, assignment, BATCHES, config, folder=tmp_path)
    assert again == whole and again.content("weights") == whole.content("weights")
    dmx.apply(model, whole)
    for name, layer in quantized_layers(model).items():
        seen = layer.quantized_weight()
        assert torch.equal(fake_quant(seen, whole.formats[name], scale_rule="mse"), seen), name


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"steps": 600}, r"learn\.steps=600 learn\.block_steps=6: roundings learn block by block"),
        ({"steps": 0, "block_steps": 0}, "Set learn.block_steps=200 learn.steps=0"),
        ({"lr": 1e-3}, r"learn\.lr=0\.001 is for learn\.train=weights"),
        ({"warmup": 5}, r"learn\.warmup=5 is for learn\.train=weights"),
        (
            {"steps": None, "keep_reference": "on"},
            r"learn\.train=rounding takes none\. Leave learn\.keep_reference out\.$",
        ),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(RunError, match=says):
        LearnConfig(**SHORT | settings)


def test_formats_without_a_scale_of_blocks_are_refused(tiny_random):
    model = tiny_random.model
    with pytest.raises(AssignmentError, match=r"learn\.train=rounding: .* is in fp8"):
        learn_weights(model, uniform(model, FP8), BATCHES, LearnConfig(**SHORT))
