"""Files of a run folder as a report needs them: record, history, offsets, assignments."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dmx.errors import RunError
from experiments.reporting.results import Group

Record = Mapping[str, Any]

_HISTORY_KEYS = (
    "step", "temperature", "loss", "soft_bits", "hard_bits", "projected_bits",
    "soft_loss", "hard_loss", "projected_loss",
)  # fmt: skip


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
    budget: tuple[float, str] | None


def read_record(folder: Path) -> dict[str, Any]:
    """`record.json` of a run folder.

    Raises:
        RunError: there is none, it is not JSON, or it has another schema.
    """
    record = _read_json(folder / "record.json", "a finished run leaves one; finish the run first")
    if record.get("schema") != "dmx.record/1":
        raise RunError(
            f"{folder / 'record.json'}: schema is {record.get('schema')!r}, this version reads "
            "'dmx.record/1'. Write the report with the version that made the run."
        )
    return record


def _read_json(path: Path, way_out: str) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: {way_out}.") from None
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is not a JSON object ({error}): {way_out}.") from error


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
        key: np.array(
            [np.nan if row.get(key) is None else row[key] for row in ordered], dtype=np.float64
        )
        for key in _HISTORY_KEYS
    }


def read_assignments(
    folder: Path, results: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    found = {}
    for row in results:
        path = row.get("assignment")
        if path is not None and path not in found:
            found[path] = _read_json(
                folder / path,
                f"result {row['label']!r} in record.json names it; put it back or run again",
            )
            if not isinstance(found[path].get("formats"), dict):
                raise RunError(f"{folder / path} holds no 'formats': not an assignment; run again.")
    return found


def read_traces(
    folder: Path, groups: Sequence[Group], assignments: Mapping[str, Mapping[str, Any]]
) -> list[SearchTrace]:
    """Traces beside every gradient-searched assignment; the folder's own also without an
    assignment."""
    sources: dict[Path, tuple[str, Any, tuple[float, str] | None]] = {}
    for group in groups:
        for row in group.rows:
            if group.search == "differentiable" and row.get("assignment"):
                seed = f", seed {row['seed']}" if row.get("seed") is not None else ""
                home = (folder / row["assignment"]).parent
                sources[home] = (group.title + seed, assignments[row["assignment"]], group.budget)
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
