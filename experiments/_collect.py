"""Joins the records of finished runs below a folder into one record, failed runs named beside."""

import json
import shutil
from pathlib import Path
from typing import Any

from dmx.errors import RunError
from experiments._report import read_record
from experiments._run import ERROR_FILE, Run

TRACE_FILES = ("history.jsonl", "offsets.npz")


def collect_runs(source: Path, run: Run) -> None:
    """Fills the run's rows from every record below `source`; copies their assignments and histories.

    Rows that several runs measured alike (bf16, uniform formats) are kept once.

    Raises:
        RunError: no record below the folder, or records of different models or evaluation texts.
    """
    folders = sorted({p.parent for name in ("record.json", ERROR_FILE) for p in source.rglob(name)})
    records = {f: read_record(f) for f in folders if (f / "record.json").exists()}
    if not records:
        raise RunError(
            f"collect={source} holds no finished run (record.json). Name a sweep's folder."
        )
    first = next(iter(records.values()))
    seen: set[str] = set()
    for folder, record in records.items():
        _check_comparable(folder, record, first)
        name = str(folder.relative_to(source)).replace("/", "-") if folder != source else "run"
        for row in record["results"]:
            key = json.dumps(
                [row["label"], row.get("operands"), row["budget"], row.get("seed"), row["nll"]]
            )
            if row["search"] in (None, "uniform") and key in seen:
                continue
            seen.add(key)
            run.rows.append(_adopted(row, folder, run.folder, name))
    for folder in folders:
        if folder not in records:
            error = json.loads((folder / ERROR_FILE).read_text())
            run.warnings.append(f"run {folder.name} failed: {error['error']}")
    run.facts = {key: first[key] for key in ("model", "data", "seed") if key in first}
    run.actual |= {"collected": len(records), "failed": len(folders) - len(records)}


def _check_comparable(folder: Path, record: dict[str, Any], first: dict[str, Any]) -> None:
    for what, value in (
        ("model", lambda r: (r["model"]["id"], r["model"]["architecture_sha256"])),
        (
            "evaluation text",
            lambda r: (r["data"]["evaluation"]["sha256"], r["data"]["evaluation"]["window"]),
        ),
    ):
        if value(record) != value(first):
            raise RunError(
                f"{folder} used another {what} than the first run: {value(record)} and "
                f"{value(first)}. Rows of different {what}s cannot stand in one table; collect them apart."
            )


def _adopted(row: dict[str, Any], folder: Path, target: Path, name: str) -> dict[str, Any]:
    """The row with its files copied below `target`."""
    if row["assignment"] is None:
        return row
    source = folder / row["assignment"]
    copy = target / name / row["assignment"]
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, copy)
    for trace in TRACE_FILES:
        if row["search"] == "differentiable" and (source.parent / trace).exists():
            shutil.copyfile(source.parent / trace, copy.parent / trace)
    return row | {"assignment": f"{name}/{row['assignment']}"}
