"""Arithmetic in plain torch: the reference. Kernels in `dmx.kernels` equal it bit for bit."""

from dmx.numerics.continuous import (
    PathParameters,
    continuous_derivatives,
    continuous_fake_quant,
    continuous_fake_quant_backward,
    continuous_parameters,
    path_parameters,
)
from dmx.numerics.distances import (
    add_fisher,
    cross_entropy_rows,
    kl_divergence,
    kl_rows,
    relative_error,
    sqnr_db,
    token_kl_divergence,
)
from dmx.numerics.line import line_parameters
from dmx.numerics.mx import QuantizedTensor, fake_quant, quantize
from dmx.numerics.rounding import codes_to_element, element_to_codes, round_to_element
from dmx.numerics.scaling import amax_to_scale_exponent, block_to_scale_exponent

__all__ = [
    "PathParameters",
    "QuantizedTensor",
    "add_fisher",
    "amax_to_scale_exponent",
    "block_to_scale_exponent",
    "codes_to_element",
    "continuous_derivatives",
    "continuous_fake_quant",
    "continuous_fake_quant_backward",
    "continuous_parameters",
    "cross_entropy_rows",
    "element_to_codes",
    "fake_quant",
    "kl_divergence",
    "kl_rows",
    "line_parameters",
    "path_parameters",
    "quantize",
    "relative_error",
    "round_to_element",
    "sqnr_db",
    "token_kl_divergence",
]
