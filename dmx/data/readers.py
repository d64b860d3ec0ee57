"""Rows of text out of files: plain, JSON Lines and Parquet."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dmx.errors import DataError


def read_plain(path: Path) -> str:
    """The whole file as one text, line ends as they are.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return path.read_bytes().decode()  # bytes first: line ends stay as they are
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}). Convert it to UTF-8.") from error


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
        opener: Any = gzip.open if name.endswith(".gz") else open
        try:
            with opener(path, "rt", encoding="utf-8") as lines:
                return _column((json.loads(line) for line in lines if line.strip()), column, path)
        except (json.JSONDecodeError, UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise DataError(f"{path} is not JSON Lines ({error}).") from error
    if name.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet as parquet

        try:
            table = parquet.read_table(path)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path} is not a Parquet file ({error}).") from error
        if column not in table.column_names:
            raise _no_column(path, column, table.column_names)
        return _column(({column: value} for value in table[column].to_pylist()), column, path)
    raise DataError(
        f"{path}: the file type is unknown. Known: .txt .raw .jsonl .jsonl.gz .parquet."
    )


def _column(rows: Iterable[Any], column: str, path: Path) -> list[str]:
    texts: list[str] = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or column not in row:
            raise _no_column(path, column, list(row) if isinstance(row, dict) else [])
        if not isinstance(row[column], str):
            kind = type(row[column]).__name__
            raise DataError(f"{path}, row {number}: {column} holds a {kind}, not text.")
        texts.append(row[column])
    return texts


def _no_column(path: Path, column: str, fields: Iterable[str]) -> DataError:
    return DataError(
        f"data.column={column!r} is not in {path}. Found: {', '.join(fields) or 'no fields'}."
    )
