"""Block scales that learn while the weights stay."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dmx
from dmx.applying.linear import quantized_layers
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, RunError
from dmx.exporting import load_exported
from dmx.formats import FP8, MX_FORMATS, MXFP4
from dmx.numerics import fake_quant
from dmx.numerics.scaling import mse_candidates
from dmx.weights import learned
from dmx.weights.learn_config import LearnConfig
from dmx.weights.learned import learn_weights
from dmx.weights.learned_scales import LearnedScales
from experiments.running.rows import method_of
from tests.weights.helpers import mixed, text_batches, uniform

BATCHES = list(torch.randint(0, 257, (6, 2, 32), generator=torch.Generator().manual_seed(1)))
SHORT = {"steps": 6, "warmup": 2, "train": "scales"}
LAYER = "model.layers.0.mlp.up_proj"


def scales_of(weight, block_format):
    """Of one layer; what products see is `seen`."""

    class One:
        def block_formats(self, operand):
            return {"w": block_format}

    return LearnedScales({"w": weight}, One())


def shown(scales):
    scales.quantize()
    return scales.result("w")


@pytest.mark.parametrize("block_format", MX_FORMATS, ids=str)
@given(
    exponent=st.integers(-20, 20),
    spread=st.integers(0, 12),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_they_start_as_mse_makes_them_and_mse_finds_any_choice_again(
    block_format, exponent, spread, seed, dtype
):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 64, generator=generator) * 2.0**exponent
    weight *= 2.0 ** -torch.randint(0, spread + 1, weight.shape, generator=generator)
    weight[0, :32], weight[1, :31] = 0.0, 0.0
    scales = scales_of(weight.to(dtype), block_format)
    expected = fake_quant(weight.to(dtype), block_format, scale_rule="mse")
    assert torch.equal(shown(scales), expected)
    scales.values.copy_(torch.randn(scales.values.shape, generator=generator))
    seen = shown(scales)
    assert torch.equal(fake_quant(seen, block_format, scale_rule="mse"), seen)


@pytest.mark.parametrize("chunk", [64, 1 << 26])
def test_the_gradient_is_that_of_the_mixture_of_candidates(chunk, generator, monkeypatch):
    monkeypatch.setattr("dmx.weights.learned_scales.CHUNK", chunk)
    weight = torch.randn(4, 64, generator=generator)
    scales = scales_of(weight, MXFP4)
    scales.values.copy_(torch.randn(scales.values.shape, generator=generator))
    scales.gradient.copy_(torch.randn(scales.gradient.shape, generator=generator))
    preferences = scales.values.view(-1, 4).clone().requires_grad_()
    found = [q for _, q, _ in mse_candidates(weight.view(-1, 32), MXFP4.element)]
    mixture = (preferences.softmax(1)[:, :, None] * torch.stack(found, 1)).sum(1)
    (mixture.flatten() @ scales.gradient).backward()
    assert torch.allclose(scales.descent(), preferences.grad.flatten(), rtol=1e-4, atol=1e-6)


def test_kl_on_held_batches_falls_and_no_weight_moves(tiny_trained):
    model, batches = tiny_trained.model, text_batches(tiny_trained.tokenizer)
    assignment = uniform(model)
    config = LearnConfig(steps=40, warmup=5, train="scales")
    done = learn_weights(model, assignment, batches, config)
    facts = done.weights
    assert facts["name"] == "learned_scales" and facts["lr"] == config.scale_lr
    assert facts["kl_after"] < 0.85 * facts["kl_before"]
    assert done.formats == assignment.formats and done.bits == assignment.bits
    method = method_of(done, quantized="W+A")
    label = "uniform mxfp4 + learned scales, 40 steps, warm-up 5"
    assert (method.label, method.scale_rules) == (label, "floor")
    moved = 0
    dmx.apply(model, done)
    for layer in quantized_layers(model).values():
        blocks, own = layer.quantized_weight().view(-1, 32), layer.weight.reshape(-1, 32)
        found = torch.stack([q for _, q, _ in mse_candidates(own.float(), MXFP4.element)])
        assert (found == blocks).all(-1).any(0).all()
        nearest = fake_quant(own, MXFP4, scale_rule="mse")
        moved += int((nearest != blocks).any(1).sum())
    assert moved > 0


def test_a_stopped_run_ends_as_one_that_was_not(tiny_random, tmp_path, monkeypatch):
    model, assignment = tiny_random.model, mixed(tiny_random.model)
    config = LearnConfig(**SHORT, checkpoint_every=2)
    whole = learn_weights(model, assignment, BATCHES, config)
    update = learned._Learning._update

    def stop(self, loss):
        update(self, loss)
        if self.step == 5:
            raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(learned._Learning, "_update", stop)
        learn_weights(model, assignment, BATCHES, config, folder=tmp_path)
    again = learn_weights(model, assignment, BATCHES, config, folder=tmp_path)
    assert again == whole and again.content("weights") == whole.content("weights")
    with pytest.raises(RunError, match="another"):
        learn_weights(model, assignment, BATCHES, LearnConfig(steps=6), folder=tmp_path)


def test_exports_carry_them(make_tiny, tmp_path):
    pytest.importorskip("compressed_tensors")
    model = make_tiny("llama", dtype="bfloat16").model
    done = learn_weights(model, uniform(model), BATCHES, LearnConfig(**SHORT, scale_lr=1.0))
    loaded = Assignment.load(done.save(tmp_path / "assignment.json"))
    assert loaded == done and loaded.rule("weight", MXFP4) == "mse"
    dmx.export(model, loaded, tmp_path / "out", target="compressed_tensors", verify=False)
    read = load_exported(tmp_path / "out").model
    dmx.apply(model, loaded, inputs=False)
    tokens = BATCHES[0]
    ours, theirs = (m(input_ids=tokens, use_cache=False).logits for m in (model, read))
    assert torch.equal(ours, theirs)
    other = fake_quant(quantized_layers(model)[LAYER].weight, MXFP4, scale_rule="mse")
    assert not torch.equal(quantized_layers(model)[LAYER].quantized_weight(), other)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train": "rotations"}, "learn.train"),
        ({"scale_lr": 0.2}, "learn.scale_lr=0.2 is for learn.train=scales"),
        ({"train": "scales", "lr": 1e-3}, "learn.lr=0.001 is for learn.train=weights"),
        ({"train": "scales", "block_steps": 4}, "learn.block_steps=4 is for learn.train=weights"),
        ({"train": "scales", "masters": "bfloat16"}, "learn.masters=bfloat16 is for"),
        ({"train": "scales", "scale_lr": 0.0}, "learn.scale_lr=0.0 must be"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(dmx.errors.DmxError, match=says):
        LearnConfig(**settings)


def test_formats_without_a_scale_of_blocks_are_refused(tiny_random):
    model = tiny_random.model
    with pytest.raises(
        AssignmentError, match=r"learn\.train=scales: .* is in fp8 .*learn\.train=weights"
    ):
        learn_weights(model, uniform(model, FP8), BATCHES, LearnConfig(**SHORT))
