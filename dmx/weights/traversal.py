"""Walking a model block by block: each decoder block on what the blocks before it give.

A *part* is the layers of one decoder block, or, at the end, those outside all of them. The inputs of
a block are kept for all batches; the other arguments of the blocks are those of the first batch, as
batches have one shape and no padding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from dmx.applying.linear import QuantLinear, quantized_layers
from dmx.errors import ModelError
from dmx.models.backbone import decoder_blocks
from dmx.models.replay import PrefixReplay
from dmx.models.running import model_logits
from dmx.models.sharding import is_sharded
from dmx.models.streaming import stream_of
from dmx.weights.recorder import Stop, until_stopped


class Traversal:
    """The blocks of a model to which an assignment is applied, and calibration batches for them.

    Attributes:
        blocks: the decoder blocks in their order; empty where the model has none.
        parts: layer name -> layer with a quantized weight; one dict a block, and one for the rest.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Tensor]) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.stream = stream_of(model)
        self.batches = [batch.to(self.device) for batch in batches]
        self.blocks: list[nn.Module] = list(decoder_blocks(model) or [])
        self.parts = _parts(model, self.blocks)
        self._others: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def first_inputs(self, keep: Callable[[Tensor], Tensor] = lambda x: x) -> list[Tensor]:
        """Input of the first block for every batch, as `keep` gives it; also learns the blocks' other arguments."""
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        handles = [
            block.register_forward_pre_hook(
                lambda _m, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
            )
            for block in self.blocks
        ]
        outputs: list[Any] = []
        handles += [
            b.register_forward_hook(lambda _m, _i, y: outputs.append(y)) for b in self.blocks
        ]
        try:
            model_logits(self.model, self.batches[0])
        finally:
            for handle in handles:
                handle.remove()
        chained = len(seen) == len(self.blocks) == len(outputs) and all(
            bool(args) and isinstance(args[0], Tensor) and (i == 0 or args[0] is outputs[i - 1])
            for i, (args, _) in enumerate(seen)
        )
        if not chained:
            raise ModelError(
                f"{type(self.model).__name__} cannot be walked block by block (weights=gptq, local_hessian, "
                "learn.block_steps): its blocks do not each take the output of the one before as their "
                "first argument. Use weights=nearest, or learn.block_steps=0."
            )
        self._others = [(args[1:], kwargs) for args, kwargs in seen]
        first: list[Tensor] = []
        # Gathered weights are let go of at the end of a pass.
        ends = not is_sharded(self.model)

        def note(_module: nn.Module, args: tuple[Any, ...]) -> None:
            first.append(keep(args[0]))
            if ends:
                raise Stop

        handle = self.blocks[0].register_forward_pre_hook(note)
        try:
            for batch in self.batches:
                until_stopped(partial(model_logits, self.model, batch))
        finally:
            handle.remove()
        return first

    def keep(self, x: Tensor) -> Tensor:
        """What a block reads or gives, until the next one runs: in CPU memory where the blocks lie there."""
        return x if self.stream is None else self.stream.kept(x)

    def bring(self, block: int) -> None:
        """Have the weights of a block on the device, until another one runs."""
        if self.stream is not None:
            self.stream.enter(block)

    def block_runs(self, block: int, hidden: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        """A pass of one block for each batch, given its inputs; after `first_inputs`."""
        return [partial(self._run, block, x) for x in hidden]

    def _run(self, block: int, x: Tensor) -> Tensor:
        args, kwargs = self._others[block]
        output: Tensor = self.blocks[block](x.to(self.device), *args, **kwargs)
        return output

    def rest_runs(self, hidden: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        """A pass of what follows the blocks, given the outputs of the last; of all without blocks."""
        if not self.blocks:
            return [partial(model_logits, self.model, batch) for batch in self.batches]
        replay, last = PrefixReplay(self.model), len(self.blocks) - 1

        def logits(batch: Tensor, x: Tensor) -> Tensor:
            return replay.logits_after(batch, last, [x.to(self.device)])

        return [partial(logits, b, x) for b, x in zip(self.batches, hidden, strict=True)]


def _parts(model: nn.Module, blocks: Sequence[nn.Module]) -> list[dict[str, QuantLinear]]:
    layers = {
        name: layer
        for name, layer in quantized_layers(model).items()
        if layer.weight_quantizer is not None
    }
    names = {id(layer): name for name, layer in layers.items()}
    parts = [
        {names[id(m)]: m for m in block.modules() if id(m) in names and isinstance(m, QuantLinear)}
        for block in blocks
    ]
    inside = {name for part in parts for name in part}
    return [*parts, {name: layer for name, layer in layers.items() if name not in inside}]
