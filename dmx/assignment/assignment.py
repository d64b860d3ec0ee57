"""The discrete answer: a format for every quantized layer, with what it needs to be trusted.

The file is JSON, schema `dmx.assignment/1`. It carries layer names, formats and shapes, the model
it belongs to, the bits, and how it was found. A file whose bits do not follow from its formats,
or whose names do not fit the model, is refused.

A transform or a rounding that needs tensors keeps them in a file of its own beside the JSON, an
*artifact*, which is named there with its SHA-256.
"""

import json
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch import nn

from dmx.assignment.budget import OPERANDS, Budget, Operand, SearchSpace, Units
from dmx.errors import AssignmentError, FormatError
from dmx.files import file_sha256, sha256, write_atomic, write_json
from dmx.formats import (
    BIT_UNITS,
    SCALE_RULES,
    BlockFormat,
    ScaleRule,
    get_block_format,
    get_mx_format,
)
from dmx.models.identity import architecture_sha256
from dmx.models.linears import linear_layers

SCHEMA = "dmx.assignment/1"
_OBJECT, _OPTIONAL = (dict, "an object"), ((dict, type(None)), "an object or null")
_KINDS = (
    ("model", *_OBJECT), ("bits", *_OBJECT), ("search", *_OBJECT), ("budget", *_OPTIONAL),
    ("transform", *_OPTIONAL), ("rounding", *_OPTIONAL), ("unquantized", list, "a list"),
)  # fmt: skip
_FIELDS = (
    "model", "formats", "input_formats", "shapes", "unquantized", "units", "scale_rule",
    "transform", "rounding", "bits", "budget", "search",
)  # fmt: skip

ArtifactKind = Literal["transform", "rounding"]
ARTIFACTS: tuple[ArtifactKind, ...] = ("transform", "rounding")


@dataclass(frozen=True)
class Assignment:
    """layer name -> block format. See `Assignment.load`, `.save`, `.check`."""

    model: Mapping[str, Any]
    """id, revision, architecture_sha256"""
    formats: Mapping[str, str]
    """layer name -> canonical format name of the weight; MX formats, or bf16."""
    shapes: Mapping[str, tuple[int, int]]
    """layer name -> (out_features, in_features)"""
    bits: Mapping[str, float]
    """element_bits, bits_per_element (averages of the quantized layers; where `input_formats` differ
    from `formats`, of weights and inputs alike), whole_model_bits_per_element (what is stored: weights
    alone)"""
    unquantized: tuple[str, ...] = ()
    units: str = "fused"
    scale_rule: ScaleRule = "floor"
    input_formats: Mapping[str, str] | None = None
    """layer name -> format name of the input; None: as `formats`."""
    transform: Mapping[str, Any] | None = None
    rounding: Mapping[str, Any] | None = None
    budget: Mapping[str, Any] | None = None
    search: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = field(default=None, compare=False, repr=False)
    """Where it was loaded from, which holds its artifacts; not in the file."""
    unsaved: Mapping[ArtifactKind, bytes] = field(default_factory=dict, compare=False, repr=False)
    """Contents of artifacts that no file holds yet."""

    def block_format(self, layer: str) -> BlockFormat:
        return get_block_format(self.formats[layer])

    def input_format(self, layer: str) -> BlockFormat:
        return get_block_format((self.input_formats or self.formats)[layer])

    def artifact(self, kind: ArtifactKind) -> Path:
        """Path of the file that the transform or the rounding names, with its SHA-256 checked.

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
            found = file_sha256(path)
        except OSError as error:
            raise AssignmentError(
                f"{path}: cannot be read ({error.strerror}). The assignment needs it for its {kind}: "
                "copy it beside the assignment, or search again."
            ) from error
        if found != named["sha256"]:
            raise AssignmentError(
                f"{path}: SHA-256 {found[:12]}…, the assignment's {kind} says "
                f"{str(named['sha256'])[:12]}…. It is damaged or of another search: copy it again "
                "from where the assignment came, or search again."
            )
        return path

    def content(self, kind: ArtifactKind) -> bytes:
        """Content of an artifact, also of one that is not saved yet; raises as `artifact`."""
        return self.unsaved[kind] if kind in self.unsaved else self.artifact(kind).read_bytes()

    def with_artifact(
        self, kind: ArtifactKind, content: bytes, facts: Mapping[str, Any]
    ) -> "Assignment":
        """This assignment with a transform or rounding of these facts (name, ...) and a file of this
        content, which `save` writes."""
        named = {**facts, "file": f"{kind}.safetensors", "sha256": sha256(content)}
        changed: dict[str, Any] = {kind: named, "unsaved": {**self.unsaved, kind: content}}
        return replace(self, **changed)

    @property
    def quantized(self) -> tuple[str, ...]:
        """Layers in an MX format."""
        return tuple(k for k in self.formats if self.block_format(k).element is not None)

    def save(self, path: str | Path) -> Path:
        """Write the JSON file and the artifacts beside it, each whole or not at all.

        Artifacts are named `transform.safetensors` beside `assignment.json`, and
        `x.transform.safetensors` beside any other `x.json`.
        """
        path = Path(path)
        body = {k: v for k, v in self.__dict__.items()}
        for kind in ARTIFACTS:
            if "file" in (body[kind] or {}):
                prefix = "" if path.stem == "assignment" else f"{path.stem}."
                name = f"{prefix}{kind}{Path(body[kind]['file']).suffix}"
                self._write_artifact(kind, path.parent / name)
                body[kind] = {**body[kind], "file": name}
        body["shapes"] = {k: list(v) for k, v in self.shapes.items()}
        body["unquantized"] = list(self.unquantized)
        return write_json(path, {"schema": SCHEMA, **{k: body[k] for k in _FIELDS}})

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
        try:
            body = json.loads(path.read_text())
        except OSError as error:
            raise AssignmentError(
                f"assignment={path}: cannot be read ({error.strerror}). Give the path of an "
                "assignment.json that a search wrote."
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise AssignmentError(
                f"assignment={path}: is no JSON file ({error}). It is damaged: search again, or "
                "copy it again from where it came."
            ) from error
        return replace(cls.from_dict(body, str(path)), folder=path.absolute().parent)

    @classmethod
    def from_dict(cls, body: Any, source: str = "assignment") -> "Assignment":
        def refuse(why: str) -> AssignmentError:
            return AssignmentError(
                f"{source}: {why}. The file is damaged or edited; search again, or copy it again."
            )

        if not isinstance(body, dict) or body.get("schema") != SCHEMA:
            found = body.get("schema") if isinstance(body, dict) else type(body).__name__
            raise AssignmentError(
                f"{source}: schema {found!r}, expected {SCHEMA!r}. Only files of this project's "
                "searches are read here."
            )
        missing = [k for k in _FIELDS if k not in body]
        unknown = sorted(set(body) - {*_FIELDS, "schema"})
        if missing or unknown:
            raise refuse(f"missing keys {missing}, unknown keys {unknown}")
        formats, shapes = body["formats"], body["shapes"]
        if not isinstance(formats, dict) or not formats or not isinstance(shapes, dict):
            raise refuse("formats and shapes must be non-empty objects")
        if set(formats) != set(shapes):
            raise refuse(
                f"formats and shapes name other layers: {sorted(set(formats) ^ set(shapes))[:3]}"
            )
        inputs = body["input_formats"]
        if inputs is not None and (not isinstance(inputs, dict) or set(inputs) != set(formats)):
            raise refuse("input_formats must be null or name the layers of formats")
        if body["scale_rule"] not in SCALE_RULES:
            raise refuse(f"scale_rule {body['scale_rule']!r}, allowed: {', '.join(SCALE_RULES)}")
        for layer, shape in shapes.items():
            valid = isinstance(shape, list) and len(shape) == 2
            if not valid or not all(type(n) is int and n > 0 for n in shape):
                raise refuse(f"shape of {layer} is {shape!r}, expected [out_features, in_features]")
        for layer, name in [*formats.items(), *(inputs or {}).items()]:
            if not isinstance(name, str):
                raise refuse(f"format of {layer} is {name!r}, expected a name")
        try:
            names = {
                k: get_block_format(v, setting=f"{source}: {k}").name for k, v in formats.items()
            }
            if inputs is not None:
                inputs = {
                    k: get_mx_format(v, setting=f"{source}: {k}").name for k, v in inputs.items()
                }
        except FormatError as error:
            raise AssignmentError(str(error)) from error
        for key, kinds, expected in _KINDS:
            if not isinstance(body[key], kinds):
                raise refuse(f"{key} is {body[key]!r}, expected {expected}")
        for kind in ARTIFACTS:
            if body[kind] is not None and (why := _malformed(body[kind])):
                raise refuse(f"{kind} is {body[kind]!r}: {why}")
        if not all(isinstance(layer, str) for layer in body["unquantized"]):
            raise refuse("unquantized must hold layer names")
        if body["units"] not in get_args(Units):
            raise refuse(f"units {body['units']!r}, allowed: {', '.join(get_args(Units))}")
        assignment = cls(
            **{k: body[k] for k in _FIELDS}
            | {
                "formats": names,
                "input_formats": inputs,
                "shapes": {k: (v[0], v[1]) for k, v in shapes.items()},
                "unquantized": tuple(body["unquantized"]),
            }
        )
        for unit in (*BIT_UNITS, "whole_model_bits_per_element"):
            stated = body["bits"].get(unit)
            if type(stated) not in (int, float) or not 0 < stated <= 16:
                raise refuse(f"bits.{unit} is {stated!r}")
        for unit, value in assignment.average_bits().items():
            stated = body["bits"][unit]
            # Shapes alone cannot tell that shared weights count once.
            exact = assignment.search.get("weighting", "elements") == "elements"
            if exact and not assignment.search.get("shared_weights") and abs(stated - value) > 1e-6:
                raise refuse(f"bits.{unit} says {stated}, its formats give {value:.6f}")
        return assignment

    @property
    def unequal(self) -> dict[str, tuple[BlockFormat, BlockFormat]]:
        """Layers whose weight and input differ in format -> both formats."""
        both = {k: (self.block_format(k), self.input_format(k)) for k in self.quantized}
        return {k: formats for k, formats in both.items() if formats[0] != formats[1]}

    def average_bits(self, operands: Sequence[Operand] = OPERANDS) -> dict[str, float]:
        """Average bits by weight elements in both units, from formats and shapes alone.

        A weight element is one multiply-accumulate of a token, so weights and inputs weigh alike.

        Args:
            operands: whose formats count; where inputs are as the weights, it makes no difference.
        """
        of = {"weight": self.block_format, "input": self.input_format}
        found = [
            (self.shapes[k][0] * self.shapes[k][1], block_format)
            for operand in (operands if self.input_formats is not None else OPERANDS[:1])
            for k in self.formats
            if (block_format := of[operand](k)).element is not None
        ]
        sizes = np.array([size for size, _ in found], dtype=np.float64)
        if not len(sizes):
            return {}
        return {
            unit: float(sizes @ np.array([f.bits(unit) for _, f in found]) / sizes.sum())
            for unit in BIT_UNITS
        }

    def check(self, model: nn.Module) -> None:
        """Raise AssignmentError unless every layer exists in the model with its shape; warn of another
        architecture."""
        linears = linear_layers(model)
        for layer, shape in self.shapes.items():
            if layer not in linears:
                raise AssignmentError(
                    f"the assignment is for another model: layer {layer} does not exist in "
                    f"{type(model).__name__} (it has {len(linears)} linear layers, the assignment "
                    f"was made for {self.model.get('id')!r} and names {len(self.shapes)}). "
                    "Load that model, or search this one."
                )
            found = (linears[layer].out_features, linears[layer].in_features)
            if found != tuple(shape):
                raise AssignmentError(
                    f"the assignment is for another model: {layer} is {tuple(shape)} there and "
                    f"{found} here (made for {self.model.get('id')!r}). Load that model, or search "
                    "this one."
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


def _malformed(named: Mapping[str, Any]) -> str:
    """What is wrong with a transform or rounding object; empty when nothing is."""
    if not isinstance(named.get("name"), str):
        return "it has no name"
    if "file" not in named and "sha256" not in named:
        return ""
    file, digest = named.get("file"), named.get("sha256")
    if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
        return "file must name a file beside the assignment"
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        return "sha256 must be 64 hexadecimal digits"
    return ""


def make_assignment(
    space: SearchSpace,
    choice: np.ndarray,
    model: nn.Module,
    *,
    scale_rule: ScaleRule = "floor",
    budget: Budget | None = None,
    search: Mapping[str, Any] | None = None,
) -> Assignment:
    """Assignment of a choice in a search space, with its bits counted.

    Inputs whose formats are all those of the weights are not named apart: the bits are the same.
    """
    config = getattr(model, "config", None)
    formats, inputs = (space.layer_formats(choice, operand) for operand in OPERANDS)
    stored = [
        (unit.elements, space.formats[int(i)])
        for unit, i in zip(space.units, choice, strict=True)
        if "weight" in unit.operands
    ] + [(n, space.fixed[name]) for name, n in space.fixed_elements.items()]
    quantized_bits = sum(n * block_format.bits_per_element for n, block_format in stored)
    quantized = sum(n for n, _ in stored)
    rest = space.model_elements - quantized
    counted = sum(out * into for out, into in space.shapes.values())
    bits: dict[str, float] = {unit: space.average(choice, unit) for unit in BIT_UNITS}
    bits["whole_model_bits_per_element"] = (quantized_bits + 16 * rest) / space.model_elements
    extra: dict[str, Any] = {"weighting": space.weighting}
    if counted != quantized:
        extra["shared_weights"] = True
    if space.is_separate:
        extra["operands"] = "separate"
    return Assignment(
        model={
            "id": getattr(config, "_name_or_path", "") or type(model).__name__,
            "revision": getattr(config, "_commit_hash", None),
            "architecture_sha256": architecture_sha256(config) if config is not None else None,
        },
        formats=formats,
        input_formats=inputs if inputs != formats else None,
        shapes=dict(space.shapes),
        bits=bits,
        unquantized=space.unquantized,
        units=space.granularity,
        scale_rule=scale_rule,
        budget=None if budget is None else asdict(budget),
        search={**(search or {}), **extra},
    )
