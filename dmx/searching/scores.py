"""Score files: what a scan measured, under a hash of everything that it depends on.

One file holds one score for every unit at one candidate format, so another budget, another method
or another family that needs the same numbers does not scan again. The file says what it depends
on; its name is the hash of that. An interrupted scan leaves a partial file and goes on from it. Beside the
scores stand the seconds that they took, for the time of the searches that take them over.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dmx.progress import Stopwatch
from dmx.state import Cache

SCHEMA = "dmx.scores/3"


@dataclass(frozen=True)
class Scores:
    """Of all units at one format, after some parts of a scan."""

    values: np.ndarray
    """(U,) float64 sums so far; finite."""
    done: int
    """Parts of the scan that they hold."""
    seconds: float
    """That these parts took, of the formats that were scanned together this one's share."""


@dataclass
class ScoreFile:
    """One scan's file in a folder; with `folder=None` nothing is kept."""

    folder: Path | None
    key: dict[str, Any]
    """Everything that the scores depend on; JSON."""

    @property
    def cache(self) -> Cache:
        """Of all scans."""
        return Cache(self.folder, SCHEMA, "score file", "scan again")

    @property
    def name(self) -> str:
        """Tells it from others, also where nothing is kept."""
        return json.dumps(self.key, sort_keys=True)

    def load(self) -> Scores | None:
        """What was kept; None without a file.

        Raises:
            RunError: the file is damaged; it is never taken for scores.
        """
        kept = self.cache.load(self.key)
        if kept is None:
            return None
        return Scores(np.array(kept["values"], np.float64), kept["done"], kept["seconds"])

    def save(self, scores: Scores) -> None:
        """Keep scores, in place of earlier ones."""
        kept = {"values": [float(v) for v in scores.values], "done": scores.done}
        self.cache.save(self.key, kept | {"seconds": scores.seconds})


class ScoreTimes:
    """Seconds of the scores that a search relies on, a file once; those of scores that it takes over, from another
    search or from a start of its own that was stopped, are added to its clock."""

    def __init__(self, clock: Stopwatch) -> None:
        self.clock = clock
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> float | None:
        """Of all scores; None where the search needed none."""
        return sum(self._seconds.values()) if self._seconds else None

    def take_over(self, file: ScoreFile, seconds: float) -> None:
        """Scores were kept."""
        if file.name not in self._seconds:
            self.clock.before += seconds
            self._seconds[file.name] = seconds

    def spend(self, file: ScoreFile, seconds: float) -> None:
        """Scores were measured, which took so long so far; the clock ran meanwhile."""
        self._seconds[file.name] = seconds
