"""The README.md of an exported folder: what it holds, how to load it, what was and was not checked."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dmx.assignment.runtimes import (
    CARDS,
    HOW_IT_RUNS,
    NOT_LOADED,
    RAN,
    SOURCE,
    how_it_runs,
    joined,
    kinds_of,
)
from dmx.assignment.targets import TARGETS, Loader
from dmx.exporting.layouts import describe_rules
from dmx.exporting.plan import Plan
from dmx.exporting.recipes import RECIPES
from dmx.formats import BLOCK_FORMATS, FORMATS

NOT_CHECKED = (
    "Not checked here: the kernels of vLLM and SGLang, which may round otherwise, and may quantize "
    "inputs where the folder says weights only."
)


def _loader_rows(target: str) -> list[str]:
    """Rows of a table: who loads a target, and which formats, over all of its profiles."""
    rows: dict[str, Loader] = {}
    for name, facts in TARGETS.items():
        if name.partition(",")[0] == target:
            for loader in facts.loaders:
                known = rows.get(loader.name, loader)
                rows[loader.name] = replace(loader, formats=known.formats | loader.formats)
    table = []
    for loader in rows.values():
        named = [_title(f) for f in BLOCK_FORMATS if f in loader.formats]
        if loader.needs_fused_units:
            named.append("one format in q/k/v and in gate/up")
        table.append(f"| {loader.requires} | {', '.join([*named, *loader.notes])} |")
    return table


def _runs_text(plan: Plan) -> list[str]:
    """What runs on which card, which the files do not decide alone; nothing of loaders that dequantize."""
    kinds = kinds_of(
        (x.weight.name, None if x.input is None else x.input.name) for x in plan.layers.values()
    )
    lines = []
    for target, loader in HOW_IT_RUNS:
        words = {card: how_it_runs(target, loader, card, kinds) for card in CARDS}
        if kinds and target == plan.key and NOT_LOADED not in words[CARDS[0]].values():
            said = "; ".join(f"on {card}, {joined(words[card])}" for card in CARDS)
            lines += ["", f"{loader}, by card: {said}. Read in the source of {SOURCE}; {RAN}."]
    return lines


def _title(name: str) -> str:
    """mxfp6_e2m3 as MXFP6 E2M3"""
    return name.replace("_", " ").upper()


def _bits_table(plan: Plan) -> list[str]:
    assignment = plan.assignment
    counts = Counter(assignment.formats.values())
    sizes: Counter[str] = Counter()
    for layer, name in assignment.formats.items():
        sizes[name] += assignment.shapes[layer][0] * assignment.shapes[layer][1]
    lines = ["| format | layers | weights | bits per element |", "|---|---|---|---|"]
    lines += [
        f"| {n} | {counts[n]} | {sizes[n]:,} | {f.bits_per_element:g} |"
        for n, f in FORMATS.items()
        if counts[n]
    ]
    bits, weights = assignment.bits, assignment.average_bits(["weight"])
    apart, of_inputs = "", assignment.search.input_format
    if of_inputs is not None:
        apart = f" Chosen for inputs in {of_inputs}, which do not count."
    elif unequal := assignment.unequal:
        apart = (
            f" {len(unequal)} layers have an input in another format than the weight, and both count: "
            f"weights alone take {weights['element_bits']:.4f} element bits."
        )
    return [
        *lines,
        "",
        f"Average of the quantized layers: {bits['element_bits']:.4f} element bits, "
        f"{bits['bits_per_element']:.4f} bits per element with scales; whole model: "
        f"{bits['whole_model_bits_per_element']:.4f}.{apart} Scale rule of the weights: "
        f"{describe_rules(plan.layers, 'weight')}. Left in BF16: "
        f"{', '.join(assignment.unquantized) or 'no linear layer'}.",
    ]


def _verification(facts: dict[str, Any], *, rotates: bool) -> list[str]:
    measured = facts["verification"]
    if measured is None:
        return ["**Not verified**: this folder was written with `verify=false`."]
    why = "the loader scales inputs by its own rule"
    if "formulas" in measured["loader"]:
        why = "scales are multiplied, not divided by an inverse"
    if rotates:
        why = "inputs are rotated in float32, here by a matrix in bf16"
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    lines = [f"Loaded in a fresh process with {measured['loader']} ({versions}):", ""]
    if measured["equal"]:
        lines += [
            f"- logits of {measured['tokens']} tokens equal the fake-quantized model's bit for bit "
            f"in bf16; loss {measured['loss']:.10f} nats/token, the same"
        ]
    else:
        lines += [
            f"- logits differ from the fake-quantized model's by up to "
            f"{measured['max_difference']:.4g}; KL {measured['kl']:.3e} nats/token; loss "
            f"{measured['loss']:.6f} against {measured['reference_loss']:.6f} nats/token on "
            f"{measured['tokens']} tokens: {why}"
        ]
    return lines


def _rotation_text(plan: Plan) -> list[str]:
    return [
        "",
        f"**Inputs are rotated at run time** (transform `{plan.transform}`, `transform_config` of config.json): "
        "vLLM does it, on one tensor-parallel rank. transformers ignores that key without a word and gives wrong "
        "logits. What was checked below is compressed-tensors' own application of it.",
    ]


def _bytes_text(size: Mapping[str, int]) -> str:
    if size["quantized_bytes"] == size["bits_per_element_bytes"]:
        return (
            f"Quantized tensors: {size['quantized_bytes']:,} bytes, which is the sum of weights x "
            f"bits per element / 8; all tensors: {size['total']:,} bytes (file headers apart)."
        )
    return (
        f"Quantized tensors: {size['quantized_bytes']:,} bytes; at bits per element they would "
        f"be {size['bits_per_element_bytes']:,} (torchao stores 6-bit codes in whole bytes; ModelOpt's FP8 has "
        "one scale a weight, not one a row). "
        f"All tensors: {size['total']:,} bytes."
    )


def _weights_text(stage: Mapping[str, Any]) -> str:
    """What became of the weights after the choice."""
    name = stage["name"]
    if name == "mse":
        return "Weights rounded to nearest, each block with the scale of least squared error."
    if name == "local_hessian":
        return (
            "Weights rounded to nearest, each block with the scale of least squared error in what its layer gives on "
            f"{stage.get('tokens', 0):,} tokens."
        )
    if name == "learned_scales":
        return f"Weights rounded to nearest, with block scales learned on {_learned_text(stage)}."
    if name == "learned_rounding":
        return f"Weights rounded up or down as learned on {_learned_text(stage)}."
    if name == "learned":
        return f"Weights learned under these formats on {_learned_text(stage)}, not rounded to nearest."
    return f"Weights rounded by {name.upper()} on {stage.get('tokens', 0):,} tokens, not rounded to nearest."


def _learned_text(stage: Mapping[str, Any]) -> str:
    """Tokens that were learned from, and how often each was seen: the facts of the stage count them in every step."""
    seen, steps = stage.get("tokens", 0), stage.get("steps", 0) + stage.get("block_steps", 0)
    batches = min(stage.get("batches", steps), steps)  # no more than steps were seen
    if not batches or batches == steps:
        return f"{seen:,} tokens"
    return f"{seen * batches // steps:,} tokens, each seen {steps / batches:.3g} times"


_NAMED = 4
"""Tensors that the card names; dmx_export.json has all."""


def _left_out_text(names: Sequence[str], heads: Mapping[str, int]) -> list[str]:
    """What the source has and the files do not: tensors, and heads that its config announces."""
    lines = []
    if names:
        more = f" and {len(names) - _NAMED} more (`dmx_export.json`)" if len(names) > _NAMED else ""
        shown = ", ".join(f"`{name}`" for name in names[:_NAMED])
        lines.append(
            f"**Not in these files**: {len(names)} tensors of the source that transformers' model has no place for: "
            f"{shown}{more}."
        )
    if heads:
        said = ", ".join(f"`{key}` {count}" for key, count in heads.items())
        lines.append(
            f"The source's config announces heads of multi-token prediction ({said}); the files hold none, and their "
            "config says 0: no speculative decoding with them."
        )
    return [line for text in lines for line in ("", text)]


def _how_to_load(plan: Plan) -> list[str]:
    assert plan.layout is not None
    if plan.rotation is not None or plan.layout.reader != "transformers":
        return ["```sh", "vllm serve <this folder>", "```"]
    return [
        "```python",
        f"# pip install transformers {' '.join(map(shlex.quote, plan.layout.requirements(plan.layers)))}",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("<this folder>", dtype="bfloat16")',
        'tokenizer = AutoTokenizer.from_pretrained("<this folder>")',
        "```",
    ]


def model_card(plan: Plan, facts: dict[str, Any]) -> str:
    """Of a folder with weights; `facts` are those that the export writes beside it."""
    assert plan.layout is not None
    assignment, target, profile = plan.assignment, plan.target, plan.profile
    what = "weights and inputs" if plan.inputs else "weights only"
    revision = f" (revision {assignment.model['revision']})" if assignment.model["revision"] else ""
    lines = [
        f"# {assignment.model['id']}, mixed microscaling formats",
        "",
        f"{assignment.model['id']}{revision}, quantized by `dmx` for `{target}`"
        f"{f', profile `{profile}`' if profile else ''}; {what}.",
        "",
        *_bits_table(plan),
        "",
    ]
    if plan.input_rule:
        chosen = describe_rules(plan.layers, "input")
        lines += [
            f"Inputs are scaled by the loader: {plan.input_rule}. The assignment has {chosen}.",
            "",
        ]
    lines += [_bytes_text(facts["bytes"])]
    if assignment.weights:
        lines += ["", _weights_text(assignment.weights)]
    if plan.rotation is not None:
        lines += _rotation_text(plan)
    if facts["head_apart"]:
        lines += [
            "",
            "The source ties the head to the embedding; here the head is quantized and the "
            "embedding is not, so both are stored and `tie_word_embeddings` is false.",
        ]
    lines += _left_out_text(facts["left_out"], facts["further_heads"])
    lines += [
        "",
        "## How to load it",
        "",
        *_how_to_load(plan),
        "",
        "`dmx.load_exported(folder)` gives fake-quantized modules of the same files.",
        "",
        "| loader | formats |",
        "|---|---|",
        *_loader_rows(target),
        *_runs_text(plan),
        "",
        "## What was checked",
        "",
        *_verification(facts, rotates=plan.rotation is not None),
        "- every tensor's name, dtype and shape against `assignment.json`",
        "",
        NOT_CHECKED,
    ]
    if not plan.inputs and target != "torchao":
        lines += [
            "",
            "The assignment was searched for quantized weights and inputs unless it says "
            "otherwise; this folder asks for quantized weights alone.",
        ]
    return "\n".join(lines) + "\n"


def recipe_card(plan: Plan) -> str:
    """Of a folder with names alone."""
    assignment, target = plan.assignment, plan.target
    how = {
        "assignment": "`dmx.apply(model, dmx.Assignment.load('assignment.json'))`",
        "llm_compressor": "`oneshot(model=..., recipe='recipe.yaml')`",
        "modelopt": "`mtq.quantize(model, quant_cfg)`; keys of block_sizes and tuples come back "
        "from JSON as strings and lists",
        "auto_round": "`AutoRound(model, tokenizer, layer_config=json.load(...))`",
        "llama_cpp": "`llama-quantize --tensor-type-file tensor_types.txt model.gguf out.gguf q8_0`"
        "; 6 and 8 bits become q6_K and q8_0, which are other formats",
    }
    held = f"`{RECIPES[target][0]}` and " if target in RECIPES else ""
    lines = [
        f"# Formats of {assignment.model['id']} by name",
        "",
        *_bits_table(plan),
        "",
        f"This folder holds {held}`assignment.json`: names alone, no weights. To use them: "
        f"{how[target]}.",
        "",
        "Not checked here: that tool quantizes on its own, and its numbers may differ.",
    ]
    return "\n".join(lines) + "\n"
