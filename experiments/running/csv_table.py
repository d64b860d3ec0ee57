"""Rows of a run as CSV: what identifies each, then its numbers."""

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

from dmx.files import write_text

from ..reporting.record import Method, Row

_NUMBERS = (
    "seed", "element_bits", "bits_per_element", "whole_model_bits_per_element", "perplexity", "nll",
    "windows", "search_seconds", "search_peak_memory_bytes", "eval_seconds", "assignment",
)  # fmt: skip


def write_csv(path: Path, rows: Sequence[Row]) -> Path:
    """A line a row; a missing metric is an empty field."""
    parts = [f.name for f in dataclasses.fields(type(rows[0].method) if rows else Method)]
    buffer = io.StringIO()
    columns = ("label", *parts, "budget_limit", "budget_unit", *_NUMBERS)
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({
            "label": row.label,
            **{name: getattr(row.method, name) for name in parts},
            "budget_limit": row.budget and row.budget.limit,
            "budget_unit": row.budget and row.budget.unit,
            **{name: getattr(row, name) for name in _NUMBERS},
        })  # fmt: skip
    return write_text(path, buffer.getvalue())
