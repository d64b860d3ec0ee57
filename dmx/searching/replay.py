"""Forward passes that start in the middle: the blocks before the disturbed one are not run again,
and the disturbances of one block share one pass through all that comes after it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dmx.assignment.budget import SearchSpace
from dmx.formats import BlockFormat
from dmx.searching.graph import is_purely_causal, maskless_attention
from dmx.searching.objective import Divergence, model_logits
from dmx.searching.offsets import Bank

STACKED_LOGITS = {"cuda": 1 << 31, "cpu": 1 << 27}
"""Logits of disturbed models held at once, by device type."""

Change = tuple[int, BlockFormat]
"""A unit and the format that it takes instead of its own."""
_T = TypeVar("_T")


def decoder_blocks(model: nn.Module) -> nn.ModuleList | None:
    """The list of blocks that a language model runs in order: its longest ModuleList whose blocks
    hold linear layers; None when there is none."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    lists = [m for m in lists if any(isinstance(x, nn.Linear) for x in m.modules())]
    return max(lists, key=len) if lists else None


class PrefixReplay:
    """Passes over one batch that take the undisturbed prefix from a reference pass.

    Valid while only layers in the named block differ from the reference pass, for models that
    feed each block's output to the next block alone (`prefix_replay_is_exact` finds out).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.blocks = decoder_blocks(model)
        self._outputs: list[Any] = []
        self._arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def block_of(self, layer_name: str) -> int:
        """Index of the block that holds a layer; -1 for layers outside the blocks."""
        target = self.model.get_submodule(layer_name)
        for i, block in enumerate(self.blocks or []):
            if any(module is target for module in block.modules()):
                return i
        return -1

    def reference(self, tokens: Tensor) -> Tensor:
        """Logits of a full pass; keeps the arguments and the output of every block."""
        self._arguments, self._outputs = [], []
        handles = []
        for block in self.blocks or []:
            handles += [
                block.register_forward_pre_hook(
                    lambda _m, args, kwargs: self._arguments.append((args, kwargs)),
                    with_kwargs=True,
                ),
                block.register_forward_hook(lambda _m, _i, out: self._outputs.append(out)),
            ]
        try:
            return model_logits(self.model, tokens)
        finally:
            for handle in handles:
                handle.remove()

    def block_output(self, block: int) -> Tensor:
        """Output of one block as the model now is, given what it got in the reference pass."""
        assert self.blocks is not None
        args, kwargs = self._arguments[block]
        output: Tensor = self.blocks[block](*args, **kwargs)
        return output

    def logits_after(self, tokens: Tensor, block: int, outputs: list[Tensor]) -> Tensor:
        """Logits (len(outputs) * batch, length, vocab) given several outputs of one block."""
        with self._given(block, torch.cat(outputs)):
            return model_logits(self.model, tokens.repeat(len(outputs), 1))

    @contextmanager
    def _given(self, block: int, output: Any) -> Iterator[None]:
        """Inside, blocks up to and including `block` are not run; the last one gives `output`."""
        skipped = [self.blocks[i] for i in range(block + 1)] if self.blocks is not None else []
        # A block may have a forward of its own already, as accelerate's hooks give it.
        own = [module.__dict__.get("forward") for module in skipped]
        for module in skipped:
            module.forward = lambda *_args, **_kwargs: output
        try:
            yield
        finally:
            for module, forward in zip(skipped, own, strict=True):
                del module.forward
                if forward is not None:
                    module.forward = forward


@torch.no_grad()
def prefix_replay_is_exact(model: nn.Module, tokens: Tensor) -> bool:
    """Whether passes from the middle give the logits of the full pass, bit for bit, for one row of
    tokens; a model with connections around its blocks fails and must be scanned without reuse."""
    replay = PrefixReplay(model)
    if replay.blocks is None:
        return False
    full = replay.reference(tokens)
    if not all(isinstance(out, Tensor) for out in replay._outputs):
        return False
    middle = len(replay.blocks) // 2
    output = replay.block_output(middle)
    return torch.equal(full, replay.logits_after(tokens, middle, [output]))


def quick_attention(model: nn.Module, tokens: Tensor) -> AbstractContextManager[None]:
    """On a GPU, building a mask waits for the device in every pass; causal models need none."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    if on_gpu and is_purely_causal(model, tokens.shape[1]):
        return maskless_attention(model)
    return nullcontext()


class Disturbances:
    """KL of a model in which one unit at a time differs from a base; one batch after the other.

    `start` runs the base, `kl_sums` every change of it. Where `prefix_replay_is_exact` holds, a
    change runs from its own block on, and the changes of one block share one pass after it.

    Args:
        bank: of the searching model. tokens: a batch (batch, length), for a check of exactness.
    """

    def __init__(self, model: nn.Module, bank: Bank, space: SearchSpace, tokens: Tensor) -> None:
        self.model, self.bank, self.space = model, bank, space
        bank.set_full()
        self.replay = PrefixReplay(model)
        self.reuses = prefix_replay_is_exact(model, tokens[:1])
        self.block_of = [self._block_of(unit.layers) for unit in space.units]

    def _block_of(self, layers: Sequence[str]) -> int:
        """Index of the block that holds all the layers; -1: run the whole model."""
        found = {self.replay.block_of(layer) for layer in layers} if self.reuses else set()
        return found.pop() if len(found) == 1 else -1

    def start(
        self, tokens: Tensor, base: list[BlockFormat | None], *, fixed: bool = True
    ) -> Tensor:
        """Logits of the base on a batch; fixed=False leaves layers with a fixed format alone."""
        self.tokens, self.base, self.fixed = tokens, base, fixed
        self.bank.set_formats(base, fixed=fixed)
        return self.replay.reference(tokens) if self.reuses else model_logits(self.model, tokens)

    def kl_sums(
        self,
        changes: Sequence[Change],
        divergence: Divergence,
        advance: Callable[[str], None] = lambda _: None,
    ) -> Tensor:
        """(len(changes),) float64 on the device: KL(reference, changed model) summed over tokens."""
        sums = torch.zeros(len(changes), dtype=torch.float64, device=self.tokens.device)
        by_block: dict[int, list[int]] = {}
        for index, (unit, _) in enumerate(changes):
            by_block.setdefault(self.block_of[unit], []).append(index)
        size = STACKED_LOGITS.get(self.tokens.device.type, 1 << 27) // divergence.rows.numel()
        for block, indices in sorted(by_block.items()):
            for part in split_evenly(indices, max(1, size)):
                for index, logits in zip(
                    part, self._logits(block, [changes[i] for i in part]), strict=True
                ):
                    sums[index] += divergence.sum(logits)
                    advance("")
        return sums

    def _logits(self, block: int, changes: list[Change]) -> Iterator[Tensor]:
        if block < 0:
            for change in changes:
                self._set(change)
                yield model_logits(self.model, self.tokens)
            return
        outputs = []
        for change in changes:
            self._set(change)
            outputs.append(self.replay.block_output(block))
        self.bank.set_formats(self.base, fixed=self.fixed)
        yield from self.replay.logits_after(self.tokens, block, outputs).chunk(len(changes))

    def _set(self, change: Change) -> None:
        unit, block_format = change
        changed = [*self.base[:unit], block_format, *self.base[unit + 1 :]]
        self.bank.set_formats(changed, fixed=self.fixed)


def split_evenly(jobs: Sequence[_T], size: int) -> list[list[_T]]:
    """Parts of nearly equal length, none longer than `size`."""
    n_parts = -(-len(jobs) // size)
    bounds = [len(jobs) * i // n_parts for i in range(n_parts + 1)]
    return [list(jobs[a:b]) for a, b in pairwise(bounds)]
