"""The discrete polish: what it finds, what it never leaves, and how it goes on after a stop."""

import copy
import functools
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import dmx
from dmx.assignment.budget import Budget
from dmx.assignment.projection import is_maximal, project
from dmx.data import DataConfig, encode, load_text, token_batches
from dmx.errors import BudgetError, DmxError, RunError
from dmx.formats import BIT_UNITS
from dmx.progress import Stopwatch
from dmx.searching import disturbances, search_space
from dmx.searching.bank import searching_model
from dmx.searching.config import PolishConfig
from dmx.searching.heuristics import random_preference
from dmx.searching.knapsack import solve_knapsack
from dmx.searching.polish import KEPT_LOGITS, LOG_FILE, STATE_FILE, Polish
from tests.settings import search_config

FAMILIES = ("mxfp6_mxfp4", "mxfp8_mxfp6_mxfp4")


@pytest.fixture
def tiny(tiny_trained):
    """Trained, two blocks: eight fused units that differ in how much a format hurts."""
    return tiny_trained.model, text_batches(tiny_trained.tokenizer, 64, 4)


@pytest.fixture
def quick(tiny_trained):
    """The same on an eighth of the tokens, for what does not depend on them."""
    return tiny_trained.model, text_batches(tiny_trained.tokenizer, 16, 2)


@functools.cache
def text_batches(tokenizer, window, rows):
    text = load_text(DataConfig(name="embedded", split="calibration", max_characters=20_000))
    return token_batches(encode(tokenizer, text), window, rows, seed=0, n_batches=3)


def void(_):
    """A hook that returns something would replace the output."""


def polish(model, tokens, budget, config, start, folder=None):
    run = Polish(
        model,
        tokens,
        search_space(model, config),
        budget,
        config,
        start=np.array(start),
        folder=folder,
        fingerprint="",
        clock=Stopwatch(),
    )
    run.run()
    return run


def random_start(space, budget, seed):
    lowest = np.zeros(len(space.units), dtype=np.int64)
    return project(space, budget, lowest, random_preference(space, seed))


def all_divergences(run):
    """choice -> KL of every maximal choice, by whole passes."""
    found = {}
    n_units, n_formats = len(run.space.units), len(run.space.formats)
    with (
        torch.no_grad(),
        searching_model(run.model, run.space, run.config.format_family, "floor") as bank,
    ):
        for choice in itertools.product(range(n_formats), repeat=n_units):
            if is_maximal(run.space, run.budget, np.array(choice)):
                found[choice] = run.divergence(np.array(choice), bank)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "family"), [*((4.5, family) for family in FAMILIES), (5.0, "mxfp6_mxfp4")]
)
def test_from_bad_starts_it_ends_at_the_best_choice_or_within_one_percent(limit, family, tiny):
    model, tokens = tiny[0], [torch.cat(tiny[1])]
    config = search_config(name="random", family=family, polish_rounds=20, polish_batches=1)
    budget, divergences = Budget(limit), None
    for seed in range(2):
        space = search_space(model, config)
        run = polish(model, tokens, budget, config, random_start(space, budget, seed))
        divergences = divergences or all_divergences(run)
        assert run.rows[-1]["kl"] <= 1.01 * min(divergences.values())
        assert min(divergences.values()) < 0.7 * max(divergences.values())


def test_each_round_is_measured_right_and_none_is_worse(tiny):
    """The log's KL is that of the applied assignment over the same tokens, by another way."""
    model, tokens = tiny
    config = search_config(name="random", polish_rounds=8, polish_batches=3, units="layer")
    result = dmx.search(model, tokens, Budget(4.8), config)
    unpolished = dmx.search(
        model, tokens, Budget(4.8), replace(config, polish=PolishConfig(rounds=0))
    )
    kls = [row["kl"] for row in result.polish]
    assert kls == sorted(kls, reverse=True) and kls[-1] < 0.97 * kls[0]
    assert [row["round"] for row in result.polish] == list(range(len(kls)))
    assert all(row["bits"] <= 4.8 and row["seconds"] >= 0 for row in result.polish)
    assert unpolished.polish == [] and result.assignment != unpolished.assignment
    assert result.assignment.search.polish_rounds == 8
    reference = copy.deepcopy(model)
    for found, kl in ((unpolished, kls[0]), (result, kls[-1])):
        dmx.apply(model, found.assignment)
        whole = torch.cat(tokens).flatten()
        assert dmx.kl_divergence(model, reference, whole, window=64) == pytest.approx(kl, rel=1e-4)
        dmx.restore(model)


@pytest.mark.parametrize("operands", ["joint", "separate"])
def test_reused_prefixes_and_stacked_passes_change_no_measurement(operands, tiny, monkeypatch):
    model, tokens = tiny
    config = search_config(
        name="random",
        polish_rounds=1,
        units="layer",
        include_lm_head=True,
        family="mxfp8_mxfp6_mxfp4",
        fixed={"*.0.mlp.down_proj": "mxfp4"},
        choices=operands,
    )
    space = search_space(model, config)
    start = random_start(space, Budget(5.5), 1)
    quick = polish(model, tokens, Budget(5.5), config, start)
    monkeypatch.setattr(disturbances, "prefix_replay_is_exact", lambda *_: False)
    plain = polish(model, tokens, Budget(5.5), config, start)
    np.testing.assert_allclose(quick.gains.gain, plain.gains.gain, rtol=1e-3, atol=1e-7)
    monkeypatch.undo()
    calls = itertools.count()
    handle = model.model.layers[0].register_forward_hook(lambda *_: void(next(calls)))
    polish(model, tokens, Budget(5.5), config, start)
    handle.remove()
    assert next(calls) < 3 * 2 * len(space.units)


@pytest.mark.parametrize(
    ("name", "family", "cases"),
    [
        ("random", "mxfp8_mxfp6_mxfp4", (0, 3)),
        ("kl_per_bit", "mxfp8_mxfp6_mxfp4", (1, 2)),
        ("differentiable", "mxfp8_mxfp6_mxfp4", (0, 3)),
        ("fisher", "mxfp6_mxfp4", (0, 1, 2, 3)),
        ("fisher", "mxfp8_mxfp6_mxfp4", (1, 2)),
    ],
)
def test_every_polished_search_ends_within_the_budget_and_maximal(name, family, cases, quick):
    model, tokens = quick
    kinds = list(itertools.product(("fused", "layer"), ("elements", "layers")))
    for i in cases:
        units, weighting = kinds[i]
        rounds = 1 + i // 2
        unit = BIT_UNITS[(i + FAMILIES.index(family)) % 2]
        config = search_config(
            name=name,
            family=family,
            units=units,
            weighting=weighting,
            polish_rounds=rounds,
            polish_batches=1,
            steps=2,
            raw_start=1.0,
            exclude=["*.1.self_attn.o_proj"],
            fixed={"*.0.mlp.down_proj": "mxfp8"},
            choices=("separate", "joint")[i % 2],
        )
        space = search_space(model, config)
        low, high = space.bounds(unit)
        budget = Budget(low + (high - low) * 0.21 * (i + 1), unit)
        result = dmx.search(model, tokens, budget, config)
        formats = result.assignment.formats
        choice = space.choice_of(formats, result.assignment.input_formats)
        assert is_maximal(space, budget, choice, gain=result.preference)
        assert result.assignment.bits[unit] == space.average(choice, unit) <= budget.limit
        assert result.polish[-1]["bits"] == space.average(choice, unit)
        assert all(row["bits"] <= budget.limit for row in result.polish)
        assert 2 <= len(result.polish) <= rounds + 1
        assert formats["model.layers.0.mlp.down_proj"] == "mxfp8_e4m3"


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_neighbourhood_knapsack_is_exact(tiny, data):
    """Against trying everything: the least sum of scores within budget, neighbourhood and bans."""
    model, _ = tiny
    config = search_config(family=data.draw(st.sampled_from(FAMILIES)))
    space = search_space(model, config)
    space = replace(space, units=space.units[:5])
    n_formats = len(space.formats)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scores = rng.normal(size=(5, n_formats))
    budget = Budget(data.draw(st.floats(4.0, space.bounds("element_bits")[1])))
    near = random_start(space, budget, 1)
    scores[np.arange(5), near] = 0
    blocked = rng.random(scores.shape) < 0.2
    blocked[np.arange(5), near] = False
    scores[blocked] = np.inf
    most = data.draw(st.integers(0, 5))
    bans = [near] if data.draw(st.booleans()) else []
    allowed = {}
    for choice in itertools.product(range(n_formats), repeat=5):
        array = np.array(choice)
        total = scores[np.arange(5), array].sum()
        fits = space.average(array, "element_bits") <= budget.limit
        is_near = (array != near).sum() <= most
        if fits and is_near and np.isfinite(total) and not any((array == b).all() for b in bans):
            allowed[choice] = total
    if not allowed:
        with pytest.raises(BudgetError):
            solve_knapsack(space, budget, scores, near=near, most_changes=most, excluded=bans)
        return
    found = solve_knapsack(space, budget, scores, near=near, most_changes=most, excluded=bans)
    assert allowed[tuple(found.tolist())] == pytest.approx(min(allowed.values()), abs=1e-6)


# ---------------------------------------------------------------- going on


class Stop(BaseException):
    """Stands for kill -9: nothing may catch it."""


def polish_and_die(model, tokens, config, folder, after):
    calls = itertools.count()

    def fail(*_):
        if next(calls) == after:
            raise Stop

    handle = model.register_forward_hook(fail)
    try:
        with pytest.raises(Stop):
            dmx.search(model, tokens, Budget(4.8), config, folder=folder)
    finally:
        handle.remove()


def test_killed_in_any_phase_it_goes_on_to_the_same_numbers(quick, tmp_path):
    """In the search, before the first round, while measuring, while verifying, at the end."""
    model, tokens = quick
    tokens = tokens + [t.flip(0) + 1 for t in tokens]  # fresh ones to verify on
    config = search_config(
        name="differentiable",
        polish_rounds=3,
        polish_batches=1,
        steps=4,
        raw_start=1.0,
        checkpoint_every=2,
        evaluate_every=4,
    )
    calls = itertools.count()
    handle = model.register_forward_hook(lambda *_: void(next(calls)))
    whole = dmx.search(model, tokens, Budget(4.8), config, folder=tmp_path / "whole")
    handle.remove()
    files = {LOG_FILE, "history.jsonl"}
    n_calls = next(calls)
    assert len(whole.polish) >= 3
    for after in sorted({2, *np.linspace(0, n_calls - 1, 4).astype(int).tolist()}):
        folder = tmp_path / f"died-{after}"
        polish_and_die(model, tokens, config, folder, after)
        resumed = dmx.search(model, tokens, Budget(4.8), config, folder=folder)
        assert resumed.assignment == whole.assignment
        np.testing.assert_array_equal(resumed.preference, whole.preference)
        assert without_seconds(resumed.polish) == without_seconds(whole.polish)
        for file in files:
            assert (folder / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def without_seconds(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_a_finished_polish_is_not_run_again_and_its_seconds_add_up(tiny, tmp_path):
    model, tokens = tiny
    config = search_config(polish_rounds=2, steps=3, raw_start=1.0)
    first = dmx.search(model, tokens, Budget(5.0), config, folder=tmp_path)
    handle = model.register_forward_hook(lambda *_: pytest.fail("a finished polish ran the model"))
    again = dmx.search(model, tokens, Budget(5.0), config, folder=tmp_path)
    handle.remove()
    assert again.assignment == first.assignment and again.polish == first.polish
    with safe_open(tmp_path / STATE_FILE, "pt") as file:
        spent = json.loads(file.metadata()["facts"])["seconds"]
    assert again.seconds > spent >= sum(row["seconds"] for row in first.polish)
    assert json.loads((tmp_path / LOG_FILE).read_text().splitlines()[0])["round"] == 0
    assert "seconds" not in (tmp_path / LOG_FILE).read_text()


def test_a_resumed_search_counts_the_seconds_before_it_died(tiny, tmp_path, monkeypatch):
    model, tokens = tiny
    config = search_config(steps=4, raw_start=1.0, checkpoint_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(Stopwatch, "seconds", property(lambda self: 1000.0 + self.before))
        polish_and_die(model, tokens, config, tmp_path, 6)
    assert 1000 < dmx.search(model, tokens, Budget(4.8), config, folder=tmp_path).seconds < 1100


def test_a_polish_can_follow_a_search_that_has_ended(tiny, tmp_path):
    model, tokens = tiny
    config = search_config(steps=3, raw_start=1.0)
    dmx.search(model, tokens, Budget(5.0), config, folder=tmp_path)
    whole = dmx.search(model, tokens, Budget(5.0), replace(config, polish=PolishConfig(rounds=2)))
    before = (tmp_path / "history.jsonl").read_bytes()
    later = dmx.search(
        model, tokens, Budget(5.0), replace(config, polish=PolishConfig(rounds=2)), folder=tmp_path
    )
    assert without_seconds(later.polish) == without_seconds(whole.polish)
    assert later.assignment.formats == whole.assignment.formats
    assert (tmp_path / "history.jsonl").read_bytes() == before


def test_states_that_do_not_fit_are_refused(tiny, tmp_path):
    model, tokens = tiny
    config = search_config(name="kl", polish_rounds=1)
    dmx.search(model, tokens, Budget(5.0), config, folder=tmp_path)
    for other, budget, data in (
        (replace(config, polish=PolishConfig(rounds=2)), 5.0, tokens),
        (replace(config, polish=PolishConfig(rounds=1, batches=1)), 5.0, tokens),
        (config, 5.1, tokens),
        (config, 5.0, tokens[:2]),
    ):
        with pytest.raises(
            RunError, match=r"polish_state\.safetensors is of a polish with other settings"
        ):
            dmx.search(model, data, Budget(budget), other, folder=tmp_path)
    whole = (tmp_path / STATE_FILE).read_bytes()
    for damaged in (b"", b"{}", whole[:-8], whole[:-1] + bytes([whole[-1] ^ 1])):
        (tmp_path / STATE_FILE).write_bytes(damaged)
        with pytest.raises(
            RunError, match=r"polish_state\.safetensors is damaged .*Delete it to polish"
        ):
            dmx.search(model, tokens, Budget(5.0), config, folder=tmp_path)


def test_impossible_settings_are_refused(tiny):
    model, tokens = tiny
    for options, words in (
        ({"polish_rounds": -1}, r"search\.polish\.rounds=-1 must be at least 0"),
        ({"polish_rounds": 1.5}, r"search\.polish\.rounds=1\.5 must be a whole number"),
        (
            {"polish_rounds": "auto"},
            r"auto is for the command `search`, .*search\.polish\.rounds=12",
        ),
        ({"polish_batches": 0}, r"search\.polish\.batches=0 must be at least 1"),
        ({"polish_batches": 2}, r"search\.polish\.batches=2 with search\.polish\.rounds=0"),
    ):
        with pytest.raises(DmxError, match=words):
            search_config(**options)
    config = search_config(name="random", polish_rounds=1, polish_batches=4)
    with pytest.raises(DmxError, match=r"search\.polish\.batches=4, but there are 3 batches"):
        dmx.search(model, tokens, Budget(5.0), config)


def test_the_model_is_as_it_was(tiny):
    model, tokens = tiny
    model.train()
    before = {n: (p.requires_grad, p.clone()) for n, p in model.named_parameters()}
    kinds = [type(m) for m in model.modules()]
    dmx.search(model, tokens, Budget(5.0), search_config(name="random", polish_rounds=2))
    assert model.training and kinds == [type(m) for m in model.modules()]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_rounds_measure_on_fresh_batches_and_remember(tiny):
    """Every batch that does not judge has its turn; gains are the weighted mean of the rounds."""
    model, tokens = tiny
    config = search_config(
        name="random", polish_rounds=4, polish_batches=1, family="mxfp8_mxfp6_mxfp4"
    )
    space = search_space(model, config)
    start = random_start(space, Budget(5.0), 1)
    run = Polish(
        model,
        tokens + [t.flip(0) + 1 for t in tokens],
        space,
        Budget(5.0),
        config,
        start=start,
        folder=None,
        fingerprint="",
        clock=Stopwatch(),
    )
    measured, seen = [], []
    measure, measured_on = run._measure, run.measured_on
    run._measure = lambda *a: measured.append(measure(*a)) or measured[-1]
    run.measured_on = lambda n: seen.append(measured_on(n)) or seen[-1]
    run.divergence = lambda choice, _: 1.0  # never better, so that the choice stays
    run.run()
    assert run.is_finished and len(run.rows) == 3 and seen == [[0], [5]]
    assert np.array_equal(run.choice, start)
    known = np.isfinite(measured[0])
    assert known.any() and not known.all()
    np.testing.assert_allclose(
        run.gains.gain[known], (0.5 * measured[0][known] + measured[1][known]) / 1.5
    )
    assert np.array_equal(
        np.isfinite(run.gains.scores(run.choice)).sum(axis=1), 1 + known.sum(axis=1)
    )
    scores = run.gains.scores(run.choice)
    for u, own in enumerate(run.choice):
        assert scores[u, own] == 0
        if own > 0:
            assert scores[u, own - 1] == pytest.approx(run.gains.gain[u, own - 1])
        if own < 2:
            assert scores[u, own + 1] == pytest.approx(-run.gains.gain[u, own])
    assert run.measured_on(2) == [0] and run.measured_on(3) == [5]


def test_what_was_measured_on_some_batches_is_verified_on_others(tiny):
    model, tokens = tiny
    space = search_space(model, search_config())

    def roles(n_batches, polish_batches):
        config = search_config(name="random", polish_rounds=1, polish_batches=polish_batches)
        made = Polish(
            model,
            (tokens * 20)[:n_batches],
            space,
            Budget(5.0),
            config,
            start=random_start(space, Budget(5.0), 0),
            folder=None,
            fingerprint="",
            clock=Stopwatch(),
        )
        return list(made.measuring), list(made.judging)

    assert roles(1, None) == ([0], [0])
    assert roles(3, None) == ([0], [1, 2])
    assert roles(10, None) == ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9])
    assert roles(60, None) == (list(range(4)), list(range(4, 20)))
    assert roles(60, 1) == ([0], [1, 2, 3, 4])
    assert roles(3, 3) == ([0, 1, 2], [0, 1, 2])
    # The judge decides: with one that calls everything worse, nothing is changed.
    config = search_config(name="random", polish_rounds=3, polish_batches=1)
    start = random_start(space, Budget(4.8), 1)
    run = Polish(
        model,
        tokens,
        space,
        Budget(4.8),
        config,
        start=start,
        folder=None,
        fingerprint="",
        clock=Stopwatch(),
    )
    run.divergence = lambda choice, _: float((choice != start).sum())
    run.run()
    assert np.array_equal(run.choice, start) and run.is_finished


def test_a_step_keeps_what_an_earlier_choice_showed_of_it(tiny):
    model, tokens = tiny
    config = search_config(name="random", polish_rounds=1, family="mxfp8_mxfp6_mxfp4")
    space = search_space(model, config)
    run = Polish(
        model,
        tokens,
        space,
        Budget(8.0),
        config,
        start=np.zeros(len(space.units)),
        folder=None,
        fingerprint="",
        clock=Stopwatch(),
    )
    run.gains.learn(np.tile([16.0, np.nan], (len(space.units), 1)))
    np.testing.assert_array_equal(run.gains.gain[0], [16.0, 1.0])  # the upper step by STEP_RATIO
    np.testing.assert_array_equal(run.gains.scores(run.choice)[0], [0.0, -16.0, np.inf])
    run.choice[:] = 2
    run.gains.learn(np.tile([np.nan, 3.0], (len(space.units), 1)))
    np.testing.assert_array_equal(run.gains.scores(run.choice)[0], [19.0, 3.0, 0.0])


def test_reference_logits_that_do_not_fit_are_run_anew(tiny, monkeypatch):
    model, tokens = tiny
    config = search_config(name="random", polish_rounds=1, polish_batches=1)
    start = random_start(search_space(model, config), Budget(4.8), 1)
    kept = polish(model, tokens, Budget(4.8), config, start)
    monkeypatch.setitem(KEPT_LOGITS, "cpu", 0)
    anew = polish(model, tokens, Budget(4.8), config, start)
    assert {index for index, _ in kept._references} == set(kept.judging) and not anew._references
    assert without_seconds(anew.rows) == without_seconds(kept.rows)


def test_two_rounds_in_a_row_without_a_better_choice_end_it(tiny):
    model, tokens = tiny
    config = search_config(name="random", polish_rounds=9, polish_batches=1)
    space = search_space(model, config)
    run = Polish(
        model,
        tokens * 2,
        space,
        Budget(5.0),
        config,
        start=random_start(space, Budget(5.0), 1),
        folder=None,
        fingerprint="",
        clock=Stopwatch(),
    )
    better = iter([False, True, False, False])
    run._best_nearby = lambda _scores, _divergence, now: (
        run.choice.copy() if next(better) else run.choice,
        now,
        1,
    )
    run.run()
    assert run.is_finished and len(run.rows) == 1 + 4
