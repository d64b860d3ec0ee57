"""nvfp4 and fp8: against exact arithmetic, against compressed-tensors' own quantizers, and their properties."""

import importlib.util
from fractions import Fraction
from hashlib import sha256
from itertools import product

import pytest
import torch

import dmx
from dmx import numerics
from dmx.errors import FormatError
from dmx.formats import BF16, E4M3, FP8, MXFP4, NVFP4, ElementFormat, get_family
from dmx.numerics.mx import INPUT_DTYPES
from tests.cases import hard_inputs
from tests.golden import assert_same_bits

SCALED = [pytest.param(f, rule, id=f"{f}-{rule}") for f in (NVFP4, FP8) for rule in f.rules]
needs_peer = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors"
)


def values_of(element: ElementFormat) -> list[Fraction]:
    """All magnitudes of an element format, exactly."""
    m, top = element.mantissa_bits, Fraction(element.max_normal)
    found = {Fraction(k, 2**m) * Fraction(2) ** element.emin for k in range(2**m)}
    for exponent in range(element.emin, element.emax + 1):
        found |= {(1 + Fraction(k, 2**m)) * Fraction(2) ** exponent for k in range(2**m)}
    return sorted(v for v in found if v <= top)


def nearest(x: Fraction, grid: list[Fraction]) -> Fraction:
    """Ties to the value with an even mantissa, which every second one of a grid has; saturating."""
    index = min(range(len(grid)), key=lambda i: (abs(grid[i] - abs(x)), i % 2))
    return grid[index] if x >= 0 else -grid[index]


def fp32(x: Fraction) -> Fraction:
    """Rounded to float32: of float64, which holds these quotients far more exactly."""
    return Fraction(torch.tensor(float(x), dtype=torch.float64).to(torch.float32).item())


def by_hand(x: torch.Tensor, block: int) -> list[list[float]]:
    """nvfp4 of (rows, n) float32 in rational arithmetic, float32 after each operation."""
    e2m1, e4m3 = values_of(NVFP4.element), values_of(E4M3)
    inverse = fp32(2688 / Fraction(x.abs().max().item()))
    rows = []
    for row in x.tolist():
        out = []
        for first in range(0, len(row), block):
            values = [Fraction(v) for v in row[first : first + block]]
            amax = max(map(abs, values))
            s = nearest(fp32(fp32(amax / 6) * inverse), e4m3)
            scale = fp32((s or (Fraction(1, 512) if amax else s)) / inverse)
            quotients = [fp32(v / scale) if scale else Fraction(0) for v in values]
            out += [float(fp32(nearest(q, e2m1) * scale)) for q in quotients]
        rows.append(out)
    return rows


def test_nvfp4_equals_exact_arithmetic(generator):
    x = torch.randn(4, 24, generator=generator) * torch.tensor([[1.0], [1e-3], [0.0], [1e-7]])
    x[0, :16] = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, *[-0.1] * 8])
    expected = torch.tensor(by_hand(x, 16))
    torch.testing.assert_close(numerics.fake_quant(x, "nvfp4"), expected, rtol=0, atol=0)


def test_scales_by_hand():
    x = torch.zeros(2, 32)
    x[0, 0], x[0, 16], x[1, 0] = 12.0, -3.0, 1e-6
    q = numerics.quantize(x, "nvfp4")
    assert q.inv_global_scale == 224.0  # 2688 / 12
    scales = q.scale_codes.view(torch.float8_e4m3fn).float()
    assert scales.tolist() == [
        [448.0, 112.0],
        [2.0**-9, 0.0],
    ]  # 1e-6 / 6 * 224 is below half of 2**-9
    assert q.dequantize()[0, [0, 16]].tolist() == [12.0, -3.0]
    wide = torch.tensor([[448.0, 1.0, -0.0], [0.0, 0.0, 0.0], [1.0, 0.3, 0.01]])
    rows = numerics.quantize(wide, "fp8")
    third = torch.tensor(1 / 448).bfloat16().float().item()
    assert rows.scale_codes.tolist() == [[1.0], [0.0], [third]]
    assert rows.codes[0].tolist() == [E4M3.max_code, 0x38, 0x80]
    rows = numerics.quantize(wide, "fp8", scale_rule="amax/448_float32")
    assert rows.scale_codes.tolist() == [[1.0], [0.0], [torch.tensor(1 / 448).item()]]


def test_fp8_inputs_have_scales_of_all_digits_and_weights_those_of_bf16(generator):
    """Every row's largest value is kept to a digit of float32 as an input, to one of bf16 as a weight."""
    x = torch.randn(64, 96, generator=generator)
    amax = x.abs().amax(-1)
    for operand, digits in (("input", 24), ("weight", 8)):
        rule = FP8.usual_rule(operand)
        largest = numerics.fake_quant(x, FP8, scale_rule=rule).abs().amax(-1)
        off = ((largest - amax) / amax).abs().max()
        assert 2.0 ** -(digits + 2) < off <= 2.0 ** -(digits - 1) or (
            operand == "input" and off == 0
        )


@pytest.mark.parametrize(("block_format", "rule"), SCALED)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_hard_inputs_have_the_policy_of_all_formats(block_format, rule, dtype):
    """Codes and values agree, non-finite blocks are NaN as a whole and spoil no other, zeros keep their
    sign, nothing grows beyond its block by more than a step."""
    for name, x in hard_inputs(dtype).items():
        y = numerics.fake_quant(x, block_format, scale_rule=rule)
        q = numerics.quantize(x, block_format, scale_rule=rule)
        assert y.dtype == dtype and y.shape == x.shape
        assert_same_bits(q.dequantize(), y)
        if x.numel() == 0:
            continue
        blocks = numerics.mx.to_blocks(x, -1, block_format.block_size)
        bad = ~blocks.isfinite().all(-1, keepdim=True).expand(blocks.shape)
        bad = numerics.mx.from_blocks(bad, x.shape, x.ndim - 1)
        assert torch.equal(y.isnan(), bad), name
        zeros = (x == 0) & ~bad
        assert torch.equal(y[zeros].signbit(), x[zeros].signbit())
        out = x.clone()
        assert numerics.fake_quant(x, block_format, scale_rule=rule, out=out) is out
        assert_same_bits(out, y)


@pytest.mark.parametrize(("block_format", "rule"), SCALED)
def test_quantizing_again_under_the_same_amax_changes_nothing(block_format, rule, generator):
    x = torch.randn(16, 64, generator=generator) * torch.randn(16, 1, generator=generator).exp()
    amax = x.abs().amax() if block_format is NVFP4 else x.abs().amax(1, keepdim=True)
    y = numerics.fake_quant(x, block_format, scale_rule=rule)
    again = numerics.fake_quant(y, block_format, scale_rule=rule, amax=amax)
    assert_same_bits(again, y)


def test_rules_that_look_at_errors_have_less_of_them(generator):
    x = torch.randn(64, 256, generator=generator)
    errors = {
        rule: (numerics.fake_quant(x, NVFP4, scale_rule=rule) - x).square() for rule in NVFP4.rules
    }
    sums = {rule: e.unflatten(-1, (-1, 16)).sum(-1) for rule, e in errors.items()}
    assert (sums["4over6"] <= sums["amax/6"] * (1 + 1e-5)).all()
    assert (sums["mse"] <= sums["amax/6"] * (1 + 1e-5)).all()
    assert sums["mse"].sum() < 0.95 * sums["amax/6"].sum()
    # The paper's example: 10, 20, 30, 40 maps exactly to 1, 2, 3, 4, and to no multiples of 40 / 6.
    block = torch.tensor([[10.0, 20.0, 30.0, 40.0] * 4, [-448.0, *[0.0] * 15]])
    assert torch.equal(numerics.fake_quant(block, NVFP4, scale_rule="4over6")[0], block[0])
    assert not torch.equal(numerics.fake_quant(block, NVFP4)[0], block[0])


def test_a_fixed_amax_clamps_what_is_larger_and_does_not_look_at_the_tensor():
    x = torch.tensor([[1.0, 0.5] * 8, [100.0, 1.0] * 8])
    alone = numerics.fake_quant(x[:1], NVFP4, amax=3.0)
    assert_same_bits(numerics.fake_quant(x, NVFP4, amax=3.0)[:1], alone)
    assert numerics.fake_quant(x, NVFP4, amax=3.0)[1, 0] == 3.0
    assert_same_bits(
        numerics.fake_quant(x, FP8, amax=torch.tensor([[2.0], [2.0]]))[1, :1],
        torch.tensor([448 * numerics.quantize(torch.tensor([2.0]), FP8).scale_codes.item()]),
    )


def golden_values():
    """(64, 256) float32, every row of another size."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 256, generator=generator)
    return x * 2.0 ** (torch.arange(64)[:, None] % 9 - 4)


GOLDEN = {
    "nvfp4 values": "db57a84bc02fd009db6c",
    "nvfp4 scales": "bf8954bcdf5510165f37",
    "fp8 scales": "63bd2fc260200b878426",
}
"""SHA-256 of the bits that compressed-tensors 0.20 gives for these values; fp8 of them in bf16."""


def digest(tensor):
    """Of the bits; zeros without their sign, which compressed-tensors loses."""
    if tensor.dtype == torch.float32:
        tensor = tensor + 0.0
    return sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:20]


def test_values_and_scales_are_those_of_compressed_tensors():
    """Of fp8 the scales: its quotients of bf16 are rounded once more than ours."""
    x = golden_values()
    q = numerics.quantize(x, NVFP4)
    assert digest(q.dequantize()) == GOLDEN["nvfp4 values"]
    assert digest(q.scale_codes) == GOLDEN["nvfp4 scales"]
    assert digest(numerics.quantize(x.bfloat16(), FP8).scale_codes) == GOLDEN["fp8 scales"]


@needs_peer
@pytest.mark.slow  # for the import of compressed-tensors
def test_the_golden_digests_are_still_those_of_compressed_tensors():
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import FP8_DYNAMIC
    from compressed_tensors.quantization.quant_scheme import NVFP4 as SCHEME
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    x = golden_values()
    arguments, blocks = SCHEME["weights"], x.unflatten(-1, (-1, 16))
    global_scale = generate_gparam(x.min(), x.max())
    scale, _ = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), arguments, global_scale=global_scale
    )
    assert numerics.quantize(x, NVFP4).inv_global_scale == global_scale
    theirs = fake_quantize(x, scale, None, arguments, global_scale=global_scale)
    assert digest(theirs) == GOLDEN["nvfp4 values"]
    assert digest(scale.to(torch.float8_e4m3fn)) == GOLDEN["nvfp4 scales"]
    rows = x.bfloat16()
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    scale, _ = calculate_qparams(low, high, FP8_DYNAMIC["weights"])
    assert digest(scale.float()) == GOLDEN["fp8 scales"]


SMALL_SCALES = {"random_bits": 35, "ragged": 107, "short": 8, "four_axes": 98, "sliced": 66}
OTHERWISE = {
    torch.float32: {
        "global scale": ["zeros", "subnormals", "random_bits"],
        "nvfp4": {"grid_e5m2": 18, "binades": 151, **SMALL_SCALES},
        "fp8": {"binades": 503},
    },
    torch.bfloat16: {
        "global scale": ["binades", "zeros", "subnormals", "non_finite"],
        "nvfp4": {"grid_e5m2": 18, "binades": 153, **SMALL_SCALES},
        "fp8": {"binades": 223, "subnormals": 6},
    },
}
"""Hard inputs that compressed-tensors 0.20 treats otherwise, with the blocks (nvfp4) and rows (fp8) of other values."""


@needs_peer
@pytest.mark.slow  # for the import of compressed-tensors
@pytest.mark.parametrize("dtype", OTHERWISE, ids=str)
def test_hard_inputs_get_the_values_of_compressed_tensors(dtype):
    """Finite blocks, bf16 as float32; zeros without their sign. Apart are blocks whose scale is too small for its format:
    where E4M3 has 0 theirs is 0.125 and ours 2**-9, and a row's is subnormal there, at least 2**-126 here. Its global
    scale is a product with the reciprocal, in the last bit not always the quotient: ours is given to it."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import FP8_DYNAMIC
    from compressed_tensors.quantization.quant_scheme import NVFP4 as SCHEME
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    otherwise = {"global scale": [], "nvfp4": {}, "fp8": {}}
    usual = {"nvfp4": ("amax/6", SCHEME), "fp8": ("amax/448_float32", FP8_DYNAMIC)}
    inputs = {name: x for name, x in hard_inputs(dtype).items() if x.numel()}
    for (name, x), block_format in product(inputs.items(), (NVFP4, FP8)):
        rule, scheme = usual[str(block_format)]
        q = numerics.quantize(x, block_format, scale_rule=rule)
        y = numerics.fake_quant(x, block_format, scale_rule=rule)
        blocks, ours = (
            numerics.mx.to_blocks(t, -1, block_format.block_size).flatten(0, -2) for t in (x, y)
        )
        finite = blocks.isfinite().all(-1)
        blocks, ours, scales = blocks[finite].float(), ours[finite], q.scale_codes.flatten()[finite]
        least = 2.0**-126
        if block_format is NVFP4:
            scales, least = scales.view(torch.float8_e4m3fn).float(), 2.0**-9
            if generate_gparam(blocks.min(), blocks.max()) != q.inv_global_scale:
                otherwise["global scale"].append(name)
        low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        their_scales, _ = calculate_qparams(
            low, high, scheme["weights"], global_scale=q.inv_global_scale
        )
        theirs = fake_quantize(
            blocks, their_scales, None, scheme["weights"], global_scale=q.inv_global_scale
        )
        normal = scales > least
        assert torch.equal(their_scales.flatten()[normal].float(), scales[normal]), name
        differ = (theirs.to(dtype) != ours).any(-1)
        assert not (differ & normal).any(), name
        if differ.any():
            otherwise[str(block_format)][name] = int(differ.sum())
            small = their_scales.flatten()[differ].float()
            assert ((small == 0.125) if block_format is NVFP4 else (small < least)).all(), name
    assert otherwise == OTHERWISE[dtype]


MODELOPT_FP8 = {"row": "3045a667ea85f5f8891d", "tensor": "8005821e7b963c267546"}
"""SHA-256 of the codes and float32 scales that FP8QTensor.quantize of ModelOpt 0.47.0 gives for `usual_rows`, by what has
a scale, first 20 digits. Of others it keeps subnormal scales, and zeros become NaN."""


def usual_rows():
    """(rows, n) float32 of the hard inputs: finite, of a scale that is a normal number."""
    for x in hard_inputs(torch.float32).values():
        if x.numel():
            rows = x.reshape(-1, x.shape[-1])
            amax = rows.abs().amax(-1)
            usual = amax.isfinite() & (amax / 448 >= 2.0**-126)
            if usual.any():
                yield rows[usual]


@pytest.mark.parametrize("one_scale_a", MODELOPT_FP8)
def test_fp8_codes_and_scales_are_those_of_modelopt(one_scale_a):
    parts = []
    for rows in usual_rows():
        is_one = one_scale_a == "tensor"
        amax = rows.abs().amax().expand(len(rows), 1) if is_one else None
        q = numerics.quantize(rows, FP8, scale_rule="amax/448_float32", amax=amax)
        parts += [q.codes, q.scale_codes[:1] if is_one else q.scale_codes]
    found = sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts))
    assert found.hexdigest()[:20] == MODELOPT_FP8[one_scale_a]


def test_other_rules_and_formats_are_refused():
    x = torch.zeros(1, 16)
    with pytest.raises(FormatError, match=r"scale_rule='floor' is not for nvfp4\. Allowed: amax/6"):
        dmx.fake_quant(x, "nvfp4", scale_rule="floor")
    with pytest.raises(FormatError, match=r"'amax/6' is not for mxfp4\. Allowed: floor"):
        dmx.fake_quant(x, "mxfp4", scale_rule="amax/6")
    with pytest.raises(FormatError, match="'bf16' cannot be quantized to"):
        dmx.fake_quant(x, "bf16")
    with pytest.raises(TypeError, match="float64"):
        dmx.fake_quant(x.double(), "fp8")


# ---------------------------------------------------------------- the line

FAMILIES = [["nvfp4", "fp8", "bf16"], ["mxfp4", "fp8"], ["nvfp4", "mxfp8_e4m3", "bf16"]]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_the_line_equals_the_formats_at_its_stops(family, dtype):
    formats = get_family(family)
    for x in hard_inputs(dtype).values():
        for stop, block_format in zip(formats.stops, formats.formats, strict=True):
            row = numerics.line_parameters(torch.tensor(stop), family)
            expected = x if block_format is BF16 else numerics.fake_quant(x, block_format)
            assert_same_bits(numerics.continuous_fake_quant(x, row), expected.contiguous())


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_between_the_stops_it_is_the_mean_and_its_derivative_the_difference(family, generator):
    formats = get_family(family)
    x, last = torch.randn(8, 64, generator=generator), len(family) - 1
    for offset in (0.2, 0.9, 1.5):
        row = numerics.line_parameters(torch.tensor(offset), family)
        k = min(int(offset * last / 2), last - 1)
        share = offset * last / 2 - k
        low, high = (
            x if f is BF16 else numerics.fake_quant(x, f) for f in formats.formats[k : k + 2]
        )
        y = numerics.continuous_fake_quant(x, row)
        torch.testing.assert_close(y, (1 - share) * low + share * high)
        dx, db = numerics.continuous_derivatives(x, row)
        torch.testing.assert_close(db, (high - low) * last / 2)
        assert ((dx >= 0) & (dx <= 1)).all() and (dx == 1).float().mean() > 0.9


def test_what_the_line_clamps_passes_no_gradient():
    x = torch.tensor([[8.0, 1.0, *[0.0] * 14]])
    row = numerics.line_parameters(torch.tensor(0.5), ["nvfp4", "bf16"])
    dx, _ = numerics.continuous_derivatives(x, row, amax=6.0)
    assert dx[0, :2].tolist() == [0.25, 1.0]  # 8 is beyond 6; bf16 holds it
    leaf = x.clone().requires_grad_()
    offset = torch.tensor(0.5, requires_grad=True)
    y = dmx.continuous_fake_quant(leaf, offset, ["nvfp4", "bf16"], amax=6.0)
    y.sum().backward()
    assert leaf.grad[0, 0] == 0.25 and offset.grad == 1.0  # (8 - 6) / 2
    assert y[0, 0] == 6.5


def test_mixed_rows_are_of_families_with_other_formats_alone():
    assert numerics.line_parameters(torch.tensor(0.0), ["mxfp4", "mxfp6_e3m2"]).shape == (12,)
    assert numerics.line_parameters(torch.tensor([0.0, 1.0]), [str(MXFP4), "bf16"]).shape == (2, 14)
    with pytest.raises(FormatError, match="there is no element path"):
        numerics.continuous_parameters(torch.tensor(0.0), ["nvfp4", "fp8"], path="element")
