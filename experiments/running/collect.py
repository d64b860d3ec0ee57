"""Joins the records of finished runs below a folder into one record, failed runs named beside."""

import json
import shutil
from pathlib import Path
from typing import Any

from dmx.errors import RunError
from experiments.reporting.reading import read_record
from experiments.running.config import POLISH
from experiments.running.run import ERROR_FILE, Run

TRACE_FILES = ("history.jsonl", "offsets.npz", "polish.jsonl")


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
    check_comparable(records)
    first = next(iter(records.values()))
    seen: set[str] = set()
    for folder, record in records.items():
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


def _model(record: dict[str, Any]) -> tuple[str, str]:
    return record["model"]["id"], record["model"]["architecture_sha256"]


def _evaluation(record: dict[str, Any]) -> tuple[str, int] | None:
    """Hash and window of the evaluation text; None where no perplexity was measured."""
    found = record["data"].get("evaluation")
    return None if found is None else (found["sha256"], found["window"])


def check_comparable(records: dict[Path, dict[str, Any]]) -> None:
    """Raise RunError unless all records are of one model, and those with a perplexity of one text.

    Args:
        records: run folder -> its record.
    """
    for what, value in (("model", _model), ("evaluation text", _evaluation)):
        values = {folder: found for folder, r in records.items() if (found := value(r)) is not None}
        for folder, found in values.items():
            if found != (first := next(iter(values.values()))):
                raise RunError(
                    f"{folder} used another {what} than the first run: {found} and {first}. Rows of "
                    f"different {what}s cannot stand in one table; collect them apart."
                )


def _adopted(row: dict[str, Any], folder: Path, target: Path, name: str) -> dict[str, Any]:
    """The row with its files copied below `target`."""
    if row["assignment"] is None:
        return row
    source = folder / row["assignment"]
    copy = target / name / row["assignment"]
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, copy)
    kind = row["search"] or ""
    for trace in TRACE_FILES if kind == "differentiable" or kind.endswith(POLISH) else ():
        if (source.parent / trace).exists():
            shutil.copyfile(source.parent / trace, copy.parent / trace)
    return row | {"assignment": f"{name}/{row['assignment']}"}
