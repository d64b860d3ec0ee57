"""The adaptive search: scores where there is little text, and of others what text held out must have confirmed."""

import numpy as np
import pytest
import torch

import dmx
from dmx.assignment.budget import Budget
from dmx.searching import adaptive, search_space
from dmx.searching.adaptive import FEWEST_BATCHES, Jury, held_kls, split_batches, start_from
from dmx.searching.offsets import harden
from experiments.running.rows import method_of
from tests.settings import search_config

BUDGET = Budget(5.0)
MINUS = "minus that of kl_per_bit, nats/token: "
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
        UserWarning, match=rf"adaptive: {len(few)} batches are too few to judge another choice on"
    ):
        result = dmx.search(small, few, BUDGET, config())
    assert result.assignment.formats == scored.formats and result.history == []
    said = result.assignment.search
    assert said.kept == "scores" and said.path is None and len(result.warnings) == 1
    assert method_of(result.assignment, quantized="W+A").label == "adaptive: kl_per_bit"


@pytest.fixture(scope="module")
def scores_folder(tmp_path_factory):
    """That the searches of one model and text share."""
    return tmp_path_factory.mktemp("scores")


def rows(mean):
    """KL of four rows around a mean, with a standard error of 0.1."""
    return mean + 0.1 * np.array([-1, 1, -1, 1]) * 3**0.5


@pytest.mark.parametrize(
    ("fisher", "descent", "starts", "kept"),
    [
        (0.2, -0.2, "kl_per_bit", "descent"),
        (-0.05, -0.05, "kl_per_bit", "scores"),
        (-0.2, -0.15, "fisher", "fisher"),
    ],
)
def test_the_best_choice_is_kept_where_it_is_better_by_more_than_an_error(
    fisher, descent, starts, kept, small, monkeypatch, tmp_path, scores_folder
):
    seen, started = [], []

    def measured(model, space, config, held, choices):
        seen.append((held, *choices))
        if len(seen) == 1:
            return np.stack([np.zeros(4), rows(fisher)])
        return rows(descent)[None]

    def from_the_other_end(preference, *seen):
        started.append(preference)
        return 2 - start_from(preference, *seen)

    monkeypatch.setattr("dmx.searching.run.held_kls", measured)
    monkeypatch.setattr(adaptive, "MOST_PASSES", 1)
    # From the other end, and too slow to come back: a descent that ends elsewhere.
    monkeypatch.setattr("dmx.searching.run.start_from", from_the_other_end)
    many = batches(FEWEST_BATCHES)
    alone = {
        n: dmx.search(small, many, BUDGET, config(n), score_folder=scores_folder)
        for n in ("kl_per_bit", "fisher")
    }
    slow = config(lr=1e-6)
    result = dmx.search(small, many, BUDGET, slow, folder=tmp_path, score_folder=scores_folder)
    (held, *scores), (_, descended) = seen
    assert [b.tolist() for b in held] == [many[3].tolist(), many[7].tolist()]
    space = search_space(small, config())
    expected = [space.choice_of(r.assignment.formats) for r in alone.values()]
    np.testing.assert_array_equal(scores, expected)
    np.testing.assert_array_equal(started, [alone[starts].preference])
    choices = dict(zip(("scores", "fisher", "descent"), (*scores, descended), strict=True))
    assert len({tuple(c) for c in choices.values()}) == 3 and len(result.history) == 6
    taken = space.choice_of(result.assignment.formats)
    np.testing.assert_array_equal(taken, choices[kept])
    said = result.assignment.search
    assert said.kept == kept and said.path == "element"
    texts = f"fisher {fisher:+.3g} ± 0.1, descent {descent:+.3g} ± 0.1 (from {starts})"
    assert said.kept_because.endswith(f"on 2 batches held out {MINUS}{texts}")
    assert bool(result.warnings) == (kept != "descent")
    # Both scans were made before; their time is that of this search too.
    assert result.score_seconds == pytest.approx(sum(r.score_seconds for r in alone.values()))
    assert result.seconds > result.score_seconds > 0
    called = {"scores": "kl_per_bit", "fisher": "fisher", "descent": "dMX"}[kept]
    assert method_of(result.assignment, quantized="W+A").label == f"adaptive: {called}"


def test_a_choice_is_measured_once_and_not_at_all_where_all_are_the_same():
    asked = []
    low, high = np.zeros(3, dtype=np.int64), np.ones(3, dtype=np.int32)

    def measured(choices):
        asked.append(len(choices))
        return np.stack([rows(-float(c.sum())) for c in choices])

    jury = Jury(measured)
    assert jury.best({"scores": low, "fisher": low}) == "scores" and not asked
    assert jury.best({"scores": low, "fisher": low, "descent": high}) == "descent"
    assert jury.best({"scores": low, "fisher": high, "descent": high}) == "fisher"
    assert asked == [2] and str(jury) == "fisher -3 ± 0, descent -3 ± 0"
    assert jury.best({"scores": high, "fisher": low, "descent": high}) == "scores"
    assert asked == [2] and str(jury) == "fisher +3 ± 0, descent the choice of kl_per_bit"


def test_choices_are_measured_on_rows_that_are_held_out(small):
    space = search_space(small, config())
    choices = [np.full(len(space.units), i) for i in (1, 0)]
    held = batches(3)
    found = held_kls(small, space, config(), held, choices)
    np.testing.assert_allclose(
        held_kls(small, space, config(micro_batch=1), held, choices[::-1])[::-1], found, rtol=1e-3
    )
    references = [
        small(input_ids=row[None], use_cache=False).logits.detach() for row in torch.cat(held)
    ]
    for choice, kls in zip(choices, found, strict=True):
        dmx.apply(small, dmx.assignment.assignment.make_assignment(space, choice, small))
        for row, reference, kl in zip(torch.cat(held), references, kls, strict=True):
            own = small(input_ids=row[None], use_cache=False).logits.detach()
            expected = float(dmx.numerics.kl_divergence(reference, own))
            assert kl == pytest.approx(expected, rel=1e-3, abs=2e-7)
        dmx.restore(small)
    assert found.shape == (2, 6) and found[0].mean() < found[1].mean()


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
