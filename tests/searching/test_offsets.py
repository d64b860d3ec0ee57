"""Raw offsets: annealing, hardening, schedules, and the gradient that a search descends."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmx.applying.quantizers import fake_quant
from dmx.assignment.space import build_space
from dmx.formats import FAMILIES, get_family
from dmx.searching import schedule
from dmx.searching.bank import searching_model
from dmx.searching.offsets import added_bits, anneal, harden, preference
from tests.settings import search_config

EVERY_RAW = torch.linspace(0, 2, 4001)


# ---------------------------------------------------------------- annealing


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.4, 20.0, 1000.0])
def test_annealing_has_a_finite_gradient_for_any_raw_offset(family, temperature):
    raw = EVERY_RAW.clone().requires_grad_()
    anneal(raw, temperature, get_family(family)).sum().backward()
    assert raw.grad.isfinite().all() and (raw.grad >= 0).all() and raw.grad.max() > 0


def test_a_literal_sigmoid_would_fail_that_test():
    raw = EVERY_RAW.clone().requires_grad_()
    (2 / (1 + torch.exp(-20 * 20 * (raw / 2 - 0.5)))).sum().backward()
    assert not raw.grad.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_annealing_meets_the_stops_and_the_thresholds_lie_halfway(family):
    family = get_family(family)
    stops = torch.tensor(family.stops)
    assert torch.equal(anneal(stops, 20.0, family), stops)
    middle = (stops[1:] + stops[:-1]) / 2
    torch.testing.assert_close(anneal(middle, 20.0, family), middle, rtol=0, atol=1e-6)
    offsets = anneal(EVERY_RAW, 20.0, family)
    assert (offsets.diff() >= 0).all() and offsets.min() == 0 and offsets.max() == 2


def test_annealing_is_the_formula_of_its_family():
    raw, k, t = EVERY_RAW.double(), 20, 0.7
    two = 2 * torch.sigmoid(k * t * (raw / 2 - 1 / 2))
    three = torch.sigmoid(k * t * (raw - 1 / 2)) + torch.sigmoid(k * t * (raw - 3 / 2))
    by_hand = {"mxfp6_mxfp4": two, "mxfp8_mxfp4": two, "mxfp8_mxfp6_mxfp4": three}
    for name, expected in by_hand.items():
        torch.testing.assert_close(anneal(raw, t, get_family(name)), expected)


@pytest.mark.parametrize(("family", "bits"), [("mxfp6_mxfp4", 4.04), ("mxfp8_mxfp4", 4.07)])
def test_the_soft_average_starts_at_the_floor_of_the_design(family, bits):
    family = get_family(family)
    offset = float(anneal(torch.zeros(1), 0.4, family))
    added = float(added_bits(torch.tensor(offset), torch.tensor(family.steps("element_bits"))))
    assert 4 + added == pytest.approx(bits, abs=0.005)


def test_hardening_counts_the_thresholds_below():
    two, three = get_family("mxfp6_mxfp4"), get_family("mxfp8_mxfp6_mxfp4")
    raw = np.array([0, 0.5, 0.5001, 1, 1.0001, 1.5, 1.5001, 2], dtype=np.float32)
    assert harden(raw, two).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert harden(raw, three).tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert (preference(raw, two)[:, 0] == raw - 1).all()
    # the step 6 to 8 of a unit never ranks above its step 4 to 6
    assert (np.diff(preference(raw, three), axis=1) < 0).all()


# ---------------------------------------------------------------- schedules


def test_temperature_is_the_schedule_of_the_design():
    config = search_config(steps=400)
    found = [schedule.temperature(config, i) for i in range(400)]
    assert found[:240] == [0.4] * 240
    expected = [0.4 * 50 ** ((i - 240) / (399 - 240)) for i in range(240, 400)]
    np.testing.assert_allclose(found[240:], expected, rtol=1e-12)
    assert found[-1] == 20.0


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10, 30])
def test_the_last_step_of_a_short_search_is_hot_and_none_is_hotter(steps):
    found = [schedule.temperature(search_config(steps=steps), i) for i in range(steps)]
    assert found[-1] == 20.0 and all(0.4 <= t <= 20 for t in found)
    assert found == sorted(found)


def test_the_cosine_starts_at_the_learning_rate_and_nears_zero():
    config = search_config(steps=100, lr=3.0, lr_schedule="cosine")
    found = [schedule.learning_rate(config, i) for i in range(100)]
    assert found[0] == 3.0 and found[50] == pytest.approx(1.5) and 0 < found[-1] < 0.001
    assert schedule.learning_rate(search_config(lr=0.5), 399) == 0.5


# ---------------------------------------------------------------- the gradient of the smooth part


def path(family, b):
    """(exponent bits, mantissa bits, cap) of the continuous quantizer, from its definition."""
    if family == "mxfp8_mxfp4":
        return 2 + b, 1 + b, 1.75
    if family == "mxfp6_mxfp4":
        return 2.0, 1 + b, 1.875
    return 2 + 2 * max(b - 1, 0), 1 + 2 * min(b, 1), 1.875 - 0.125 * max(b - 1, 0)


def held_quantizer(x, b0, family):
    """y(x', b) in float64 with every decision (blocks' exponents, binades, roundings, clamps) held
    at those of x and b0: the smooth function whose derivative straight-through rounding takes."""
    x = x.double()
    blocks = x.reshape(-1, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True)))
    binade = torch.floor(torch.log2(blocks.abs()))

    def parts(b):
        e, m, cap = path(family, b)
        e_max = 2 ** (e - 1)
        scale = exponent - e_max
        return e_max, m, cap, scale, scale + 2 - e_max

    e_max, m, cap, scale, lowest = parts(b0)
    is_low = binade < lowest
    step = 2 ** (torch.where(is_low, lowest, binade) - m)
    residue = torch.round(blocks / step) - blocks / step
    top = 2 ** (scale + e_max) * min(2 - 2**-m, cap)
    is_clamped = (step * torch.round(blocks / step)).abs() > top
    is_capped = 2 - 2**-m >= cap

    def smooth(values, b):
        e_max, m, cap, scale, lowest = parts(b)
        step = 2 ** (torch.where(is_low, lowest, binade) - m)
        top = 2 ** (scale + e_max) * (cap if is_capped else 2 - 2**-m)
        inside = values.double().reshape(-1, 32) + step * residue
        return torch.where(is_clamped, torch.sign(blocks) * top, inside).reshape(x.shape)

    return smooth, int(is_low.sum()), int(is_clamped.sum())


def space_of(toy, family, n_units):
    """Of one layer: one unit, or one for each operand."""
    return build_space(toy, family.formats, choices=("joint", "separate")[n_units - 1])


class Toy(nn.Module):
    """One layer, searched; the loss is a fixed linear function of its output."""

    def __init__(self, generator):
        super().__init__()
        self.fc = nn.Linear(96, 8, bias=True)
        with torch.no_grad():
            self.fc.weight.copy_(torch.randn(8, 96, generator=generator).sinh())


# Of the weight and of the input: one number is of both. 1.0 is a kink with three stops.
STARTS = [(0.9,), (1.05,), (1.2,), (1.45,), (0.9, 1.2), (1.45, 1.05)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("starts", STARTS, ids=str)
def test_the_gradient_by_the_raw_offset_is_that_of_the_smooth_part(family, starts, generator):
    toy = Toy(generator)
    # sinh widens the range of magnitudes, so that subnormals and clamped values occur.
    x = (torch.randn(6, 96, generator=generator) * 2).sinh()
    direction = torch.randn(6, 8, generator=generator)
    kind, temperature = get_family(family), 0.4
    raw = torch.tensor(starts, requires_grad=True)
    with searching_model(toy, space_of(toy, kind, len(starts)), kind, "floor") as bank:
        x.requires_grad_()
        bank.set_soft(anneal(raw, temperature, kind))
        (toy.fc(x) * direction).sum().backward()

    b0 = anneal(raw.detach().double(), temperature, kind).tolist()
    of_x, low, clamped = held_quantizer(x.detach(), b0[-1], family)
    of_weight, _, _ = held_quantizer(toy.fc.weight.detach(), b0[0], family)
    assert low > 0 and clamped > 0  # both branches are seen

    def loss(raw_values, values=None):
        b = anneal(torch.tensor(raw_values, dtype=torch.float64), temperature, kind).tolist()
        weight = of_weight(toy.fc.weight.detach(), b[0])
        values = x.detach() if values is None else values
        return float(((of_x(values, b[-1]) @ weight.T) * direction.double()).sum())

    h = 1e-5
    scale = float(direction.norm() * x.detach().norm())  # the sum of terms of both signs
    for i in range(len(starts)):
        sides = [[s + sign * h * (j == i) for j, s in enumerate(starts)] for sign in (1, -1)]
        expected = (loss(sides[0]) - loss(sides[1])) / (2 * h)
        # Step 1e-5 leaves 1e-10 of truncation; float32 sums of 6 * 96 * 8 terms leave about 1e-6.
        assert float(raw.grad[i]) == pytest.approx(expected, rel=1e-4, abs=1e-6 * scale)
        assert math.isfinite(expected) and expected != 0
    bump = torch.zeros(6, 96)
    bump[2, 5] = 1.0
    by_x = (loss(starts, x.detach().double() + h * bump) - loss(starts)) / h
    assert float(x.grad[2, 5]) == pytest.approx(by_x, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_units", [1, 2], ids=["joint", "separate"])
def test_the_soft_layer_at_the_stops_is_the_hard_layer(n_units, family, dtype, generator):
    toy, kind = Toy(generator).to(dtype), get_family(family)
    x = torch.randn(6, 96, generator=generator).to(dtype)
    with (
        torch.no_grad(),
        searching_model(toy, space_of(toy, kind, n_units), kind, "floor") as bank,
    ):
        stops = list(zip(kind.stops, kind.formats, strict=True))
        for chosen in itertools.product(stops, repeat=n_units):
            bank.set_soft(torch.tensor([stop for stop, _ in chosen]))
            soft = toy.fc(x)
            formats = [block_format for _, block_format in chosen]
            bank.set_formats(formats)
            assert torch.equal(soft, toy.fc(x))
            by_hand = (fake_quant(x, formats[-1]), fake_quant(toy.fc.weight, formats[0]))
            assert torch.equal(soft, F.linear(*by_hand, toy.fc.bias))


def test_one_operand_alone_can_be_quantized(generator):
    toy, kind = Toy(generator), get_family("mxfp6_mxfp4")
    x, four = torch.randn(6, 96, generator=generator), kind.formats[0]
    weight, bias = toy.fc.weight.detach(), toy.fc.bias.detach()
    with torch.no_grad(), searching_model(toy, space_of(toy, kind, 2), kind, "floor") as bank:
        bank.set_formats([four, None])
        assert torch.equal(toy.fc(x), F.linear(x, fake_quant(weight, four), bias))
        bank.set_formats([None, four])
        assert torch.equal(toy.fc(x), F.linear(fake_quant(x, four), weight, bias))
