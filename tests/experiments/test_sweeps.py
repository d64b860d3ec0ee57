"""A sweep that was killed, and had a run that failed, goes on where it stood; collect joins it. Other launchers run sweeps
in `tests/test_wheel.py`."""

import importlib
import json
import signal
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from experiments.running.settings import CONFIGS
from tests.forked import Forked

NAMES = "abc"
FAILING, KILLED = 1, 2


def _command(folder: Path) -> list[str]:
    files = ",".join(f"[{folder / name}.txt]" for name in NAMES)
    return [
        "-m",
        "experiments.search",
        "-m",
        "model=tiny_random",
        "data=files",
        f"data.calibration.files={files}",
        f"data.evaluation.files=[{folder}/a.txt]",
        "calibration.window=64",
        "calibration.batch_size=2",
        "calibration.batches=2",
        "evaluation.window=64",
        "evaluation.max_windows=4",
        "search=differentiable",
        "search.steps=2",
        "baselines=[]",
        f"hydra.sweep.dir={folder}/sweep",
    ]


def _sweep(folder: Path) -> int:
    return Forked(*_command(folder)).wait()


def _records(folder: Path) -> dict[int, float]:
    """Number of each finished run -> when its record was written."""
    paths = {i: folder / "sweep" / str(i) / "record.json" for i in range(len(NAMES))}
    return {i: p.stat().st_mtime_ns for i, p in paths.items() if p.exists()}


def _run_and_kill(folder: Path) -> None:
    """Start the sweep and kill it as soon as its last run has begun."""
    process = Forked(*_command(folder))
    begun = folder / "sweep" / str(KILLED) / "config.yaml"
    deadline = time.monotonic() + 120
    while not begun.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert begun.exists()


def test_a_sweep_goes_on_with_just_the_runs_that_are_not_finished(tmp_path):
    text = "the quick brown fox jumps over the lazy dog and goes on to the next field. " * 40
    for i, name in enumerate(NAMES):
        if i != FAILING:
            (tmp_path / f"{name}.txt").write_text(text + name * 200)
    _run_and_kill(tmp_path)
    first = _records(tmp_path)
    assert set(first) == {0}
    error = json.loads((tmp_path / "sweep" / str(FAILING) / "error.json").read_text())
    assert "b.txt" in error["error"]

    assert _sweep(tmp_path) != 0, "a failed run must show in the exit code"
    second = _records(tmp_path)
    assert set(second) == {0, KILLED}

    (tmp_path / "b.txt").write_text(text + "b" * 200)
    assert _sweep(tmp_path) == 0
    third = _records(tmp_path)
    assert set(third) == set(range(len(NAMES)))
    assert {i: third[i] for i in second} == second, "finished runs must not run again"
    assert not (tmp_path / "sweep" / str(FAILING) / "error.json").exists()

    elsewhere = tmp_path / "sweep" / "2" / "record.json"
    body = json.loads(elsewhere.read_text())
    body["device"]["name"] = "another machine's card"
    elsewhere.write_text(json.dumps(body))
    joined = Forked(
        "-m", "experiments.compare", f"collect={tmp_path}/sweep", f"run.folder={tmp_path}/joined"
    )
    assert joined.wait() == 0, joined.outputs()[1]
    record = json.loads((tmp_path / "joined" / "record.json").read_text())
    assert len(record["results"]) == len(NAMES)
    assert record["actual"]["collected"] == len(NAMES)
    assert list(record["actual"]["machines"].values()) == [2, 1]
    assert any("1 on another machine's card" in said for said in record["warnings"])
    for row in record["results"]:
        assert (tmp_path / "joined" / row["assignment"]).exists()
    assert (tmp_path / "joined" / "report.html").exists()
    assert len((tmp_path / "joined" / "results.csv").read_text().splitlines()) == len(NAMES) + 1


def test_a_job_of_slurm_asks_for_one_gpu_and_is_queued_again():
    pytest.importorskip("submitit", reason="needs pip install -e '.[sweep]'")
    importlib.import_module("experiments.search")  # which registers its settings
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        settings = compose(
            "search",
            ["hydra/launcher=slurm", "hydra.launcher.partition=gpu"],
            return_hydra_config=True,
        ).hydra.launcher
    assert settings.gpus_per_task == 1 and settings.max_num_timeout > 0
    assert settings.partition == "gpu" and settings._target_.endswith("SlurmLauncher")
