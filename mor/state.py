"""The memory of a layer: decisions to hold between refreshes, and what was decided and multiplied.

A layer counts for each of its six operands the decisions (by tensors, blocks and elements), and
for each of its three products how it was executed. Counters only grow; a step is the difference of
two readings. Decisions that the host knows anyway are counted there, the others on the device, so
counting never waits for the device.
"""

import functools
import itertools
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mor.config import BF16_INDEX, FORMATS, MorConfig, MorError
from mor.policy import MorTensor

OPERANDS = (
    "input",
    "weight",
    "grad_output",
    "weight_transposed",
    "grad_output_transposed",
    "input_transposed",
)
"""The two operands of the products `PRODUCTS`, each in the orientation of its product."""
PRODUCTS = ("forward", "grad_input", "grad_weight")
EXECUTIONS = ("fp8", "fp8_emulated", "mixed_emulated", "bf16")
"""fp8: by the FP8 units. fp8_emulated: FP8 values, BF16 or float32 units. mixed_emulated: blocks of
FP8 and of BF16 in one product. bf16: both operands entered in BF16."""

# A row of counters of one operand: fields by name, then one for each of FORMATS.
MEASURED, ERROR, NONFINITE = 0, 1, 2
TENSORS, BLOCKS, ELEMENTS = slice(3, 6), slice(6, 9), slice(9, 12)
FIELDS = 12
OPERAND_SIZE = len(OPERANDS) * FIELDS
COUNTERS = OPERAND_SIZE + len(PRODUCTS) * len(EXECUTIONS)

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
        host, at, index = self.host, OPERANDS.index(operand) * FIELDS, FORMATS.index(format)
        if error is not None and finite:
            host[at + MEASURED] += 1
            host[at + ERROR] += error
        if not finite:
            host[at + NONFINITE] += 1
        host[at + TENSORS.start + index] += 1
        host[at + BLOCKS.start + index] += 1
        host[at + ELEMENTS.start + index] += elements

    def count_product(self, product: str, execution: str) -> None:
        """One product that the host knows the execution of."""
        at = PRODUCTS.index(product) * len(EXECUTIONS) + EXECUTIONS.index(execution)
        self.host[OPERAND_SIZE + at] += 1

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
            at = OPERANDS.index(name) * FIELDS
            self._device_counters(x.device)[at : at + FIELDS] += fields
            shares.append(bf16_blocks / max(blocks, 1))
        any_bf16 = torch.stack(shares).amax()
        if self.config.policy == "tensor":
            execution = torch.where(any_bf16 > 0, 3, 1)
        else:
            all_bf16 = torch.stack(shares).amin() >= 1
            execution = torch.where(all_bf16, 3, torch.where(any_bf16 > 0, 2, 1))
        at = OPERAND_SIZE + PRODUCTS.index(product) * len(EXECUTIONS)
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
    """The memory of the layer that `handle` names."""
    return _states[handle]


def _tally(x: Tensor, result: MorTensor, is_measured: bool) -> tuple[Tensor, Tensor, int]:
    """The operand's counter row; its number of BF16 blocks (0-d) and of blocks."""
    decision = result.decision
    one_hot = decision[..., None] == torch.arange(len(FORMATS), device=x.device)
    error = result.relative_error.double()
    finite = error.isfinite()
    fields = torch.zeros(FIELDS, dtype=torch.float64, device=x.device)
    if is_measured:
        fields[MEASURED] = finite.double()
        fields[ERROR] = torch.where(finite, error, 0.0)
    fields[NONFINITE] = (~finite).double()
    if decision.ndim == 0:
        fields[TENSORS] = one_hot.double()
        fields[BLOCKS] = one_hot.double()
        fields[ELEMENTS] = one_hot.double() * x.numel()
        return fields, one_hot[BF16_INDEX].double(), 1
    blocks = one_hot.double().sum((0, 1))
    fields[BLOCKS] = blocks
    sizes = _block_sizes(x.shape, decision.shape, x.device)
    fields[ELEMENTS] = (one_hot * sizes[..., None]).sum((0, 1))
    # A tensor of mixed blocks belongs to the most conservative of its formats.
    if decision.numel():
        fields[TENSORS] = (torch.arange(len(FORMATS), device=x.device) == decision.amax()).double()
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
    named = {name: getattr(m, "state", None) for name, m in model.named_modules()}
    states = {name: state for name, state in named.items() if isinstance(state, LayerState)}
    if not states:
        raise MorError("the model has no MorLinear; call mor.swap_linears(model, config) first")
    return states
