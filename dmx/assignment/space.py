"""What may be chosen: the units of a model, their candidate formats, and what a choice costs.

A *unit* is the layers that share one choice: a fused group (q/k/v, gate/up: what vLLM can run) or
one layer. A `SearchSpace` is the units of a model with their candidate formats, smallest first. A
choice is an index into the candidates for each unit; its average is weighted by the weight
elements of the quantized layers, by those that a token meets (*active*: of experts, that of all experts times
experts per token over experts), or by layers alike. Layers in BF16, lm_head, embeddings and
norms are outside the average; layers fixed to a block format are inside it, as a constant.

With separate choices a unit sets the format of the weights or of the inputs alone, and both count in
the average. A token's multiply-accumulates of a layer are as many as its weight elements, whichever
operand is looked at, so both weigh the same, and a choice that is alike for both has the same average
as the joint choice.

With an input format all inputs have that one: a unit sets the format of the weights alone, and they alone
count in the average.
"""

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal, get_args

import numpy as np
from torch import nn

from dmx.assignment.budget import Budget
from dmx.errors import BudgetError, ModelError
from dmx.formats import (
    BF16,
    BLOCK_SIZE,
    OPERANDS,
    BitUnit,
    BlockFormat,
    Format,
    Operand,
    Unquantized,
    check_choice,
    get_format,
)
from dmx.models.experts import active_factors, experts_path, of_all_experts
from dmx.models.linears import fused_group, linear_layers, match_layers, own_elements

Units = Literal["fused", "layer"]
Weighting = Literal["elements", "active", "layers"]
ExpertUnits = Literal["block", "each"]
"""Whether the experts of a block share their choices."""
Choices = Literal["joint", "separate"]
"""Whether one choice sets the formats of a unit's weights and inputs, or one for each."""


@dataclass(frozen=True)
class Unit:
    """Layers that share one choice. `weight` is what the unit counts in the average."""

    name: str
    layers: tuple[str, ...]
    elements: int
    """Weight elements; a weight that several layers share counts once."""
    weight: int
    operands: tuple[Operand, ...] = OPERANDS
    """What the choice is for."""


@dataclass(frozen=True)
class SearchSpace:
    """What a search may choose: units, candidate formats, and the layers it leaves alone."""

    units: tuple[Unit, ...]
    formats: tuple[Format, ...]
    """Candidates of every unit, smallest first."""
    granularity: Units
    shapes: Mapping[str, tuple[int, int]]
    """Weight shape of every quantized layer, fixed ones included."""
    fixed: Mapping[str, BlockFormat] = field(default_factory=dict)
    fixed_elements: Mapping[str, int] = field(default_factory=dict)
    """Weight elements of each fixed layer; a weight that several layers share counts once."""
    unquantized: tuple[str, ...] = ()
    """Linear layers that stay in 16 bits."""
    weighting: Weighting = "elements"
    model_elements: int = 0
    """Parameters of the whole model, shared ones once."""
    input_format: Format | None = None
    """Of every input, those of fixed layers included; None: units set the formats of inputs, too."""
    factors: Mapping[str, int] = field(default_factory=dict)
    """layer name -> what each of its elements counts in the average, in one unit for all layers; 1 where nothing is
    said."""
    own_elements: Mapping[str, int] = field(default_factory=dict)
    """Weight elements that each searched layer has for itself: 0 where another layer counts them."""
    input_amax: Mapping[str, float] | None = None
    """layer name -> largest magnitude of its input on calibration data; None: not measured."""

    @cached_property
    def weights(self) -> np.ndarray:
        """(U,) float64; what each unit counts in the average."""
        return np.array([u.weight for u in self.units], dtype=np.float64)

    @cached_property
    def name_rank(self) -> np.ndarray:
        """(U,) int64; place of each unit in the order of names."""
        by_name = np.argsort([u.name for u in self.units], kind="stable")
        return np.argsort(by_name, kind="stable")

    @cached_property
    def is_separate(self) -> bool:
        """Whether weights and inputs choose separately."""
        return any(unit.operands == ("input",) for unit in self.units)

    @cached_property
    def _fixed_weights(self) -> dict[str, int]:
        counted = len(OPERANDS) if self.is_separate else 1
        layers = self.weighting == "layers"
        return {
            k: counted * (1 if layers else n * self.factors.get(k, 1))
            for k, n in self.fixed_elements.items()
        }

    @cached_property
    def total_weight(self) -> float:
        """Of all units and the fixed layers."""
        return float(self.weights.sum() + sum(self._fixed_weights.values()))

    def costs(self, unit: BitUnit) -> np.ndarray:
        """(U, F) bits times weight of each unit at each candidate, multiples of 2**-24: sums of them are
        exact in any order."""
        if unit not in self._costs:
            rows = [[self._cost(u, f, unit) for f in self.formats] for u in self.units]
            self._costs[unit] = np.array(rows, dtype=np.float64).reshape(-1, len(self.formats))
        return self._costs[unit]

    @cached_property
    def _costs(self) -> dict[BitUnit, np.ndarray]:
        return {}

    def _cost(self, of: Unit, block_format: Format, unit: BitUnit) -> float:
        by_layers = self.weighting == "layers"
        return sum(
            self._weighted(
                layer,
                block_format,
                1 if by_layers else self._own(layer) * self.factors.get(layer, 1),
                unit,
            )
            for layer in of.layers
        )

    def _own(self, layer: str) -> int:
        """Weight elements that a searched layer has for itself."""
        out, into = self.shapes[layer]
        return self.own_elements.get(layer, out * into)

    def _weighted(self, layer: str, block_format: Format, weight: int, unit: BitUnit) -> float:
        bits = weight * block_format.bits(unit, self.shapes.get(layer))
        if self.weighting == "layers":
            return math.ceil(bits * 2**24) / 2**24
        return round(4 * bits) / 4  # what it is, but for the rounding of a float

    def fixed_bits(self, unit: BitUnit) -> float:
        """Bits times weight of the layers with a fixed block format."""
        weights = self._fixed_weights.items()
        return sum(self._weighted(name, self.fixed[name], w, unit) for name, w in weights)

    def stored_bits(self, choice: Sequence[int] | np.ndarray) -> tuple[float, int]:
        """Bits of the weights that a choice quantizes, scales counted, and elements of all weights that it has a
        format for."""
        formats = self.layer_formats(choice)
        sizes = {n: self.fixed_elements[n] if n in self.fixed else self._own(n) for n in formats}
        bits = (
            sizes[n] * get_format(f).bits("bits_per_element", self.shapes[n])
            for n, f in formats.items()
            if f != BF16.name
        )
        return sum(bits), sum(sizes.values())

    def average(self, choice: Sequence[int] | np.ndarray, unit: BitUnit) -> float:
        """Average bits of a choice (index of the format of each unit)."""
        chosen = np.asarray(choice, dtype=np.int64)
        bits = self.costs(unit)[np.arange(len(self.units)), chosen].sum()
        return float((bits + self.fixed_bits(unit)) / self.total_weight)

    def added_bits(self, unit: BitUnit) -> np.ndarray:
        """(U, F-1) bits that each step adds to an element of a unit."""
        return np.diff(self.costs(unit), axis=1) / self.weights[:, None]

    def needs_input_amax(self) -> bool:
        """Whether a candidate or a fixed format quantizes inputs by what calibration measured."""
        formats: tuple[Format, ...] = (*self.formats, *self.fixed.values())
        if self.input_format is not None:
            formats = (self.input_format,)
        return any(isinstance(f, BlockFormat) and f.needs_input_amax for f in formats)

    def bounds(self, unit: BitUnit) -> tuple[float, float]:
        """Average of the cheapest and of the dearest choice."""
        n = len(self.units)
        top = len(self.formats) - 1
        return self.average([0] * n, unit), self.average([top] * n, unit)

    def unit_of(self, operand: Operand) -> dict[str, int]:
        """layer name -> index of the unit that sets this operand; {} where no unit does."""
        return {
            layer: index
            for index, unit in enumerate(self.units)
            if operand in unit.operands
            for layer in unit.layers
        }

    def layer_formats(
        self, choice: Sequence[int] | np.ndarray, operand: Operand = "weight"
    ) -> dict[str, str]:
        """layer name -> format name, fixed layers included, in the order of the model."""
        if operand == "input" and self.input_format is not None:
            return dict.fromkeys(self.shapes, self.input_format.name)
        chosen = {
            layer: self.formats[int(choice[index])].name
            for layer, index in self.unit_of(operand).items()
        }
        chosen |= {name: f.name for name, f in self.fixed.items()}
        return {name: chosen[name] for name in self.shapes}

    def choice_of(
        self, formats: Mapping[str, str], inputs: Mapping[str, str] | None = None
    ) -> np.ndarray:
        """(U,) the choice that gives weights and inputs these formats (layer name -> format name).

        Args:
            inputs: None: as `formats`.

        Raises:
            KeyError: a layer without a format. ValueError: formats that no choice gives.
        """
        names = [f.name for f in self.formats]
        of: dict[Operand, Mapping[str, str]] = {"weight": formats, "input": inputs or formats}
        choice = np.array([names.index(of[u.operands[0]][u.layers[0]]) for u in self.units])
        for operand, asked in of.items():
            for layer, given in self.layer_formats(choice, operand).items():
                if asked[layer] != given:
                    raise ValueError(f"{asked[layer]} of the {operand} of {layer}")
        return choice

    def check_budget(self, budget: Budget, *, warn: bool = True) -> None:
        """Raise BudgetError when no choice meets it; warn when every choice does."""
        low, high = self.bounds(budget.unit)
        names = ", ".join(map(str, self.formats))
        if budget.limit < low:
            enough = math.ceil(low * 1000) / 1000  # rounded down it would be refused again
            raise BudgetError(
                f"budget.limit={budget.limit:g} {budget.unit} is below the cheapest assignment: "
                f"{enough:g} (all {self.formats[0]}). Reachable with [{names}]: {enough:g} to "
                f"{high:.4g}. Raise budget.limit or choose a family with a smaller format."
            )
        if warn and budget.limit >= high:
            warnings.warn(
                f"budget.limit={budget.limit:g} {budget.unit} is not below the dearest assignment "
                f"({high:.4g}): it holds no layer back from {self.formats[-1]}, and a layer that has less does not gain by more.",
                stacklevel=2,
            )


def _output_layer(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def build_space(
    model: nn.Module,
    formats: Sequence[Format],
    *,
    units: Units = "fused",
    experts: ExpertUnits = "block",
    joins_experts: bool = False,
    exclude: Sequence[str] = (),
    fixed: Mapping[str, str] | None = None,
    include_lm_head: bool = False,
    weighting: Weighting = "elements",
    choices: Choices = "joint",
    input_format: str | Format | None = None,
    kept: Collection[str] = (),
) -> SearchSpace:
    """Units of a model; works on a meta-device model, since it reads shapes only.

    Args:
        choices: separate makes two units, `name:weight` and `name:input`, of each.
        input_format: of every input; units are then `name:weight` alone.
        experts: block: those of a block share one choice for the layers that read the block's input, and one for
            those after them.
        joins_experts: and these two are one.
        exclude: globs of layers that stay in BF16.
        fixed: glob -> format of layers that are not searched; the first match counts.
        kept: layers that stay in BF16 whatever the settings: no token runs them, the target's runtime builds them
            without quantization, or the model keeps them in float32.

    Raises:
        ModelError: nothing to search, or a pattern that matches no layer.
        FormatError: unknown units, weighting, choices or format.
    """
    check_choice(units, get_args(Units), "search.units")
    check_choice(weighting, get_args(Weighting), "search.weighting")
    check_choice(experts, get_args(ExpertUnits), "search.experts")
    check_choice(choices, get_args(Choices), "search.choices")
    linears = linear_layers(model)
    names = list(linears)
    excluded = match_layers(exclude, names, "search.exclude")
    fixed_patterns = {k: get_format(v, setting="search.fixed") for k, v in (fixed or {}).items()}
    fixed_by = match_layers(fixed_patterns, names, "search.fixed")
    _check_fixed(fixed_by, kept)
    output = _output_layer(model)

    searched: list[str] = []
    fixed_formats: dict[str, BlockFormat] = {}
    unquantized: list[str] = []
    for name, linear in linears.items():
        keep = name in excluded or name in kept or linear.in_features % BLOCK_SIZE != 0
        asked = fixed_patterns[fixed_by[name]] if name in fixed_by else None
        if linear is output and not include_lm_head and asked is None:
            keep = True
        if keep or isinstance(asked, Unquantized):
            unquantized.append(name)
        elif asked is not None:
            fixed_formats[name] = asked
        else:
            searched.append(name)
    if not searched:
        raise ModelError(
            f"nothing to search: {len(linears)} linear layers, none of them free (in_features must "
            f"be a multiple of {BLOCK_SIZE}; excluded: {len(excluded)}, fixed: {len(fixed_by)}). "
            "Loosen search.exclude or search.fixed, or choose another model."
        )

    factors = active_factors(model, linears) if weighting == "active" else {}
    group = partial(_group, units=units, experts=experts, joins_experts=joins_experts)
    built = _joint_units(linears, searched, group, weighting, factors)
    if choices == "separate" or input_format is not None:
        operands = OPERANDS if input_format is None else OPERANDS[:1]
        built = [
            replace(unit, name=f"{unit.name}:{operand}", operands=(operand,))
            for unit in built
            for operand in operands
        ]
    # A weight that a searched layer shares is counted there.
    sizes = own_elements(linears, [*searched, *fixed_formats])
    return SearchSpace(
        units=tuple(built),
        formats=tuple(formats),
        granularity=units,
        shapes={n: (m.out_features, m.in_features) for n, m in linears.items() if n in sizes},
        fixed=fixed_formats,
        fixed_elements={n: sizes[n] for n in fixed_formats},
        unquantized=tuple(unquantized),
        weighting=weighting,
        model_elements=sum(p.numel() for p in model.parameters()),
        input_format=None
        if input_format is None
        else get_format(input_format, setting="search.input_format"),
        own_elements={n: sizes[n] for n in searched},
        factors=factors,
    )


def _check_fixed(fixed_by: Mapping[str, str], kept: Collection[str]) -> None:
    """Raise ModelError for a pattern of search.fixed that names kept layers alone."""
    free = {pattern for name, pattern in fixed_by.items() if name not in kept}
    for name, pattern in fixed_by.items():
        if pattern not in free:
            raise ModelError(
                f"search.fixed: pattern {pattern!r} matches only layers that stay in BF16, first {name}: no "
                "calibration token runs them, or the runtime of search.target builds them without "
                "quantization. Leave the pattern out."
            )


def _group(layer: str, *, units: Units, experts: ExpertUnits, joins_experts: bool) -> str:
    """Name of the group that a layer shares its choice with; its own where it is alone."""
    if experts == "block" and (path := experts_path(layer)) is not None:
        if joins_experts:
            return path
        layer = of_all_experts(layer)
    return fused_group(layer) if units == "fused" else layer


def _joint_units(
    linears: Mapping[str, nn.Linear],
    searched: Sequence[str],
    group_of: Callable[[str], str],
    weighting: Weighting,
    factors: Mapping[str, int],
) -> list[Unit]:
    # Layers that share one weight must share one choice, and the weight counts once.
    owner: dict[int, str] = {}
    groups: dict[str, list[str]] = {}
    for name in searched:
        group = group_of(name)
        group = owner.setdefault(id(linears[name].weight), group)
        groups.setdefault(group, []).append(name)
    built = []
    for group, members in groups.items():
        own = own_elements(linears, members)
        size = sum(n * factors.get(name, 1) for name, n in own.items())
        built.append(
            Unit(
                name=group if len(members) > 1 else members[0],
                layers=tuple(members),
                elements=sum(own.values()),
                weight=len(members) if weighting == "layers" else size,
            )
        )
    return built
