"""Rows that run at a time: asked for, and halved where the memory does not hold them; the same results."""

import contextlib

import numpy as np
import pytest
import torch

import dmx
from dmx.assignment.assignment import Assignment
from dmx.models.graph import GraphedStep
from dmx.models.memory import MicroBatch
from dmx.searching.config import DescentConfig, PolishConfig, SearchConfigError
from dmx.weights.learned import _Learning
from tests.settings import numbers, search_config

BATCHES = list(torch.randint(0, 257, (2, 4, 16), generator=torch.Generator().manual_seed(3)))
DESCENT = DescentConfig(raw_start=1.0, evaluate_every=2, checkpoint_every=2)
SEARCHES = {
    "kl": {},
    "fisher": {},
    "aumann_shapley": {},
    "differentiable": {"steps": 3, "objective": "kl", "descent": DESCENT},
    "joint": {"steps": 2, "descent": DESCENT},
    "random": {"polish": PolishConfig(rounds=1, batches=1)},
    "weight_mse": {"family": ["nvfp4", "mxfp8_e4m3"]},  # looks at inputs
}


@pytest.fixture
def small(make_tiny):
    return make_tiny("llama", layers=1).model


@contextlib.contextmanager
def memory_of(model, rows, *, once=False):
    """A device whose memory holds so many rows; with `once` it holds all of them after the first time."""
    failed = []

    def hook(_module, _args, named):
        if len(named["input_ids"]) > rows and not (once and failed):
            failed.append(len(named["input_ids"]))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield failed
    finally:
        handle.remove()


def searched(model, name, folder=None, **settings):
    config = dmx.SearchConfig(name=name, **SEARCHES[name], **settings)
    return dmx.search(model, BATCHES, dmx.Budget(5.0), config, folder=folder)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_that_halves_is_the_one_of_fewer_rows(small, name):
    plain, asked = (searched(small, name, micro_batch=rows) for rows in (None, 1))
    with (
        memory_of(small, 1) as failed,
        pytest.warns(UserWarning, match=r"goes on with 1 .*oom=halve"),
    ):
        halved = searched(small, name, oom="halve")
    assert failed and set(failed) == {4, 2}
    assert numbers(halved) == numbers(asked)
    assert halved.assignment.formats == plain.assignment.formats
    np.testing.assert_allclose(halved.preference, plain.preference, rtol=1e-3, atol=1e-5)


def test_memory_that_is_short_once_halves_once(small):
    with (
        memory_of(small, 0, once=True) as failed,
        pytest.warns(UserWarning, match="goes on with 2"),
    ):
        halved = searched(small, "differentiable", oom="halve")
    assert failed == [4]
    assert numbers(halved) == numbers(
        searched(small, "differentiable")
    )  # it ran out before the steps


def test_rows_that_were_halved_stay_so_when_a_stopped_search_goes_on(small, tmp_path):
    whole = searched(small, "differentiable", micro_batch=2)

    class Stopped(Exception):
        pass

    def stop(step, saved=[]):  # noqa: B006
        saved.append(step)
        if len(saved) == 2:
            raise Stopped

    with memory_of(small, 2), pytest.warns(UserWarning, match="goes on with 2"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
            from dmx.searching.differentiable import DifferentiableSearch

            own = DifferentiableSearch.save
            patch.setattr(DifferentiableSearch, "save", lambda s: (own(s), stop(s.step)))
            searched(small, "differentiable", tmp_path, oom="halve")
        # the first rows of the search before the steps run out again, those of the steps do not
        again = searched(small, "differentiable", tmp_path, oom="halve")
    assert numbers(again) == numbers(whole)


def test_without_it_the_error_comes_through_and_one_row_that_does_not_fit_ends_it(small):
    for rows, settings in ((1, {}), (0, {"oom": "halve"})):
        with memory_of(small, rows), pytest.raises(torch.OutOfMemoryError, match=r"20\.00 GiB"):
            searched(small, "kl", **settings)
    with pytest.raises(dmx.errors.DmxError, match=r"search\.oom.*wait.*stop.*halve"):
        search_config(name="kl", oom="wait")
    with pytest.raises(SearchConfigError, match=r"search\.micro_batch=0 must be at least 1"):
        search_config(name="kl", micro_batch=0)


def test_another_error_is_not_taken_for_one_of_memory():
    micro, calls = MicroBatch(None, "halve", "search"), []

    def use():
        calls.append(micro.rows)
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        micro.run(use, 4)
    assert calls == [None] and micro.rows is None


def test_what_was_made_of_more_rows_is_forgotten_with_each_halving():
    micro, made = MicroBatch(None, "halve", "search"), []
    micro.forgets(made.clear)

    def use():
        before = [*made]
        made.append(micro.rows)
        if micro.rows != 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return before

    with pytest.warns(UserWarning, match="goes on with"):
        assert micro.run(use, 4) == []
    assert made == [1]


def test_an_uneven_batch_is_weighted_by_its_rows(small):
    batches = [b[:3] for b in BATCHES]
    config = {"name": "differentiable", **SEARCHES["differentiable"]}
    one, two = (
        dmx.search(
            small,
            batches,
            dmx.Budget(5.0),
            dmx.SearchConfig(**config, micro_batch=rows),
        )
        for rows in (None, 2)
    )
    for a, b in zip(one.history, two.history, strict=True):
        for key in ("loss", "soft_loss", "soft_bits", "penalty", "grad_norm"):
            assert (a[key] is None) == (b[key] is None)
            assert (b[key] or 0) == pytest.approx(a[key] or 0, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("keep_reference", ["on", "off"])
def test_learning_that_halves_is_that_of_fewer_rows(small, keep_reference):
    found = searched(small, "random").assignment
    short = {
        "steps": 4,
        "warmup": 1,
        "lr": 1e-3,
        "held_batches": 1,
        "keep_reference": keep_reference,
    }

    def learned(**settings):
        return dmx.learn_weights(small, found, BATCHES, dmx.LearnConfig(**short, **settings))

    asked = learned(micro_batch=1)
    with memory_of(small, 1) as failed, pytest.warns(UserWarning, match="learn.oom=halve"):
        halved = learned(oom="halve")
    assert set(failed) == {4, 2}
    assert halved.weights["micro_batch"] == 1 and "micro_batch" not in asked.weights
    facts = ("kl_before", "kl_after")
    assert [halved.weights[f] for f in facts] == [asked.weights[f] for f in facts]
    for a, b in zip(stored(halved), stored(asked), strict=True):
        assert torch.equal(a, b)
    whole = learned()
    assert halved.weights["kl_after"] == pytest.approx(whole.weights["kl_after"], rel=1e-2)


def test_learning_lets_go_of_kept_references_where_memory_ends(small, monkeypatch):
    found, step = searched(small, "random").assignment, _Learning._gradient
    short = {"steps": 4, "warmup": 1, "lr": 1e-3, "held_batches": 1}

    def learned(**settings):
        return dmx.learn_weights(small, found, BATCHES, dmx.LearnConfig(**short, **settings))

    def full(self, *given):
        if self.step == 2 and self.references.keeps:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, *given)

    expected = learned()
    monkeypatch.setattr(_Learning, "_gradient", full)
    assert learned() == expected
    with pytest.raises(torch.OutOfMemoryError):
        learned(keep_reference="on")


@pytest.mark.gpu
def test_captured_steps_are_captured_anew_with_fewer_rows(make_tiny):
    model = make_tiny("llama", layers=1).model.cuda()
    on = {"steps": 3, "descent": DescentConfig(raw_start=1.0, cuda_graph="on")}

    def searched_and_learned(search, learn):
        config = dmx.SearchConfig(**on, **search)
        result = dmx.search(model, BATCHES, dmx.Budget(5.0), config)
        short = dmx.LearnConfig(steps=4, warmup=1, lr=1e-3, cuda_graph="on", **learn)
        return result, dmx.learn_weights(model, result.assignment, BATCHES, short)

    asked = searched_and_learned({"micro_batch": 1}, {"micro_batch": 1})
    with memory_of(model, 1), pytest.warns(UserWarning, match=r"oom=halve"):
        halved = searched_and_learned({"oom": "halve"}, {"oom": "halve"})
    assert halved[0].cuda_graph == halved[1].weights["cuda_graph"] == "on"
    assert halved[0].assignment.formats == asked[0].assignment.formats
    for a, b in zip(halved[0].history, asked[0].history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    assert halved[1].weights["kl_after"] == pytest.approx(asked[1].weights["kl_after"], rel=1e-2)


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_stream_that_was_current():
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):  # what waits for the device is refused while it is captured
        GraphedStep(lambda x: (x + x.sum().item(),), torch.ones(3, device="cuda"))
    assert torch.cuda.current_stream() == before


def stored(assignment: Assignment):
    from dmx.applying.stored import from_bytes

    content = from_bytes(assignment.content("weights"), assignment.formats, assignment.shapes)
    return [content[name].codes for name in sorted(content)]
