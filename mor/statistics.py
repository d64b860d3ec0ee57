"""What the layers of a model counted, in one copy from the device, and its summary."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mor.config import BF16_INDEX, FORMATS
from mor.state import (
    BLOCKS,
    ELEMENTS,
    ERROR,
    EXECUTIONS,
    FIELDS,
    MEASURED,
    NONFINITE,
    OPERAND_SIZE,
    OPERANDS,
    PRODUCTS,
    TENSORS,
    LayerState,
    layer_states,
)


def read_counters(states: dict[str, LayerState]) -> np.ndarray:
    """(layers, COUNTERS) float64; one copy from the device for all layers."""
    return collect([snapshot(states)])[0]


def snapshot(states: dict[str, LayerState]) -> tuple[np.ndarray, Tensor | None]:
    """Counters of now; the device part stays on the device, nothing waits."""
    host = np.stack([state.host for state in states.values()])
    on_device = [state.device for state in states.values() if state.device is not None]
    if not on_device:
        return host, None
    zeros = torch.zeros_like(on_device[0])
    rows = [zeros if s.device is None else s.device for s in states.values()]
    return host, torch.stack(rows)


def collect(snapshots: list[tuple[np.ndarray, Tensor | None]]) -> list[np.ndarray]:
    """Snapshots with their device parts added; one copy for all of them."""
    parts = [part for _, part in snapshots if part is not None]
    fetched = iter(torch.stack(parts).cpu().numpy()) if parts else iter(())
    return [host + (next(fetched) if part is not None else 0.0) for host, part in snapshots]


def _shares(counts: np.ndarray) -> dict[str, float] | None:
    total = counts.sum()
    return None if not total else dict(zip(FORMATS, (counts / total).tolist(), strict=True))


def _bytes(blocks: np.ndarray, elements: np.ndarray) -> dict[str, float]:
    """As stored: an FP8 block has one byte of exponent beside its codes."""
    fp8 = {n: float(elements[i] + blocks[i]) for i, n in enumerate(FORMATS) if i != BF16_INDEX}
    return fp8 | {"bf16": 2.0 * float(elements[BF16_INDEX])}


def _summary(row: np.ndarray) -> dict[str, Any]:
    tensors, blocks, elements = row[TENSORS], row[BLOCKS], row[ELEMENTS]
    stored = _bytes(blocks, elements)
    total = sum(stored.values())
    return {
        "tensors": int(tensors.sum()),
        "tensor_share": _shares(tensors),
        "block_share": _shares(blocks),
        "element_share": _shares(elements),
        "byte_share": {n: b / total for n, b in stored.items()} if total else None,
        "elements": int(elements.sum()),
        "bytes": int(total),
        "fallbacks": int(tensors[BF16_INDEX]),
        "nonfinite": int(row[NONFINITE]),
        "relative_error": float(row[ERROR] / row[MEASURED]) if row[MEASURED] else None,
    }


def by_operand(counters: np.ndarray) -> np.ndarray:
    """(..., COUNTERS) -> (..., operands, FIELDS)."""
    return counters[..., :OPERAND_SIZE].reshape(*counters.shape[:-1], len(OPERANDS), FIELDS)


def _products(counters: np.ndarray) -> dict[str, dict[str, int]]:
    table = counters[OPERAND_SIZE:].reshape(len(PRODUCTS), len(EXECUTIONS)).astype(int)
    return {
        product: dict(zip(EXECUTIONS, row.tolist(), strict=True))
        for product, row in zip(PRODUCTS, table, strict=True)
    }


def summarize(names: list[str], counters: np.ndarray) -> dict[str, Any]:
    """JSON form of (layers, COUNTERS): by layer and operand, by operand, in all.

    Shares are of 1. `relative_error` is the mean over measured tensors, of the first format tried;
    None where nothing was measured. A tensor of mixed blocks counts as its most conservative
    format. `fp8_tensor_share` is the headline number of the MoR paper.
    """
    table, total = by_operand(counters), counters.sum(0)
    summaries = {n: _summary(row) for n, row in zip(OPERANDS, by_operand(total), strict=True)}
    overall = _summary(by_operand(total).sum(0))
    share = overall["tensor_share"]
    return {
        "schema": "mor.stats/1",
        "fp8_tensor_share": None if share is None else 1.0 - share["bf16"],
        "total": overall,
        "operands": summaries,
        "products": _products(total),
        "layers": {
            name: {
                "operands": {
                    operand: _summary(row) for operand, row in zip(OPERANDS, table[i], strict=True)
                },
                "products": _products(counters[i]),
            }
            for i, name in enumerate(names)
        },
    }


def stats(model: nn.Module) -> dict[str, Any]:
    """Everything that the MoR layers of a model counted so far, JSON-ready; see `summarize`.

    Raises:
        MorError: the model has no MorLinear.
    """
    states = layer_states(model)
    return summarize(list(states), read_counters(states))


def reset_stats(model: nn.Module) -> None:
    """Counters to zero; decisions that are held stay."""
    for state in layer_states(model).values():
        state.host[:] = 0
        state.device = None
