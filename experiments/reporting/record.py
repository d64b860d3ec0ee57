"""What a run leaves behind: `Method` (what identifies a result), `Row` (what was measured of it), `Record`.

This file is the only home of what tells one result from another. `Method` describes each of its
fields once, in the field's own metadata: how it reads in a label, whether a table's title names it,
and whether two results must be alike in it to be compared. Grouping, labels, tables, legends, JSON and
comparisons walk over `dataclasses.fields`, so that another dimension is one more field here. Labels are
made from methods and never read back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dmx.assignment.facts import KEPT_OF
from dmx.errors import RunError
from dmx.files import write_json

from .packed import unpack_formats
from .stored import Stored, read_json

SCHEMA = "dmx.record/2"
HEURISTICS = ("kl", "kl_per_bit", "fisher", "aumann_shapley", "weight_mse")
"""Searches that rank units by a score; the first is the dMX paper's opponent."""
QUANTIZED = ("W+A", "W")
"""Weights and inputs quantized, or weights only."""


# --- what identifies a result --------------------------------------------------------------------


def _path_text(path: str) -> str:
    sides = [
        side
        for side, way in zip(("weights", "inputs"), path.split(", "), strict=False)
        if way == "line"
    ]
    return f"straight line of {sides[0]}" if ", " in path else "straight line"


@dataclass(frozen=True, order=True)
class Limit(Stored):
    """A budget: the upper bound of the average bits."""

    limit: float
    unit: str
    """element_bits | bits_per_element"""

    def __str__(self) -> str:
        return f"{self.limit:g} {self.unit}"


def budget_text(budget: Limit | None) -> str:
    """`5 element_bits`, or that there is none."""
    return "no budget" if budget is None else str(budget)


def dimension(
    default: Any,
    *,
    label: Callable[[Any], str] | None = None,
    join: str = " + ",
    title: Callable[[Any], str] | None = None,
    compared: bool = True,
) -> Any:
    """A field of `Method`.

    Args:
        default: what goes without saying in a label.
        label: text of any other value in a label, after `join` ("" = goes without saying, too); None = labels
            do not say it.
        title: text of a value in a table's title, where it is ("" = goes without saying there);
            rows of one table are then alike in it, and their short labels leave it out. None = a
            property of single rows.
        compared: two results must be alike in it to be compared.
    """
    metadata = {"label": label, "join": join, "title": title, "compared": compared}
    return field(default=default, metadata=metadata)


def _transform_text(name: str) -> str:
    return "learned rotation" if name == "learned" else name.replace("_", " ")


_DMX = {"differentiable": "dMX", "joint": "dMX joint", "adaptive": "adaptive"}
"""Searches that take steps by gradient -> what a label calls them."""


USUAL_FAMILY = "mxfp6_mxfp4"
"""Candidate formats that go without saying."""


def _family_text(name: str | None) -> str:
    """`family 4/8` of the bits of a known family, which its name has from the largest down; else its formats."""
    if name in (None, USUAL_FAMILY):
        return ""
    assert name is not None
    formats = (
        name.split() if " " in name else [p.removeprefix("mxfp") for p in name.split("_")][::-1]
    )
    return f"family {'/'.join(formats)}"


def weights_text(name: str) -> str:
    """What labels call a stage of the weights."""
    shown = {
        "local_hessian": "local Hessian",
        "learned": "learned weights",
        "learned_scales": "learned scales",
        "learned_rounding": "learned rounding",
    }
    return shown.get(name, name)


@dataclass(frozen=True)
class Method(Stored):
    """How the formats came about, and what else was done to the model; `Method()` is the model in bf16.

    Two rows of one method and budget differ in seed alone. The order of the fields is that of a label:
    `dMX + polish + hadamard block + gptq + net, separate choices`.
    """

    search: str | None = dimension(None, compared=False)
    """Name of the search; uniform = one format everywhere; None = not quantized."""
    format: str | None = dimension(None, compared=False)
    """search=uniform: the block format."""
    kept: str | None = dimension(None, compared=False)
    """search=adaptive: whose choice it took, scores | fisher | descent; None: not known, or of several rows that differ in it."""
    origin: str | None = dimension(None, compared=False)
    """What a label calls it instead of the search: another tool's config, exported files."""
    polish: bool = dimension(False, label=lambda _: "polish", compared=False)
    """The search's choice went through the discrete polish."""
    transform: str = dimension(
        "none", label=_transform_text, title=lambda name: f"transform {name}"
    )
    """none | hadamard_block | hadamard_selected | hadamard_full | learned"""
    weights: str = dimension("nearest", label=weights_text, title=lambda name: f"weights {name}")
    """What became of the weights after the choice: nearest | mse | local_hessian | gptq | learned |
    learned_scales | learned_rounding"""
    stage: str = dimension("", label=str, join=", ", title=str)
    """What that stage did otherwise than usual (`stages.stage_text`)."""
    net: bool = dimension(False, label=lambda _: "net")
    """mor's safety net was around the quantizers."""
    quantized: str | None = dimension(None, title=lambda sides: sides or "")
    """W+A | W; None for bf16."""
    family: str | None = dimension(None, label=_family_text, join=", ", title=_family_text)
    """Candidate formats of every unit, by the family's name or one by one; None where nothing was searched."""
    path: str = dimension("element", label=_path_text, join=", ", compared=False)
    """How a descent's continuous quantizer moved between formats: element | line, of weights and inputs as
    `line, element` where they differ; element also where nothing descended."""
    units: str | None = dimension(
        None, title=lambda units: "" if units in (None, "layer") else f"{units} units"
    )
    """What shares one choice: fused | layer; None where nothing was searched."""
    experts: str | None = dimension(
        None, title=lambda name: "" if name is None else f"{name} expert a unit"
    )
    """each: every expert of a mixture has choices of its own; None: those of a block share theirs, or there are none. Told
    where many records are pooled."""
    choices: str = dimension(
        "joint",
        label=lambda name: f"{name} choices",
        join=", ",
        title=lambda name: "" if name == "joint" else f"{name} choices",
    )
    """joint: weight and input of a unit share a format. separate: each has its own, both count."""
    input_format: str | None = dimension(
        None,
        label=lambda name: f"inputs {name}",
        join=", ",
        title=lambda name: "" if name is None else f"inputs {name}",
    )
    """Of every input, where the formats of weights alone were chosen, and weights alone count."""
    scale_rules: str = dimension(
        "floor",
        label=lambda rules: f"scales {rules}",
        join=", ",
        title=lambda rules: "" if rules == "floor" else f"scales {rules}",
    )
    """The scale rule, or `weight: ..., input: ...` where they differ (`scale_rules_text`)."""
    settings: str = dimension("", label=str, join=" ", compared=False)
    """What else differs from a preset, as `key=value key=value`; where many records are pooled."""

    @property
    def label(self) -> str:
        """What tables and legends call it, everything that is unusual included."""
        return self._label(lambda f: True)

    @property
    def short_label(self) -> str:
        """The label without what a table's title names."""
        return self._label(lambda f: f.metadata["title"] is None)

    @property
    def name(self) -> str:
        """The label, and what is quantized: `dMX + polish (W+A)`."""
        return f"{self.label} ({self.quantized})" if self.quantized else self.label

    def _label(self, is_shown: Callable[[dataclasses.Field[Any]], bool]) -> str:
        text = self.base
        for f in dataclasses.fields(self):
            value, say = getattr(self, f.name), f.metadata["label"]
            if say is not None and value != f.default and is_shown(f) and (said := say(value)):
                text += f"{f.metadata['join']}{said}"
        return text

    @property
    def base(self) -> str:
        """What a label begins with: dMX, a heuristic's name, `adaptive: dMX`, uniform mxfp4, bf16."""
        if self.origin is not None:
            return self.origin
        if self.search is None:
            return "bf16"
        if self.search in _DMX:
            name = _DMX[self.search]
            if self.kept is None:
                return name
            chosen = KEPT_OF[self.kept]
            return f"{name}: {_DMX.get(chosen, chosen)}"
        return f"{self.search} {self.format}" if self.format else self.search

    def titles(self) -> dict[str, str]:
        """Field -> its text in a table's title, for the fields that a title names."""
        named = {f.name: f.metadata["title"] for f in dataclasses.fields(self)}
        return {name: say(getattr(self, name)) for name, say in named.items() if say is not None}

    @property
    def kind(self) -> tuple[Any, ...]:
        """Values that must be alike in two results that are compared."""
        compared = (f.name for f in dataclasses.fields(self) if f.metadata["compared"])
        return tuple(getattr(self, name) for name in compared)

    @property
    def is_unquantized(self) -> bool:
        """The model as it is."""
        return self.search is None and self.origin is None

    @property
    def is_uniform(self) -> bool:
        """One format for all layers."""
        return self.search == "uniform"

    @property
    def is_searched(self) -> bool:
        """A search chose its formats."""
        return self.search not in (None, "uniform")

    @property
    def is_dmx(self) -> bool:
        """A search that takes steps by gradient, polished or not; an adaptive one also where it kept the scores."""
        return self.search in _DMX

    @property
    def is_heuristic(self) -> bool:
        """The bare choice of a heuristic, which dMX is compared with; a polished one is none."""
        return self.search in HEURISTICS and not self.polish

    def without(self, *names: str) -> Self:
        """This method with some fields as they are by default."""
        usual: dict[str, Any] = {
            f.name: f.default for f in dataclasses.fields(self) if f.name in names
        }
        if len(usual) < len(set(names)):
            raise ValueError(f"{set(names) - set(usual)} are no fields of {type(self).__name__}")
        return dataclasses.replace(self, **usual)


# --- what was measured ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskResult(Stored):
    """Accuracy on a zero-shot task; shares of 1."""

    metric: str
    value: float
    stderr: float | None
    """Over items."""
    count: int
    items: tuple[float, ...]
    """1 = right, by item."""
    source: str
    sha256: str
    """Of the items."""
    lm_eval: str
    """Its version."""


class Measured(Stored):
    """What rows have in common: metrics by name, and why one is missing."""

    reasons: Mapping[str, str]

    def metric(self, name: str) -> float | None:
        """A metric; None where it is missing."""
        value = getattr(self, name)
        return None if value is None else float(value)

    def reason(self, name: str) -> str:
        """Why a metric is missing; empty where it is there."""
        if getattr(self, name) is not None:
            return ""
        return self.reasons.get(name) or "not in the record"


@dataclass(frozen=True, kw_only=True)
class Row(Measured):
    """One method at one budget and seed, measured. A metric that is None has a line in `reasons`."""

    method: Method
    budget: Limit | None
    seed: int | None
    assignment: str | None
    """Path of the assignment in the run's folder."""
    element_bits: float | None
    bits_per_element: float | None
    whole_model_bits_per_element: float | None
    perplexity: float | None
    nll: float | None
    """nats/token"""
    tokens: int
    """That a loss was taken of."""
    windows: int
    window_nll: tuple[float, ...] | None
    """nats/token of each window"""
    zero_shot: Mapping[str, TaskResult] | None
    search_seconds: float | None
    search_peak_memory_bytes: int | None
    eval_seconds: float | None
    zero_shot_seconds: float | None
    format_counts: Mapping[str, Mapping[str, Mapping[str, int]]] | None
    """Operand -> projection -> format -> layers."""
    transform: Mapping[str, Any] | None
    """Facts of the assignment's transform: name, run_time, file, sha256."""
    weights: Mapping[str, Any] | None
    """Facts of what became of its weights: name, settings, file, sha256, seconds; of learned ones KL
    before and after, and on GPUs peak memory."""
    safety: Mapping[str, Any] | None
    """The net's report."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    expert_tokens: Mapping[str, tuple[int, ...]] | None = None
    """path of the experts of a block -> calibration tokens that each was given; None: no experts, or not counted."""
    score_seconds: float | None = None
    """Of `search_seconds`, those of score scans, other rows' among them; None: no scans, or an older record, whose times
    leave out the scans of other rows."""

    @property
    def label(self) -> str:
        """Of the method."""
        return self.method.label

    @property
    def weights_seconds(self) -> float | None:
        """That its weights took after the search; None where nothing was done to them that takes time."""
        return (self.weights or {}).get("seconds")


@dataclass(frozen=True, kw_only=True)
class TrainingRow(Measured):
    """One recipe of mor and seed, trained and measured."""

    recipe: str
    seed: int
    folder: str
    """Of its logs, in the run's folder."""
    parameters: int
    steps: int
    train_tokens: int
    train_seconds: float
    tokens_per_second: float | None
    perplexity: float | None
    nll: float | None
    """nats/token, on the validation text"""
    tokens: int
    windows: int
    window_nll: tuple[float, ...] | None
    loss_curve: Mapping[str, Mapping[str, Any]]
    """train, validation -> columns step, loss"""
    fp8_tensor_share: float | None
    operands: Mapping[str, Any] | None
    """What mor decided: operand -> shares."""
    products: Mapping[str, Any] | None
    """Product -> count of each kind of multiplication."""
    fallback_digits: Mapping[str, Any] | None
    """Shares of BF16 over steps, by layer; of runs with outliers."""
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The recipe."""
        return self.recipe


# --- the record of a run -------------------------------------------------------------------------


@dataclass(frozen=True)
class Device(Stored):
    """Where a run ran."""

    name: str
    type: str
    threads: int


@dataclass(frozen=True)
class ModelFacts(Stored):
    """Which model it was."""

    id: str
    revision: str | None
    dtype: str
    architecture_sha256: str
    note: str | None


@dataclass(frozen=True, kw_only=True)
class TextFacts(Stored):
    """A text, and how it was cut: into windows, or into batches of rows."""

    name: str
    source: str
    sha256: str
    tokens: int
    windows: int | None = None
    window: int | None = None
    """tokens"""
    batches: int | None = None
    batch_shape: tuple[int, ...] | None = None
    shared: Mapping[str, Any] | None = None
    """Of a text for learning: words of a sequence, sequences of the evaluation text that are in it, and of
    how many; None where nobody looked."""
    start: tuple[int, ...] = ()
    """Token ids that every window starts with: BOS, or none (data.bos)."""


@dataclass(frozen=True, kw_only=True)
class Verdict(Stored):
    """What a run claims, in a sentence and in numbers where it compares."""

    text: str
    difference_nats: float | None = None
    stderr_nats: float | None = None
    """Paired, over windows."""
    beats: bool | None = None
    budget: Limit | None = None
    against: str | None = None
    """Label of the reference."""


@dataclass(frozen=True, kw_only=True)
class ExportFacts(Stored):
    """What was written for which runtime, and how it differs when loaded again."""

    target: str
    profile: str | None
    inputs: bool
    formats: Mapping[str, int]
    """Layers by format."""
    input_rule: str | None
    bytes: Mapping[str, int] | None
    """total, quantized_bytes, bits_per_element_bytes"""
    verification: Mapping[str, Any] | None
    """loader, versions, tokens, equal, max_difference, kl, loss, reference_loss, seconds"""


@dataclass(frozen=True, kw_only=True)
class RecipeComparison(Stored):
    """Final validation loss of a recipe against BF16's, over the seeds that both have."""

    recipe: str
    seeds: tuple[int, ...]
    within: bool
    """Worse by no more than is allowed."""
    difference_nats: float | None = None
    difference_share: float | None = None
    stderr_nats: float | None = None
    allowed_nats: float | None = None
    baseline_nats: float | None = None
    reason: str | None = None
    """Why there is no difference."""


@dataclass(frozen=True, kw_only=True)
class Record(Stored):
    """`record.json` of a run."""

    command: str
    started: str | None
    """ISO 8601. Of rows that were put together from several runs: None, as for the next but one."""
    finished: str
    wall_seconds: float | None
    versions: Mapping[str, str]
    device: Device
    peak_memory_bytes: int | None
    seed: int | None
    requested: Mapping[str, Any]
    """The settings."""
    actual: Mapping[str, Any]
    """What ran, under the names of the settings."""
    model: ModelFacts
    data: Mapping[str, TextFacts]
    """calibration, evaluation, and where weights learn training; of train-mor: training, validation"""
    results: tuple[Row | TrainingRow, ...]
    verdict: Verdict | None
    warnings: tuple[str, ...]
    pace: Mapping[str, Any] | None = None
    """Work of a search in plain training steps, expected and done; where it was asked for."""
    export: ExportFacts | None = None
    comparison: tuple[RecipeComparison, ...] | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Results of methods."""
        return tuple(row for row in self.results if isinstance(row, Row))

    @property
    def training_rows(self) -> tuple[TrainingRow, ...]:
        """Results of recipes."""
        return tuple(row for row in self.results if isinstance(row, TrainingRow))

    def save(self, path: Path) -> Path:
        """Write the file, whole or not at all."""
        return write_json(path, {"schema": SCHEMA, **self.to_dict()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            RunError: it is missing, no JSON, of another schema, or its keys or values do not fit.
        """
        body = read_json(Path(path), "a finished run leaves one; finish the run first")
        schema = body.pop("schema", None)
        if schema != SCHEMA:
            raise RunError(
                f"{path}: schema is {schema!r}, this version reads {SCHEMA!r}. Run the command again, "
                "or read the file with the version that wrote it."
            )
        record = cls.from_dict(body, str(path))
        if not isinstance(formats := record.actual.get("formats"), Mapping):
            return record
        try:
            return dataclasses.replace(
                record, actual={**record.actual, "formats": unpack_formats(formats)}
            )
        except ValueError as error:
            raise RunError(f"{path}.actual.formats is damaged: {error}") from error
