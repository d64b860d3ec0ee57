"""Long arrays of a published record as text, `<kind> <count> <base64>`, the same numbers to the bit; formats by kind of layer.

A run's own record.json has plain lists. In docs/results/records the losses of windows and the answers to items of tasks are
packed, and everything else stays plain JSON; whatever reads records takes both. Kinds, of which the shortest that gives
every number back is taken:

    bits       0 and 1, eight a byte, the first in the highest bit
    float32    four bytes, little-endian
    decimal32  the same bytes; the number is the shortest decimal that names this float32
    float64    eight bytes

Formats of layers are digits, one a decoder block: `{"of": ["mxfp4", "mxfp8_e4m3"], "model.layers.*.mlp.up_proj": "0110"}`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SHORT = 16
"""Numbers; lists of fewer stay lists, which are read more easily."""


def pack(values: Sequence[float]) -> str:
    """Numbers as text that `unpack` makes these numbers of again."""
    numbers = np.array(values, dtype="<f8")
    for kind in ("bits", "float32", "decimal32"):
        data = _bytes(kind, numbers)
        if _numbers(kind, data, len(numbers)).tobytes() == numbers.tobytes():
            break
    else:
        kind, data = "float64", numbers.tobytes()
    return f"{kind} {len(numbers)} {base64.b64encode(data).decode()}"


def unpack(text: str) -> tuple[float, ...]:
    """The numbers of a packed array.

    Raises:
        ValueError: it is none, or damaged.
    """
    try:
        kind, said, encoded = text.split(" ")
        count, data = int(said), base64.b64decode(encoded, validate=True)
        if len(data) == _size(kind, count):
            return tuple(_numbers(kind, data, count).tolist())
    except (ValueError, LookupError, binascii.Error):
        pass
    raise ValueError(
        "expected numbers, or `bits|float32|decimal32|float64 <count> <base64>` of so many"
    )


_OF = "of"
"""Key of the names that digits stand for."""


def pack_formats(formats: Mapping[str, Any]) -> dict[str, Any]:
    """layer -> format name by kind of layer, which `unpack_formats` makes these of again; as they are where it would not."""
    names, digits = sorted({str(name) for name in formats.values()}), dict[str, str]()
    for layer, name in formats.items():
        kind = re.sub(r"(?<=\.)\d+(?=\.)", "*", layer, count=1)
        digits[kind] = f"{digits.get(kind, '')}{names.index(str(name))}"
    made = {_OF: names, **digits}
    return made if len(names) <= 10 and unpack_formats(made) == formats else dict(formats)


def unpack_formats(formats: Mapping[str, Any]) -> dict[str, str]:
    """layer -> format name, block by block; what is not packed stays as it is.

    Raises:
        ValueError: it is damaged.
    """
    names = formats.get(_OF)
    if not isinstance(names, list):
        return dict(formats)
    kinds = {kind: digits for kind, digits in formats.items() if kind != _OF}
    try:
        blocks = range(max(map(len, kinds.values()), default=0))
        return {
            kind.replace("*", str(block), 1): names[int(digits[block])]
            for block in blocks
            for kind, digits in kinds.items()
            if block < len(digits)
        }
    except (TypeError, LookupError, ValueError) as error:
        raise ValueError("expected format names, and digits that name them by block") from error


def packed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a record, with the long arrays of its rows and formats of layers packed."""
    actual = dict(body["actual"])
    if isinstance(actual.get("formats"), Mapping):
        actual["formats"] = pack_formats(actual["formats"])
    return {**body, "actual": actual, "results": [_packed_row(row) for row in body["results"]]}


def _packed_row(row: Mapping[str, Any]) -> dict[str, Any]:
    tasks = row.get("zero_shot")
    asked = (
        {} if tasks is None else {"zero_shot": {n: _short(t, "items") for n, t in tasks.items()}}
    )
    return _short(row, "window_nll") | asked


def _short(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    values = fields[name]
    is_long = isinstance(values, list | tuple) and len(values) >= SHORT
    return {**fields, name: pack(values)} if is_long else dict(fields)


def _size(kind: str, count: int) -> int:
    """Bytes of so many numbers; LookupError for no kind."""
    return (
        -(-count // 8)
        if kind == "bits"
        else count * {"float32": 4, "decimal32": 4, "float64": 8}[kind]
    )


def _bytes(kind: str, numbers: np.ndarray) -> bytes:
    """Numbers as a kind has them, rounded where it cannot."""
    if kind == "bits":
        return np.packbits(numbers == 1).tobytes()
    with np.errstate(over="ignore"):
        return numbers.astype("<f4").tobytes()


def _numbers(kind: str, data: bytes, count: int) -> np.ndarray:
    """(count,) float64"""
    if kind == "bits":
        return np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype("<f8")
    if kind == "float64":
        return np.frombuffer(data, "<f8")
    wide = np.frombuffer(data, "<f4")
    return (wide.astype(str) if kind == "decimal32" else wide).astype("<f8")
