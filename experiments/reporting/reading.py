"""Files of a run folder as a report needs them: record, history, offsets, assignments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dmx.errors import RunError

from .groups import Group
from .record import Limit, Record, Row
from .stages import as_called_now
from .stored import read_json

HISTORY_COLUMNS = (
    "step", "temperature", "loss", "soft_bits", "hard_bits", "projected_bits",
    "soft_loss", "hard_loss", "projected_loss",
)  # fmt: skip
Assignments = Mapping[str, Mapping[str, Any]]
"""Path in the run's folder -> the assignment's file."""


@dataclass(frozen=True)
class SearchTrace:
    """What one gradient search left beside its assignment."""

    title: str
    history: dict[str, np.ndarray] | None
    """Each column (steps,) float64, NaN where the row holds null."""
    raw: np.ndarray | None
    """(steps + 1, units) float32."""
    units: list[str]
    assignment: Mapping[str, Any] | None
    budget: Limit | None


def read_record(folder: Path) -> Record:
    """`record.json` of a run folder, its rows called as new ones would be.

    Raises:
        RunError: there is none, or it is none of this version.
    """
    record = Record.load(folder / "record.json")
    return replace(record, results=tuple(map(as_called_now, record.results)))


def read_history(path: Path) -> dict[str, np.ndarray] | None:
    """Columns of `history.jsonl` by step; None when there is no such file or it is empty.

    A step that occurs twice (a run that went on from a checkpoint) counts as written last.
    """
    if not path.exists():
        return None
    rows: dict[int, Mapping[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path}, line {number}: not a history row ({error!r}). "
                "Resume the run, or delete the line."
            ) from error
    ordered = [rows[step] for step in sorted(rows)]
    if not ordered:
        return None
    return {
        key: np.array([np.nan if (v := row.get(key)) is None else v for row in ordered], np.float64)
        for key in HISTORY_COLUMNS
    }


def read_assignments(folder: Path, rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """The assignments that rows name, by path.

    Raises:
        RunError: one is missing, or is none.
    """
    assignments: dict[str, dict[str, Any]] = {}
    for row in rows:
        path = row.assignment
        if path is not None and path not in assignments:
            way_out = f"result {row.label!r} in record.json names it; put it back or run again"
            assignments[path] = read_json(folder / path, way_out)
            if not isinstance(assignments[path].get("formats"), dict):
                raise RunError(f"{folder / path} holds no 'formats': not an assignment; run again.")
    return assignments


def read_traces(
    folder: Path, groups: Sequence[Group], assignments: Assignments
) -> list[SearchTrace]:
    """Traces beside every assignment that the gradient search chose; the folder's own also without
    an assignment."""
    sources: dict[Path, tuple[str, Any, Limit | None]] = {}
    for group in groups:
        for row in group.rows:
            if group.method.is_dmx and row.assignment:
                seed = f", seed {row.seed}" if row.seed is not None else ""
                home = (folder / row.assignment).parent
                trace = (group.title + seed, assignments[row.assignment], group.budget)
                sources.setdefault(home, trace)  # of several rows of one search the first names it
    sources.setdefault(folder, ("search", None, None))
    traces = []
    for home, (title, assignment, budget) in sources.items():
        history = read_history(home / "history.jsonl")
        raw, units = None, []
        if (home / "offsets.npz").exists():
            with np.load(home / "offsets.npz", allow_pickle=False) as arrays:
                raw, units = arrays["raw"], [str(name) for name in arrays["units"]]
        if history is not None or raw is not None:
            traces.append(SearchTrace(title, history, raw, units, assignment, budget))
    return traces
