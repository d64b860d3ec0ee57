"""Distances between tensors, and between two models' predictions."""

import torch
import torch.nn.functional as F
from torch import Tensor


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
