"""Forward passes that start in the middle: the blocks before the disturbed one are not run again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dmx.searching.objective import model_logits


def decoder_blocks(model: nn.Module) -> nn.ModuleList | None:
    """The list of blocks that a language model runs in order: its longest ModuleList, if it is
    one whose blocks hold linear layers; None when there is none."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    lists = [m for m in lists if any(isinstance(x, nn.Linear) for x in m.modules())]
    return max(lists, key=len) if lists else None


class PrefixReplay:
    """Logits of one batch with the undisturbed prefix taken from a reference pass.

    Valid while only layers in block `first_block` or later differ from the reference pass, for
    models that feed each block's output to the next block alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.blocks = decoder_blocks(model)
        self._outputs: list[Any] = []

    def block_of(self, layer_name: str) -> int:
        """Index of the block that holds a layer; 0 (no prefix) for layers outside the blocks."""
        if self.blocks is None:
            return 0
        target = self.model.get_submodule(layer_name)
        for i, block in enumerate(self.blocks):
            if any(module is target for module in block.modules()):
                return i
        return 0

    def reference(self, tokens: Tensor) -> Tensor:
        """Logits of a full pass; keeps the output of every block."""
        self._outputs = []
        handles = []
        for block in self.blocks or []:
            handles.append(block.register_forward_hook(lambda _m, _i, out: self._outputs.append(out)))
        try:
            return model_logits(self.model, tokens)
        finally:
            for handle in handles:
                handle.remove()

    def logits(self, tokens: Tensor, first_block: int) -> Tensor:
        """Logits with blocks before `first_block` taken from the last reference pass."""
        with self._skipped(first_block):
            return model_logits(self.model, tokens)

    @contextmanager
    def _skipped(self, first_block: int) -> Iterator[None]:
        if first_block == 0 or self.blocks is None:
            yield
            return
        kept = self._outputs[first_block - 1]
        skipped = [self.blocks[i] for i in range(first_block)]
        # A block may have a forward of its own already, as accelerate's hooks give it.
        own = [block.__dict__.get("forward") for block in skipped]
        for block in skipped:
            block.forward = lambda *_args, **_kwargs: kept
        try:
            yield
        finally:
            for block, forward in zip(skipped, own, strict=True):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward


@torch.no_grad()
def prefix_replay_is_exact(model: nn.Module, tokens: Tensor) -> bool:
    """Whether a replay from the last block gives the logits of the full pass, bit for bit; a model
    with connections around its blocks fails it and must be scanned without reuse."""
    replay = PrefixReplay(model)
    if replay.blocks is None:
        return False
    full = replay.reference(tokens)
    return torch.equal(full, replay.logits(tokens, len(replay.blocks) - 1))
