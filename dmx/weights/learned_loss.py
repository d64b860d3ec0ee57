"""KL(full precision, quantized), token mean, without the logits of a whole batch.

The head of a model stays as it is while weights learn, so that its product, the loss of its logits and the
gradient by its input can be formed for a few rows at a time, in one pass:

    y = h W^T,   L = mean over rows of KL(y_full, y),   dL/dh = dL/dy W

Of the full-precision model only the input of its head is needed, which is small enough to be kept for every
batch: a batch that comes again costs the product of the head and no pass through the model.

A model whose logits are something else than the product of its head (scaled or capped ones, or a head that is
quantized itself) goes through whole logits.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmx.kernels import ops
from dmx.kernels.losses import kl_loss
from dmx.models.running import model_logits
from dmx.models.sharding import gather_outer

CHUNK_BYTES = 1 << 28
"""Of the logits that exist at a time; twice, of both models."""


class _HeadKL(torch.autograd.Function):
    """Mean over rows of KL(reference W^T, hidden W^T).

    Args:
        hidden, reference: (rows, width). weight: (vocab, width), without gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, reference: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        rows, chunk = hidden.shape[0], max(1, CHUNK_BYTES // (len(weight) * hidden.element_size()))
        needs_gradient = ctx.needs_input_grad[0]
        by_hidden = torch.empty_like(hidden) if needs_gradient else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            logits = F.linear(hidden[part], weight, bias)
            full = F.linear(reference[part], weight, bias)
            # The gradient takes the place of the logits.
            gradient = logits if needs_gradient else None
            total += ops.kl_rows(full, logits, gradient=gradient, factor=1 / rows).sum()
            if by_hidden is not None:
                torch.mm(logits, weight, out=by_hidden[part])
        ctx.save_for_backward(by_hidden)
        return total / rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (by_hidden,) = ctx.saved_tensors
        return by_hidden * grads[0].to(by_hidden.dtype), None, None, None


class Objective(Protocol):
    """The loss of the model as it is, against what the full-precision model gave."""

    def reference(self, tokens: Tensor) -> Tensor:
        """What the loss needs of the model as it is now, which is in full precision; no gradient."""
        ...

    def loss(self, tokens: Tensor, reference: Tensor) -> Tensor:
        """0-d float32, nats/token; tokens (rows, length)."""
        ...


class LogitsKL:
    """For any model: whole logits."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def reference(self, tokens: Tensor) -> Tensor:
        return model_logits(self.model, tokens)

    def loss(self, tokens: Tensor, reference: Tensor) -> Tensor:
        return kl_loss(model_logits(self.model, tokens), reference)


class HeadKL:
    """For models whose logits are the product of a head that is not quantized; `of` finds out."""

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        self.model, self.head = model, head

    def _hidden(self, tokens: Tensor) -> Tensor:
        with _without(self.head), warnings.catch_warnings():
            # It fears that somebody writes into what the model returns.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            return model_logits(self.model, tokens)

    @torch.no_grad()
    def reference(self, tokens: Tensor) -> Tensor:
        return self._hidden(tokens)

    def loss(self, tokens: Tensor, reference: Tensor) -> Tensor:
        hidden = self._hidden(tokens).flatten(0, -2)
        gather_outer(self.model)
        weight, bias = self.head.weight, self.head.bias
        result: Tensor = _HeadKL.apply(hidden, reference.flatten(0, -2), weight, bias)
        return result

    @torch.no_grad()
    def is_exact(self, tokens: Tensor) -> bool:
        """Whether the logits are the head's product, bit for bit."""
        hidden = self._hidden(tokens)
        logits = model_logits(self.model, tokens)
        gather_outer(self.model)
        same_rows = hidden.shape[:-1] == logits.shape[:-1]
        return same_rows and torch.equal(self.head(hidden), logits)


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


def objective_of(model: nn.Module, tokens: Tensor, layers: set[str]) -> Objective:
    """The cheaper form where it is exact.

    Args:
        model: in full precision. tokens: (rows, length) to find out on. layers: that are quantized.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    names = {name for name, module in model.named_modules() if module is head}
    if type(head) is nn.Linear and not names & layers:
        candidate = HeadKL(model, head)
        if candidate.is_exact(tokens[:1]):
            return candidate
    return LogitsKL(model)
