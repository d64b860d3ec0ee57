"""An assignment by name for other tools, which quantize on their own: no weights are written.

    llm_compressor   recipe.yaml              QuantizationModifier, a group a format
    modelopt         quant_cfg.json           a pattern a layer, for modelopt.torch.quantization
    auto_round       layer_config.json        layer_config of auto_round.AutoRound
    llama_cpp        tensor_types.txt         --tensor-type-file of llama-quantize

Their numbers differ from ours where their scale rule or rounding does. llama.cpp has MXFP4 alone of
these formats: 6 and 8 bits become q6_K and q8_0, its nearest types of that size.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dmx.assignment.assignment import Assignment
from dmx.errors import FormatError
from dmx.exporting.compressed_tensors import FORMAT_NAMES
from dmx.exporting.compressed_tensors import LAYOUT as COMPRESSED_TENSORS
from dmx.exporting.layouts import layers_of, left_in_bf16
from dmx.files import write_text
from dmx.formats import BF16, OPERANDS, BlockFormat, Operand

AUTO_ROUND_TYPES = {
    "mxfp4": "mx_fp",
    "mxfp6_e2m3": "mx_fp6e2m3",
    "mxfp6_e3m2": "mx_fp6e3m2",
    "mxfp8_e4m3": "mx_fp",
    "mxfp8_e5m2": "mx_fp8e5m2",
}
LLAMA_CPP_TYPES = {4: "mxfp4", 6: "q6_k", 8: "q8_0"}
LLAMA_CPP_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _check_equal(assignment: Assignment, target: str) -> None:
    """Raise FormatError for a target that names one format a layer; an input in bf16 needs no name."""
    if unequal := {k: both for k, both in assignment.unequal.items() if both[1] is not BF16}:
        layer, (weight, of_input) = next(iter(unequal.items()))
        way_out = "assignment" if _beside_mx(assignment) else "modelopt or auto_round"
        raise FormatError(
            f"target={target} names one format for a layer; {len(unequal)} have two, first {layer}: "
            f"weight {weight}, input {of_input}. Use target={way_out}, or search again "
            "with search.choices=joint and search.input_format=null."
        )


def _beside_mx(assignment: Assignment) -> dict[str, BlockFormat]:
    """layer -> a format of its weight or its input that is none of MX."""
    of: tuple[Operand, ...] = OPERANDS
    return {n: f for o in of for n, f in assignment.block_formats(o).items() if not f.is_mx}


def _check_mx(assignment: Assignment, target: str) -> None:
    """Raise FormatError for a target whose names of formats are known here for MX alone."""
    if others := _beside_mx(assignment):
        layer, block_format = next(iter(others.items()))
        raise FormatError(
            f"target={target} is written for MX formats alone; {len(others)} layers have others, first "
            f"{layer}: {block_format}. Use target=compressed_tensors or assignment."
        )


def _llm_compressor(assignment: Assignment) -> str:
    _check_equal(assignment, "llm_compressor")
    for layer, block_format in assignment.block_formats("weight").items():
        if block_format not in FORMAT_NAMES:
            raise FormatError(
                f"target=llm_compressor does not hold {block_format} (first {layer}). "
                f"It holds {', '.join(map(str, FORMAT_NAMES))}."
            )
    config = COMPRESSED_TENSORS.config(layers_of(assignment), left_in_bf16(assignment))
    lines = ["quant_stage:", "  quant_modifiers:", "    QuantizationModifier:"]
    lines += [f"      ignore: {json.dumps(config['ignore'])}", "      config_groups:"]
    for name, group in config["config_groups"].items():
        lines += [f"        {name}:", f"          targets: {json.dumps(group['targets'])}"]
        lines += [f"          weights: {json.dumps(group['weights'])}"]
    return "\n".join(lines) + "\n"


def _modelopt(assignment: Assignment) -> str:
    _check_mx(assignment, "modelopt")

    def quantizer(block_format: BlockFormat | None) -> dict[str, Any]:
        if block_format is None:
            return {"enable": False}
        element = block_format.element
        return {
            "num_bits": [element.exponent_bits, element.mantissa_bits],
            "block_sizes": {"-1": block_format.block_size, "type": "dynamic", "scale_bits": [8, 0]},
            "enable": True,
        }

    config: dict[str, Any] = {"*": {"enable": False}}
    inputs = assignment.block_formats("input")
    for layer, block_format in assignment.block_formats("weight").items():
        config[f"{layer}.weight_quantizer"] = quantizer(block_format)
        config[f"{layer}.input_quantizer"] = quantizer(inputs.get(layer))
    return json.dumps({"quant_cfg": config, "algorithm": None}, indent=1) + "\n"


def _auto_round(assignment: Assignment) -> str:
    _check_mx(assignment, "auto_round")
    layers: dict[str, Any] = {}
    inputs = assignment.block_formats("input")
    for layer, block_format in assignment.block_formats("weight").items():
        of_inputs = inputs.get(layer)
        layers[layer] = {
            "bits": int(block_format.element_bits),
            "group_size": block_format.block_size,
            "sym": True,
            "data_type": AUTO_ROUND_TYPES[block_format.name],
            "act_bits": 16,
        }
        if of_inputs is not None:
            layers[layer] |= {
                "act_bits": int(of_inputs.element_bits),
                "act_group_size": of_inputs.block_size,
                "act_sym": True,
                "act_dynamic": True,
                "act_data_type": AUTO_ROUND_TYPES[of_inputs.name],
            }
    layers |= {name: {"bits": 16, "act_bits": 16} for name in left_in_bf16(assignment)}
    return json.dumps(layers, indent=1) + "\n"


def _llama_cpp(assignment: Assignment) -> str:
    _check_equal(assignment, "llama_cpp")
    _check_mx(assignment, "llama_cpp")
    lines = []
    for layer, block_format in assignment.block_formats("weight").items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", layer)
        if match is None or match[2] not in LLAMA_CPP_NAMES:
            raise FormatError(
                f"target=llama_cpp has no tensor name for {layer}; it knows "
                f"model.layers.N.{{{','.join(LLAMA_CPP_NAMES)}}}."
            )
        # llama-quantize searches the pattern anywhere in a name: dots and both ends are said.
        name = rf"^blk\.{match[1]}\.{LLAMA_CPP_NAMES[match[2]]}\.weight$"
        lines.append(f"{name}={LLAMA_CPP_TYPES[int(block_format.element_bits)]}")
    return "\n".join(lines) + "\n"


RECIPES: dict[str, tuple[str, Callable[[Assignment], str]]] = {
    "llm_compressor": ("recipe.yaml", _llm_compressor),
    "modelopt": ("quant_cfg.json", _modelopt),
    "auto_round": ("layer_config.json", _auto_round),
    "llama_cpp": ("tensor_types.txt", _llama_cpp),
}
"""target -> file name and what goes into it"""


def recipe_text(assignment: Assignment, target: str) -> str:
    """What the tool reads; FormatError for what it has no name for."""
    return RECIPES[target][1](assignment)


def write_recipe(assignment: Assignment, folder: Path, target: str) -> Path:
    """Write the tool's file into `folder`; raises as `recipe_text`."""
    return write_text(folder / RECIPES[target][0], recipe_text(assignment, target))
