"""A run: its folder, the rows that it measured, and the record and report at its end."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

import dmx
import mor
from dmx.errors import RunError
from dmx.files import read_json, write_json
from dmx.kernels import ops
from dmx.processes import Processes
from dmx.progress import Stopwatch
from dmx.weights.config import WEIGHTS
from dmx.weights.learn_config import not_better_text

from ..reporting.groups import group_rows
from ..reporting.reading import read_record
from ..reporting.record import (
    ExportFacts,
    ModelFacts,
    RecipeComparison,
    Record,
    Row,
    TextFacts,
    TrainingRow,
    Verdict,
)
from ..reporting.report import write_report
from ..reporting.stages import as_called_now
from ..reporting.tables import terminal_table
from ..reporting.verdicts import strongest_notes, verdict_texts, worse_than_uniform
from ..reporting.zero_shot_tables import zero_shot_terminal
from .cards import held_card
from .folder import CONFIG_FILE, claim, hold, release, write_error
from .guard import console, is_sweep, show_error, sweep_folder, with_folder
from .memory import keep_freed_memory
from .provenance import device_facts, peak_memory_bytes, time_text, versions
from .settings import ConfigError, RunConfig
from .watch import LostProcess, Watch

SOURCES = tuple(Path(str(package.__file__)).parent for package in (dmx, mor))
FILES = (
    *(f"assignment{stage}.json" for stage in ("", *(f".{name}" for name in WEIGHTS[1:]))),
    "record.json",
    "report.html",
)
"""Named at the end of a run, where they are there."""

_R = TypeVar("_R", Row, TrainingRow)


class Run:
    """One output folder: config.yaml first, rows as they are measured, record and report last.

    Several processes may share a run: all measure every row together, the main one alone writes and says what is there.
    """

    def __init__(
        self, cfg: DictConfig, config: RunConfig, command: str,
        report: Callable[[Path], object] = write_report,
    ) -> None:  # fmt: skip
        """report: writes report.html of a folder that has its record."""
        self.report = report
        self.started, self.clock = time.time(), Stopwatch()
        self.command = command
        self.processes = Processes(config.torch_device())
        self.shards = config.shards()
        """Whether the processes shard the weights of the model."""
        if is_sweep():
            self.alone("a sweep (-m)")
            # The default of run.folder names a time; a sweep that is started again must find the
            # same settings in the same place.
            self.folder = sweep_folder()
            cfg = with_folder(cfg, self.folder)
        else:
            self.folder = Path(config.folder)
        # The default names a second, which processes need not share.
        self.folder = self.processes.agree(lambda: self.folder)
        self.device, self.memory = self.processes.own_device, config.memory
        if self.device.type == "cpu":
            keep_freed_memory()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.requested: Any = OmegaConf.to_container(cfg, resolve=True)
        self._held: int | None = None
        self.processes.agree(lambda: self._take(OmegaConf.to_yaml(cfg, resolve=True)))
        if not self.path(CONFIG_FILE).exists():
            raise RunError(
                f"run.folder={self.folder} of rank {self.processes.rank} is not that of the main process. Choose a "
                "folder that all machines share."
            )
        self._watch = Watch(self.processes, self._say_lost)
        self.warnings: list[str] = []
        self.rows: list[Row | TrainingRow] = []
        self.model: ModelFacts | None = None
        self.data: dict[str, TextFacts] = {}
        self.export: ExportFacts | None = None
        self.comparison: list[RecipeComparison] | None = None
        self.pace: dict[str, Any] | None = None
        self.actual: dict[str, Any] = {}
        self._caught = warnings.catch_warnings()

    def _take(self, config_yaml: str) -> None:
        claim(self.folder, config_yaml)
        self._held = hold(self.folder)

    def alone(self, what: str) -> None:
        """Raise ConfigError where several processes run what one has to."""
        if self.processes.size > 1:
            raise ConfigError(
                f"{what} runs in one process, and here are {self.processes.size}. Start the command without accelerate "
                "launch or torchrun."
            )

    def unsharded(self, what: str) -> None:
        """Raise ConfigError where weights are sharded and whole ones are needed."""
        if self.shards:
            raise ConfigError(
                f"{what} needs whole weights, and those of this run are sharded over {self.processes.size} processes. Use "
                "run.shard=off, and accelerate launch without --use_fsdp."
            )

    def _say_lost(self, lost: LostProcess) -> None:
        show_error(lost)
        self._leave_error(lost)

    def _leave_error(self, error: Exception) -> None:
        if self.processes.is_main:
            write_error(self.folder, self.command, error)

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
        release(self._held)
        self._watch.leave(error)
        if isinstance(error, Exception):
            self._leave_error(error)
        elif error is None:
            self.processes.close()

    def path(self, name: str) -> Path:
        """Of a file in the run's folder."""
        return self.folder / name

    # --- rows ----------------------------------------------------------------------------------

    def row_path(self, key: str) -> Path:
        """Where a row is kept until the record has it."""
        return self.path("rows") / f"{key}.json"

    def row(self, key: str, make: Callable[[], _R], kind: type[_R] = Row) -> _R:  # type: ignore[assignment]
        """The row `key` of this run: read back if an earlier start measured it, else made, by all processes."""
        path = self.row_path(key)

        def kept() -> _R | None:
            if not path.exists():
                return None
            try:
                body = read_json(path)
            except ValueError as error:
                raise RunError(
                    f"{path} is damaged ({error}). Delete it to measure again."
                ) from error
            return as_called_now(kind.from_dict(body, str(path)))

        row = self.processes.agree(kept)
        if row is None:
            made = row = make()
            self.processes.agree(lambda: write_json(path, made.to_dict()))
        self.rows.append(row)
        return row

    @property
    def measured(self) -> list[Row]:
        """Rows of methods; all but those of training."""
        return [row for row in self.rows if isinstance(row, Row)]

    @property
    def trained(self) -> list[TrainingRow]:
        """Rows of training."""
        return [row for row in self.rows if isinstance(row, TrainingRow)]

    def main_result(self) -> float | None:
        """Perplexity of the last row, for sweepers that minimize; None if it is not finite."""
        return self.rows[-1].perplexity

    # --- the end -------------------------------------------------------------------------------

    def finish(self, *, seed: int | None, verdict: Verdict | None) -> Record:
        """Write record.json and report.html, print the table; returns the record, which only the main process writes."""
        assert self.model is not None
        for text in worse_than_uniform(self.measured):
            self.note(text)
        for row in self.measured:  # also of what an earlier start learned
            if said := not_better_text(row.weights or {}):
                self.note(said)
        if self.processes.size > 1:
            self.actual["processes"] = self.processes.size
        if (card := held_card()) is not None:
            self.actual["gpu"] = card.name
        record = Record(
            command=self.command,
            started=time_text(self.started),
            finished=time_text(),
            wall_seconds=self.clock.seconds,  # the wall clock may jump
            versions=versions(),
            device=device_facts(self.device),
            peak_memory_bytes=peak_memory_bytes(self.device),
            seed=seed,
            requested=self.requested,
            actual=self.actual | {"backend": ops.actual_backend(self.device)},
            model=self.model,
            data=self.data,
            results=tuple(self.rows),
            verdict=verdict,
            warnings=tuple(self.warnings),
            pace=self.pace,
            export=self.export,
            comparison=None if self.comparison is None else tuple(self.comparison),
        )
        if self.processes.is_main:
            record.save(self.path("record.json"))
            self.report(self.folder)
            self.show(record)
        return record

    def show_if_finished(self) -> bool:
        """Whether an earlier start finished this run; its table is shown again."""
        record = self.processes.agree(self._finished)
        if record is not None:
            self.rows = list(record.results)
        return record is not None

    def _finished(self) -> Record | None:
        """The record of a finished run, shown."""
        if not self.path("record.json").exists():
            return None
        console.print(f"{self.folder} holds this run, finished; showing it again")
        record = read_record(self.folder)
        if not self.path("report.html").exists():  # stopped between the two, or deleted since
            self.report(self.folder)
        self.show(record)
        return record

    def show(self, record: Record) -> None:
        """The table and where things are, on standard output."""
        out = Console()
        out.print(terminal_table(record))
        if (zero_shot := zero_shot_terminal(record)) is not None:
            out.print(zero_shot)
        for text in (*verdict_texts(record), *strongest_notes(group_rows(record.rows))):
            out.print(text, markup=False)
        for name in FILES:
            if self.path(name).exists():
                out.print(f"{name:24} {self.path(name)}", soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        """A line on the terminal."""
        console.print(text, highlight=False, soft_wrap=True)

    def _note_warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        """Keeps the warnings of this project for the record; those of libraries say nothing that
        a user could act on."""
        if any(folder in Path(filename).parents for folder in SOURCES):
            self.note(str(message))

    def note(self, text: str) -> None:
        """A warning for the terminal and the record, once."""
        if text not in self.warnings:
            self.warnings.append(text)
            console.print(f"[yellow]warning[/]: {text}", highlight=False)
