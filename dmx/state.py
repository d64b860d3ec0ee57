"""What stays on disk between runs: results kept under all that they depend on, and the state of a run that
may be stopped.

    Cache        one JSON file for each key, under the key's hash, with a checksum inside
    StateFile    one safetensors file of the run that it belongs to, with a fingerprint and a checksum inside
    code_version the hash of the code that decides a result, for the keys of both
    cache_folder where what all runs of a user share is kept: built kernels, ids of long texts

A file that is damaged is an error that names it, never a result; one of another key is never found, one of
another run is refused. Files are whole or absent (`dmx.files`).
"""

import ast
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dmx.errors import RunError, setting_text
from dmx.files import parse_json, read_json, sha256, write_atomic, write_json

STATE_SCHEMA = "dmx.state/1"
_PACKAGE = Path(__file__).resolve().parent
_OTHER_SOURCES = (".cpp", ".cu", ".h")
"""Sources that a module builds and runs; they lie beside it."""


def cache_folder() -> Path:
    """DMX_CACHE, else ~/.cache/dmx."""
    return Path(os.environ.get("DMX_CACHE") or Path.home() / ".cache" / "dmx")


# ---------------------------------------------------------------- what code a result depends on


def read_source(path: Path) -> bytes:
    """Content of a source file."""
    return path.read_bytes()


@cache
def code_version(module: str, read: Callable[[Path], bytes] = read_source) -> str:
    """Hash of the sources of a module of dmx and of all that it imports from dmx, however far away.

    Imports inside functions count, and so do kernels in other languages beside a module that is reached.
    Of Python, comments, docstrings and layout do not count.

    Args:
        module: its full name, for example `__name__`. read: source of a file.
    """
    parts = _reached(module, read)
    for folder in {path.parent for path in parts}:
        others = (path for path in folder.iterdir() if path.suffix in _OTHER_SOURCES)
        parts |= {path: read(path) for path in others}
    digest = hashlib.sha256()
    for path, content in sorted(parts.items()):
        digest.update(f"{path.relative_to(_PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _reached(module: str, read: Callable[[Path], bytes]) -> dict[Path, bytes]:
    """Files of a module and of all modules of dmx behind its imports, with what they say."""
    start = _module_file(module)
    if start is None:
        raise ValueError(f"{module!r} is no module of dmx")
    said: dict[Path, bytes] = {}
    left = [start]
    while left:
        path = left.pop()
        if path not in said:
            said[path], imported = _parsed(read(path))
            files = (_module_file(name) for name in imported)
            left += [file for file in files if file is not None]
    return said


@cache
def _parsed(source: bytes) -> tuple[bytes, tuple[str, ...]]:
    """What a file says without docstrings, and names that it may import; most searches reach the same files."""
    tree = ast.parse(source)
    imported: list[str] = []
    for node in _statements(tree):
        imported += _imported(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not _is_text(n)]  # type: ignore[attr-defined]
    return ast.dump(tree).encode(), tuple(imported)


_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields that hold statements, or what holds them."""


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all statements in it, but not their expressions, which are most of a file and hold no statement."""
    yield node
    for block in _BLOCKS:
        inner = getattr(node, block, ())
        for child in inner if isinstance(inner, list) else ():
            yield from _statements(child)


def _imported(node: ast.AST) -> Iterator[str]:
    """Names that may be modules; imports are absolute here."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_file(name: str) -> Path | None:
    """Source of a module of dmx; None for anything else, the package itself included, which holds names only."""
    package, _, rest = name.partition(".")
    if package != _PACKAGE.name or not rest:
        return None
    path = _PACKAGE.joinpath(*rest.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((p for p in candidates if p.is_file()), None)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# ---------------------------------------------------------------- results under their keys


@dataclass(frozen=True)
class Cache:
    """Results in a folder, each in a file under the hash of its key; with `folder=None` nothing is kept."""

    folder: Path | None
    schema: str
    """What the files hold, with a version: `NAME/VERSION`."""
    what: str
    """For messages: `score file`."""
    way_out: str
    """For messages, what deleting a damaged file leads to: `scan again`."""

    def path(self, key: Mapping[str, Any], prefix: str = "") -> Path | None:
        """File of a key, which is JSON and holds everything that the result depends on."""
        if self.folder is None:
            return None
        digest = sha256(json.dumps(key, sort_keys=True).encode())
        return self.folder / f"{prefix}{digest[:32]}.json"

    def load(self, key: Mapping[str, Any], prefix: str = "") -> Any | None:
        """What was saved under a key; None where nothing was.

        Raises:
            RunError: the file is damaged; it is never taken for a result.
        """
        path = self.path(key, prefix)
        if path is None or not path.exists():
            return None
        try:
            body = read_json(path)
            result = body["result"]
            is_sound = body["schema"] == self.schema and body["key"] == _as_json(key)
            why = "" if is_sound and body["sha256"] == _checksum(result) else "its checksum differs"
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            raise RunError(f"{self.what} {path} is damaged ({why}). Delete it to {self.way_out}.")
        return result

    def save(self, key: Mapping[str, Any], result: Any, prefix: str = "") -> None:
        """Keep a result (JSON without NaN) under a key."""
        path = self.path(key, prefix)
        if path is not None:
            body = {"schema": self.schema, "key": dict(key), "result": result}
            write_json(path, body | {"sha256": _checksum(result)})


def _as_json(value: Mapping[str, Any]) -> Any:
    """The value as it is read back."""
    return json.loads(json.dumps(value))


def _checksum(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode())


# ---------------------------------------------------------------- state of a run


@dataclass(frozen=True)
class State:
    """What a run needs to go on."""

    facts: dict[str, Any] = field(default_factory=dict)
    """JSON without NaN; floats keep every bit."""
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StateFile:
    """State of one run; with `path=None` nothing is kept."""

    path: Path | None
    fingerprint: str
    """Hash of everything that the numbers of the run depend on, but for code and machine."""
    code: str
    """`code_version` of what runs."""
    what: str
    """For messages: `search`."""
    way_out: str
    """For messages, what deleting the file leads to: `search again from the start`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Name -> value in JSON, of those in the fingerprint: a refusal names the ones that differ."""

    def save(self, state: State) -> None:
        """Write the state, in place of an earlier one."""
        if self.path is None:
            return
        tensors = {name: t.detach().cpu().contiguous() for name, t in state.tensors.items()}
        facts = json.dumps(state.facts, allow_nan=False)
        metadata = {
            "schema": STATE_SCHEMA,
            "fingerprint": self.fingerprint,
            "code": self.code,
            "facts": facts,
            "settings": json.dumps(dict(self.settings)),
            "sha256": _content_sha256(facts, tensors),
        }
        content = save(tensors, metadata)
        write_atomic(self.path, lambda file: file.write(content))

    def load(self) -> State | None:
        """The state that was saved, on the CPU; None where there is none.

        Raises:
            RunError: the file is damaged, of another run, or written by other code.
        """
        if self.path is None or not self.path.exists():
            return None
        try:
            content = self.path.read_bytes()
            tensors = load(content)
            metadata = _metadata(content)
            facts, fingerprint, code = (metadata[k] for k in ("facts", "fingerprint", "code"))
            if metadata["schema"] != STATE_SCHEMA:
                raise ValueError(f"schema {metadata['schema']}, expected {STATE_SCHEMA}")
            if metadata["sha256"] != _content_sha256(facts, tensors):
                raise ValueError("its checksum differs")
            state = State(parse_json(facts), tensors)
            differing = self._differing(parse_json(metadata.get("settings", "{}")))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise self.damaged(error) from error
        if fingerprint != self.fingerprint:
            raise RunError(
                f"{self.path} is of a {self.what} with other settings, data or model{differing}. Choose another "
                f"folder, or delete it to {self.way_out}."
            )
        if code != self.code:
            raise RunError(
                f"{self.path} was written by another version of dmx, whose numbers may differ. Go on "
                f"with that version, choose another folder, or delete it to {self.way_out}."
            )
        return state

    def _differing(self, held: Mapping[str, Any]) -> str:
        """` (gptq.order is natural there, activity here)`; empty where no setting that the file says differs."""
        said = [
            f"{name} is {setting_text(held[name])} there, {setting_text(value)} here"
            for name, value in self.settings.items()
            if name in held and held[name] != value
        ]
        return f" ({'; '.join(said)})" if said else ""

    def damaged(self, error: Exception) -> RunError:
        """The error to raise where a state cannot be used."""
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return RunError(f"{self.path} is damaged ({why}). Delete it to {self.way_out}.")


def _metadata(content: bytes) -> dict[str, str]:
    """Of a safetensors file: eight bytes of length, then a JSON header."""
    length = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = parse_json(content[8 : 8 + length])["__metadata__"]
    return metadata


def _content_sha256(facts: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
