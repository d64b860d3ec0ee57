"""The record of a run, as docs/results/records keeps it: without private paths, long arrays packed, under a name.

    python -m scripts.publish_record outputs/compare/NAME quality_test_x_0     # a run's folder, or its record.json
    python -m scripts.publish_record outputs/own quality_test_own_0 \\
        --model "Llama, 48.8 M parameters, trained here" --note "two passes over data/pretrain, seed 0"
    python -m scripts.publish_record outputs/cut quality_test_x_1 --like outputs/whole   # a run that was cut off

Then `python scripts/make_tables.py` makes the pages. A folder of rows without record.json is a run that was cut off: its rows
become a record of the settings in its config.yaml, and say so in `warnings`. What only a finished run states (versions, device,
facts of model and texts) is taken from --like, a finished run on the same machine, whose settings of model and texts must be the same.
Paths of data folders become data/..., run.folder becomes outputs/<command>.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from dmx.errors import DmxError, RunError
from dmx.files import write_text
from experiments.reporting.packed import packed
from experiments.reporting.record import SCHEMA, Record
from experiments.reporting.stored import flatten, read_json
from experiments.running.folder import CONFIG_FILE
from experiments.running.provenance import time_text

RECORDS = Path(__file__).resolve().parent.parent / "docs" / "results" / "records"
LARGEST = 100_000
"""Bytes of a record in the repository."""
CUT = "The run was cut off: rows that it had written, in one record."
FROM_LIKE = ("model", "data", "calibration", "evaluation", "training")
"""Settings of which a finished run states facts."""
ACTUAL = ("run", "model", "backend", "gpu", "processes")
"""Of what ran, what the machine and those settings decide."""
DATA = re.compile(r"^/.*/data/")
PRIVATE = re.compile(r"(?:^|[^\w./~*)\]}>-])/[\w.-]+/|^/")
"""How a path of a machine begins; no URL, no `a/b` and no `<a folder>/b`."""


# --- what a run left -------------------------------------------------------------------------------


def read_run(source: Path, like: Path | None = None) -> dict[str, Any]:
    """Body of a run's record: of a file, of a folder, or of the rows of a folder whose run was cut off.

    Raises:
        RunError: there is none, or `like` is missing, not asked for, or of another model or texts.
    """
    path = source / "record.json" if source.is_dir() else source
    if not path.exists() and (source / "rows").is_dir():
        body = _of_rows(source, like)
    elif like is not None and path.exists():
        raise RunError(
            f"--like={like}: {path} is a finished run and states everything itself. Leave --like out."
        )
    else:
        body = read_json(path, "name a run's folder, or its record.json")
    if body.get("schema") != SCHEMA:
        raise RunError(
            f"{path}: schema is {body.get('schema')!r}, published here are those of runs, {SCHEMA!r}. Scripts with records "
            "of their own write them into docs/results/records themselves."
        )
    return body


def _of_rows(folder: Path, like: Path | None) -> dict[str, Any]:
    if like is None:
        raise RunError(
            f"{folder} holds rows and no record.json: its run was cut off. Start the same command again to finish it, or name "
            "a finished run of the same machine, model and texts (--like FOLDER)."
        )
    stated = read_run(like)
    try:
        asked: Any = OmegaConf.to_container(OmegaConf.load(folder / CONFIG_FILE))
    except (OSError, YAMLError) as error:
        raise RunError(
            f"{folder / CONFIG_FILE} is missing or damaged, and rows alone do not say what was asked for. Start the run again."
        ) from error
    if one_sided := sorted(set(asked) ^ set(stated["requested"])):
        raise RunError(
            f"--like={like} is of another command or version than {folder}: only one of them has the settings {one_sided}. "
            "Name another run."
        )
    own, other = (
        {n: flatten(b[n], n) for n in FROM_LIKE if n in b} for b in (asked, stated["requested"])
    )
    for name in own:
        for key in own[name] | other[name]:
            if (here := own[name].get(key)) != (there := other[name].get(key)):
                raise RunError(
                    f"--like={like}: {key} is {there!r} there and {here!r} in {folder}. What it states of model and texts "
                    "holds only for the same settings: name another run."
                )
    paths = sorted((folder / "rows").glob("*.json"), key=lambda p: (p.stat().st_mtime_ns, p.name))
    if not paths:
        raise RunError(
            f"{folder / 'rows'} holds no row: nothing was measured. Start the run again."
        )
    rows = [read_json(path, "delete it") for path in paths]
    texts = dict(stated["data"])
    if not any(_learns(row) for row in rows):
        texts.pop("training", None)
    elif "training" not in texts:
        raise RunError(
            f"--like={like} read no text for learning (data.training), and rows of {folder} learned from one. Name another run."
        )
    return stated | {
        "started": None,
        "finished": time_text(paths[-1].stat().st_mtime),
        "wall_seconds": None,
        "peak_memory_bytes": None,
        "seed": None,
        "requested": asked,
        "actual": {name: stated["actual"][name] for name in ACTUAL if name in stated["actual"]},
        "data": texts,
        "results": rows,
        "verdict": None,
        "warnings": [CUT],
        "pace": None,
        "export": None,
        "comparison": None,
    }  # fmt: skip


def _learns(row: dict[str, Any]) -> bool:
    method = row.get("method", {})
    return method.get("search") == "joint" or str(method.get("weights")).startswith("learned")


# --- what is published of it -------------------------------------------------------------------------


def published(
    body: dict[str, Any],
    *,
    model: str | None = None,
    note: str | None = None,
    replace: dict[str, str] | None = None,
) -> str:
    """Text of a record for docs/results/records.

    Args:
        model: what the model is called instead of a folder.
        note: what is said of it.
        replace: further paths -> what stands for them.

    Raises:
        RunError: a path of this machine is left, the record does not fit its types, or it is too large.
    """
    plain = {name: value for name, value in body.items() if name != "schema"}
    body = {"schema": SCHEMA} | Record.from_dict(plain, "the record").to_dict()
    if not body["results"]:
        raise RunError("the record has no rows: nothing was measured. Start its run again.")
    run, asked = body["requested"].get("run"), body["requested"].get("model")
    names = dict(replace or {})
    if isinstance(run, dict) and "folder" in run:
        own = f"outputs/{body['command']}"
        names.setdefault(str(run["folder"]), own)
        run["folder"] = own
    if model is not None:
        names.setdefault(str(body["model"]["id"]), model)
        body["model"]["id"] = model
        if isinstance(asked, dict):
            asked["id"] = model
    if note is not None:
        body["model"]["note"] = note
        if isinstance(asked, dict):
            asked["note"] = note
    if not re.fullmatch(r"[^\n|<>]+", body["model"]["id"]):
        raise RunError(
            f"model.id is {body['model']['id']!r}: pages take a line without | < >. Say what the model is (--model NAME)."
        )
    if PRIVATE.search(body["model"]["id"]):
        raise RunError(
            f"model.id is {body['model']['id']!r}, a folder of this machine. Say what the model is (--model NAME, --note TEXT)."
        )
    body = _renamed(body, {name: names[name] for name in names if name.startswith("/")})
    if left := [f"{path} = {text!r:.120}" for path, text in _texts(body) if PRIVATE.search(text)]:
        raise RunError(
            f"paths of this machine are left in the record: {', '.join(left)}. Say what stands for each: --replace PATH=NAME."
        )
    try:
        text = json.dumps(packed(body), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise RunError(
            f"the record holds a number that is none, NaN or infinite ({error}), which no record that a run wrote does. "
            "Run the command again."
        ) from error
    content = text + "\n"
    if (size := len(content.encode())) > LARGEST:
        raise RunError(
            f"the record takes {size:,} bytes, {LARGEST:,} are allowed in the repository. Publish a run of fewer searches, budgets "
            "or seeds at a time."
        )
    return content


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """Plain values with other names for absolute paths, wherever a text has them."""
    if isinstance(value, dict):
        return {key: _renamed(child, names) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(child, names) for child in value]
    if not isinstance(value, str):
        return value
    for name in sorted(names, key=len, reverse=True):  # a folder's before that of what it lies in
        ends = rf"{re.escape(name.rstrip('/'))}(?![\w-])"
        value = re.sub(ends, names[name].replace("\\", r"\\"), value)
    return DATA.sub("data/", value)


def _texts(value: Any, path: str = "the record") -> Iterator[tuple[str, str]]:
    """Path of keys and text, of every string."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(child, f"{path}.{key}")


def publish(content: str, name: str, records: Path = RECORDS, *, force: bool = False) -> Path:
    """Write a published record under a name.

    Raises:
        RunError: the name is none, that of a page of many records, or there already.
    """
    if not re.fullmatch(r"\w[\w.-]*", name) or name.endswith(".json"):
        raise RunError(
            f"NAME={name}: letters, digits and _ . - alone, without .json, as in quality_test_x_0."
        )
    path, page = records / f"{name}.json", records.parent / f"{name}.md"
    if page.exists() and not path.exists():
        raise RunError(f"NAME={name}: {page} is the page of many records. Choose another NAME.")
    if path.exists() and not force:
        raise RunError(f"{path} is there already. Choose another NAME, or replace it (--force).")
    return write_text(path, content, "--records")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a run's folder, or its record.json")
    parser.add_argument("name", help="of the file in docs/results/records, without .json")
    parser.add_argument("--model", help="what a model that is a folder is called in tables")
    parser.add_argument("--note", help="what is said of the model")
    parser.add_argument(
        "--like", type=Path, help="a finished run: for the rows of one that was cut off"
    )
    parser.add_argument(
        "--replace", action="append", default=[], metavar="PATH=NAME", help="another private path"
    )
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--force", action="store_true", help="replace a record of this name")
    asked = parser.parse_args(arguments)
    if wrong := [text for text in asked.replace if not re.fullmatch(r"/[^=]*=.+", text)]:
        parser.error(f"--replace {wrong[0]}: PATH=NAME, with a PATH from the root")
    try:
        body = read_run(asked.source, asked.like)
        replace = dict(text.split("=", 1) for text in asked.replace)
        content = published(body, model=asked.model, note=asked.note, replace=replace)
        path = publish(content, asked.name, asked.records, force=asked.force)
    except DmxError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{path}: {len(content.encode()):,} bytes, {len(body['results'])} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
