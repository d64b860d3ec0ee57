"""A sweep that was killed, and had a run that failed, goes on where it stood; collect joins it."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from experiments.running.settings import CONFIGS
from tests.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
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


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


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


def _needs(module: str) -> None:
    pytest.importorskip(module, reason="needs pip install -e '.[sweep]'")


JOBLIB, SUBMITIT = "hydra_plugins.hydra_joblib_launcher", "hydra_plugins.hydra_submitit_launcher"
SMALL = (
    "model=tiny_random",
    "data=synthetic",
    "calibration.window=64",
    "calibration.batches=2",
    "evaluation.window=64",
    "evaluation.max_windows=2",
    "search=differentiable",
    "baselines=[]",
)


def _launched(launcher: str, folder: Path, *settings: str, cards: str = "") -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.search", "-m", f"hydra/launcher={launcher}"]
    return subprocess.Popen(
        [*command, *SMALL, *settings, f"hydra.sweep.dir={folder}/sweep"],
        cwd=ROOT,
        env=_environment() | {"CUDA_VISIBLE_DEVICES": cards},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _record(folder: Path, run: int) -> dict:
    return json.loads((folder / "sweep" / str(run) / "record.json").read_text())


@pytest.mark.parametrize(("launcher", "module"), [("joblib", JOBLIB), ("submitit_local", SUBMITIT)])
def test_runs_of_a_sweep_go_through_other_launchers(launcher, module, tmp_path):
    _needs(module)
    process = _launched(launcher, tmp_path, "search.steps=2", "budget.limit=4.5,5.0")
    said = process.communicate()[0]
    assert process.returncode == 0, said[-2000:]
    limits = [_record(tmp_path, n)["results"][0]["budget"]["limit"] for n in (0, 1)]
    assert limits == [4.5, 5.0]


def test_runs_at_once_take_a_gpu_each_of_those_that_are_visible(tmp_path):
    _needs(JOBLIB)
    cards = f"GPU-{os.getpid()}a", f"GPU-{os.getpid()}b"
    process = _launched(
        "gpus", tmp_path, "search.steps=2", "budget.limit=4.5,4.75,5.0", cards=",".join(cards)
    )
    said = process.communicate()[0]
    assert process.returncode == 0, said[-2000:]
    assert {_record(tmp_path, n)["actual"]["gpu"] for n in range(3)} == set(cards)
    assert "beside" not in said, "two at once, for two GPUs are visible"


def _task_of(folder: Path, deadline: float) -> int:
    """Process of the only job that submitit runs here, once its search takes steps; its folder is named by the process
    that watches over it."""
    history = folder / "sweep" / "0"
    while not list(history.rglob("history.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(history.rglob("history.jsonl")), "the search took no step"
    (job,) = (p.name for p in (folder / "sweep" / ".submitit").iterdir() if p.name.isdecimal())
    children = Path(f"/proc/{job}/task/{job}/children").read_text().split()
    return int(children[0])


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_job_that_is_preempted_is_queued_again_and_goes_on(tmp_path):
    _needs(SUBMITIT)
    settings = "search.steps=60", "search.descent.checkpoint_every=2", "budget.limit=4.5"
    process = _launched("submitit_local", tmp_path, *settings)
    os.kill(_task_of(tmp_path, time.monotonic() + 600), signal.SIGUSR2)
    said = process.communicate()[0]
    assert process.returncode == 0, said[-2000:]
    logs = "".join(p.read_text() for p in (tmp_path / "sweep" / ".submitit").rglob("*_log.*"))
    assert "Requeued job" in logs
    (history,) = (tmp_path / "sweep" / "0").rglob("history.jsonl")
    steps = [json.loads(line)["step"] for line in history.read_text().splitlines()]
    assert steps == list(range(60)) and _record(tmp_path, 0)["results"]


def test_a_job_of_slurm_asks_for_one_gpu_and_is_queued_again():
    _needs(SUBMITIT)
    importlib.import_module("experiments.search")  # which registers its settings
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        settings = compose(
            "search",
            ["hydra/launcher=slurm", "hydra.launcher.partition=gpu"],
            return_hydra_config=True,
        ).hydra.launcher
    assert settings.gpus_per_task == 1 and settings.max_num_timeout > 0
    assert settings.partition == "gpu" and settings._target_.endswith("SlurmLauncher")
