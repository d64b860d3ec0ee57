"""Distances between tensors, and between two models' predictions."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}
"""Logits handled at once by losses of rows, by device type: 256 MiB of float32 where memory is the
limit, 4 MiB where the passes over a chunk should find it in the cache."""


def sqnr_db(x: Tensor, y: Tensor) -> float:
    """20 log10(|x| / |x - y|) in decibels, accumulated in float64; inf when equal."""
    signal, noise = x.double().norm(), (x.double() - y.double()).norm()
    return float(20 * torch.log10(signal / noise)) if noise > 0 else float("inf")


def relative_error(x: Tensor, y: Tensor) -> Tensor:
    """Mean over the non-zero x of |x - y| / |x|, accumulated in float64; 0-d float32, 0 if none.

    Source: MoR, arXiv 2512.22804 (mean relative error, the acceptance metric).
    """
    wide, nonzero = x.to(torch.float32), x != 0
    error = torch.where(nonzero, (wide - y.to(torch.float32)).abs() / wide.abs(), 0.0)
    count = nonzero.sum()
    total = error.sum(dtype=torch.float64)
    return torch.where(count > 0, total / count.clamp(min=1), 0.0).to(torch.float32)


def token_kl_divergence(reference_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(reference, model) of each position in nats: (..., vocab) twice -> (...), float32."""
    reference = F.log_softmax(reference_logits.float(), -1)
    model = F.log_softmax(logits.float(), -1)
    return (reference.exp() * (reference - model)).sum(-1)


def kl_divergence(reference_logits: Tensor, logits: Tensor) -> Tensor:
    """Token mean of `token_kl_divergence`; 0-d float32, nats."""
    return token_kl_divergence(reference_logits, logits).mean()


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    """Rows some at a time: float32 copies of all logits would be the peak of a step's memory."""
    elements = CHUNK_ELEMENTS.get(logits.device.type, CHUNK_ELEMENTS["cuda"])
    rows = max(1, elements // max(1, logits.shape[-1]))
    return (slice(i, i + rows) for i in range(0, logits.shape[0], rows))


def cross_entropy_rows(
    logits: Tensor, targets: Tensor, *, gradient: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """-log p(target) of each row, nats.

    Args:
        logits: (rows, vocab), fp32, bf16 or fp16; computed in float32.
        targets: (rows,) int64; a negative one marks a row that does not count: loss and gradient 0.
        gradient: receives `factor` times the loss's gradient by the logits; like `logits`.

    Returns:
        (rows,) float32.
    """
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for part in _row_chunks(logits):
        log_p = torch.log_softmax(logits[part], -1, dtype=torch.float32)
        counted = targets[part, None] >= 0
        index = targets[part, None].clamp(min=0)
        losses[part] = -torch.where(counted, log_p.gather(-1, index), 0.0).squeeze(-1)
        if gradient is not None:
            p = log_p.exp_()
            p.scatter_add_(-1, index, torch.full_like(index, -1, dtype=torch.float32))
            gradient[part] = torch.where(counted, p.mul_(factor), 0.0)
    return losses


def kl_rows(
    reference: Tensor,
    logits: Tensor,
    *,
    gradient: Tensor | None = None,
    factor: float = 1.0,
    normalized: bool = False,
) -> Tensor:
    """KL(reference, model) of each row, nats; where the reference's probability is 0, the term is.

    Args:
        reference, logits: (rows, vocab) logits, fp32, bf16 or fp16; computed in float32.
        gradient: receives `factor` times the gradient by `logits`; like `logits`.
        normalized: `reference` already holds log probabilities, which spares computing them again.

    Returns:
        (rows,) float32.
    """
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for part in _row_chunks(logits):
        log_p = torch.log_softmax(logits[part], -1, dtype=torch.float32)
        log_q = reference[part].float()
        if not normalized:
            log_q = torch.log_softmax(log_q, -1)
        q = log_q.exp()
        terms = (log_q - log_p).mul_(q)
        losses[part] = terms.masked_fill_(q == 0, 0.0).sum(-1)
        if gradient is not None:
            gradient[part] = log_p.exp_().sub_(q).mul_(factor)
    return losses


def add_fisher(grad: Tensor, exact: Tensor, quantized: Tensor, sums: Tensor) -> None:
    """Adds sum of grad**2 * (quantized - exact)**2 to `sums`, spread over it in any way.

    Args:
        grad, exact, quantized: one shape; computed in float32.
        sums: (n,) float32; n > 0. Its own sum is the result.
    """
    error = quantized.float() - exact.float()
    sums[0] += torch.dot(grad.float().square().flatten(), error.square_().flatten())
