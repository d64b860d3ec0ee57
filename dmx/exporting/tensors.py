"""The tensors of an export: those of the plan's layers, and the others of the model as they are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dmx.applying.stored import StoredWeight, check_amax
from dmx.errors import AssignmentError
from dmx.exporting.layouts import LayerPlan, TensorSpec
from dmx.exporting.packing import check_finite
from dmx.exporting.plan import Plan
from dmx.exporting.rotating import rotation_tensors
from dmx.exporting.writing import Part
from dmx.models.experts import experts_path
from dmx.models.in_files import file_dtype, tensors_once
from dmx.models.linears import linear_layers


@dataclass(frozen=True)
class Tensors:
    """Everything to write, in the order of the model."""

    parts: list[Part]
    plain: dict[str, TensorSpec]
    """name -> what it is, of the tensors that are stored unquantized"""


def plan_tensors(model: nn.Module, plan: Plan) -> Tensors:
    """What a plan writes of a model, which may be on meta.

    A parameter under several names (tied embeddings) is written once, under the first; if the
    head is quantized, twice: the embedding stays in BF16.

    Raises:
        AssignmentError: a quantized layer shares its weight with another.
    """
    parts: list[Part] = []
    plain: dict[str, TensorSpec] = {}
    for shared, tensor in tensors_once(model):
        named = [n.removesuffix(".weight") for n in shared if n.endswith(".weight")]
        taken = [layer for layer in named if layer in plan.layers]
        others = [n for n in shared if n.removesuffix(".weight") not in taken]
        if len(taken) > 1 or (taken and others and not _is_embedding(model, others)):
            raise AssignmentError(
                f"{taken[0]} shares its weight with "
                f"{', '.join(n for n in shared if n != f'{taken[0]}.weight')}: a file holds it "
                "once. Leave it in BF16 (search.exclude)."
            )
        if taken:
            parts.append(_quantized_part(taken[0], tensor, plan))
        if not others:
            continue
        name = others[0]
        dtype = file_dtype(model, name, tensor)
        plain[name] = TensorSpec(dtype, tuple(tensor.shape))
        parts.append(Part({name: plain[name]}, _copy(name, tensor, dtype)))
    if plan.rotation is not None:
        for name, matrix in rotation_tensors(plan.rotation, plan.layers).items():
            plain[name] = TensorSpec(matrix.dtype, tuple(matrix.shape))
            parts.append(Part({name: plain[name]}, _copy(name, matrix, matrix.dtype)))
    return Tensors(parts, plain)


def is_head_apart(model: Any, plan: Plan) -> bool:
    """Whether a quantized head leaves the embedding that it is tied to: the files are untied."""
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    head = model.get_output_embeddings()
    return tied and any(model.get_submodule(layer) is head for layer in plan.layers)


def other_modules(model: nn.Module, plan: Plan) -> list[str]:
    """Modules with weights of two or more dimensions that are no linear layers and no tables: routers, experts that
    lie in one tensor. Runtimes build linear layers of some of them, which are not quantized either. And the linear layers
    of experts that the assignment does not name."""
    plain = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
    known = {*plan.layers, *plan.kept}
    experts = [n for n in linear_layers(model) if experts_path(n) and n not in known]
    return experts + [
        name
        for name, module in model.named_modules()
        if name not in plan.layers
        and not isinstance(module, plain)
        and any(p is not None and p.dim() >= 2 for p in module._parameters.values())
    ]


def _is_embedding(model: nn.Module, names: list[str]) -> bool:
    """Whether these are the one weight of an embedding."""
    return len(names) == 1 and isinstance(
        model.get_submodule(names[0].removesuffix(".weight")), nn.Embedding
    )


def _copy(name: str, tensor: Tensor, dtype: torch.dtype) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: tensor.detach().to(dtype)}


def _quantized_part(name: str, weight: Tensor, plan: Plan) -> Part:
    assert plan.layout is not None
    layout, layer, stored = plan.layout, plan.layers[name], plan.stored.get(name)
    of_input = layout.input_tensors(layer)
    specs = layout.specs(layer.weight, layer.shape) | {
        part: TensorSpec(tensor.dtype, tuple(tensor.shape)) for part, tensor in of_input.items()
    }

    def make() -> dict[str, Tensor]:
        source = weight.detach().to(torch.bfloat16)
        if stored is not None:
            stored.check(source, name)
        if layer.weight.is_mx:
            # On the grid: the codes are those that were stored.
            source = source if stored is None else stored(source)
            assert layout.encode is not None
            encoded = layout.encode(source, layer.weight, layer.weight_rule)
        else:
            assert layout.encode_stored is not None
            encoded = layout.encode_stored(stored or _rounded(source, layer, name))
        return {f"{name}.{part}": tensor for part, tensor in {**encoded, **of_input}.items()}

    return Part({f"{name}.{part}": spec for part, spec in specs.items()}, make)


def _rounded(weight: Tensor, layer: LayerPlan, name: str) -> StoredWeight:
    check_finite(weight)
    if layer.weight_amax is not None:
        check_amax(weight, layer.weight_amax, name)
    return StoredWeight.of(weight, weight, layer.weight, layer.weight_rule, layer.weight_amax)
