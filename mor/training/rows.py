"""Rows of a run in JSON lines, whose device values are read many rows at a time."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mor._base import finite
from mor.log import cut_torn_line


class RowLog:
    """Rows of device values, written `every` rows; the last row of a step counts."""

    def __init__(self, path: Path, every: int, active: bool) -> None:
        self.path, self.every, self.active = path, every, active
        if active:
            cut_torn_line(path)
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """One row; 0-d tensors in it are read when it is written."""
        self.rows.append(row)
        if len(self.rows) >= self.every:
            self.flush()

    def flush(self) -> None:
        """Write what is pending."""
        if self.rows and self.active:
            names = [n for n, v in self.rows[0].items() if isinstance(v, Tensor)]
            if names:
                stacked = torch.stack(
                    [torch.stack([r[n].double() for n in names]) for r in self.rows]
                )
                for row, values in zip(self.rows, stacked.tolist(), strict=True):
                    row.update(zip(names, map(finite, values), strict=True))
            with self.path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in self.rows)
        self.rows = []


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a log; of rows with one step the last counts (a resume wrote it again)."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return sorted({row["step"]: row for row in rows}.values(), key=lambda row: row["step"])
