"""What a model runs on while its weights learn: flat masters, and layers that see them quantized.

    masters     all learning weights in one float32 (or bfloat16) tensor
    seen        the same as their formats hold them, in the model's dtype; what products see
    gradient    by the quantized weights, which straight-through is the one by the masters, also where a weight
                lies beyond the largest value of its block

Weights of one format and rule lie side by side, so that one launch of a kernel quantizes them all. The
backward pass of a layer adds to its part of the flat gradient; nothing is gathered afterwards.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from dmx.applying.apply import block_quantizer
from dmx.applying.quantizers import BlockQuantizer
from dmx.assignment.assignment import Assignment
from dmx.errors import ModelError
from dmx.formats import BLOCK_SIZE, BlockFormat, ScaleRule
from dmx.kernels import ops
from dmx.models.products import Groups, groups_of, product, product_by_input, product_by_weight
from dmx.models.sharding import Rows, is_piece, own
from dmx.models.swap import adopt, other_layers
from dmx.processes import Processes
from dmx.transforms.block import BlockRotation

ALIGNMENT = 64
"""Elements; the product of a weight's gradient wants its place aligned."""


@dataclass(frozen=True)
class Segment:
    """Weights that are quantized by one call."""

    block_format: BlockFormat
    scale_rule: ScaleRule
    start: int
    shape: tuple[int, int]
    """Whole rows of blocks; of several weights together (blocks, 32), in MX formats."""
    amax: float | None = None
    """That scales are made for, other than in MX formats; None: the weight's own."""

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + prod(self.shape)].view(self.shape)


class FlatWeights:
    """Weights of layers side by side in one tensor, in the same order what products see of them, and the
    gradient by that.

    Of a sharded model every process has its own rows: masters, moments and gradient of these, and it has a whole weight
    while a product needs it.

    Args:
        weights: layer -> (out, in) weight that it starts from, all of one dtype and device; in this order.
        dtype: of the masters.
    """

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        first = next(iter(weights.values()))
        self.processes = Processes(first.device)
        self.rows = {n: Rows(len(w), self.processes) for n, w in weights.items() if is_piece(w)}
        """Of layers whose rows lie with several processes."""
        self._whole_shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self.places = _places({name: tuple(own(w).shape) for name, w in weights.items()})
        end = _end(self.places)
        self.values = torch.zeros(end, dtype=dtype, device=first.device)
        for name, weight in weights.items():
            self.view_of(self.values, name).copy_(own(weight))
        self.seen = torch.zeros(end, dtype=first.dtype, device=first.device)
        self.gradient = torch.zeros_like(self.seen)

    def view_of(self, flat: Tensor, name: str) -> Tensor:
        """(out, in) view of the part of a layer in a tensor that lies as the masters do."""
        start, shape = self.places[name]
        return flat[start : start + prod(shape)].view(shape)

    def master(self, name: str) -> Tensor:
        """(out, in) view of the master of a layer."""
        return self.view_of(self.values, name)

    def views(self, name: str) -> tuple[Tensor, Tensor]:
        """What the products of a layer see, a leaf that asks for a gradient, and where that is added."""
        weight = self.view_of(self.seen, name).detach().requires_grad_()
        return weight, self.view_of(self.gradient, name)

    def whole(self, flat: Tensor, name: str) -> Tensor:
        """(out, in) part of a layer in a tensor that lies as the masters do; all processes ask for it together."""
        part, rows = self.view_of(flat, name), self.rows.get(name)
        return part if rows is None else rows.gather(part)

    def to_file(self, flat: Tensor) -> Tensor:
        """A tensor that lies as the masters do, as one process alone has it; empty but in the main process."""
        if not self.rows:
            return flat
        places = _places(self._whole_shapes)
        kept = torch.zeros(_end(places) if self.processes.is_main else 0, dtype=flat.dtype)
        for name, (start, shape) in places.items():
            gathered = self.whole(flat, name)
            if self.processes.is_main:
                kept[start : start + prod(shape)].copy_(gathered.flatten())
        return kept

    def from_file(self, kept: Tensor) -> Tensor:
        """Inverse of `to_file`, of what the main process had."""
        if not self.rows:
            return kept
        flat = torch.zeros(len(self.values), dtype=kept.dtype)
        for name, (start, shape) in _places(self._whole_shapes).items():
            part = kept[start : start + prod(shape)].view(shape)
            self.view_of(flat, name).copy_(part[self.rows[name].own])
        return flat


def _places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, tuple[int, int]]]:
    """Where each weight begins side by side with the others, and its shape."""
    places: dict[str, tuple[int, tuple[int, int]]] = {}
    end = 0
    for name, (out, into) in shapes.items():
        places[name] = (end, (out, into))
        end += out * into + -(out * into) % ALIGNMENT
    return places


def _end(places: Mapping[str, tuple[int, tuple[int, int]]]) -> int:
    *_, (start, shape) = places.values()
    return start + prod(shape) + -prod(shape) % ALIGNMENT


class Masters(FlatWeights):
    """Weights that products see quantized by the formats of an assignment, and that learn.

    Args:
        weights, dtype: as of `FlatWeights`.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], assignment: Assignment, dtype: torch.dtype
    ) -> None:
        formats = assignment.block_formats("weight")
        kinds = {
            name: (formats[name], assignment.rule("weight", formats[name])) for name in weights
        }
        in_order = sorted(weights, key=lambda name: (kinds[name][0].name, kinds[name][1]))
        if wide := [n for n in weights if is_piece(weights[n]) and kinds[n][0].scale.global_bits]:
            raise ModelError(
                f"weights=learned: {wide[0]} is in {kinds[wide[0]][0]}, whose scale is of a whole weight, and the model is "
                "sharded over processes. Use run.shard=off, or other formats."
            )
        super().__init__({name: weights[name] for name in in_order}, dtype)
        self.segments: list[Segment] = []
        for name in in_order:
            start, shape = self.places[name]
            if prod(shape):
                self._add_segment(
                    Segment(*kinds[name], start, shape, assignment.amax_of_weight(name))
                )

    def _add_segment(self, new: Segment) -> None:
        """Joins it to the one before where blocks stay blocks."""
        out, into = new.shape
        is_mx = new.block_format.is_mx  # others have scales of whole rows or tensors
        if is_mx and into % BLOCK_SIZE == 0 and out * into % ALIGNMENT == 0:
            new = Segment(
                new.block_format, new.scale_rule, new.start, (out * into // BLOCK_SIZE, BLOCK_SIZE)
            )
            last = self.segments[-1] if self.segments else None
            if (
                last is not None
                and last.shape[1] == BLOCK_SIZE
                and last.start + prod(last.shape) == new.start
                and (last.block_format, last.scale_rule) == (new.block_format, new.scale_rule)
            ):
                rows = last.shape[0] + new.shape[0]
                self.segments[-1] = Segment(
                    last.block_format, last.scale_rule, last.start, (rows, BLOCK_SIZE)
                )
                return
        self.segments.append(new)

    @torch.no_grad()
    def quantize(self) -> None:
        """Quantized weights of the masters as they now are."""
        for segment in self.segments:
            ops.fake_quant_to(
                segment.of(self.values),
                segment.of(self.seen),
                segment.block_format,
                scale_rule=segment.scale_rule,
                amax=segment.amax,
            )

    def take(self, kept: Tensor) -> None:
        """Go on from what an earlier run kept, and see it quantized."""
        self.values.copy_(kept)
        self.quantize()

    def descent(self) -> Tensor:
        """Gradient by the masters, straight through."""
        return self.gradient

    def result(self, name: str) -> Tensor:
        """(out, in) weight of a layer that is to be stored, once quantized."""
        return self.whole(self.values, name)


class _Product(torch.autograd.Function):
    """`product` whose gradient by the weight is added to a place of its own.

    Args:
        rows: weight and place are this process's, of so many; None: they are whole.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient: Tensor,
        groups: Groups | None,
        rows: Rows | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradient, ctx.groups, ctx.rows = gradient, groups, rows
        return product(x, weight if rows is None else rows.gather(weight), bias, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.rows is not None:
            by_weight = product_by_weight(grads[0], x, ctx.groups)
            ctx.gradient.add_(ctx.rows.mean(by_weight))
            weight = ctx.rows.gather(weight)
        elif ctx.groups is None:
            flat = grads[0].reshape(-1, grads[0].shape[-1])
            ctx.gradient.addmm_(flat.t(), x.reshape(-1, x.shape[-1]))
        else:
            ctx.gradient.add_(product_by_weight(grads[0], x, ctx.groups))
        needed = ctx.needs_input_grad[0]
        by_input = product_by_input(grads[0], weight, ctx.groups) if needed else None
        return by_input, None, None, None, None, None


class Bank:
    """What the layers of one run share.

    Attributes:
        is_full: layers run in full precision, on the weights that the model has.
    """

    def __init__(self) -> None:
        self.is_full = True
        self._seen: Tensor | None = None
        self._quantized: dict[Any, Tensor] = {}

    def forget(self) -> None:
        """Before each pass: inputs of an earlier one are of no use."""
        self._seen, self._quantized = None, {}

    def input(
        self, x: Tensor, rotation: BlockRotation | None, quantizer: BlockQuantizer | None
    ) -> Tensor:
        """x as a product sees it; layers that read one tensor (q/k/v, gate/up) share it."""
        if self._seen is not x:
            self._seen, self._quantized = x, {}
        rotated = x
        if rotation is not None:
            key: Any = id(rotation)
            if key not in self._quantized:
                self._quantized[key] = rotation(x)
            rotated = self._quantized[key]
        if quantizer is None:
            return rotated
        key = (None if rotation is None else id(rotation), quantizer)
        if key not in self._quantized:
            self._quantized[key] = quantizer(rotated)
        return self._quantized[key]


class LearningLinear(nn.Linear):
    """A layer whose quantized weight belongs to `Masters`; its own stays as it is."""

    bank: Bank
    rotation: BlockRotation | None
    input_quantizer: BlockQuantizer | None
    quantized: Tensor
    place: Tensor
    rows: Rows | None

    def forward(self, x: Tensor) -> Tensor:
        if self.bank.is_full:
            return product(x, self.weight, self.bias, groups_of(self))
        seen = self.bank.input(x, self.rotation, self.input_quantizer)
        result: Tensor = _Product.apply(
            seen, self.quantized, self.bias, self.place, groups_of(self), self.rows
        )
        return result


def shared_weight(layers: Mapping[str, nn.Linear]) -> tuple[str, str] | None:
    """The first two layers with one weight, which would learn twice; None where there are none."""
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        if (owner := owners.setdefault(id(layer.weight), name)) != name:
            return owner, name
    return None


def starting_weights(
    linears: Mapping[str, nn.Linear], assignment: Assignment
) -> dict[str, nn.Linear]:
    """The layers that learn: those that the assignment quantizes.

    Raises:
        ModelError: weights of several dtypes, or one that two layers share.
    """
    learning = {name: linears[name] for name in assignment.quantized}
    if (shared := shared_weight(learning)) is not None:
        raise ModelError(
            f"{shared[0]} and {shared[1]} share one weight, which would learn twice. Leave them in BF16 "
            "(search.exclude), or use weights=nearest."
        )
    first = next(iter(learning))
    for name, layer in learning.items():
        if layer.weight.dtype != learning[first].weight.dtype:
            raise ModelError(
                f"{name} is {layer.weight.dtype}, {first} {learning[first].weight.dtype}: weights that "
                "learn together must have one dtype. Convert the model first: model.bfloat16()"
            )
    return learning


@contextmanager
def learning_model(
    model: nn.Module,
    masters: FlatWeights,
    assignment: Assignment,
    rotations: Mapping[str, BlockRotation | None],
    *,
    inputs: bool,
) -> Iterator[Bank]:
    """The model with the layers of `masters` under a bank; all Parameters frozen, undone after."""
    bank = Bank()
    input_formats = assignment.block_formats("input") if inputs else {}

    def make(name: str, linear: nn.Linear) -> nn.Linear | None:
        if name not in masters.places:
            return None
        layer = adopt(LearningLinear, linear)
        block_format = input_formats.get(name)
        layer.input_quantizer = (
            block_quantizer(assignment, name, "input", block_format)
            if block_format is not None
            else None
        )
        layer.bank, layer.rotation = bank, rotations[name]
        layer.quantized, layer.place = masters.views(name)
        layer.rows = masters.rows.get(name)
        return layer

    with other_layers(model, make):
        yield bank
