"""Task loss and budget penalty.

    cross_entropy   mean over predictions of -log p(next token), nats
    kl              mean over positions of KL(full precision, quantized), nats
    hinge           slope * max(0, soft average - target)
    scaling         lambda * soft average

Source: dMX, arXiv 2606.04115 (cross entropy with either penalty).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmx.numerics.errors import kl_divergence
from dmx.searching.config import SearchConfig


def model_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """(batch, length) int64 -> (batch, length, vocab) in the model's dtype."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean negative log likelihood of the next tokens in float32; 0-d, nats/token."""
    predictions = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    return F.cross_entropy(predictions, tokens[:, 1:].reshape(-1))


def task_loss(
    objective: str, logits: Tensor, tokens: Tensor, reference: Tensor | None
) -> Tensor:
    """0-d float32, nats/token. `reference`: logits of the full-precision model, for kl."""
    if objective == "cross_entropy":
        return cross_entropy(logits, tokens)
    assert reference is not None
    return kl_divergence(reference, logits)


def budget_penalty(config: SearchConfig, soft_average: Tensor, target: float) -> Tensor:
    """0-d; `soft_average` and `target` in the budget's unit."""
    if config.penalty == "scaling":
        return config.penalty_lambda * soft_average
    return config.slope * torch.clamp(soft_average - target, min=0)
