"""Write a model and its assignment as another runtime reads them, and load them again to be sure.

Everything goes to a temporary folder beside the target, is checked there, and renamed at the end:
a folder that exists is whole. Weights are quantized from bf16, one layer in memory at a time.
"""

import json
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dmx.applying.apply import is_applied
from dmx.assignment.assignment import Assignment
from dmx.errors import ModelError, RunError
from dmx.exporting.card import model_card, recipe_card
from dmx.exporting.layouts import Layout
from dmx.exporting.names import file_names, has_own_names
from dmx.exporting.plan import Plan, check_biases, check_names, check_verifiable, make_plan
from dmx.exporting.recipes import RECIPES, write_recipe
from dmx.exporting.rotating import KEY, transform_config
from dmx.exporting.tensors import is_head_apart, other_modules, plan_tensors
from dmx.exporting.verify import Verification, check_files, check_loading
from dmx.exporting.writing import check_disk_space, new_folder, write_tensors
from dmx.files import write_json, write_text
from dmx.models import ModelConfig, load_model, meta_model
from dmx.models.experts import linear_experts
from dmx.models.finite import check_finite_weights
from dmx.models.linears import plain_model
from dmx.models.searchable import check_whole
from dmx.models.streaming import stream_of
from dmx.transforms.stage import Transform, transformed

FACTS_FILE = "dmx_export.json"
FACTS_SCHEMA = "dmx.export/2"
MAX_SHARD_BYTES = 5 * 10**9
FURTHER_HEADS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of configs that count heads of multi-token prediction."""
SIDE_FILES = (
    "*processor_config.json", "chat_template*", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*", "*.py",
)  # fmt: skip


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
        target: assignment | compressed_tensors | quark | humming | modelopt_checkpoint | torchao, or names alone for
            another tool: llm_compressor | modelopt | auto_round | llama_cpp.
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
    check_new(Path(folder))
    if not isinstance(assignment, Assignment):
        assignment = Assignment.load(assignment)
    if isinstance(model, nn.Module) and stream_of(model) is not None:
        raise ModelError(
            f"{type(model).__name__} is held block by block: an export needs it whole. Load it again on the CPU "
            "(run.memory=all run.device=cpu)."
        )
    plan = make_plan(assignment, target=target, profile=profile, inputs=inputs, verify=verify)
    model = model if isinstance(model, str) else plain_model(model)
    check_model(
        plan, meta_model(ModelConfig(id=model)) if isinstance(model, str) else model, folder
    )
    left_out: tuple[str, ...] = ()
    if isinstance(model, str):
        loaded = load_model(ModelConfig(id=model))
        model, tokenizer, left_out = loaded.model, tokenizer or loaded.tokenizer, loaded.left_out
    return write_plan(
        plan,
        model,
        folder,
        tokenizer=tokenizer,
        tokens=tokens,
        max_shard_bytes=max_shard_bytes,
        left_out=left_out,
    )


def check_new(folder: Path) -> None:
    """Raise RunError if the folder exists."""
    if folder.exists():
        raise RunError(
            f"folder={folder.absolute()} exists. Choose another folder, or delete that one."
        )


def check_model(plan: Plan, model: nn.Module, folder: str | Path) -> None:
    """All that is refused of a model, which may be on meta, and of the place, without weights.

    Raises:
        AssignmentError, ModelError, RunError: as `export`.
    """
    if is_applied(model):
        raise ModelError("an assignment is applied to this model; call dmx.restore(model) first")
    check_whole(model)
    plan.assignment.check(model)
    check_names(plan, model)
    check_verifiable(plan, model)
    with plan.assignment.linear_experts(model):
        check_biases(plan, model)
        if plan.layout is not None:
            check_finite_weights(model)
            check_disk_space(Path(folder).parent, plan_tensors(model, plan).parts)


def write_plan(
    plan: Plan,
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    tokens: Tensor | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    left_out: Sequence[str] = (),
) -> Exported:
    """Write what was planned and checked; arguments and errors are those of `export`.

    Args:
        left_out: tensors of the model's own files that it has no place for; the card names them.
    """
    folder = Path(folder).absolute()
    check_new(folder)
    plan = plan.for_model(model)
    for layer, stored in plan.stacked.items():
        stored.check(model.get_parameter(layer).flatten(0, 1), layer)
    result = Exported(folder, plan.target, plan.profile, plan.inputs, input_rule=plan.input_rule)
    transform = Transform() if plan.layout is None else Transform.of(plan.assignment)
    quantized = plan.assignment.transformed
    form = plan.assignment.experts_form(model)
    if plan.layout is not None and has_own_names(model, plan.holds):
        form = "split"
    with (
        new_folder(folder) as scratch,
        linear_experts(model, form),
        transformed(model, transform, quantized),
    ):
        if plan.layout is None:
            _write_names(plan, scratch)
            return result
        # Its artifacts stay out: the files hold the rotated and rounded weights.
        plan.assignment.save(scratch / "assignment.json", artifacts=False)
        sizes = _write_weights(plan, plan.layout, model, scratch, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        _copy_side_files(model, scratch)
        verification = check_loading(scratch, plan, model, tokens=tokens) if plan.verify else None
        result = replace(result, bytes=sizes, verification=verification)
        facts = _facts(plan, result, is_head_apart(model, plan))
        facts |= {"left_out": list(left_out), "further_heads": _further_heads(model)}
        write_json(scratch / FACTS_FILE, facts)
        write_text(scratch / "README.md", model_card(plan, facts))
    return result


def _write_names(plan: Plan, folder: Path) -> None:
    plan.assignment.save(folder / "assignment.json")
    if plan.target in RECIPES:
        write_recipe(plan.assignment, folder, plan.target)
    write_text(folder / "README.md", recipe_card(plan))
    write_json(folder / FACTS_FILE, {"schema": FACTS_SCHEMA, "target": plan.target})


def _write_weights(
    plan: Plan, layout: Layout, model: nn.Module, folder: Path, max_shard_bytes: int
) -> dict[str, int]:
    """Tensors and config; returns the bytes, compared with the plan."""
    tensors = plan_tensors(model, plan)
    named = file_names(model, plan.holds)
    layers = {named(layer): own for layer, own in plan.layers.items()}
    plain = {named(name): spec for name, spec in tensors.plain.items()}
    kept = [named(layer) for layer in plan.kept]
    metadata = layout.metadata(layers, list(plain))
    parts = [part.renamed(named) for part in tensors.parts]
    total = write_tensors(parts, folder, metadata, max_shard_bytes)
    config = layout.config(layers, [*kept, *map(named, other_modules(model, plan))])
    if plan.rotation is not None:
        config[KEY] = transform_config(plan.rotation, layers)
    _write_config(model, folder, config, is_head_apart(model, plan))
    for name, body in layout.files(layers, kept).items():
        write_json(folder / name, body)
    return {"total": total, **check_files(folder, layout, layers, plain)}


def _write_config(model: Any, folder: Path, quantization: dict[str, Any], apart: bool) -> None:
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = "bfloat16"
    config["quantization_config"] = quantization
    for key, count in _further_heads(model).items():
        warnings.warn(
            f"the config announces {key}={count}, and the model holds no such heads (multi-token prediction): the "
            "files have none, and their config says 0.",
            stacklevel=4,
        )
        for part in (config, config.get("text_config") or {}):
            if key in part:
                part[key] = 0
    if apart:
        config["tie_word_embeddings"] = False
    write_json(folder / "config.json", config)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _further_heads(model: Any) -> dict[str, int]:
    """Heads that predict further tokens, which the config announces and the model does not hold: key -> how many."""
    if any("mtp" in name or "nextn" in name for name, _ in model.named_modules()):
        return {}
    config = model.config.to_dict()
    parts = (config, config.get("text_config") or {})
    return {key: part[key] for part in parts for key in FURTHER_HEADS if part.get(key)}


def _copy_side_files(model: Any, folder: Path) -> None:
    """Processors, chat templates, licences and custom code from beside the weights, which nothing here reads."""
    source = Path(str(getattr(model.config, "_name_or_path", "") or "/nowhere"))
    if not source.is_dir():
        return
    for pattern in SIDE_FILES:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


def _facts(plan: Plan, done: Exported, head_apart: bool) -> dict[str, Any]:
    """Content of FACTS_FILE, which the card is written from."""
    return {
        "schema": FACTS_SCHEMA,
        "target": plan.target,
        "profile": plan.profile,
        "inputs": plan.inputs,
        "input_rule": plan.input_rule,
        "bytes": done.bytes,
        "transform": plan.transform,
        "weights": plan.assignment.weights and dict(plan.assignment.weights),
        "head_apart": head_apart,
        "verification": None if done.verification is None else done.verification.to_dict(),
    }
