"""Weights that lie in pieces over processes: FSDP2, `torch.distributed.fsdp.fully_shard`.

Every decoder block holds the rows of its weights that are this process's own, and has them whole while it runs; what lies
outside all blocks is whole while the model runs. So layers see whole weights inside their forward and backward pass,
also those that stand in others' places, which share their Parameters. What looks at a weight at any other time asks
for it here:

    whole(weight)    all of it, for a moment; all processes ask, in one order
    own(weight)      this process's rows

Passes are common, too: all processes run as many, of the same modules.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dmx.errors import ModelError
from dmx.models.backbone import decoder_blocks
from dmx.processes import Processes


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` has the model, or parts of it."""
    return any(True for _ in _units(model))


def _units(model: nn.Module) -> Iterator[Any]:
    """Modules whose weights are gathered together."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def is_piece(tensor: Tensor) -> bool:
    """Whether this process holds rows of the tensor only, whoever holds the others."""
    return hasattr(tensor, "device_mesh")


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of a weight, without gradient; itself where it is whole. All processes ask for it together."""
    value: Any = tensor.detach()
    result: Tensor = value.full_tensor() if is_piece(value) else value
    return result


def own(tensor: Tensor) -> Tensor:
    """This process's rows of a weight, in its memory; all where it is whole."""
    value: Any = tensor.detach()
    result: Tensor = value.to_local() if is_piece(value) else value
    return result


def own_bytes(model: nn.Module) -> int:
    """Of the parameters that this process holds between passes."""
    reshard(model)
    return sum(own(p).numel() * p.element_size() for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """Let go of what passes left whole, so that all parameters are pieces again."""
    for unit in _units(model):
        unit.reshard()


def gather_outer(model: nn.Module) -> None:
    """Have whole what lies outside all blocks (embeddings, the head), until the next `reshard` or backward pass."""
    outermost = next(_units(model), None)
    if outermost is model:
        outermost.unshard()  # type: ignore[operator]


def without_gradients(model: nn.Module) -> AbstractContextManager[Any]:
    """Inference mode; where weights are gathered, no_grad, as what is gathered serves later passes with gradients."""
    return torch.no_grad() if is_sharded(model) else torch.inference_mode()


def shard(model: nn.Module, processes: Processes, device: torch.device) -> None:
    """Split a model over processes, in place: each decoder block, and all the rest together.

    Args:
        device: that its pieces lie on and that it runs on.

    Raises:
        ModelError: it has no decoder blocks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    blocks = decoder_blocks(model)
    if blocks is None:
        raise ModelError(
            f"{type(model).__name__} has no list of decoder blocks, by which its weights could be sharded over "
            "processes. Use run.shard=off: every process then holds the whole model."
        )
    mesh = init_device_mesh(device.type, (processes.size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def check_pieces(model: nn.Module) -> None:
    """Raise ModelError where weights are split otherwise than `shard` does it, so that passes or `whole` would not do."""
    reshard(model)
    for unit in _units(model):
        if isinstance(unit, nn.Linear):
            raise _otherwise("a linear layer is sharded by itself, apart from its block")
        policy: Any = getattr(unit._get_fsdp_state(), "_mp_policy", None)
        if getattr(policy, "param_dtype", None) is not None:
            raise _otherwise(f"its weights are cast to {policy.param_dtype} when they are gathered")
    for name, parameter in model.named_parameters() if is_sharded(model) else ():
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is None:
            raise _otherwise(f"{name} is whole in every process")
        if mesh.ndim != 1 or mesh.size() != torch.distributed.get_world_size():
            raise _otherwise(f"{name} lies on a mesh of {tuple(mesh.shape)} processes")
        if mesh.device_type != parameter.device.type:
            raise _otherwise(f"{name} waits on {parameter.device} for passes on {mesh.device_type}")
        if not all(p.is_shard(0) for p in parameter.placements):  # type: ignore[attr-defined]
            raise _otherwise(f"{name} is split as {parameter.placements}")  # type: ignore[attr-defined]


def refuse_pieces(model: nn.Module, asked: Mapping[str, bool], instead: str) -> None:
    """Raise ModelError for what works on whole weights alone, where a model is sharded.

    Args:
        asked: setting as it is written -> whether it is asked for.
        instead: the way out beside a whole model.
    """
    found = [setting for setting, is_asked in asked.items() if is_asked]
    if found and is_sharded(model):
        raise ModelError(
            f"{found[0]}: the model is sharded over processes, and this needs whole weights. Use {instead}, or "
            "run.shard=off, with which every process holds the whole model."
        )


def _otherwise(found: str) -> ModelError:
    return ModelError(
        f"the model is sharded over processes, and {found}. Shard its blocks and then itself over all processes, by "
        "fully_shard(block) and fully_shard(model), in the dtype that it has, without offloading."
    )


# --- what learns in pieces ----------------------------------------------------------------------


class Rows:
    """The rows of one (out, in) weight that each process has, as fully_shard splits them; tensors are float.

    Args:
        out: rows of the whole weight.
    """

    def __init__(self, out: int, processes: Processes) -> None:
        self.out, self.size = out, processes.size
        self.chunk = -(-out // self.size)
        first = min(processes.rank * self.chunk, out)
        self.own = slice(first, min(first + self.chunk, out))

    def gather(self, rows: Tensor) -> Tensor:
        """(own, in) of every process -> (out, in)."""
        padded = rows
        if len(rows) < self.chunk:
            padded = rows.new_zeros(self.chunk, rows.shape[1])
            padded[: len(rows)] = rows
        gathered = rows.new_empty(self.chunk * self.size, rows.shape[1])
        _collective("all_gather")(gathered, padded.contiguous())
        return gathered[: self.out]

    def mean(self, value: Tensor) -> Tensor:
        """(out, in) of every process -> (own, in), the mean over processes."""
        if len(value) < self.chunk * self.size:
            padded = value.new_zeros(self.chunk * self.size, value.shape[1])
            padded[: len(value)] = value
            value = padded
        mine = value.new_empty(self.chunk, value.shape[1])
        _collective("reduce_scatter")(mine, value.contiguous())
        return mine[: self.own.stop - self.own.start].div_(self.size)


def _collective(name: str) -> Any:
    """Of flat tensors, under the name that this torch has for it."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    new: Any = getattr(torch.distributed, f"{name}_single", None)
    return new or getattr(torch.distributed, old[name])


# --- loading ------------------------------------------------------------------------------------


@torch.no_grad()
def spread(
    model: nn.Module, source: nn.Module | None, processes: Processes, device: torch.device
) -> None:
    """Shard a model on meta and give it the values of `source`, one tensor after the other.

    Args:
        source: the whole model, in the main process; None in the others.
        device: see `shard`.
    """
    from torch.distributed.tensor import distribute_tensor

    given = {} if source is None else dict(source.named_parameters())
    dtypes, buffers = processes.agree(
        lambda: (
            {name: parameter.dtype for name, parameter in given.items()},
            {n: b.cpu() for n, b in (source.named_buffers() if source is not None else ())},
        )
    )
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    shard(model, processes, device)
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    for name, piece in model.named_parameters():
        target: Any = piece
        value = torch.empty(piece.shape, dtype=piece.dtype, device=device)
        if processes.is_main:
            value.copy_(given[name])
        sent = distribute_tensor(value, target.device_mesh, target.placements)
        target.to_local().copy_(sent.to_local())
