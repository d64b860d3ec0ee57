"""Text to tokens, tokens to windows in batches, and checks of both.

Text --encode--> tokens (1-d int64) --token_batches--> (batch, window)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmx.data.config import BOS
from dmx.data.kept import kept_ids
from dmx.data.texts import Text
from dmx.errors import DataError


class Tokens(Tensor):
    """(tokens,) int64 ids of a text, which know what each window of them starts with. A slice knows it, too;
    what else is made of them is a plain tensor."""

    start: tuple[int, ...] = ()
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        return starting_with(part, self.start) if isinstance(key, slice) else part


def starting_with(tokens: Tensor, start: tuple[int, ...]) -> Tokens:
    """The same ids, whose windows start with `start`."""
    made = tokens.as_subclass(Tokens)
    made.start = start
    return made


def window_start(tokenizer: Any, bos: str = "auto") -> tuple[int, ...]:
    """Token ids that every window of a text starts with.

    Args:
        tokenizer: a transformers tokenizer.
        bos: auto: what the tokenizer itself puts before a text, for most none or BOS. yes: BOS, also where
            it does not. no: nothing.

    Raises:
        DataError: `yes`, and the tokenizer has no BOS.
    """
    if bos not in BOS:
        raise DataError(f"data.bos={bos!r} is unknown. Known: {', '.join(BOS)}.")
    if bos == "no":
        return ()
    habit = _before_a_text(tokenizer)
    if bos == "auto" or habit:
        return habit
    if getattr(tokenizer, "bos_token_id", None) is None:
        raise DataError(
            f"data.bos=yes: the tokenizer ({type(tokenizer).__name__}) has no BOS token. Use data.bos=auto."
        )
    return (int(tokenizer.bos_token_id),)


def _before_a_text(tokenizer: Any) -> tuple[int, ...]:
    own, plain = (
        list(tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"])
        for special in (True, False)
    )
    for before in range(len(own) - len(plain) + 1):
        if own[before : before + len(plain)] == plain:
            return tuple(own[:before])
    return ()


def encode(tokenizer: Any, text: Text | str, bos: str = "auto") -> Tokens:
    """Token ids of a text, without special tokens; those that its windows start with are kept beside them.

    Ids of a long text are kept on disk for the next process (`dmx.data.kept`).

    Args:
        tokenizer: a transformers tokenizer.
        text: any length; the "longer than the model" warning is not for windows, so it is off.
        bos: as of `window_start`.

    Returns:
        (tokens,) int64.
    """
    string = text.text if isinstance(text, Text) else text

    def made() -> Tensor:
        ids = tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)

    start = window_start(tokenizer, bos)  # before all else: what is refused is refused at once
    return starting_with(kept_ids(tokenizer, string, made), start)


def text_tokens(tokens: Tensor, window: int) -> int:
    """How many tokens of the text a window holds: all but those that it starts with."""
    return window - len(tokens.start if isinstance(tokens, Tokens) else ())


def windows_of(tokens: Tensor, window: int) -> Tensor:
    """Non-overlapping windows in the text's order, each with its start; what does not fill one is dropped.

    Args:
        tokens: (tokens,) int64; `Tokens` of a tokenizer that begins with BOS give windows that do.
        window: tokens a window, the start included.

    Returns:
        (windows, window) int64.

    Raises:
        DataError: a window that its start fills.
    """
    own = text_tokens(tokens, window)
    if own < 1:
        raise DataError(
            f"window={window} has no room for text behind the {window - own} tokens that it starts with "
            "(data.bos). Use a larger window."
        )
    count = tokens.numel() // own
    rows = tokens[: count * own].reshape(count, own).as_subclass(Tensor)
    if own == window:
        return rows
    assert isinstance(tokens, Tokens)
    start = torch.tensor(tokens.start, dtype=torch.int64, device=tokens.device)
    return torch.cat([start.expand(count, -1), rows], 1)


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


def check_window(window: int, max_positions: int | None, setting: str = "window") -> None:
    """Raise DataError for a window the model has no positions for (None: no limit known).

    Args:
        setting: what the message calls it.
    """
    if window < 2:
        raise DataError(f"{setting}={window} must be at least 2: one token to predict the next.")
    if max_positions is not None and window > max_positions:
        raise DataError(
            f"{setting}={window} is longer than the model's {max_positions} positions. "
            f"Use a window of at most {max_positions}."
        )


def token_batches(
    tokens: Tensor, window: int, batch_size: int, *, seed: int | None, n_batches: int | None = None
) -> list[Tensor]:
    """Non-overlapping windows in shuffled order, in batches; what does not fill one is dropped.

    Args:
        tokens: (tokens,) int64, as of `windows_of`.
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
    windows = windows_of(tokens, window)
    count = len(windows)
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
    order = torch.arange(count)
    if seed is not None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    chosen = order[: (n_batches or available) * batch_size]
    return [windows[index].clone() for index in chosen.split(batch_size)]
