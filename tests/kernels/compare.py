"""A backend against the reference on one input; for the tests and `scripts.benchmarks.kernels --check`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmx import numerics
from dmx.formats import BlockFormat, Family, ScaleRule
from dmx.kernels import ops
from dmx.numerics.packing import pack_codes
from tests.golden import assert_same_bits

SUM_TOLERANCE = 2e-6
"""Of sum |grad * dy/db|, for the gradient of the offset."""


def check_mx(
    x: Tensor, block_format: BlockFormat, scale_rule: ScaleRule, device: str, axis: int = -1
) -> None:
    """fake_quant (also into `out` and in place), quantize and quantize_packed on `device`.

    x and the expected values are on the CPU.
    """
    there = x.to(device)
    kwargs: dict[str, Any] = {"axis": axis, "scale_rule": scale_rule}
    expected = numerics.fake_quant(x, block_format, **kwargs)
    assert_same_bits(ops.fake_quant(there, block_format, **kwargs), expected)
    out = torch.full(x.shape, 7.0, dtype=x.dtype, device=device)
    assert ops.fake_quant(there, block_format, out=out, **kwargs) is out
    assert_same_bits(out, expected)
    own = there.clone()
    ops.fake_quant(own, block_format, out=own, **kwargs)
    assert_same_bits(own, expected)
    quantized = numerics.quantize(x, block_format, **kwargs)
    actual = ops.quantize(there, block_format, **kwargs)
    assert (actual.axis, actual.dtype) == (quantized.axis, quantized.dtype)
    assert_same_bits(actual.codes, quantized.codes)
    assert_same_bits(actual.scale_codes, quantized.scale_codes)
    bits = int(block_format.element_bits)
    if axis == -1 and x.shape[-1] * bits % 8 == 0 and x.shape[-1] % 4 == 0:
        packed, scale_codes = ops.quantize_packed(there, block_format, scale_rule=scale_rule)
        assert_same_bits(packed, pack_codes(quantized.codes, bits))
        assert_same_bits(scale_codes, quantized.scale_codes)


def check_scaled(
    x: Tensor,
    block_format: BlockFormat,
    scale_rule: ScaleRule,
    device: str,
    amax: Tensor | float | None = None,
    axis: int = -1,
) -> None:
    """fake_quant (also in place and into another dtype) of a format other than MX on `device`."""
    there = x.to(device)
    kwargs: dict[str, Any] = {"axis": axis, "scale_rule": scale_rule, "amax": amax}
    expected = numerics.fake_quant(x, block_format, **kwargs)
    assert_same_bits(ops.fake_quant(there, block_format, **kwargs), expected)
    own = there.clone()
    assert ops.fake_quant(own, block_format, out=own, **kwargs) is own
    assert_same_bits(own, expected)
    if amax is None and axis == -1 and x.is_contiguous() and x.dtype == torch.float32:
        narrow = torch.empty_like(there, dtype=torch.bfloat16)
        ops.fake_quant_to(there, narrow, block_format, scale_rule=scale_rule)
        assert_same_bits(narrow, expected.bfloat16())


def check_continuous(
    x: Tensor,
    family: Family,
    offset: float,
    device: str,
    rules: Sequence[ScaleRule | None] | None = None,
    amax: Tensor | float | None = None,
) -> None:
    """Forward and grad_x bit for bit, the sum within SUM_TOLERANCE of the absolute sum."""
    fixed: dict[str, Any] = {} if amax is None else {"amax": amax}
    parameters = numerics.continuous_parameters(torch.tensor(offset), family, rules)
    there, parameters_there = x.to(device), parameters.to(device)
    expected = numerics.continuous_fake_quant(x, parameters, **fixed)
    assert_same_bits(ops.continuous_fake_quant(there, parameters_there, **fixed), expected)
    own = there.clone()
    assert ops.continuous_fake_quant(own, parameters_there, out=own, **fixed) is own
    assert_same_bits(own, expected)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(x.dtype)
    dx, db = numerics.continuous_derivatives(x, parameters, **fixed)
    grad_x, grad_offset = ops.continuous_fake_quant_backward(
        grad.to(device), there, parameters_there, **fixed
    )
    assert grad_x is not None
    assert_same_bits(grad_x, torch.where(dx > 0, grad.float() * dx, 0.0).to(x.dtype))
    assert grad_offset.shape == () and grad_offset.dtype == torch.float32
    products = grad.double() * db.double()
    largest = products.abs().sum().item()
    if largest < 1e37:  # else float32 may overflow on the way, in any order of summing
        error = abs(grad_offset.item() - products.sum().item())
        assert error <= SUM_TOLERANCE * largest + 1e-37, (error, largest)
    nothing, again = ops.continuous_fake_quant_backward(
        grad.to(device), there, parameters_there, needs_grad_x=False, **fixed
    )
    assert nothing is None
    assert_same_bits(again, grad_offset)
