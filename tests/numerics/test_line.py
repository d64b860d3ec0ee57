"""The straight line between two formats: exact at the stops, between them otherwise, and its derivatives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmx import numerics
from dmx.errors import FormatError
from dmx.formats import MX_FORMATS, WEIGHT_RULES, Family
from dmx.numerics.mx import INPUT_DTYPES
from tests.cases import FOUR, LINES, hard_inputs
from tests.golden import assert_same_bits

STOPS = [
    pytest.param(family, rules, index, id=f"{family}-{index}")
    for family, rules in LINES
    for index in range(len(family.formats))
]


@st.composite
def lines(draw):
    """A family of formats of rising bits, a rule for each, and an offset."""
    formats = draw(
        st.lists(st.sampled_from([*MX_FORMATS, FOUR.formats[1]]), min_size=2, max_size=4)
    )
    bits = {f.element_bits: f for f in formats}
    if len(bits) < 2:
        bits = {f.element_bits: f for f in MX_FORMATS[:2]}
    family = Family("drawn", tuple(bits[b] for b in sorted(bits)))
    rules = draw(st.lists(st.sampled_from(WEIGHT_RULES), min_size=len(bits), max_size=len(bits)))
    return family, rules, draw(st.floats(0, 2, width=32))


def wide_values(seed, rows=6, n=75):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=generator).sinh()
    return x * 2.0 ** torch.randint(-20, 20, (rows, 1), generator=generator)


def by_hand(x, family, rules, offset):
    """Neighbours' values and the share, in float64, from the exact quantizers."""
    position = offset * (len(family.formats) - 1) / 2
    k = min(int(position), len(family.formats) - 2)
    low, high = (
        numerics.fake_quant(x, family.formats[i], scale_rule=rules[i]).double() for i in (k, k + 1)
    )
    return low, high, position - k


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize(("family", "rules", "index"), STOPS)
def test_stops_equal_the_formats_bit_for_bit(family, rules, index, dtype):
    parameters = numerics.line_parameters(torch.tensor(family.stops[index]), family, rules)
    for x in hard_inputs(dtype).values():
        expected = numerics.fake_quant(x, family.formats[index], scale_rule=rules[index])
        assert_same_bits(numerics.continuous_fake_quant(x, parameters), expected)


@settings(deadline=None, max_examples=60)
@given(lines(), st.integers(0, 2**32))
def test_between_stops_it_is_the_weighted_mean(line, seed):
    family, rules, offset = line
    x = wide_values(seed)
    y = numerics.continuous_fake_quant(
        x, numerics.line_parameters(torch.tensor(offset), family, rules)
    ).double()
    low, high, share = by_hand(x, family, rules, offset)
    expected = (1 - share) * low + share * high
    # The share is that of a float32 position, and the mean has three roundings of float32.
    assert ((y - expected).abs() <= 1e-6 * torch.maximum(low.abs(), high.abs())).all()
    assert (torch.minimum(low, high) <= y * (1 + 1e-6 * y.sign())).all()


@settings(deadline=None, max_examples=60)
@given(lines(), st.integers(0, 2**32))
def test_derivatives_are_those_of_the_mean(line, seed):
    family, rules, offset = line
    x, last = wide_values(seed), len(family.formats) - 1
    parameters = numerics.line_parameters(torch.tensor(offset), family, rules)
    dx, db = numerics.continuous_derivatives(x, parameters)
    low, high, share = by_hand(x, family, rules, offset)
    torch.testing.assert_close(db.double(), (high - low) * last / 2, rtol=1e-6, atol=0)
    k = min(int(offset * last / 2), last - 1)
    for value, f in ((low, family.formats[k]), (high, family.formats[k + 1])):
        # Where a value is not the largest of its block's scale, nothing was clamped.
        scale = numerics.quantize(x, f, scale_rule=rules[family.formats.index(f)])
        codes = scale.codes & (f.element.sign_code - 1)
        free = codes < f.element.max_code
        weight = share if value is high else 1 - share
        assert (dx[free] >= weight - 1e-6).all()
    assert ((dx >= 0) & (dx <= 1)).all()
    if all(rule == "ceil" for rule in rules):
        assert (dx == 1).all()


def test_gradient_by_x_counts_the_neighbours_that_do_not_clamp():
    # amax 7.9: under floor both scales are 1, E2M1 ends at 6 and E2M3 at 7.5.
    x = torch.zeros(32)
    x[:4] = torch.tensor([7.9, 7.0, -7.0, 1.0])
    parameters = numerics.line_parameters(torch.tensor(0.5), ["mxfp4", "mxfp6_e2m3"])
    dx, db = numerics.continuous_derivatives(x, parameters)
    # 7.0 rounds to 8 in steps of 2, and 7.9 to 8 in steps of 0.5.
    assert dx[:4].tolist() == [0.0, 0.25, 0.25, 1.0]
    assert db[:4].tolist() == [0.75, 0.5, -0.5, 0.0]  # half the difference: two stops
    y = numerics.continuous_fake_quant(x, parameters)
    assert y[:4].tolist() == [6.375, 6.25, -6.25, 1.0]
    grad = torch.tensor([torch.inf, 2.0, 1.0, 1.0, *[1.0] * 28])
    grad_x, grad_offset = numerics.continuous_fake_quant_backward(grad, x, parameters)
    assert grad_x[:4].tolist() == [0.0, 0.5, 0.25, 1.0] and grad_offset == torch.inf


def test_at_a_stop_the_derivative_is_the_right_hand_one_but_at_the_last():
    x = wide_values(3)
    quantized = [numerics.fake_quant(x, f) for f in FOUR.formats]
    for index, stop in enumerate(FOUR.stops):
        parameters = numerics.line_parameters(torch.tensor(stop), FOUR)
        k = min(index, 2)
        assert parameters[:2].tolist() == [float(index == 3), 1.5]
        _, db = numerics.continuous_derivatives(x, parameters)
        torch.testing.assert_close(db, (quantized[k + 1] - quantized[k]) * 1.5, rtol=0, atol=0)


def test_many_offsets_have_the_rows_that_each_has_alone():
    offsets = torch.linspace(0, 2, 61)
    rows = numerics.line_parameters(offsets, FOUR, ("rceil", "floor", "even", "mse"))
    assert rows.shape == (61, 12) and rows.dtype == torch.float32
    for offset, row in zip(offsets, rows, strict=True):
        alone = numerics.line_parameters(offset, FOUR, ("rceil", "floor", "even", "mse"))
        assert torch.equal(row, alone)


def test_what_reaches_infinity_stays_exact_at_the_stops():
    x = torch.full((32,), 3.3e38)
    rules = ("ceil", "floor")
    for offset, expected in ((0.0, torch.inf), (1.0, torch.inf), (2.0, None)):
        parameters = numerics.line_parameters(torch.tensor(offset), ["mxfp4", "mxfp6_e2m3"], rules)
        y = numerics.continuous_fake_quant(x, parameters)
        expected = float(numerics.fake_quant(x, "mxfp6_e2m3")[0]) if expected is None else expected
        assert (y == expected).all()


def test_the_element_path_is_refused_where_there_is_none():
    words = (
        r"search\.descent\.path=element: there is no element path between mxfp4, mxfp6_e3m2 .*auto"
    )
    with pytest.raises(FormatError, match=words):
        numerics.path_parameters(torch.tensor(1.0), ["mxfp4", "mxfp6_e3m2"])
    with pytest.raises(FormatError, match=r"scale rules even, floor"):
        numerics.continuous_parameters(
            torch.tensor(1.0), "mxfp6_mxfp4", ["even", "floor"], "element"
        )
    known = numerics.continuous_parameters(torch.tensor(1.0), ["mxfp4", "mxfp6"])
    assert torch.equal(known, numerics.path_parameters(torch.tensor(1.0), "mxfp6_mxfp4"))
    with pytest.raises(FormatError, match=r"scale_rule='flor'"):
        numerics.line_parameters(torch.tensor(1.0), "mxfp6_mxfp4", ["floor", "flor"])
