"""Kullback-Leibler divergence between two models' predictions on the same text."""

import torch
from torch import Tensor, nn

from dmx.errors import DataError
from dmx.evaluate.perplexity import cut_windows, split_windows
from dmx.models.running import evaluating, model_logits
from dmx.models.sharding import without_gradients
from dmx.numerics.distances import token_kl_divergence


def kl_divergence(
    model: nn.Module,
    reference_model: nn.Module,
    tokens: Tensor,
    *,
    window: int = 2048,
    batch_size: int = 8,
) -> float:
    """KL(reference, model), mean over all positions of all whole windows, nats/token.

    Args:
        tokens: 1-d int64; windows as in `dmx.perplexity`.
        reference_model: another object than `model`, since an assignment is applied in place.

    Raises:
        DataError: see `dmx.evaluate.perplexity.cut_windows`; batch_size is below 1; both models are
        one object, or have different vocabularies.
    """
    if model is reference_model:
        raise DataError(
            "model and reference_model are the same object, so their divergence is 0: apply the "
            "assignment to a copy (copy.deepcopy(model)) and compare that with the original"
        )
    windows = cut_windows(model, tokens, window)
    batches = split_windows(windows, batch_size)
    device = next(model.parameters()).device
    total = 0.0
    with (
        without_gradients(model),
        without_gradients(reference_model),
        evaluating(model, reference_model),
    ):
        for batch in batches:
            logits = model_logits(model, batch.to(device))
            reference = model_logits(
                reference_model, batch.to(next(reference_model.parameters()).device)
            ).to(device)
            if logits.shape != reference.shape:
                raise DataError(
                    f"model and reference_model have vocabularies of {logits.shape[-1]} and "
                    f"{reference.shape[-1]} tokens: their divergence is not defined. Compare models "
                    "with one tokenizer."
                )
            for row, reference_row in zip(logits, reference, strict=True):
                total += float(token_kl_divergence(reference_row, row).sum(dtype=torch.float64))
    return total / windows.numel()
