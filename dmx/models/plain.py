"""The plain training step, in which work is counted: of runs that time it between their stages, and of benchmarks."""

import torch
from torch import Tensor, nn

from dmx.models.sharding import gather_outer


def plain_step(model: nn.Module, tokens: Tensor) -> None:
    """Forward and backward to the output of the embeddings, cross entropy in float32 as torch has it; tokens
    (batch, length) int64."""
    gather_outer(model)
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()  # type: ignore[operator]
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    targets = tokens[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)
    torch.autograd.grad(loss, embedded)
