"""Gradient checkpointing: blocks run again in the backward pass instead of keeping what they computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dmx.errors import ModelError
from dmx.models.streaming import stream_of

# Nothing in a block is drawn, so its second run needs no state of random numbers, which nobody may read while a CUDA
# graph is captured.
_checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def _in_eval_mode(
    block: nn.Module, keep: Callable[..., Any], function: Callable[..., Any], *args: Any
) -> Any:
    """`keep(function, *args)`, where `function`, the forward of the block, sees it in eval mode both times: some call
    dropout themselves."""

    def run(*given: Any) -> Any:
        before, block.__dict__["training"] = block.__dict__["training"], False
        try:
            return function(*given)
        finally:
            block.__dict__["training"] = before

    return keep(run, *args)


def _eval_without_gradients(block: nn.Module, _: Any) -> None:
    """Then it runs as it is, once, without the function that it checkpoints by."""
    if not torch.is_grad_enabled():
        block.__dict__["training"] = False


def _train_again(block: nn.Module, *_: Any) -> None:
    block.__dict__["training"] = True


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """Modules that checkpoint. In transformers these are layers; what holds layers says so, too, and would do nothing in
    training mode but what it drops out or skips then, outside any of them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    layers = {m for m in found if isinstance(m, GradientCheckpointingLayer)}
    return [m for m in found if m in layers or layers.isdisjoint(m.modules())]


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
    blocks = _blocks_of(model)
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
        keep: Callable[..., Any] = _checkpoint
        if stream is not None and id(block) in again:
            keep = partial(stream.checkpointed, again[id(block)])
        # The input of the first block needs no gradient, what is searched or learned inside it does:
        # only the non-reentrant form sees that. Blocks checkpoint when they are in training mode; their
        # children stay in eval mode, so that dropout stays off.
        block.__dict__ |= {
            "gradient_checkpointing": True,
            "_gradient_checkpointing_func": partial(_in_eval_mode, block, keep),
            "training": True,
        }
    hooks = [block.register_forward_pre_hook(_eval_without_gradients) for block in blocks]
    hooks += [block.register_forward_hook(_train_again, always_call=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for block, values in zip(blocks, before, strict=True):
            for name in names:
                block.__dict__.pop(name, None)
            block.__dict__.update(values)
