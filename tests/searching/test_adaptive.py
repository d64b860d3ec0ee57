"""The adaptive search: scores where there is little text, and a descent that text held out must have confirmed."""

import numpy as np
import pytest
import torch

import dmx
from dmx.assignment.budget import Budget
from dmx.searching import adaptive, search_space
from dmx.searching.adaptive import FEWEST_BATCHES, Judgement, judge, split_batches, start_from
from dmx.searching.offsets import harden
from experiments.running.rows import method_of
from tests.settings import search_config

BUDGET = Budget(5.0)
EXACT = {"penalty": "exact", "gradient_scale": "elements", "lr_schedule": "cosine"}


def batches(n):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 257, (2, 16), generator=generator) for _ in range(n)]


def config(name="adaptive", **settings):
    return search_config(name=name, objective="kl", units="layer", **EXACT, **settings)


@pytest.fixture
def small(make_tiny):
    return make_tiny("llama", layers=1).model


def test_few_batches_give_the_choice_of_the_scores_and_say_so(small):
    few = batches(FEWEST_BATCHES - 1)
    scored = dmx.search(small, few, BUDGET, config("kl_per_bit")).assignment
    with pytest.warns(
        UserWarning, match=rf"adaptive: {len(few)} batches are too few for a descent"
    ):
        result = dmx.search(small, few, BUDGET, config())
    assert result.assignment.formats == scored.formats and result.history == []
    said = result.assignment.search
    assert said.kept == "scores" and said.path is None and len(result.warnings) == 1
    assert method_of(result.assignment, quantized="W+A").label == "adaptive: kl_per_bit"


@pytest.mark.parametrize(("mean", "kept"), [(-0.2, "descent"), (-0.05, "scores"), (0.2, "scores")])
def test_the_descent_is_kept_where_it_is_better_by_more_than_an_error(
    mean, kept, small, monkeypatch, tmp_path
):
    seen = []

    def judged(model, space, config, held, descended, scored):
        seen.append((held, descended, scored))
        return Judgement(mean, 0.1)

    monkeypatch.setattr("dmx.searching.run.judge", judged)
    monkeypatch.setattr(adaptive, "MOST_PASSES", 1)
    # From the other end, and too slow to come back: a descent that ends elsewhere.
    monkeypatch.setattr("dmx.searching.run.start_from", lambda *seen: 2 - start_from(*seen))
    many = batches(FEWEST_BATCHES)
    result = dmx.search(small, many, BUDGET, config(lr=1e-6), folder=tmp_path)
    ((held, descended, scored),) = seen
    assert [b.tolist() for b in held] == [many[3].tolist(), many[7].tolist()]
    assert not np.array_equal(descended, scored) and len(result.history) == 6
    space = search_space(small, config())
    taken = space.choice_of(result.assignment.formats)
    np.testing.assert_array_equal(taken, descended if kept == "descent" else scored)
    said = result.assignment.search
    assert said.kept == kept and said.path == "element"
    assert said.kept_because.endswith(f"on 2 batches held out: {Judgement(mean, 0.1)}")
    assert bool(result.warnings) == (kept == "scores")


def test_a_judgement_is_the_difference_on_rows_that_are_held_out(small):
    space = search_space(small, config())
    low, high = (np.full(len(space.units), i) for i in (0, 1))
    held = batches(3)
    found = judge(small, space, config(), held, high, low)
    opposite = judge(small, space, config(micro_batch=1), held, low, high)
    rows = [[], []]
    for choice, into in zip((high, low), rows, strict=True):
        made = dmx.assignment.assignment.make_assignment(space, choice, small)
        reference = {}
        for row in torch.cat(held):
            reference[row] = small(input_ids=row[None], use_cache=False).logits.detach()
        dmx.apply(small, made)
        for row, logits in reference.items():
            own = small(input_ids=row[None], use_cache=False).logits.detach()
            into.append(float(dmx.numerics.kl_divergence(logits, own)))
        dmx.restore(small)
    difference = np.subtract(*rows)
    assert found.mean == pytest.approx(difference.mean(), rel=1e-3) and found.mean < 0
    assert found.stderr == pytest.approx(difference.std(ddof=1) / 6**0.5, rel=1e-2)
    assert opposite.mean == pytest.approx(-found.mean, rel=1e-3)
    assert (found.kept, opposite.kept) == ("descent", "scores")


@pytest.mark.parametrize("family", ["mxfp6_mxfp4", "mxfp8_mxfp6_mxfp4"])
def test_a_descent_starts_where_the_scores_are(family, small, generator):
    space = search_space(small, config(family=family))
    worth = torch.rand(len(space.units), len(space.formats) - 1, generator=generator).double()
    preference = worth.sort(1, descending=True)[0].numpy()
    price = np.median(preference)
    choice = (preference > price).sum(1)
    raw = start_from(preference, space, BUDGET, choice)
    assert raw.dtype == np.float32 and raw.min() >= 0 and raw.max() <= 2
    family = config(family=family).format_family
    if len(family.formats) == 2:  # the last unit that was taken lies on the threshold
        assert (harden(raw.astype(np.float64) + 1e-3, family) == choice).all()
    assert np.corrcoef(raw, preference.sum(1))[0, 1] > 0.8


def test_steps_follow_the_text_and_no_batch_is_lost():
    many = batches(50)
    learned, held = split_batches(many)
    assert len(held) == 12 and len(learned) == 38
    assert {id(b) for b in (*learned, *held)} == {id(b) for b in many}
    assert adaptive.adaptive_steps(config(steps=400), 50) == 4 * len(learned)
    assert adaptive.adaptive_steps(config(steps=100), 50) == 100
    assert adaptive.adaptive_steps(config(), FEWEST_BATCHES - 1) == 0
