"""What a loss needs of the unquantized model, kept for batches that come again.

Logits are large. Where they are the product of a head that is not quantized,

    y = h W^T

its input h is kept in their place, in the model's dtype, and gives the same logits bit for bit; a batch that comes
again then costs the product of the head and no pass through the model.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmx.models.graph import StepGraphs
from dmx.models.memory import MicroBatch, ran_out, release, room_to_keep
from dmx.models.running import model_logits
from dmx.models.sharding import gather_outer, is_sharded
from dmx.processes import Processes

_T = TypeVar("_T")


class Output(Protocol):
    """A form in which the model's output is kept, and logits from it."""

    def keep(self, tokens: Tensor) -> Tensor:
        """Of the model as it is now, (rows, length) -> (rows, length, ...); no gradient."""
        ...

    def logits(self, kept: Tensor) -> Tensor:
        """(rows, length, ...) -> (rows, length, vocab), those of the pass that gave it; no gradient."""
        ...


class WholeLogits:
    """For any model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def keep(self, tokens: Tensor) -> Tensor:
        """The logits."""
        return model_logits(self.model, tokens)

    def logits(self, kept: Tensor) -> Tensor:
        """They are."""
        return kept


class HeadInput:
    """For models whose logits are the product of a head that is not quantized; `output_of` finds out."""

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        self.model, self.head = model, head

    def hidden(self, tokens: Tensor) -> Tensor:
        """Input of the head, (rows, length, width), with its gradient."""
        with _without(self.head), warnings.catch_warnings():
            # It fears that somebody writes into what the model returns.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            return model_logits(self.model, tokens)

    @torch.no_grad()
    def keep(self, tokens: Tensor) -> Tensor:
        """Input of the head."""
        return self.hidden(tokens)

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Of the head, whole."""
        gather_outer(self.model)
        return self.head.weight, self.head.bias

    @torch.no_grad()
    def logits(self, kept: Tensor) -> Tensor:
        """Product of the head."""
        return F.linear(kept, *self.weight_and_bias())

    @torch.no_grad()
    def is_exact(self, tokens: Tensor) -> bool:
        """Whether the logits are the head's product, bit for bit."""
        hidden = self.hidden(tokens)
        logits = model_logits(self.model, tokens)
        same_rows = hidden.shape[:-1] == logits.shape[:-1]
        return same_rows and _are_equal(self.logits(hidden), logits)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@contextmanager
def _without(head: nn.Module) -> Iterator[None]:
    """The head gives its input, inside."""
    own = head.__dict__.get("forward")  # as accelerate's hooks give it
    head.forward = lambda x: x
    try:
        yield
    finally:
        del head.forward
        if own is not None:
            head.forward = own


def output_of(model: nn.Module, tokens: Tensor, layers: set[str]) -> HeadInput | WholeLogits:
    """The smaller form where it is exact.

    Args:
        model: in full precision. tokens: (rows, length) to find out on. layers: that are quantized.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    names = {name for name, module in model.named_modules() if module is head}
    if type(head) is nn.Linear and not names & layers:
        candidate = HeadInput(model, head)
        if candidate.is_exact(tokens[:1]):
            return candidate
    return WholeLogits(model)


class KeptReferences:
    """Tensors of one output each, by the batch that they are of.

    Args:
        asked: auto | on | off. auto: where batches come again and memory has room for all of them.
        batches: how many there are.
    """

    def __init__(self, asked: str, batches: int) -> None:
        self.asked, self.batches = asked, batches
        self.keeps: bool | None = None
        """None: not decided."""
        self._kept: dict[int, Tensor] = {}

    def may_keep(self, steps: int) -> bool:
        """Whether it would pay, or is asked for. steps: that are to come, a batch each."""
        return self.asked == "on" or (self.asked == "auto" and steps > self.batches)

    def decide(
        self, size: int, steps: int, device: torch.device, together: Processes | None = None
    ) -> None:
        """Whether to keep.

        Args:
            size: bytes of one. steps: that are to come.
            together: processes whose passes are common, so that they decide as one; None: each by itself.
        """
        keeps = self.may_keep(steps)
        if self.asked == "auto":
            keeps = keeps and size * self.batches <= room_to_keep(device)
            # Of common passes all processes run as many.
            keeps = keeps if together is None else together.agree(lambda: keeps)
        self.keeps = keeps

    def of(self, index: int, make: Callable[[], Tensor], *, is_overwritten: bool) -> Tensor:
        """Of a batch: as it is kept, or made now.

        Args:
            is_overwritten: what `make` gave, by its next call.
        """
        kept = self._kept.get(index)
        if kept is None:
            kept = make()
            if self.keeps:
                kept = self._kept[index] = kept.clone() if is_overwritten else kept
        return kept

    def forget(self) -> None:
        """All of it, where passes become others: of fewer rows at a time."""
        self._kept = {}

    def give_up(self, error: BaseException) -> bool:
        """Whether memory ran out and there was something that auto had kept; it is let go of, and nothing is kept
        from here on."""
        gives = self.asked == "auto" and bool(self._kept) and ran_out(error)
        if gives:
            self.keeps, self._kept = False, {}
        return gives


def within_memory(
    use: Callable[[], _T],
    rows: int,
    model: nn.Module,
    micro: MicroBatch,
    references: KeptReferences,
    graphs: StepGraphs,
) -> _T:
    """What `use` gives, which runs so many rows: where the memory does not do, first without what auto had kept, then of
    fewer rows at a time, as `micro` has it. It begins again each time.

    Args:
        graphs: of the steps that read what is kept.
    """

    def without_references() -> _T:
        try:
            return use()
        except (MemoryError, RuntimeError) as error:
            # Of common passes one process alone cannot begin again.
            if is_sharded(model) or not references.give_up(error):
                raise
        # Here, where nothing holds what the pass that failed had allocated.
        graphs.forget()
        release()
        return use()

    return micro.run(without_references, rows)
