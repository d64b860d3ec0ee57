"""Text to tokens, tokens to windows in batches, and checks of both.

Text --encode--> tokens (1-d int64) --token_batches--> (batch, window)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmx.data.texts import Text
from dmx.errors import DataError


def encode(tokenizer: Any, text: Text | str) -> Tensor:
    """Token ids of a text, without special tokens.

    Args:
        tokenizer: a transformers tokenizer.
        text: any length; the "longer than the model" warning is not for windows, so it is off.

    Returns:
        (tokens,) int64.
    """
    string = text.text if isinstance(text, Text) else text
    ids = tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise DataError unless tokens are 1-d int64 ids in [0, vocab_size)."""
    if tokens.dim() != 1 or tokens.dtype != torch.int64:
        raise DataError(
            f"tokens must be 1-d int64, got shape {tuple(tokens.shape)} {tokens.dtype}."
        )
    if tokens.numel() == 0:
        raise DataError("tokens are empty: the text gave no tokens.")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise DataError(
            f"token id {wrong} is outside the model's vocabulary of {vocab_size}. "
            "Encode the text with the tokenizer of this model."
        )


def check_window(window: int, max_positions: int | None) -> None:
    """Raise DataError for a window the model has no positions for (None: no limit known)."""
    if window < 2:
        raise DataError(f"window={window} must be at least 2: one token to predict the next.")
    if max_positions is not None and window > max_positions:
        raise DataError(
            f"window={window} is longer than the model's {max_positions} positions. "
            f"Use a window of at most {max_positions}."
        )


def token_batches(
    tokens: Tensor, window: int, batch_size: int, *, seed: int | None, n_batches: int | None = None
) -> list[Tensor]:
    """Non-overlapping windows in shuffled order, in batches; what does not fill one is dropped.

    Args:
        tokens: (tokens,) int64.
        window: tokens a window.
        batch_size: windows a batch.
        seed: order of the windows; None keeps the text's order.
        n_batches: the first so many batches; None = all that the text fills.

    Returns:
        batches of (batch_size, window) int64, each with its own memory.

    Raises:
        DataError: the text is too short for one batch or for n_batches.
    """
    for name, value in (("window", window), ("batch_size", batch_size), ("n_batches", n_batches)):
        if value is not None and value < 1:
            raise DataError(f"{name}={value} must be at least 1.")
    if tokens.dim() != 1:
        raise DataError(f"tokens must be 1-d, got shape {tuple(tokens.shape)}.")
    count = tokens.numel() // window
    if count < 1:
        raise DataError(
            f"the text has {tokens.numel()} tokens, less than one window of {window}. "
            "Use a longer text or a smaller window."
        )
    available = count // batch_size
    if available < (n_batches or 1):
        raise DataError(
            f"the text fills {count} windows of {window} tokens: {available} batches of "
            f"{batch_size}, {n_batches or 1} needed. Use a longer text, a smaller window or batch "
            "size, or fewer batches."
        )
    windows = tokens[: count * window].view(count, window)
    order = torch.arange(count)
    if seed is not None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    chosen = order[: (n_batches or available) * batch_size]
    return [windows[index].clone() for index in chosen.split(batch_size)]
