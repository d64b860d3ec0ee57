"""Score files: what a scan measured, under a hash of everything that it depends on.

One file holds one score for every unit at one candidate format, so another budget, another method
or another family that needs the same numbers does not scan again. The file says what it depends
on; its name is the hash of that. An interrupted scan leaves a partial file and goes on from it.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dmx.errors import RunError
from dmx.files import sha256, write_json

SCHEMA = "dmx.scores/1"
_CODE = (
    "searching/heuristics.py",
    "searching/disturbances.py",
    "models",
    "searching/offsets.py",
    "numerics",
    "transforms",
    "formats.py",
)


@cache
def code_version() -> str:
    """Hash of the sources that decide a score."""
    root = Path(__file__).resolve().parent.parent
    files = [p for name in _CODE for p in sorted((root / name).rglob("*.py") or [root / name])]
    files += [root / name for name in _CODE if name.endswith(".py")]
    return sha256(b"".join(p.read_bytes() for p in files))


@dataclass
class ScoreFile:
    """One scan's file in a folder; with `folder=None` nothing is kept."""

    folder: Path | None
    key: dict[str, Any]
    """Everything that the scores depend on; JSON."""

    @property
    def path(self) -> Path | None:
        digest = sha256(json.dumps(self.key, sort_keys=True).encode())
        return None if self.folder is None else self.folder / f"{digest[:32]}.json"

    def load(self) -> tuple[np.ndarray, int] | None:
        """Sums so far (float64) and how many parts of the scan they hold; None without a file.

        Raises:
            RunError: the file is damaged; it is never taken for scores.
        """
        path = self.path
        if path is None or not path.exists():
            return None
        try:
            body = json.loads(path.read_text())
            values = np.array(body["values"], dtype=np.float64)
            done = body["done"]
            sound = (
                body["schema"] == SCHEMA
                and body["key"] == self.key
                and body["sha256"] == _checksum(body["values"], done)
                and values.ndim == 1
                and isinstance(done, int)
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"score file {path} is damaged ({error}). Delete it to scan again."
            ) from error
        if not sound:
            raise RunError(
                f"score file {path} is damaged (its checksum differs). Delete it to scan again."
            )
        return values, done

    def save(self, values: np.ndarray, done: int) -> None:
        if self.path is None:
            return
        listed = [float(v) for v in values]
        if not all(math.isfinite(v) for v in listed):
            raise RunError(
                "a score is not finite: the model gives NaN or Inf on the calibration data when "
                "one unit is quantized. Search in bfloat16 or float32, or look at the data."
            )
        write_json(self.path, {
            "schema": SCHEMA, "key": self.key, "values": listed, "done": done,
            "sha256": _checksum(listed, done),
        })  # fmt: skip


def _checksum(values: list[float], done: int) -> str:
    return sha256(json.dumps([values, done]).encode())
