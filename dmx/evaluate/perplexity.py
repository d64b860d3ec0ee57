"""Perplexity over non-overlapping windows.

    exp( mean over all predictions of -log p(next token) )

The text is one stream of tokens, cut into windows, which start with BOS where the tokenizer begins a text so
(`dmx.data.encode`); what is left at the end is dropped. A window of n tokens makes n - 1 predictions, its
first token being context only.
Logits are float32. The per-window means serve paired comparisons of two models.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmx.data import text_tokens, windows_of
from dmx.data.batches import check_fits_model
from dmx.errors import DataError
from dmx.kernels import ops
from dmx.models.running import evaluating, model_logits
from dmx.models.sharding import is_sharded, without_gradients
from dmx.processes import Processes
from dmx.progress import progress


def cut_windows(model: nn.Module, tokens: Tensor, window: int) -> Tensor:
    """(n,) int64 -> (n_windows, window).

    Raises:
        DataError: not 1-d int64, shorter than one window, ids beyond the vocabulary, a window
            beyond the model's positions.
    """
    if tokens.ndim != 1 or tokens.dtype != torch.int64:
        raise DataError(
            f"tokens must be 1-d int64, got {tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    if window < 2:
        raise DataError(f"window={window} predicts nothing; choose at least 2")
    if len(tokens) < max(1, text_tokens(tokens, window)):
        raise DataError(
            f"the evaluation text has {len(tokens)} tokens, fewer than one window of {window}. "
            "Choose a longer text or a smaller window."
        )
    check_fits_model(model, tokens, window)
    return windows_of(tokens, window)


def split_windows(windows: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """(n_windows, window) in batches of `batch_size` windows, the last one perhaps smaller.

    Raises:
        DataError: batch_size is below 1.
    """
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size} measures nothing; choose at least 1")
    return windows.split(batch_size)


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """(n, vocab), (n,) int64 -> 0-d float32, nats/token."""
    if logits.device.type == "cpu":
        # The kernel needs no float32 copy of the logits, whose making takes longer than the loss.
        return ops.cross_entropy_rows(logits, targets).mean()
    return F.cross_entropy(logits.float(), targets)


def window_losses(
    model: nn.Module,
    tokens: Tensor,
    *,
    window: int = 2048,
    batch_size: int = 8,
    label: str = "",
    processes: Processes | None = None,
) -> Tensor:
    """Mean negative log likelihood of each window; (n_windows,) float64 on the CPU, nats/token.

    Args:
        processes: share the batches, which stay as they are, and all get all losses; None: this one alone.
    """
    windows = cut_windows(model, tokens, window)
    device = next(model.parameters()).device
    losses = torch.zeros(len(windows), dtype=torch.float64, device=device)
    parts = list(zip(split_windows(windows, batch_size), losses.split(batch_size), strict=True))
    processes = processes or Processes.alone()
    own = processes.own_part(parts)
    if is_sharded(model):  # passes are common, and what one adds to be there counts for nothing
        batch, found = parts[0]
        idle = -(-len(parts) // processes.size) - len(own)
        own = [*own, *[(batch, torch.zeros_like(found))] * idle]
    with (
        without_gradients(model),
        evaluating(model),
        progress(f"evaluate {label}".strip(), len(own)) as advance,
    ):
        for batch, found in own:
            batch = batch.to(device)
            logits = model_logits(model, batch)
            # Row by row: float32 logits of a whole batch would be the peak of the memory.
            rows = [_mean_loss(row[:-1], ids[1:]) for row, ids in zip(logits, batch, strict=True)]
            found.copy_(torch.stack(rows))
            del logits
            advance("")
    return processes.total(losses).cpu()


def perplexity_of(nll: float) -> float:
    """exp of a mean loss in nats/token; inf beyond the largest float, NaN for NaN."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def perplexity(
    model: nn.Module, tokens: Tensor, *, window: int = 2048, batch_size: int = 8
) -> float:
    """Perplexity of a model on a stream of tokens; inf beyond the largest float.

    Args:
        tokens: 1-d int64. Of `dmx.data.encode`, so that windows start as the tokenizer starts a text; plain
            ids are cut as they are.
        window: tokens a window, >= 2; at most the model's positions.
        batch_size: windows at once; changes memory and time, not the result beyond rounding.

    Raises:
        DataError: see `cut_windows`; or batch_size is below 1.
    """
    losses = window_losses(model, tokens, window=window, batch_size=batch_size)
    return perplexity_of(float(losses.mean()))
