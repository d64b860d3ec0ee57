"""Perplexity and divergence: against their definitions, and leaving the model as it was."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import dmx
from dmx.evaluate.perplexity import perplexity_of, window_losses
from dmx.numerics import kl_divergence, token_kl_divergence


@pytest.fixture
def tokens():
    return torch.randint(0, 288, (333,), generator=torch.Generator().manual_seed(5))


def by_hand(model, tokens, window):
    """exp of the mean over all predictions of non-overlapping windows; the rest is dropped."""
    losses = []
    for start in range(0, len(tokens) - window + 1, window):
        ids = tokens[None, start : start + window]
        with torch.no_grad():
            log_p = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        losses += (-log_p[range(window - 1), ids[0, 1:]]).tolist()
    return math.exp(sum(losses) / len(losses)), len(losses)


@pytest.mark.parametrize("window", [2, 32, 111, 333])
def test_perplexity_is_its_definition(window, tiny_random, tokens):
    expected, predictions = by_hand(tiny_random.model, tokens, window)
    assert predictions == len(tokens) // window * (window - 1)
    found = dmx.perplexity(tiny_random.model, tokens, window=window)
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_batch_size_changes_the_speed_alone(tiny_random, tokens):
    found = [dmx.perplexity(tiny_random.model, tokens, window=32, batch_size=b) for b in (1, 3, 64)]
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(tiny_random, tokens):
    with torch.no_grad():
        tiny_random.model.lm_head.weight.zero_()
    assert dmx.perplexity(tiny_random.model, tokens, window=64) == pytest.approx(288, rel=1e-5)


def test_window_losses_are_one_mean_a_window_in_float64(tiny_random, tokens):
    losses = window_losses(tiny_random.model, tokens, window=37)
    assert losses.shape == (9,) and losses.dtype == torch.float64
    third = dmx.perplexity(tiny_random.model, tokens[74:111], window=37)
    assert math.exp(losses[2]) == pytest.approx(third, rel=1e-6)


def test_half_precision_logits_are_measured_in_float32(make_tiny, tokens):
    model = make_tiny("llama", dtype="bfloat16").model
    with torch.no_grad():
        logits = model(input_ids=tokens[None, :64]).logits[0, :-1].float()
    expected = math.exp(F.cross_entropy(logits, tokens[1:64]))
    assert dmx.perplexity(model, tokens[:64], window=64) == pytest.approx(expected, rel=1e-6)


def test_divergence_is_the_token_mean_from_the_reference_to_the_model(tiny_random, tokens):
    reference, model = tiny_random.model, copy.deepcopy(tiny_random.model)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
        windows = tokens[:320].reshape(-1, 64)
        p = reference(input_ids=windows).logits.double().log_softmax(-1)
        q = model(input_ids=windows).logits.double().log_softmax(-1)
    expected = float((p.exp() * (p - q)).sum(-1).mean())
    assert dmx.kl_divergence(model, reference, tokens, window=64) == pytest.approx(
        expected, rel=1e-4
    )
    backward = dmx.kl_divergence(reference, model, tokens, window=64)
    assert backward != pytest.approx(expected, rel=1e-2)  # it has a direction


def test_divergence_of_logits_is_never_negative_and_zero_for_equal_ones():
    logits = torch.randn(5, 7, 100) * 10
    assert float(kl_divergence(logits, logits)) == 0
    assert (token_kl_divergence(logits, logits + 1e-4 * torch.randn_like(logits)) > -1e-6).all()


@pytest.mark.parametrize("training", [True, False])
def test_measuring_leaves_mode_and_grad_alone_also_after_an_exception(
    training, tiny_random, tokens
):
    model, other = tiny_random.model.train(training), copy.deepcopy(tiny_random.model).train()
    dmx.perplexity(model, tokens, window=64)
    dmx.kl_divergence(model, other, tokens, window=64)
    assert model.training is training and other.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())

    def fail(*_):
        raise RuntimeError("out of memory")

    model.register_forward_hook(fail)
    for call in (
        lambda: dmx.perplexity(model, tokens, window=64),
        lambda: dmx.kl_divergence(model, other, tokens, window=64),
    ):
        with pytest.raises(RuntimeError, match=r"out of memory"):
            call()
    assert model.training is training and other.training


def test_a_loss_beyond_the_range_of_exp_is_an_infinite_perplexity():
    assert perplexity_of(1.0) == math.e and perplexity_of(710.0) == math.inf
    assert math.isnan(perplexity_of(math.nan))
