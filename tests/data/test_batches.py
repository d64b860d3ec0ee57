"""Calibration batches: one order for every machine and start, and refusals in the first second."""

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dmx
from dmx.data.batches import batch_order, batches_sha256, check_fits_model, list_batches
from dmx.errors import DataError

GOOD = torch.zeros(2, 8, dtype=torch.int64)


def test_every_pass_sees_every_batch_once_in_another_order():
    order = list(islice(batch_order(7, seed=3), 28))
    passes = [order[i : i + 7] for i in range(0, 28, 7)]
    assert all(sorted(p) == list(range(7)) for p in passes)
    assert len({tuple(p) for p in passes}) == 4


@pytest.mark.parametrize("start", [0, 1, 6, 7, 8, 20])
def test_the_order_is_a_function_of_the_step_alone(start):
    whole = list(islice(batch_order(7, seed=3), 40))
    assert list(islice(batch_order(7, seed=3, start=start), 20)) == whole[start : start + 20]
    assert list(islice(batch_order(7, seed=4), 40)) != whole


def test_a_generator_is_listed_once(tiny_random):
    config = dmx.SearchConfig(steps=5)
    result = dmx.search(tiny_random.model, (GOOD for _ in range(2)), dmx.Budget(5.0), config)
    assert len(result.history) == 5
    assert len(list_batches((GOOD for _ in range(3)), tiny_random.model)) == 3


def test_the_hash_knows_ids_shapes_and_order():
    a, b = GOOD, torch.ones_like(GOOD)
    seen = [[a, b], [b, a], [a], [a.T.contiguous()], [a, b[:1]] and [a, a]]
    assert len({batches_sha256(x) for x in seen}) == len(seen)
    assert batches_sha256([a, b]) == batches_sha256([a.clone(), b.clone()])


@pytest.mark.parametrize("name", ["differentiable", "kl", "random", "uniform"])
@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], r"batches is empty: .* \(batch, length\)"),
        ([GOOD, GOOD[:1]], r"batches\[1\] has shape \(1, 8\), batches\[0\] \(2, 8\): .*equal"),
        ([GOOD, GOOD[:, :4]], r"batches\[1\] has shape \(2, 4\)"),
        ([GOOD.int()], r"batches\[0\] must be int64 .* got torch\.int32 \(2, 8\)"),
        ([GOOD.float()], r"batches\[0\] must be int64 .* got torch\.float32"),
        ([GOOD[0]], r"batches\[0\] must be int64 .* got torch\.int64 \(8,\)"),
        ([[1, 2, 3]], r"batches\[0\] must be int64 .* got <class 'list'>"),
        ([{"input_ids": GOOD}], r"batches\[0\] must be int64 .* got <class 'dict'>"),
        ([GOOD[:, :1]], r"batches of shape \(2, 1\) predict nothing"),
        ([GOOD[:0]], r"batches of shape \(0, 8\) predict nothing"),
        ([GOOD, GOOD + 288], r"token id 288 is outside the model's vocabulary of 288"),
        ([GOOD - 1], r"token id -1 is outside"),
        (
            [torch.zeros(1, 2049, dtype=torch.int64)],
            r"window=2049 .* 2048 positions",
        ),
    ],
)
def test_batches_that_no_search_can_use_are_refused_by_every_search(
    batches, words, name, tiny_random
):
    with pytest.raises(DataError, match=words):
        dmx.search(tiny_random.model, batches, dmx.Budget(5.0), dmx.SearchConfig(name=name))


def test_sizes_are_read_from_the_language_models_part_of_a_config():
    model = nn.Linear(1, 1)
    check_fits_model(model, GOOD[0], 8)  # no config: nothing to hold against it
    text = SimpleNamespace(vocab_size=10, max_position_embeddings=4)
    model.config = SimpleNamespace(get_text_config=lambda: text)
    with pytest.raises(DataError, match=r"vocabulary of 10"):
        check_fits_model(model, GOOD[0] + 10, 4)
    with pytest.raises(DataError, match=r"4 positions"):
        check_fits_model(model, GOOD[0], 8)
