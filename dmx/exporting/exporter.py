"""Write a model and its assignment as another runtime reads them, and load them again to be sure.

Everything goes to a temporary folder beside the target, is checked there, and renamed at the end:
a folder that exists is whole. Weights are quantized from bf16, one layer in memory at a time.
"""

import json
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmx.applying.layers import is_applied, stored_weights
from dmx.applying.stored import StoredWeight
from dmx.assignment.assignment import Assignment
from dmx.assignment.targets import TARGETS, Loader, obstacles, split_groups
from dmx.errors import AssignmentError, FormatError, ModelError, RunError
from dmx.exporting import compressed_tensors, quark, torchao
from dmx.exporting.card import model_card, recipe_card
from dmx.exporting.layouts import Layout, TensorSpec, quantized
from dmx.exporting.packing import check_in_features
from dmx.exporting.recipes import RECIPES, recipe_text, write_recipe
from dmx.exporting.verify import Verification, check_files, check_loading, check_packages
from dmx.exporting.writing import Part, check_disk_space, new_folder, write_tensors
from dmx.files import write_json, write_text
from dmx.formats import check_choice
from dmx.models import ModelConfig, load_model, meta_model
from dmx.transforms.stage import RUN_TIME_TRANSFORMS, Transform, transformed

LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (compressed_tensors.LAYOUT, quark.LAYOUT, torchao.LAYOUT)
}
EXPORT_TARGETS = ("assignment", *LAYOUTS, *RECIPES)
PROFILES = ("vllm", "transformers")
"""Of compressed_tensors, the strictest first."""
FACTS_FILE = "dmx_export.json"
FACTS_SCHEMA = "dmx.export/2"
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Exported:
    """What an export left."""

    folder: Path
    target: str
    profile: str | None
    inputs: bool
    bytes: dict[str, int] = field(default_factory=dict)
    """total, quantized_bytes and bits_per_element_bytes; empty for names alone."""
    input_rule: str | None = None
    """How the loader scales inputs, in words; None where it quantizes none."""
    verification: Verification | None = None


def export(
    model: nn.Module | str,
    assignment: Assignment | str | Path,
    folder: str | Path,
    *,
    target: str,
    profile: str | None = None,
    inputs: bool = False,
    verify: bool = True,
    tokenizer: Any = None,
    tokens: Tensor | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Write `model` under `assignment` into a new folder that `target`'s runtimes load.

    Args:
        model: a causal language model, or its hub name or folder (loaded in bf16).
        folder: must not exist; its parent is made.
        target: assignment | compressed_tensors | quark | torchao, or names alone for another
            tool: llm_compressor | modelopt | auto_round | llama_cpp.
        profile: of compressed_tensors, vllm | transformers; None = the strictest that holds the
            formats.
        inputs: have the runtime quantize the inputs of the layers, too.
        verify: load the folder in a fresh process and compare logits with the model here.
        tokens: (rows, window) int64 to compare on; None draws a few.
        max_shard_bytes: of one safetensors file; a larger tensor gets a file of its own.

    Raises:
        FormatError: the target cannot hold a format; says which layers, and which target can.
        AssignmentError: it is for another model. ModelError: applied already, or not loadable.
        RunError: the folder exists, the disk is full, or the files do not load as they must.
    """
    folder = Path(folder).absolute()
    check_new(folder)
    if not isinstance(assignment, Assignment):
        assignment = Assignment.load(assignment)
    known = meta_model(ModelConfig(id=model)) if isinstance(model, str) else model
    profile = check_export(
        known, assignment, folder, target=target, profile=profile, inputs=inputs, verify=verify
    )
    layout = LAYOUTS.get(target)
    if isinstance(model, str):
        loaded = load_model(ModelConfig(id=model))
        model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
    transform = Transform() if layout is None else Transform.of(assignment)
    with new_folder(folder) as scratch, transformed(model, transform, assignment.quantized):
        # Files with weights hold the rotated and rounded ones, which need no transform, and which
        # nearest rounding leaves as they are.
        if layout is not None:
            assignment = replace(assignment, transform=None)
        kept = assignment if layout is None else replace(assignment, weights=None)
        kept.save(scratch / "assignment.json")
        if layout is None:
            done = _export_names(assignment, scratch, target)
        else:
            done = _export_model(
                model, assignment, scratch, layout, profile, inputs, verify, tokenizer, tokens,
                max_shard_bytes, transform.name,
            )  # fmt: skip
    return Exported(folder, target, profile, inputs, **done)


def _export_names(assignment: Assignment, folder: Path, target: str) -> dict[str, Any]:
    if target in RECIPES:
        write_recipe(assignment, folder, target)
    write_text(folder / "README.md", recipe_card(assignment, target))
    write_json(folder / FACTS_FILE, {"schema": FACTS_SCHEMA, "target": target})
    return {}


def _export_model(
    model: nn.Module, assignment: Assignment, folder: Path, layout: Layout, profile: str | None,
    inputs: bool, verified: bool, tokenizer: Any, tokens: Tensor | None, max_shard_bytes: int,
    transform: str,
) -> dict[str, Any]:  # fmt: skip
    parts, plain = _parts(model, assignment, layout)
    metadata = layout.metadata(assignment, inputs, list(plain))
    total = write_tensors(parts, folder, metadata, max_shard_bytes)
    apart = is_head_apart(model, assignment)
    _write_config(model, folder, layout.config(assignment, inputs), apart)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    sizes = {"total": total, **check_files(folder, layout, assignment, plain)}
    result = None
    if verified:
        result = check_loading(folder, layout, model, assignment, inputs=inputs, tokens=tokens)
    facts = {
        "schema": FACTS_SCHEMA, "target": layout.name, "profile": profile, "inputs": inputs,
        "input_rule": layout.input_rule(assignment) if inputs else None, "bytes": sizes,
        "transform": transform, "weights": assignment.weights and dict(assignment.weights), "head_apart": apart,
        "verification": None if result is None else result.to_dict(),
    }  # fmt: skip
    write_json(folder / FACTS_FILE, facts)
    write_text(folder / "README.md", model_card(assignment, facts))
    return {"bytes": sizes, "input_rule": facts["input_rule"], "verification": result}


# ---------------------------------------------------------------- what is refused


def check_new(folder: Path) -> None:
    """Raise RunError if the folder exists."""
    if folder.exists():
        raise RunError(f"folder={folder} exists. Choose another folder, or delete that one.")


def check_export(
    model: nn.Module,
    assignment: Assignment,
    folder: Path,
    *,
    target: str,
    profile: str | None,
    inputs: bool,
    verify: bool,
) -> str | None:
    """All that an export refuses without weights; `model` may be on meta. Arguments and errors are
    those of `export`.

    Returns:
        The profile that it will have.
    """
    profile = check_target(assignment, target=target, profile=profile, inputs=inputs, verify=verify)
    _check_model(model, assignment)
    if target in LAYOUTS:
        parts, _ = _parts(model, assignment, LAYOUTS[target])
        check_disk_space(folder.parent, parts)
    return profile


def check_target(
    assignment: Assignment, *, target: str, profile: str | None, inputs: bool, verify: bool
) -> str | None:
    """The part of `check_export` that needs no model: whether the target holds the assignment."""
    check_choice(target, EXPORT_TARGETS, "target")
    profile = _choose_profile(assignment, target, profile, inputs)
    _check_transform(assignment, target)
    layout = LAYOUTS.get(target)
    if layout is not None:
        check_holds(assignment, target, profile, inputs=inputs)
        layout.check(assignment, inputs)
        if not inputs and (unequal := assignment.unequal):
            warnings.warn(
                f"inputs=false: {len(unequal)} layers have an input in another format than the weight, "
                "and both count in the assignment's bits; the files hold the weights alone, at "
                f"{assignment.average_bits(['weight'])['element_bits']:.4f} element_bits. Set "
                "inputs=true to have the runtime quantize inputs.",
                stacklevel=2,
            )
        if not inputs and (assignment.weights or {}).get("correct_inputs"):
            warnings.warn(
                "inputs=false: the assignment's weights were rounded to make good what quantized "
                "inputs lose, and are worse than nearest without. Set inputs=true, or round again "
                "with gptq.correct_inputs=false.",
                stacklevel=2,
            )
        if verify:
            check_packages(layout)
    elif inputs:
        raise FormatError(
            f"inputs=true: target={target} writes names alone, and its tool decides on inputs. "
            "Leave inputs out."
        )
    elif target in RECIPES:
        recipe_text(assignment, target)
    return profile


def target_key(target: str, profile: str | None) -> str:
    """Name of a target in `dmx.assignment.targets.TARGETS`."""
    return target if profile is None else f"{target}, profile {profile}"


def check_holds(
    assignment: Assignment, target: str, profile: str | None, *, inputs: bool = False
) -> None:
    """Raise FormatError unless the target holds every format; says which layers, and which can."""
    holds = TARGETS[target_key(target, profile)]
    formats = assignment.formats
    setting = f"target={target}" + (f", profile={profile}" if profile else "")
    refused = {n: f for n, f in formats.items() if f != "bf16" and f not in holds.formats}
    if refused:
        rest = assignment.unquantized
        fitting = [
            name
            for name, other in TARGETS.items()
            if any(not obstacles(formats, other, loader, rest) for loader in other.loaders)
        ]
        names = ", ".join(sorted(set(refused.values())))
        raise FormatError(
            f"{setting} does not hold {names}: {len(refused)} layers, first "
            f"{', '.join(list(refused)[:3])}. Targets that hold this assignment: "
            f"{'; '.join(fitting)}. Or search again with search.target."
        )
    if holds.needs_fused_units and (split := split_groups(formats, assignment.unquantized)):
        raise FormatError(
            f"{setting} needs one format in each fused group (vLLM runs q/k/v and gate/up as one "
            f"product each); {len(split)} groups are split, first {split[0]}. Use "
            "profile=transformers, or search again with search.units=fused."
        )
    if inputs:
        _check_unequal(assignment, target, profile)
    for layer in quantized(assignment):
        check_in_features(layer, assignment.shapes[layer][1])


def _check_unequal(assignment: Assignment, target: str, profile: str | None) -> None:
    """Raise FormatError where the loader of a target cannot run an input beside its weight."""
    held = _own_loader(target, profile).input_formats
    refused = {n: both for n, both in assignment.unequal.items() if both[1].name not in held}
    if not refused:
        return
    layer, (weight, of_input) = next(iter(refused.items()))
    setting = f"target={target}" + (f", profile={profile}" if profile else "")
    can = f"in {', '.join(sorted(held))} alone" if held else "in none"
    raise FormatError(
        f"{setting}, inputs=true: runs inputs {can} beside a weight in another format; {len(refused)} "
        f"layers ask for others, first {layer}: weight {weight}, input {of_input}. Use target=quark, "
        "target=assignment or inputs=false, or search again with search.operands=joint."
    )


def _own_loader(target: str, profile: str | None) -> Loader:
    """The strictest loader of a profile; that of transformers where there is none."""
    return TARGETS[target_key(target, profile)].loaders[-1]


def _choose_profile(
    assignment: Assignment, target: str, profile: str | None, inputs: bool
) -> str | None:
    if target != "compressed_tensors":
        if profile is not None:
            raise FormatError(f"profile={profile}: target={target} has no profiles; leave it out.")
        return None
    if profile is not None:
        check_choice(profile, PROFILES, "profile")
        return profile
    for name in PROFILES:
        loader = _own_loader(target, name)
        given = assignment.input_formats if inputs else None
        if not obstacles(
            assignment.formats, TARGETS[target_key(target, name)], loader,
            assignment.unquantized, given,
        ):  # fmt: skip
            return name
    return PROFILES[-1]


def _check_model(model: nn.Module, assignment: Assignment) -> None:
    if is_applied(model):
        raise ModelError("an assignment is applied to this model; call dmx.restore(model) first")
    assignment.check(model)


def _check_transform(assignment: Assignment, target: str) -> None:
    """Raise FormatError for what a target cannot hold: only folded weights are like any others."""
    name = (assignment.transform or {}).get("name")
    if name is None or target == "assignment":
        return
    layers = assignment.quantized
    where = f"{len(layers)} layers, first {layers[0]}"
    if target in RECIPES:
        raise FormatError(
            f"target={target} names formats for the weights as they are, and these were chosen for "
            f"weights rotated by transform {name} ({where}). Use a target with weights, or search "
            "again with search.transform=none."
        )
    if name in RUN_TIME_TRANSFORMS:
        raise FormatError(
            f"target={target} cannot rotate inputs at run time, which transform {name} needs "
            f"({where}). Use target=assignment for this project, or search again with "
            "search.transform=hadamard_full, which is folded into the weights, or none."
        )


# ---------------------------------------------------------------- what is written


def _parts(
    model: nn.Module, assignment: Assignment, layout: Layout
) -> tuple[list[Part], dict[str, TensorSpec]]:
    """Everything to write, in the order of the model, and the plain tensors among it.

    A parameter under several names (tied embeddings) is written once, under the first; if the
    head is quantized, twice: the embedding stays in BF16.
    """
    formats, stored = quantized(assignment), stored_weights(assignment)
    parts: list[Part] = []
    plain: dict[str, TensorSpec] = {}
    state = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    for shared in names.values():
        tensor = state[shared[0]]
        layers = [n.removesuffix(".weight") for n in shared if n.endswith(".weight")]
        taken = [layer for layer in layers if layer in formats]
        others = [n for n in shared if n.removesuffix(".weight") not in taken]
        if len(taken) > 1 or (taken and others and not _is_embedding(model, others)):
            raise AssignmentError(
                f"{taken[0]} shares its weight with "
                f"{', '.join(n for n in shared if n != f'{taken[0]}.weight')}: a file holds it "
                "once. Leave it in BF16 (search.exclude)."
            )
        if taken:
            rounded = stored.get(taken[0])
            parts.append(_quantized_part(taken[0], tensor, assignment, layout, rounded))
        if not others:
            continue
        name = others[0]
        dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        plain[name] = TensorSpec(dtype, tuple(tensor.shape))
        parts.append(Part({name: plain[name]}, _copy(name, tensor, dtype)))
    return parts, plain


def _is_embedding(model: nn.Module, names: list[str]) -> bool:
    """Whether these are the one weight of an embedding."""
    return len(names) == 1 and isinstance(
        model.get_submodule(names[0].removesuffix(".weight")), nn.Embedding
    )


def is_head_apart(model: Any, assignment: Assignment) -> bool:
    """Whether a quantized head leaves the embedding that it is tied to: the files are untied."""
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    head = model.get_output_embeddings()
    return tied and any(model.get_submodule(n) is head for n in quantized(assignment))


def _copy(name: str, tensor: Tensor, dtype: torch.dtype) -> Any:
    return lambda: {name: tensor.detach().to(dtype)}


def _quantized_part(
    layer: str, weight: Tensor, assignment: Assignment, layout: Layout, rounded: StoredWeight | None
) -> Part:
    block_format = assignment.block_formats("weight")[layer]
    out, into = weight.shape
    specs = {f"{layer}.{k}": v for k, v in layout.specs(block_format, (out, into)).items()}

    def make() -> dict[str, Tensor]:
        source = weight.detach().to(torch.bfloat16)
        if rounded is not None:
            rounded.check(source, layer)
            source = rounded(source)  # on the grid: the codes below are those of the rounding
        encoded = layout.encode(source, block_format, assignment.rule("weight", block_format))
        return {f"{layer}.{name}": tensor for name, tensor in encoded.items()}

    return Part(specs, make)


def _write_config(model: Any, folder: Path, quantization: dict[str, Any], apart: bool) -> None:
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)
    config |= {
        "architectures": [type(model).__name__], "dtype": "bfloat16",
        "quantization_config": quantization,
    }  # fmt: skip
    if apart:
        config["tie_word_embeddings"] = False
    write_json(folder / "config.json", config)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
