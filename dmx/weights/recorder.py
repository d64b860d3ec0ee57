"""What layers get as inputs on calibration data: who shares an input, and the sums that GPTQ needs."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmx.applying.linear import QuantLinear
from dmx.formats import BlockFormat
from dmx.models.experts import kind_of_expert
from dmx.processes import Processes


class Stop(Exception):
    """Ends a forward pass of which the rest is not needed."""


def until_stopped(run: Callable[[], object]) -> None:
    """Run until somebody raises `Stop`, or to the end."""
    with suppress(Stop):
        run()


class Recorder:
    """Stands in for the input quantizer of a layer and sums products of what it gets and gives.

    Attributes:
        hessian: X^T X of the quantized inputs X, (in, in) float32.
        cross: X^T (X' - X) with the inputs X' as they were; None unless asked for, or without a
            quantizer.
    """

    def __init__(self, layer: QuantLinear, *, with_cross: bool) -> None:
        self.quantizer = layer.input_quantizer
        shape, device = (layer.in_features, layer.in_features), layer.weight.device
        self.hessian = torch.zeros(shape, device=device)
        needs_cross = with_cross and self.quantizer is not None
        self.cross = torch.zeros(shape, device=device) if needs_cross else None

    @property
    def block_format(self) -> BlockFormat:
        """Of the quantizer that it stands in for."""
        assert self.quantizer is not None
        return self.quantizer.block_format

    def share(self, processes: Processes) -> None:
        """Take the means of what all processes recorded: rounding asks for the directions of these sums, not their size."""
        processes.average(self.hessian)
        if self.cross is not None:
            processes.average(self.cross)

    def __call__(self, x: Tensor) -> Tensor:
        seen = x if self.quantizer is None else self.quantizer(x)
        flat = seen.reshape(-1, seen.shape[-1]).float()
        self.hessian.addmm_(flat.T, flat)
        if self.cross is not None:
            self.cross.addmm_(flat.T, x.reshape(flat.shape).float() - flat)
        return seen


@dataclass(frozen=True)
class Stage:
    """Layers that are rounded together; `shares_input`: all run on one tensor."""

    names: list[str]
    shares_input: bool


def stages_of(part: dict[str, QuantLinear], run: Callable[[], object]) -> list[Stage]:
    """Layers by the input that they share, in the order in which they run; layers that did not
    run on this batch come last. Experts of a block do not wait for each other: their layers of a kind are one stage,
    those included that no token of this batch reaches."""
    order: list[tuple[str, Tensor]] = []
    handles = [
        layer.register_forward_pre_hook(lambda _m, args, n=name: order.append((n, args[0])))
        for name, layer in part.items()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    stages: dict[int, list[str]] = {}
    for name, x in order:
        stages.setdefault(id(x), []).append(name)
    idle = [name for name in part if name not in {n for n, _ in order}]
    if len(order) + len(idle) > len(part):  # a layer that runs twice has no one place
        return [Stage(list(part), shares_input=False)]
    together: dict[Any, list[str]] = {}
    for key, names in stages.items():
        kind = kind_of_expert(names[0])
        together.setdefault(key if kind is None else kind, []).extend(names)
    for kind in [key for key in together if not isinstance(key, int)]:
        # In the order of the model: processes see experts run in different ones.
        together[kind] = [name for name in part if kind_of_expert(name) == kind]
    idle = [name for name in idle if kind_of_expert(name) not in together]
    made = [Stage(names, shares_input=isinstance(key, int)) for key, names in together.items()]
    return [*made, *([Stage(idle, shares_input=False)] if idle else [])]


def record(
    part: dict[str, QuantLinear],
    stage: Stage,
    then: Stage | None,
    runs: Iterable[Callable[[], object]],
    *,
    with_cross: bool,
) -> list[tuple[list[str], Recorder]]:
    """Run all batches and record a stage; passes end where the next one begins.

    Returns:
        Groups of layers that see the same values, and what was recorded of these.
    """
    groups: dict[Any, list[str]] = {}
    for name in stage.names:
        alone = None if stage.shares_input else name
        groups.setdefault((alone, *seen_through(part[name])), []).append(name)
    first = [part[names[0]] for names in groups.values()]
    recorders = [Recorder(layer, with_cross=with_cross) for layer in first]

    def stop(*_: object) -> None:
        raise Stop

    # Layers that rest in one batch may come first in another.
    later = then.names if then is not None and then.shares_input else []
    handles = [part[name].register_forward_pre_hook(stop) for name in later]
    try:
        for layer, recorder in zip(first, recorders, strict=True):
            layer.input_quantizer = recorder
        for run in runs:
            until_stopped(run)
    finally:
        for layer, recorder in zip(first, recorders, strict=True):
            layer.input_quantizer = recorder.quantizer
        for handle in handles:
            handle.remove()
    return list(zip(groups.values(), recorders, strict=True))


def seen_through(layer: QuantLinear) -> tuple[Any, ...]:
    """What the input of a layer goes through before its product; equal for equal values."""
    rotation = layer.input_transform
    matrix = rotation.matrix.cpu().numpy().tobytes() if rotation is not None else None
    return layer.input_quantizer, matrix
