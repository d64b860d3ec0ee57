"""Score files: what a scan measured, under a hash of everything that it depends on.

One file holds one score for every unit at one candidate format, so another budget, another method
or another family that needs the same numbers does not scan again. The file says what it depends
on; its name is the hash of that. An interrupted scan leaves a partial file and goes on from it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dmx.state import Cache

SCHEMA = "dmx.scores/2"


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

    def load(self) -> tuple[np.ndarray, int] | None:
        """Sums so far (float64) and how many parts of the scan they hold; None without a file.

        Raises:
            RunError: the file is damaged; it is never taken for scores.
        """
        kept = self.cache.load(self.key)
        return None if kept is None else (np.array(kept["values"], np.float64), kept["done"])

    def save(self, values: np.ndarray, done: int) -> None:
        """Keep the sums, which are finite, of the first `done` parts."""
        self.cache.save(self.key, {"values": [float(v) for v in values], "done": done})
