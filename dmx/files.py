"""Files that are either whole or absent: write beside the target, flush to disk, rename."""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from dmx.errors import RunError

_LFS = b"version https://git-lfs.github.com/spec/"
LARGEST_JSON = 1 << 28
"""Bytes; an assignment of a model with 10,000 layers takes a hundredth of them."""


def temporary_prefix(path: Path) -> str:
    """How names of files begin that are written beside `path` before they take its name."""
    return f".{path.name}."


def write_atomic(
    path: str | Path, write: Callable[[IO[bytes]], object], setting: str = "run.folder"
) -> Path:
    """Call `write(file)` on a temporary file beside `path`, then rename it to `path`.

    Args:
        setting: that says where, for messages.

    Raises:
        RunError: the folder cannot be made or written to; says which.
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not NamedTemporaryFile: its objects have a `__del__`, in which a Ctrl-C is lost.
        descriptor, name = tempfile.mkstemp(".tmp", temporary_prefix(path), path.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        return temporary.replace(path)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}. Choose a folder that you may write "
            f"to and that has room ({setting}=...)."
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str, setting: str = "run.folder") -> Path:
    return write_atomic(path, lambda file: file.write(text.encode()), setting)


def check_writable(folder: Path, setting: str = "run.folder") -> None:
    """Raise RunError where nothing can be written into a folder, which is made: before work that ends there."""
    write_text(folder / ".writable", "", setting).unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> Path:
    """JSON with sorted nothing and no NaN: a NaN in a record is a bug, null is the way to say it."""
    return write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def parse_json(text: str | bytes) -> Any:
    """What JSON says, for files that others may have written.

    Raises:
        ValueError: it is no JSON, names a key of an object twice, or is nested too deep to be read.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        body = dict(pairs)
        if len(body) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {twice!r} is there twice")
        return body

    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def read_json(path: Path) -> Any:
    """What a JSON file says; raises as `parse_json`, and OSError.

    Files beyond LARGEST_JSON bytes are refused before they are read.
    """
    size = path.stat().st_size
    if size > LARGEST_JSON:
        raise ValueError(f"it has {size:,} bytes, at most {LARGEST_JSON:,} are read")
    return parse_json(path.read_bytes())


def lfs_pointer(path: Path) -> str | None:
    """What to say where Git left a pointer in the place of a file; None where it is the file itself."""
    with path.open("rb") as file:
        if not file.read(len(_LFS)).startswith(_LFS):
            return None
    return f"{path} is a Git LFS pointer, not the file itself. Fetch the files: git lfs pull."


def finite(value: float) -> float | None:
    """The value as JSON can hold it: None for NaN and Inf."""
    return value if math.isfinite(value) else None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """Of a file of any size. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
