"""What each candidate format of a layer costs to first order: the error of its output times the gradient there.

    fisher   sum over tokens and outputs of (gradient)^2 * (output error)^2

The gradient of a layer's output comes in the pass backward, its input in the pass forward; where blocks are checkpointed, in
their second run, which for the last layers of a block is after the gradient. Whichever comes first waits for the other.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dmx.formats import Format, Operand
from dmx.kernels import ops
from dmx.models.products import Groups, groups_of, product
from dmx.models.streaming import in_backward, stream_of
from dmx.searching.bank import SearchLinear


class OutputErrors:
    """Adds to the sums of all units in one pass forward and backward of the unquantized model.

    Args:
        model: under a bank.
        totals: (U, len(formats), parts) float32.
    """

    def __init__(self, model: nn.Module, formats: Sequence[Format], totals: Tensor) -> None:
        self.formats, self.totals = formats, totals
        self.layers = [m for m in model.modules() if isinstance(m, SearchLinear)]
        stream = stream_of(model)
        blocks = [] if stream is None else stream.blocks
        self._runs_twice = {id(m) for block in blocks for m in block.modules()}
        self._inputs: dict[int, list[tuple[Tensor, Groups | None]]] = {}
        self._gradients: dict[int, list[Tensor]] = {}

    def watch(self) -> list[RemovableHandle]:
        """Hooks of all layers, to remove after the pass."""
        before = [layer.register_forward_pre_hook(self._reads) for layer in self.layers]
        return before + [layer.register_forward_hook(self._gives) for layer in self.layers]

    def check_all_met(self) -> None:
        """After the pass: no gradient waits."""
        assert not any(self._gradients.values())

    def _reads(self, layer: SearchLinear, inputs: tuple[Tensor]) -> None:
        if id(layer) in self._runs_twice and not in_backward():
            return
        x, _ = layer.operands(inputs[0].detach())
        if waiting := self._gradients.get(id(layer)):
            self._add(layer, x, waiting.pop(), groups_of(layer))
        else:
            self._inputs.setdefault(id(layer), []).append((x, groups_of(layer)))

    def _gives(self, layer: SearchLinear, _inputs: tuple[Tensor], output: Tensor) -> None:
        if output.requires_grad and not in_backward():
            output.register_hook(partial(self._has_gradient, layer))

    def _has_gradient(self, layer: SearchLinear, gradient: Tensor) -> None:
        if waiting := self._inputs.get(id(layer)):
            x, groups = waiting.pop()
            self._add(layer, x, gradient, groups)
        else:
            self._gradients.setdefault(id(layer), []).append(gradient)

    @torch.no_grad()
    def _add(self, layer: SearchLinear, x: Tensor, gradient: Tensor, groups: Groups | None) -> None:
        exact = product(x, layer.weight, None, groups)
        sides: tuple[tuple[Tensor, int | None, Operand], ...] = (
            (x, layer.input_unit, "input"), (layer.weight, layer.weight_unit, "weight")
        )  # fmt: skip
        for unit in sorted({unit for _, unit, _ in sides if unit is not None}):
            for column, block_format in enumerate(self.formats):
                a, b = (
                    layer.quantized(t, block_format, operand) if own == unit else t
                    for t, own, operand in sides
                )
                changed = product(a, b, None, groups)
                ops.add_fisher(gradient, exact, changed, self.totals[unit, column])
