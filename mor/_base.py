"""The seam: everything that mor takes from dmx, and the only file that imports it."""

from dmx.applying.apply import applied
from dmx.applying.quantizers import Quantizer
from dmx.assignment.assignment import Assignment
from dmx.errors import DmxError
from dmx.files import finite, read_json, write_atomic, write_json
from dmx.formats import E4M3, E5M2, BlockFormat, ElementFormat, check_choice
from dmx.models.running import evaluating, model_logits
from dmx.models.swap import adopt, put_back, replace_layers
from dmx.numerics.distances import relative_error
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
    "Assignment",
    "BlockFormat",
    "DmxError",
    "ElementFormat",
    "Quantizer",
    "adopt",
    "applied",
    "check_choice",
    "check_input",
    "evaluating",
    "exact_power_of_two",
    "finite",
    "float_exponent",
    "model_logits",
    "put_back",
    "read_json",
    "relative_error",
    "replace_layers",
    "round_to_element",
    "write_atomic",
    "write_json",
]
