"""Packed weights to numbers, and inputs to MX blocks, in plain torch.

Knows nothing of dmx: layouts are read here from their specifications a second time, so that an error in dmx's packing
cannot hide in its own inverse.
"""

import torch
from torch import Tensor

FP32_MANTISSA = 23


class Element:
    """A small float without infinities: one sign bit, `exponent` and `mantissa` bits."""

    def __init__(self, exponent: int, mantissa: int) -> None:
        self.bits = 1 + exponent + mantissa
        self.mantissa = mantissa
        self.bias = 2 ** (exponent - 1) - 1
        self.emax = 2**exponent - 1 - self.bias
        self.largest = 2.0**self.emax * (2 - 2.0**-mantissa)

    def values(self) -> Tensor:
        """(2**bits,) float32: the value of each code."""
        code = torch.arange(2**self.bits)
        fraction = (code % 2**self.mantissa).float() / 2**self.mantissa
        exponent = code // 2**self.mantissa % 2 ** (self.bits - 1 - self.mantissa)
        normal = (1 + fraction) * torch.exp2((exponent - self.bias).float())
        magnitude = torch.where(exponent > 0, normal, fraction * 2.0 ** (1 - self.bias))
        return torch.where(code >= 2 ** (self.bits - 1), -magnitude, magnitude)

    def nearest(self, x: Tensor) -> Tensor:
        """float32 -> the nearest value of this element, ties to even, saturated."""
        _, exponent = torch.frexp(x)
        step = torch.exp2((exponent - 1).clamp(min=1 - self.bias).float() - self.mantissa)
        return (torch.round(x / step) * step).clamp(-self.largest, self.largest)


E2M1, E2M3, E3M2 = Element(2, 1), Element(2, 3), Element(3, 2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """(rows, bytes) uint8 -> (rows, bytes * 8 / bits) codes: a little-endian stream, low code first."""
    per_group, group = {4: (2, 1), 6: (4, 3)}[bits]
    wide = packed.to(torch.int32).unflatten(-1, (-1, group))
    word = sum(wide[..., i] << (8 * i) for i in range(group))
    return torch.stack([word >> (bits * i) & (2**bits - 1) for i in range(per_group)], -1).flatten(
        1
    )


def decoded(packed: Tensor, scales: Tensor, element: Element) -> Tensor:
    """float32 weights of packed codes and float32 scales of blocks, (rows, blocks)."""
    values = element.values()[unpack(packed, element.bits)]
    return (values.unflatten(-1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


def e8m0(scales: Tensor) -> Tensor:
    """uint8 -> float32 powers of two."""
    return torch.exp2(scales.view(torch.uint8).double() - 127).float()


def rounded_inputs(x: Tensor, element: Element) -> Tensor:
    """x in blocks of 32 with the scales that vLLM's loaders take for inputs: the exponent of amax rounded to
    the element's mantissa bits."""
    blocks = x.float().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True).contiguous()
    bits = amax.view(torch.int32) + (1 << (FP32_MANTISSA - element.mantissa - 1))
    exponent = ((bits >> FP32_MANTISSA) - 127 - element.emax).clamp(-127, 127)
    scale = torch.exp2(exponent.double()).float()
    return (element.nearest(blocks / scale) * scale).flatten(-2).to(x.dtype)


def fp8_tokens(x: Tensor) -> Tensor:
    """x in E4M3 with a float32 scale a token, amax / 448, by which it is divided."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
