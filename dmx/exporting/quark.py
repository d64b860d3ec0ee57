"""AMD Quark's layout: MXFP4, both MXFP6 and MXFP8 E4M3, read by vLLM and transformers + amd-quark.

    4, 6 bits   weight uint8 (out, in * bits / 8), weight_scale uint8 (out, in / 32)
    8 bits      weight float8_e4m3fn (out, in),    weight_scale uint8 (out, in / 32)

MXFP8 has two spellings, `per_group` with 32 and `per_block` with [1, 32]: the same bytes. vLLM
reads both, amd-quark's loader only the second, so that one is written.

Source: amd-quark 0.13, `QConfig.from_dict`, `QParamsLinear`; vLLM 0.33, `ocp_mx_utils.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dmx.errors import FormatError
from dmx.exporting.layouts import LayerPlan, Layers, Layout, TensorSpec, describe_rules
from dmx.exporting.packing import code_bits, decode_weight, encode_weight
from dmx.formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, BlockFormat, ScaleRule
from dmx.models.experts import experts_path

VERSION = "0.13"
DTYPES = {
    MXFP4: "fp4",
    MXFP6_E2M3: "fp6_e2m3",
    MXFP6_E3M2: "fp6_e3m2",
    MXFP8_E4M3: "fp8_e4m3",
}
INPUT_RULES = ("floor", "ceil", "even")


def _specs(block_format: BlockFormat, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    out, into = shape
    bits = code_bits(block_format)
    dtype = torch.float8_e4m3fn if bits == 8 else torch.uint8
    return {
        "weight": TensorSpec(dtype, (out, into * bits // 8)),
        "weight_scale": TensorSpec(torch.uint8, (out, into // block_format.block_size)),
    }


def _encode(weight: Tensor, block_format: BlockFormat, scale_rule: ScaleRule) -> dict[str, Tensor]:
    packed, scales = encode_weight(weight, block_format, scale_rule)
    return {"weight": packed, "weight_scale": scales}


def _decode(tensors: Mapping[str, Tensor], block_format: BlockFormat, dtype: torch.dtype) -> Tensor:
    return decode_weight(tensors["weight"], tensors["weight_scale"], block_format, dtype)


def _tensor_config(
    block_format: BlockFormat, scale_rule: ScaleRule | None, *, dynamic: bool
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "dtype": DTYPES[block_format],
        "is_dynamic": dynamic,
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": block_format.block_size,
        "block_size": None,
        "symmetric": None,
        "round_method": "half_even",
        "scale_type": "float",
        "scale_format": block_format.scale.name,
        "scale_calculation_mode": scale_rule if scale_rule in INPUT_RULES else None,
        "mx_element_dtype": None,
        "zero_point_type": "int32",
        "is_scale_quant": False,
        "observer_cls": "PerBlockMXObserver",
    }
    if code_bits(block_format) == 8 and not dynamic:
        config |= {
            "qscheme": "per_block",
            "block_size": [1, block_format.block_size],
            "group_size": None,
            "ch_axis": None,
            "symmetric": True,
            "scale_type": "float8_e8m0fnu",
            "scale_calculation_mode": None,
            "observer_cls": "PerBlock2DMinMaxObserver",
        }
    return config


_UNQUANTIZED: dict[str, Any] = dict.fromkeys(
    ("weight", "input_tensors", "output_tensors", "bias", "target_device")
)


def _layer_config(layer: LayerPlan) -> dict[str, Any]:
    config = dict(_UNQUANTIZED)
    config["weight"] = _tensor_config(layer.weight, layer.weight_rule, dynamic=False)
    if layer.input is not None:
        config["input_tensors"] = _tensor_config(layer.input, layer.input_rule, dynamic=True)
    return config


def _experts_as_one(layers: Layers) -> dict[str, LayerPlan]:
    """path -> how all experts of a block are stored, where that is one way: engines ask for the path."""
    blocks: dict[str, list[LayerPlan]] = {}
    for name, layer in layers.items():
        if (path := experts_path(name)) is not None:
            blocks.setdefault(path, []).append(layer)
    alike = {path: [replace(one, shape=(0, 0)) for one in each] for path, each in blocks.items()}
    return {path: each[0] for path, each in alike.items() if all(one == each[0] for one in each)}


def _config(layers: Layers, kept: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "version": VERSION,
        "quant_mode": "eager_mode",
        "algo_config": None,
        "softmax_quant_spec": None,
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "global_quant_config": dict(_UNQUANTIZED),
        "layer_type_quant_config": {},
        "layer_quant_config": {
            name: _layer_config(layer)
            for name, layer in {**layers, **_experts_as_one(layers)}.items()
        },
        "exclude": list(kept),
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "order",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }


def _check(layers: Layers, inputs: bool) -> None:
    for layer in layers.values():
        if layer.input is not None and layer.input_rule not in INPUT_RULES:
            raise FormatError(
                f"inputs=true: Quark scales inputs by {', '.join(INPUT_RULES)}; the assignment "
                f"has scale rule {layer.input_rule!r} for inputs in {layer.input}. Use inputs=false."
            )


def _input_rule(layers: Layers) -> str:
    return (
        f"{describe_rules(layers, 'input')}, with the exponent taken by a rounded log2 (Quark's own: "
        "a block whose amax lies just below a power of two may differ)"
    )


LAYOUT = Layout(
    name="quark",
    packages=("amd-quark",),
    specs=_specs,
    encode=_encode,
    decode=_decode,
    config=_config,
    check=_check,
    input_rule=_input_rule,
)
