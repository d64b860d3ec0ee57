"""Training: schedule, order, learning, resuming to the same numbers, the outlier."""

import copy
import itertools
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mor
from dmx.data import DataConfig, encode, load_text
from mor import MorConfig, MorError
from mor.log import read_log
from mor.training import (
    CHECKPOINT,
    OutlierConfig,
    TrainConfig,
    batch_indices,
    fresh_weights,
    learning_rate,
    read_rows,
    train,
)
from tests.golden import assert_same_bits
from tests.mixtures import mixture

RECIPES = {
    "bf16": None,
    "e4m3_current": MorConfig(threshold=1000.0),
    "tensor": MorConfig(),
    "held": MorConfig(refresh_every=3),
    "block_two_way": MorConfig("block_two_way", "32x32"),
}


def windows(n: int, seed: int = 0) -> Tensor:
    """A language of two-step counting, easy to learn."""
    start = torch.randint(0, 200, (n, 1), generator=torch.Generator().manual_seed(seed))
    return (start + 2 * torch.arange(16)) % 256


def settings(**changes) -> TrainConfig:
    plain = {
        "window": 16,
        "batch_size": 8,
        "max_steps": 12,
        "lr": 5e-3,
        "validate_every": 4,
        "checkpoint_every": 5,
        "log_every": 3,
        "epochs": 2,
    }
    return TrainConfig(**(plain | changes))


def run(model, folder: Path, recipe="tensor", config=None, seed=0):
    model = fresh_weights(model, seed=1)
    result = train(
        model,
        windows(64),
        windows(8, seed=5),
        config or settings(),
        RECIPES[recipe],
        folder=folder,
        seed=seed,
    )
    return model, result


@pytest.fixture(scope="module")
def _kept(tmp_path_factory):
    return {"folder": tmp_path_factory.mktemp("kept") / "run"}


@pytest.fixture
def finished(tiny_random, tmp_path, _kept):
    """Of a run to its end, trained once for all: a copy of its folder, and its result."""
    if "result" not in _kept:
        _, _kept["result"] = run(tiny_random.model, _kept["folder"])
    shutil.copytree(_kept["folder"], tmp_path / "finished")
    return tmp_path / "finished", _kept["result"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_learns_and_leaves_its_logs(tiny_random, tmp_path, recipe):
    _, result = run(tiny_random.model, tmp_path, recipe)
    rows = read_rows(tmp_path / "train.jsonl")
    assert [row["step"] for row in rows] == list(range(12)) and result.steps == 12
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    validations = read_rows(tmp_path / "validation.jsonl")
    assert [row["step"] for row in validations] == [3, 7, 11]
    assert validations[-1]["loss"] == float(result.window_nll.mean())
    if recipe != "bf16":
        header, log = read_log(tmp_path / "mor.jsonl")
        assert [row["step"] for row in log] == list(range(12))
        assert "lm_head" not in header["layers"] and len(header["layers"]) == 14


class _Death(Exception):
    pass


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_that_died_ends_with_the_same_numbers(make_tiny, tmp_path, recipe):
    config = settings(outlier=OutlierConfig(step=2))
    start = make_tiny(layers=1).model
    whole, expected = run(start, tmp_path / "whole", recipe, config)
    steps = iter(range(7))

    def die(note: str) -> None:
        if next(steps, None) is None:
            raise _Death

    model = fresh_weights(start, seed=1)
    arguments = (windows(64), windows(8, seed=5), config, RECIPES[recipe])
    with pytest.raises(_Death):
        train(model, *arguments, folder=tmp_path / "died", seed=0, on_step=die)
    again, result = run(start, tmp_path / "died", recipe, config)
    assert torch.equal(result.window_nll, expected.window_nll)
    for a, e in zip(again.parameters(), whole.parameters(), strict=True):
        assert_same_bits(a.detach(), e.detach())

    def losses(name: str) -> list[float]:
        return [row["loss"] for row in read_rows(tmp_path / name / "train.jsonl")]

    assert losses("died") == losses("whole")
    if recipe != "bf16":
        assert mor.stats(again) == mor.stats(whole)
        assert read_log(tmp_path / "died/mor.jsonl") == read_log(tmp_path / "whole/mor.jsonl")


def test_what_a_kill_tore_is_cut_off_and_written_again(tiny_random, tmp_path, finished):
    complete, whole = finished
    folder = tmp_path / "torn"
    shutil.copytree(complete, folder)
    (folder / CHECKPOINT).unlink()
    stale = folder / f".{CHECKPOINT}.abc.tmp"
    stale.write_text("half")
    for name, kept in (("train", -20), ("validation", -3), ("mor", 40)):  # of mor half the header
        log = folder / f"{name}.jsonl"
        log.write_bytes(log.read_bytes()[:kept])
    _, again = run(tiny_random.model, folder)
    assert torch.equal(again.window_nll, whole.window_nll) and not stale.exists()
    for name in ("train", "validation"):
        rows, expected = (read_rows(f / f"{name}.jsonl") for f in (folder, complete))
        assert [r["loss"] for r in rows] == [r["loss"] for r in expected]
    assert read_log(folder / "mor.jsonl") == read_log(complete / "mor.jsonl")


def test_a_damaged_checkpoint_is_named(tiny_random, tmp_path):
    (tmp_path / CHECKPOINT).write_bytes(b"PK half")
    with pytest.raises(MorError, match=r"checkpoint\.pt is damaged .* Delete it"):
        run(tiny_random.model, tmp_path)


def test_a_checkpoint_that_holds_something_else_is_named(tiny_random, tmp_path):
    torch.save({"weights": 1}, tmp_path / CHECKPOINT)
    with pytest.raises(MorError, match="holds no training state"):
        run(tiny_random.model, tmp_path)


def test_a_checkpoint_of_plain_layers_is_told_from_one_of_mor(tiny_random, tmp_path):
    run(tiny_random.model, tmp_path, recipe="bf16")
    with pytest.raises(MorError, match=r"'mor': False}, asked .*'mor': True}"):
        run(tiny_random.model, tmp_path)


def test_an_outlier_after_the_last_step_is_refused(tiny_random, tmp_path):
    config = settings(outlier=OutlierConfig(step=100))
    with pytest.raises(MorError, match=r"train\.outlier\.step=100 is never reached"):
        run(tiny_random.model, tmp_path, config=config)


def test_a_finished_run_is_read_back(tiny_random, finished):
    folder, first = finished
    _, second = run(tiny_random.model, folder)
    assert torch.equal(first.window_nll, second.window_nll) and first.seconds == second.seconds


def test_checkpoints_of_other_settings_are_refused(tiny_random, finished):
    folder, _ = finished
    assert (folder / CHECKPOINT).exists()
    for recipe, config in (("tensor", settings(lr=1e-4)), ("bf16", settings())):
        with pytest.raises(MorError, match="checkpoint of another run"):
            run(tiny_random.model, folder, recipe, config)


def test_outlier_hurts_current_scaling_and_not_mor(tiny_trained, tmp_path):
    """Three steps after an outlier that changes no function."""
    config = TrainConfig(
        window=64,
        batch_size=8,
        max_steps=6,
        lr=1e-4,
        validate_every=1,
        log_every=1,
        outlier=OutlierConfig(step=3),
    )

    text = load_text(DataConfig(name="embedded", split="calibration", max_characters=20_000))
    data = encode(tiny_trained.tokenizer, text)[: 64 * 128].view(128, 64)

    def jump(recipe: str) -> float:
        model, folder = copy.deepcopy(tiny_trained.model), tmp_path / recipe
        train(model, data[16:], data[:16], config, RECIPES[recipe], folder=folder, seed=0)
        losses = [row["loss"] for row in read_rows(folder / "validation.jsonl")]
        return max(losses[3:]) - losses[2]

    assert jump("bf16") < 0.01
    assert jump("tensor") < 0.01
    assert jump("e4m3_current") > 0.1
    _, rows = read_log(tmp_path / "tensor/mor.jsonl")
    header, _ = read_log(tmp_path / "tensor/mor.jsonl")
    fallen = {
        (header["layers"][i], header["operands"][j])
        for i, layer in enumerate(rows[4]["elements_bf16"])
        for j, share in enumerate(layer)
        if share and not rows[2]["elements_bf16"][i][j]
    }
    mlp = "model.layers.0.mlp"
    assert (f"{mlp}.up_proj", "weight") in fallen and (f"{mlp}.down_proj", "input") in fallen
    assert all(name.startswith(mlp) for name, _ in fallen)


def test_activation_checkpointing_gives_the_same_numbers(tiny_random, tmp_path, finished):
    folder, plain = finished
    config = settings(activation_checkpointing=True)
    _, saved = run(tiny_random.model, tmp_path / "saved", config=config)
    assert torch.equal(plain.window_nll, saved.window_nll)
    assert read_log(folder / "mor.jsonl") == read_log(tmp_path / "saved/mor.jsonl")


def test_the_loss_of_equal_use_is_learned_from_and_not_logged(tmp_path):
    losses = {}
    for weight in (0.0, 1000.0):
        model = mixture(vocab_size=256, router_aux_loss_coef=weight)
        run(model, tmp_path / str(weight), recipe="bf16", config=settings(max_steps=4, log_every=1))
        losses[weight] = [row["loss"] for row in read_rows(tmp_path / str(weight) / "train.jsonl")]
    assert losses[0.0][0] == losses[1000.0][0]
    assert losses[0.0][-1] != losses[1000.0][-1]


def test_schedule_rises_then_falls_to_its_share():
    config = settings(lr=1.0, warmup_share=0.1, final_lr_share=0.2)
    rates = [learning_rate(i, 100, config) for i in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0 and rates[-1] == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert learning_rate(0, 1, config) <= 1


def test_each_pass_sees_every_window_once_in_another_order():
    passes = [torch.cat([batch_indices(4 * p + i, 16, 4, 0) for i in range(4)]) for p in range(2)]
    assert all(sorted(p.tolist()) == list(range(16)) for p in passes)
    assert passes[0].tolist() != passes[1].tolist()
    other = torch.cat([batch_indices(i, 16, 4, 1) for i in range(4)])
    assert passes[0].tolist() != other.tolist()


def test_fresh_weights_follow_the_seed_and_the_architecture(tiny_random):
    before = torch.get_rng_state()
    a, b, c = (fresh_weights(tiny_random.model, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert len(fresh_weights(tiny_random.model, 1, num_hidden_layers=1).model.layers) == 1
    with pytest.raises(MorError, match=r"architecture\.n_layer is no field"):
        fresh_weights(tiny_random.model, 1, n_layer=1)
    other = fresh_weights(tiny_random.model, 1, model_type="qwen3", head_dim=8)
    ours, theirs = other.config, tiny_random.model.config
    assert type(other).__name__ == "Qwen3ForCausalLM" and ours.head_dim == 8
    assert (ours.hidden_size, ours.vocab_size) == (theirs.hidden_size, theirs.vocab_size)
    assert len(other.model.layers) == theirs.num_hidden_layers
    with pytest.raises(MorError, match=r"architecture\.model_type='gpt9' is not known"):
        fresh_weights(tiny_random.model, 1, model_type="gpt9")
    with pytest.raises(MorError, match=r"architecture\.n_layer is no field of Qwen3Config"):
        fresh_weights(tiny_random.model, 1, model_type="qwen3", n_layer=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 1}, "train.window=1 must be at least 2"),
        ({"batch_size": 0}, "train.batch_size=0 must be at least 1"),
        ({"lr": 0.0}, "train.lr=0.0 must be > 0"),
        ({"epochs": math.nan}, "train.epochs=nan must be > 0"),
        ({"warmup_share": 2.0}, "between 0 and 1"),
        ({"precision": "fp16"}, "Allowed: bf16, no"),
        ({"betas": [0.9]}, "train.betas=[0.9] must be two numbers"),
        ({"betas": [0.9, 1.0]}, "train.betas=[0.9, 1.0] must be two numbers"),
        ({"weight_decay": -0.1}, "train.weight_decay=-0.1 must be at least 0"),
    ],
)
def test_impossible_settings_are_refused(changes, words):
    with pytest.raises(MorError) as caught:
        settings(**changes)
    assert words in str(caught.value)


def test_too_little_text_is_refused(tiny_random, tmp_path):
    with pytest.raises(MorError, match="fills 4 windows of 16 tokens"):
        train(tiny_random.model, windows(4), windows(4), settings(), None, folder=tmp_path, seed=0)
