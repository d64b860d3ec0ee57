"""What a search is asked to do. A plain dataclass that checks itself and knows nothing of Hydra."""

import math
from dataclasses import dataclass, field
from typing import get_args

from dmx.assignment.facts import SearchFacts
from dmx.assignment.space import Choices, Units, Weighting
from dmx.assignment.targets import SEARCH_TARGETS
from dmx.errors import DataError, DmxError, FormatError
from dmx.formats import (
    BF16,
    FAMILIES,
    SCALE_RULES,
    Family,
    ScaleRule,
    check_choice,
    get_family,
    get_format,
)
from dmx.transforms.stage import RUN_TIME_TRANSFORMS, TRANSFORMS

SEARCHES = ("uniform", "random", "kl", "kl_per_bit", "fisher", "weight_mse", "differentiable")
SCANS = ("kl", "kl_per_bit", "fisher")
"""Searches that measure units on `score_batches`."""
OBJECTIVES = ("cross_entropy", "kl")
PENALTIES = ("hinge", "scaling", "exact")
STARTS = ("constant", "fisher", "kl_per_bit")
GRADIENT_SCALES = ("none", "elements", "rms")
LR_SCHEDULES = ("constant", "cosine")


@dataclass(kw_only=True)
class SearchConfig:
    """All settings of a search; the defaults are the dMX paper's."""

    name: str = "differentiable"
    """uniform | random | kl | kl_per_bit | fisher | weight_mse | differentiable"""
    family: str = "mxfp6_mxfp4"
    """mxfp6_mxfp4 | mxfp8_mxfp4 | mxfp8_mxfp6_mxfp4: the candidate formats of every unit."""
    units: Units = "fused"
    """fused: q/k/v share one choice and gate/up share one. layer: every layer chooses."""
    operands: Choices = "joint"
    """joint: weight and input of a unit share one format. separate: each has a choice of its own, and
    both count in the budget."""
    weighting: Weighting = "elements"
    """What the average counts: weight elements, or every layer as one."""
    exclude: list[str] = field(default_factory=list)
    """Globs of layers that stay in BF16."""
    fixed: dict[str, str] = field(default_factory=dict)
    """Glob -> format of layers that are not searched."""
    include_lm_head: bool = False
    allow_unsearched: bool = False
    """Accept models that keep more than 1 % of their blocks' parameters outside nn.Linear."""
    target: str = "any"
    """Only candidates that this runtime loads; see dmx.assignment.targets."""
    scale_rule: ScaleRule = "floor"
    seed: int = 0
    """Order of the calibration batches, and the draws of `random`."""

    transform: str = "none"
    """none | hadamard_block | hadamard_full | learned, before all else; see docs/transforms.md."""
    transform_file: str | None = None
    """transform=learned: rotations of an earlier search; null = learn them, name=differentiable."""
    residual_block: int | None = 32
    """transform=hadamard_full: channels that are mixed with each other; null = all."""
    rotation: str = "shared"
    """transform=learned: shared | per_block: one rotation for all blocks of an input, or each."""
    rotation_lr: float = 10.0
    """radians, about, for a gradient of 1 nat/token; falls to 0 by half a cosine."""
    rotation_momentum: float = 0.9

    score_batches: int | None = None
    """Batches that kl, kl_per_bit and fisher score on: the first so many; null = all."""

    polish_rounds: int = 0
    """Rounds of the discrete polish after any search but uniform, at most; 0 = none. A round costs
    about a kl scan of `polish_batches`."""
    polish_batches: int | None = None
    """Batches that a round of the polish measures on; null = 4, or half of fewer than 8. Up to four
    times as many of the others verify what it proposes; where none is left, the same ones do. If more
    are left, each round measures on other ones, until all had their turn."""

    steps: int = 400
    """> 0; one batch a step."""
    objective: str = "cross_entropy"
    """cross_entropy (paper) | kl: KL(full precision, quantized), token mean, nats."""
    penalty: str = "hinge"
    """hinge: slope * max(0, average - target). scaling: penalty_lambda * average. exact: none; the
    soft average is held at the target (dmx.searching.descent)."""
    slope: float = 5.0
    """nats per bit over the target"""
    penalty_lambda: float = 0.1
    """nats per bit"""
    lr: float = 1.0
    momentum: float = 0.99
    nesterov: bool = True
    lr_schedule: str = "constant"
    gradient_scale: str = "none"
    """none | elements | rms: evens out units of unequal size (dmx.searching.descent)."""
    start: str = "constant"
    """constant | fisher | kl_per_bit: first raw offsets all alike, or at the choice of that search."""
    raw_start: float = 0.0
    """start=constant: first value of every raw offset, in [0, 2]."""
    start_spread: float = 0.5
    """start=fisher, kl_per_bit: how far from its threshold the surest unit starts, in [0, 1]."""
    average_from: float | None = None
    """Share of the steps from which raw offsets are averaged, up to `anneal_from`; the hard choice
    then follows that average instead of the last state. null = no average."""
    temperature: float = 0.4
    """Until `anneal_from`; unitless, higher is harder."""
    temperature_end: float = 20.0
    """At the last step."""
    anneal_from: float = 0.6
    """Share of the steps after which the temperature rises."""
    gradient_checkpointing: bool = False
    cuda_graph: str = "auto"
    """auto | on | off: capture the step in a CUDA graph. auto: on a GPU, for purely causal sdpa
    models without gradient checkpointing; the record says what ran."""
    evaluate_every: int = 50
    """Steps between measurements of the soft, hard and projected model on the first batch."""
    checkpoint_every: int = 10
    """Steps between checkpoints, where a folder is given."""

    def __post_init__(self) -> None:
        check_choice(self.name, SEARCHES, "search.name")
        get_family(self.family)
        check_choice(self.units, get_args(Units), "search.units")
        check_choice(self.operands, get_args(Choices), "search.operands")
        check_choice(self.weighting, get_args(Weighting), "search.weighting")
        check_choice(self.scale_rule, SCALE_RULES, "search.scale_rule")
        check_choice(self.objective, OBJECTIVES, "search.objective")
        check_choice(self.penalty, PENALTIES, "search.penalty")
        check_choice(self.lr_schedule, LR_SCHEDULES, "search.lr_schedule")
        check_choice(self.gradient_scale, GRADIENT_SCALES, "search.gradient_scale")
        check_choice(self.start, STARTS, "search.start")
        check_choice(self.cuda_graph, ("auto", "on", "off"), "search.cuda_graph")
        check_choice(self.target, ("any", *SEARCH_TARGETS), "search.target")
        check_choice(self.transform, TRANSFORMS, "search.transform")
        check_choice(self.rotation, ("shared", "per_block"), "search.rotation")
        for name, low, high in (
            ("raw_start", 0, 2), ("anneal_from", 0, 1), ("momentum", 0, 0.999999),
            ("lr", 0, math.inf), ("slope", 0, math.inf), ("penalty_lambda", 0, math.inf),
            ("temperature", 1e-3, 1e3), ("temperature_end", 1e-3, 1e3),
            ("rotation_lr", 0, math.inf), ("rotation_momentum", 0, 0.999999),
            ("start_spread", 0, 1), ("average_from", 0, self.anneal_from),
        ):  # fmt: skip
            value = getattr(self, name)
            if name == "average_from" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SearchConfigError(f"search.{name}={value!r} must be a number")
            if not low <= value <= high:
                raise SearchConfigError(f"search.{name}={value} must lie in [{low:g}, {high:g}]")
        for name, low in (
            ("steps", 1), ("evaluate_every", 1), ("checkpoint_every", 1), ("score_batches", 1),
            ("polish_rounds", 0), ("polish_batches", 1), ("seed", 0), ("residual_block", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if name in ("score_batches", "polish_batches", "residual_block") and value is None:
                continue
            if type(value) is not int:
                raise SearchConfigError(f"search.{name}={value!r} must be a whole number")
            if value < low:
                raise SearchConfigError(f"search.{name}={value} must be at least {low}")
        if self.nesterov and self.momentum == 0:
            raise SearchConfigError("search.nesterov=true needs search.momentum > 0")
        if self.name == "uniform" and self.polish_rounds:
            raise SearchConfigError(
                f"search.polish_rounds={self.polish_rounds}: a polished uniform choice is not uniform. "
                "Use search.polish_rounds=0, or polish another search."
            )
        if self.name == "weight_mse" and self.operands == "separate":
            raise SearchConfigError(
                "search.operands=separate with search.name=weight_mse: the error of the weights says "
                "nothing of inputs. Use search.operands=joint, or another search, for example "
                "search.name=fisher."
            )
        if self.name == "differentiable" and self.scale_rule != "floor":
            raise FormatError(
                f"search.scale_rule={self.scale_rule!r}: the continuous quantizer follows the "
                "floor rule only. Use search.scale_rule=floor, or a search that is not differentiable."
            )
        if isinstance(self.exclude, str) or not isinstance(self.fixed, dict):
            raise SearchConfigError(
                f"search.exclude must be a list of globs and search.fixed a dict of glob -> format, "
                f"got {self.exclude!r} and {self.fixed!r}"
            )
        self._check_transform()
        self._check_target()

    def _check_transform(self) -> None:
        if self.transform_file is not None and self.transform != "learned":
            raise SearchConfigError(
                f"search.transform_file={self.transform_file} needs search.transform=learned, which "
                f"is {self.transform}. Set both, or neither."
            )
        if self.transform == "learned" and not self.learns_rotation and self.transform_file is None:
            raise SearchConfigError(
                f"search.transform=learned with search.name={self.name}: only the differentiable "
                "search learns rotations. Give the file that it wrote "
                "(search.transform_file=path/to/transform.safetensors), or use "
                "search.transform=hadamard_block."
            )
        if self.transform in RUN_TIME_TRANSFORMS and self.target != "any":
            raise SearchConfigError(
                f"search.transform={self.transform} rotates inputs at run time, which no runtime of "
                f"search.target={self.target} does. Use search.transform=hadamard_full or none, or "
                "search.target=any."
            )

    def _check_target(self) -> None:
        if self.target == "any":
            return
        target = SEARCH_TARGETS[self.target]
        if target.needs_fused_units and self.units != "fused":
            raise FormatError(
                f"search.target={self.target} needs search.units=fused: its runtime runs q/k/v and "
                "gate/up as one product each."
            )
        refused = [f.name for f in get_family(self.family).formats if f.name not in target.formats]
        if refused:
            fitting = [
                f.name
                for f in FAMILIES.values()
                if all(b.name in target.formats for b in f.formats)
            ]
            raise FormatError(
                f"search.target={self.target} cannot load {', '.join(refused)} of "
                f"search.family={self.family}. Families that it loads: {', '.join(fitting) or 'none'}."
            )
        if self.operands == "separate":
            alone = [
                f.name for f in self.format_family.formats if f.name not in target.input_formats
            ]
            if alone:
                family = "a search.family of those formats, " if target.input_formats else ""
                raise FormatError(
                    f"search.operands=separate: {target.name} of search.target={self.target} cannot run "
                    f"inputs in {', '.join(alone)} beside weights in another format. It can: "
                    f"{', '.join(sorted(target.input_formats)) or 'none'}. Use "
                    f"search.operands=joint, {family}or search.target=any."
                )
        for pattern, name in self.fixed.items():
            fixed = get_format(name, setting=f"search.fixed[{pattern!r}]")
            if fixed is not BF16 and fixed.name not in target.formats:
                raise FormatError(
                    f"search.target={self.target} cannot load {fixed} of search.fixed[{pattern!r}]. "
                    f"It loads: bf16, {', '.join(sorted(target.formats))}."
                )

    @property
    def learns_rotation(self) -> bool:
        return (
            self.name == "differentiable"
            and self.transform == "learned"
            and self.transform_file is None
        )

    @property
    def needs_scan(self) -> bool:
        """Whether units are measured on `score_batches`."""
        return self.name in SCANS or (self.name == "differentiable" and self.start != "constant")

    def check_batches(self, count: int) -> None:
        """Raise DataError where a part of the search asks for more batches than there are."""
        for setting, is_used in (
            ("score_batches", self.needs_scan), ("polish_batches", self.polish_rounds > 0)
        ):  # fmt: skip
            asked = getattr(self, setting)
            if is_used and asked is not None and asked > count:
                raise DataError(
                    f"search.{setting}={asked}, but there are {count} batches: give more "
                    f"(calibration.batches), or set search.{setting}=null"
                )

    @property
    def format_family(self) -> Family:
        return get_family(self.family)

    def summary(self) -> SearchFacts:
        """What an assignment says of its search."""
        return SearchFacts(
            name=self.name, family=self.family, seed=self.seed, polish_rounds=self.polish_rounds
        )


class SearchConfigError(DmxError):
    """A search setting outside its range."""
