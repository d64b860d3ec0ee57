"""Gradient checkpointing: blocks run again in the backward pass instead of keeping what they computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from dmx.errors import ModelError
from dmx.models.streaming import stream_of


@contextmanager
def checkpointing(model: nn.Module, on: bool, settings: str) -> Iterator[None]:
    """Gradient checkpointing of a transformers model inside, everything as it was after.

    Args:
        settings: that asked for it, for the message: `search`.

    A model that is held block by block checkpoints whether that is asked for or not.
    `gradient_checkpointing_enable` is not used: it leaves a hook on the embeddings behind.

    Raises:
        ModelError: the model has no blocks that checkpoint.
    """
    stream = stream_of(model)
    if not on and stream is None:
        yield
        return
    blocks = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    if not blocks:
        asked = f"{settings}.gradient_checkpointing=true" if on else "memory=block"
        raise ModelError(
            f"{asked}: {type(model).__name__} does not support gradient checkpointing. "
            f"{'Set it to false.' if on else 'Use memory=all.'}"
        )
    again = {} if stream is None else {id(b): i for i, b in enumerate(stream.blocks)}
    names = ("gradient_checkpointing", "_gradient_checkpointing_func", "training")
    before = [{k: m.__dict__[k] for k in names if k in m.__dict__} for m in blocks]
    for block in blocks:
        run = partial(checkpoint, use_reentrant=False)
        if stream is not None and id(block) in again:
            run = partial(stream.checkpointed, again[id(block)])
        # The input of the first block needs no gradient, what is searched or learned inside it does:
        # only the non-reentrant form sees that. Blocks checkpoint when they are in training mode; their
        # children stay in eval mode, so that dropout stays off.
        block.__dict__ |= {
            "gradient_checkpointing": True,
            "_gradient_checkpointing_func": run,
            "training": True,
        }
    try:
        yield
    finally:
        for block, values in zip(blocks, before, strict=True):
            for name in names:
                block.__dict__.pop(name, None)
            block.__dict__.update(values)
