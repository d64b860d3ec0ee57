"""Work counted in plain steps that are timed between the stages of a run, so that swings of the machine cancel.

A *plain step* is one forward and backward pass of the unquantized model to the output of its embeddings, on one
calibration batch: eager, weights frozen, with torch's own cross entropy.
"""

import dataclasses
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmx.errors import RunError
from dmx.files import read_json, write_json
from dmx.models.plain import plain_step
from dmx.models.running import evaluating
from dmx.processes import Processes

from ..reporting.stored import Stored
from .bench import EVALUATION

REPEATS = 2
"""Plain steps of one timing, so that a part of the work has four beside it and no slow one alone decides."""
APART = 20
"""Plain steps' time that lies between two timings at least: these take a tenth of the work at most."""


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds at which the device has done what it was given."""
    if device.type != "cuda":
        return time.perf_counter

    def waited() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return waited


def plain_step_times(
    model: nn.Module, tokens: Tensor, repeats: int = REPEATS, *, warm: bool = False
) -> list[float]:
    """Seconds of `repeats` plain steps.

    Args:
        warm: the model has just run on the CPU. Otherwise a step that is not timed warms up; on a card always, where
            it costs nothing.
    """
    clock, times = clock_of(tokens.device), []
    unseen = 0 if warm and not tokens.is_cuda else 1
    with evaluating(model), torch.enable_grad():
        for index in range(unseen + repeats):
            started = clock()
            plain_step(model, tokens)
            if index >= unseen:
                times.append(clock() - started)
    return times


@dataclass(frozen=True, kw_only=True)
class Part(Stored):
    """What ran between two timings: a stage, or some that were short."""

    stages: tuple[str, ...]
    seconds: float
    before: tuple[float, ...]
    """Seconds of plain steps timed before it."""
    after: tuple[float, ...]
    """After it; none where the run was stopped before they were timed."""

    @property
    def step_seconds(self) -> float:
        """Of a plain step: the median of those timed on both sides."""
        return statistics.median(self.before + self.after)

    @property
    def steps(self) -> float:
        """Its work in plain steps."""
        return self.seconds / self.step_seconds

    def facts(self) -> dict[str, Any]:
        """For the record."""
        known = {"plain_step_seconds": self.step_seconds, "plain_steps": self.steps}
        return dataclasses.asdict(self) | known


@dataclass(frozen=True, kw_only=True)
class SavedWork(Stored):
    """What the file of a run holds, for a start that goes on."""

    parts: tuple[Part, ...]
    running: str | None
    """The stage that had begun and not ended."""
    untimed: tuple[str, ...]
    """Of what earlier starts did a part that nobody timed."""

    @classmethod
    def load(cls, path: Path, has_rows: bool) -> "SavedWork":
        """Of a file; nothing where there is none.

        Args:
            has_rows: the run has measured some.

        Raises:
            RunError: the file is damaged.
        """
        if not path.exists():
            return cls(parts=(), running=None, untimed=("its rows",) if has_rows else ())
        try:
            saved = cls.from_dict(read_json(path), str(path))
            if any(min(part.before + part.after, default=0.0) <= 0 for part in saved.parts):
                raise ValueError("a part has no plain steps")
            return saved
        except ValueError as error:
            raise RunError(
                f"{path} is damaged ({error}). Delete it: the run goes on, and its work is not counted."
            ) from error


class TimedWork:
    """The work of a run, part by part; what is done stays in a file for a start that goes on.

    Args:
        time_steps: times plain steps.
        clock: seconds at which all is done.
        before: plain steps timed just now.
        has_rows: an earlier start measured some.
    """

    def __init__(
        self,
        path: Path,
        processes: Processes,
        time_steps: Callable[[], Sequence[float]],
        clock: Callable[[], float],
        *,
        before: Sequence[float],
        has_rows: bool,
    ) -> None:
        self.path, self.processes = path, processes
        self.time_steps, self.clock = time_steps, clock
        saved = processes.agree(partial(SavedWork.load, path, has_rows))
        self.parts = list(saved.parts)
        self.untimed = list(saved.untimed)
        # An evaluation begins anew, so nothing of it is lost; the others go on from where they were.
        if saved.running is not None and not saved.running.startswith(EVALUATION):
            self.untimed += [] if saved.running in self.untimed else [saved.running]
        self._before, self._stages = tuple(before), list[str]()
        self._since = clock()

    @property
    def steps(self) -> float:
        """What was timed, in plain steps."""
        return sum(part.steps for part in self.parts)

    @property
    def seconds(self) -> float:
        """What was timed."""
        return sum(part.seconds for part in self.parts)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Around a stage. What it gave is saved before plain steps are timed, which the next one does first."""
        self._count(at_least=APART)
        self._keep(name)
        yield
        self._stages.append(name)
        self._keep(None)

    def end(self) -> None:
        """Count what is not counted yet."""
        self._count(at_least=0)
        self._keep(None)

    def _open(self) -> Part | None:
        """What ran since the last timing, if anything did."""
        if not self._stages:
            return None
        seconds, stages = self.clock() - self._since, tuple(self._stages)
        return Part(stages=stages, seconds=seconds, before=self._before, after=())

    def _count(self, *, at_least: float) -> None:
        """Time plain steps where so many have had the time to run since they were last."""
        part = self._open()
        # Of several processes one decides, since they run these steps together.
        if part is not None and self.processes.agree(partial(operator.ge, part.steps, at_least)):
            after = tuple(self.time_steps())
            self.parts.append(dataclasses.replace(part, after=after))
            self._before, self._stages, self._since = after, [], self.clock()

    def _keep(self, running: str | None) -> None:
        part = self._open()
        parts = (*self.parts, *(() if part is None else (part,)))
        saved = SavedWork(parts=parts, running=running, untimed=tuple(self.untimed))
        self.processes.agree(lambda: write_json(self.path, saved.to_dict()))
