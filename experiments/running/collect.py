"""Joins the records of finished runs below a folder into one record, failed runs named beside."""

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from dmx.errors import RunError

from ..reporting.record import Record, Row
from ..reporting.stages import usual_drawn, with_stage
from .folder import ERROR_FILE
from .run import Run

_NUMBERS_FROM = ("torch", "transformers", "dmx")
_TRACE_FILES = ("history.jsonl", "offsets.npz", "polish.jsonl")


def collect_runs(source: Path, run: Run) -> None:
    """Fills the run's rows from every record below `source`; copies their assignments and histories.

    Rows that several runs measured alike (bf16, uniform formats) are kept once.

    Raises:
        RunError: no record below the folder, or records of different models or evaluation texts.
    """
    run.alone(f"collect={source}")
    folders = sorted({p.parent for name in ("record.json", ERROR_FILE) for p in source.rglob(name)})
    paths = {folder: folder / "record.json" for folder in folders}
    records = {f: Record.load(path) for f, path in paths.items() if path.exists()}
    if not records:
        raise RunError(
            f"collect={source} holds no finished run (record.json). Name a sweep's folder."
        )
    check_comparable(records)
    first, usual = next(iter(records.values())), usual_drawn(records.values())
    seen: set[tuple[object, ...]] = set()
    for folder, record in records.items():
        name = str(folder.relative_to(source)).replace("/", "-") if folder != source else "run"
        for row in record.rows:
            key = row.method, row.budget, row.seed, row.nll
            if not row.method.is_searched and key in seen:
                continue
            seen.add(key)
            told = with_stage(row, record, usual)
            run.rows.append(_adopted(told, folder, run.folder, name))
    for folder in folders:
        if folder not in records:
            error = json.loads((folder / ERROR_FILE).read_text())
            run.warnings.append(f"run {folder.name} failed: {error['error']}")
    run.warnings += machines_differ(records)
    run.model, run.data = first.model, dict(first.data)
    run.actual |= {"collected": len(records), "failed": len(folders) - len(records)}
    run.actual["machines"] = machines_of(records)


def machines_of(records: Mapping[Path, Record]) -> dict[str, int]:
    """Device and versions that numbers depend on -> how many runs ran there."""
    return dict(Counter(_machine(record) for record in records.values()))


def _machine(record: Record) -> str:
    versions = ", ".join(f"{name} {record.versions.get(name)}" for name in _NUMBERS_FROM)
    return f"{record.device.name} ({versions})"


def machines_differ(records: Mapping[Path, Record]) -> list[str]:
    """A warning where not all runs ran on one kind of machine."""
    machines = machines_of(records)
    if len(machines) < 2:
        return []
    said = "; ".join(f"{count} on {machine}" for machine, count in machines.items())
    return [
        f"the runs are of {len(machines)} kinds of machines: {said}. Seconds and memory of their rows do not compare, and "
        "perplexities differ by what kernels and versions do."
    ]


def _model(record: Record) -> tuple[str, str]:
    return record.model.id, record.model.architecture_sha256


def _evaluation(record: Record) -> tuple[str, int | None] | None:
    """Hash and window of the evaluation text; None where no perplexity was measured."""
    text = record.data.get("evaluation")
    return None if text is None else (text.sha256, text.window)


def check_comparable(records: Mapping[Path, Record]) -> None:
    """Raise RunError unless all records are of one model, and those with a perplexity of one text.

    Args:
        records: run folder -> its record.
    """
    for what, value in (("model", _model), ("evaluation text", _evaluation)):
        values = {folder: had for folder, r in records.items() if (had := value(r)) is not None}
        for folder, had in values.items():
            if had != (first := next(iter(values.values()))):
                raise RunError(
                    f"{folder} used another {what} than the first run: {had} and {first}. Rows of "
                    f"different {what}s cannot stand in one table; collect them apart."
                )


def _adopted(row: Row, folder: Path, target: Path, name: str) -> Row:
    """The row with its files copied below `target`."""
    if row.assignment is None:
        return row
    source = folder / row.assignment
    copy = target / name / row.assignment
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, copy)
    for trace in _TRACE_FILES if row.method.is_dmx or row.method.polish else ():
        if (source.parent / trace).exists():
            shutil.copyfile(source.parent / trace, copy.parent / trace)
    return dataclasses.replace(row, assignment=f"{name}/{row.assignment}")
