"""compressed-tensors: MXFP4, MXFP6 E2M3 and MXFP8 E4M3, read by transformers and (4, 8) by vLLM.

    4, 6 bits   weight_packed uint8 (out, in * bits / 8), weight_scale uint8 (out, in / 32)
    8 bits      weight float8_e4m3fn (out, in),           weight_scale uint8 (out, in / 32)

Every layer is named in full: a class name such as `Linear` among the targets would also catch
layers that stay in BF16. `quantization_status` must say compressed, or the loader quantizes
uninitialized weights.

Source: compressed-tensors 0.20, `compressors/{mxfp4,mxfp6,mxfp8}` and `quantization/quant_config`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmx.errors import FormatError
from dmx.exporting.layouts import Layers, Layout, TensorSpec
from dmx.exporting.packing import code_bits, decode_weight, encode_weight
from dmx.formats import MXFP4, MXFP6_E2M3, MXFP8_E4M3, BlockFormat, ScaleRule

FORMAT_NAMES = {
    MXFP4: "mxfp4-pack-quantized",
    MXFP6_E2M3: "mxfp6-pack-quantized",
    MXFP8_E4M3: "mxfp8-quantized",
}
INPUT_FORMATS = (MXFP4, MXFP8_E4M3)


def _codes_name(block_format: BlockFormat) -> str:
    return "weight" if code_bits(block_format) == 8 else "weight_packed"


def _specs(block_format: BlockFormat, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    out, into = shape
    bits = code_bits(block_format)
    dtype = torch.float8_e4m3fn if bits == 8 else torch.uint8
    return {
        _codes_name(block_format): TensorSpec(dtype, (out, into * bits // 8)),
        "weight_scale": TensorSpec(torch.uint8, (out, into // block_format.block_size)),
    }


def _encode(weight: Tensor, block_format: BlockFormat, scale_rule: ScaleRule) -> dict[str, Tensor]:
    packed, scales = encode_weight(weight, block_format, scale_rule)
    return {_codes_name(block_format): packed, "weight_scale": scales}


def _decode(tensors: Mapping[str, Tensor], block_format: BlockFormat, dtype: torch.dtype) -> Tensor:
    packed = tensors[_codes_name(block_format)]
    return decode_weight(packed, tensors["weight_scale"], block_format, dtype)


def _arguments(block_format: BlockFormat, *, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": code_bits(block_format),
        "type": "float",
        "strategy": "group",
        "group_size": block_format.block_size,
        "symmetric": True,
        "dynamic": dynamic,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }


def _group(weight: BlockFormat, of_input: BlockFormat | None, names: list[str]) -> dict[str, Any]:
    inputs = None if of_input is None else _arguments(of_input, dynamic=True)
    return {
        "targets": names,
        "format": FORMAT_NAMES[weight],
        "weights": _arguments(weight, dynamic=False),
        "input_activations": inputs,
        "output_activations": None,
    }


def _config(layers: Layers, kept: Sequence[str]) -> dict[str, Any]:
    groups: dict[tuple[BlockFormat, BlockFormat | None], list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault((layer.weight, layer.input), []).append(name)
    used = {FORMAT_NAMES[weight] for weight, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": used.pop() if len(used) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{i}": _group(*formats, names)
            for i, (formats, names) in enumerate(groups.items())
        },
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }


def _check(layers: Layers, inputs: bool) -> None:
    asked = {name: layer.input for name, layer in layers.items() if layer.input is not None}
    refused = {name: f.name for name, f in asked.items() if f not in INPUT_FORMATS}
    if refused:
        raise FormatError(
            f"inputs=true: compressed-tensors does not quantize inputs to "
            f"{', '.join(sorted(set(refused.values())))} ({len(refused)} layers, first "
            f"{next(iter(refused))}). Use inputs=false, or target=quark or torchao."
        )


def _input_rule(layers: Layers) -> str:
    return (
        "amax rounded to one mantissa bit before its exponent is taken, for 4 and for 8 bits "
        "(compressed-tensors' own rule; `even` for MXFP4)"
    )


LAYOUT = Layout(
    name="compressed_tensors",
    packages=("compressed-tensors",),
    specs=_specs,
    encode=_encode,
    decode=_decode,
    config=_config,
    check=_check,
    input_rule=_input_rule,
)
