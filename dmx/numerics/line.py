"""The straight line between two block formats: the continuous quantizer where there is no element path.

At offset b the position is p = b (F-1) / 2 for F formats, k = min(floor(p), F-2) and the share w = p - k:

    y = (1-w) Q_k(x) + w Q_(k+1)(x),   in float32, rounded once to the dtype of x

Q are the exact quantizers under the scale rule that each format has, as float32 and not yet rounded to the
dtype of x. At the stops, w = 0 and w = 1, y is the one of the two, bit for bit. A block with NaN or Inf is NaN.

    dy/db = (Q_(k+1)(x) - Q_k(x)) (F-1) / 2           the right-hand one at a stop, but at the last
    dy/dx = (1-w) [k is inside] + w [k+1 is inside]   inside: the rounded value is not beyond max_normal

Inside and clamped are as on the element path, so at the stops both have the same dy/dx; the exact quantizer
of an applied model passes gradients through clamped values too. Both derivatives are 0 in NaN blocks, and
dy/db is 0 where Q_k and Q_(k+1) are equal, Inf included.

What depends on the offset is a row of float32 numbers, read on the device: a captured graph follows the
offset from one pair of neighbours to the next. Families with other than MX formats have rows of their own:
`dmx.numerics.mixed_line`.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from dmx.formats import (
    WEIGHT_RULES,
    BlockFormat,
    ElementFormat,
    Family,
    ScaleRule,
    Specials,
    get_family,
    scale_rule_of,
)
from dmx.numerics.mixed_line import Side, side_of
from dmx.numerics.mx import check_input, from_blocks, to_blocks
from dmx.numerics.rounding import exact_power_of_two, round_to_element, unclamped_round
from dmx.numerics.scaling import block_to_scale_exponent


class Neighbour(NamedTuple):
    """One of the two formats, as numbers that float32 holds exactly."""

    emin: float
    emax: float
    mantissa_bits: float
    max_normal: float
    rule: float
    """Index in WEIGHT_RULES."""


N_LINE_PARAMETERS = 2 + 2 * len(Neighbour._fields)
"""share, its derivative by the offset, and the two neighbours."""


def line_parameters(
    offsets: Tensor,
    family: str | Sequence[str] | Family,
    rules: Sequence[ScaleRule | None] | None = None,
) -> Tensor:
    """Parameters of every offset at once, without a transfer from the host.

    Args:
        offsets: (...) float32 in [0, 2]; not differentiated through.
        rules: scale rule of each format; None: the usual one.

    Returns:
        (..., 12) float32: share, (F-1)/2, then the fields of both neighbours; (..., 14) for families with
        other than MX formats, see `dmx.numerics.mixed_line`.
    """
    family = get_family(family)
    stated = stated_rules(family, rules)
    stops: list[Neighbour] | list[Side]
    if family.is_mx:
        stops = [
            _numbers(f.element, rule)
            for f, rule in zip(family.formats, stated, strict=True)
            if isinstance(f, BlockFormat) and rule is not None
        ]
    else:
        stops = [side_of(f, rule) for f, rule in zip(family.formats, stated, strict=True)]
    last = len(stops) - 1
    # In float32 the product meets the whole numbers at the stops: those of four formats are rounded.
    position = (offsets.detach() * (last / 2)).clamp(0, last)
    low = position.floor().clamp(max=last - 1)
    fields = [position - low, torch.full_like(position, last / 2)]
    for shift in (0, 1):
        for numbers in zip(*stops, strict=True):
            value = torch.full_like(position, numbers[shift])
            for index in range(1, last):
                value = torch.where(low >= index, numbers[index + shift], value)
            fields.append(value)
    return torch.stack(fields, dim=-1)


def stated_rules(
    family: Family, rules: Sequence[ScaleRule | None] | None
) -> list[ScaleRule | None]:
    """Rule of each format, the usual one where none is stated; None for bf16.

    Raises:
        FormatError: a rule that a format does not have.
    """
    stated = rules or [None] * len(family.formats)
    return [
        scale_rule_of(f, rule) if isinstance(f, BlockFormat) else None
        for f, rule in zip(family.formats, stated, strict=True)
    ]


def _numbers(element: ElementFormat, rule: ScaleRule) -> Neighbour:
    return Neighbour(
        element.emin,
        element.emax,
        element.mantissa_bits,
        element.max_normal,
        WEIGHT_RULES.index(rule),
    )


@cache
def _element(numbers: Neighbour) -> ElementFormat:
    """The element format of these numbers."""
    exponent_bits, mantissa_bits = int(2 - numbers.emin).bit_length(), int(numbers.mantissa_bits)
    made = (ElementFormat("", exponent_bits, mantissa_bits, kind) for kind in get_args(Specials))
    return next(e for e in made if _numbers(e, "floor")[:4] == numbers[:4])


class _Values(NamedTuple):
    """Of both neighbours: (..., n_blocks, 32)."""

    low: Tensor
    high: Tensor
    low_inside: Tensor
    high_inside: Tensor
    finite: Tensor
    """(..., n_blocks, 1)"""


def _both(x: Tensor, parameters: Tensor) -> _Values:
    numbers, n = parameters.tolist(), len(Neighbour._fields)
    blocks = to_blocks(x, -1)
    finite = blocks.isfinite().all(-1, keepdim=True)
    clean = torch.where(finite, blocks, 0.0)
    values, inside = [], []
    for neighbour in (Neighbour(*numbers[2 : 2 + n]), Neighbour(*numbers[2 + n :])):
        element, rule = _element(neighbour), WEIGHT_RULES[int(neighbour.rule)]
        exponent = block_to_scale_exponent(clean, element, rule)[..., None]
        scaled = clean * exact_power_of_two(-exponent)
        values.append(round_to_element(scaled, element) * exact_power_of_two(exponent))
        inside.append(unclamped_round(scaled, element).abs() <= element.max_normal)
    return _Values(values[0], values[1], inside[0], inside[1], finite)


def line_fake_quant(x: Tensor, parameters: Tensor) -> Tensor:
    """Values on the straight line, blocks along the last axis, without autograd.

    Args:
        x: (..., n) fp32, bf16 or fp16.
        parameters: (12,) float32, one row of `line_parameters`.

    Returns:
        Shape and dtype of x.
    """
    check_input(x)
    both, share = _both(x, parameters), parameters[0]
    mixed = (1 - share) * both.low + share * both.high
    # A product with 0 would make NaN of Inf, which rules other than floor reach.
    mixed = torch.where(share == 0, both.low, torch.where(share == 1, both.high, mixed))
    values = torch.where(both.finite, mixed, torch.nan)
    return from_blocks(values, x.shape, x.ndim - 1).to(x.dtype)


def line_derivatives(x: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """dy/dx in [0, 1] and dy/db of each element, both float32 with the shape of x."""
    check_input(x)
    both, share, slope = _both(x, parameters), parameters[0], parameters[1]
    dx = (1 - share) * both.low_inside + share * both.high_inside
    db = torch.where(both.low == both.high, 0.0, both.high - both.low) * slope
    axis = x.ndim - 1
    return (
        from_blocks(torch.where(both.finite, dx, 0.0), x.shape, axis),
        from_blocks(torch.where(both.finite, db, 0.0), x.shape, axis),
    )
