"""A weight as bytes and back: codes packed as files keep them, and one scale byte a block.

What `dmx.numerics.packing` lacks is here: the float8 view of 8-bit codes and the way back from
bytes to values. Layouts differ in names and in what they leave unpacked, not in these bytes.
"""

import torch
from torch import Tensor

from dmx.errors import FormatError
from dmx.formats import E4M3, E5M2, BlockFormat, ScaleRule
from dmx.kernels import ops
from dmx.numerics.mx import QuantizedTensor
from dmx.numerics.packing import unpack_codes
from dmx.numerics.scaled import amax_scales

FLOAT8 = {E4M3.name: torch.float8_e4m3fn, E5M2.name: torch.float8_e5m2}


def code_bits(block_format: BlockFormat) -> int:
    """Of one element."""
    return block_format.element.bits


def check_in_features(layer: str, in_features: int, block_format: BlockFormat) -> None:
    """Raise FormatError unless blocks fill every row: no layout holds a short block."""
    if block_format.block_size and in_features % block_format.block_size:
        raise FormatError(
            f"{layer} has in_features={in_features}, no multiple of {block_format.block_size}: no "
            "export layout holds a short block. Leave it in BF16 (search.exclude) and search again."
        )


def check_finite(weight: Tensor) -> None:
    """Raise FormatError for NaN or Inf, which a file would spread over blocks."""
    if not bool(weight.isfinite().all()):
        raise FormatError("the weight holds NaN or Inf; an export would spread it over its blocks")


def encode_weight(
    weight: Tensor, block_format: BlockFormat, scale_rule: ScaleRule
) -> tuple[Tensor, Tensor]:
    """Packed codes and scales of a weight.

    Args:
        weight: (out, in) fp32, bf16 or fp16, in a multiple of 32, finite.

    Returns:
        (out, in * bits / 8) uint8, for 8 bits (out, in) float8; (out, in / 32) uint8 E8M0.
    """
    check_finite(weight)
    packed, scales = ops.quantize_packed(weight, block_format, scale_rule=scale_rule)
    return as_float8(packed, block_format), scales


def as_float8(codes: Tensor, block_format: BlockFormat) -> Tensor:
    """8-bit codes under their own dtype; fewer bits stay uint8."""
    dtype = FLOAT8.get(block_format.element.name)
    return codes if dtype is None else codes.view(dtype)


def static_scale(amax: float, block_format: BlockFormat, scale_rule: ScaleRule) -> Tensor:
    """0-d float32: the one scale of all rows of fp8 that are at most `amax`; never 0, as runtimes divide by it."""
    scale = amax_scales(torch.tensor(amax), block_format, scale_rule, None).scale
    return scale.clamp(min=torch.finfo(torch.float32).tiny)


def amax_of_static_scale(scale: Tensor, block_format: BlockFormat) -> float:
    """Inverse of `static_scale`, up to the last bit."""
    return float(scale) * block_format.element.max_normal


def decode_weight(
    packed: Tensor,
    scales: Tensor,
    block_format: BlockFormat,
    dtype: torch.dtype,
    *,
    unpacked: bool = False,
) -> Tensor:
    """Inverse of `encode_weight`: (out, in) in `dtype`. unpacked: one code a byte already."""
    codes = packed.view(torch.uint8)
    if not unpacked:
        codes = unpack_codes(codes, code_bits(block_format))
    return QuantizedTensor(codes, scales.view(torch.uint8), block_format, -1, dtype).dequantize()
