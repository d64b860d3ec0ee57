"""Task loss and budget penalty.

    cross_entropy   mean over predictions of -log p(next token), nats
    kl              mean over positions of KL(full precision, quantized), nats
    hinge           slope * max(0, soft average - target)
    scaling         lambda * soft average
    exact           0: the average is held by the steps themselves (descent)

Source: dMX, arXiv 2606.04115 (cross entropy with either penalty).
"""

import torch
from torch import Tensor

from dmx.kernels.losses import cross_entropy, kl_loss
from dmx.searching.config import DescentConfig


def task_loss(objective: str, logits: Tensor, tokens: Tensor, reference: Tensor | None) -> Tensor:
    """0-d float32, nats/token. `reference`: logits of the full-precision model, for kl."""
    if objective == "cross_entropy":
        return cross_entropy(logits, tokens)
    assert reference is not None
    return kl_loss(logits, reference)


def budget_penalty(config: DescentConfig, soft_average: Tensor, target: float) -> Tensor:
    """0-d; `soft_average` and `target` in the budget's unit."""
    if config.penalty == "scaling":
        return config.penalty_lambda * soft_average
    if config.penalty == "exact":
        return torch.zeros_like(soft_average)
    return config.slope * torch.clamp(soft_average - target, min=0)
