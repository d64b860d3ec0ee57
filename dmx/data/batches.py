"""Calibration batches: checked once, cycled, reshuffled each pass; a function of the step alone."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dmx.data import check_tokens, check_window
from dmx.errors import DataError
from dmx.files import sha256


def list_batches(batches: Iterable[Tensor], model: nn.Module) -> list[Tensor]:
    """The batches as a list (a generator is consumed once), checked against the model.

    Raises:
        DataError: no batch, not (batch, length) of int64, unequal shapes, token ids beyond the
            vocabulary, a length beyond the model's positions.
    """
    listed = list(batches)
    if not listed:
        raise DataError("batches is empty: give at least one int64 tensor of shape (batch, length)")
    for i, batch in enumerate(listed):
        if not isinstance(batch, Tensor) or batch.dtype != torch.int64 or batch.ndim != 2:
            found = (
                f"{batch.dtype} {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch)
            )
            raise DataError(
                f"batches[{i}] must be int64 token ids of shape (batch, length), got {found}"
            )
        if batch.shape != listed[0].shape:
            raise DataError(
                f"batches[{i}] has shape {tuple(batch.shape)}, batches[0] {tuple(listed[0].shape)}: "
                "all must be equal. Drop the last one, or cut the text to whole windows."
            )
    rows, length = listed[0].shape
    if rows == 0 or length < 2:
        raise DataError(f"batches of shape {(rows, length)} predict nothing: use length >= 2")
    check_fits_model(model, torch.cat([b.flatten() for b in listed]), length)
    return listed


def check_fits_model(model: nn.Module, tokens: Tensor, window: int) -> None:
    """Raise DataError for ids beyond the vocabulary or a window beyond the positions of a model;
    a model whose config states neither is not checked."""
    config: Any = getattr(model, "config", None)
    # Models that also see or hear keep the language model's sizes in a config of its own.
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab_size = getattr(config, "vocab_size", None)
    if vocab_size is not None:
        check_tokens(tokens, vocab_size)
    check_window(window, getattr(config, "max_position_embeddings", None))


def batches_sha256(batches: Sequence[Tensor]) -> str:
    """Hash of the token ids and their shape."""
    stacked = torch.stack(list(batches)).cpu()
    return sha256(str(tuple(stacked.shape)).encode() + stacked.numpy().tobytes())


def batch_order(n_batches: int, seed: int, start: int = 0) -> Iterator[int]:
    """Batch index of every step from `start` on: passes over all batches, each in a new order."""
    step = start
    while True:
        order = np.random.default_rng([seed, step // n_batches]).permutation(n_batches)
        yield from order[step % n_batches :].tolist()
        step += n_batches - step % n_batches
