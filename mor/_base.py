"""The seam: everything that mor takes from dmx, and the only file that imports it."""

from dmx.errors import DmxError
from dmx.formats import E4M3, E5M2, ElementFormat, check_choice
from dmx.layers import adopt, put_back, replace_layers
from dmx.numerics.mx import check_input
from dmx.numerics.rounding import (
    FP32_BIAS,
    FP32_MANTISSA_BITS,
    exact_power_of_two,
    float_exponent,
    round_to_element,
)

__all__ = [
    "E4M3",
    "E5M2",
    "FP32_BIAS",
    "FP32_MANTISSA_BITS",
    "DmxError",
    "ElementFormat",
    "adopt",
    "check_choice",
    "check_input",
    "exact_power_of_two",
    "float_exponent",
    "put_back",
    "replace_layers",
    "round_to_element",
]
