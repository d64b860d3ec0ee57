"""What a search is asked to do. Plain dataclasses that check themselves and know nothing of Hydra."""

import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

from dmx.assignment.facts import Kept, SearchFacts
from dmx.assignment.rules import ScaleRulesConfig, rules_of
from dmx.assignment.space import Choices, ExpertUnits, Units, Weighting
from dmx.assignment.targets import SEARCH_TARGETS, Loader
from dmx.errors import DataError, DmxError, FormatError
from dmx.formats import (
    BF16,
    FAMILIES,
    OPERANDS,
    PATHS,
    SWITCH,
    AskedPath,
    BlockFormat,
    Family,
    Format,
    Operand,
    ScaleRule,
    SoftPath,
    check_choice,
    get_family,
    get_format,
    soft_path,
)
from dmx.models.experts import Form
from dmx.models.memory import OOM, MicroBatch
from dmx.transforms.stage import RUN_TIME_TRANSFORMS, TRANSFORMS

SEARCHES = (
    "uniform",
    "random",
    "kl",
    "kl_per_bit",
    "fisher",
    "aumann_shapley",
    "weight_mse",
    "differentiable",
    "joint",
    "adaptive",
)
DESCENDING = ("differentiable", "joint", "adaptive")
"""Searches that take steps by gradient."""
SCANS = ("kl", "kl_per_bit", "fisher", "aumann_shapley")
"""Searches that are a measurement of units on `score_batches`."""
OBJECTIVES = ("cross_entropy", "kl")
PENALTIES = ("hinge", "scaling", "exact")
GRADIENT_SCALES = ("none", "elements")
LR_SCHEDULES = ("constant", "cosine")


class SearchConfigError(DmxError):
    """A search setting outside its range, or one that the search does not use."""


@dataclass(kw_only=True)
class DescentConfig:
    """How the differentiable search descends; the defaults are the dMX paper's."""

    penalty: str = "hinge"
    """hinge: slope * max(0, average - target). scaling: penalty_lambda * average. exact: none; the
    soft average is held at the target (dmx.searching.descent)."""
    slope: float = 5.0
    """penalty=hinge: nats per bit over the target"""
    penalty_lambda: float = 0.1
    """penalty=scaling: nats per bit"""
    lr: float = 1.0
    momentum: float = 0.99
    nesterov: bool = True
    lr_schedule: str = "constant"
    """constant | cosine: half a cosine from lr to 0."""
    gradient_scale: str = "none"
    """none | elements: evens out units of unequal size (dmx.searching.descent)."""
    path: AskedPath = "auto"
    """How the continuous quantizer moves between neighbouring formats. element: through their element
    formats, the paper's; for the families with a name, under floor. line: straight from the values of one
    to those of the other. auto: element where it exists, for weights and inputs each."""
    raw_start: float = 0.0
    """First value of every raw offset, in [0, 2]."""
    temperature: float = 0.4
    """Until `anneal_from`; unitless, higher is harder."""
    temperature_end: float = 20.0
    """At the last step."""
    anneal_from: float = 0.6
    """Share of the steps after which the temperature rises."""
    gradient_checkpointing: bool = False
    """Less memory for a second forward pass."""
    cuda_graph: str = "auto"
    """auto | on | off: capture the step in a CUDA graph. auto: on a GPU, for purely causal sdpa
    models; the record says what ran."""
    keep_reference: str = "auto"
    """auto | on | off, objective=kl: keep what the unquantized model gave for a batch, so that a batch that comes
    again costs no pass of it; the same numbers. auto: where batches come again and memory has room for all."""
    evaluate_every: int = 50
    """Steps between measurements of the soft, hard and projected model on the first batch."""
    checkpoint_every: int = 10
    """Steps between checkpoints, where a folder is given."""

    def __post_init__(self) -> None:
        where = "search.descent"
        check_choice(self.penalty, PENALTIES, f"{where}.penalty")
        check_choice(self.lr_schedule, LR_SCHEDULES, f"{where}.lr_schedule")
        check_choice(self.gradient_scale, GRADIENT_SCALES, f"{where}.gradient_scale")
        for name in ("cuda_graph", "keep_reference"):
            check_choice(getattr(self, name), SWITCH, f"{where}.{name}")
        check_choice(self.path, PATHS, f"{where}.path")
        for name in ("lr", "slope", "penalty_lambda"):
            _check_number(f"{where}.{name}", getattr(self, name), 0, math.inf)
        for name in ("temperature", "temperature_end"):
            _check_number(f"{where}.{name}", getattr(self, name), 1e-3, 1e3)
        _check_number(f"{where}.raw_start", self.raw_start, 0, 2)
        _check_number(f"{where}.anneal_from", self.anneal_from, 0, 1)
        _check_number(f"{where}.momentum", self.momentum, 0, 0.999999)
        _check_count(f"{where}.evaluate_every", self.evaluate_every, 1)
        _check_count(f"{where}.checkpoint_every", self.checkpoint_every, 1)
        if self.nesterov and self.momentum == 0:
            raise SearchConfigError(f"{where}.nesterov=true needs {where}.momentum > 0")
        for name, penalty in (("slope", "hinge"), ("penalty_lambda", "scaling")):
            if self.penalty != penalty and getattr(self, name) != getattr(DescentConfig, name):
                raise SearchConfigError(
                    f"{where}.{name}={getattr(self, name)} belongs to {where}.penalty={penalty}, which "
                    f"is {self.penalty}. Set both, or neither."
                )


@dataclass(kw_only=True)
class JointConfig:
    """name=joint: how the weights descend beside the offsets (dmx.searching.joint)."""

    lr: float = 1e-4
    """Highest rate of AdamW."""
    warmup: int = 20
    """Steps in which the rate rises to `lr`; it falls to 0 by half a cosine after."""
    max_norm: float = 1.0
    """Of the gradient over all weights; a longer one is shortened to it."""

    def __post_init__(self) -> None:
        _check_number("search.joint.lr", self.lr, 0, 1)
        _check_count("search.joint.warmup", self.warmup, 0)
        _check_number("search.joint.max_norm", self.max_norm, 1e-9, math.inf)


@dataclass(kw_only=True)
class RotationConfig:
    """transform=learned: where the rotations of the layers' inputs come from."""

    file: str | None = None
    """Rotations of an earlier search, used as they are; null = learn them, name=differentiable."""
    lr: float = 10.0
    """radians, about, for a gradient of 1 nat/token; falls to 0 by half a cosine."""
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_number("search.rotation.lr", self.lr, 0, math.inf)
        _check_number("search.rotation.momentum", self.momentum, 0, 0.999999)


@dataclass(kw_only=True)
class PolishConfig:
    """The discrete polish after any search but uniform (dmx.searching.polish)."""

    rounds: int | Literal["auto"] = 0
    """At most; 0 = no polish. A round costs about a kl scan of `batches`. auto: of the command `search` alone, which
    knows what becomes of the weights."""
    batches: int | None = None
    """That a round measures on; null = 4, or half of fewer than 8. Up to four times as many of the
    others verify what it proposes; where none is left, the same ones do. If more are left, each round
    measures on other ones, until all had their turn."""

    def __post_init__(self) -> None:
        if self.rounds != "auto":
            _check_count("search.polish.rounds", self.rounds, 0)
        if self.batches is not None:
            _check_count("search.polish.batches", self.batches, 1)
            if not self.rounds:
                raise SearchConfigError(
                    f"search.polish.batches={self.batches} with search.polish.rounds=0: there is no "
                    "polish. Set search.polish.rounds, for example 12, or leave both."
                )

    @property
    def count(self) -> int:
        """`rounds` of a `SearchConfig`, which has no auto."""
        assert self.rounds != "auto"
        return self.rounds


@dataclass(kw_only=True)
class SearchSettings:
    """Settings that several searches share, each taking what it uses: `for_search`. The defaults are those of
    configs/search/differentiable.yaml; the command `search` has those of adaptive.yaml."""

    name: str = "differentiable"
    """uniform | random | kl | kl_per_bit | fisher | aumann_shapley | weight_mse | differentiable | joint |
    adaptive"""
    family: str | list[str] = "mxfp6_mxfp4"
    """The candidate formats of every unit: two to four formats of rising bits, cheapest first, or
    mxfp6_mxfp4 | mxfp8_mxfp4 | mxfp8_mxfp6_mxfp4, names of such lists."""
    units: Units = "fused"
    """fused: q/k/v share one choice and gate/up share one. layer: every layer chooses."""
    choices: Choices = "joint"
    """joint: weight and input of a unit share one format. separate: each has a choice of its own, and
    both count in the budget."""
    input_format: str | None = None
    """A format, or bf16, of every input of the assigned layers; units then choose the format of their
    weights alone, and the budget counts weights alone. null: inputs are chosen, too (`choices`)."""
    experts: ExpertUnits = "block"
    """block: all experts of a block share one choice for gate/up and one for down. each: every expert chooses."""
    weighting: Weighting = "elements"
    """What the average counts: weight elements; active: those of them that a token meets, an expert's with experts per
    token over experts; or every layer as one."""
    exclude: list[str] = field(default_factory=list)
    """Globs of layers that stay in BF16."""
    fixed: dict[str, str] = field(default_factory=dict)
    """Glob -> format of layers that are not searched."""
    include_lm_head: bool = False
    """Search the output layer, too."""
    allow_unsearched: bool = False
    """Accept models that keep more than 1 % of their blocks' parameters outside nn.Linear."""
    target: str = "any"
    """Only candidates that this runtime loads; see dmx.assignment.targets."""
    scale_rules: ScaleRulesConfig = field(default_factory=ScaleRulesConfig)
    """Of the assignment, and of all that a search measures; what auto stands for is put in its place."""
    seed: int = 0
    """Order of the calibration batches, and the draws of `random`."""
    transform: str = "none"
    """none | hadamard_block | hadamard_selected | hadamard_full | learned, before all else; see
    docs/transforms.md."""
    residual_block: int | None = 32
    """transform=hadamard_full: channels that are mixed with each other; null = all."""
    rotation: RotationConfig = field(default_factory=RotationConfig)
    """Of transform=learned."""
    score_batches: int | None = None
    """Batches that kl, kl_per_bit, fisher, aumann_shapley and adaptive score on: the first so many; null = all."""
    micro_batch: int | None = None
    """Rows of a batch that run at a time, to save memory; null = all."""
    oom: str = "stop"
    """stop | halve: where the memory does not hold the rows that run at a time, go on with half as many."""
    steps: int = 400
    """Of differentiable; > 0, one batch a step. Of adaptive at most."""
    objective: str = "cross_entropy"
    """Of differentiable: cross_entropy (paper) | kl: KL(full precision, quantized), token mean, nats."""
    descent: DescentConfig = field(default_factory=DescentConfig)
    joint: JointConfig = field(default_factory=JointConfig)
    """Of differentiable: everything else about its steps."""
    polish: PolishConfig = field(default_factory=PolishConfig)
    """Of any search but uniform."""

    def __post_init__(self) -> None:
        check_choice(self.name, SEARCHES, "search.name")
        self.family = get_family(self.family).setting  # a list with a name is that name
        check_choice(self.units, get_args(Units), "search.units")
        check_choice(self.experts, get_args(ExpertUnits), "search.experts")
        check_choice(self.choices, get_args(Choices), "search.choices")
        check_choice(self.weighting, get_args(Weighting), "search.weighting")
        check_choice(self.objective, OBJECTIVES, "search.objective")
        check_choice(self.target, ("any", *SEARCH_TARGETS), "search.target")
        check_choice(self.transform, TRANSFORMS, "search.transform")
        check_choice(self.oom, OOM, "search.oom")
        for name, low in (
            ("steps", 1),
            ("score_batches", 1),
            ("residual_block", 1),
            ("seed", 0),
            ("micro_batch", 1),
        ):
            value = getattr(self, name)
            if value is not None or name in ("steps", "seed"):
                _check_count(f"search.{name}", value, low)
        if isinstance(self.exclude, str) or not isinstance(self.fixed, dict):
            raise SearchConfigError(
                f"search.exclude must be a list of globs and search.fixed a dict of glob -> format, "
                f"got {self.exclude!r} and {self.fixed!r}"
            )
        self._check_inputs()
        known = {} if self.runtime is None else self.runtime.input_rules
        self.scale_rules = self.scale_rules.for_runtime({f: r[0] for f, r in known.items()})
        self.scale_rules.check_used({o: self.formats_of(o) for o in OPERANDS})
        self._check_transform()
        self._check_target()

    @property
    def runtime(self) -> Loader | None:
        """What loads the exports of `target`; None: any."""
        return None if self.target == "any" else SEARCH_TARGETS[self.target]

    def input_rules(self) -> dict[str, ScaleRule]:
        """MX format that inputs may be in -> its scale rule."""
        rules = self.scale_rules.by_format()["input"]
        return {
            f.name: rules[f.name]
            for f in dict.fromkeys(self.formats_of("input"))
            if isinstance(f, BlockFormat) and f.is_mx
        }

    def foreign_input_rules(self) -> dict[str, ScaleRule]:
        """Those of `input_rules` by which the runtime of `target` is known not to quantize."""
        known = {} if self.runtime is None else self.runtime.input_rules
        return {f: r for f, r in self.input_rules().items() if f in known and r not in known[f]}

    @property
    def experts_form(self) -> Form:
        """How experts that lie in 3-D parameters become linear layers."""
        return "stacked" if self.experts == "block" else "split"

    def formats_of(self, operand: Operand) -> tuple[Format, ...]:
        """What an operand may be in: candidates, fixed formats, or the one of all inputs."""
        if operand == "input" and self.input_format is not None:
            return (get_format(self.input_format),)
        fixed = (get_format(name, setting="search.fixed") for name in self.fixed.values())
        return (*self.format_family.formats, *fixed)

    def _check_inputs(self) -> None:
        if self.input_format is None:
            return
        where = "search.input_format"
        self.input_format = get_format(self.input_format, setting=where).name
        if self.choices == "separate":
            raise SearchConfigError(
                f"{where}={self.input_format} with search.choices=separate: inputs either all have "
                f"that format, or a choice each. Use search.choices=joint, or {where}=null."
            )

    def _check_transform(self) -> None:
        for name, transform in (("residual_block", "hadamard_full"), ("rotation", "learned")):
            if self.transform != transform and (changed := self.changed([name])):
                raise SearchConfigError(
                    f"{changed[0]} needs search.transform={transform}, which is {self.transform}. Set "
                    "both, or neither."
                )
        rotates = self.target == "any" or SEARCH_TARGETS[self.target].rotates_inputs
        if self.transform in RUN_TIME_TRANSFORMS and not rotates:
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
        if target.needs_fused_units and self.experts != "block":
            raise FormatError(
                f"search.target={self.target} needs search.experts=block: its runtime runs all experts of a block as one "
                "product, in one format."
            )
        refused = [
            f.name
            for f in self.format_family.formats
            if f is not BF16 and f.name not in target.formats
        ]
        if refused:
            fitting = [
                f.name
                for f in FAMILIES.values()
                if all(b.name in target.formats for b in f.formats)
            ]
            raise FormatError(
                f"search.target={self.target} cannot load {', '.join(refused)} of "
                f"search.family={self.format_family}. Families that it loads: "
                f"{', '.join(fitting) or 'none'}, and lists of {', '.join(sorted(target.formats))}."
            )
        self._check_input_target(target)
        if self.choices == "separate":
            names = [f.name for f in self.format_family.formats if f is not BF16]
            alone = [f for f in names if not all(target.takes(weight, f) for weight in names)]
            if alone:
                can = ", ".join(sorted(target.input_formats)) or "none"
                family = ""
                if target.beside is not None:
                    can += f" beside {', '.join(sorted(target.beside))} alone"
                elif target.input_formats:
                    family = "a search.family of those formats, "
                raise FormatError(
                    f"search.choices=separate: {target.name} of search.target={self.target} cannot run "
                    f"inputs in {', '.join(alone)} beside weights in another format. It can: {can}. Use "
                    f"search.choices=joint, {family}or search.target=any."
                )
        for pattern, name in self.fixed.items():
            fixed = get_format(name, setting=f"search.fixed[{pattern!r}]")
            if fixed is not BF16 and fixed.name not in target.formats:
                raise FormatError(
                    f"search.target={self.target} cannot load {fixed} of search.fixed[{pattern!r}]. "
                    f"It loads: bf16, {', '.join(sorted(target.formats))}."
                )

    def _check_input_target(self, target: Loader) -> None:
        """Raise FormatError where the runtime cannot run inputs in `input_format` beside all weights."""
        held, asked = target.input_formats, self.input_format
        fixed = {get_format(f).name for f in self.fixed.values()}
        others = {f.name for f in self.format_family.formats} | fixed
        others -= {asked, BF16.name}
        if asked is None and not target.own_inputs:
            raise FormatError(
                f"search.target={self.target}: its files ask for no inputs in the weights' formats, and search.input_format=null "
                f"measures inputs in them. Set search.input_format to {' or '.join(sorted({BF16.name, *held}))}, with "
                "search.choices=joint."
            )
        if asked not in (None, BF16.name) and BF16 in self.format_family.formats:
            raise FormatError(
                f"search.input_format={asked} with {BF16.name} in search.family: no export for search.target={self.target} "
                f"holds a quantized input beside a weight in {BF16.name}. Leave it out of the family, or use "
                "search.target=any."
            )
        if asked is None or all(target.takes(weight, asked) for weight in others):
            return
        names = ", ".join(sorted(held | {BF16.name}))
        if target.left_alone is not None:
            names = f"{BF16.name} beside {', '.join(sorted(target.left_alone))} alone"
        if target.beside is not None:
            names = f"{BF16.name}, beside {', '.join(sorted(target.beside))} also {', '.join(sorted(held))}"
        raise FormatError(
            f"search.input_format={asked}: {target.name} of search.target={self.target} cannot run "
            f"inputs in it beside weights in {', '.join(sorted(others))}. Beside weights in another "
            f"format it takes inputs in {names}. Use one of these, {'search.input_format=null, ' * target.own_inputs}or "
            "search.target=any."
        )

    # --- what a search uses --------------------------------------------------------------------

    def changed(self, names: Iterable[str]) -> list[str]:
        """The named settings that differ from their defaults, as `search.descent.lr=3.0`."""
        return [f"search.{text}" for text in _differences(self, names)]

    def unused(self, searches: Iterable[str]) -> list[str]:
        """What is set and what none of these searches uses, as `search.steps=100`."""
        used = {name for search in searches for name in USED_BY[search]}
        return self.changed(name for name in _ONLY_SOME if name not in used)

    def check_used(self, also: Iterable[str] = ()) -> None:
        """Raise SearchConfigError for what is set and what `name` does not use.

        Args:
            also: settings that others use beside it.
        """
        names = [n for n in _ONLY_SOME if n not in (*USED_BY[self.name], *also)]
        for name in names:
            if changed := self.changed([name]):
                users = ", ".join(search for search, used in USED_BY.items() if name in used)
                raise SearchConfigError(
                    f"{changed[0]} is not for search.name={self.name}, which does not use it ({users} "
                    "do). Leave it out, or choose another search; in commands by search=NAME, since search.name=NAME "
                    "alone keeps the settings of the search before."
                )

    def for_search(self, name: str, **changes: Any) -> "SearchConfig":
        """The settings of one search: what it does not use is left at its default.

        Args:
            changes: settings of its own, which it must use.
        """
        check_choice(name, SEARCHES, "search.name")
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for unused in set(_ONLY_SOME) - set(USED_BY[name]):
            del values[unused]
        values |= {"name": name, **changes}
        if not _learns_rotation(name, values["transform"], values["rotation"]):
            values["rotation"] = RotationConfig(file=values["rotation"].file)
        return SearchConfig(**values)

    @property
    def format_family(self) -> Family:
        """Candidate formats of every unit."""
        return get_family(self.family)

    def rows_at_a_time(self) -> MicroBatch:
        """Of a stage of this search, which begins with as many as are asked for."""
        return MicroBatch(self.micro_batch, self.oom, "search")

    @property
    def descends(self) -> bool:
        """Whether it takes steps by gradient."""
        return self.name in DESCENDING

    @property
    def scores_units(self) -> bool:
        """Whether units are measured on `score_batches`."""
        return self.name in (*SCANS, "adaptive")

    @property
    def learns_rotation(self) -> bool:
        """Whether the rotations are learned in this search, and not taken from a file."""
        return _learns_rotation(self.name, self.transform, self.rotation)

    def check_by_block(self, searches: Iterable[str]) -> None:
        """Refuse what a model that is held block by block cannot do.

        Args:
            searches: that these are the settings of.
        """
        asked = set(searches)
        if "joint" in asked:
            raise SearchConfigError(
                "search.name=joint: masters and moments of all weights lie on the device, and the model is held block by "
                "block (run.memory=block). Use search.name=differentiable, or run.memory=all."
            )
        if asked & set(DESCENDING) and self.descent.cuda_graph == "on":
            raise SearchConfigError(
                "search.descent.cuda_graph=on: no pass is captured whose weights are copied meanwhile (run.memory=block). "
                "Use search.descent.cuda_graph=off, or run.memory=all."
            )

    def check_batches(self, count: int) -> None:
        """Raise DataError where a part of the search asks for more batches than there are."""
        for setting, asked in (
            ("score_batches", self.score_batches if self.scores_units else None),
            ("polish.batches", self.polish.batches),
        ):
            if asked is not None and asked > count:
                raise DataError(
                    f"search.{setting}={asked}, but there are {count} batches: give more "
                    f"(calibration.batches), or set search.{setting}=null"
                )


_ONLY_SOME = ("score_batches", "steps", "objective", "descent", "joint", "polish")
"""Settings that not every search uses."""
USED_BY: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "random": ("polish",),
    "weight_mse": ("polish",),
    **{name: ("score_batches", "polish") for name in SCANS},
    "differentiable": ("steps", "objective", "descent", "polish"),
    "joint": ("steps", "objective", "descent", "joint"),
    "adaptive": ("score_batches", "steps", "objective", "descent", "polish"),
}
"""Search -> which of these it uses."""


@dataclass(kw_only=True)
class SearchConfig(SearchSettings):
    """All settings of one search; the defaults are the dMX paper's, not those of the command `search`, which is
    adaptive. What it does not use cannot be set for it: SearchConfigError."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_used()
        if self.polish.rounds == "auto":
            raise SearchConfigError(
                "search.polish.rounds=auto is for the command `search`, which knows what becomes of the weights and where the "
                "model is. Give a number: search.polish.rounds=12, or 0 for no polish."
            )
        if self.name == "weight_mse" and self.choices == "separate":
            raise SearchConfigError(
                "search.choices=separate with search.name=weight_mse: the error of the weights says "
                "nothing of inputs. Use search.choices=joint, or another search, for example "
                "search.name=fisher."
            )
        if self.descent.keep_reference == "on" and self.objective != "kl":
            raise SearchConfigError(
                f"search.descent.keep_reference=on with search.objective={self.objective}, which compares with no other "
                "model: there is nothing to keep. Use search.objective=kl, or leave it out."
            )
        if self.transform == "learned":
            self._check_rotation()
        self.paths  # noqa: B018  (raises where the asked one does not exist)

    def _check_rotation(self) -> None:
        if self.learns_rotation and any(
            isinstance(f, BlockFormat) and f.needs_input_amax for f in self.formats_of("input")
        ):
            raise SearchConfigError(
                "search.transform=learned: the global scale of nvfp4 inputs is fixed by calibration before "
                "the search, and rotations that learn would move them. Use "
                "search.transform=hadamard_block, give rotations that are learned already "
                "(search.rotation.file), or leave nvfp4 out of search.family."
            )
        if self.name != "differentiable" and self.rotation.file is None:
            raise SearchConfigError(
                f"search.transform=learned with search.name={self.name}: only the differentiable "
                "search learns rotations. Use it (search=learned in commands), give the file that it wrote "
                "(search.rotation.file=path/to/transform.safetensors), or use "
                "search.transform=hadamard_block."
            )
        if not self.learns_rotation and self.rotation != RotationConfig(file=self.rotation.file):
            raise SearchConfigError(
                f"search.rotation.lr={self.rotation.lr} search.rotation.momentum="
                f"{self.rotation.momentum}: rotations from search.rotation.file={self.rotation.file} "
                "are used as they are. Leave both at their defaults, or search.rotation.file=null to "
                "learn."
            )

    @property
    def paths(self) -> dict[Operand, SoftPath]:
        """Path of the continuous quantizer for each operand; none where nothing descends, nor for inputs
        in one format.

        Raises:
            FormatError: search.descent.path=element, and there is none.
        """
        if not self.descends:
            return {}
        rules, family = self.scale_rules.by_format(), self.format_family
        return {
            o: soft_path(family, rules_of(rules, o, family.formats), self.descent.path, o)
            for o in (OPERANDS if self.input_format is None else OPERANDS[:1])
        }

    def summary(
        self, kept: Kept | None = None, because: str | None = None, *, descended: bool = True
    ) -> SearchFacts:
        """What an assignment says of its search.

        Args:
            kept, because: of name=adaptive, whose choice it took, and why.
            descended: whether a search that may take steps took some.
        """
        paths = self.paths if descended else {}
        family, path, input_path = self.family, *map(paths.get, OPERANDS)
        return SearchFacts(
            name=self.name,
            family=family if isinstance(family, str) else tuple(family),
            seed=self.seed,
            polish_rounds=self.polish.count,
            path=path,
            input_path=None if input_path == path else input_path,
            kept=kept,
            kept_because=because,
        )


def _learns_rotation(name: str, transform: str, rotation: RotationConfig) -> bool:
    return name == "differentiable" and transform == "learned" and rotation.file is None


def _differences(value: Any, names: Iterable[str]) -> list[str]:
    """`name=value` of the named fields that are not at their default; of nested ones `name.field=value`."""
    texts = []
    for name in names:
        spec, own = value.__dataclass_fields__[name], getattr(value, name)
        if hasattr(own, "__dataclass_fields__"):
            texts += [f"{name}.{text}" for text in _differences(own, own.__dataclass_fields__)]
        elif own != (spec.default if spec.default is not MISSING else spec.default_factory()):
            texts.append(f"{name}={own}")
    return texts


def _check_number(setting: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SearchConfigError(f"{setting}={value!r} must be a number")
    if not low <= value <= high:
        raise SearchConfigError(f"{setting}={value} must lie in [{low:g}, {high:g}]")


def _check_count(setting: str, value: Any, low: int) -> None:
    if type(value) is not int:
        raise SearchConfigError(f"{setting}={value!r} must be a whole number")
    if value < low:
        raise SearchConfigError(f"{setting}={value} must be at least {low}")
