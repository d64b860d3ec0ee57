"""A peer's rotated model: what it has beside the weights of its layers, put into ours for a measurement."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dmx.errors import RunError

from .answers import damaged
from .protocol import ONLINE_ROTATION


@dataclass(frozen=True)
class RotatedParts:
    """Parameters of a rotated model that no layer with a format has, and its online rotation; as made, nothing."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Name -> tensor of the model's shape; a tied head has its own."""
    online_rotation: Tensor | None = None
    """(size, size) float32, by which every `size` channels of the inputs of `online` are multiplied before they are
    quantized; in_features of each is a multiple of it."""
    online: tuple[str, ...] = ()
    """Layers."""

    @classmethod
    def load(cls, path: Path, model: nn.Module, layers: Sequence[str]) -> Self:
        """Of a peer's file.

        Args:
            layers: of the model, that have a format, whose weights are in another file.

        Raises:
            RunError: the file cannot be read, or holds other parameters or another rotation than the model can have.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                names = (file.metadata() or {}).get(ONLINE_ROTATION, "").split()
                held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise damaged(path) from error
        rotation = held.pop(ONLINE_ROTATION, None)
        parts = cls(held, rotation, tuple(names))
        if why := parts._unfit(model, layers):
            raise RunError(f"{path} {why}")
        return parts

    def _unfit(self, model: nn.Module, layers: Sequence[str]) -> str:
        """What is not as the model has it; empty if nothing."""
        weights = {f"{name}.weight" for name in layers}
        shapes = {
            n: p.shape
            for n, p in model.named_parameters(remove_duplicate=False)
            if n not in weights
        }
        if wrong := sorted(shapes.keys() ^ self.parameters.keys()):
            return f"lacks or adds {len(wrong)} parameters, first {wrong[0]}"
        for name, tensor in self.parameters.items():
            if tensor.shape != shapes[name]:
                return f"has {name} of the shape {tuple(tensor.shape)}, the model {tuple(shapes[name])}"
            if not tensor.isfinite().all():
                return f"has a value in {name} that is not finite"
        if self.online_rotation is None:
            return "names layers of an online rotation and has none" if self.online else ""
        if len(set(self.online)) != len(self.online) or not set(self.online) <= set(layers):
            return (
                "has an online rotation of other layers than those with a format, or of one twice"
            )
        sizes = {model.get_submodule(name).in_features for name in self.online}
        rotation = self.online_rotation
        shape = tuple(rotation.shape)
        is_square = len(shape) == 2 and shape[0] == shape[1] > 0
        if not (is_square and sizes) or any(size % shape[0] for size in sizes):
            return f"has an online rotation of the shape {shape} for layers of {sorted(sizes)} in_features"
        if rotation.dtype != torch.float32 or not rotation.isfinite().all():
            return "has an online rotation that is not float32, or not finite"
        return ""

    @contextlib.contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """The model has them inside. Parameters are replaced, not filled: a rotated head is tied to nothing."""
        owners = {name: _owner(model, name) for name in self.parameters}
        own = {name: getattr(*place) for name, place in owners.items()}
        hooks = []
        try:
            for name, (module, leaf) in owners.items():
                tensor = self.parameters[name].to(own[name].device, own[name].dtype)
                setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
            for name in self.online:
                layer = model.get_submodule(name)
                assert self.online_rotation is not None
                rotation = self.online_rotation.to(next(layer.parameters()).device)
                hooks.append(layer.register_forward_pre_hook(_rotating(rotation)))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for name, (module, leaf) in owners.items():
                setattr(module, leaf, own[name])


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a parameter, and its name there."""
    place, _, leaf = name.rpartition(".")
    return model.get_submodule(place), leaf


def _rotating(rotation: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """A hook that multiplies blocks of the rows of a layer's input, in float32."""

    def rotate(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = inputs
        blocks = x.float().unflatten(-1, (-1, len(rotation)))
        return ((blocks @ rotation).flatten(-2).to(x.dtype),)

    return rotate
