"""KL(full precision, quantized), token mean, without the logits of a whole batch.

The head of a model stays as it is while weights learn, so that its product, the loss of its logits and the
gradient by its input can be formed for a few rows at a time, in one pass:

    y = h W^T,   L = mean over rows of KL(y_full, y),   dL/dh = dL/dy W

Of the full-precision model only the input of its head is needed, which is small enough to be kept for every
batch: a batch that comes again costs the product of the head and no pass through the model.

A model whose logits are something else than the product of its head (scaled or capped ones, or a head that is
quantized itself) goes through whole logits.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmx.kernels import ops
from dmx.kernels.losses import kl_loss
from dmx.models.reference import HeadInput, WholeLogits, output_of
from dmx.models.running import model_logits

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

    def __init__(self, output: WholeLogits) -> None:
        self.output = output

    def reference(self, tokens: Tensor) -> Tensor:
        return self.output.keep(tokens)

    def loss(self, tokens: Tensor, reference: Tensor) -> Tensor:
        return kl_loss(model_logits(self.output.model, tokens), reference)


class HeadKL:
    """For models whose logits are the product of a head that is not quantized."""

    def __init__(self, output: HeadInput) -> None:
        self.output = output

    def reference(self, tokens: Tensor) -> Tensor:
        return self.output.keep(tokens)

    def loss(self, tokens: Tensor, reference: Tensor) -> Tensor:
        hidden = self.output.hidden(tokens).flatten(0, -2)
        weight, bias = self.output.weight_and_bias()
        result: Tensor = _HeadKL.apply(hidden, reference.flatten(0, -2), weight, bias)
        return result


def objective_of(model: nn.Module, tokens: Tensor, layers: set[str]) -> Objective:
    """The cheaper form where it is exact; arguments as of `output_of`."""
    output = output_of(model, tokens, layers)
    return HeadKL(output) if isinstance(output, HeadInput) else LogitsKL(output)
