"""Directions of a step, starts from a heuristic, averaged offsets: each does what its name says."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dmx
from dmx.assignment.budget import Budget
from dmx.assignment.projection import project
from dmx.errors import DmxError
from dmx.formats import get_family
from dmx.searching import SearchConfig, search_space
from dmx.searching.descent import (
    RunningSquares,
    along_budget,
    element_scale,
    shift_to_average,
)
from dmx.searching.differentiable import DifferentiableSearch
from dmx.searching.heuristics import random_preference, soft_start
from dmx.searching.offsets import anneal, harden, preference
from dmx.searching.schedule import averaged_rows

FAMILIES = ("mxfp6_mxfp4", "mxfp8_mxfp6_mxfp4")


@pytest.fixture
def tiny(make_tiny):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 256, (2, 32), generator=generator) for _ in range(3)]
    return make_tiny("llama", train_steps=100).model.eval(), batches


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


def test_running_squares_are_those_of_adam_and_keep_the_mean_size():
    gradients = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    gradients *= torch.tensor([1e-3, 1e-2, 0.1, 1.0, 10.0, 0.0])
    squares = RunningSquares(gradients[0])
    weight = 0.99 ** torch.arange(49, -1, -1)
    for step, gradient in enumerate(gradients):
        scale = squares.scale(gradient, step)
    mean = (weight[:, None] * gradients**2).sum(0) / weight.sum()
    expected = (mean.mean() / mean[:5]).sqrt()
    torch.testing.assert_close(scale[:5], expected, rtol=1e-4, atol=0)
    assert scale[5] == 0  # no gradient: no direction, and no infinity
    assert scale.isfinite().all()


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
@pytest.mark.parametrize("scale", ["none", "elements", "rms"])
def test_an_exact_search_holds_its_soft_average_at_the_budget(family, scale, tiny):
    model, batches = tiny
    config = SearchConfig(
        family=family, penalty="exact", gradient_scale=scale, steps=20, evaluate_every=20,
        anneal_from=1.0,
    )  # fmt: skip
    result = dmx.search(model, batches, Budget(4.8), config)
    bits = np.array([row["soft_bits"] for row in result.history])
    assert (abs(bits - 4.8) < 2e-3).all()
    assert all(row["penalty"] == 0 for row in result.history)
    assert np.ptp(result.raw_offsets[0]) == 0 < np.ptp(result.raw_offsets[-1])


def test_beyond_the_reach_of_soft_averages_an_exact_search_still_ends_within_the_budget(tiny):
    model, batches = tiny
    for limit in (4.0, 4.01, 5.99):
        config = SearchConfig(penalty="exact", steps=4, evaluate_every=4)
        result = dmx.search(model, batches, Budget(limit), config)
        assert result.assignment.bits["element_bits"] <= limit
        assert np.isfinite(result.raw_offsets).all()


# ---------------------------------------------------------------- starts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spread", [0.2, 0.5, 1.0])
def test_a_soft_start_is_its_choice_with_the_surest_furthest_from_the_border(family, spread, tiny):
    config = SearchConfig(family=family, units="layer")
    space, family = search_space(tiny[0], config), get_family(family)
    wanted = random_preference(space, 3)
    choice = project(space, Budget(5.0), np.zeros(len(space.units), dtype=np.int64), wanted)
    raw = soft_start(space, family, choice, wanted, spread)
    assert np.array_equal(harden(raw, family), choice)
    assert (raw >= 0).all() and (raw <= 2).all()
    for candidate, step in ((0, 0), (len(space.formats) - 1, -1)):
        units = np.flatnonzero(choice == candidate)
        ordered = units[np.argsort(wanted[units, step])]
        assert (np.diff(raw[ordered]) > 0).all() or spread > 0.5


@pytest.mark.parametrize("start", ["fisher", "kl_per_bit"])
def test_a_search_that_does_not_move_ends_where_the_heuristic_started_it(start, tiny, tmp_path):
    model, batches = tiny
    options = {"units": "layer", "score_batches": 1}
    still = SearchConfig(start=start, lr=0.0, steps=2, **options)
    with pytest.warns(UserWarning, match="no offset moved"):
        found = dmx.search(model, batches, Budget(4.9), still, folder=tmp_path)
    other = dmx.search(model, batches, Budget(4.9), SearchConfig(name=start, **options))
    assert found.assignment.formats == other.assignment.formats
    assert 0.5 <= found.raw_offsets[0].min() < 1 < found.raw_offsets[0].max() <= 1.5
    with pytest.raises(DmxError, match=r"score_batches=4, but there are 3 batches"):
        dmx.search(model, batches, Budget(4.9), SearchConfig(start=start, score_batches=4))


# ---------------------------------------------------------------- averages and ties


def test_the_averaged_rows_end_where_annealing_begins():
    config = SearchConfig(steps=10, average_from=0.2, anneal_from=0.6)
    assert averaged_rows(config) == slice(2, 7)  # the states before steps 2 to 6
    assert averaged_rows(SearchConfig(steps=10)) == slice(0, 0)
    whole = SearchConfig(steps=10, average_from=0.0, anneal_from=1.0)
    assert averaged_rows(whole) == slice(0, 11)  # the last row is the state after the last step


def test_the_hard_choice_follows_the_averaged_offsets(tiny):
    model, batches = tiny
    config = SearchConfig(
        steps=12, raw_start=1.0, average_from=0.25, objective="kl", evaluate_every=12
    )
    result = dmx.search(model, batches, Budget(4.8), config)
    mean = result.raw_offsets[3:8].mean(0, dtype=np.float64)
    np.testing.assert_allclose(result.preference[:, 0], mean - 1, atol=1e-8)
    space = search_space(model, config)
    choice = project(space, Budget(4.8), harden(mean, get_family(config.family)), result.preference)
    names = space.layer_formats(choice)
    assert result.assignment.formats == names


def test_units_that_the_clamp_holds_rank_by_where_they_were_before(tiny):
    """All raw offsets at 0: the last to fall is raised first, and not the first by name."""
    model, batches = tiny
    config = SearchConfig(steps=2, units="layer")
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
        {"penalty": "exact", "gradient_scale": "rms", "start": "fisher", "average_from": 0.2},
        {"penalty": "exact", "gradient_scale": "elements", "start": "kl_per_bit"},
        {"gradient_scale": "rms"},
    ],
    ids=str,
)
def test_killed_in_any_phase_it_goes_on_to_the_same_numbers(options, tiny, tmp_path):
    model, batches = tiny
    config = SearchConfig(
        steps=10, raw_start=1.0, evaluate_every=5, checkpoint_every=3, polish_rounds=2, **options
    )
    whole = dmx.search(model, batches, Budget(4.8), config, folder=tmp_path / "whole")
    for after in (0, 5, 12, 18, 25):
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
        ({"start": "kl"}, r"search\.start='kl'.*constant, fisher, kl_per_bit"),
        ({"gradient_scale": "element"}, r"search\.gradient_scale='element'.*Did you mean 'elements'"),
        ({"penalty": "exakt"}, r"search\.penalty='exakt'.*Did you mean 'exact'"),
        ({"start_spread": 1.5}, r"search\.start_spread=1\.5 must lie in \[0, 1\]"),
        ({"average_from": 0.7}, r"search\.average_from=0\.7 must lie in \[0, 0\.6\]"),
        ({"average_from": "0.1"}, r"search\.average_from='0\.1' must be a number"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(options, words):
    with pytest.raises(DmxError, match=words):
        SearchConfig(**options)
