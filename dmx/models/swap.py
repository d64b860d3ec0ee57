"""Putting layers into a model in place of its linear layers, and taking them out again."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from dmx.models.linears import plain_name
from dmx.models.sharding import reshard

_Linear = TypeVar("_Linear", bound=nn.Linear)


def adopt(cls: type[_Linear], linear: nn.Linear) -> _Linear:
    """An instance of `cls` with the sizes, Parameters, hooks, mode and `input_transform` of `linear`
    (None on plain layers); copies nothing."""
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = linear.in_features, linear.out_features
    # One table: FSDP puts whole weights into the layer that it knows, and takes them out again.
    layer._parameters = linear._parameters
    layer.input_transform = getattr(linear, "input_transform", None)  # type: ignore[assignment]
    for hooks in (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
    ):
        setattr(layer, hooks, getattr(linear, hooks))
    layer.training = linear.training
    return layer


def replace_layers(
    model: nn.Module, make: Callable[[str, nn.Linear], nn.Linear | None]
) -> dict[str, nn.Linear]:
    """Replace every linear layer for which `make(name, layer)` gives another; a module that stands
    under several names is replaced once and under all of them.

    Returns:
        name -> the original module, for `put_back`.
    """
    linears = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    ]
    made: dict[int, nn.Linear | None] = {}
    for name, module in linears:
        if id(module) not in made:
            made[id(module)] = make(plain_name(name), module)
    # Only now, when nothing can fail any more, is the model touched.
    originals = {name: module for name, module in linears if made[id(module)] is not None}
    for name, module in originals.items():
        replacement = made[id(module)]
        assert replacement is not None
        set_module(model, name, replacement)
    return originals


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in place of the one under a name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def put_back(model: nn.Module, originals: Mapping[str, nn.Linear]) -> None:
    """Undo `replace_layers`; the originals take the mode of what replaced them."""
    for name, module in originals.items():
        module.train(model.get_submodule(name).training)
        set_module(model, name, module)


@contextmanager
def other_layers(
    model: nn.Module, make: Callable[[str, nn.Linear], nn.Linear | None]
) -> Iterator[None]:
    """The model with layers replaced as by `replace_layers` and all its Parameters frozen, inside; both
    undone after, also after an exception."""
    reshard(model)
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    originals = replace_layers(model, make)
    try:
        for parameter, _ in frozen:
            parameter.requires_grad_(False)
        yield
    finally:
        put_back(model, originals)
        reshard(model)
        for parameter, needed in frozen:
            parameter.requires_grad_(needed)
