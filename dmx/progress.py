"""One progress line with the time left, for loops that take longer than a moment; a stopwatch."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from dmx.processes import own_rank

LINE_EVERY = 60.0
"""Seconds between lines of a log."""


class TimeLeft(ProgressColumn):
    """At the pace so far, what follows included (`after` of `progress`)."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        pace = task.finished_speed or task.speed
        if not pace:
            return Text("-:--:--", style="progress.remaining")
        seconds = math.ceil(((task.remaining or 0.0) + task.fields["after"]) / pace)
        return Text(str(timedelta(seconds=seconds)), style="progress.remaining")


@contextmanager
def progress(
    what: str, total: int, *, done: int = 0, after: int = 0, quiet: bool = False
) -> Iterator[Callable[[str], None]]:
    """Gives `advance(note)`, which counts one of `total` and shows a note beside the bar; of processes that share
    a run the main one shows it. Where it does not go to a terminal (a log), the line is written anew at the first step
    after LINE_EVERY seconds.

    Args:
        done: of `total`, by a run that was stopped.
        after: what follows the bar, as so many more of `total`; the time left counts it.
    """
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeLeft(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(
        *columns,
        console=Console(stderr=True),
        disable=quiet or own_rank() > 0,
        speed_estimate_period=math.inf,  # steps may take longer than the 30 s that rich looks back
    ) as bar:
        task = bar.add_task(what, total=total, completed=done, note="", after=after)
        is_log = not (bar.disable or bar.console.is_terminal or bar.console.is_jupyter)
        written = time.monotonic()

        def advance(note: str = "") -> None:
            nonlocal written
            bar.update(task, advance=1, note=note)
            if is_log and not bar.finished and time.monotonic() - written >= LINE_EVERY:
                bar.console.print(bar.get_renderable())
                written = time.monotonic()

        yield advance


class Stopwatch:
    """Seconds of a job since it was made, and `before`: those spent on it earlier, by a run that was stopped or by
    another whose results it takes over."""

    def __init__(self, before: float = 0.0) -> None:
        self._start = time.perf_counter()
        self.before = before

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self._start
