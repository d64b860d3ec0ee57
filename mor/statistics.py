"""What was decided and what was multiplied: counters, their summary, and a log of every step.

A layer counts for each of its six operands the decisions (by tensors, blocks and elements), and
for each of its three products how it was executed. Counters only grow; a step is the difference of
two readings. Decisions that the host knows anyway are counted there, the others on the device, so
counting never waits for the device: `MorLogger` reads all layers of many steps in one copy.
"""

import functools
import itertools
import json
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mor.config import BF16_INDEX, FORMATS, MorConfig, MorError
from mor.policy import MorTensor

OPERANDS = (
    "input", "weight",
    "grad_output", "weight_transposed",
    "grad_output_transposed", "input_transposed",
)  # fmt: skip
"""The two operands of the products `PRODUCTS`, each in the orientation of its product."""
PRODUCTS = ("forward", "grad_input", "grad_weight")
EXECUTIONS = ("fp8", "fp8_emulated", "mixed_emulated", "bf16")
"""fp8: by the FP8 units. fp8_emulated: FP8 values, BF16 or float32 units. mixed_emulated: blocks of
FP8 and of BF16 in one product. bf16: both operands entered in BF16."""

_MEASURED, _ERROR, _NONFINITE = 0, 1, 2
_TENSORS, _BLOCKS, _ELEMENTS = slice(3, 6), slice(6, 9), slice(9, 12)
_FIELDS = 12
_OPERAND_SIZE = len(OPERANDS) * _FIELDS
COUNTERS = _OPERAND_SIZE + len(PRODUCTS) * len(EXECUTIONS)

_states: "weakref.WeakValueDictionary[int, LayerState]" = weakref.WeakValueDictionary()
_handles = itertools.count()


class LayerState:
    """Memory of one layer: decisions to hold between refreshes, and counters.

    `handle` names it to the custom operators, which take numbers and tensors only.
    """

    def __init__(self, config: MorConfig) -> None:
        self.config = config
        self.handle = next(_handles)
        _states[self.handle] = self
        self.passes = 0
        """Training passes through the layer; a refresh is due at multiples of refresh_every."""
        self.is_deciding = True
        """Whether the last training pass decided."""
        self.formats: dict[str, str] = {}
        """Last decision by operand, where the host knows it."""
        self.frozen: dict[str, Tensor] = {}
        """Last decision by operand, where only the device knows it."""
        self.host = np.zeros(COUNTERS)
        self.device: Tensor | None = None
        self._landing: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    def landing(self, count: int) -> tuple[Tensor, torch.cuda.Event]:
        """Pinned float64 memory for `count` errors from the device, and the event of their arrival;
        the same each time."""
        if count not in self._landing:
            memory = torch.empty(count, dtype=torch.float64, pin_memory=True)
            self._landing[count] = memory, torch.cuda.Event()
        return self._landing[count]

    def count_operand(
        self, operand: str, format: str, elements: int, error: float | None, finite: bool = True
    ) -> None:
        """One tensor-level decision; error None = not measured."""
        host, at, index = self.host, OPERANDS.index(operand) * _FIELDS, FORMATS.index(format)
        if error is not None and finite:
            host[at + _MEASURED] += 1
            host[at + _ERROR] += error
        if not finite:
            host[at + _NONFINITE] += 1
        host[at + _TENSORS.start + index] += 1
        host[at + _BLOCKS.start + index] += 1
        host[at + _ELEMENTS.start + index] += elements

    def count_product(self, product: str, execution: str) -> None:
        at = PRODUCTS.index(product) * len(EXECUTIONS) + EXECUTIONS.index(execution)
        self.host[_OPERAND_SIZE + at] += 1

    def count_on_device(
        self, product: str, operands: dict[str, tuple[Tensor, MorTensor, bool]]
    ) -> None:
        """Decisions of both operands of a product, and the product; without waiting.

        Args:
            operands: operand -> the (R, C) matrix, what was decided, whether its error counts.
        """
        shares = []
        for name, (x, result, is_measured) in operands.items():
            fields, bf16_blocks, blocks = _tally(x, result, is_measured)
            at = OPERANDS.index(name) * _FIELDS
            self._device_counters(x.device)[at : at + _FIELDS] += fields
            shares.append(bf16_blocks / max(blocks, 1))
        any_bf16 = torch.stack(shares).amax()
        if self.config.policy == "tensor":
            execution = torch.where(any_bf16 > 0, 3, 1)
        else:
            all_bf16 = torch.stack(shares).amin() >= 1
            execution = torch.where(all_bf16, 3, torch.where(any_bf16 > 0, 2, 1))
        at = _OPERAND_SIZE + PRODUCTS.index(product) * len(EXECUTIONS)
        one_hot = execution == torch.arange(len(EXECUTIONS), device=execution.device)
        self._device_counters(one_hot.device)[at : at + len(EXECUTIONS)] += one_hot

    def _device_counters(self, device: torch.device) -> Tensor:
        if self.device is None or self.device.device != device:
            previous = self.device
            self.device = torch.zeros(COUNTERS, dtype=torch.float64, device=device)
            if previous is not None:
                self.device += previous.to(device)
        return self.device

    def __deepcopy__(self, memo: Any) -> "LayerState":
        # A copied layer is another layer: it decides and counts for itself.
        return LayerState(self.config)

    def __reduce__(self) -> Any:
        return LayerState, (self.config,)


def state_of(handle: int) -> LayerState:
    return _states[handle]


def _tally(x: Tensor, result: MorTensor, is_measured: bool) -> tuple[Tensor, Tensor, int]:
    """The operand's counter row; its number of BF16 blocks (0-d) and of blocks."""
    decision = result.decision
    one_hot = decision[..., None] == torch.arange(len(FORMATS), device=x.device)
    error = result.relative_error.double()
    finite = error.isfinite()
    fields = torch.zeros(_FIELDS, dtype=torch.float64, device=x.device)
    if is_measured:
        fields[_MEASURED] = finite.double()
        fields[_ERROR] = torch.where(finite, error, 0.0)
    fields[_NONFINITE] = (~finite).double()
    if decision.ndim == 0:
        fields[_TENSORS] = one_hot.double()
        fields[_BLOCKS] = one_hot.double()
        fields[_ELEMENTS] = one_hot.double() * x.numel()
        return fields, one_hot[BF16_INDEX].double(), 1
    blocks = one_hot.double().sum((0, 1))
    fields[_BLOCKS] = blocks
    sizes = _block_sizes(x.shape, decision.shape, x.device)
    fields[_ELEMENTS] = (one_hot * sizes[..., None]).sum((0, 1))
    # A tensor of mixed blocks belongs to the most conservative of its formats.
    if decision.numel():
        fields[_TENSORS] = (torch.arange(len(FORMATS), device=x.device) == decision.amax()).double()
    return fields, blocks[BF16_INDEX], decision.numel()


@functools.lru_cache(maxsize=256)
def _block_sizes(shape: torch.Size, grid: torch.Size, device: torch.device) -> Tensor:
    """Elements of each block, (grid) float64; those at the edges may be short."""

    def along(axis: int) -> Tensor:
        length, blocks = shape[axis], grid[axis]
        size = -(-length // max(blocks, 1))  # an empty operand has no block
        starts = torch.arange(blocks, device=device) * size
        return (length - starts).clamp(max=size, min=0).double()

    return along(0)[:, None] * along(1)[None, :]


def layer_states(model: nn.Module) -> dict[str, LayerState]:
    """Layer name -> its state.

    Raises:
        MorError: the model has no MorLinear.
    """
    found = {name: getattr(m, "state", None) for name, m in model.named_modules()}
    states = {name: state for name, state in found.items() if isinstance(state, LayerState)}
    if not states:
        raise MorError("the model has no MorLinear; call mor.swap_linears(model, config) first")
    return states


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
    tensors, blocks, elements = row[_TENSORS], row[_BLOCKS], row[_ELEMENTS]
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
        "nonfinite": int(row[_NONFINITE]),
        "relative_error": float(row[_ERROR] / row[_MEASURED]) if row[_MEASURED] else None,
    }


def _operands(counters: np.ndarray) -> np.ndarray:
    return counters[..., :_OPERAND_SIZE].reshape(*counters.shape[:-1], len(OPERANDS), _FIELDS)


def _products(counters: np.ndarray) -> dict[str, dict[str, int]]:
    table = counters[_OPERAND_SIZE:].reshape(len(PRODUCTS), len(EXECUTIONS)).astype(int)
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
    table, total = _operands(counters), counters.sum(0)
    by_operand = {n: _summary(row) for n, row in zip(OPERANDS, _operands(total), strict=True)}
    overall = _summary(_operands(total).sum(0))
    share = overall["tensor_share"]
    return {
        "schema": "mor.stats/1",
        "fp8_tensor_share": None if share is None else 1.0 - share["bf16"],
        "total": overall,
        "operands": by_operand,
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
    table = _operands(change)
    by_operand = table.sum(0)

    def ratio(part: np.ndarray, whole: np.ndarray) -> list[Any]:
        with np.errstate(invalid="ignore", divide="ignore"):
            values = (part / whole).round(6).astype(object)
        values[whole == 0] = None
        return list(values.tolist())

    tensors = by_operand[:, _TENSORS]
    total = tensors.sum()
    return {
        "step": step,
        "fp8_tensor_share": float(1 - tensors[:, BF16_INDEX].sum() / total) if total else None,
        "bf16": dict(zip(OPERANDS, ratio(tensors[:, BF16_INDEX], tensors.sum(1)), strict=True)),
        "elements_bf16": ratio(
            table[..., _ELEMENTS][..., BF16_INDEX], table[..., _ELEMENTS].sum(-1)
        ),
        "relative_error": ratio(table[..., _ERROR], table[..., _MEASURED]),
        "nonfinite": int(table[..., _NONFINITE].sum()),
    }


def read_log(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows of a `MorLogger` file; of rows with one step the last counts (a resume)."""
    header, *rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return header, list({row["step"]: row for row in rows}.values())
