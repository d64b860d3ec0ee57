"""Weights that learn block by block: errors fall, before and without steps end to end; stopped runs go on."""

import contextlib

import pytest
import torch

import dmx
from dmx.applying.linear import quantized_layers
from dmx.errors import ModelError, RunError
from dmx.formats import MXFP4
from dmx.numerics import fake_quant
from dmx.progress import Stopwatch
from dmx.weights import learned, learned_blocks
from dmx.weights.learn_config import LearnConfig
from dmx.weights.learned import _Learning, learn_weights
from dmx.weights.learned_blocks import STATE_FOLDER, BlockLearning, block_loss
from tests.weights.helpers import mixed, text_batches, uniform
from tests.weights.test_learned import BATCHES, mean_kl

SHORT = {"steps": 0, "block_steps": 6, "lr": 1e-3}


@pytest.mark.parametrize("transform", ["none", "hadamard_block", "hadamard_full"])
def test_kl_on_held_batches_falls_without_a_step_end_to_end(transform, tiny_trained):
    model, batches = tiny_trained.model, text_batches(tiny_trained.tokenizer)
    assignment = uniform(model, transform=transform)
    config = LearnConfig(steps=0, warmup=2, block_steps=40, lr=5e-4)
    done = learn_weights(model, assignment, batches, config)
    facts = done.weights
    assert facts["kl_after"] == facts["kl_blocks"] < 0.9 * facts["kl_before"]
    assert facts["tokens"] == 40 * 4 * 64 and facts["block_steps"] == 40
    if transform != "hadamard_full":  # there, full precision means the rotated model
        held = batches[-2:]
        assert mean_kl(model, assignment, held) == pytest.approx(facts["kl_before"], rel=1e-3)
        assert mean_kl(model, done, held) == pytest.approx(facts["kl_after"], rel=1e-3)
    both = learn_weights(
        model, assignment, batches, LearnConfig(steps=20, warmup=2, block_steps=40, lr=5e-4)
    ).weights
    assert both["kl_blocks"] == pytest.approx(facts["kl_blocks"], rel=1e-3)
    assert both["kl_before"] == facts["kl_before"]
    assert both["kl_after"] < 0.9 * both["kl_before"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_stored_are_values_of_the_format(dtype, make_tiny):
    model = make_tiny("llama", dtype=dtype).model
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    done = learn_weights(model, mixed(model, "even"), BATCHES, LearnConfig(**SHORT))
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())
    dmx.apply(model, done)
    for name, layer in quantized_layers(model).items():
        weight = layer.quantized_weight()
        assert torch.equal(weight, fake_quant(weight, done.formats[name], scale_rule="even"))
        assert not torch.equal(weight, fake_quant(layer.weight, done.formats[name])), name


def test_layers_outside_the_blocks_are_rounded_and_counted(make_tiny):
    model = make_tiny("llama").model
    assignment = uniform(model, include_lm_head=True)
    done = learn_weights(model, assignment, BATCHES, LearnConfig(**SHORT))
    measured = BATCHES[:4]
    assert mean_kl(model, assignment, measured) == pytest.approx(
        done.weights["kl_before"], rel=1e-3
    )
    assert mean_kl(model, done, measured) == pytest.approx(done.weights["kl_after"], rel=1e-3)
    dmx.apply(model, done)
    head = quantized_layers(model)["lm_head"]
    assert torch.equal(head.quantized_weight(), fake_quant(head.weight, MXFP4))


@pytest.mark.parametrize("steps", [0, 4])
def test_a_run_that_died_ends_as_one_that_did_not(steps, tiny_random, tmp_path, monkeypatch):
    model, learn, blocks = tiny_random.model, BlockLearning._learn, []
    config = LearnConfig(**SHORT | {"steps": steps})
    expected = learn_weights(model, uniform(model), BATCHES, config)

    def counted(self, block, *rest):
        blocks.append(block)
        if len(blocks) == 2:
            raise KeyboardInterrupt
        learn(self, block, *rest)

    monkeypatch.setattr(BlockLearning, "_learn", counted)
    with pytest.raises(KeyboardInterrupt):
        learn_weights(
            model, uniform(model), BATCHES, config, folder=tmp_path, clock=Stopwatch(100.0)
        )
    clock = Stopwatch()
    done = learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path, clock=clock)
    assert clock.seconds > 100, "the seconds of the stopped run count"
    assert blocks[:3] == [0, 1, 1] and 0 not in blocks[1:]
    assert done == expected and done.content("weights") == expected.content("weights")
    other = LearnConfig(**SHORT | {"steps": steps, "block_steps": 7})
    with pytest.raises(RunError, match=r"settings.* \(learn\.block_steps is 6 there, 7 here\)\."):
        learn_weights(model, uniform(model), BATCHES, other, folder=tmp_path)
    file = tmp_path / STATE_FOLDER / "0000.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(RunError, match=r"is damaged .*Delete it to learn again"):
        learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path)


def test_a_run_that_died_end_to_end_keeps_its_blocks(tiny_random, tmp_path, monkeypatch):
    model, learn, update, done = tiny_random.model, BlockLearning._learn, _Learning._update, []
    config = LearnConfig(**SHORT | {"steps": 5, "checkpoint_every": 2})
    expected = learn_weights(model, uniform(model), BATCHES, config)

    def counted(self, block, *rest):
        done.append(f"block {block}")
        learn(self, block, *rest)

    def dying(self, loss):
        done.append(self.step)
        if done.count(3) == 1 and self.step == 3:
            raise OSError
        update(self, loss)

    monkeypatch.setattr(BlockLearning, "_learn", counted)
    monkeypatch.setattr(_Learning, "_update", dying)
    with pytest.raises(OSError):
        learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path)
    again = learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path)
    blocks = [f"block {i}" for i in range(len(model.model.layers))]
    assert done == [*blocks, 0, 1, 2, 3, 2, 3, 4]
    assert again == expected and again.content("weights") == expected.content("weights")


@pytest.mark.parametrize("steps", [0, 4])
def test_the_line_on_the_screen_says_the_phase_and_counts_what_follows(
    steps, tiny_random, tmp_path, monkeypatch
):
    model, lines = tiny_random.model, []
    config = LearnConfig(**SHORT | {"steps": steps})

    @contextlib.contextmanager
    def shown(what, total, *, done=0, after=0):
        counted = []
        yield counted.append
        lines.append((what, total, done, after))
        assert len(counted) == total - done

    monkeypatch.setattr(learned_blocks, "progress", shown)
    monkeypatch.setattr(learned, "progress", shown)
    n = len(model.model.layers)
    learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path)
    blocks = "learn blocks, 1 of 2" if steps else "learn blocks"
    follows = [("learn end to end, 2 of 2", steps, 0, 0)] if steps else []
    assert lines == [(blocks, 6 * n, 0, steps * n), *follows]
    (tmp_path / STATE_FOLDER / f"{n - 1:04d}.safetensors").unlink()
    lines.clear()
    learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path)
    assert lines[0] == (blocks, 6 * n, 6 * (n - 1), steps * n)


def test_only_one_block_has_masters_at_a_time(tiny_random, monkeypatch):
    sizes, masters = [], learned_blocks.Masters

    def counted(weights, *rest):
        sizes.append(len(weights))
        return masters(weights, *rest)

    monkeypatch.setattr(learned_blocks, "Masters", counted)
    model = tiny_random.model
    learn_weights(model, uniform(model), BATCHES, LearnConfig(**SHORT))
    assert sizes == [7] * len(model.model.layers)


def test_each_token_counts_by_its_own_power():
    wanted = torch.tensor([[[1000.0, 0.0], [0.0, 1.0]]])
    found = torch.tensor([[[1100.0, 0.0], [0.0, 1.5]]])
    assert float(block_loss(found, wanted)) == pytest.approx((0.01 + 0.25) / 2)
    assert float(block_loss(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))) == 0.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": 1e30}, r"step \d+ is not finite \(learn\.lr=1e\+30\)\. Lower learn\.lr"),
        (
            {"train": "rounding", "lr": LearnConfig.lr},
            r"step 0 is not finite\. Look for Inf or NaN",
        ),
    ],
)
def test_a_loss_that_is_not_finite_is_an_error(options, says, tiny_random, tmp_path, monkeypatch):
    model, config = tiny_random.model, LearnConfig(**SHORT | options)
    if config.train == "rounding":  # whose steps are bounded
        monkeypatch.setattr(
            learned_blocks, "block_loss", lambda *given: block_loss(*given) * torch.nan
        )
    with pytest.raises(RunError, match=f"learning block 0: .* of {says}"):
        learn_weights(model, uniform(model), BATCHES, config, folder=tmp_path)
    assert not (tmp_path / STATE_FOLDER / "0000.safetensors").exists()


def test_what_makes_no_sense_is_refused(tiny_random):
    for setting in (
        {"micro_batch": 1},
        {"gradient_checkpointing": True},
        {"keep_reference": "on"},
        {"cuda_graph": "on"},
    ):
        (name,) = setting
        with pytest.raises(RunError, match=rf"learn\.{name}=.*learn\.steps=0 takes none"):
            LearnConfig(**SHORT, **setting)
    model = tiny_random.model
    fixed = {"model.layers.*": "bf16"}
    outside = uniform(model, include_lm_head=True, fixed=fixed)
    with pytest.raises(ModelError, match=r"learn\.block_steps=6: .*has no decoder blocks with"):
        learn_weights(model, outside, BATCHES, LearnConfig(**SHORT))
