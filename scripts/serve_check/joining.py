"""Rows that join a record of the same check: one engine on one machine, the same models, tokens and tolerance.

What must agree is all that a record says beside its rows, known before the engine, which takes minutes, has run. A folder of
the same name, however it is written, replaces its row. Several processes may add to one record.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dmx.errors import RunError
from dmx.files import read_json, sha256, write_json
from scripts.claiming import claimed

Record = Mapping[str, Any]
EMBEDDINGS = 256
"""Rows that tell weights apart."""


def model_of(folder: Path) -> dict[str, Any]:
    """What tells models apart, however their linear layers are stored: of config.json, and a hash of the first embeddings,
    which nothing quantizes."""
    config = read_json(folder / "config.json")
    names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    facts = {name: config.get(name) for name in (*names, "tie_word_embeddings")}
    return facts | {"embeddings_sha256": _embeddings_sha256(folder)}


def _embeddings_sha256(folder: Path) -> str | None:
    """None where no file in safetensors has any."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names: list[str] = list(file.keys())
            for name in names:
                if "embed" in name and name.endswith(".weight"):
                    rows = file.get_slice(name)[:EMBEDDINGS].to(torch.bfloat16)
                    return sha256(rows.contiguous().view(torch.uint8).numpy().tobytes())
    return None


def models_of(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Each once."""
    found: list[dict[str, Any]] = []
    for folder in folders:
        if (model := model_of(folder)) not in found:
            found.append(model)
    return found


def stored(path: Path, head: Record, versions: Mapping[str, str]) -> dict[str, Any]:
    """The record of a file that rows may join.

    Args:
        head: of the record of the run whose rows they are. versions: of the engine that makes them.

    Raises:
        RunError: there is none, or it is of another check.
    """
    try:
        record: dict[str, Any] = read_json(path)
        rows = {str(Path(row["folder"])) for row in record["rows"]}
        ran = [dict(row.get("versions", versions)) for row in record["rows"]]
        models, _ = list(record["models"]), record["note"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"--add: {path} is no record of this check ({type(error).__name__}: {error}). Leave --add out: "
            "then it is written anew."
        ) from error
    way_out = f"Name another --json, or leave --add out: its {len(rows)} rows are then gone."
    for key, value in head.items():
        if key not in ("note", "models") and record.get(key) != value:
            raise RunError(
                f"--add: {path} has {key} = {record.get(key)!r}, this run {value!r}; rows of one record are of one "
                f"check. {way_out}"
            )
    for row, engine in zip(record["rows"], ran, strict=True):
        if engine != versions:
            raise RunError(
                f"--add: {path} has {row['folder']} of {_named(engine)}, this run's engine is {_named(versions)}; rows of one "
                f"record are of one engine. {way_out}"
            )
    if any(model not in models for model in head["models"]):
        raise RunError(f"--add: {path} has no row of the model of one of the folders. {way_out}")
    return record


def _named(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def joined(record: Record, more: Record) -> dict[str, Any]:
    """The record with the rows of another, in their order; the other's note where it has one."""
    rows = {Path(row["folder"]).resolve(): row for row in (*record["rows"], *more["rows"])}
    return {**record, "note": more["note"] or record["note"], "rows": list(rows.values())}


def join(path: Path, record: Record, versions: Mapping[str, str]) -> None:
    """Write the record with the rows that its file has by then: others may add to it meanwhile. Raises as `stored`."""
    head = {key: value for key, value in record.items() if key != "rows"}
    with claimed(path.with_name(f".{path.name}.lock"), wait=True):
        write_json(path, joined(stored(path, head, versions), record))
