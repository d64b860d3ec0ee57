"""What a record keeps of the logs of a training run: losses and fallbacks, thinned out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mor.state import OPERANDS
from mor.training import read_rows

_CURVE_POINTS = 200
_DIGIT_COLUMNS = 60


def loss_curve(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """train, validation -> step, loss (nats/token): what a record keeps of the logs of a run.

    The training loss is the mean over at most `_CURVE_POINTS` pieces of the steps, each named by its
    last one; null where nothing in a piece was finite.
    """
    curves: dict[str, dict[str, list[Any]]] = {}
    for name in ("train", "validation"):
        rows = read_rows(folder / f"{name}.jsonl")
        pieces = np.array_split(np.arange(len(rows)), min(len(rows), _CURVE_POINTS))
        kept = [[rows[i]["loss"] for i in p if rows[i]["loss"] is not None] for p in pieces]
        curves[name] = {
            "step": [rows[p[-1]]["step"] for p in pieces],
            "loss": [round(float(np.mean(k)), 4) if k else None for k in kept],
        }
    return curves


def fallback_digits(layers: Sequence[str], log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A run's BF16 shares, short enough for a record.

    Returns:
        step: first step of each column; shares: layer -> operand -> a digit a column, the largest
        share of elements in BF16 in tenths rounded up (9 for 0.9 and more). Operands that never fell
        back are left out.
    """
    columns = np.array_split(np.arange(len(log)), min(len(log), _DIGIT_COLUMNS))
    shares: dict[str, dict[str, str]] = {}
    for i, layer in enumerate(layers):
        for j, operand in enumerate(OPERANDS):
            largest = [max(log[k]["elements_bf16"][i][j] or 0.0 for k in c) for c in columns]
            if any(largest):
                digits = "".join(str(min(9, int(np.ceil(10 * share)))) for share in largest)
                shares.setdefault(layer, {})[operand] = digits
    return {"step": [log[c[0]]["step"] for c in columns], "layers": list(layers), "shares": shares}


def digits_log(digits: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows for `fallback_map` out of `fallback_digits`; 9 is read as 1."""

    def share(layer: str, operand: str, column: int) -> float:
        text = digits["shares"].get(layer, {}).get(operand)
        return 0.0 if text is None else {9: 1.0}.get(int(text[column]), int(text[column]) / 10)

    return [
        {
            "step": step,
            "elements_bf16": [[share(x, o, c) for o in OPERANDS] for x in digits["layers"]],
        }
        for c, step in enumerate(digits["step"])
    ]
