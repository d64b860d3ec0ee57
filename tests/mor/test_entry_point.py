"""`python -m experiments.train_mor`, as a user runs it, and its report."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException

from dmx.errors import DmxError, RunError
from experiments.reporting.plots.training import fallback_map
from experiments.reporting.recipes import comparison, comparison_text
from experiments.reporting.record import Record, TrainingRow
from experiments.running.composing import build_root
from experiments.running.training import save_model
from experiments.train_mor import TrainMorRun
from mor.state import OPERANDS
from tests.forked import Forked, places

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "train.max_steps=3",
    "train.window=32",
    "train.batch_size=4",
    "train.validation_windows=4",
    "train.checkpoint_every=2",
    "run.device=cpu",
    "model.tiny.layers=1",
    "data.calibration.max_characters=20000",
    "data.evaluation.max_characters=4000",
)


def train_mor(*arguments: str) -> Forked:
    process = Forked("-m", "experiments.train_mor", *arguments)
    process.wait(300)
    return process


def test_trains_every_recipe_and_reports(tmp_path):
    folder = tmp_path / "run"
    recipes = ["bf16", "e4m3_current", "tensor", "block_two_way", "block_three_way"]
    done = train_mor(f"mor=[{','.join(recipes)}]", f"run.folder={folder}", *SMALL)
    assert done.poll() == 0, done.outputs()[1]
    record = Record.load(folder / "record.json")
    assert [row.recipe for row in record.training_rows] == recipes
    for row in record.training_rows:
        assert row.steps == 3 and row.nll < 6
        assert (row.fp8_tensor_share is None) == (row.recipe == "bf16")
    assert [entry.recipe for entry in record.comparison] == recipes[1:]
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png") == 4 and page.count("data:image/svg") == 2
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("mor.tensor.threshhold=0.1", "threshhold"),
        ("+mor.tensor.threshhold=0.1", "mor.tensor key='threshhold' is not allowed"),
        ("mor.tensor.threshold=0", "mor.threshold=0 is not allowed"),
        ("mor=bf16", None),
        ("train.lr=0", "train.lr=0 must be > 0"),
        ("train.lr=fast", "train.lr='fast' has the wrong type"),
        ("train.lrr=1", "lrr"),
        ("seeds=[]", "at least one recipe and seed"),
        ("seeds=[0,1,0]", "seeds=[0, 1, 0] names a seed twice"),
    ],
)
def test_settings_are_checked_before_anything_is_loaded(argument, words):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        if words is None:
            build_root(TrainMorRun, compose("train_mor", [argument]))
            return
        with pytest.raises((DmxError, ConfigCompositionException)) as caught:
            build_root(TrainMorRun, compose("train_mor", [argument]))
    assert words in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+mor.tensor.products=real"], "mor.products=real"),
        (["train.outlier.step=1", "train.outlier.layer=mlp"], "outlier.layer='mlp' is no MLP"),
        (["train.outlier.step=1", "train.outlier.channels=[128]"], "128 is out of range"),
        (["train.window=4096"], "window=4096 is longer than the model's 2048 positions"),
        (["+architecture.model_type=clip"], "model_type=clip gives no causal language model"),
        (["+architecture.num_hidden_layers=two"], "num_hidden_layers=two gives no causal"),
        (["+architecture.num_hidden_layers=0"], "MoR has nothing to replace"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_the_first_recipe(arguments, words):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = build_root(TrainMorRun, compose("train_mor", arguments))
    with pytest.raises(DmxError) as caught:
        config.plan.check(torch.device("cpu"))
    assert words in str(caught.value)


def test_a_model_that_cannot_be_written_leaves_no_half_of_it(tiny_random, tmp_path):
    (tmp_path / "model").write_text("a file where the folder should be")
    with pytest.raises(RunError, match="save_models=true: cannot write"):
        save_model(tiny_random.model, tiny_random, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_run_killed_before_its_report_writes_it(tmp_path):
    arguments = ("mor=[bf16]", f"run.folder={tmp_path / 'run'}", *SMALL)
    assert train_mor(*arguments).poll() == 0
    page = (tmp_path / "run" / "report.html").read_bytes()
    (tmp_path / "run" / "report.html").unlink()
    assert train_mor(*arguments).poll() == 0
    assert b"Training with MoR" in page
    assert b"Training with MoR" in (tmp_path / "run" / "report.html").read_bytes()


def test_every_recipe_file_composes():
    recipes = sorted(path.stem for path in (ROOT / "configs/mor").glob("*.yaml"))
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = build_root(TrainMorRun, compose("train_mor", [f"mor=[{','.join(recipes)}]"]))
        pretrain = compose("train_mor", ["experiment=pretrain_49m"])
        dense = compose("train_mor", ["experiment=pretrain_qwen3_48m"])
        mixture = compose("train_mor", ["experiment=pretrain_qwen3_moe_30m_active"])
    assert sorted(config.plan.recipes) == recipes and config.plan.recipes["bf16"] is None
    assert build_root(TrainMorRun, pretrain).architecture["hidden_size"] == 512
    assert build_root(TrainMorRun, dense).architecture["model_type"] == "qwen3"
    sizes = build_root(TrainMorRun, mixture).architecture
    assert sizes["hidden_size"] == 512 and sizes["num_experts_per_tok"] == 4
    attention = 512 * 64 * (8 + 4 + 4 + 8)
    experts = 3 * 512 * sizes["moe_intermediate_size"] * sizes["num_experts_per_tok"]
    assert sizes["num_hidden_layers"] * (attention + experts) > 30e6


def rows(recipe: str, *losses: float | None) -> list[TrainingRow]:
    unmeasured = {f.name: None for f in dataclasses.fields(TrainingRow)}
    reasons = {"nll": "not finite"}
    return [
        TrainingRow(**unmeasured | {"recipe": recipe, "seed": i, "nll": loss, "reasons": reasons})
        for i, loss in enumerate(losses)
    ]


def test_comparison_takes_the_larger_of_half_a_percent_and_two_standard_errors():
    calm = comparison(rows("bf16", 4.0, 4.0) + rows("tensor", 4.019, 4.019))
    assert calm[0].within and calm[0].allowed_nats == pytest.approx(0.02)
    worse = comparison(rows("bf16", 4.0, 4.0) + rows("tensor", 4.03, 4.03))
    assert not worse[0].within and "is outside the tolerance" in comparison_text(worse[0])
    better = comparison(rows("bf16", 4.0, 4.0) + rows("tensor", 3.9, 3.9))
    assert better[0].within and "is within the tolerance" in comparison_text(better[0])
    noisy = comparison(rows("bf16", 3.9, 4.1) + rows("tensor", 4.1, 4.2))
    stderr = (0.1**2 + 0.05**2) ** 0.5
    assert noisy[0].within and noisy[0].allowed_nats == pytest.approx(2 * stderr)
    broken = comparison(rows("bf16", 4.0) + rows("tensor", None))
    assert not broken[0].within
    assert "outside the tolerance of bf16: seed 0: loss is not finite." in comparison_text(
        broken[0]
    )


def test_comparison_is_on_the_seeds_that_both_have():
    bf16 = rows("bf16", 4.0, 5.0, 6.0)
    (lost,) = comparison(bf16 + rows("tensor", 4.0, None, 6.0))
    assert not lost.within and lost.reason == "seed 1: loss is not finite"
    (fewer,) = comparison(bf16 + rows("tensor", 4.01, 5.01))
    assert fewer.difference_nats == pytest.approx(0.01) and fewer.baseline_nats == 4.5
    (theirs,) = comparison(rows("bf16", 4.0, None, 6.0) + rows("tensor", 4.01, 9.0, 6.01))
    assert theirs.difference_nats == pytest.approx(0.01) and theirs.seeds == (0, 2)
    (none,) = comparison(rows("bf16", None) + rows("tensor", 4.0))
    assert "no comparison with bf16 (the loss of bf16 is not finite)" in comparison_text(none)


def test_a_single_fallback_stays_visible_on_the_map():
    log = [{"step": i, "elements_bf16": [[0.0] * 6 for _ in range(3)]} for i in range(1000)]
    log[700]["elements_bf16"][1][0] = 1.0
    figure = fallback_map(["a", "b", "c"], log)
    meshes = [axes.collections[0] for axes in figure.axes[: len(OPERANDS)]]
    images = [np.asarray(mesh.get_array()).reshape(3, -1) for mesh in meshes]
    assert images[0][1].max() == 1 and images[0].sum() == 1
    assert not any(image.any() for image in images[1:])
    edges = meshes[0].get_coordinates()[0, :, 0]
    column = int(images[0][1].argmax())
    assert edges[column] < 700 < edges[column + 1]


def test_columns_of_a_map_stand_at_their_steps():
    log = [{"step": i, "elements_bf16": [[0.0] * 6]} for i in (0, 10, 20, 22, 24)]
    mesh = fallback_map(["a"], log).axes[0].collections[0]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [-0.5, 9.5, 19.5, 21.5, 23.5, 25.5]


def test_of_two_processes_the_main_one_writes_the_rows(tmp_path):
    folder = tmp_path / "run"
    arguments = ("-m", "experiments.train_mor", "mor=[tensor]", f"run.folder={folder}", *SMALL)
    processes = [Forked(*arguments, environment=place) for place in places(2)]
    for process in processes:
        assert process.wait(300) == 0, process.outputs()[1]
    record = Record.load(folder / "record.json")
    row = json.loads((folder / "rows" / "tensor-0.json").read_text())
    stats = json.loads((folder / "tensor-0" / "stats.json").read_text())
    assert record.actual["processes"] == 2
    assert record.training_rows == (TrainingRow.from_dict(row, "row"),)
    assert row["operands"] == stats["operands"]
