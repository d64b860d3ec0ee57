"""Rows of text out of files: plain, JSON Lines and Parquet.

Text is UTF-8; a byte order mark at the start is no part of it. Half a character, as scraped JSON holds it
(`"\\ud83d"`), becomes U+FFFD: no tokenizer takes it, and it says nothing.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dmx.errors import DataError
from dmx.files import lfs_pointer

_SURROGATE = re.compile("[\ud800-\udfff]")
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""How files of other encodings begin; the longer marks first."""


def read_plain(path: Path) -> str:
    """The whole file as one text, line ends as they are.

    Raises:
        DataError: it is not UTF-8, or cannot be read.
    """
    with _explained(path, "text"):
        return _utf8(path.read_bytes(), path)  # bytes first: line ends stay as they are


def read_rows(path: Path, column: str) -> list[str]:
    """Texts of one file, one a row; a plain text file is one row.

    Args:
        column: the text field of .jsonl, .jsonl.gz and .parquet files.

    Raises:
        DataError: an unknown file type, a damaged file, or a row without text in `column`.
    """
    name = path.name
    if name.endswith((".txt", ".raw")):
        return [read_plain(path)]
    if name.endswith((".jsonl", ".jsonl.gz")):
        with _explained(path, "JSON Lines"):
            return _column(_json_lines(path), column, path)
    if name.endswith(".parquet"):
        with _explained(path, "a Parquet file"):
            return _parquet(path, column)
    raise DataError(
        f"{path}: the file type is unknown. Known: .txt .raw .jsonl .jsonl.gz .parquet."
    )


def _utf8(content: bytes, path: Path) -> str:
    encoding = next((name for mark, name in _MARKS.items() if content.startswith(mark)), None)
    why: object = f"it begins as {encoding} does"
    if encoding is None:
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            why = error
    raise DataError(
        f"{path} is not UTF-8 text ({why}). Convert it: iconv -f {encoding or 'LATIN1'} -t UTF-8."
    )


def _json_lines(path: Path) -> Iterator[Any]:
    """What the lines hold."""
    content = path.read_bytes()
    if path.name.endswith(".gz"):
        content = gzip.decompress(content)
    # By "\n" alone: str.splitlines cuts at characters that JSON strings may hold.
    for number, line in enumerate(_utf8(content, path).split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number}, is not JSON ({_first_line(error)}). Mend or delete the line."
                ) from error


def _parquet(path: Path, column: str) -> list[str]:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        if column not in file.schema_arrow.names:
            raise _no_column(path, column, file.schema_arrow.names)
        values = file.read(columns=[column])[column].to_pylist()
    return _column(({column: value} for value in values), column, path)


@contextlib.contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Turn what libraries raise over a damaged file into a DataError that names it."""
    try:
        if pointer := lfs_pointer(path):
            raise DataError(pointer)
        yield
    except DataError:
        raise
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        zlib.error,
    ) as error:  # pyarrow's are such, too
        raise DataError(
            f"{path} is not {what} ({_first_line(error)}). Get the file again, or leave it out."
        ) from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _column(rows: Iterable[Any], column: str, path: Path) -> list[str]:
    texts: list[str] = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or column not in row:
            raise _no_column(path, column, list(row) if isinstance(row, dict) else [])
        if not isinstance(row[column], str):
            kind = type(row[column]).__name__
            raise DataError(f"{path}, row {number}: {column} holds a {kind}, not text.")
        texts.append(_SURROGATE.sub("\ufffd", row[column]))
    return texts


def _no_column(path: Path, column: str, fields: Iterable[str]) -> DataError:
    return DataError(
        f"data.column={column!r} is not in {path}. Found: {', '.join(fields) or 'no fields'}."
    )
