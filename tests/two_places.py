"""A second device on a CPU: what lies in the memory of a streamed model's blocks takes part in no product.

PyTorch refuses an operation on tensors of two devices; here the copies of a block lie in the same memory as the block, and an
operation on a tensor of the block itself beside another one is refused in its place.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmx.models.streaming import BlockStream

_MOVES = ("aten::copy_", "aten::_to_copy", "aten::_has_compatible_shallow_copy_type")


class TwoPlaces(TorchDispatchMode):
    """Refuses operations that mix the blocks' own memory with other tensors; counts blocks that are on the device."""

    def __init__(self, stream: BlockStream) -> None:
        super().__init__()
        self.stream = stream
        self.homes = {
            p.data.untyped_storage().data_ptr(): index
            for index, block in enumerate(stream.blocks)
            for p in stream._travelling(block)
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [
            t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.numel() > 64
        ]
        at_home = [t.untyped_storage().data_ptr() in self.homes for t in tensors]
        if any(at_home) and not all(at_home) and func.name() not in _MOVES:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func.name()}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def two_places(model: nn.Module, stream: BlockStream) -> Iterator[list[int]]:
    """Inside, blocks are apart from the device; gives how many blocks were there each time that one ran."""
    counts: list[int] = []
    enter = stream.enter

    def counted(index: int) -> None:
        enter(index)
        counts.append(sum(there is not None for there in (stream._now, stream._ahead)))
        homes = {
            i: {h.data_ptr() for h in there[1].hosts}
            for there in (stream._now, stream._ahead)
            if there is not None
            for i in [there[0]]
        }
        for i, block in enumerate(stream.blocks):
            is_now = stream._now is not None and stream._now[0] == i
            on_device = [
                p.data_ptr() not in homes.get(i, {p.data_ptr()}) for p in block.parameters()
            ]
            assert all(on_device) if is_now else not any(on_device)

    stream.enter = counted  # type: ignore[method-assign]
    try:
        with TwoPlaces(stream):
            yield counts
    finally:
        del stream.enter
