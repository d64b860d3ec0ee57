"""The wheel, installed where nothing of this clone is in reach, gives the command `dmx`."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import dmx
from dmx.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parent.parent
TINY = (
    "model=tiny_random",
    "data=synthetic",
    "calibration.window=64",
    "calibration.batch_size=1",
    "calibration.batches=2",
    "evaluation.window=64",
    "evaluation.max_windows=2",
)
Dmx = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what a clone holds, not from what this one has lying about."""
    pytest.importorskip("hatchling", reason="needs pip install -e '.[test]'")
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("dmx", "mor", "experiments", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "scripts/wheel_layout.py"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    _checked(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--wheel-dir",
            str(made),
            str(source),
        ]
    )
    return next(made.glob("dmx-*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel alone. Dependencies are those of this environment: a .pth
    adds their folder, whose own .pth files, with that of an editable dmx, then stay unread."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    (site,) = folder.glob("lib/python*/site-packages")
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(dependencies)))
    assert site == Path(sysconfig.get_path("purelib", vars=paths))
    _checked(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(folder / "bin" / "python"),
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-index",
            "--force-reinstall",
            str(wheel),
        ]
    )
    return folder


@pytest.fixture
def installed(environment: Path, tmp_path: Path) -> Dmx:
    """installed("search", "budget.limit=5", COMP_LINE="...") runs the command in an empty folder."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return _run([str(environment / "bin" / "dmx"), *arguments], tmp_path, **variables)

    return run


def _environment(**variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COMP_"))}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables


def _run(
    command: list[str], folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = _environment(**variables)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def _checked(command: list[str], folder: Path | None = None) -> str:
    done = _run(command, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_everything_lies_in_two_packages_and_nothing_is_left_out(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {n.split("/")[0] for n in held} == {"dmx", "mor", f"dmx-{dmx.__version__}.dist-info"}
    tracked = _checked(["git", "ls-files", "dmx", "mor", "experiments", "configs"], ROOT).split()
    moved = {f"dmx/{n}" if n.startswith(("experiments", "configs")) else n for n in tracked}
    assert {n for n in moved if not n.endswith(".gitignore")} <= held


def test_the_wheel_is_found_alone(environment, tmp_path):
    code = (
        "import dmx, importlib.util as u; "
        "print(dmx.__file__, u.find_spec('dmx.experiments').origin, u.find_spec('mor').origin, "
        "*map(u.find_spec, ('experiments', 'configs', 'tests', 'scripts')), sep='\\n')"
    )
    found = _checked([str(environment / "bin" / "python"), "-I", "-c", code], tmp_path).split("\n")
    assert all(path.startswith(f"{environment}/") for path in found[:3])
    assert found[3:7] == ["None"] * 4


@pytest.mark.slow
def test_a_search_runs_from_the_wheel(installed, tmp_path):
    done = installed("search", *TINY, "search.steps=2", "baselines=[bf16,kl]", "run.folder=out")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "report.html").exists()
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert len(record["results"]) == 3 and record["results"][-1]["perplexity"] > 1
    assignment = dmx.Assignment.load(tmp_path / "out" / "assignment.json")
    assert assignment.bits["element_bits"] <= 5.0


SWEEP = ("search", "-m", *TINY, "baselines=[]", "hydra.sweep.dir=sweep")


def _limits(folder: Path) -> list[float]:
    """Of the runs of a sweep."""
    paths = sorted((folder / "sweep").glob("*/record.json"))
    return [json.loads(p.read_text())["results"][0]["budget"]["limit"] for p in paths]


def test_runs_at_once_take_a_gpu_each_of_those_that_are_visible(installed, tmp_path):
    pytest.importorskip(
        "hydra_plugins.hydra_joblib_launcher", reason="needs pip install -e '.[sweep]'"
    )
    cards = f"GPU-{os.getpid()}a", f"GPU-{os.getpid()}b"
    runs = "hydra/launcher=gpus", "search=random", "budget.limit=4.5,4.75,5.0"
    done = installed(*SWEEP, *runs, CUDA_VISIBLE_DEVICES=",".join(cards))
    assert done.returncode == 0, done.stderr[-3000:]
    assert _limits(tmp_path) == [4.5, 4.75, 5.0]
    records = (json.loads(p.read_text()) for p in tmp_path.glob("sweep/*/record.json"))
    assert {record["actual"]["gpu"] for record in records} == set(cards)
    assert "beside" not in done.stdout + done.stderr, "two at once, for two GPUs are visible"


def _task_of(sweep: Path, deadline: float) -> int:
    """Process of a job that submitit runs here, once its search takes steps. Jobs are named by the processes that watch
    over them, whose children hold the folders of runs."""
    while time.monotonic() < deadline:
        running = {p.parent.resolve() for p in sweep.glob("*/history.jsonl")}
        for job in (sweep / ".submitit").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # a process that has ended meanwhile
                children = Path(f"/proc/{job.name}/task/{job.name}/children").read_text().split()
                for child in children:
                    opened = {p.resolve().parent for p in Path(f"/proc/{child}/fd").iterdir()}
                    if opened & running:
                        return int(child)
        time.sleep(0.02)
    raise AssertionError("no search took a step")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_job_that_is_preempted_is_queued_again_and_goes_on(environment, tmp_path):
    pytest.importorskip("submitit", reason="needs pip install -e '.[sweep]'")
    steps = "search=differentiable", "search.steps=60", "search.descent.checkpoint_every=2"
    runs = "hydra/launcher=submitit_local", *steps, "budget.limit=4.5,5.0"
    process = subprocess.Popen(
        [str(environment / "bin" / "dmx"), *SWEEP, *runs],
        cwd=tmp_path,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        os.kill(_task_of(tmp_path / "sweep", time.monotonic() + 600), signal.SIGUSR2)
        said = process.communicate()[0]
    assert process.returncode == 0, said[-3000:]
    logs = [p.read_text() for p in (tmp_path / "sweep" / ".submitit").rglob("*_log.*")]
    assert sum("Requeued job" in log for log in logs) == 1
    assert _limits(tmp_path) == [4.5, 5.0]
    for run in ("0", "1"):
        history = (tmp_path / "sweep" / run / "history.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in history] == list(range(60))


def test_a_shell_completes_commands_and_settings(environment):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    # What bash does at a tab, with the words of the line in these variables.
    script = """
        eval "$(dmx -sc install=bash)"
        complete -p dmx
        tab() {
            COMP_LINE=$1; COMP_POINT=${#COMP_LINE}; COMP_CWORD=$2
            hydra_bash_completion; echo "${COMPREPLY[@]}"
        }
        tab 'dmx ' 1; tab 'dmx e' 1; tab 'dmx search budget=bits_4p5 model=tiny' 3
    """
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = _run([bash, "-c", script], environment, PATH=path)
    registered, *candidates = (set(line.split()) for line in done.stdout.splitlines())
    assert {"hydra_bash_completion", "dmx"} <= registered, done.stdout + done.stderr
    tiny = {f"model=tiny_{name}" for name in ("llama", "qwen3", "qwen3_moe", "random", "smollm2")}
    assert candidates == [set(COMMANDS), {"evaluate", "export"}, tiny], done.stderr


# --- the command itself, in this process ----------------------------------------------------------


def test_help_lists_the_commands_and_imports_nothing_heavy():
    code = "import sys; from dmx.__main__ import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    done = _run([sys.executable, "-c", code], ROOT)
    usage, _, modules = done.stdout.rstrip().rpartition("\n")
    assert all(f"  {name} " in usage for name in COMMANDS) and done.returncode == 0
    assert set(modules.split()).isdisjoint(
        {"torch", "transformers", "hydra", "numpy", "matplotlib"}
    )


def test_versions_unknown_commands_and_none_at_all(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"dmx {dmx.__version__}\n"
    with pytest.raises(SystemExit, match="2"):
        main(["serach", "budget.limit=5"])
    error = capsys.readouterr().err
    assert "command='serach' is not allowed. Did you mean 'search'?" in error
    assert all(name in error for name in COMMANDS)
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "usage: dmx COMMAND" in capsys.readouterr().out


def test_every_entry_point_has_a_command():
    named = {name.replace("-", "_") for name in COMMANDS}
    assert named == {p.stem for p in (ROOT / "experiments").glob("[a-z]*.py")}
    assert named == {p.stem for p in (ROOT / "configs").glob("*.yaml")}
