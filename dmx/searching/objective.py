"""Task loss and budget penalty.

    cross_entropy   mean over predictions of -log p(next token), nats
    kl              mean over positions of KL(full precision, quantized), nats
    hinge           slope * max(0, soft average - target)
    scaling         lambda * soft average

The task loss and its gradient by the logits are computed together, some rows at a time, in
float32: a vocabulary of 50,000 makes float32 copies of the logits the peak of a step's memory.

Source: dMX, arXiv 2606.04115 (cross entropy with either penalty).
"""

from typing import Any

import torch
from torch import Tensor, nn

from dmx.searching.config import SearchConfig

CHUNK_ELEMENTS = 1 << 26
"""Logits handled at once; 256 MiB of float32."""


def model_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """(batch, length) int64 -> (batch, length, vocab) in the model's dtype."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


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
        total = logits.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
        for start in range(0, logits.shape[0], rows):
            part = slice(start, start + rows)
            log_p = torch.log_softmax(logits[part].float(), -1)
            if reference is not None:
                log_q = torch.log_softmax(reference[part].float(), -1)
                q = log_q.exp()
                total += (q * log_q.sub_(log_p)).sum()
                if gradient is not None:
                    gradient[part] = log_p.exp_().sub_(q).div_(count)
                continue
            assert targets is not None
            counted = targets[part, None] >= 0
            index = targets[part, None].clamp(min=0)
            total -= torch.where(counted, log_p.gather(-1, index), 0.0).sum()
            if gradient is not None:
                p = log_p.exp_()
                p.scatter_add_(-1, index, torch.full_like(index, -1, dtype=torch.float32))
                gradient[part] = torch.where(counted, p.div_(count), 0.0)
        ctx.save_for_backward(gradient)
        return total / count

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


def kl_sum(log_q: Tensor, logits: Tensor) -> Tensor:
    """Sum over rows of KL(reference, model), without gradient; 0-d float64, nats.

    Args:
        log_q: (rows, vocab) float32 log probabilities of the reference.
        logits: (rows, vocab) of the model.
    """
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    for start in range(0, logits.shape[0], rows):
        part = slice(start, start + rows)
        log_p = torch.log_softmax(logits[part], -1, dtype=torch.float32)
        total += (log_q[part].exp() * (log_q[part] - log_p)).sum(dtype=torch.float64)
    return total


def task_loss(objective: str, logits: Tensor, tokens: Tensor, reference: Tensor | None) -> Tensor:
    """0-d float32, nats/token. `reference`: logits of the full-precision model, for kl."""
    if objective == "cross_entropy":
        return cross_entropy(logits, tokens)
    assert reference is not None
    return kl_loss(logits, reference)


def budget_penalty(config: SearchConfig, soft_average: Tensor, target: float) -> Tensor:
    """0-d; `soft_average` and `target` in the budget's unit."""
    if config.penalty == "scaling":
        return config.penalty_lambda * soft_average
    return config.slope * torch.clamp(soft_average - target, min=0)
