"""MX quantization in plain torch: THE REFERENCE that every kernel equals bit for bit.

    scale = 2**amax_to_scale_exponent(amax of the block)
    codes = round_to_element(x / scale);  value = codes * scale

Blocks of 32 run along `axis`; a short last block stands as it is. A block that holds NaN or Inf
becomes NaN as a whole (scale byte 255); a zero block has scale byte 0. Computed in float32,
returned in the dtype of the input.

Source: OCP Microscaling Formats v1.0, sections 5 and 6.3.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dmx.formats import (
    BLOCK_SIZE,
    BlockFormat,
    ScaleRule,
    get_block_format,
)
from dmx.numerics.rounding import (
    codes_to_element,
    element_to_codes,
    exact_power_of_two,
    round_to_element,
)
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
    """
    moved = x.movedim(axis, -1).to(torch.float32)
    padding = -moved.shape[-1] % block_size
    if padding:
        moved = F.pad(moved, (0, padding))
    n_blocks = moved.shape[-1] // block_size
    return moved.reshape(*moved.shape[:-1], n_blocks, block_size)


def from_blocks(blocks: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Inverse of `to_blocks`: cuts the padding, puts the axis back; shape is that of x."""
    flat = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])
    return flat[..., : shape[axis]].movedim(-1, axis).contiguous()


def _quantize_blocks(
    x: Tensor, axis: int, block_format: BlockFormat, scale_rule: ScaleRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Grid values (fp32, unscaled), scale exponents (int32) and finiteness of each block of x."""
    blocks, element = to_blocks(x, axis, block_format.block_size), block_format.element
    finite = blocks.isfinite().all(-1)
    clean = torch.where(finite[..., None], blocks, 0.0)
    exponent = block_to_scale_exponent(clean, element, scale_rule)
    # Multiplying by 2**-e is exact; the reciprocal of 2**-127 is representable, of 2**127 too.
    return (
        round_to_element(clean * exact_power_of_two(-exponent)[..., None], element),
        exponent,
        finite,
    )


@dataclass(frozen=True)
class MXTensor:
    """Quantized tensor. codes: uint8, shape of x, right-aligned. scale_codes: uint8 E8M0, shape of
    x with `axis` ceil(n/32); 255 marks a NaN block."""

    codes: Tensor
    scale_codes: Tensor
    block_format: BlockFormat
    axis: int
    dtype: torch.dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Values in `dtype` (default: that of the quantized tensor), shape of codes."""
        element, form = self.block_format.element, self.block_format.scale
        values = codes_to_element(self.codes, element)
        values = to_blocks(values, self.axis, self.block_format.block_size)
        scale_codes = self.scale_codes.movedim(self.axis, -1).to(torch.int32)
        scale = exact_power_of_two(scale_codes.clamp(max=form.nan_code - 1) - form.bias)
        scale = torch.where(scale_codes == form.nan_code, torch.nan, scale)
        # 0 * NaN is NaN, so a NaN scale reaches every element, whatever its code.
        result = from_blocks(values * scale[..., None], self.codes.shape, self.axis)
        return result.to(dtype or self.dtype)


def quantize(
    x: Tensor, block_format: str | BlockFormat, *, axis: int = -1, scale_rule: ScaleRule = "floor"
) -> MXTensor:
    """Codes and scales of x; see `MXTensor`.

    Args:
        x: fp32, bf16 or fp16, any shape with at least one axis, also empty or non-contiguous.
        block_format: an MX format or its name.

    Raises:
        TypeError: float64 or integers. FormatError: unknown format, or bf16. IndexError: axis.
    """
    block_format = get_block_format(block_format)
    check_input(x)
    axis = check_axis(x, axis)
    element, form = block_format.element, block_format.scale
    grid, exponent, finite = _quantize_blocks(x, axis, block_format, scale_rule)
    codes = element_to_codes(grid, element)
    codes = torch.where(finite[..., None], codes, element.nan_block_code).to(torch.uint8)
    scale_codes = torch.where(finite, exponent + form.bias, form.nan_code).to(torch.uint8)
    return MXTensor(
        from_blocks(codes, x.shape, axis),
        scale_codes.movedim(-1, axis).contiguous(),
        block_format,
        axis,
        x.dtype,
    )


def fake_quant(
    x: Tensor,
    block_format: str | BlockFormat,
    *,
    axis: int = -1,
    scale_rule: ScaleRule = "floor",
    out: Tensor | None = None,
) -> Tensor:
    """Quantize and dequantize in one step, without autograd.

    Args:
        x: fp32, bf16 or fp16, any shape with at least one axis.
        out: receives the result; shape and dtype of x, may be x itself.

    Returns:
        Shape and dtype of x. Rules other than `floor` may exceed the dtype: the largest become Inf.

    Raises:
        As `quantize`; ValueError when out has another shape or dtype.
    """
    block_format = get_block_format(block_format)
    check_input(x)
    axis = check_axis(x, axis)
    check_out(x, out)
    grid, exponent, finite = _quantize_blocks(x, axis, block_format, scale_rule)
    values = grid * exact_power_of_two(exponent)[..., None]
    values = torch.where(finite[..., None], values, torch.nan)
    result = from_blocks(values, x.shape, axis).to(x.dtype)
    return result if out is None else out.copy_(result)


def check_out(x: Tensor, out: Tensor | None) -> None:
    """Raise ValueError unless out is None or has the shape, dtype and device of x."""
    if out is None:
        return
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out must have the shape, dtype and device of x: {tuple(x.shape)} {x.dtype} "
            f"{x.device}, got {tuple(out.shape)} {out.dtype} {out.device}"
        )
