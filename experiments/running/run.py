"""What every run shares: its folder, provenance, measured rows, record, report, and exit code."""

import _thread
import datetime
import fcntl
import functools
import json
import math
import os
import platform
import resource
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TextIO

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor, nn

import dmx
import mor
from dmx.applying.apply import Safety, apply, restore
from dmx.assignment.assignment import Assignment
from dmx.errors import DmxError, RunError
from dmx.evaluate.perplexity import perplexity_of, window_losses
from dmx.files import sha256, temporary_prefix, write_json, write_text
from dmx.kernels import ops
from experiments.reporting.reading import read_record
from experiments.reporting.report import write_report
from experiments.reporting.results import verdict_texts
from experiments.reporting.tables import terminal_table, zero_shot_terminal
from experiments.running.config import (
    CONFIGS,
    EvaluationConfig,
    RunConfig,
    check_overrides,
    register,
)
from experiments.running.memory import keep_freed_memory

console = Console(stderr=True)
SOURCES = tuple(Path(str(package.__file__)).parent for package in (dmx, mor))
ERROR_FILE = "error.json"
"""What a failed run leaves; a new start of the same run takes it away."""
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "numpy",
    "scipy",
    "hydra-core",
)


def entry_point(config_name: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[], None]]:
    """Decorator: a Hydra main whose users see one clear line for an error they can mend.

    Exit code 2 for such errors, 130 for Ctrl-C; in a sweep they are raised, so that the sweep
    records them and goes on.
    """
    register()

    def decorate(task: Callable[[DictConfig], Any]) -> Callable[[], None]:
        # Launchers send this closure to other processes by value, so it names nothing but
        # functions that can be sent by name.
        @functools.wraps(task)
        def guarded(cfg: DictConfig) -> Any:
            return _guard(task, config_name, cfg)

        composed: Callable[[], None] = hydra.main(
            version_base="1.3", config_path=str(CONFIGS), config_name=config_name
        )(guarded)

        def main() -> None:
            try:
                check_overrides(sys.argv[1:], config_name)
            except DmxError as error:
                _refuse(error)
            with no_lost_interrupts():
                composed()

        return main

    return decorate


def _guard(task: Callable[[DictConfig], Any], command: str, cfg: DictConfig) -> Any:
    try:
        return _stopping_at_an_interrupt(task, cfg)
    except Exception as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            folder = Path(HydraConfig.get().runtime.output_dir)
            # A config.yaml that is not this run's is another run's, and so is the folder.
            path = folder / "config.yaml"
            ours = OmegaConf.to_yaml(_with_folder(cfg, folder), resolve=True).encode()
            is_own = not path.exists() or (path.is_file() and path.read_bytes() == ours)
            if is_own and not isinstance(error, FolderTaken):
                write_error(folder, command, error)
            raise
        if not isinstance(error, DmxError):
            raise
        _refuse(error)
    except KeyboardInterrupt:
        console.print("interrupted; the same command in the same run.folder goes on from here")
        sys.exit(130)


def _stopping_at_an_interrupt(task: Callable[[DictConfig], Any], cfg: DictConfig) -> Any:
    """The task, whose Ctrl-C stays one where a library's cleaning up fails because of it."""
    try:
        return task(cfg)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise


def _with_folder(cfg: DictConfig, folder: Path) -> DictConfig:
    """The settings as the run of a sweep writes them down."""
    merged = OmegaConf.merge(cfg, {"run": {"folder": str(folder)}})
    assert isinstance(merged, DictConfig)
    return merged


@contextmanager
def no_lost_interrupts() -> Iterator[None]:
    """Raise a Ctrl-C once more that came while some object was being deleted: Python drops those."""
    usual = sys.unraisablehook
    timers: list[threading.Timer] = []

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        if lost.exc_type is KeyboardInterrupt:
            # Later, for what this hook itself raises is dropped too.
            timers.append(threading.Timer(0.05, _thread.interrupt_main))
            timers[-1].start()
        else:
            usual(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
        for timer in timers:
            timer.cancel()  # the run has ended anyway


def _refuse(error: DmxError) -> NoReturn:
    console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
    console.print(str(error), markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; where the file system has no locks, all."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class FolderTaken(RunError):
    """The run's folder holds something else; nothing may be written there."""


class Run:
    """One output folder: config.yaml first, rows as they are measured, record and report last."""

    def __init__(
        self, cfg: DictConfig, config: RunConfig, command: str,
        report: Callable[[Path], object] = write_report,
    ) -> None:  # fmt: skip
        """report: writes report.html of a folder that has its record."""
        self.report = report
        self.started = time.time()
        self.command = command
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            # The default of run.folder names a time; a sweep that is started again must find the
            # same settings in the same place.
            self.folder = Path(HydraConfig.get().runtime.output_dir)
            cfg = _with_folder(cfg, self.folder)
        else:
            self.folder = Path(config.folder)
        self.device = config.torch_device()
        if self.device.type == "cpu":
            keep_freed_memory()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.requested = OmegaConf.to_container(cfg, resolve=True)
        self._claim(OmegaConf.to_yaml(cfg, resolve=True))
        self.warnings: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.actual: dict[str, Any] = {}
        self._caught = warnings.catch_warnings()

    def _claim(self, config_yaml: str) -> None:
        """Take a new folder, one that the same settings began, or one whose run failed before it
        left anything but its error.

        Raises:
            RunError: the folder holds another run, or cannot be written.
        """
        path = self.folder / "config.yaml"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder):  # of commands that start at once one takes the folder
                self._claim_locked(path, config_yaml)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise RunError(
                f"run.folder={self.folder} cannot be read or written ({why}). Choose another folder."
            ) from error

    def _claim_locked(self, path: Path, config_yaml: str) -> None:
        held = {
            p.name for p in self.folder.iterdir()
            if not p.name.startswith(temporary_prefix(path))  # of a start that was killed
        }  # fmt: skip
        found = path.read_text() if path.exists() else None
        if held == {path.name, ERROR_FILE}:
            found, held = None, set()
        if found is None:
            if held - {ERROR_FILE}:
                raise FolderTaken(
                    f"run.folder={self.folder} is not empty and holds no run of this project. Choose "
                    "another folder."
                )
            write_text(path, config_yaml)
        elif found != config_yaml:
            raise FolderTaken(
                f"run.folder={self.folder} holds another run (its config.yaml differs). Choose "
                "another folder, or delete that one."
            )
        self.path(ERROR_FILE).unlink(missing_ok=True)

    def __enter__(self) -> "Run":
        self._caught.__enter__()
        # Python shows a warning once a process; every run of a sweep must note its own.
        warnings.filterwarnings("always", category=UserWarning, module=r"(dmx|mor)\.")
        warnings.showwarning = self._note_warning
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        self._caught.__exit__(None, None, None)
        if isinstance(error, Exception):
            write_error(self.folder, self.command, error)

    def show_if_finished(self) -> bool:
        """Whether an earlier start finished this run; its table is shown again."""
        if not self.path("record.json").exists():
            return False
        console.print(f"{self.folder} holds this run, finished; showing it again")
        record = read_record(self.folder)
        if not self.path("report.html").exists():  # stopped between the two, or deleted since
            self.report(self.folder)
        self.rows = record["results"]
        self.show(record)
        return True

    def main_result(self) -> float | None:
        """Perplexity of the last row, for sweepers that minimize; None if it is not finite."""
        value: float | None = self.rows[-1]["perplexity"]
        return value

    def _note_warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        """Keeps the warnings of this project for the record; those of libraries say nothing that
        a user could act on."""
        text = str(message)
        if (
            any(folder in Path(filename).parents for folder in SOURCES)
            and text not in self.warnings
        ):
            self.warnings.append(text)
            console.print(f"[yellow]warning[/]: {text}", highlight=False)

    def path(self, name: str) -> Path:
        return self.folder / name

    # --- rows ----------------------------------------------------------------------------------

    def row_path(self, key: str) -> Path:
        return self.path("rows") / f"{key}.json"

    def row(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row `key` of this run: read back if an earlier start measured it, else made."""
        path = self.row_path(key)
        if path.exists():
            try:
                row: dict[str, Any] = json.loads(path.read_text())
            except ValueError as error:
                raise RunError(
                    f"{path} is damaged ({error}). Delete it to measure again."
                ) from error
        else:
            row = make()
            write_json(path, row)
        self.rows.append(row)
        return row

    def measure(
        self,
        model: nn.Module,
        tokens: Tensor | None,
        config: EvaluationConfig,
        *,
        label: str,
        operands: str,
        assignment: Assignment | None,
        search: str | None = None,
        path: str | None = None,
        search_seconds: float | None = None,
        seed: int | None = None,
        safety: Safety | None = None,
    ) -> dict[str, Any]:
        """Perplexity of a model under an assignment (None: as it is), as a row of the record.

        Args:
            tokens: 1-d int64, all of which are measured; None leaves the perplexity out and makes
                the other fields of the row.
        """
        start = time.perf_counter()
        losses = torch.empty(0)
        if tokens is not None:
            if assignment is not None:
                apply(
                    model, assignment,
                    inputs=operands == "W+A", safety=safety, cache_weights=True,
                )  # fmt: skip
            try:
                losses = window_losses(
                    model, tokens, window=config.window, batch_size=config.batch_size, label=label
                )
            finally:
                if assignment is not None:
                    restore(model)
        nll = float(losses.mean())
        perplexity = perplexity_of(nll)
        finite = math.isfinite(nll)
        bits: Any = {} if assignment is None else assignment.bits
        reason = "" if finite else "not asked for" if tokens is None else "the loss is not finite"
        row: dict[str, Any] = {
            "label": label, "search": search, "assignment": path, "seed": seed,
            "operands": operands if assignment is not None else None,
            "element_bits": bits.get("element_bits", 16.0 if assignment is None else None),
            "bits_per_element": bits.get("bits_per_element", 16.0 if assignment is None else None),
            "whole_model_bits_per_element": bits.get(
                "whole_model_bits_per_element", 16.0 if assignment is None else None
            ),
            "perplexity": perplexity if math.isfinite(perplexity) else None,
            "nll": nll if finite else None,
            "tokens": len(losses) * (config.window - 1), "windows": len(losses),
            "window_nll": losses.tolist() if finite else None,
            "search_seconds": search_seconds, "eval_seconds": time.perf_counter() - start,
            "budget": None if assignment is None else assignment.budget,
            "zero_shot": None, "zero_shot_reason": "not asked for",
        }  # fmt: skip
        if row["nll"] is None:
            row["nll_reason"] = reason
        if row["perplexity"] is None:
            row["perplexity_reason"] = reason or "exp of the loss is beyond the largest float"
        if search_seconds is None:
            row["search_seconds_reason"] = "no search"
        return row

    # --- the end -------------------------------------------------------------------------------

    def finish(self, *, seed: int | None, verdict: dict[str, Any] | None) -> dict[str, Any]:
        """Write record.json and report.html, print the table; returns the record."""
        record = {
            "schema": "dmx.record/1",
            "command": self.command,
            "started": _iso(self.started),
            "finished": _iso(time.time()),
            "wall_seconds": time.time() - self.started,
            "versions": versions(),
            "device": self._device_facts(),
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "seed": seed,
            "requested": self.requested,
            "actual": self.actual | {"backend": ops.actual_backend(self.device)},
            "results": self.rows,
            "verdict": verdict,
            "warnings": self.warnings,
        } | self.facts
        write_json(self.path("record.json"), record)
        self.report(self.folder)
        self.show(record)
        return record

    def show(self, record: dict[str, Any]) -> None:
        """The table and where things are, on standard output."""
        out = Console()
        out.print(terminal_table(record))
        if (zero_shot := zero_shot_terminal(record)) is not None:
            out.print(zero_shot)
        for text in verdict_texts(record):
            out.print(text, markup=False)
        for name in ("assignment.json", "assignment.gptq.json", "record.json", "report.html"):
            if self.path(name).exists():
                out.print(f"{name:20} {self.path(name)}", soft_wrap=True, highlight=False)

    def _device_facts(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else _processor_name()
        return {"name": name, "type": self.device.type, "threads": torch.get_num_threads()}


def write_error(folder: Path, command: str, error: Exception) -> None:
    """Leave what went wrong in the folder of a run, for `compare collect=`."""
    write_json(folder / ERROR_FILE, {
        "command": command, "error": f"{type(error).__name__}: {error}",
        "time": _iso(time.time()), "traceback": traceback.format_exc(),
    })  # fmt: skip


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "dmx": dmx.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of the GPU's allocator, or of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} logical cores"


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def tokens_sha256(tokens: Tensor) -> str:
    return sha256(tokens.numpy().tobytes())
