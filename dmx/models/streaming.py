"""Models larger than a card: decoder blocks lie in CPU memory, and each is on the device while it runs.

    stays      embeddings, norms and head around the blocks, and all buffers: on the device
    travels    the Parameters of the blocks: in CPU memory, pinned for a GPU. While a block runs, and until another
               one does, the `data` of its Parameters is a copy on the device

Two blocks are on the device at most: the one that runs, and the one that runs next, which is copied on a stream of its
own meanwhile. A pass forward expects the blocks in their order, a pass backward in the reverse one: there, blocks are
checkpointed (`dmx.models.checkpointing`), so that their weights come back with what they compute, and what they read is
kept in CPU memory. Values are those of the model as a whole, to the bit.

On a CPU all of this happens, too, with copies in the same memory: of use to tests alone.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dmx.errors import ModelError
from dmx.models.backbone import decoder_blocks
from dmx.models.linears import plain_model
from dmx.models.sharding import refuse_pieces

MEMORIES = ("all", "block")
"""How a model is held: whole on the device, or block by block."""
_STREAM = "_dmx_stream"


@dataclass
class _Copies:
    """What is on the device, or on its way there, of one block."""

    parameters: list[nn.Parameter]
    hosts: list[Tensor]
    copies: list[Tensor]
    versions: list[int]
    """Of the Parameters when they were last alike in both places."""
    ready: torch.cuda.Event | None

    def are_current(self) -> bool:
        """Of a block that waits for its turn: whether nobody wrote its Parameters, or replaced them, since."""
        now = [(p.data_ptr(), _version(p)) for p in self.parameters]
        return now == [(h.data_ptr(), v) for h, v in zip(self.hosts, self.versions, strict=True)]

    def arrive(self) -> None:
        """The Parameters are the copies."""
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            parameter.data = copy
        self.wait()
        self.versions = list(map(_version, self.parameters))

    def go_home(self) -> None:
        """The Parameters are in CPU memory again, with what was written into them, or put in their place, meanwhile."""
        each = zip(self.parameters, self.hosts, self.copies, self.versions, strict=True)
        for parameter, host, copy, version in each:
            if parameter.data_ptr() != copy.data_ptr():
                parameter.data = parameter.data.to(host.device)
                continue
            if _version(parameter) != version:
                host.copy_(copy)
            parameter.data = host

    def wait(self) -> None:
        """Before they are used, or their memory is."""
        if self.ready is not None:
            torch.cuda.current_stream(self.copies[0].device).wait_event(self.ready)


class BlockStream:
    """The blocks of one model on their way to a device and back; `stream_blocks` makes one.

    Attributes:
        blocks: the decoder blocks in their order.
        block_bytes: of the largest. pass_bytes: of all: what a pass forward or backward copies.
        staying_bytes: on the device always.
        moved_bytes: copied to the device so far.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.blocks = list(decoder_blocks(model) or [])
        self._staying = _check(model, self.blocks)
        self._stays = {id(parameter) for parameter in self._staying}
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._now: tuple[int, _Copies] | None = None
        self._ahead: tuple[int, _Copies] | None = None
        self.moved_bytes = 0
        for parameter in self._staying:
            parameter.data = parameter.data.to(device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        sizes = [self._to_host(block) for block in self.blocks]
        self.block_bytes, self.pass_bytes = max(sizes), sum(sizes)
        self.staying_bytes = sum(map(_bytes, [*self._staying, *model.buffers()]))
        for index, block in enumerate(self.blocks):
            block.forward = _Run(self, index, block.forward, block.__dict__.get("forward"))

    def _to_host(self, block: nn.Module) -> int:
        """The block's Parameters in CPU memory, pinned side by side for a GPU; their bytes."""
        travelling = self._travelling(block)
        total = sum(_bytes(parameter) for parameter in travelling)
        if self._side is None:
            return total
        # Pinned memory comes in powers of two: little is lost of one piece for a whole block.
        ends, end = [], 0
        for parameter in travelling:
            ends.append(end)
            end += _bytes(parameter) + -_bytes(parameter) % 256
        flat = torch.empty(end, dtype=torch.uint8, pin_memory=True)
        for parameter, start in zip(travelling, ends, strict=True):
            place = flat[start : start + _bytes(parameter)].view(parameter.dtype)
            place = place.view(parameter.shape)
            place.copy_(parameter.data)
            parameter.data = place
        return total

    def _travelling(self, block: nn.Module) -> list[nn.Parameter]:
        return [p for p in block.parameters() if id(p) not in self._stays]

    # --- what runs ------------------------------------------------------------------------------

    def enter(self, index: int) -> None:
        """Have the Parameters of a block on the device from here on, until another one is entered."""
        if self._now is None or self._now[0] != index:
            self._leave()
            if self._ahead is not None:
                is_this = self._ahead[0] == index and self._ahead[1].are_current()
                if not is_this:
                    self._drop()
            copies = self._copied(index) if self._ahead is None else self._ahead[1]
            self._ahead, self._now = None, (index, copies)
            copies.arrive()
        expected = self._next(index)
        if expected != index and (self._ahead is None or self._ahead[0] != expected):
            self._drop()
            self._ahead = expected, self._copied(expected)

    def rest(self) -> None:
        """All blocks in CPU memory alone."""
        self._leave()
        self._drop()

    def _next(self, index: int) -> int:
        """The block that is expected after this one; the turn at the end is one of the blocks beside it."""
        last = len(self.blocks) - 1
        if in_backward():
            return index - 1 if index else min(1, last)
        if index < last:
            return index + 1
        return max(0, last - 1) if torch.is_grad_enabled() else 0

    def _copied(self, index: int) -> _Copies:
        """Copies of a block on the device; its Parameters do not see them yet."""
        # A tensor made in inference mode could not serve a later pass with gradients.
        with torch.inference_mode(False), torch.no_grad():
            parameters = self._travelling(self.blocks[index])
            if self._side is not None:
                for parameter in parameters:
                    # Rotated weights, for example, took the place of others.
                    if not parameter.data.is_pinned():
                        parameter.data = parameter.data.cpu().pin_memory()
            hosts = [parameter.data for parameter in parameters]
            versions = list(map(_version, parameters))
            copies = [torch.empty_like(host, device=self.device) for host in hosts]
            self.moved_bytes += sum(map(_bytes, hosts))
            if self._side is None:
                for copy, host in zip(copies, hosts, strict=True):
                    copy.copy_(host)
                return _Copies(parameters, hosts, copies, versions, None)
            # Their memory may be that of tensors which kernels before this one still use.
            self._side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._side):
                for copy, host in zip(copies, hosts, strict=True):
                    copy.copy_(host, non_blocking=True)
            event = self._side.record_event()
            return _Copies(parameters, hosts, copies, versions, event)

    def _leave(self) -> None:
        if self._now is None:
            return
        index, copies = self._now
        copies.go_home()
        for module in self.blocks[index].modules():
            forget = getattr(module, "forget_quantized", None)
            if forget is not None:
                forget()
        self._now = None

    def _drop(self) -> None:
        """What was copied ahead and is not needed; its memory waits for the copy."""
        if self._ahead is not None:
            self._ahead[1].wait()
        self._ahead = None

    def checkpointed(self, index: int, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, the forward of a block, which runs again in the pass backward, with its weights; what it
        reads is kept in CPU memory until then."""
        twice = _Twice(self, index, function, args)
        # Nothing in a block is drawn: all that could be is in eval mode.
        result = checkpoint(twice, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled():
            twice.keep()
        return result

    def kept(self, x: Tensor) -> Tensor:
        """A copy of an activation in CPU memory, pinned beside a GPU."""
        on_gpu = self._side is not None
        with torch.inference_mode(False), torch.no_grad():
            place = torch.empty(x.shape, dtype=x.dtype, pin_memory=on_gpu)
            return place.copy_(x, non_blocking=on_gpu)

    def close(self) -> None:
        """The blocks run as any module again; their Parameters stay in CPU memory."""
        self.rest()
        for block in self.blocks:
            run = block.__dict__.pop("forward")
            if run.before is not None:
                block.forward = run.before
        del self.model.__dict__[_STREAM]

    def describe(self) -> str:
        """What is on the device, and what travels."""
        return (
            f"memory=block: {in_bytes(self.staying_bytes)} stay on {self.device} (embeddings, norms, head); "
            f"{len(self.blocks)} blocks of at most {in_bytes(self.block_bytes)} lie in CPU memory, two of them are copied to "
            f"{self.device} at a time. A pass forward or backward copies {in_bytes(self.pass_bytes)}. No CUDA graphs."
        )


class _Twice:
    """The forward of a block that runs a second time; its first argument is on the CPU meanwhile."""

    def __init__(
        self,
        stream: BlockStream,
        index: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        self.stream, self.index, self.function, self.args = stream, index, function, args
        self.host: Tensor | None = None
        self.needs_gradient = False

    def __call__(self) -> Any:
        args = self.args
        if self.host is not None:
            x = self.host.to(self.stream.device, non_blocking=True)
            args = (x.requires_grad_(self.needs_gradient), *args)
        self.stream.enter(self.index)
        return self.function(*args)

    def keep(self) -> None:
        """After the first time."""
        if self.args and isinstance(self.args[0], Tensor):
            x, *others = self.args
            self.host, self.needs_gradient = self.stream.kept(x.detach()), x.requires_grad
            self.args = tuple(others)


class _Run:
    """Stands for the forward of a block. `before`: the one that the block had of its own, if any."""

    def __init__(
        self,
        stream: BlockStream,
        index: int,
        forward: Callable[..., Any],
        before: Callable[..., Any] | None,
    ) -> None:
        self.stream, self.index, self.forward, self.before = stream, index, forward, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.stream.enter(self.index)
        return self.forward(*args, **kwargs)


def stream_blocks(model: nn.Module, device: str | torch.device = "cuda") -> BlockStream:
    """Hold a model block by block: its decoder blocks in CPU memory, the rest on `device`, in place.

    Searches, weights stages and evaluation then run it on `device` as they would the whole model, and give the same.

    Args:
        model: on the CPU, as it was loaded; fp32, bf16 or fp16.

    Returns:
        The stream, which says what travels (`describe`, `moved_bytes`); `close` ends it.

    Raises:
        ModelError: no list of decoder blocks, nothing before them, or held so already.
    """
    model = plain_model(model)
    if stream_of(model) is not None:
        raise ModelError(f"{type(model).__name__} is held block by block already")
    refuse_pieces(model, {"memory=block": True}, "memory=all")
    stream = BlockStream(model, torch.device(device))
    object.__setattr__(model, _STREAM, stream)
    return stream


def stream_of(model: nn.Module) -> BlockStream | None:
    """The stream of a model that is held block by block; None of one that is whole."""
    stream: BlockStream | None = plain_model(model).__dict__.get(_STREAM)
    return stream


def rest(model: nn.Module) -> None:
    """Before Parameters of several blocks are looked at, or replaced: all in CPU memory, where they are held there."""
    if (stream := stream_of(model)) is not None:
        stream.rest()


def brought(
    model: nn.Module, parameters: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Named Parameters of a model, each on the device while it is looked at."""
    stream = stream_of(model)
    block_of = {} if stream is None else _block_of(stream.blocks)
    for name, parameter in parameters:
        if stream is not None and (index := block_of.get(id(parameter))) is not None:
            stream.enter(index)
        yield name, parameter
    rest(model)


def in_backward() -> bool:
    """Whether this is called from a pass backward."""
    return torch._C._current_graph_task_id() != -1


def _block_of(blocks: Iterable[nn.Module]) -> dict[int, int]:
    return {id(p): index for index, block in enumerate(blocks) for p in block.parameters()}


def _check(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Parameter]:
    """The Parameters that stay on the device: those outside the blocks, and of several blocks."""
    name = type(model).__name__
    if not blocks:
        raise ModelError(
            f"{name} has no list of decoder blocks, so it cannot be held block by block. Use memory=all."
        )
    owners: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    first, *_ = parameters = list(model.parameters())
    if id(first) in owners:
        raise ModelError(
            f"{name} has no Parameter before its blocks, so nothing tells on which device it runs: it cannot be held "
            "block by block. Use memory=all."
        )
    return [p for p in parameters if len(owners.get(id(p), ())) != 1]


def _version(parameter: nn.Parameter) -> int:
    """Counts what is written into it; inference tensors do not count."""
    return 0 if parameter.is_inference() else parameter._version


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def in_bytes(size: int) -> str:
    """A number of bytes as a reader takes it."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
