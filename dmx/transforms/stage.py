"""The optional stage before quantization: what is done to a model, and what an assignment says of it.

    none               nothing
    hadamard_block     blocks of 32 on the contraction axis of weight and input, a Hadamard matrix
    hadamard_selected  the same, of some inputs only: those that a search measured to gain by it
    learned            as hadamard_block, with a rotation for each input of layers, from a file
    hadamard_full      the residual stream, folded into the weights (`dmx.transforms.residual`)

A transformed model computes the same function up to rounding. Which layers have a rotated input
follows from the assignment: those that it quantizes, of hadamard_selected those whose input it names.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, ModelError
from dmx.files import sha256
from dmx.formats import BLOCK_SIZE
from dmx.models.linears import fused_group, linear_layers
from dmx.models.sharding import is_piece, own, refuse_pieces, reshard
from dmx.models.streaming import rest
from dmx.models.swap import put_back, replace_layers
from dmx.transforms.block import BlockRotation, RotatedLinear, hadamard_block
from dmx.transforms.residual import rotate_residual

TRANSFORMS = ("none", "hadamard_block", "hadamard_selected", "hadamard_full", "learned")
RUN_TIME_TRANSFORMS = ("hadamard_block", "hadamard_selected", "learned")
"""Those that rotate inputs in every pass."""
UNMEASURED_TRANSFORMS = tuple(name for name in TRANSFORMS if name != "hadamard_selected")
"""Those that need no calibration batches."""
ORTHOGONAL_TO = 1e-4
"""Largest element of R^T R - I that a file may have; a search leaves 1e-6."""


@dataclass(frozen=True)
class Transform:
    """One of TRANSFORMS with all that it needs."""

    name: str = "none"
    residual_block: int | None = None
    """hadamard_full: channels that are mixed with each other; None = all."""
    rotations: Mapping[str, Tensor] = field(default_factory=dict)
    """learned: input of layers (`fused_group`) -> (32, 32) float32 for all of its blocks."""
    inputs: frozenset[str] = frozenset()
    """hadamard_selected: inputs of layers (`fused_group`) that are rotated; the others are not."""

    def rotates(self, layer: str) -> bool:
        """Whether the input of a quantized layer is rotated at run time."""
        if self.name == "hadamard_selected":
            return fused_group(layer) in self.inputs
        return self.name in RUN_TIME_TRANSFORMS

    def rotation(self, layer: str) -> Tensor:
        """Matrix of the input of a layer."""
        return self.rotations[fused_group(layer)] if self.name == "learned" else hadamard_block()

    def key(self) -> dict[str, Any] | None:
        """What tells two transforms apart, in JSON."""
        if self.name == "none":
            return None
        digest = sha256(write_rotations(self.rotations)) if self.rotations else None
        key = {"name": self.name, "block_size": self.residual_block, "rotations": digest}
        return key | self._selected()

    def _selected(self) -> dict[str, Any]:
        """What an assignment says of the inputs, where they are selected."""
        return {"inputs": sorted(self.inputs)} if self.name == "hadamard_selected" else {}

    # --- what an assignment says ---------------------------------------------------------------

    @classmethod
    def of(cls, assignment: Assignment) -> "Transform":
        """What an assignment names; AssignmentError where it or its file is damaged."""
        named = assignment.transform
        if named is None:
            return cls()
        name, size = named["name"], named.get("block_size")
        if name not in TRANSFORMS[1:]:
            raise AssignmentError(
                f"the assignment's transform {name!r} is unknown here. Known: "
                f"{', '.join(TRANSFORMS[1:])}. Search again, or update dmx."
            )
        inputs = named.get("inputs")
        if (
            ("file" in named) != (name == "learned")
            or not (size is None or type(size) is int)
            or (inputs is not None) != (name == "hadamard_selected")
            or not _are_inputs(inputs or [], assignment.quantized)
        ):
            raise AssignmentError(
                f"the assignment's transform is damaged: {dict(named)}. Copy it again, or search "
                "again."
            )
        if name != "learned":
            return cls(name, residual_block=size, inputs=frozenset(inputs or ()))
        rotations = read_rotations(assignment.content("transform"), "the assignment's transform")
        check_rotations(rotations, assignment.transformed)
        return cls(name, rotations=rotations)

    def attach(self, assignment: Assignment, model: nn.Module) -> Assignment:
        """The assignment with this transform; `model` is the untransformed one."""
        if self.name == "none":
            return assignment
        facts: dict[str, Any] = {"name": self.name, **self._selected()}
        if self.name == "hadamard_full":
            facts["block_size"] = self.residual_block
        layers = assignment.transformed
        facts["run_time"] = self.cost(model, layers)
        if self.name == "hadamard_full":
            assignment = replace(assignment, bits=_with_head(assignment, model))
        if self.name == "learned":
            used = {fused_group(layer) for layer in layers}
            rotations = {name: r for name, r in self.rotations.items() if name in used}
            return assignment.with_artifact("transform", write_rotations(rotations), facts)
        return replace(assignment, transform=facts)

    def cost(self, model: nn.Module, layers: Iterable[str]) -> dict[str, Any]:
        """What it adds when the model runs with `layers` quantized.

        Returns:
            rotated_layers; elements (held besides the model's own, in BF16); bits_per_element (of
            these, by weight element of the quantized layers); products_per_input_element.
        """
        linears = linear_layers(model)
        weights = {id(linears[name].weight): linears[name].weight.numel() for name in layers}
        if self.name == "hadamard_full":
            rotated, products, added = 0, 0, _untied_elements(model, layers)
        else:
            rotated = sum(map(self.rotates, layers))
            products = BLOCK_SIZE if rotated else 0
            shared = [hadamard_block()] if rotated else []
            matrices = self.rotations.values() if self.name == "learned" else shared
            added = sum(matrix.numel() for matrix in matrices)
        return {
            "rotated_layers": rotated, "elements": added,
            "bits_per_element": 16 * added / (sum(weights.values()) or 1),
            "products_per_input_element": products,
        }  # fmt: skip

    # --- doing it ------------------------------------------------------------------------------

    @torch.inference_mode(
        False
    )  # Parameters made in it could not serve a later pass with gradients
    def install(self, model: nn.Module, layers: Iterable[str]) -> Callable[[], None]:
        """Transform a model in place.

        Args:
            layers: those that are quantized; their inputs are rotated.

        Returns:
            undo: puts the original modules and Parameters back, to the bit.

        Raises:
            ModelError: hadamard_full does not know a model of this make.
        """
        if self.name == "none":
            return lambda: None
        rest(model)
        if self.name == "hadamard_full":
            asked = {"search.transform=hadamard_full": True}
            refuse_pieces(model, asked, "search.transform=hadamard_block")
            return rotate_residual(model, block_size=self.residual_block)
        inputs = {
            name: fused_group(name) if self.name == "learned" else ""
            for name in layers
            if self.rotates(name)
        }
        rotations: dict[str, BlockRotation] = {}

        def make(name: str, linear: nn.Linear) -> nn.Linear | None:
            if name not in inputs:
                return None
            if inputs[name] not in rotations:  # one for all layers that share it
                rotations[inputs[name]] = BlockRotation(self.rotation(name))
            rotation = rotations[inputs[name]]
            if is_piece(linear.weight):
                if uses[id(linear.weight)] > 1:
                    raise ModelError(
                        f"search.transform={self.name}: {name} shares its weight with another module, and the model is "
                        "sharded over processes, where it would be rotated for both. Leave it in BF16 "
                        "(search.exclude), or use run.shard=off."
                    )
                rows[name] = own(linear.weight).cpu().clone()
                return RotatedLinear.wrap(linear, rotation, linear.get_parameter("weight"))
            weight = nn.Parameter(rotation.of_weight(linear.weight), linear.weight.requires_grad)
            return RotatedLinear.wrap(linear, rotation, weight)

        rows: dict[str, Tensor] = {}
        reshard(model)
        uses = Counter(id(p) for module in model.modules() for p in module.parameters(False))
        originals = replace_layers(model, make)
        _rotate_rows(model, rows)
        # Not a closure: copies of the model then put their own layers back.
        return partial(_put_back, model, originals, rows)


def _are_inputs(named: Any, layers: Iterable[str]) -> bool:
    """Whether it is a list of inputs of these layers."""
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        return False
    return set(named) <= {fused_group(layer) for layer in layers}


@torch.no_grad()
def _rotate_rows(model: nn.Module, rows: Mapping[str, Tensor]) -> None:
    """Of a sharded model, in place: each row is rotated by itself, and what gathers weights knows these."""
    layers: Any = linear_layers(model) if rows else {}
    for name in rows:
        layer = layers[name]
        mine = own(layer.weight)
        mine.copy_(layer.input_transform.of_weight(mine))


@torch.no_grad()
def _put_back(
    model: nn.Module, originals: Mapping[str, nn.Linear], rows: Mapping[str, Tensor]
) -> None:
    reshard(model)
    rest(model)
    layers = linear_layers(model) if rows else {}
    for name, kept in rows.items():
        own(layers[name].weight).copy_(kept)
    for name, linear in originals.items():
        if name in rows:
            continue
        now = model.get_submodule(name).get_parameter("weight")
        # Itself, unless the model has moved in the meantime.
        linear.weight.data = linear.weight.data.to(now.device, now.dtype)
    put_back(model, originals)


@contextmanager
def transformed(model: nn.Module, transform: Transform, layers: Iterable[str]) -> Iterator[None]:
    """The transformed model inside, the original to the bit after; see `Transform.install`."""
    undo = transform.install(model, layers)
    try:
        yield
    finally:
        undo()


def _untied_elements(model: Any, layers: Iterable[str]) -> int:
    """Elements of the head where untying it from the embedding adds them: not where it is one of the quantized
    `layers`, which are held apart from the embedding anyway."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not table.weight:
        return 0
    linears = linear_layers(model)
    return 0 if any(linears[name] is head for name in layers) else head.weight.numel()


def _with_head(assignment: Assignment, model: nn.Module) -> dict[str, float]:
    """The bits of an assignment under hadamard_full, whose files hold a tied head apart from the embedding."""
    whole = "whole_model_bits_per_element"
    elements = sum(p.numel() for p in model.parameters())
    added = 16 * _untied_elements(model, assignment.transformed) / elements
    return {**assignment.bits, whole: assignment.bits[whole] + added}


# ---------------------------------------------------------------- the file of learned rotations


def write_rotations(rotations: Mapping[str, Tensor]) -> bytes:
    """Content of a transform.safetensors."""
    return save({name: matrix.cpu().contiguous() for name, matrix in rotations.items()})


def read_rotations(content: bytes, source: str) -> dict[str, Tensor]:
    """Inverse of `write_rotations`; AssignmentError unless all are orthogonal 32 x 32 matrices."""

    def refuse(why: str) -> AssignmentError:
        return AssignmentError(
            f"{source}: {why}. It is damaged or no transform: copy it again from where it came, or "
            "learn it again (search.transform=learned)."
        )

    try:
        rotations = load(content)
    except SafetensorError as error:
        raise refuse(f"no safetensors file ({error})") from error
    eye = torch.eye(BLOCK_SIZE)
    for name, matrix in rotations.items():
        if matrix.dtype != torch.float32 or matrix.shape != eye.shape:
            found = f"{matrix.dtype} {tuple(matrix.shape)}"
            raise refuse(
                f"{name} is {found}, expected one rotation for all blocks, float32 (32, 32)"
            )
        if not (matrix.mT @ matrix - eye).abs().max() <= ORTHOGONAL_TO:
            raise refuse(f"{name} is not orthogonal")
    return rotations


def check_rotations(rotations: Mapping[str, Tensor], layers: Iterable[str]) -> None:
    """Raise AssignmentError unless there is a rotation for the input of every quantized layer, and no
    other."""
    expected = {fused_group(layer) for layer in layers}
    if differing := sorted(expected ^ set(rotations)):
        held = "lacks" if differing[0] in expected else "holds"
        raise AssignmentError(
            f"the transform is for other layers: it {held} {differing[0]} "
            f"({len(differing)} inputs differ). Use the file of this very model and these layers, or "
            "learn another one."
        )
