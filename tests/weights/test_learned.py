"""Weights that learn: KL falls, what is stored is what the model ran on, a stopped run ends as one that was
not, and the model is left as it was."""

import copy
import math
import os
import signal
import time
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

import dmx
from dmx.applying.linear import quantized_layers
from dmx.applying.stored import from_bytes
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, DataError, FormatError, ModelError, RunError
from dmx.formats import FP8, MXFP4, NVFP4, SCALE_RULES
from dmx.models.experts import install_experts
from dmx.models.graph import GraphedStep
from dmx.numerics import fake_quant
from dmx.numerics.moments import random_bits, round_stochastically, step_keys
from dmx.progress import Stopwatch
from dmx.weights import learned
from dmx.weights.learn_config import LearnConfig
from dmx.weights.learned import STATE_FILE, learn_weights
from dmx.weights.learned_layers import Masters
from dmx.weights.learned_loss import HeadKL, LogitsKL, _HeadKL, objective_of
from dmx.weights.learned_optimizer import AdamW
from tests.forked import Forked
from tests.graphs import Imitation
from tests.mixtures import mixture
from tests.weights.helpers import mixed, text_batches, uniform

BATCHES = list(torch.randint(0, 257, (6, 2, 32), generator=torch.Generator().manual_seed(1)))
SHORT = {"steps": 6, "warmup": 2, "lr": 1e-3}


def logits(model, tokens=BATCHES[0]):
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def mean_kl(model, assignment, batches):
    """KL(full precision, quantized) of an assignment, token mean, nats."""
    full = [logits(model, b).log_softmax(-1) for b in batches]
    dmx.apply(model, assignment)
    try:
        quantized = [logits(model, b).log_softmax(-1) for b in batches]
    finally:
        dmx.restore(model)
    each = [(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(full, quantized, strict=True)]
    return float(torch.stack(each).mean())


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("transform", ["none", "hadamard_block", "hadamard_full"])
def test_kl_on_held_batches_falls(transform, tiny_trained):
    model, batches = tiny_trained.model, text_batches(tiny_trained.tokenizer)
    assignment = uniform(model, transform=transform)
    config = LearnConfig(steps=30, warmup=5, lr=5e-4)
    done = learn_weights(model, assignment, batches, config)
    assert done.weights["held_batches"] == 2 and done.weights["batches"] == 14
    assert done.weights["kl_after"] < 0.8 * done.weights["kl_before"]
    assert done.weights["cuda_graph"] == "off"  # what ran, on a CPU
    assert done.formats == assignment.formats and done.bits == assignment.bits
    if transform != "hadamard_full":  # there, full precision means the rotated model
        held = batches[-2:]
        assert mean_kl(model, assignment, held) == pytest.approx(
            done.weights["kl_before"], rel=1e-3
        )
        assert mean_kl(model, done, held) == pytest.approx(done.weights["kl_after"], rel=1e-3)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("architecture, dtype", [("llama", "float32"), ("smollm2", "bfloat16")])
def test_what_is_stored_are_values_of_the_format_and_quantizing_again_changes_none(
    architecture, dtype, rule, make_tiny
):
    model = make_tiny(architecture, dtype=dtype).model
    done = learn_weights(model, mixed(model, rule), BATCHES, LearnConfig(**SHORT))
    dmx.apply(model, done)
    layers = quantized_layers(model)
    assert set(layers) == set(done.formats)
    for name, layer in layers.items():
        weight = layer.quantized_weight()
        again = fake_quant(weight, done.formats[name], scale_rule=rule)
        assert torch.equal(weight, again), name
        assert not torch.equal(weight, fake_quant(layer.weight, done.formats[name])), name


def test_the_model_is_left_as_it_was_also_after_an_exception(tiny_random, monkeypatch):
    model = tiny_random.model.train()
    model.model.layers[0].eval()
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 2 == 0)

    def facts():
        parameters = [(n, id(p), p.requires_grad, p.grad) for n, p in model.named_parameters()]
        modules = [(n, type(m), m.training, id(m)) for n, m in model.named_modules()]
        return parameters, modules

    before, kept = facts(), {k: v.clone() for k, v in model.state_dict().items()}
    learn_weights(model, uniform(model), BATCHES, LearnConfig(**SHORT))
    assert facts() == before
    for where in ("_update", "measure"):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(learned._Learning, where, lambda *_: 1 / 0)
            learn_weights(model, uniform(model), BATCHES, LearnConfig(**SHORT))
        assert facts() == before
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_mode_does_not_matter(mode, tiny_random):
    model = tiny_random.model
    expected = learn_weights(model, uniform(model), BATCHES, LearnConfig(**SHORT))
    with mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert learn_weights(model, uniform(model), BATCHES, LearnConfig(**SHORT)) == expected


def said(config, count=8):
    """Warnings of a config before it learns from so many batches."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        config.warn_of_little_text(*config.split([BATCHES[0]] * count))
    return [str(warning.message) for warning in noted]


def test_little_text_is_warned_of_before_anything_learns():
    (often,) = said(LearnConfig(steps=141))
    assert "learn.steps=141 on 7 batches, 448 tokens: each is seen 20 times, more than 20" in often
    assert (
        "(data.training, training.batches), or fewer steps (learn.steps=70, which null takes)"
        in often
    )
    (many,) = said(LearnConfig(steps=5000), 100)
    assert many.endswith("fewer steps (learn.steps=600, which null takes).")
    assert said(LearnConfig(steps=140)) == [] == said(LearnConfig())
    (blocks,) = said(LearnConfig(steps=0, block_steps=200))
    assert "learn.block_steps=200 on 7 batches" in blocks
    assert blocks.endswith("fewer steps (learn.block_steps=140).")
    (unheld,) = said(LearnConfig(steps=7), 7)
    assert "7 batches to learn from: too few to hold one back (from 8 on one is), so" in unheld
    assert (
        said(LearnConfig(steps=7, held_batches=0))
        == []
        == said(LearnConfig(steps=7, held_batches=1))
    )


def test_steps_follow_the_batches_where_none_are_given():
    edges = {1: 10, 59: 590, 60: 600, 61: 600, 2000: 600}
    assert {batches: LearnConfig().steps_for(batches) for batches in edges} == edges


@given(batches=st.integers(1, 2000), steps=st.integers(1, 2000))
def test_given_steps_are_taken_and_roundings_take_none_end_to_end(batches, steps):
    assert LearnConfig(steps=steps).steps_for(batches) == steps
    assert LearnConfig(train="rounding", block_steps=steps).steps_for(batches) == 0


def test_without_a_number_of_steps_each_batch_is_seen_ten_times(tiny_random):
    model, batches = tiny_random.model, BATCHES[:3]

    def learned(**settings):
        config = LearnConfig(warmup=2, held_batches=1, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return learn_weights(model, uniform(model), batches, config).weights

    facts = learned()
    assert (facts["steps"], facts["batches"]) == (20, 2)
    assert facts == learned(steps=20)
    assert learned(block_steps=3)["tokens"] == 23 * batches[0].numel()


def test_weights_that_are_no_better_than_those_before_are_warned_of(tiny_random):
    def learned(held):
        config = LearnConfig(steps=2, warmup=0, lr=1.0, held_batches=held)
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            facts = learn_weights(
                tiny_random.model, uniform(tiny_random.model), BATCHES[:2], config
            ).weights
        assert facts["kl_after"] > facts["kl_before"]
        return facts, [str(w.message) for w in noted if "no better" in str(w.message)]

    facts, (text,) = learned(held=1)
    assert "KL on 1 batch held back was " in text
    assert f"was {facts['kl_before']:.4f} nats/token before and is {facts['kl_after']:.4f}" in text
    assert (
        "weights=nearest" in text
        and "fewer steps than learn.steps=2, or" in text
        and "data.training" in text
    )
    # What was learned from, and a search chose formats by, shows nothing of other text.
    assert learned(held=0)[1] == []


def test_an_equal_call_gives_an_equal_file_and_another_seed_another(tiny_random):
    model = tiny_random.model

    def run(**changed):
        config = LearnConfig(**{**SHORT, **changed})
        return learn_weights(model, uniform(model), (b for b in BATCHES), config).weights

    assert run() == run()
    assert run()["sha256"] == run(keep_reference="off")["sha256"]
    assert run()["sha256"] != run(seed=1)["sha256"]


def test_gradient_checkpointing_gives_the_same_bits_and_micro_batches_the_same_loss(tiny_random):
    model = tiny_random.model
    plain, checkpointed, parts = (
        learn_weights(model, uniform(model), BATCHES, LearnConfig(**SHORT, **options))
        for options in ({}, {"gradient_checkpointing": True}, {"micro_batch": 1})
    )
    assert checkpointed.content("weights") == plain.content("weights")
    assert parts.weights["kl_after"] == pytest.approx(plain.weights["kl_after"], rel=1e-2)


def test_the_assignment_carries_the_weights_to_files_and_exports(make_tiny, tmp_path):
    pytest.importorskip("compressed_tensors")
    model = make_tiny("llama", dtype="bfloat16").model
    assignment = mixed(model, units="fused")
    done = learn_weights(model, assignment, BATCHES, LearnConfig(**SHORT))
    path = done.save(tmp_path / "assignment.json")
    loaded = Assignment.load(path)
    assert loaded.weights["name"] == "learned" and loaded.weights == done.weights
    expected = logits(dmx.apply(copy.deepcopy(model), done, inputs=False))
    assert torch.equal(logits(dmx.apply(copy.deepcopy(model), loaded, inputs=False)), expected)
    dmx.export(model, loaded, tmp_path / "out", target="compressed_tensors", verify=False)
    stored = from_bytes(loaded.content("weights"), loaded.formats, loaded.shapes)
    assert set(stored) == set(loaded.quantized)


def test_layers_in_bf16_and_the_head_stay_as_they_are(tiny_random):
    model = tiny_random.model
    names = [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    assignment = uniform(model, fixed={"model.layers.0.self_attn.[qkv]_proj": "bf16"})
    done = learn_weights(model, assignment, BATCHES, LearnConfig(**SHORT))
    layers = {key.rpartition(".")[0] for key in load(done.content("weights"))}
    assert layers == set(assignment.quantized) and not layers & {*names, "lm_head"}


def test_a_quantized_head_learns_too(make_tiny):
    model = make_tiny("smollm2").model  # tied to the embedding, which stays
    assignment = uniform(model, include_lm_head=True)
    done = learn_weights(model, assignment, BATCHES, LearnConfig(**SHORT))
    dmx.apply(model, done)
    head = quantized_layers(model)["lm_head"]
    assert not torch.equal(head.quantized_weight(), fake_quant(head.weight, MXFP4))


def test_weights_alone_learn_on_inputs_in_full_precision(tiny_trained):
    model, config = tiny_trained.model, LearnConfig(steps=10, inputs=False)
    done = learn_weights(model, uniform(model), BATCHES, config)
    both = learn_weights(model, uniform(model), BATCHES, LearnConfig(steps=10))
    assert done.weights["kl_before"] < both.weights["kl_before"]
    assert done.weights["kl_after"] < done.weights["kl_before"]


# ---------------------------------------------------------------- gradients and steps


@pytest.mark.parametrize("block_format", ["mxfp4", "mxfp8_e4m3"])
def test_gradients_pass_the_quantizers_straight_through(block_format, tiny_random, monkeypatch):
    """They are those of a plain model with quantized weights, and of inputs as if not quantized."""
    model = tiny_random.model
    assignment = uniform(model, dmx.formats.get_block_format(block_format))
    seen = {}

    def stop(self, loss):
        seen.update(
            {n: self.masters.view_of(self.masters.gradient, n).clone() for n in self.masters.places}
        )
        raise ZeroDivisionError

    monkeypatch.setattr(learned._Learning, "_update", stop)
    with pytest.raises(ZeroDivisionError):
        learn_weights(model, assignment, BATCHES[:1], LearnConfig(steps=1))
    reference = logits(model).log_softmax(-1)
    dmx.apply(model, assignment)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    found = model(input_ids=BATCHES[0], use_cache=False).logits.log_softmax(-1)
    (reference.exp() * (reference - found)).sum(-1).mean().backward()
    for name, layer in quantized_layers(model).items():
        assert torch.allclose(seen[name], layer.weight.grad, rtol=1e-3, atol=1e-7), name


def test_the_loss_by_rows_is_the_loss_of_whole_logits(generator):
    hidden, reference = torch.randn(2, 50, 16, generator=generator)
    weight, bias = torch.randn(70, 16, generator=generator), torch.randn(70, generator=generator)
    hidden.requires_grad_()
    for b in (None, bias):
        ours = _HeadKL.apply(hidden, reference, weight, b)
        (by_hidden,) = torch.autograd.grad(ours, hidden)
        p = torch.nn.functional.linear(reference, weight, b).log_softmax(-1)
        q = torch.nn.functional.linear(hidden, weight, b).log_softmax(-1)
        plain = (p.exp() * (p - q)).sum(-1).mean()
        (expected,) = torch.autograd.grad(plain, hidden)
        assert torch.allclose(ours.detach(), plain.detach(), rtol=1e-5)
        assert torch.allclose(by_hidden, expected, atol=1e-6)


def test_chunks_of_rows_change_nothing_but_the_order_of_sums(generator, monkeypatch):
    hidden, reference = torch.randn(2, 50, 16, generator=generator)
    weight = torch.randn(70, 16, generator=generator)
    whole = _HeadKL.apply(hidden, reference, weight, None)
    monkeypatch.setattr("dmx.weights.learned_loss.CHUNK_BYTES", 7 * 70 * 4)
    assert torch.allclose(_HeadKL.apply(hidden, reference, weight, None), whole, rtol=1e-5)


def test_models_whose_logits_are_no_plain_product_go_through_whole_logits(tiny_random):
    model = tiny_random.model
    assert isinstance(objective_of(model, BATCHES[0], set()), HeadKL)
    assert isinstance(objective_of(model, BATCHES[0], {"lm_head"}), LogitsKL)
    assert "forward" not in model.lm_head.__dict__

    class Capped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def get_output_embeddings(self):
            return model.lm_head

        def forward(self, **inputs):
            out = model(**inputs)
            out.logits = 30 * torch.tanh(out.logits / 30)
            return out

    assert isinstance(objective_of(Capped(), BATCHES[0], set()), LogitsKL)


def test_one_call_quantizes_all_weights_of_a_format(tiny_random):
    model = tiny_random.model
    assignment = mixed(model, "even")
    weights = {n: model.get_submodule(n).weight.detach() for n in assignment.quantized}
    masters = Masters(weights, assignment, torch.float32)
    assert len(masters.segments) == 3
    masters.quantize()
    for name, weight in weights.items():
        expected = fake_quant(weight, assignment.formats[name], scale_rule="even")
        assert torch.equal(masters.views(name)[0], expected)
        assert masters.views(name)[0].is_leaf and torch.equal(masters.master(name), weight)


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.int8])
def test_the_optimizer_is_adamw(masters, state, generator, monkeypatch):
    for module in ("weights.learned_optimizer", "numerics.moments"):
        monkeypatch.setattr(f"dmx.{module}.CHUNK", 256)
    start = torch.randn(600, generator=generator)
    ours = AdamW(start.to(masters, copy=True), state, seed=0)
    expected = torch.nn.Parameter(start.to(masters).float())
    theirs = torch.optim.AdamW([expected], betas=(0.9, 0.99), weight_decay=0.0)
    for i in range(20):
        gradient = torch.randn(600, generator=generator)
        ours.step(gradient.to(masters), 1e-2 / (i + 1), torch.full((1,), 0.5))
        theirs.param_groups[0]["lr"] = 1e-2 / (i + 1)
        expected.grad = 0.5 * gradient.to(masters).float()
        theirs.step()
    difference = (ours.masters.float() - expected.detach()).norm() / expected.detach().norm()
    assert difference < (1e-6 if masters == state == torch.float32 else 1e-2)


def test_stochastic_rounding_keeps_the_mean_and_exact_values():
    x = torch.tensor([1.0, -1.0, 0.0, 1 + 2**-9, -1 - 3 * 2**-10]).repeat(20000, 1)
    bits = random_bits(0, x.numel(), step_keys(0, 7)[0], x.device).view(x.shape)
    rounded = round_stochastically(x, bits)
    assert torch.equal(rounded[:, :3], x[:, :3].bfloat16())
    assert torch.allclose(rounded.float().mean(0), x[0], atol=1e-4)
    assert len(rounded[:, 3].unique()) == 2


def test_the_rate_warms_up_and_falls_to_zero():
    config = LearnConfig(steps=100, warmup=10, lr=1.0)
    rates = [config.rate(i, 100) for i in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0 < rates[-1] < 1e-3
    assert LearnConfig(steps=5, warmup=0).rate(0, 5) == 2e-4
    # One batch, ten steps: the rate falls there, too.
    short = [LearnConfig(lr=1.0).rate(i, 10) for i in range(10)]
    assert short[2] == short[3] == 1.0 and short[-1] < 0.2


@pytest.mark.parametrize(
    ("device", "options", "is_causal", "obstacle"),
    [
        ("cuda", {}, True, ""),
        ("cpu", {}, True, "the model is on cpu"),
        ("cuda", {"gradient_checkpointing": True}, True, ""),
        ("cuda", {}, False, "attention is not purely causal sdpa"),
        ("cuda", {}, True, "which rows experts are given changes"),
    ],
)
def test_a_step_is_captured_where_it_can_be_and_nobody_said_off(
    device, options, is_causal, obstacle
):
    model = mixture()
    if "experts" in obstacle:
        install_experts(model, "stacked")

    def decided(asked):
        run = object.__new__(learned._Learning)
        run.config, run.is_causal = LearnConfig(cuda_graph=asked, **options), is_causal
        run.device, run.model = torch.device(device), model
        return run._decide_on_graph()

    by_itself = not obstacle and not options  # checkpointed steps where that is asked for
    assert decided("auto") == by_itself and decided("off") is False
    if obstacle:
        with pytest.raises(RunError, match=rf"^learn\.cuda_graph=on: .*{obstacle}"):
            decided("on")
    else:
        assert decided("on") is True


@pytest.mark.parametrize(
    "options",
    [
        {"keep_reference": "on"},
        {"keep_reference": "off"},
        {"micro_batch": 1, "gradient_checkpointing": True},
        {"block_steps": 2},
        {"train": "scales"},
    ],
    ids=str,
)
def test_captured_steps_that_write_over_their_results_learn_the_same(
    options, tiny_random, monkeypatch
):
    rate = {} if "train" in options else {"lr": 1e-3}
    config = LearnConfig(steps=9, warmup=2, held_batches=2, **rate, **options)
    assignment = uniform(tiny_random.model)
    expected = learn_weights(tiny_random.model, assignment, BATCHES, config)
    assert expected.weights["cuda_graph"] == "off"
    monkeypatch.setattr(Imitation, "made", 0)
    monkeypatch.setattr("dmx.models.graph.GraphedStep", Imitation)
    monkeypatch.setattr(learned._Learning, "_decide_on_graph", lambda self: True)
    found = learn_weights(tiny_random.model, assignment, BATCHES, config)
    assert Imitation.made == 2 and found.weights["cuda_graph"] == "on"
    assert {**found.weights, "cuda_graph": "off"} == expected.weights
    assert found.content("weights") == expected.content("weights")


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("train", ["weights", "scales"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_step_gives_the_loss_and_gradient_of_a_plain_one(
    train, dtype, checkpoints, make_tiny, monkeypatch
):
    model = make_tiny("smollm2", train_steps=100, dtype=dtype).model.cuda()
    steps, learn = [], learned._Learning._learn

    def both_ways(self, *rest):
        batches = [self._own(batch) for batch in self.batches[:2]]
        results = {}
        for name, wrap in (("plain", lambda step, *_: step), ("captured", GraphedStep)):
            refer = wrap(self._reference, batches[0])
            wanted = [refer(batch)[0].clone() for batch in batches]
            step = wrap(self._gradient, batches[0], wanted[0])
            for batch, reference in zip(batches, wanted, strict=True):
                (loss,) = step(batch, reference)
                results.setdefault(name, []).append(
                    (reference, loss.clone(), self.masters.descent().clone())
                )
        steps.append(results)
        learn(self, *rest)

    monkeypatch.setattr(learned._Learning, "_learn", both_ways)
    config = LearnConfig(steps=1, train=train, gradient_checkpointing=checkpoints)
    learn_weights(model, uniform(model), BATCHES, config)
    ((results),) = steps
    bound = 1e-3 if dtype == "float32" else 3e-2  # backward passes add in no fixed order
    for plain, captured in zip(results["plain"], results["captured"], strict=True):
        for one, other in zip(plain, captured, strict=True):
            assert (other - one).float().norm() <= bound * one.float().norm() > 0
    first, second = results["captured"]
    assert not torch.equal(first[2], second[2]), "another batch has another gradient"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep_reference": "off"},
        {"micro_batch": 1},
        {"gradient_checkpointing": True, "cuda_graph": "on"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("block_format", "transform"),
    [(MXFP4, "none"), (MXFP4, "hadamard_block"), (NVFP4, "none"), (FP8, "none")],
    ids=str,
)
def test_a_captured_step_learns_as_an_eager_one(
    block_format, transform, options, make_tiny, monkeypatch
):
    model = make_tiny("smollm2", train_steps=100, dtype="bfloat16").model.cuda()
    graphs, init = [], learned._Learning.__post_init__

    def watched(self):
        init(self)
        graphs.append(self.uses_graph)

    monkeypatch.setattr(learned._Learning, "__post_init__", watched)
    assignment = uniform(model, block_format, transform=transform)
    assignment = dmx.calibrate_inputs(model, assignment, BATCHES)
    captured, eager = (
        learn_weights(
            model, assignment, BATCHES, LearnConfig(steps=20, lr=1e-3, **options | graph)
        ).weights
        for graph in ({}, {"cuda_graph": "off"})
    )
    assert graphs == [True, False]
    assert captured["kl_after"] == pytest.approx(eager["kl_after"], rel=0.05)
    if block_format is MXFP4:  # others leave a tiny model too little to learn
        assert captured["kl_after"] < captured["kl_before"]


# ---------------------------------------------------------------- stopped runs


@pytest.mark.parametrize(
    "dtype, state", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "int8")]
)
def test_a_run_that_died_ends_as_one_that_did_not(dtype, state, tiny_random, tmp_path, monkeypatch):
    model, update, steps = tiny_random.model, learned._Learning._update, []
    config = LearnConfig(
        steps=9, warmup=2, lr=1e-3, checkpoint_every=2, masters=dtype, optimizer_state=state
    )
    expected = learn_weights(model, uniform(model), BATCHES, config)

    def counted(self, loss):
        steps.append(self.step)
        if len(steps) == 6:
            raise OSError
        update(self, loss)

    monkeypatch.setattr(learned._Learning, "_update", counted)
    with pytest.raises(OSError):
        learn_weights(
            model, uniform(model), BATCHES, config, folder=tmp_path, clock=Stopwatch(100.0)
        )
    clock = Stopwatch()
    done = learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path, clock=clock)
    assert clock.seconds > 100, "the seconds of the stopped run count"
    assert steps == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert done == expected and done.content("weights") == expected.content("weights")
    monkeypatch.setattr(learned._Learning, "_learn", None)  # nothing is left to learn
    assert learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path) == expected


SCRIPT = """
import sys, torch, dmx
from dmx.models import ModelConfig, TinyConfig, load_model
from dmx.searching import SearchConfig, uniform_assignment
from dmx.formats import MXFP4
torch.set_num_threads(1)
model = load_model(ModelConfig(id="tiny_llama", dtype="float32", tiny=TinyConfig())).model
batches = list(torch.randint(0, 257, (6, 2, 32), generator=torch.Generator().manual_seed(1)))
config = dmx.LearnConfig(steps=80, lr=1e-3, checkpoint_every=5)
assignment = uniform_assignment(model, MXFP4, SearchConfig(name="uniform"))
done = dmx.learn_weights(model, assignment, batches, config, folder=sys.argv[1])
done.save(sys.argv[1] + "/assignment.json")
"""


def _stop_at_a_new_state(folder, how):
    """Start the script, send it a signal once it has written a state of its own -> its errors."""
    state = folder / STATE_FILE
    before = state.read_bytes() if state.exists() else b""
    process = Forked("-c", SCRIPT, folder)
    deadline = time.time() + 120
    while process.poll() is None and time.time() < deadline:
        if state.exists() and state.read_bytes() != before:
            break
        time.sleep(0.02)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.poll() != 0 and state.read_bytes() != before
    assert not (folder / "assignment.json").exists()
    return err


@pytest.mark.slow
def test_a_process_stopped_twice_resumes_to_the_same_file(tmp_path):
    assert Forked("-c", SCRIPT, tmp_path / "whole").wait() == 0
    _stop_at_a_new_state(tmp_path / "stopped", signal.SIGKILL)
    assert "KeyboardInterrupt" in _stop_at_a_new_state(tmp_path / "stopped", signal.SIGINT)
    assert Forked("-c", SCRIPT, tmp_path / "stopped").wait() == 0
    for name in ("assignment.json", "weights.safetensors"):
        whole, stopped = (tmp_path / run / name for run in ("whole", "stopped"))
        assert whole.read_bytes() == stopped.read_bytes(), name


def test_a_ctrl_c_leaves_a_checkpoint_of_a_whole_step(tiny_random, tmp_path, monkeypatch):
    model, update = tiny_random.model, learned._Learning._update
    config = LearnConfig(steps=9, warmup=2, lr=1e-3)
    expected = learn_weights(model, uniform(model), BATCHES, config)

    def interrupted(self, loss):
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        update(self, loss)

    monkeypatch.setattr(learned._Learning, "_update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(learned._Learning, "_update", update)
    assert learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path) == expected


def test_another_run_or_a_damaged_checkpoint_is_refused(tiny_random, tmp_path):
    model = tiny_random.model
    learn_weights(model, uniform(model), BATCHES, LearnConfig(**SHORT), folder=tmp_path)
    other = LearnConfig(**SHORT | {"lr": 2e-3})
    for changed in ({"config": other}, {"batches": BATCHES[:5]}, {"assignment": mixed(model)}):
        arguments = {
            "assignment": uniform(model),
            "batches": BATCHES,
            "config": LearnConfig(**SHORT),
        }
        with pytest.raises(RunError, match=r"is of a learning run with other settings.*Choose"):
            learn_weights(model, **arguments | changed, folder=tmp_path)
    with pytest.raises(RunError, match=r"\(learn\.steps is 6 there, null here\)\. Choose"):
        config = LearnConfig(**SHORT | {"steps": None})
        learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path)
    path = tmp_path / STATE_FILE
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RunError, match=r"is damaged .*Delete it to learn again"):
        learn_weights(model, uniform(model), BATCHES, LearnConfig(**SHORT), folder=tmp_path)
    with pytest.raises(RunError, match=r"cannot write"):
        learn_weights(model, uniform(model), BATCHES, LearnConfig(**SHORT), folder=path / "x")


# ---------------------------------------------------------------- refusals


def test_a_loss_that_is_not_finite_is_an_error_and_nothing_is_written(tiny_random, tmp_path):
    model = tiny_random.model
    config = LearnConfig(steps=50, lr=1e30, warmup=0, checkpoint_every=1000)
    with pytest.raises(RunError, match=r"of step \d+ is not finite .*Lower learn\.lr"):
        learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path)
    assert not (tmp_path / STATE_FILE).exists()


def test_what_cannot_learn_is_refused(tiny_random, make_tiny):
    model = tiny_random.model
    done = learn_weights(model, uniform(model), BATCHES, LearnConfig(**SHORT))
    with pytest.raises(AssignmentError, match=r"weights were made already \(learned\)"):
        learn_weights(model, done, BATCHES)
    nothing = replace(uniform(model), formats=dict.fromkeys(done.formats, "bf16"))
    with pytest.raises(AssignmentError, match=r"quantizes no layer"):
        learn_weights(model, nothing, BATCHES)
    with pytest.raises(DataError, match=r"batches is empty"):
        learn_weights(model, uniform(model), [])
    with pytest.raises(DataError, match=r"learn\.held_batches=6 of 6 batches leaves none"):
        learn_weights(model, uniform(model), BATCHES, LearnConfig(held_batches=6))
    with pytest.raises(TypeError, match=r"config must be a dmx\.LearnConfig"):
        learn_weights(model, uniform(model), BATCHES, {"steps": 3})
    with pytest.raises(RunError, match=r"learn\.cuda_graph=on: the model is on cpu"):
        learn_weights(model, uniform(model), BATCHES, LearnConfig(cuda_graph="on"))
    assignment = uniform(model)
    dmx.apply(model, assignment)
    with pytest.raises(ModelError, match=r"already applied"):
        learn_weights(model, assignment, BATCHES)
    dmx.restore(model)
    shared = make_tiny("llama").model
    shared.model.layers[0].mlp.up_proj.weight = shared.model.layers[0].mlp.gate_proj.weight
    with pytest.raises(ModelError, match=r"gate_proj and .*up_proj share one weight"):
        learn_weights(shared, uniform(shared, units="layer"), BATCHES)
    wide = make_tiny("llama").model
    wide.model.layers[1].mlp.up_proj.bfloat16()
    with pytest.raises(ModelError, match=r"must have one dtype"):
        learn_weights(wide, uniform(wide), BATCHES)


@pytest.mark.parametrize(
    "setting, value, error",
    [
        ("steps", 0, RunError),
        ("lr", 0.0, RunError),
        ("lr", math.nan, RunError),
        ("max_norm", True, RunError),
        ("warmup", -1, RunError),
        ("micro_batch", 0, RunError),
        ("inputs", "yes", RunError),
        ("masters", "float16", FormatError),
        ("optimizer_state", "4bit", FormatError),
        ("keep_reference", "always", FormatError),
        ("cuda_graph", "never", FormatError),
    ],
)
def test_settings_check_themselves(setting, value, error):
    with pytest.raises(error, match=rf"learn\.{setting}="):
        LearnConfig(**{setting: value})
