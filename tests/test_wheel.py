"""The wheel, installed where nothing of this clone is in reach, gives the command `dmx`."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
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
    "search.steps=2",
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


def _run(
    command: list[str], folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COMP_"))}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
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
    done = installed("search", *TINY, "baselines=[bf16,kl]", "run.folder=out")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "report.html").exists()
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert len(record["results"]) == 3 and record["results"][-1]["perplexity"] > 1
    assignment = dmx.Assignment.load(tmp_path / "out" / "assignment.json")
    assert assignment.bits["element_bits"] <= 5.0


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_other_processes_run_a_sweep_of_the_wheel(installed, tmp_path, launcher):
    plugin = {"joblib": "hydra_plugins.hydra_joblib_launcher", "submitit_local": "submitit"}
    pytest.importorskip(plugin[launcher], reason="needs pip install -e '.[sweep]'")
    done = installed(
        "search",
        "-m",
        *TINY,
        f"hydra/launcher={launcher}",
        "budget.limit=4.5,5.0",
        "baselines=[]",
        "hydra.sweep.dir=sweep",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert {p.parent.name for p in tmp_path.glob("sweep/*/record.json")} == {"0", "1"}


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
