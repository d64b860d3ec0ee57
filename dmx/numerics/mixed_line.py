"""The straight line between two formats of which one is no MX format: nvfp4, fp8 or bf16.

The formula, its stops and its derivatives are those of `dmx.numerics.line`,

    y = (1-w) Q_k(x) + w Q_(k+1)(x),   in float32, rounded once to the dtype of x,

with Q of bf16 the identity, which nothing clamps. A row of parameters names both formats and their rules. The
reference reads it on the host; the kernels of a GPU read it there, and need the numbers of the elements, too.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dmx.formats import ALL_RULES, FORMATS, BlockFormat, Format, ScaleRule
from dmx.numerics.mx import check_input, wide_values

_FORMATS = tuple(FORMATS.values())

Quantized = Callable[
    [Tensor, int, BlockFormat, ScaleRule, Tensor | float | None], tuple[Tensor, Tensor]
]
"""As `wide_values`."""


class Side(NamedTuple):
    """One of the two formats, as numbers of a row."""

    format: float
    """Index in FORMATS."""
    rule: float
    """Index in ALL_RULES; of bf16 0, as all that follows."""
    emin: float = 0.0
    emax: float = 0.0
    mantissa_bits: float = 0.0
    max_normal: float = 0.0


N_MIXED_PARAMETERS = 2 + 2 * len(Side._fields)
"""share, its derivative by the offset, and the two sides."""


def side_of(block_format: Format, rule: ScaleRule | None) -> Side:
    """Numbers of a format under a rule; None for bf16, which has none."""
    index = format_index(block_format)
    if not isinstance(block_format, BlockFormat) or rule is None:
        return Side(index, 0)
    e = block_format.element
    return Side(index, ALL_RULES.index(rule), e.emin, e.emax, e.mantissa_bits, e.max_normal)


def format_index(block_format: Format) -> int:
    """What a row calls a format."""
    return _FORMATS.index(block_format)


def sides_of(parameters: Tensor) -> list[tuple[Format, ScaleRule | None]]:
    """Both formats of a row and their rules, the lower one first; read on the host."""
    numbers = parameters.tolist()[2:]
    sides = [Side(*numbers[: len(Side._fields)]), Side(*numbers[len(Side._fields) :])]
    formats = [_FORMATS[int(side.format)] for side in sides]
    return [
        (f, ALL_RULES[int(side.rule)] if isinstance(f, BlockFormat) else None)
        for f, side in zip(formats, sides, strict=True)
    ]


class _Both(NamedTuple):
    """Of both formats, float32 and bool, shape of x."""

    low: Tensor
    high: Tensor
    low_inside: Tensor
    high_inside: Tensor
    slope: float


def _values(
    x: Tensor, side: tuple[Format, ScaleRule | None], amax: Tensor | float | None, by: Quantized
) -> tuple[Tensor, Tensor]:
    block_format, rule = side
    if rule is None or not isinstance(block_format, BlockFormat):
        return x.float(), torch.ones_like(x, dtype=torch.bool)
    fixed = amax if block_format.needs_input_amax else None
    return by(x, x.ndim - 1, block_format, rule, fixed)


def _both(x: Tensor, parameters: Tensor, amax: Tensor | float | None, by: Quantized) -> _Both:
    below, above = sides_of(parameters)
    low, low_inside = _values(x, below, amax, by)
    high, high_inside = _values(x, above, amax, by)
    return _Both(low, high, low_inside, high_inside, float(parameters[1]))


def mixed_fake_quant(
    x: Tensor,
    parameters: Tensor,
    amax: Tensor | float | None = None,
    *,
    by: Quantized = wide_values,
) -> Tensor:
    """Values on the line, blocks along the last axis, without autograd.

    Args:
        x: (..., n) fp32, bf16 or fp16.
        parameters: (14,) float32, one row of `line_parameters`.
        amax: largest magnitude that a global scale is made for (nvfp4), instead of that of x; other formats
            have none.
        by: quantizes; a kernel that equals `wide_values` gives the same bits sooner.

    Returns:
        Shape and dtype of x.
    """
    check_input(x)
    share = float(parameters[0])
    if share in (0.0, 1.0):
        return _values(x, sides_of(parameters)[int(share)], amax, by)[0].to(x.dtype)
    q = _both(x, parameters, amax, by)
    return ((1 - parameters[0]) * q.low + parameters[0] * q.high).to(x.dtype)


def mixed_derivatives(
    x: Tensor,
    parameters: Tensor,
    amax: Tensor | float | None = None,
    *,
    by: Quantized = wide_values,
) -> tuple[Tensor, Tensor]:
    """dy/dx in [0, 1] and dy/db of each element, both float32 with the shape of x."""
    check_input(x)
    q = _both(x, parameters, amax, by)
    share = parameters[0]
    dx = (1 - share) * q.low_inside + share * q.high_inside
    db = torch.where(q.low == q.high, 0.0, q.high - q.low) * q.slope
    is_number = ~(q.low.isnan() | q.high.isnan())
    return torch.where(is_number, dx, 0.0), torch.where(is_number, db, 0.0)
