"""A peer's rotated model: what it has beside the weights of its layers, put into ours for a measurement."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

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
    """(in_features, in_features) float32, by which the rows of the inputs of `online` are multiplied before they are
    quantized."""
    online: tuple[str, ...] = ()
    """Layers."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Of a peer's file.

        Raises:
            RunError: it cannot be read.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                names = (file.metadata() or {}).get(ONLINE_ROTATION, "").split()
                held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise damaged(path) from error
        rotation = held.pop(ONLINE_ROTATION, None)
        if (rotation is None) != (not names):
            raise damaged(path)
        return cls(held, rotation, tuple(names))

    @contextlib.contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """The model has them inside. Parameters are replaced, not filled: a rotated head is tied to nothing.

        Raises:
            RunError: a parameter is none of the model's, or of another shape.
        """
        owners = {name: _owner(model, name, tensor) for name, tensor in self.parameters.items()}
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


def _owner(model: nn.Module, name: str, tensor: Tensor) -> tuple[nn.Module, str]:
    """The module that has a parameter, and its name there."""
    place, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(place)
        own = module.get_parameter(leaf)
    except AttributeError as error:
        raise RunError(f"the answer has a parameter {name}, the model has none") from error
    if own.shape != tensor.shape:
        raise RunError(
            f"the answer's {name} has the shape {tuple(tensor.shape)}, the model's {tuple(own.shape)}"
        )
    return module, leaf


def _rotating(rotation: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """A hook that multiplies the rows of a layer's input, in float32."""

    def rotate(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = inputs
        return ((x.float() @ rotation).to(x.dtype),)

    return rotate
