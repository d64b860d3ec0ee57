"""What the logits of a model lose when one unit changes, for many units: the disturbances of one block
share one pass through all that comes after it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from dmx.assignment.space import SearchSpace
from dmx.formats import Format
from dmx.kernels.losses import Divergence
from dmx.models.replay import PrefixReplay, prefix_replay_is_exact
from dmx.models.running import model_logits
from dmx.searching.bank import Bank

STACKED_LOGITS = {"cuda": 1 << 31, "cpu": 1 << 27}
"""Logits of disturbed models held at once, by device type."""

Change = tuple[int, Format]
"""A unit and the format that it takes instead of its own."""
_T = TypeVar("_T")


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
        blocks = {self.replay.block_of(layer) for layer in layers} if self.reuses else set()
        return blocks.pop() if len(blocks) == 1 else -1

    def start(self, tokens: Tensor, base: list[Format | None], *, fixed: bool = True) -> Tensor:
        """Logits of the base on a batch; fixed=False leaves layers with a fixed format alone."""
        self.tokens, self.base, self.fixed = tokens, base, fixed
        self.bank.set_formats(base, fixed=fixed)
        return self.replay.reference(tokens) if self.reuses else model_logits(self.model, tokens)

    def kl_sums(
        self,
        changes: Sequence[Change],
        divergence: Divergence,
        advance: Callable[[str], None] = lambda _: None,
        *,
        rows: int | None = None,
    ) -> Tensor:
        """(len(changes),) float64 on the device: KL(reference, changed model) summed over tokens.

        Args:
            rows: that run at a time, at most, those of all changes that share a pass; None: as many as their
                logits allow.
        """
        sums = torch.zeros(len(changes), dtype=torch.float64, device=self.tokens.device)
        by_block: dict[int, list[int]] = {}
        for index, (unit, _) in enumerate(changes):
            by_block.setdefault(self.block_of[unit], []).append(index)
        size = STACKED_LOGITS.get(self.tokens.device.type, 1 << 27) // divergence.rows.numel()
        if rows is not None:
            size = min(size, rows // len(self.tokens))
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
