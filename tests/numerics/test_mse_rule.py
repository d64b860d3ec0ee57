"""The scale rule `mse`: never worse than a rule that looks at amax alone, stable, and for weights only."""

import pytest
import torch

import dmx
from dmx.assignment.assignment import make_assignment
from dmx.assignment.rules import ScaleRulesConfig
from dmx.assignment.space import build_space
from dmx.errors import FormatError
from dmx.formats import E2M1, MX_FORMATS, MXFP4, SCALE_RULES
from dmx.kernels import ops
from dmx.numerics import block_to_scale_exponent, fake_quant, quantize
from dmx.weights.gptq import gptq
from tests.cases import hard_inputs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def squared_error(x, rounded):
    """Of each block, float64; x (..., n) with n a multiple of 32."""
    difference = rounded.double() - x.double()
    return difference.unflatten(-1, (-1, 32)).square().sum(-1)


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 128, generator=generator) * torch.rand(64, 1, generator=generator)
    return x * 2.0 ** torch.randint(-20, 20, (64, 1), generator=generator)


@pytest.mark.parametrize("block_format", MX_FORMATS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_no_rule_has_a_smaller_error_in_any_block(block_format, seed):
    x = weights(seed)
    ours = squared_error(x, fake_quant(x, block_format, scale_rule="mse"))
    for rule in SCALE_RULES:
        theirs = squared_error(x, fake_quant(x, block_format, scale_rule=rule))
        assert (ours <= theirs * (1 + 1e-5)).all(), rule
        if block_format == MXFP4:
            assert ours.sum() < theirs.sum(), rule


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_format", MX_FORMATS, ids=str)
def test_quantizing_again_changes_no_value(block_format, dtype):
    """The scale may: a block whose values a larger one holds, too, takes that."""
    for name, x in hard_inputs(dtype).items():
        once = fake_quant(x, block_format, scale_rule="mse")
        fits = (once.isfinite() == x.isfinite()).all(-1)  # rounding up may go beyond the dtype
        once = once[fits]
        again = fake_quant(once, block_format, scale_rule="mse")
        assert torch.equal(once.isnan(), again.isnan()), name
        assert torch.equal(once.nan_to_num(), again.nan_to_num()), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_format", MX_FORMATS, ids=str)
def test_codes_say_what_fake_quant_gives_on_hard_inputs(block_format, dtype):
    for name, x in hard_inputs(dtype).items():
        quantized = quantize(x, block_format, scale_rule="mse").dequantize()
        values = fake_quant(x, block_format, scale_rule="mse")
        assert torch.equal(quantized.nan_to_num(), values.nan_to_num()), name
        assert torch.equal(
            ops.fake_quant(x, block_format, scale_rule="mse").nan_to_num(), values.nan_to_num()
        ), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_format", MX_FORMATS, ids=str)
def test_a_gpu_chooses_the_same_exponents(block_format, dtype):
    for name, x in hard_inputs(dtype).items():
        expected = quantize(x, block_format, scale_rule="mse")
        seen = ops.quantize(x.cuda(), block_format, scale_rule="mse")
        assert torch.equal(seen.scale_codes.cpu(), expected.scale_codes), name
        assert torch.equal(seen.codes.cpu(), expected.codes), name
        values = ops.fake_quant(x.cuda(), block_format, scale_rule="mse").cpu()
        assert torch.equal(values.nan_to_num(), expected.dequantize().nan_to_num()), name


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [*SCALE_RULES, "mse"])
@pytest.mark.parametrize("block_format", MX_FORMATS, ids=str)
def test_float32_goes_to_bfloat16_in_one_step(block_format, rule):
    x = weights(0).cuda()
    out = torch.empty_like(x, dtype=torch.bfloat16)
    expected = fake_quant(x.cpu(), block_format, scale_rule=rule).bfloat16()
    ops.fake_quant_to(x, out, block_format, scale_rule=rule)
    assert torch.equal(out.cpu(), expected)


def test_the_choice_by_hand():
    def exponent(values):
        block = torch.zeros(32)
        block[: len(values)] = torch.tensor(values)
        return int(block_to_scale_exponent(block, E2M1, "mse"))

    assert exponent([0.0]) == -127
    assert exponent([6.0, 0.5]) == 0  # all held by 1 alone
    assert exponent([7.0, *[1.5] * 20]) == 0  # 7 -> 6 costs 1, 1.5 -> 2 twenty times a quarter
    assert exponent([7.9, 3.0, 1.0]) == 1  # 7.9 -> 6 costs more than 7.9 -> 8
    assert exponent([4.2, *[0.75] * 30]) == -1  # 4.2 saturates at 3, for thirty that are held


def test_ties_go_to_the_larger_scale():
    block = torch.zeros(32)
    block[0] = 4.0  # 4 * 1, 2 * 2, 1 * 4: without error by three of the four
    assert int(block_to_scale_exponent(block, E2M1, "mse")) == 2
    assert torch.equal(fake_quant(block, MXFP4, scale_rule="mse"), block)


def test_inputs_are_refused(tiny_random):
    model = tiny_random.model
    space = build_space(model, (MXFP4,))
    choice = torch.zeros(len(space.units), dtype=torch.int64).numpy()
    rules = {"weight": {"mxfp4": "mse"}}
    assert make_assignment(space, choice, model, scale_rules=rules).rule("weight", MXFP4) == "mse"
    for refused in ("mse", {"input": {"mxfp4": "mse"}}):
        with pytest.raises(FormatError, match=r"scale_rules\.input\.mxfp4='mse' is not allowed"):
            make_assignment(space, choice, model, scale_rules=refused)
    with pytest.raises(FormatError, match=r"search\.scale_rules\.input='mse'"):
        ScaleRulesConfig(input="mse")
    with pytest.raises(FormatError, match=r"scale_rule='best' is not allowed"):
        fake_quant(torch.ones(32), MXFP4, scale_rule="best")


def test_weights_learn_and_are_rounded_by_gptq_under_it(tiny_random):
    model = tiny_random.model
    space = build_space(model, (MXFP4,))
    choice = torch.zeros(len(space.units), dtype=torch.int64).numpy()
    rules = {"weight": {"mxfp4": "mse"}}
    assignment = make_assignment(space, choice, model, scale_rules=rules)
    batches = list(torch.randint(0, 257, (3, 2, 32), generator=torch.Generator().manual_seed(1)))
    config = dmx.LearnConfig(steps=3, lr=1e-3)
    for done in (
        dmx.learn_weights(model, assignment, batches, config),
        gptq(model, assignment, batches),
    ):
        dmx.apply(model, done)
        weight = model.model.layers[0].mlp.up_proj.quantized_weight()
        assert torch.equal(fake_quant(weight, MXFP4, scale_rule="mse"), weight)
        dmx.restore(model)
