"""torchao: all five formats as `MXTensor` states, read by transformers.

    4 bits      _weight_qdata uint8 (out, in / 2)
    6 bits      _weight_qdata uint8 (out, in): one code a byte, torchao packs none
    8 bits      _weight_qdata float8 (out, in)
    all         _weight_scale float8_e8m0fnu (out, in / 32)

The header of every file says how each weight is put together, for the whole model: the loader
keeps one of them. torchao multiplies an MX weight by an MX input only, so there is no weight-only
variant; FLOOR and the other rules are its names for ours, and inputs are quantized exactly so.

Source: torchao 0.18, `prototype/mx_formats`, `prototype/safetensors`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmx.errors import FormatError
from dmx.exporting.layouts import LayerPlan, Layers, Layout, TensorSpec, describe_rules
from dmx.exporting.packing import (
    FLOAT8,
    as_float8,
    code_bits,
    decode_weight,
    encode_weight,
)
from dmx.formats import MXFP4, BlockFormat, ScaleRule
from dmx.numerics.packing import unpack_codes

CODES, SCALES = "_weight_qdata", "_weight_scale"


def _specs(block_format: BlockFormat, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    out, into = shape
    dtype = FLOAT8.get(block_format.element.name, torch.uint8)
    return {
        CODES: TensorSpec(dtype, (out, into // 2 if block_format is MXFP4 else into)),
        SCALES: TensorSpec(torch.float8_e8m0fnu, (out, into // block_format.block_size)),
    }


def _encode(weight: Tensor, block_format: BlockFormat, scale_rule: ScaleRule) -> dict[str, Tensor]:
    packed, scales = encode_weight(weight, block_format, scale_rule)
    if code_bits(block_format) == 6:
        packed = unpack_codes(packed, 6)
    return {CODES: as_float8(packed, block_format), SCALES: scales.view(torch.float8_e8m0fnu)}


def _decode(tensors: Mapping[str, Tensor], block_format: BlockFormat, dtype: torch.dtype) -> Tensor:
    return decode_weight(
        tensors[CODES], tensors[SCALES], block_format, dtype, unpacked=code_bits(block_format) == 6
    )


def _element(block_format: BlockFormat) -> Any:
    """torchao's name of the element: a torch dtype, or a string for 6 bits."""
    if code_bits(block_format) == 6:
        return f"fp6_{block_format.element.name}"
    names = {"e2m1": "float4_e2m1fn_x2", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
    return {"_type": "torch.dtype", "_data": names[block_format.element.name]}


def _enum(kind: str, value: str) -> dict[str, str]:
    return {"_type": kind, "_data": value}


_EMULATED = _enum("KernelPreference", "EMULATED")


def _scaling(layer: LayerPlan) -> dict[str, str]:
    """Of the input: the weight is quantized already."""
    assert layer.input_rule is not None
    return _enum("ScaleCalculationMode", layer.input_rule.upper())


def _layer_config(layer: LayerPlan) -> dict[str, Any]:
    data = {
        "block_size": layer.weight.block_size,
        "activation_dtype": _element(layer.weight),
        "weight_dtype": _element(layer.weight),
        "kernel_preference": _EMULATED,
        "scaling_mode": _scaling(layer),
    }
    return {"_type": "MXDynamicActivationMXWeightConfig", "_version": 1, "_data": data}


def _config(layers: Layers, kept: Sequence[str]) -> dict[str, Any]:
    by_name = {name: _layer_config(layer) for name, layer in layers.items()}
    default = {
        "_type": "FqnToConfig",
        "_version": 1,
        "_data": {"fqn_to_config": by_name, "module_fqn_to_config": by_name},
    }
    return {
        "quant_method": "torchao",
        "quant_type": {"default": default},
        "modules_to_not_convert": list(kept),
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def _metadata(layers: Layers, names: Sequence[str]) -> dict[str, str]:
    """Header entries for every tensor of the model, `names` being those of the plain ones."""
    header = {name: json.dumps({"_type": "Tensor"}) for name in names}
    for name, layer in layers.items():
        of_inputs = {
            "elem_dtype": _element(layer.weight),
            "block_size": layer.weight.block_size,
            "scaling_mode": _scaling(layer),
            "kernel_preference": _EMULATED,
            "is_swizzled_scales": False,
        }
        data = {
            "elem_dtype": _element(layer.weight),
            "block_size": layer.weight.block_size,
            "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
            "kernel_preference": _EMULATED,
            "act_quant_kwargs": {"_type": "QuantizeTensorToMXKwargs", "_data": of_inputs},
            "is_swizzled_scales": False,
        }
        entry = {"_type": "MXTensor", "_data": data, "_tensor_data_names": ["qdata", "scale"]}
        header[f"{name}.weight"] = json.dumps(entry)
    return header | {"tensor_names": json.dumps(list(header))}


def _check(layers: Layers, inputs: bool) -> None:
    if not inputs:
        raise FormatError(
            "target=torchao needs inputs=true: torchao multiplies MX weights by MX "
            "inputs only. For weights alone use target=compressed_tensors or quark."
        )


def _input_rule(layers: Layers) -> str:
    return f"{describe_rules(layers, 'input')}, as in the assignment"


LAYOUT = Layout(
    name="torchao",
    packages=("torchao",),
    specs=_specs,
    encode=_encode,
    decode=_decode,
    config=_config,
    check=_check,
    input_rule=_input_rule,
    exact_inputs=True,
    packed=False,
    metadata=_metadata,
)
