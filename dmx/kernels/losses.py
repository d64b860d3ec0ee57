"""Losses of whole batches of logits, with their gradient, on the row kernels of `dmx.kernels.ops`.

    cross_entropy   mean over predictions of -log p(next token), nats
    kl_loss         mean over positions of KL(full precision, quantized), nats

A loss and its gradient by the logits are computed together, in float32 but without float32 copies of
all logits, which at a vocabulary of 50,000 would be the peak of a step's memory.
"""

from typing import Any

import torch
from torch import Tensor

from dmx.kernels import ops


class _RowLoss(torch.autograd.Function):
    """Sum over rows of cross entropy or KL, divided by `count`.

    Args:
        logits: (rows, vocab). targets: (rows,) int64, -1 for a row that does not count; or None.
        reference: (rows, vocab) logits of the full-precision model; or None.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor | None, reference: Tensor | None, count: int
    ) -> Tensor:
        gradient = None
        if ctx.needs_input_grad[0]:
            gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        if reference is not None:
            losses = ops.kl_rows(reference, logits, gradient=gradient, factor=1 / count)
        else:
            assert targets is not None
            losses = ops.cross_entropy_rows(logits, targets, gradient=gradient, factor=1 / count)
        ctx.save_for_backward(gradient)
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean negative log likelihood of the next tokens; 0-d float32, nats/token.

    Args:
        logits: (batch, length, vocab). tokens: (batch, length) int64.
    """
    # The last position predicts nothing; marking it is cheaper than cutting it off, which copies.
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-1)
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    loss: Tensor = _RowLoss.apply(logits.flatten(0, 1), targets.flatten(), None, count)
    return loss


def kl_loss(logits: Tensor, reference: Tensor) -> Tensor:
    """Mean over positions of KL(reference, model); 0-d float32, nats/token."""
    rows = logits.flatten(0, -2)
    loss: Tensor = _RowLoss.apply(rows, None, reference.flatten(0, -2), rows.shape[0])
    return loss


class Divergence:
    """Sums over rows of KL(reference, model) to one reference, without gradient.

    Args:
        reference: (..., vocab) logits of the full-precision model.
    """

    def __init__(self, reference: Tensor) -> None:
        rows = reference.flatten(0, -2)
        self.normalized = ops.choose_backend(rows.device) != "triton"
        if self.normalized:  # once, and not again for every model
            rows = torch.log_softmax(rows, -1, dtype=torch.float32)
        self.rows = rows

    def sum(self, logits: Tensor) -> Tensor:
        """0-d float64, nats; `logits` like the reference."""
        rows = ops.kl_rows(self.rows, logits.flatten(0, -2), normalized=self.normalized)
        return rows.sum(dtype=torch.float64)
