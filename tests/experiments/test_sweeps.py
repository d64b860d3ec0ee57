"""A sweep that was killed, and had a run that failed, goes on where it stood; collect joins it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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

    joined = Forked(
        "-m", "experiments.compare", f"collect={tmp_path}/sweep", f"run.folder={tmp_path}/joined"
    )
    assert joined.wait() == 0, joined.outputs()[1]
    record = json.loads((tmp_path / "joined" / "record.json").read_text())
    assert len(record["results"]) == len(NAMES)
    assert record["actual"]["collected"] == len(NAMES)
    for row in record["results"]:
        assert (tmp_path / "joined" / row["assignment"]).exists()
    assert (tmp_path / "joined" / "report.html").exists()
    assert len((tmp_path / "joined" / "results.csv").read_text().splitlines()) == len(NAMES) + 1


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_runs_of_a_sweep_go_through_other_launchers(launcher, tmp_path):
    pytest.importorskip(
        {"joblib": "hydra_plugins.hydra_joblib_launcher", "submitit_local": "submitit"}[launcher],
        reason="needs pip install -e '.[sweep]'",
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.search",
            "-m",
            f"hydra/launcher={launcher}",
            "model=tiny_random",
            "data=synthetic",
            "calibration.window=64",
            "calibration.batches=2",
            "evaluation.window=64",
            "evaluation.max_windows=2",
            "search.steps=2",
            "baselines=[]",
            "budget.limit=4.5,5.0",
            f"hydra.sweep.dir={tmp_path}/sweep",
        ],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    limits = [
        json.loads((tmp_path / "sweep" / n / "record.json").read_text())["results"][0]["budget"][
            "limit"
        ]
        for n in ("0", "1")
    ]
    assert limits == [4.5, 5.0]
