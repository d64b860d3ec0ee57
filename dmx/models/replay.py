"""Forward passes that start in the middle: the blocks before the disturbed one are not run again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dmx.models.backbone import decoder_blocks
from dmx.models.running import model_logits
from dmx.models.streaming import stream_of


class PrefixReplay:
    """Passes over one batch that take the undisturbed prefix from a reference pass.

    Valid while only layers in the named block differ from the reference pass, for models that
    feed each block's output to the next block alone (`prefix_replay_is_exact` finds out).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.blocks = decoder_blocks(model)
        self._gave_tensors: list[bool] = []
        self._arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def block_of(self, layer_name: str) -> int:
        """Index of the block that holds a layer; -1 for layers outside the blocks."""
        target = self.model.get_submodule(layer_name)
        for i, block in enumerate(self.blocks or []):
            if any(module is target for module in block.modules()):
                return i
        return -1

    def reference(self, tokens: Tensor) -> Tensor:
        """Logits of a full pass; keeps the arguments of every block, in CPU memory where the blocks lie there."""
        self._arguments, self._gave_tensors = [], []
        stream, handles = stream_of(self.model), []

        def note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if stream is not None and args and isinstance(args[0], Tensor):
                args = (stream.kept(args[0]), *args[1:])
            self._arguments.append((args, kwargs))

        for block in self.blocks or []:
            handles += [
                block.register_forward_pre_hook(
                    lambda _m, args, kwargs: note(args, kwargs),
                    with_kwargs=True,
                ),
                block.register_forward_hook(
                    lambda _m, _i, out: self._gave_tensors.append(isinstance(out, Tensor))
                ),
            ]
        try:
            return model_logits(self.model, tokens)
        finally:
            for handle in handles:
                handle.remove()

    def block_output(self, block: int) -> Tensor:
        """Output of one block as the model now is, given what it got in the reference pass."""
        assert self.blocks is not None
        args, kwargs = self._arguments[block]
        if (stream := stream_of(self.model)) is not None and args:
            args = (args[0].to(stream.device), *args[1:])
        output: Tensor = self.blocks[block](*args, **kwargs)
        return output

    def logits_after(self, tokens: Tensor, block: int, outputs: list[Tensor]) -> Tensor:
        """Logits (len(outputs) * batch, length, vocab) given several outputs of one block."""
        with self._given(block, torch.cat(outputs)):
            return model_logits(self.model, tokens.repeat(len(outputs), 1))

    @contextmanager
    def _given(self, block: int, output: Any) -> Iterator[None]:
        """Inside, blocks up to and including `block` are not run; the last one gives `output`."""
        skipped = [self.blocks[i] for i in range(block + 1)] if self.blocks is not None else []
        # A block may have a forward of its own already, as accelerate's hooks give it.
        own = [module.__dict__.get("forward") for module in skipped]
        for module in skipped:
            module.forward = lambda *_args, **_kwargs: output
        try:
            yield
        finally:
            for module, forward in zip(skipped, own, strict=True):
                del module.forward
                if forward is not None:
                    module.forward = forward


@torch.no_grad()
def prefix_replay_is_exact(model: nn.Module, tokens: Tensor) -> bool:
    """Whether passes from the middle give the logits of the full pass, bit for bit, for one row of
    tokens; a model with connections around its blocks fails and must be scanned without reuse."""
    replay = PrefixReplay(model)
    if replay.blocks is None:
        return False
    full = replay.reference(tokens)
    # Each block once: some models skip blocks that only images need.
    once = len(replay._gave_tensors) == len(replay.blocks)
    if not once or not all(replay._gave_tensors):
        return False
    middle = len(replay.blocks) // 2
    output = replay.block_output(middle)
    return torch.equal(full, replay.logits_after(tokens, middle, [output]))
