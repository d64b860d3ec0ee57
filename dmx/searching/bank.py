"""The linear layers of a model under search: their formats are set in one place, the bank.

The layers see 0-d views of the annealed offsets; the raw offsets are a parameter that the search owns, and the
module tree of the model never holds it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dmx.assignment.file import ScaleRules
from dmx.assignment.rules import rule_of, rules_of
from dmx.assignment.space import SearchSpace
from dmx.formats import (
    OPERANDS,
    AskedPath,
    BlockFormat,
    Family,
    Format,
    Operand,
    ScaleRule,
)
from dmx.kernels import ops
from dmx.models.products import Groups, groups_of, product, product_by_input, product_by_weight
from dmx.models.running import evaluating
from dmx.models.sharding import Rows
from dmx.models.swap import adopt, other_layers
from dmx.numerics import continuous_parameters
from dmx.transforms.block import BlockRotation, by_rotation, rotate
from dmx.transforms.learning import LearnedRotations


class Bank:
    """What the layers of one search share: offsets, path parameters, and which mode is on.

    mode "full": unquantized. "soft": the continuous quantizer at `offsets`. "formats": the exact
    quantizer of `formats[unit]`, None for an unquantized unit. "units": so, but for fixed layers.
    A layer asks for the unit of its weight and for that of its input, which mostly are one. Where all inputs
    have one format, they are in it in the modes "soft" and "formats".
    """

    def __init__(
        self,
        n_units: int,
        family: Family,
        scale_rules: ScaleRules | ScaleRule,
        path: AskedPath = "auto",
        input_format: Format | None = None,
    ) -> None:
        self.family, self.path = family, path
        self.input_format = input_format
        self.scale_rules = scale_rules
        self.mode = "full"
        self.offsets: tuple[Tensor, ...] = ()
        self.parameters: dict[Operand, tuple[Tensor, ...]] = {}
        """Of the continuous quantizer, a row for each unit; formats may have other rules for inputs."""
        self.learned: LearnedRotations | None = None
        """Rotations that are learned in this search; layers see them in all modes but full."""
        self.rotations: tuple[Tensor, ...] = ()
        self.formats: list[Format | None] = [None] * n_units

    def quantized(
        self, x: Tensor, block_format: Format, operand: Operand, amax: float | None = None
    ) -> Tensor:
        """x in a format, by the scale rule that the operand has there; as it is in bf16.

        Args:
            amax: of an input, what its scales are made for where the format fixes that beforehand.
        """
        if not isinstance(block_format, BlockFormat):
            return x
        rule = rule_of(self.scale_rules, operand, block_format)
        fixed = amax if block_format.needs_input_amax else None
        return ops.fake_quant(x, block_format, scale_rule=rule, amax=fixed)

    def set_soft(self, offsets: Tensor) -> None:
        """offsets: (U,) float32, with the graph back to the raw offsets."""
        self.mode = "soft"
        self.offsets = offsets.unbind(0)
        by_rules: dict[tuple[ScaleRule | None, ...], tuple[Tensor, ...]] = {}
        for operand in OPERANDS if self.input_format is None else OPERANDS[:1]:
            rules = rules_of(self.scale_rules, operand, self.family.formats)
            if rules not in by_rules:
                rows = continuous_parameters(offsets, self.family, rules, self.path)
                by_rules[rules] = rows.unbind(0)
            self.parameters[operand] = by_rules[rules]
        self._set_rotations()

    def set_full(self) -> None:
        """Unquantized and unrotated."""
        self.mode = "full"
        self.offsets, self.parameters = (), {}

    def set_formats(self, formats: list[Format | None], *, fixed: bool = True) -> None:
        """fixed=False leaves the layers with a fixed format unquantized."""
        self.mode = "formats" if fixed else "units"
        self.formats = formats
        self.offsets, self.parameters = (), {}
        self._set_rotations()

    def _set_rotations(self) -> None:
        # Each pass has a graph of its own back to the parameter.
        self.rotations = () if self.learned is None else self.learned.views()


class _SoftLinear(torch.autograd.Function):
    """F.linear of the continuously quantized input and weight, both rotated by `matrix` if there is
    one (see `rotate`).

    Args:
        offset: of the weight; its `parameters` are the row of `continuous_parameters`.
        input_offset: None: that of the weight, whose gradient is then of both.
        input_parameters: of the input, or what quantizes it to a format that is not searched, which the
            gradient passes straight through.
        place: where the gradient by the weight is added, straight through; None: nowhere.
        amax: of the input, as of `Bank.quantized`.
        groups: of the rows of x, as of `product`.
        rows: `weight` and `place` are this process's, of so many; None: they are whole.

    Saves the inputs only; the backward pass rotates and quantizes again, which is cheaper than
    keeping two more copies of every weight and activation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offset: Tensor,
        parameters: Tensor,
        input_offset: Tensor | None,
        input_parameters: Tensor | Callable[[Tensor], Tensor],
        matrix: Tensor | None,
        place: Tensor | None,
        amax: float | None,
        groups: Groups | None,
        rows: Rows | None,
    ) -> Tensor:
        ctx.amax, ctx.groups, ctx.rows = amax, groups, rows
        is_searched = isinstance(input_parameters, Tensor)
        ctx.save_for_backward(
            x, weight, parameters, input_parameters if is_searched else None, matrix
        )
        ctx.fixed = None if is_searched else input_parameters
        ctx.is_joint = is_searched and input_offset is None
        ctx.place = place
        if rows is not None:
            weight = rows.gather(weight)
        if matrix is not None:
            x, weight = rotate(x, matrix), rotate(weight, matrix)
        return product(
            _soft_input(x, input_parameters, amax),
            ops.continuous_fake_quant(weight, parameters),
            bias,
            groups,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, parameters, input_parameters, matrix = ctx.saved_tensors
        rows = ctx.rows
        if rows is not None:
            weight = rows.gather(weight)
        is_rotated = matrix is not None
        rotated_x, rotated_weight = x, weight
        if is_rotated:
            rotated_x, rotated_weight = rotate(x, matrix), rotate(weight, matrix)
        grad = grads[0]
        quantized_x = _soft_input(rotated_x, ctx.fixed or input_parameters, ctx.amax)
        by_quantized = product_by_weight(grad, quantized_x, ctx.groups)
        if ctx.place is not None:
            ctx.place.add_(by_quantized if rows is None else rows.mean(by_quantized))
        grad_weight, by_weight = ops.continuous_fake_quant_backward(
            by_quantized,
            rotated_weight,
            parameters,
            needs_grad_x=is_rotated,
        )
        quantized_weight = ops.continuous_fake_quant(rotated_weight, parameters)
        grad_input = product_by_input(grad, quantized_weight, ctx.groups)
        grad_x: Tensor | None = grad_input
        by_input: Tensor | None = None
        if ctx.fixed is None:
            grad_x, by_input = ops.continuous_fake_quant_backward(
                grad_input,
                rotated_x,
                input_parameters,
                amax=ctx.amax,
                needs_grad_x=is_rotated or ctx.needs_input_grad[0],
            )
        grad_matrix = None
        if is_rotated:
            assert grad_x is not None and grad_weight is not None
            grad_matrix = by_rotation(x, grad_x) + by_rotation(weight, grad_weight)
            grad_x = rotate(grad_x, matrix.mT)
        if ctx.is_joint:
            assert by_input is not None
            by_weight, by_input = by_weight + by_input, None
        return (
            grad_x,
            None,
            None,
            by_weight,
            None,
            by_input,
            None,
            grad_matrix,
            None,
            None,
            None,
            None,
        )


def _soft_input(
    x: Tensor, parameters: Tensor | Callable[[Tensor], Tensor], amax: float | None
) -> Tensor:
    if isinstance(parameters, Tensor):
        return ops.continuous_fake_quant(x, parameters, amax=amax)
    return parameters(x)


class BankLinear(nn.Linear):
    """A linear layer under the bank of a search."""

    bank: Bank
    input_transform: BlockRotation | None
    rotation: int | None
    """Of bank.rotations; then `weight` is the one that is not rotated."""
    input_amax: float | None
    """Largest magnitude of its input on calibration data, where a format needs it."""
    learning: tuple[Tensor, Tensor] | None
    """A weight that descends in this search, which counts in all modes but full, and where its gradient is
    added; None: `weight` in all modes."""
    rows: Rows | None
    """Of what is `learning`, where it is this process's of several; None: it is whole."""

    def quantized(self, x: Tensor, block_format: Format, operand: Operand) -> Tensor:
        """An operand of this layer in a format."""
        amax = self.input_amax if operand == "input" else None
        return self.bank.quantized(x, block_format, operand, amax)

    def fixed_input(self, x: Tensor) -> Tensor:
        """x in the format of all inputs."""
        assert self.bank.input_format is not None
        return self.quantized(x, self.bank.input_format, "input")

    def matrix(self) -> Tensor | None:
        """The learned rotation, where one counts in this mode."""
        if self.rotation is None or self.bank.mode == "full":
            return None
        return self.bank.rotations[self.rotation]

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input and weight of the product that is quantized: rotated, where there is a rotation."""
        weight = self.weight
        if self.learning is not None and self.bank.mode != "full":
            weight = self.learning[0]
            if self.rows is not None:
                weight = self.rows.gather(weight)
        if (matrix := self.matrix()) is not None:
            return rotate(x, matrix), rotate(weight, matrix)
        return (x if self.input_transform is None else self.input_transform(x)), weight


class SearchLinear(BankLinear):
    """A layer whose format is set through the bank."""

    weight_unit: int
    input_unit: int | None
    """None: all inputs have one format."""

    def forward(self, x: Tensor) -> Tensor:
        bank = self.bank
        if bank.mode == "soft":
            if self.input_transform is not None:
                x = self.input_transform(x)
            offset: Tensor | None = None
            inputs: Tensor | Callable[[Tensor], Tensor] = self.fixed_input
            if (unit := self.input_unit) is not None:
                inputs = bank.parameters["input"][unit]
                offset = None if unit == self.weight_unit else bank.offsets[unit]
            weight, place = (self.weight, None) if self.learning is None else self.learning
            result: Tensor = _SoftLinear.apply(
                x,
                weight,
                self.bias,
                bank.offsets[self.weight_unit],
                bank.parameters["weight"][self.weight_unit],
                offset,
                inputs,
                self.matrix(),
                place,
                self.input_amax,
                groups_of(self),
                self.rows,
            )
            return result
        x, weight = self.operands(x)
        if bank.mode in ("formats", "units"):
            x, weight = (
                self._quantized(x, self.input_unit, "input"),
                self._quantized(weight, self.weight_unit, "weight"),
            )
        return product(x, weight, self.bias, groups_of(self))

    def _quantized(self, x: Tensor, unit: int | None, operand: Operand) -> Tensor:
        if unit is None:
            return self.fixed_input(x) if self.bank.mode == "formats" else x
        block_format = self.bank.formats[unit]
        return x if block_format is None else self.quantized(x, block_format, operand)


class FixedLinear(BankLinear):
    """A layer with a fixed format that still lets gradients through to the layers before it."""

    block_format: BlockFormat

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.operands(x)
        if self.bank.mode not in ("full", "units"):
            x, weight = self._quantized(x, "input"), self._quantized(weight, "weight")
        return product(x, weight, self.bias, groups_of(self))

    def _quantized(self, x: Tensor, operand: Operand) -> Tensor:
        """Straight through: the quantized value, the gradient of x."""
        bank, value = self.bank, x.detach()
        if operand == "input" and bank.input_format is not None:
            value = self.fixed_input(value)
        else:
            value = self.quantized(value, self.block_format, operand)
        return x + (value - x.detach()) if x.requires_grad else value


@contextmanager
def searching_model(
    model: nn.Module,
    space: SearchSpace,
    family: Family,
    scale_rules: ScaleRules | ScaleRule,
    learned: LearnedRotations | None = None,
    *,
    path: AskedPath = "auto",
) -> Iterator[Bank]:
    """The model with its layers under a bank: eval mode, weights frozen; all of it undone after.

    Args:
        scale_rules: of the formats, under which the exact and the continuous quantizer work.
        learned: rotations of the inputs of all these layers, which are then not transformed.
        path: of the continuous quantizer.
    """
    if space.needs_input_amax() and space.input_amax is None:
        raise ValueError("the space does not say how large inputs are: see dmx.models.ranges")
    bank = Bank(len(space.units), family, scale_rules, path, space.input_format)
    bank.learned = learned
    weight_unit, input_unit = space.unit_of("weight"), space.unit_of("input")

    def make(name: str, linear: nn.Linear) -> nn.Linear | None:
        layer: SearchLinear | FixedLinear
        if name in weight_unit:
            layer = adopt(SearchLinear, linear)
            layer.weight_unit, layer.input_unit = weight_unit[name], input_unit.get(name)
        elif name in space.fixed:
            layer = adopt(FixedLinear, linear)
            layer.block_format = space.fixed[name]
        else:
            return None
        layer.bank, layer.learning, layer.rows = bank, None, None
        layer.input_amax = (space.input_amax or {}).get(name)
        layer.rotation = None if learned is None else learned.input_of[name]
        return layer

    with evaluating(model), other_layers(model, make):
        yield bank
