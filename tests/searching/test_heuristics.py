"""Scores without gradient steps: the scan is what the naive one is, and rankings follow from it."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import dmx
from dmx.assignment.budget import Budget
from dmx.assignment.rules import ScaleRulesConfig
from dmx.models.replay import PrefixReplay, prefix_replay_is_exact
from dmx.numerics import kl_divergence
from dmx.searching import search_space
from dmx.searching.bank import searching_model
from dmx.searching.scan import Scan
from tests.searching.test_brute_force import Toy
from tests.settings import search_config

WIDE = Budget(16.0)  # every layer high: only the preferences are of interest


def batches(n=2, rows=2, length=24):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 288, (rows, length), generator=generator) for _ in range(n)]


def naive_kl(model, tokens, space, config):
    """One unit low at a time and all else unquantized, whole passes, mean over batches."""
    scores = np.zeros((len(space.units), len(space.formats) - 1))
    family = config.format_family
    with (
        torch.no_grad(),
        searching_model(model, space, family, config.scale_rules.by_format()) as bank,
    ):
        for batch, u, c in itertools.product(tokens, *map(range, scores.shape)):
            bank.set_full()
            reference = model(input_ids=batch, use_cache=False).logits
            alone = [None] * len(space.units)
            alone[u] = space.formats[c]
            bank.set_formats(alone, fixed=False)
            logits = model(input_ids=batch, use_cache=False).logits
            scores[u, c] += float(kl_divergence(reference, logits)) / len(tokens)
    return scores


def scan(model, config, tokens):
    with pytest.warns(UserWarning, match=r"not below the dearest"):
        return dmx.search(model, tokens, WIDE, config).preference


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        {"family": "mxfp8_mxfp6_mxfp4"},
        {"units": "layer"},
        {"include_lm_head": True},
        {
            "fixed": {"*.0.mlp.down_proj": "mxfp4"},
            "scale_rules": ScaleRulesConfig(weight={"mxfp4": "mse"}, input="even"),
        },
        {"choices": "separate", "fixed": {"*.0.mlp.down_proj": "mxfp4"}},
    ],
    ids=["three formats", "layer units", "with the head", "with a fixed layer", "separate"],
)
def test_the_scan_that_skips_the_prefix_gives_the_scores_of_the_naive_one(
    options, architecture, make_tiny
):
    model, tokens = make_tiny(architecture, layers=3).model, batches()
    config = search_config(name="kl", **options)
    expected = naive_kl(model, tokens, search_space(model, config), config)
    found = scan(model, config, tokens)
    # KLs of 1e-4 nats are differences of float32 logits: 1e-7 of rounding each.
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-7)
    assert expected.max() > 1e-5


def test_the_prefix_is_reused_where_that_is_exact(tiny_random):
    model, tokens = tiny_random.model, batches()[0]
    assert prefix_replay_is_exact(model, tokens[:1])
    calls = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    config = search_config(name="kl", exclude=["*.layers.0.*"])
    scan(model, config, [tokens])
    units = len(search_space(model, config).units)
    assert 1 <= len(calls) < units  # the first block ran for the reference, not for every unit


class Skipping(nn.Module):
    """The first block's output also goes to the end, around the others."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, use_cache=False):
        kept = []
        handle = self.model.model.layers[0].register_forward_hook(
            lambda _m, _i, out: kept.append(out)
        )
        try:
            out = self.model(input_ids=input_ids, use_cache=use_cache)
        finally:
            handle.remove()
        first = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
        out.logits = out.logits + self.model.lm_head(first.tanh())
        return out


def test_a_model_with_a_way_around_its_blocks_is_scanned_right(make_tiny):
    model = Skipping(make_tiny("llama", layers=3).model)
    config = search_config(name="kl", exclude=["*lm_head"])
    tokens = batches()
    expected = naive_kl(model, tokens, search_space(model, config), config)
    np.testing.assert_allclose(scan(model, config, tokens), expected, rtol=2e-3, atol=1e-7)


def test_blocks_with_a_forward_of_their_own_keep_it(tiny_random):
    model = tiny_random.model
    block = model.model.layers[0]
    plain = type(block).forward

    def own(*args, **kwargs):
        return plain(block, *args, **kwargs)

    block.forward = own
    scan(model, search_config(name="kl"), batches())
    assert block.__dict__["forward"] is own
    assert "forward" not in model.model.layers[1].__dict__
    assert PrefixReplay(model).block_of("model.layers.1.mlp.down_proj") == 1


def naive_fisher(model, tokens, space, config):
    """Each unit's products written out, with the operands of the unit quantized and the others not."""
    scores = np.zeros((len(space.units), len(space.formats)))
    for batch in tokens:
        seen, handles = {}, []
        for name in space.shapes:

            def keep(_m, args, out, name=name, seen=seen):
                out.retain_grad()
                seen[name] = args[0].detach(), out

            handles.append(model.get_submodule(name).register_forward_hook(keep))
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
        ).backward()
        for handle in handles:
            handle.remove()
        for (u, unit), (c, f) in itertools.product(
            enumerate(space.units), enumerate(space.formats)
        ):
            for name in unit.layers:
                (x, out), weight = seen[name], model.get_submodule(name).weight.detach()
                quantized = (
                    dmx.fake_quant(t, f) if operand in unit.operands else t
                    for operand, t in (("input", x), ("weight", weight))
                )
                error = torch.nn.functional.linear(*quantized) - x @ weight.T
                scores[u, c] += float((out.grad * error).square().sum()) / len(tokens)
    return scores


@pytest.mark.parametrize("operands", ["joint", "separate"])
def test_fisher_weighs_the_error_of_the_operands_of_each_unit(operands, tiny_random):
    model, tokens = tiny_random.model, batches()
    config = search_config(name="fisher", choices=operands, family="mxfp8_mxfp6_mxfp4")
    space = search_space(model, config)
    expected = naive_fisher(model, tokens, space, config)
    scan = Scan(model, tokens, space, config, fingerprint={}, folder=None)
    # Sums of float32 in another order.
    np.testing.assert_allclose(scan.fisher(), expected, rtol=1e-3)


@pytest.mark.parametrize(
    "options", [{}, {"choices": "separate", "fixed": {"*.0.mlp.down_proj": "mxfp4"}}]
)
def test_aumann_shapley_scores_add_up_to_the_kl_that_all_steps_save(options, tiny_trained):
    model, tokens = tiny_trained.model, batches()
    config = search_config(name="aumann_shapley", family="mxfp8_mxfp6_mxfp4", **options)
    space = search_space(model, config)
    scan = Scan(model, tokens, space, config, fingerprint={}, folder=None)
    scores = scan.aumann_shapley()
    rules = config.scale_rules.by_format()
    with (
        torch.no_grad(),
        searching_model(model, space, config.format_family, rules) as bank,
    ):
        kls = np.zeros(len(space.formats))
        for batch, (c, f) in itertools.product(tokens, enumerate(space.formats)):
            bank.set_full()
            reference = model(input_ids=batch, use_cache=False).logits
            bank.set_formats([f] * len(space.units))
            logits = model(input_ids=batch, use_cache=False).logits
            kls[c] += float(kl_divergence(reference, logits)) / len(tokens)
    assert (scores[:, -1] == 0).all() and kls[0] > 0.01
    # The quantized input of a layer is a step function of what comes before it, which gradients pass straight
    # through: the integral is that of the smooth part, up to some percent of the whole.
    np.testing.assert_allclose(scores.sum(0), kls - kls[-1], rtol=0, atol=0.08 * kls[0])


def test_aumann_shapley_scores_of_a_quadratic_loss_are_its_closed_form(monkeypatch, generator):
    """Layers side by side and inputs as they are: logits are linear in the offsets."""

    def half_square(logits, reference):
        return 0.5 * (logits - reference).square().sum() / logits[..., 0].numel()

    monkeypatch.setattr("dmx.searching.scan.kl_loss", half_square)
    model, tokens = Toy(generator), torch.randint(0, 32, (2, 8), generator=generator)
    config = search_config(
        name="aumann_shapley", family="mxfp8_mxfp6_mxfp4", input_format="bf16", units="layer"
    )
    space = search_space(model, config)
    scores = Scan(model, [tokens], space, config, fingerprint={}, folder=None).aumann_shapley()
    errors = []
    with torch.no_grad():
        for gain, layer, scale in zip(model.gains, model.layers, model.scales, strict=True):
            x = gain * model.embedding(tokens) * scale
            quantized = [dmx.fake_quant(layer.weight, f) for f in space.formats]
            errors.append(torch.stack([x @ (q - layer.weight).T for q in quantized]))
    e = torch.stack(errors).flatten(2).double()  # (U, F, tokens x logits)
    between = (e[:, 1:] + e[:, :-1]).sum(0) / 2  # of all units together, mean of the step
    gains = ((e[:, :-1] - e[:, 1:]) * between).sum(-1) / tokens.numel()
    expected = gains.flip(1).cumsum(1).flip(1).numpy()
    np.testing.assert_allclose(scores[:, :-1], expected, rtol=1e-3, atol=1e-6 * expected.max())
    assert (expected < 0).any() or np.ptp(expected) > 0.1 * expected.max()


def test_random_choices_follow_the_seed(tiny_random):
    def chosen(seed):
        config = search_config(name="random", seed=seed, units="layer")
        return dmx.search(tiny_random.model, batches(), Budget(5.0), config).assignment.formats

    assert chosen(1) == chosen(1)
    assert len({tuple(chosen(seed).values()) for seed in range(6)}) > 3


def test_another_budget_keeps_the_order(tiny_random):
    model, tokens = tiny_random.model, batches()
    raised = []
    for limit in (4.3, 4.8, 5.3):
        result = dmx.search(model, tokens, Budget(limit), search_config(name="kl", units="layer"))
        assert result.history == [] and result.raw_offsets is None
        raised.append({k for k, f in result.assignment.formats.items() if f != "mxfp4"})
    assert len(raised[0]) < len(raised[1]) < len(raised[2])
