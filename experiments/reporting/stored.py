"""Dataclasses as plain values of JSON, and back: strictly.

A key that is unknown, or missing where there is no default, or a value of another type, is a RunError with
the file and the key.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from dmx import files
from dmx.errors import RunError

from .packed import unpack


def read_json(path: Path, way_out: str) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
        RunError: it does not exist or is none; ends in `way_out`.
    """
    try:
        body = files.read_json(path)
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: {way_out}.") from None
    except (ValueError, OSError) as error:
        raise RunError(f"{path} is not a JSON object ({error}): {way_out}.") from error
    if not isinstance(body, dict):
        raise RunError(f"{path} is not a JSON object ({type(body).__name__}): {way_out}.")
    return body


def _read(hint: Any, value: Any, where: str) -> Any:
    """A value of JSON as its type hint wants it; `where` is the file and the path of keys."""
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return hint.from_dict(value, where)  # type: ignore[union-attr]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        options = [option for option in inner if option is not type(None)]
        return _read(options[0] if len(options) == 1 else _option(options, value), value, where)
    if origin is tuple and inner[0] is float and isinstance(value, str):
        try:
            return unpack(value)
        except ValueError as error:
            raise RunError(f"{where} is {value!r:.80}, {error}") from None
    if origin is tuple and isinstance(value, list | tuple):
        if inner[0] in (int, float, str) and all(type(v) is inner[0] for v in value):
            return tuple(value)  # thousands of items at once
        if inner[0] is float and all(type(v) in (int, float) for v in value):
            return tuple(map(float, value))
        return tuple(_read(inner[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: _read(inner[1], v, f"{where}.{key}") for key, v in value.items()}
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise RunError(f"{where} is {value!r:.80}, expected {getattr(hint, '__name__', hint)}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Types of the fields: names that are evaluated, so once a class and not once an object of thousands."""
    return get_type_hints(cls)


def _option(options: list[Any], value: Any) -> Any:
    """Of several types the one that an object of JSON has the keys of."""
    if isinstance(value, Mapping):
        for option in options:
            if dataclasses.is_dataclass(option) and option.tells_apart() <= set(value):  # type: ignore[union-attr]
                return option
    plain = [o for o in options if not dataclasses.is_dataclass(o)]
    return next((o for o in plain if type(value) is o), options[0])


def _lacking(fields: Mapping[str, dataclasses.Field[Any]], body: Mapping[str, Any]) -> list[str]:
    """Fields without a default that an object of JSON does not have."""
    absent = dataclasses.MISSING
    needed = [n for n, f in fields.items() if f.default is absent and f.default_factory is absent]
    return [name for name in needed if name not in body]


class Stored:
    """A dataclass that becomes plain values of JSON and comes back from them.

    A field that a later version adds has a default: what results of before its time have.
    """

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, every field included."""
        plain: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return plain

    @classmethod
    def from_dict(cls, body: Any, where: str) -> Self:
        """Args:
            where: file and key, for messages.

        Raises:
            RunError: keys are missing or unknown, or a value has another type.
        """
        if not isinstance(body, Mapping):
            raise RunError(f"{where} is {body!r:.80}, expected an object")
        hints, fields = _hints(cls), {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        missing, unknown = _lacking(fields, body), sorted(set(body) - set(fields))
        if missing or unknown:
            raise RunError(
                f"{where}: {cls.__name__} misses keys {missing}, has unknown keys {unknown}. It was "
                "written by another version or edited: run the command again."
            )
        return cls(**{name: _read(hints[name], body[name], f"{where}.{name}") for name in body})

    @classmethod
    def tells_apart(cls) -> set[str]:
        """Keys that only this kind of object has."""
        return {dataclasses.fields(cls)[0].name}  # type: ignore[arg-type]


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings to dotted keys; lists stay whole."""
    if isinstance(value, Mapping) and value:
        pairs: dict[str, Any] = {}
        for key, child in value.items():
            pairs |= flatten(child, f"{prefix}.{key}" if prefix else str(key))
        return pairs
    return {prefix: value}
