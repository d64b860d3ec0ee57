"""Quantization in plain torch: THE REFERENCE that every kernel equals bit for bit.

    scale = 2**amax_to_scale_exponent(amax of the block)          MX; others: `dmx.numerics.scaled`
    codes = round_to_element(x / scale);  value = codes * scale

Blocks run along `axis`, of 32 values in MX formats; a short last block stands as it is. A block that
holds NaN or Inf becomes NaN as a whole (scale byte 255, or the NaN of scales that have one); a zero block
has the scale 0 (scale byte 0). Computed in float32, returned in the dtype of the input.

Source: OCP Microscaling Formats v1.0, sections 5 and 6.3.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dmx.formats import (
    BLOCK_SIZE,
    BlockFormat,
    ScaleRule,
    get_block_format,
    scale_rule_of,
)
from dmx.numerics.rounding import (
    codes_to_element,
    element_to_codes,
    exact_power_of_two,
    unclamped_round,
)
from dmx.numerics.scaled import block_scales, divided_by_scale
from dmx.numerics.scaling import block_to_scale_exponent

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_input(x: Tensor) -> None:
    """Raise TypeError unless x is fp32, bf16 or fp16 (float64 would be rounded twice)."""
    if x.dtype not in INPUT_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in INPUT_DTYPES)
        raise TypeError(f"x must be one of {allowed}, got {x.dtype}; convert it first")


def check_axis(x: Tensor, axis: int) -> int:
    """axis as a non-negative number; IndexError for one that x does not have."""
    if not -x.ndim <= axis < x.ndim:
        raise IndexError(f"axis={axis} is out of range for a tensor of shape {tuple(x.shape)}")
    return axis % x.ndim


def to_blocks(x: Tensor, axis: int, block_size: int = BLOCK_SIZE) -> Tensor:
    """(..., n, ...) as float32 (..., ceil(n/size), size) with the axis last, zero-padded.

    Zeros change neither the amax of a short block nor anything that is cut off again afterwards.

    Args:
        block_size: 0 = a whole row is one block.
    """
    moved = x.movedim(axis, -1).to(torch.float32)
    block_size = block_size or max(moved.shape[-1], 1)
    padding = -moved.shape[-1] % block_size
    if padding:
        moved = F.pad(moved, (0, padding))
    n_blocks = moved.shape[-1] // block_size
    return moved.reshape(*moved.shape[:-1], n_blocks, block_size)


def from_blocks(blocks: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Inverse of `to_blocks`: cuts the padding, puts the axis back; shape is that of x."""
    flat = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])
    return flat[..., : shape[axis]].movedim(-1, axis).contiguous()


class _Blocks(NamedTuple):
    """Blocks of a tensor, quantized: (..., n_blocks, size), the others without the size."""

    steps: Tensor
    """float32, x / scale rounded to the element grid, which goes on beyond its largest value"""
    scale: Tensor
    """float32"""
    stored: Tensor
    """Scales as they are stored: uint8 codes, or float32"""
    inv_global: Tensor | None
    finite: Tensor


def _quantize_blocks(
    x: Tensor,
    axis: int,
    block_format: BlockFormat,
    scale_rule: ScaleRule,
    amax: Tensor | float | None,
) -> _Blocks:
    blocks, element = to_blocks(x, axis, block_format.block_size), block_format.element
    finite = blocks.isfinite().all(-1)
    clean = torch.where(finite[..., None], blocks, 0.0)
    if block_format.scale.is_power_of_two:
        exponent = block_to_scale_exponent(clean, element, scale_rule)
        # Multiplying by 2**-e is exact; the reciprocal of 2**-127 is representable, of 2**127 too.
        steps = unclamped_round(clean * exact_power_of_two(-exponent)[..., None], element)
        stored = (exponent + block_format.scale.bias).to(torch.uint8)
        return _Blocks(steps, exact_power_of_two(exponent), stored, None, finite)
    scales = block_scales(clean, block_format, scale_rule, amax)
    steps = unclamped_round(divided_by_scale(clean, scales.scale), element)
    return _Blocks(steps, scales.scale, scales.stored, scales.inv_global, finite)


@dataclass(frozen=True)
class QuantizedTensor:
    """Quantized tensor. codes: uint8, shape of x, right-aligned. scale_codes: shape of x with `axis` as many
    as there are blocks; uint8 E8M0 (255 marks a NaN block) or E4M3, or float32 for fp8."""

    codes: Tensor
    scale_codes: Tensor
    block_format: BlockFormat
    axis: int
    dtype: torch.dtype
    inv_global_scale: Tensor | None = None
    """0-d float32; the scales of nvfp4 are E4M3 / this."""

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Values in `dtype` (default: that of the quantized tensor), shape of codes."""
        element, form = self.block_format.element, self.block_format.scale
        values = codes_to_element(self.codes, element)
        values = to_blocks(values, self.axis, self.block_format.block_size)
        scale_codes = self.scale_codes.movedim(self.axis, -1)
        if form.is_power_of_two:
            wide = scale_codes.to(torch.int32)
            scale = exact_power_of_two(wide.clamp(max=form.nan_code - 1) - form.bias)
            scale = torch.where(wide == form.nan_code, torch.nan, scale)
        elif form.element is not None:
            assert self.inv_global_scale is not None
            scale = codes_to_element(scale_codes, form.element) / self.inv_global_scale
        else:
            scale = scale_codes
        # 0 * NaN is NaN, so a NaN scale reaches every element, whatever its code.
        result = from_blocks(values * scale[..., None], self.codes.shape, self.axis)
        return result.to(dtype or self.dtype)


def quantize(
    x: Tensor,
    block_format: str | BlockFormat,
    *,
    axis: int = -1,
    scale_rule: ScaleRule | None = None,
    amax: Tensor | float | None = None,
) -> QuantizedTensor:
    """Codes and scales of x; see `QuantizedTensor`.

    Args:
        x: fp32, bf16 or fp16, any shape with at least one axis, also empty or non-contiguous.
        block_format: a block format or its name.
        scale_rule: None = the usual one of the format.
        amax: of formats with other scales than powers of two: the largest magnitude that scales are made
            for, instead of that of x (nvfp4: of the tensor; fp8: of each row).

    Raises:
        TypeError: float64 or integers. FormatError: unknown format or rule, or bf16. IndexError: axis.
    """
    block_format = get_block_format(block_format)
    scale_rule = scale_rule_of(block_format, scale_rule)
    check_input(x)
    axis = check_axis(x, axis)
    element, form = block_format.element, block_format.scale
    made = _quantize_blocks(x, axis, block_format, scale_rule, amax)
    codes = element_to_codes(made.steps.clamp(-element.max_normal, element.max_normal), element)
    codes = torch.where(made.finite[..., None], codes, element.nan_block_code).to(torch.uint8)
    nan = torch.nan if made.stored.is_floating_point() else form.nan_code
    stored = torch.where(made.finite, made.stored, nan).to(made.stored.dtype)
    return QuantizedTensor(
        from_blocks(codes, x.shape, axis),
        stored.movedim(-1, axis).contiguous(),
        block_format,
        axis,
        x.dtype,
        made.inv_global,
    )


def fake_quant(
    x: Tensor,
    block_format: str | BlockFormat,
    *,
    axis: int = -1,
    scale_rule: ScaleRule | None = None,
    amax: Tensor | float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Quantize and dequantize in one step, without autograd.

    Args:
        x: fp32, bf16 or fp16, any shape with at least one axis.
        scale_rule, amax: as of `quantize`.
        out: receives the result; shape and dtype of x, may be x itself.

    Returns:
        Shape and dtype of x. Rules other than `floor` may exceed the dtype: the largest become Inf.

    Raises:
        As `quantize`; ValueError when out has another shape or dtype.
    """
    block_format = get_block_format(block_format)
    scale_rule = scale_rule_of(block_format, scale_rule)
    check_input(x)
    axis = check_axis(x, axis)
    check_out(x, out)
    values, _ = wide_values(x, axis, block_format, scale_rule, amax)
    result = values.to(x.dtype)
    return result if out is None else out.copy_(result)


def wide_values(
    x: Tensor,
    axis: int,
    block_format: BlockFormat,
    scale_rule: ScaleRule,
    amax: Tensor | float | None,
) -> tuple[Tensor, Tensor]:
    """What fake_quant rounds to the dtype of x, float32, and whether each value is not clamped, bool."""
    made, top = (
        _quantize_blocks(x, axis, block_format, scale_rule, amax),
        block_format.element.max_normal,
    )
    values = made.steps.clamp(-top, top) * made.scale[..., None]
    values = torch.where(made.finite[..., None], values, torch.nan)
    inside = made.steps.abs() <= top
    return from_blocks(values, x.shape, axis), from_blocks(inside, x.shape, axis)


def check_out(x: Tensor, out: Tensor | None) -> None:
    """Raise ValueError unless out is None or has the shape, dtype and device of x."""
    if out is None:
        return
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out must have the shape, dtype and device of x: {tuple(x.shape)} {x.dtype} "
            f"{x.device}, got {tuple(out.shape)} {out.dtype} {out.device}"
        )
