"""Rounding of float32 values onto an element grid, and the integer codes of that grid.

Nearest, ties to even; beyond the largest normal (infinities included) saturates; subnormals and
the sign of zero are kept. All of it is exact in float32: a grid step is a power of two, dividing
by it changes the exponent only, and `torch.round` breaks ties to even.

Source: OCP Microscaling Formats v1.0, section 5.3; the cast is pinned bit for bit by golden tests.
"""

from functools import cache

import torch
from torch import Tensor

from dmx.formats import ElementFormat

FP32_MANTISSA_BITS = 23
FP32_BIAS = 127


def float_exponent(x: Tensor) -> Tensor:
    """floor(log2|x|) of float32 x as int32, read from the bits; -127 for zeros and subnormals."""
    return ((x.view(torch.int32) >> FP32_MANTISSA_BITS) & 0xFF) - FP32_BIAS


def exact_power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as float32 for int32 exponents in [-127, 127]; -127 is a subnormal float32."""
    bits = (exponent + FP32_BIAS) << FP32_MANTISSA_BITS
    subnormal = torch.full_like(bits, 1 << (FP32_MANTISSA_BITS - 1))
    return torch.where(exponent > -FP32_BIAS, bits, subnormal).view(torch.float32)


def round_to_element(x: Tensor, element: ElementFormat) -> Tensor:
    """Nearest value of the element grid, float32 in and out, any shape; NaN stays NaN."""
    return unclamped_round(x, element).clamp(-element.max_normal, element.max_normal)


def unclamped_round(x: Tensor, element: ElementFormat) -> Tensor:
    """As `round_to_element`, on a grid that goes on beyond the largest normal."""
    step = grid_step(x, element)
    return torch.round(x / step) * step


def grid_step(x: Tensor, element: ElementFormat) -> Tensor:
    """Distance of neighbouring values of the grid of `unclamped_round` at float32 x."""
    exponent = float_exponent(x).clamp(min=element.emin, max=element.emax)
    return exact_power_of_two(exponent - element.mantissa_bits)


def element_to_codes(value: Tensor, element: ElementFormat) -> Tensor:
    """Codes (uint8, right-aligned, sign on top) of float32 values that lie on the grid.

    NaN gets the format's NaN code with the sign bit on top where the format has one, else 0xFF.
    """
    bits = value.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    shift = FP32_MANTISSA_BITS - element.mantissa_bits
    normal = (magnitude >> shift) - ((FP32_BIAS - element.bias) << element.mantissa_bits)
    subnormal = (value.abs() / element.min_subnormal).to(torch.int32)
    code = torch.where(value.abs() < element.min_normal, subnormal, normal)
    code = torch.where(value.isnan(), element.nan_code, code)
    sign = torch.where(bits < 0, element.sign_code, 0)
    return (code | sign).to(torch.uint8)


@cache
def _code_values(element: ElementFormat) -> Tensor:
    m = element.mantissa_bits
    values = []
    for code in range(element.n_codes):
        magnitude = code % element.sign_code
        exponent, mantissa = magnitude >> m, magnitude % 2**m
        if magnitude > element.max_code:
            value = float("inf" if magnitude == element.inf_code else "nan")
        elif exponent == 0:
            value = mantissa * element.min_subnormal
        else:
            value = 2.0 ** (exponent - element.bias) * (1 + mantissa / 2**m)
        values.append(-value if code >= element.sign_code else value)
    return torch.tensor(values, dtype=torch.float32)


def codes_to_element(codes: Tensor, element: ElementFormat) -> Tensor:
    """float32 values of uint8 codes; any shape."""
    return _code_values(element).to(codes.device)[codes.to(torch.int64)]
