"""Directions of a step and the average that they hold: each does what its name says."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dmx
from dmx.assignment.budget import Budget
from dmx.errors import DmxError
from dmx.formats import get_family
from dmx.searching import search_space
from dmx.searching.descent import (
    along_budget,
    element_scale,
    shift_to_average,
)
from dmx.searching.differentiable import DifferentiableSearch
from dmx.searching.offsets import anneal, preference
from tests.settings import search_config

FAMILIES = ("mxfp6_mxfp4", "mxfp8_mxfp6_mxfp4")


@pytest.fixture
def tiny(tiny_trained):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 256, (2, 32), generator=generator) for _ in range(3)]
    return tiny_trained.model, batches


# ---------------------------------------------------------------- directions


@settings(deadline=None)
@given(st.integers(0, 2**32), st.floats(-3, 3))
def test_a_direction_along_the_budget_ignores_what_a_bit_costs(seed, price):
    generator = torch.Generator().manual_seed(seed)
    gradient, pull, scale = torch.rand(3, 20, generator=generator, dtype=torch.float64) + 0.1
    direction = along_budget(gradient, pull, scale)
    assert abs(float(direction @ pull)) < 1e-12
    torch.testing.assert_close(along_budget(gradient + price * pull, pull, scale), direction)
    # Still downhill: the task loss falls against it.
    assert float(direction @ gradient) >= -1e-12


def test_units_of_any_size_that_save_alike_per_bit_move_alike():
    elements = torch.tensor([1.0, 8.0, 8.0, 64.0])
    saved_per_element = torch.tensor([-3.0, -3.0, -1.0, -1.0])
    moved = element_scale(elements) * saved_per_element * elements
    assert moved[0] == moved[1] and moved[2] == moved[3] and moved[0] == 3 * moved[2]
    equal = element_scale(torch.full((4,), 7.0))
    assert torch.equal(equal, torch.ones(4))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.4, 20.0])
def test_one_shift_brings_the_average_to_the_target_from_below(family, temperature, generator):
    family = get_family(family)
    raw = torch.rand(300, generator=generator) * 2

    def average_of(rows):
        return anneal(rows, temperature, family).mean(-1)

    for target in (0.2, 0.7, 1.0, 1.9):
        shifted = shift_to_average(raw, average_of, target)
        # At a temperature of 20 each offset is a step, and 300 of them make steps of 1/150.
        assert 0 <= target - float(average_of(shifted)) < (1e-3 if temperature < 1 else 2 / 150)
        inside = (shifted > 0) & (shifted < 2)
        moved = (shifted - raw)[inside]
        assert moved.numel() < 2 or float(moved.max() - moved.min()) < 1e-6
    lowest, highest = (shift_to_average(raw, average_of, t) for t in (-1.0, 9.0))
    assert (lowest <= 1e-4).all() and (highest >= 2 - 1e-4).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", ["none", "elements"])
def test_an_exact_search_holds_its_soft_average_at_the_budget(family, scale, tiny):
    model, batches = tiny
    config = search_config(
        family=family,
        penalty="exact",
        gradient_scale=scale,
        steps=20,
        evaluate_every=20,
        anneal_from=1.0,
    )
    result = dmx.search(model, batches, Budget(4.8), config)
    bits = np.array([row["soft_bits"] for row in result.history])
    assert (abs(bits - 4.8) < 2e-3).all()
    assert all(row["penalty"] == 0 for row in result.history)
    assert np.ptp(result.raw_offsets[0]) == 0 < np.ptp(result.raw_offsets[-1])


def test_beyond_the_reach_of_soft_averages_an_exact_search_still_ends_within_the_budget(tiny):
    model, batches = tiny
    for limit in (4.0, 4.01, 5.99):
        config = search_config(penalty="exact", steps=4, evaluate_every=4)
        result = dmx.search(model, batches, Budget(limit), config)
        assert result.assignment.bits["element_bits"] <= limit
        assert np.isfinite(result.raw_offsets).all()


def test_units_that_the_clamp_holds_rank_by_where_they_were_before(tiny):
    """All raw offsets at 0: the last to fall is raised first, and not the first by name."""
    model, batches = tiny
    config = search_config(steps=2, units="layer")
    space = search_space(model, config)
    search = DifferentiableSearch(
        model, batches, space, Budget(4.5), config, folder=None, fingerprint=""
    )
    n = len(space.units)
    before = np.linspace(0.1, 0.9, n, dtype=np.float32)
    search.raw_rows = [before, np.zeros(n, dtype=np.float32)]
    wanted = search.preference()[:, 0]
    assert (np.diff(wanted) > 0).all()
    np.testing.assert_allclose(wanted, -1, atol=1e-8)
    raw = np.array([0.5, 1.5, 1.0])
    assert np.array_equal(preference(raw, search.family)[:, 0], raw - 1)


# ---------------------------------------------------------------- going on, refusals


class Stop(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize(
    "options",
    [
        {"penalty": "exact", "gradient_scale": "elements"},
        {"gradient_scale": "elements", "momentum": 0.0, "nesterov": False},
    ],
    ids=str,
)
def test_killed_in_any_phase_it_goes_on_to_the_same_numbers(options, tiny, tmp_path):
    model, batches = tiny
    config = search_config(
        steps=10, raw_start=1.0, evaluate_every=5, checkpoint_every=3, polish_rounds=1, **options
    )
    whole = dmx.search(model, batches, Budget(4.8), config, folder=tmp_path / "whole")
    for after in (0, 5, 12, 25):
        calls = itertools.count()

        def fail(*_, calls=calls, after=after):
            if next(calls) == after:
                raise Stop

        handle = model.register_forward_hook(fail)
        folder = tmp_path / f"died-{after}"
        with pytest.raises(Stop):
            dmx.search(model, batches, Budget(4.8), config, folder=folder)
        handle.remove()
        resumed = dmx.search(model, batches, Budget(4.8), config, folder=folder)
        assert resumed.assignment == whole.assignment
        np.testing.assert_array_equal(resumed.raw_offsets, whole.raw_offsets)
        for name in ("history.jsonl", "polish.jsonl"):
            assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"gradient_scale": "element"},
            r"search\.descent\.gradient_scale='element'.*Did you mean 'elements'",
        ),
        ({"penalty": "exakt"}, r"search\.descent\.penalty='exakt'.*Did you mean 'exact'"),
        (
            {"penalty": "exact", "slope": 1.0},
            r"search\.descent\.slope=1\.0 belongs to .*penalty=hinge",
        ),
        (
            {"penalty_lambda": 1.0},
            r"penalty_lambda=1\.0 belongs to .*penalty=scaling, which is hinge",
        ),
    ],
)
def test_impossible_settings_are_refused(options, words):
    with pytest.raises(DmxError, match=words):
        search_config(**options)
