"""The gradient search: what it finds, what it leaves behind, and how it goes on after a stop."""

import copy
import functools
import gc
import itertools
import json
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

import dmx
from dmx.assignment.assignment import make_assignment
from dmx.assignment.budget import Budget
from dmx.assignment.projection import is_maximal
from dmx.assignment.space import build_space
from dmx.data import DataConfig, encode, load_text, token_batches
from dmx.errors import DmxError, FormatError, ModelError, RunError
from dmx.formats import FAMILIES, get_family
from dmx.models.reference import KeptReferences
from dmx.models.running import is_purely_causal
from dmx.searching import search_space, uniform_assignment
from dmx.searching.config import DescentConfig
from dmx.searching.differentiable import LOSSES, STATE_FILE, DifferentiableSearch
from dmx.searching.result import SearchResult
from tests.graphs import Imitation
from tests.settings import search_config


@functools.cache
def text_batches(tokenizer, n=6, rows=4, window=64):
    text = load_text(DataConfig(name="embedded", split="calibration", max_characters=60_000))
    return token_batches(encode(tokenizer, text), window, rows, seed=0, n_batches=n)


@functools.cache
def held_out(tokenizer):
    text = load_text(DataConfig(name="embedded", split="evaluation", max_characters=20_000))
    return encode(tokenizer, text)


def perplexity(model, assignment, tokens):
    dmx.apply(model, assignment, cache_weights=True)
    try:
        return dmx.perplexity(model, tokens, window=64, batch_size=32)
    finally:
        dmx.restore(model)


def numbers(history):
    """Rows without the wall clock."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in history]


@pytest.fixture
def tiny(tiny_random):
    return tiny_random.model, text_batches(tiny_random.tokenizer, n=3, rows=2, window=32)


# ---------------------------------------------------------------- what it finds

# The published settings may drive every offset of such a small model to 0 in so few steps.
STEADY = {
    "objective": "kl",
    "raw_start": 1.0,
    "lr": 3.0,
    "momentum": 0.9,
    "lr_schedule": "cosine",
    "steps": 60,
    "evaluate_every": 60,
}


def test_it_beats_the_uniform_format_of_the_same_budget(tiny_trained):
    model, tokens = tiny_trained.model, held_out(tiny_trained.tokenizer)
    budget, config = Budget(5.0), search_config(**STEADY | {"steps": 120})
    learned = dmx.search(model, text_batches(tiny_trained.tokenizer), budget, config)
    uniform = dmx.search(model, [tokens[None, :64]], budget, search_config(name="uniform"))
    full = dmx.perplexity(model, tokens, window=64, batch_size=32)
    low, found = (perplexity(model, r.assignment, tokens) for r in (uniform, learned))
    assert set(uniform.assignment.formats.values()) == {"mxfp4"}
    # At 5.0 of 4 to 6 bits about half of the damage can be undone; a third must be.
    assert found - full < 0.67 * (low - full)
    assert learned.assignment.bits["element_bits"] <= 5.0


class Toy(nn.Module):
    """Layers side by side, added up with gains: the louder a layer, the more its format matters."""

    gains = (1.0, 8.0, 1.0, 0.5, 8.0, 1.0)

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(32, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 32, bias=False) for _ in self.gains])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)

    def forward(self, input_ids, use_cache=False):
        x = self.embedding(input_ids)
        outputs = [gain * layer(x) for gain, layer in zip(self.gains, self.layers, strict=True)]
        return SimpleNamespace(logits=sum(outputs))


@pytest.mark.parametrize("family", ["mxfp8_mxfp4", "mxfp6_mxfp4", ["mxfp4", "mxfp6_e3m2"]], ids=str)
@pytest.mark.parametrize("name", ["kl", "differentiable"])
def test_the_best_assignment_of_a_toy_is_found(name, family):
    """Room for two raises: the two loud layers, as trying everything shows, in 60 steps; all
    families and converged searches are in test_brute_force.py."""
    model, batches = Toy(), [torch.arange(32).reshape(2, 16)]
    formats = get_family(family).formats
    two_raised = 4 + 2 / 6 * (formats[-1].element_bits - 4)
    config = search_config(name=name, family=family, **STEADY)
    found = dmx.search(model, batches, Budget(two_raised), config).assignment

    reference, space = copy.deepcopy(model), search_space(model, config)
    divergence = {}
    for choice in itertools.product(range(len(formats)), repeat=6):
        if is_maximal(space, Budget(two_raised), np.array(choice)):
            dmx.apply(model, make_assignment(space, np.array(choice), model))
            tokens = batches[0].flatten()
            divergence[choice] = dmx.kl_divergence(model, reference, tokens, window=16)
            dmx.restore(model)
    best = min(divergence, key=divergence.__getitem__)
    learned = tuple([f.name for f in formats].index(found.formats[u.name]) for u in space.units)
    assert best == (0, 1, 0, 0, 1, 0) == learned


@pytest.mark.parametrize(
    ("operands", "unit", "family"),
    [
        *(("joint", "element_bits", family) for family in FAMILIES),
        *(("joint", "bits_per_element", family) for family in ("mxfp8_mxfp4",)),
        *(("separate", "bits_per_element", family) for family in FAMILIES),
        *(("separate", "element_bits", family) for family in ("mxfp6_mxfp4",)),
    ],
)
def test_every_setting_ends_within_the_budget_and_maximal(operands, family, unit, tiny):
    model, batches = tiny
    for i, (units, weighting, name) in enumerate(
        itertools.product(("fused", "layer"), ("elements", "layers"), ("differentiable", "random"))
    ):
        config = search_config(
            name=name,
            family=family,
            units=units,
            weighting=weighting,
            steps=4,
            raw_start=1.0,
            evaluate_every=4,
            seed=i,
            penalty=("hinge", "scaling")[i % 2],
            objective=("kl", "cross_entropy")[i % 2],
            exclude=["*.1.self_attn.o_proj"],
            fixed={"*.0.mlp.down_proj": "mxfp8"},
            choices=operands,
        )
        space = search_space(model, config)
        low, high = space.bounds(unit)
        budget = Budget(low + (high - low) * (0.2 + 0.1 * i), unit)
        assignment = dmx.search(model, batches, budget, config).assignment
        choice = space.choice_of(assignment.formats, assignment.input_formats)
        assert assignment.input_formats is None or operands == "separate"
        assert assignment.search.choices == operands
        assert is_maximal(space, budget, choice)
        assert assignment.bits[unit] == space.average(choice, unit) <= budget.limit
        assert assignment.formats["model.layers.0.mlp.down_proj"] == "mxfp8_e4m3"
        assert "model.layers.1.self_attn.o_proj" in assignment.unquantized
        fused = {assignment.formats[f"model.layers.0.self_attn.{x}_proj"] for x in "qkv"}
        assert units == "layer" or len(fused) == 1


def test_uniform_assignments_cover_every_format_and_leave_the_head(tiny):
    model, _ = tiny
    for block_format in dmx.formats.MX_FORMATS:
        assignment = uniform_assignment(model, block_format, search_config())
        assert set(assignment.formats.values()) == {block_format.name}
        assert assignment.bits["element_bits"] == block_format.element_bits
        assert "lm_head" not in assignment.formats and len(assignment.formats) == 14


# ---------------------------------------------------------------- what it leaves behind


def state_of(model):
    return (
        {name: (id(m), m.training, len(m._forward_hooks)) for name, m in model.named_modules()},
        {n: (id(p), p.requires_grad, p._version, p.grad) for n, p in model.named_parameters()},
        {name: sorted(m.__dict__) for name, m in model.named_modules()},
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["differentiable", "kl"])
def test_the_model_is_as_it_was_after_a_search_and_after_an_exception(name, checkpointing, tiny):
    model, batches = tiny
    model.train()
    model.model.layers[1].mlp.eval()
    model.model.norm.weight.requires_grad_(False)
    before = state_of(model)
    config = search_config(name=name, steps=3, gradient_checkpointing=checkpointing)
    dmx.search(model, batches, Budget(5.0), config)
    assert state_of(model) == before

    calls = itertools.count()

    def fail(*_):
        if next(calls) == 4:
            raise KeyboardInterrupt if name == "kl" else RuntimeError("out of memory")

    handle = model.model.layers[1].mlp.down_proj.register_forward_hook(fail)
    before = state_of(model)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        dmx.search(model, batches, Budget(5.0), config)
    assert next(calls) > 4 and state_of(model) == before
    handle.remove()


class DroppingBlock(LlamaDecoderLayer):
    """Calls dropout itself, as those of OPT do."""

    def forward(self, *args, **kwargs):
        return nn.functional.dropout(super().forward(*args, **kwargs), 0.5, self.training)


class DroppingModel(LlamaModel):
    """So does this, around its blocks, as those of XGLM and BioGPT do."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = nn.functional.dropout(
            output.last_hidden_state, 0.5, self.training
        )
        return output


def test_checkpointing_changes_memory_not_numbers_captured_or_not(tiny, monkeypatch):
    model, batches = tiny
    model.eval().model.layers[1].__class__ = DroppingBlock
    model.model.__class__ = DroppingModel
    monkeypatch.setattr(Imitation, "made", 0)
    monkeypatch.setattr("dmx.models.graph.GraphedStep", Imitation)
    for name in ("get_rng_state", "set_rng_state"):  # which no capture allows on a GPU
        monkeypatch.setattr(torch, name, lambda *_, name=name: pytest.fail(name))
    found = []
    for on, is_captured in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(DifferentiableSearch, "_decide_on_graph", lambda _, on=is_captured: on)
        config = search_config(steps=4, objective="kl", raw_start=1.0, gradient_checkpointing=on)
        result = dmx.search(model, batches, Budget(5.0), config)
        found.append((numbers(result.history), result.raw_offsets.tolist()))
    assert found[0] == found[1] == found[2]
    assert Imitation.made == 2  # of the step, and of the reference that is kept


def test_checkpointed_steps_are_captured_as_others_are(tiny):
    model, batches = tiny

    def decided(device, asked, on):
        config = search_config(cuda_graph=asked, gradient_checkpointing=on)
        space = search_space(model, config)
        search = DifferentiableSearch(
            model,
            batches,
            space,
            Budget(5.0),
            replace(config, descent=DescentConfig()),
            folder=None,
            fingerprint="",
        )
        search.config, search.device = config, torch.device(device)
        return search._decide_on_graph()

    for on in (True, False):
        asked = ("auto", "on", "off")
        assert [decided("cuda", word, on) for word in asked] == [True, True, False]
    with pytest.raises(DmxError, match=r"cuda_graph=on: the model is on cpu"):
        decided("cpu", "on", True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_checkpointed_step_gives_what_a_plain_one_does_in_less_memory(
    dtype, make_tiny, monkeypatch
):
    tiny = {"layers": 12, "hidden_size": 256, "intermediate_size": 1024}
    model = make_tiny("llama", dtype=dtype, **tiny).model.eval().cuda()
    batches = list(torch.randint(0, 257, (2, 8, 512), generator=torch.Generator().manual_seed(1)))
    gradients, take = [], DifferentiableSearch.take_step

    def watched(self, bank, stepper, index):
        def kept(*inputs):
            results = stepper(*inputs)
            gradients[-1].append(results[1].clone())
            return results

        return take(self, bank, kept, index)

    monkeypatch.setattr(DifferentiableSearch, "take_step", watched)

    def run(graph, on):
        gradients.append([])
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        # Offsets that stay where they are: each step is that of the first one's batch or of the other.
        fixed = {"steps": 4, "lr": 0.0, "raw_start": 1.0, "objective": "kl", "evaluate_every": 100}
        config = search_config(**fixed, cuda_graph=graph, gradient_checkpointing=on)
        result = dmx.search(model, batches, Budget(5.0), config)
        assert result.cuda_graph == graph
        peak = torch.cuda.max_memory_allocated()
        return [row["loss"] for row in result.history], gradients[-1], peak

    losses, expected, _ = run("off", True)
    found, captured, peak = run("on", True)
    whole, _, most = run("on", False)
    bound = 1e-3 if dtype == "float32" else 3e-2  # backward passes add in no fixed order
    assert found == pytest.approx(losses, rel=bound) and found == pytest.approx(whole, rel=bound)
    for one, other in zip(expected, captured, strict=True):
        assert (other - one).norm() <= bound * one.norm() > 0
    assert len(set(found)) > 1, "another batch has another loss"
    assert peak < 0.8 * most


def test_a_second_search_gives_the_same_numbers(tiny):
    model, batches = tiny
    config = search_config(steps=12, raw_start=1.0, evaluate_every=6)
    a, b = (dmx.search(model, batches, Budget(5.0), config) for _ in range(2))
    assert numbers(a.history) == numbers(b.history) and a.assignment == b.assignment


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_in_training_mode_are_searched(dtype, make_tiny, tiny):
    model = make_tiny("llama", dtype=dtype).model.train()
    result = dmx.search(model, tiny[1], Budget(5.0), search_config(steps=5, raw_start=1.0))
    assert all(np.isfinite(row["loss"]) for row in result.history)
    assert result.history[0]["grad_norm"] > 0
    assert result.raw_offsets.dtype == np.float32 and model.training


def test_the_history_says_what_happened_at_every_step(tiny, tmp_path):
    model, batches = tiny
    config = search_config(steps=7, evaluate_every=3, raw_start=1.0)
    result = dmx.search(model, batches, Budget(5.0), config, folder=tmp_path)
    assert isinstance(result, SearchResult) and len(result.units) == 8
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert rows == result.history and [row["step"] for row in rows] == list(range(7))
    keys = {
        "step",
        "temperature",
        "lr",
        "loss",
        "penalty",
        "soft_bits",
        "hard_bits",
        "projected_bits",
        "soft_loss",
        "hard_loss",
        "projected_loss",
        "grad_norm",
    }
    assert all(keys <= set(row) for row in rows)
    measured = [row["step"] for row in rows if row["hard_loss"] is not None]
    assert measured == [0, 3, 6]
    assert all(row["projected_bits"] <= 5.0 and 4 <= row["soft_bits"] <= 6 for row in rows)
    stored = np.load(tmp_path / "offsets.npz")
    assert stored["raw"].shape == (8, 8) and stored["raw"].dtype == np.float32
    assert (stored["raw"][0] == 1).all() and ((stored["raw"] >= 0) & (stored["raw"] <= 2)).all()
    np.testing.assert_array_equal(stored["raw"], result.raw_offsets)
    assert stored["units"].tolist() == list(result.units)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_searches_shorter_than_their_intervals_run(steps, tiny):
    model, batches = tiny
    config = search_config(steps=steps, raw_start=1.0, evaluate_every=1000, checkpoint_every=1000)
    history = dmx.search(model, batches, Budget(5.0), config).history
    assert len(history) == steps and history[-1]["temperature"] == 20.0
    assert history[-1]["projected_loss"] is not None


# ---------------------------------------------------------------- warnings


def test_a_search_in_which_nothing_moved_says_so(tiny):
    model, batches = tiny
    with pytest.warns(UserWarning, match=r"no offset moved in 2 steps \(model\.layers\.0.*7 more"):
        result = dmx.search(model, batches, Budget(6.5), search_config(steps=2, lr=0.0))
    assert "no offset moved" in result.warnings[-1]


def test_a_choice_that_is_left_to_the_projection_says_so(tiny):
    model, batches = tiny
    said = r"own choice has 4\.000 of budget\.limit=5: 100% of the bits .*penalty=exact"
    for far in (
        search_config(steps=2),  # the soft average stays below
        search_config(steps=6, raw_start=1.0, lr=30.0),  # the penalty throws every offset to 0
    ):
        with pytest.warns(UserWarning, match=said):
            result = dmx.search(model, batches, Budget(5.0), far)
        assert result.history[-1]["hard_bits"] == 4.0
    with pytest.warns(
        UserWarning,
        match=r"6\.000 of budget\.limit=5: 100% of the bits below the dearest .* taken back",
    ):
        dmx.search(model, batches, Budget(5.0), search_config(steps=2, raw_start=2.0))
    free = search_config(steps=2, raw_start=1.0, slope=0.0, lr=1.0)
    for near in (search_config(steps=2, penalty="exact"), free):
        assert not dmx.search(model, batches, Budget(5.0), near).warnings
    # No step is penalized, and most of the choice is the descent's own.
    history = dmx.search(model, batches, Budget(5.0), free).history
    assert all(row["penalty"] == 0 for row in history)
    assert 4.5 < history[-1]["projected_bits"] < history[-1]["hard_bits"] < 5.5


def test_gradients_that_are_not_finite_name_the_layer_once(tiny):
    model, batches = tiny
    model.model.layers[1].register_forward_hook(
        lambda _m, _i, out: (
            out.register_hook(lambda grad: grad * torch.nan) and None if out.requires_grad else None
        )
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = dmx.search(model, batches, Budget(5.0), search_config(steps=3))
    said = [str(w.message) for w in caught if "is not finite" in str(w.message)]
    assert sum("model.layers.1.mlp.down_proj" in text for text in said) == 1
    assert result.history[0]["loss"] is not None and result.history[0]["grad_norm"] is None
    assert np.isfinite(result.raw_offsets).all()


# ---------------------------------------------------------------- going on


class Stop(Exception):
    """Stands for a crash."""


def search_and_die(model, batches, config, folder, after):
    calls = itertools.count()

    def fail(*_):
        if next(calls) == after:
            raise Stop

    handle = model.register_forward_hook(fail)
    try:
        with pytest.raises(Stop):
            dmx.search(model, batches, Budget(5.0), config, folder=folder)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "options",
    [{"objective": "kl"}, {"objective": "cross_entropy", "choices": "separate"}],
    ids=["kl", "separate"],
)
def test_a_search_that_died_goes_on_to_the_same_numbers(options, tiny, tmp_path):
    model, batches = tiny
    config = search_config(steps=24, raw_start=1.0, evaluate_every=8, checkpoint_every=5, **options)
    whole = dmx.search(model, batches, Budget(5.0), config, folder=tmp_path / "whole")
    for after in (3, 20, 33):
        folder = tmp_path / f"died-{after}"
        search_and_die(model, batches, config, folder, after)
        if after == 20:  # no state holds what is kept of the unquantized model
            config = replace(config, descent=replace(config.descent, keep_reference="off"))
        resumed = dmx.search(model, batches, Budget(5.0), config, folder=folder)
        assert resumed.assignment == whole.assignment
        assert numbers(resumed.history) == numbers(whole.history)
        np.testing.assert_array_equal(resumed.raw_offsets, whole.raw_offsets)


@pytest.mark.parametrize(
    "options",
    [
        {"transform": "learned", "include_lm_head": True},
        {"name": "joint", "penalty": "exact", "micro_batch": 1},
    ],
    ids=str,
)
def test_a_kept_reference_saves_passes_and_changes_no_number(options, tiny, monkeypatch):
    model, batches = tiny
    monkeypatch.setattr(Imitation, "made", 0)
    monkeypatch.setattr("dmx.models.graph.GraphedStep", Imitation)
    passes, found = [], {}
    handle = model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    for keep, is_captured in (("off", False), ("auto", False), ("on", True)):
        passes.clear()
        monkeypatch.setattr(DifferentiableSearch, "_decide_on_graph", lambda _, on=is_captured: on)
        asked = {"steps": 5, "objective": "kl", "raw_start": 1.0, "evaluate_every": 100}
        config = search_config(**asked | options, keep_reference=keep)
        result = dmx.search(model, batches, Budget(5.0), config)
        rows = numbers(result.history), result.raw_offsets.tolist()
        found[keep] = *rows, passes.count(False)
    handle.remove()
    assert found["on"][:2] == found["auto"][:2] == found["off"][:2]
    assert Imitation.made == 2
    # Five steps and two measurements run it anew; kept, three batches once and a look at its form.
    parts = len(batches[0]) // (options.get("micro_batch") or len(batches[0]))
    look = 1 if "include_lm_head" in options else 3
    assert found["off"][2] - found["auto"][2] == (5 + 2 - 3) * parts - look


def test_a_reference_is_kept_where_it_pays_and_fits_and_let_go_of_where_memory_ends(
    tiny, monkeypatch
):
    model, batches = tiny
    kept, decide, measure = [], KeptReferences.decide, DifferentiableSearch._task_loss

    def searched(**options):
        kept.clear()
        config = search_config(steps=4, objective="kl", raw_start=1.0, **options)
        return numbers(dmx.search(model, batches, Budget(5.0), config).history)

    def decided(self, *given):
        decide(self, *given)
        kept.append(self)

    monkeypatch.setattr(KeptReferences, "decide", decided)
    expected = searched(keep_reference="off")
    assert not kept
    assert searched() == expected and kept[0].keeps and len(kept[0]._kept) == 3
    monkeypatch.setattr("dmx.models.memory.HOST_MEMORY", 3 * 2 * 32 * 64 * 4 - 1)
    assert searched() == expected and not kept[0].keeps
    assert searched(keep_reference="on") == expected and kept[0].keeps
    monkeypatch.undo()
    monkeypatch.setattr(KeptReferences, "decide", decided)

    for ends, measures in ((1, False), (3, True)):  # in a step, and where the last one is measured

        def short(self, *given, ends=ends, measures=measures):
            is_there = self.step == ends and torch.is_grad_enabled() != measures
            if is_there and self.keeps_references:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return measure(self, *given)

        monkeypatch.setattr(DifferentiableSearch, "_task_loss", short)
        assert searched() == expected and not kept[0].keeps
    with pytest.raises(torch.OutOfMemoryError):
        searched(keep_reference="on")


@pytest.mark.gpu
def test_a_captured_step_takes_a_kept_reference_to_the_same_losses(tiny):
    model, batches = copy.deepcopy(tiny[0]).cuda().bfloat16(), tiny[1]
    found = []
    for keep in ("off", "on"):
        # Offsets that stay where they are: gradients on a GPU need not add up in one order.
        fixed = {"steps": 8, "lr": 0.0, "raw_start": 1.0, "objective": "kl", "evaluate_every": 4}
        config = search_config(**fixed, cuda_graph="on", keep_reference=keep)
        result = dmx.search(model, batches, Budget(5.0), config)
        found.append([[row[k] for k in ("loss", *LOSSES)] for row in result.history])
    assert found[0] == found[1]
    assert len({row[0] for row in found[0]}) == len(batches)


@pytest.mark.gpu
def test_a_search_that_died_goes_on_on_a_gpu(tiny, tmp_path):
    model, batches = copy.deepcopy(tiny[0]).cuda(), tiny[1]
    # A graph's replays call no hooks.
    config = search_config(steps=24, evaluate_every=8, checkpoint_every=5, cuda_graph="off")
    search_and_die(model, batches, config, tmp_path, 20)
    resumed = dmx.search(model, batches, Budget(5.0), config, folder=tmp_path)
    assert [row["step"] for row in resumed.history] == list(range(24))
    assert resumed.assignment.bits["element_bits"] <= 5.0


def test_a_finished_search_is_not_run_again(tiny, tmp_path):
    model, batches = tiny
    config = search_config(steps=4, raw_start=1.0)
    first = dmx.search(model, batches, Budget(5.0), config, folder=tmp_path)
    handle = model.register_forward_hook(lambda *_: pytest.fail("a finished search ran the model"))
    again = dmx.search(model, batches, Budget(5.0), config, folder=tmp_path)
    handle.remove()
    assert again.assignment == first.assignment and again.history == first.history


@pytest.mark.parametrize("text", ["", "[]", "{", '{"unreached": 3}'])
def test_a_damaged_list_of_unreached_layers_is_found_again(tiny, tmp_path, text):
    model, batches = tiny
    first = dmx.search(model, batches, Budget(5.0), search_config(name="random"), folder=tmp_path)
    whole = (tmp_path / "unreached.json").read_text()
    (tmp_path / "unreached.json").write_text(text)
    again = dmx.search(model, batches, Budget(5.0), search_config(name="random"), folder=tmp_path)
    assert again.assignment == first.assignment
    assert (tmp_path / "unreached.json").read_text() == whole


def test_a_state_of_another_search_is_refused(tiny, tmp_path):
    model, batches = tiny
    config = search_config(steps=3, checkpoint_every=1)
    dmx.search(model, batches, Budget(5.0), config, folder=tmp_path)
    words = r"is of a search with other settings, data or model\. Choose another folder"
    for other in (
        (batches[:2], Budget(5.0), config),
        (batches, Budget(5.1), config),
        (batches, Budget(5.25, "bits_per_element"), config),
        (batches, Budget(5.0), search_config(steps=4)),
        (batches, Budget(5.0), search_config(steps=3, seed=1)),
    ):
        with pytest.raises(RunError, match=words):
            dmx.search(model, *other, folder=tmp_path)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    with pytest.raises(RunError, match=words):
        dmx.search(model, batches, Budget(5.0), config, folder=tmp_path)


def test_a_damaged_state_is_an_error_that_names_the_file(tiny, tmp_path):
    model, batches = tiny
    config = search_config(steps=3)
    dmx.search(model, batches, Budget(5.0), config, folder=tmp_path)
    path = tmp_path / STATE_FILE
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"nothing of the kind"):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=r"search_state\.safetensors is damaged .*Delete it to"):
            dmx.search(model, batches, Budget(5.0), config, folder=tmp_path)
    for foreign in ({"step": torch.zeros(1)}, {}):
        save_file(foreign, path)
        with pytest.raises(RunError, match=r"search_state\.safetensors is damaged"):
            dmx.search(model, batches, Budget(5.0), config, folder=tmp_path)


def test_a_folder_that_cannot_be_written_shows_before_the_first_step(tiny, tmp_path):
    model, batches = tiny
    (tmp_path / "file").write_text("")
    model.register_forward_hook(lambda *_: pytest.fail("the search had begun"))
    for folder in (tmp_path / "file" / "run", "/proc/nowhere"):
        with pytest.raises(RunError, match=rf"cannot write {folder}.*may write"):
            dmx.search(model, batches, Budget(5.0), search_config(), folder=folder)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "kll"}, r"search\.name='kll'.*Did you mean 'kl'.*uniform, random, kl"),
        ({"family": "mxfp6_mxfp5"}, r"search\.family='mxfp6_mxfp5' is no.*Did you mean"),
        ({"family": None}, r"search\.family=None is no format family.*Allowed"),
        ({"keep_reference": "on"}, r"keep_reference=on with search\.objective=cross_entropy.*=kl"),
        ({"objective": "mse"}, r"search\.objective='mse'.*cross_entropy, kl"),
        ({"penalty": "hing"}, r"search\.descent\.penalty='hing'.*Did you mean 'hinge'"),
        ({"lr_schedule": "linear"}, r"search\.descent\.lr_schedule='linear'.*constant, cosine"),
        ({"raw_start": 2.5}, r"search\.descent\.raw_start=2\.5 must lie in \[0, 2\]"),
        ({"raw_start": float("nan")}, r"search\.descent\.raw_start=nan must lie in"),
        ({"lr": -1.0}, r"search\.descent\.lr=-1\.0 must lie in"),
        ({"momentum": 1.0}, r"search\.descent\.momentum=1\.0 must lie in"),
        ({"momentum": 0.0}, r"search\.descent\.nesterov=true needs search\.descent\.momentum > 0"),
        ({"temperature": 0.0}, r"search\.descent\.temperature=0\.0 must lie in"),
        ({"anneal_from": 1.5}, r"search\.descent\.anneal_from=1\.5 must lie in \[0, 1\]"),
        ({"steps": 2.5}, r"search\.steps=2\.5 must be a whole number"),
        ({"steps": "10"}, r"search\.steps='10' must be a whole number"),
        ({"lr": "1"}, r"search\.descent\.lr='1' must be a number"),
        ({"exclude": "*.o_proj"}, r"search\.exclude must be a list of globs"),
        ({"fixed": ["*.o_proj"]}, r"search\.fixed a dict of glob -> format"),
        ({"steps": 0}, r"search\.steps=0 must be at least 1"),
        ({"score_batches": 0}, r"search\.score_batches=0 must be at least 1"),
        ({"score_batches": True}, r"search\.score_batches=True must be a whole number"),
        ({"seed": None}, r"search\.seed=None must be a whole number"),
        ({"seed": -1}, r"search\.seed=-1 must be at least 0"),
        ({"evaluate_every": 0}, r"search\.descent\.evaluate_every=0 must be at least 1"),
        ({"target": "vllm"}, r"search\.target=vllm cannot load mxfp6_e2m3 .*loads: mxfp8_mxfp4"),
        (
            {"target": "vllm", "family": "mxfp8_mxfp4", "units": "layer"},
            r"needs search\.units=fused",
        ),
        (
            {"target": "vllm", "family": "mxfp8_mxfp4", "fixed": {"*.o_proj": "mxfp6"}},
            r"search\.target=vllm cannot load mxfp6_e2m3 of search\.fixed\['\*\.o_proj'\]. It loads",
        ),
        ({"target": "ollama"}, r"search\.target='ollama'.*any, vllm"),
        ({"choices": "apart"}, r"search\.choices='apart'.*joint, separate"),
        (
            {"choices": "separate", "name": "weight_mse"},
            r"search\.choices=separate with search\.name=weight_mse.*search\.choices=joint",
        ),
        (
            {"choices": "separate", "target": "vllm", "family": "mxfp8_mxfp4"},
            r"vLLM of search\.target=vllm cannot run inputs in mxfp4, mxfp8_e4m3.*It can: fp8 beside mxfp4 alone\. Use "
            r"search\.choices=joint, or search\.target=any",
        ),
        (
            {"choices": "separate", "target": "vllm_quark"},
            r"vLLM of search\.target=vllm_quark cannot run .*search\.choices=joint",
        ),
        (
            {"choices": "separate", "target": "transformers"},
            r"transformers .* cannot run inputs in mxfp6_e2m3 .*It can: fp8, mxfp4, mxfp8_e4m3",
        ),
    ],
)
def test_impossible_settings_are_refused(options, words):
    with pytest.raises(DmxError, match=words):
        search_config(**options)


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({"exclude": ["*.k_proj"]}, True),
        ({"fixed": {"*.up_proj": "mxfp8"}}, True),
        ({"fixed": {"*.up_proj": "bf16"}}, True),
        (
            {"exclude": ["*.[qkv]_proj"], "fixed": {"*.gate_proj": "mxfp8", "*.up_proj": "mxfp8"}},
            False,
        ),
        ({"exclude": ["*.o_proj"]}, False),
    ],
    ids=str,
)
def test_a_target_that_fuses_layers_refuses_patterns_that_split_a_group(options, splits, tiny):
    model, _ = tiny
    search_space(model, search_config(family="mxfp8_mxfp4", **options))
    config = search_config(family="mxfp8_mxfp4", target="vllm", **options)
    if not splits:
        assert search_space(model, config).units
        return
    with pytest.raises(FormatError, match=r"search\.target=vllm runs each fused group.*\{.*\}"):
        search_space(model, config)


@pytest.mark.parametrize("name", ["differentiable", "kl", "random", "uniform"])
def test_every_search_checks_budget_and_patterns_before_it_runs(name, tiny):
    model, batches = tiny
    model.register_forward_hook(lambda *_: pytest.fail("the search had begun"))
    with pytest.raises(DmxError, match=r"budget\.limit=3 element_bits .* 4 to 6"):
        dmx.search(model, batches, Budget(3.0), search_config(name=name))
    with pytest.raises(ModelError, match=r"search\.exclude: pattern 'nothing'"):
        dmx.search(model, batches, Budget(5.0), search_config(name=name, exclude=["nothing"]))
    with pytest.raises(ModelError, match=r"nothing to search"):
        dmx.search(model, batches, Budget(5.0), search_config(name=name, fixed={"*": "mxfp4"}))


def test_a_scan_on_more_batches_than_there_are_is_refused(tiny):
    model, batches = tiny
    for name in ("kl", "kl_per_bit", "fisher"):
        with pytest.raises(DmxError, match=r"score_batches=4, but there are 3 batches.*null"):
            dmx.search(model, batches, Budget(5.0), search_config(name=name, score_batches=4))


def test_quantized_peft_and_expert_models_are_refused(tiny):
    model, batches = tiny

    def refused(words, **options):
        with pytest.raises(ModelError, match=words):
            dmx.search(model, batches, Budget(5.0), search_config(steps=1, **options))

    model.config.quantization_config = {"quant_method": "gptq"}
    refused("already quantized .*gptq")
    del model.config.quantization_config
    mlp = model.model.layers[0].mlp
    mlp.experts = torch.nn.Parameter(torch.zeros(8, 64, 64))
    refused(r"lie outside nn\.Linear .*experts.*allow_unsearched")
    assert dmx.search(
        model, batches, Budget(5.0), search_config(name="random", allow_unsearched=True)
    ).assignment.formats
    del mlp.experts
    model._hf_peft_config_loaded = True
    refused("PEFT adapters .*merge_and_unload")


@pytest.mark.parametrize(
    ("options", "length", "causal"),
    [
        ({}, 4096, True),
        ({"sliding_window": 64}, 64, True),
        ({"sliding_window": 64}, 65, False),
        ({"sliding_window": None}, 65, True),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 64}, 65, True),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, 64, True),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, 65, False),
        (
            {"layer_types": ["sliding_attention", "linear_attention"], "sliding_window": 64},
            8,
            False,
        ),
        ({"_attn_implementation": "eager"}, 8, False),
    ],
    ids=str,
)
def test_attention_needs_no_mask_only_where_nothing_but_the_future_is_hidden(
    options, length, causal
):
    config = SimpleNamespace(**{"_attn_implementation": "sdpa"} | options)
    assert is_purely_causal(SimpleNamespace(config=config), length) is causal
    assert is_purely_causal(SimpleNamespace(), length) is False


def test_the_space_of_a_meta_model_is_that_of_the_real_one(tiny):
    model, _ = tiny
    real = search_space(model, search_config())
    with torch.device("meta"):
        other = type(model)(model.config)
    meta = build_space(other, get_family("mxfp6_mxfp4").formats)
    assert meta == real


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_the_callers_mode_changes_nothing(mode, tiny):
    model, batches = tiny
    config = search_config(steps=4, raw_start=1.0, evaluate_every=4)
    plain = dmx.search(model, batches, Budget(5.0), config)
    with mode():
        inside = dmx.search(model, [b.clone() for b in batches], Budget(5.0), config)
    assert numbers(inside.history) == numbers(plain.history)
    assert dmx.search(model, batches, Budget(5.0), config).assignment == inside.assignment


def test_models_without_usable_weights_are_refused(tiny):
    model, batches = tiny
    for other, words in (
        (copy.deepcopy(model).double(), "is float64; .*model.float"),
        (copy.deepcopy(model).to("meta"), "is on the meta device: load"),
    ):
        with pytest.raises(ModelError, match=words):
            dmx.search(other, batches, Budget(5.0), search_config())


def test_numpy_numbers_are_budgets(tiny, tmp_path):
    for limit in (np.float32(5.0), np.int64(5), np.float64(5.0), 5):
        result = dmx.search(*tiny, Budget(limit), search_config(name="random"))
        path = result.assignment.save(tmp_path / "a.json")
        assert json.loads(path.read_text())["budget"] == {"limit": 5.0, "unit": "element_bits"}
