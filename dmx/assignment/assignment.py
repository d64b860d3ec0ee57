"""The discrete answer: a format for every quantized layer, with what it needs to be trusted.

It carries layer names, formats and shapes, the model it belongs to, the scale rules, the bits, and
how it was found; `dmx.assignment.file` describes its file. An assignment whose bits do not follow
from its formats, or whose names do not fit the model, is refused.

A transform or a stage of the weights that needs tensors keeps them in a file of its own beside the
JSON, an *artifact*, which is named there with its SHA-256.
"""

import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from dmx.assignment.budget import Budget
from dmx.assignment.facts import SearchFacts
from dmx.assignment.file import (
    ARTIFACTS,
    FIELDS,
    OPTIONAL_FIELDS,
    SCHEMA,
    ArtifactKind,
    ScaleRules,
    parse,
    read_body,
    used_rules,
)
from dmx.assignment.rules import rule_of
from dmx.assignment.space import SearchSpace
from dmx.errors import AssignmentError, FormatError
from dmx.files import file_sha256, sha256, write_atomic, write_json
from dmx.formats import (
    BF16,
    BIT_UNITS,
    OPERANDS,
    BitUnit,
    BlockFormat,
    Format,
    Operand,
    ScaleRule,
    check_rule,
    get_format,
)
from dmx.models.experts import Form, form_of, linear_experts, stacked_experts
from dmx.models.identity import architecture_sha256
from dmx.models.in_files import unquantized_bits
from dmx.models.linears import linear_layers


@dataclass(frozen=True)
class Assignment:
    """layer name -> block format. See `Assignment.load`, `.save`, `.check`."""

    model: Mapping[str, Any]
    """id, revision, architecture_sha256"""
    formats: Mapping[str, str]
    """layer name -> canonical format name of the weight; bf16 counts as 16 bits."""
    shapes: Mapping[str, tuple[int, int]]
    """layer name -> (out_features, in_features)"""
    bits: Mapping[str, float]
    """element_bits, bits_per_element (averages of the quantized layers; where `input_formats` differ
    from `formats`, of weights and inputs alike, but for `search.input_format`, which does not count),
    whole_model_bits_per_element (bits of all tensors that files
    hold, for each parameter of the model)"""
    unquantized: tuple[str, ...] = ()
    units: str = "fused"
    scale_rules: ScaleRules = field(default_factory=dict)
    """operand -> format name -> rule; its usual one where nothing is said. See `rule`."""
    input_formats: Mapping[str, str] | None = None
    """layer name -> format name of the input, bf16 where it is left alone; None: as `formats`."""
    transform: Mapping[str, Any] | None = None
    """name, facts, and where it has tensors file and sha256; None: none."""
    weights: Mapping[str, Any] | None = None
    """What became of the weights after the choice, said like `transform`; None: they are rounded to
    nearest."""
    budget: Mapping[str, Any] | None = None
    search: SearchFacts = field(default_factory=SearchFacts)
    input_amax: Mapping[str, float] | None = None
    """layer name -> largest magnitude of the input, transformed, on calibration data; of inputs whose
    format has one scale for whole tensors: nvfp4, and fp8 where one is named. None: of none."""
    weight_amax: Mapping[str, float] | None = None
    """layer name -> largest magnitude that the scales of its weight are made for, where that is not the
    weight's own: one for several layers (nvfp4), or one for all rows (fp8). None: of none."""
    experts: Mapping[str, int] | None = None
    """layer name -> how many experts of a block it stands for, expert by expert in the rows of its weight; of layers
    that are one 3-D parameter. None: there are none."""
    expert_tokens: Mapping[str, Sequence[int]] | None = None
    """path of the experts of a block -> tokens of the calibration text that each of them was given; None: not counted,
    or there are no experts."""
    folder: Path | None = field(default=None, compare=False, repr=False)
    """Where it was loaded from, which holds its artifacts; not in the file."""
    unsaved: Mapping[ArtifactKind, bytes] = field(default_factory=dict, compare=False, repr=False)
    """Contents of artifacts that no file holds yet."""

    def format_of(self, operand: Operand, layer: str) -> Format:
        """What a layer's weight or input is held in; bf16 where it is left alone."""
        inputs = self.input_formats if operand == "input" else None
        return get_format((inputs or self.formats)[layer])

    def block_formats(self, operand: Operand) -> dict[str, BlockFormat]:
        """layer -> block format of the layers whose weight or input is quantized."""
        each = {layer: self.format_of(operand, layer) for layer in self.formats}
        return {layer: f for layer, f in each.items() if isinstance(f, BlockFormat)}

    def rule(self, operand: Operand, block_format: BlockFormat) -> ScaleRule:
        """The scale rule of a format where an operand is quantized to it."""
        return rule_of(self.scale_rules, operand, block_format)

    def with_rule(self, operand: Operand, rule: ScaleRule) -> "Assignment":
        """This assignment with one scale rule for an operand, in all of its formats that have the rule.

        Raises:
            FormatError: the rule is not for the operand, or no format has it.
        """
        check_rule(rule, operand, f"scale_rules.{operand}")
        used = {f.name: f for f in self.block_formats(operand).values()}
        if used and not any(rule in f.rules for f in used.values()):
            has = "; ".join(f"{f}: {', '.join(f.rules)}" for f in used.values())
            raise FormatError(
                f"scale_rules.{operand}={rule!r} is a rule of none of the formats of the assignment. "
                f"They have: {has}."
            )
        rules = {
            name: rule if rule in f.rules else self.rule(operand, f)
            for name, f in sorted(used.items())
        }
        return replace(self, scale_rules={**self.scale_rules, operand: rules})

    def artifact(self, kind: ArtifactKind) -> Path:
        """Path of the file that the transform or the weights name, with its SHA-256 checked.

        Raises:
            AssignmentError: there is none, it is missing or damaged, or the assignment was never
                saved.
        """
        named = getattr(self, kind) or {}
        if "file" not in named:
            raise AssignmentError(f"the assignment's {kind} ({dict(named)}) names no file")
        if self.folder is None:
            raise AssignmentError(
                f"the assignment needs {named['file']} ({kind}), and was not read from a folder that "
                "could hold it. Save it first, and load it from there."
            )
        path = self.folder / named["file"]
        try:
            digest = file_sha256(path)
        except OSError as error:
            raise AssignmentError(
                f"{path}: cannot be read ({error.strerror}). The assignment needs it for its {kind}: "
                "copy it beside the assignment, or search again. An exported folder has no such file: give the "
                "assignment that was exported (dmx export leaves a copy in its run's folder), or, to evaluate, the folder."
            ) from error
        if digest != named["sha256"]:
            raise AssignmentError(
                f"{path}: SHA-256 {digest[:12]}…, the assignment's {kind} says "
                f"{str(named['sha256'])[:12]}…. It is damaged or of another search: copy it again "
                "from where the assignment came, or search again."
            )
        return path

    def content(self, kind: ArtifactKind) -> bytes:
        """Content of an artifact, also of one that is not saved yet; raises as `artifact`."""
        return self.unsaved[kind] if kind in self.unsaved else self.artifact(kind).read_bytes()

    @property
    def artifacts(self) -> list[ArtifactKind]:
        """What is in files of their own."""
        return [kind for kind in ARTIFACTS if "file" in (getattr(self, kind) or {})]

    def with_contents(self) -> "Assignment":
        """With the contents of all its artifacts in memory, read and checked once; raises as
        `artifact`."""
        return replace(self, unsaved={kind: self.content(kind) for kind in self.artifacts})

    def with_artifact(
        self, kind: ArtifactKind, content: bytes, facts: Mapping[str, Any]
    ) -> "Assignment":
        """This assignment with a transform or weights of these facts (name, ...) and a file of this
        content, which `save` writes."""
        named = {**facts, "file": f"{kind}.safetensors", "sha256": sha256(content)}
        changed: dict[str, Any] = {kind: named, "unsaved": {**self.unsaved, kind: content}}
        return replace(self, **changed)

    @property
    def quantized(self) -> tuple[str, ...]:
        """Layers whose weights are in a block format."""
        return tuple(self.block_formats("weight"))

    @property
    def transformed(self) -> tuple[str, ...]:
        """Layers whose weight or input is in a block format: those that a transform of inputs is for."""
        either = {**self.block_formats("weight"), **self.block_formats("input")}
        return tuple(layer for layer in self.formats if layer in either)

    def amax_of_weight(self, layer: str) -> float | None:
        """What the scales of a layer's weight are made for, where they are not the weight's own."""
        return (self.weight_amax or {}).get(layer)

    def amax_of_input(self, layer: str) -> float | None:
        """What the scales of a layer's input are made for, where its format fixes that beforehand; None
        where it is that of each tensor.

        Raises:
            AssignmentError: it is needed and was not measured.
        """
        block_format = self.format_of("input", layer)
        if not isinstance(block_format, BlockFormat) or block_format.is_mx:
            return None
        if not block_format.needs_input_amax:
            return (self.input_amax or {}).get(
                layer
            )  # fp8: one scale for all tokens, where it says so
        if layer not in (self.input_amax or {}):
            raise AssignmentError(
                f"input_amax says nothing of {layer}, whose input is in {block_format}: that has one "
                "global scale for all tensors, which calibration fixes. Measure it: assignment = "
                "dmx.calibrate_inputs(model, assignment, batches); or quantize weights alone "
                "(inputs=False)."
            )
        assert self.input_amax is not None
        return self.input_amax[layer]

    def save(self, path: str | Path, *, artifacts: bool = True) -> Path:
        """Write the JSON file and the artifacts beside it, each whole or not at all.

        Artifacts are named `transform.safetensors` beside `assignment.json`, and
        `x.transform.safetensors` beside any other `x.json`.

        Args:
            artifacts: False leaves them out; what is read back cannot be applied without them.
        """
        path = Path(path)
        body = {k: v for k, v in self.__dict__.items()}
        for kind in ARTIFACTS:
            if "file" in (body[kind] or {}):
                prefix = "" if path.stem == "assignment" else f"{path.stem}."
                name = f"{prefix}{kind}{Path(body[kind]['file']).suffix}"
                if artifacts:
                    self._write_artifact(kind, path.parent / name)
                body[kind] = {**body[kind], "file": name}
        body["shapes"] = {k: list(v) for k, v in self.shapes.items()}
        body["unquantized"] = list(self.unquantized)
        body["search"] = self.search.to_dict()
        said = [k for k in OPTIONAL_FIELDS if body[k] is not None]
        return write_json(path, {"schema": SCHEMA, **{k: body[k] for k in (*FIELDS, *said)}})

    def _write_artifact(self, kind: ArtifactKind, target: Path) -> None:
        if kind in self.unsaved:
            content = self.unsaved[kind]
            write_atomic(target, lambda file: file.write(content))
            return
        source = self.artifact(kind)
        if not (target.exists() and target.samefile(source)):
            with source.open("rb") as opened:
                write_atomic(target, lambda file: shutil.copyfileobj(opened, file))

    @classmethod
    def load(cls, path: str | Path) -> "Assignment":
        """Read and check a file.

        Raises:
            AssignmentError: missing, damaged, of another schema, or inconsistent in itself.
        """
        path = Path(path)
        loaded = cls.from_dict(read_body(path), str(path))
        return replace(loaded, folder=path.absolute().parent)

    @classmethod
    def from_dict(cls, body: Any, source: str = "assignment") -> "Assignment":
        """The assignment of a file's content; raises as `load`, with `source` in the message."""
        assignment = cls(**parse(body, source))
        assignment._check_bits(source)
        return assignment

    def _check_bits(self, source: str) -> None:
        """Raise AssignmentError for stated bits that the formats do not give; as `load`."""

        def edited(unit: str, expected: str) -> AssignmentError:
            return AssignmentError(
                f"{source}: bits.{unit} says {self.bits[unit]}, its formats give {expected}. The file "
                "is damaged or edited; search again, or copy it again."
            )

        # Shapes alone cannot tell that shared weights count once.
        search = self.search
        if search.weighting == "elements" and not search.shared_weights:
            for unit, value in self.average_bits().items():
                if abs(self.bits[unit] - value) > 1e-6:
                    raise edited(unit, f"{value:.6f}")
        operands: dict[str, tuple[Operand, ...]] = dict.fromkeys(BIT_UNITS, OPERANDS)
        for unit, of in (operands | {"whole_model_bits_per_element": OPERANDS[:1]}).items():
            whole = unit not in BIT_UNITS
            counted: BitUnit = "bits_per_element" if whole else unit  # type: ignore[assignment]
            values = [
                self.format_of(o, k).bits(counted, self.shapes[k]) for o in of for k in self.formats
            ]
            low, high = min(values), 16.0 if whole else max(values)
            if not low - 1e-6 <= self.bits[unit] <= high + 1e-6:
                raise edited(unit, f"at least {low:.6f} and at most {high:.6f}")

    @property
    def unequal(self) -> dict[str, tuple[Format, Format]]:
        """Layers whose weight and input differ in format -> both formats."""
        both = {k: (self.format_of("weight", k), self.format_of("input", k)) for k in self.formats}
        return {k: formats for k, formats in both.items() if formats[0] != formats[1]}

    def average_bits(self, operands: Sequence[Operand] | None = None) -> dict[str, float]:
        """Average bits by weight elements in both units, from formats and shapes alone.

        A weight element is one multiply-accumulate of a token, so weights and inputs weigh alike.

        Args:
            operands: whose formats count, None: those that were chosen; where inputs are as the weights,
                it makes no difference.
        """
        if operands is None:
            operands = OPERANDS if self.search.input_format is None else OPERANDS[:1]
        counted = [
            (self.shapes[layer], self.format_of(operand, layer))
            for operand in (operands if self.input_formats is not None else OPERANDS[:1])
            for layer in self.formats
        ]
        sizes = np.array([out * into for (out, into), _ in counted], dtype=np.float64)
        return {
            unit: float(
                sizes @ np.array([f.bits(unit, shape) for shape, f in counted]) / sizes.sum()
            )
            for unit in BIT_UNITS
        }

    def experts_form(self, model: nn.Module) -> Form | None:
        """How experts of the model that lie in 3-D parameters become the layers that it names."""
        return form_of(model, (*self.formats, *self.unquantized))

    def linear_experts(self, model: nn.Module) -> AbstractContextManager[None]:
        """The model with all layers that the assignment names, inside."""
        return linear_experts(model, self.experts_form(model))

    def check(self, model: nn.Module) -> None:
        """Raise AssignmentError unless every layer exists in the model with its shape; warn of another
        architecture."""
        with self.linear_experts(model):
            linears, stacked = linear_layers(model), stacked_experts(model)
        for layer, shape in self.shapes.items():
            if layer not in linears:
                raise AssignmentError(
                    f"the assignment is for another model: layer {layer} does not exist in "
                    f"{type(model).__name__} (it has {len(linears)} linear layers, the assignment "
                    f"was made for {self.model.get('id')!r} and names {len(self.shapes)}). "
                    "Load that model, or search this one."
                )
            own = (linears[layer].out_features, linears[layer].in_features)
            if own != tuple(shape):
                raise AssignmentError(
                    f"the assignment is for another model: {layer} is {tuple(shape)} there and "
                    f"{own} here (made for {self.model.get('id')!r}). Load that model, or search "
                    "this one."
                )
            if (named := (self.experts or {}).get(layer)) != stacked.get(layer):
                raise AssignmentError(
                    f"experts of the assignment says {named} of {layer}, and {type(model).__name__} has "
                    f"{stacked.get(layer)} there. The file is edited, or for another model; search this one."
                )
        unknown = [name for name in linears if name not in {*self.shapes, *self.unquantized}]
        if unknown:
            raise AssignmentError(
                f"the assignment is for another model: it says nothing of {unknown[0]}"
                f"{f' and {len(unknown) - 1} more layers' if len(unknown) > 1 else ''} of "
                f"{type(model).__name__} (made for {self.model.get('id')!r}). Load that model, or "
                "search this one."
            )
        config, made_for = getattr(model, "config", None), self.model.get("architecture_sha256")
        if (
            made_for
            and hasattr(config, "get_text_config")
            and made_for
            not in (architecture_sha256(config, is_tied=is_tied) for is_tied in (None, True, False))
        ):
            warnings.warn(
                f"the assignment was made for a model of another architecture ({self.model.get('id')!r}), "
                f"whose layers have the names and shapes of this {type(model).__name__}. Formats were "
                "chosen for that one; search this model for its own.",
                stacklevel=2,
            )


def _of_inputs(
    measured: Mapping[str, float] | None, formats: Mapping[str, str]
) -> dict[str, float] | None:
    """What was measured of the inputs whose formats need it; None of none."""
    needed = {k: get_format(f) for k, f in formats.items() if k in (measured or {})}
    kept = {
        k: (measured or {})[k]
        for k, f in needed.items()
        if isinstance(f, BlockFormat) and f.needs_input_amax
    }
    return kept or None


def make_assignment(
    space: SearchSpace,
    choice: np.ndarray,
    model: nn.Module,
    *,
    scale_rules: ScaleRules | ScaleRule = "floor",
    budget: Budget | None = None,
    search: SearchFacts | None = None,
) -> Assignment:
    """Assignment of a choice in a search space, with its bits counted.

    Inputs whose formats are all those of the weights are not named apart: the bits are the same.

    Args:
        scale_rules: operand -> format name -> rule, or one rule for all formats that have it.
        search: what the search says of itself; what follows from the space is added.
    """
    config = getattr(model, "config", None)
    formats = space.layer_formats(choice, "weight")
    inputs: dict[str, str] | None = space.layer_formats(choice, "input")
    inputs = inputs if inputs != formats else None
    quantized_bits, stored = space.stored_bits(choice)
    counted = sum(out * into for out, into in space.shapes.values())
    bits: dict[str, float] = {unit: space.average(choice, unit) for unit in BIT_UNITS}
    bits["whole_model_bits_per_element"] = (
        quantized_bits + unquantized_bits(model, [n for n, f in formats.items() if f != BF16.name])
    ) / space.model_elements
    return Assignment(
        model={
            "id": getattr(config, "_name_or_path", "") or type(model).__name__,
            "revision": getattr(config, "_commit_hash", None),
            "architecture_sha256": architecture_sha256(config) if config is not None else None,
        },
        formats=formats,
        input_formats=inputs,
        shapes=dict(space.shapes),
        bits=bits,
        unquantized=space.unquantized,
        units=space.granularity,
        scale_rules=used_rules(scale_rules, formats, inputs),
        experts=stacked_experts(model) or None,
        input_amax=_of_inputs(space.input_amax, inputs or formats),
        budget=None if budget is None else asdict(budget),
        search=replace(
            search or SearchFacts(),
            weighting=space.weighting,
            choices="separate" if space.is_separate else "joint",
            input_format=None if space.input_format is None else space.input_format.name,
            shared_weights=counted != stored,
        ),
    )
