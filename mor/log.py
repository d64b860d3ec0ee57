"""Decisions and errors of every step, as JSON lines; the device is read once for many steps."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from mor.config import BF16_INDEX, MorError
from mor.state import (
    ELEMENTS,
    ERROR,
    MEASURED,
    NONFINITE,
    OPERANDS,
    TENSORS,
    layer_states,
)
from mor.statistics import by_operand, collect, read_counters, snapshot


def cut_torn_line(path: Path) -> bool:
    """Take away the last line of a log if a kill left only part of it; whether lines remain.

    Its step comes after the last checkpoint, so a resumed run writes it again.
    """
    if not path.exists():
        return False
    whole = path.read_bytes().rfind(b"\n") + 1
    if whole < path.stat().st_size:
        os.truncate(path, whole)
    return whole > 0


class MorLogger:
    """Writes one JSON line a step, `flush_every` steps at a time.

        {"step", "fp8_tensor_share", "bf16": {operand: share of tensors in BF16},
         "elements_bf16": (layers x operands) share of elements in BF16, null where none was used,
         "relative_error": (layers x operands), null where none was measured, "nonfinite"}

    The first line names layers and operands. Between flushes the device is not waited for.
    """

    def __init__(self, model: nn.Module, path: str | Path, *, flush_every: int = 50) -> None:
        if flush_every < 1:
            raise MorError(f"flush_every={flush_every} must be at least 1 (steps)")
        self.states = layer_states(model)
        self.path = Path(path)
        self.flush_every = flush_every
        self._steps: list[int] = []
        self._pending: list[tuple[np.ndarray, Tensor | None]] = []
        self._last = read_counters(self.states)
        if not cut_torn_line(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            header = {"schema": "mor.log/1", "layers": list(self.states), "operands": OPERANDS}
            self.path.write_text(json.dumps(header) + "\n")

    def step(self, step: int) -> None:
        """Call once after each optimizer step."""
        self._steps.append(step)
        self._pending.append(snapshot(self.states))
        if len(self._steps) >= self.flush_every:
            self.flush()

    def flush(self) -> None:
        """Write what is pending; call at the end and before a checkpoint."""
        lines = []
        for step, counters in zip(self._steps, collect(self._pending), strict=True):
            lines.append(json.dumps(_log_row(step, counters - self._last)) + "\n")
            self._last = counters
        with self.path.open("a") as file:
            file.writelines(lines)
        self._steps, self._pending = [], []


def _log_row(step: int, change: np.ndarray) -> dict[str, Any]:
    table = by_operand(change)
    total_of = table.sum(0)

    def ratio(part: np.ndarray, whole: np.ndarray) -> list[Any]:
        with np.errstate(invalid="ignore", divide="ignore"):
            values = (part / whole).round(6).astype(object)
        values[whole == 0] = None
        return list(values.tolist())

    tensors = total_of[:, TENSORS]
    total = tensors.sum()
    return {
        "step": step,
        "fp8_tensor_share": float(1 - tensors[:, BF16_INDEX].sum() / total) if total else None,
        "bf16": dict(zip(OPERANDS, ratio(tensors[:, BF16_INDEX], tensors.sum(1)), strict=True)),
        "elements_bf16": ratio(table[..., ELEMENTS][..., BF16_INDEX], table[..., ELEMENTS].sum(-1)),
        "relative_error": ratio(table[..., ERROR], table[..., MEASURED]),
        "nonfinite": int(table[..., NONFINITE].sum()),
    }


def read_log(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows of a `MorLogger` file; of rows with one step the last counts (a resume)."""
    header, *rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return header, list({row["step"]: row for row in rows}.values())
