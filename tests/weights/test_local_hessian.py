"""Scales chosen by what they change in a layer's output."""

import pytest
import torch

import dmx
from dmx.applying.linear import quantized_layers
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, RunError
from dmx.exporting.card import _weights_text
from dmx.formats import FP8, MX_FORMATS, MXFP4, NVFP4, SCALE_RULES
from dmx.numerics import fake_quant
from dmx.numerics.scaling import scale_candidates
from dmx.weights import local_hessian as module
from dmx.weights.config import LocalHessianConfig
from dmx.weights.local_hessian import local_hessian, local_hessians, round_by_hessian
from tests.weights.helpers import mixed, uniform

BATCHES = list(torch.randint(0, 257, (3, 2, 48), generator=torch.Generator().manual_seed(1)))


def block_errors(weight, rounded, hessian):
    """d^T H_b d of each block, float64."""
    error = torch.nn.functional.pad((rounded - weight).double(), (0, -weight.shape[1] % 32))
    blocks = error.unflatten(1, (-1, 32))
    return torch.einsum("rbi,bij,rbj->rb", blocks, local_hessians(hessian).double(), blocks)


@pytest.mark.parametrize("block_format", MX_FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_rule_has_a_smaller_error_of_the_output_in_any_block(block_format, dtype, generator):
    """Rows of all sizes and spreads."""
    weight = torch.randn(300, 80, generator=generator)
    weight *= 2.0 ** torch.randint(-20, 21, (300, 1), generator=generator)
    spread = torch.randint(0, 13, (300, 1), generator=generator)
    weight *= 2.0 ** -(torch.rand(300, 80, generator=generator) * spread).round()
    weight[0, :32], weight[1, :31] = 0.0, 0.0
    weight = weight.to(dtype)
    mix = torch.randn(80, 80, generator=generator)
    x = torch.randn(100, 80, generator=generator) @ mix
    hessian = x.T @ x
    rounded = round_by_hessian(weight, hessian, block_format)
    ours = block_errors(weight, rounded, hessian)
    for rule in (*SCALE_RULES, "mse"):
        theirs = block_errors(
            weight, fake_quant(weight.float(), block_format, scale_rule=rule), hessian
        )
        assert (ours <= theirs * (1 + 1e-4)).all(), rule
    assert torch.equal(fake_quant(rounded, block_format, scale_rule="mse"), rounded)
    for size in (1e38, 1e-30):  # near what float32 holds: no error overflows or vanishes
        scale = 2.0 ** (size / hessian.amax()).log2().floor()
        assert torch.equal(round_by_hessian(weight, hessian * scale, block_format), rounded)
    by_mse = fake_quant(weight.float(), block_format, scale_rule="mse")
    for plain in (torch.eye(80), torch.zeros(80, 80)):  # zeros: no input reaches the layer
        assert torch.equal(round_by_hessian(weight, plain, block_format), by_mse)


def test_a_column_that_no_input_reaches_does_not_count(monkeypatch):
    """The large weight of a block is on such a column: the others get the scale that fits them."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.3 * torch.rand(4, 64, generator=generator) + 0.7
    weight[:, 5] = 7.0
    hessian = torch.eye(64)
    hessian[5, 5] = 0.0
    rounded = round_by_hessian(weight, hessian, MXFP4)
    smallest = list(scale_candidates(weight.unflatten(1, (-1, 32)), MXFP4.element))[-1][1]
    assert torch.equal(rounded[:, :32], smallest[:, 0])
    by_mse = fake_quant(weight, MXFP4, scale_rule="mse")
    assert not torch.equal(rounded[:, :32], by_mse[:, :32])
    assert torch.equal(rounded[:, 32:], by_mse[:, 32:])
    monkeypatch.setattr(module, "CHUNK", 64)  # a row at a time
    assert torch.equal(round_by_hessian(weight, hessian, MXFP4), rounded)


@pytest.mark.parametrize(("architecture", "dtype"), [("qwen3", "float32"), ("smollm2", "bfloat16")])
def test_every_layer_is_rounded_on_what_its_product_sees(architecture, dtype, make_tiny, tmp_path):
    model = make_tiny(architecture, dtype=dtype).model
    assignment = mixed(model)
    done = local_hessian(model, assignment, BATCHES)
    assert done.formats == assignment.formats and done.bits == assignment.bits
    assert done.weights["name"] == "local_hessian" and done.weights["tokens"] == 3 * 2 * 48
    assert {done.rule("weight", f) for f in done.block_formats("weight").values()} == {"mse"}
    assert done.scale_rules.get("input") == assignment.scale_rules.get("input")
    assert "288 tokens" in _weights_text(done.weights)
    loaded = Assignment.load(done.save(tmp_path / "assignment.json"))
    dmx.apply(model, loaded)
    layers, hessians = quantized_layers(model), {}

    def see(layer, args):
        x = layer.input_quantizer(args[0]).flatten(0, 1).float()
        hessians[id(layer)] = hessians.get(id(layer), 0) + x.T @ x

    for layer in layers.values():
        layer.register_forward_pre_hook(see)
    with torch.no_grad():
        for batch in BATCHES:
            model(input_ids=batch, use_cache=False)
    agree, moved = [], 0
    for name, layer in layers.items():
        block_format, weight = assignment.format_of("weight", name), layer.weight.detach()
        hessian, seen = hessians[id(layer)], layer.quantized_weight()
        expected = round_by_hessian(weight, hessian, block_format).to(weight.dtype)
        agree.append((seen == expected).float().mean())
        by_mse = fake_quant(weight, block_format, scale_rule="mse")
        moved += int((seen != by_mse).sum())
        errors = [block_errors(weight, q.float(), hessian).sum() for q in (seen, by_mse)]
        assert errors[0] <= errors[1] * (1 + 1e-4), name
    assert min(agree) > 0.98 and moved > 0  # sums in another order break a tie here and there


def test_a_stopped_rounding_goes_on_with_the_same_numbers(tiny_random, tmp_path, monkeypatch):
    model = tiny_random.model
    assignment = mixed(model)
    whole = local_hessian(model, assignment, BATCHES)
    assert local_hessian(model, assignment, BATCHES, inputs=False).weights != whole.weights

    def stop(*arguments):
        if list(tmp_path.glob("local_hessian_state/*")):
            raise KeyboardInterrupt
        return round_by_hessian(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "round_by_hessian", stop)
        local_hessian(model, assignment, BATCHES, folder=tmp_path)
    assert not quantized_layers(model)
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(
            module, "round_by_hessian", lambda *a: calls.append(0) or round_by_hessian(*a)
        )
        assert local_hessian(model, assignment, BATCHES, folder=tmp_path).weights == whole.weights
    assert len(calls) == 7  # of the second block
    with pytest.raises(RunError, match="of a local_hessian run with other settings"):
        local_hessian(model, assignment, BATCHES, inputs=False, folder=tmp_path)


def test_what_cannot_be_rounded_says_why(tiny_random):
    model = tiny_random.model
    for block_format in (FP8, NVFP4):
        with pytest.raises(RunError, match=f"weights may be in {block_format}: only MX formats"):
            local_hessian(model, uniform(model, block_format), BATCHES)
    done = local_hessian(model, uniform(model), BATCHES)
    with pytest.raises(AssignmentError, match=r"rounded already \(local_hessian\)"):
        dmx.gptq(model, done, BATCHES)
    with pytest.raises(RunError, match=r"local_hessian\.batches=0 must be at least 1"):
        LocalHessianConfig(batches=0)
    with pytest.raises(RunError, match="the Hessian is not finite"):
        round_by_hessian(torch.ones(2, 32), torch.full((32, 32), torch.inf), MXFP4)
