"""One progress line with the time left, for loops that take longer than a moment; a stopwatch."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dmx.processes import own_rank


@contextmanager
def progress(
    what: str, total: int, *, done: int = 0, quiet: bool = False
) -> Iterator[Callable[[str], None]]:
    """Gives `advance(note)`, which counts one of `total` and shows a note beside the bar; of processes that share
    a run the main one shows it."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(
        *columns, console=Console(stderr=True), disable=quiet or own_rank() > 0, transient=False
    ) as bar:
        task = bar.add_task(what, total=total, completed=done, note="")

        def advance(note: str = "") -> None:
            bar.update(task, advance=1, note=note)

        yield advance


class Stopwatch:
    """Seconds of a job since it was made, and `before`: those that a stopped run had spent on it."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.before = 0.0

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self._start
