"""ModelOpt's checkpoints: NVFP4, FP8 and layers in BF16 by name, read by vLLM, SGLang and TensorRT-LLM.

    NVFP4   weight uint8 (out, in / 2), low nibble first; weight_scale float8_e4m3fn (out, in / 16);
            weight_scale_2 float32 (): amax / (6 * 448); with inputs input_scale float32 (): likewise
    FP8     weight float8_e4m3fn (out, in); weight_scale, input_scale float32 (): amax / 448

`quantized_layers` names the algorithm of each layer, in hf_quant_config.json and in config.json alike: NVFP4
(inputs, too), W4A16_NVFP4 (weights alone), FP8 (inputs, too). FP8 has one scale for a weight and one, static, for its
input. ModelOpt knows FP8_PER_CHANNEL_PER_TOKEN, too, but among layers of several algorithms vLLM takes such a layer for
an unquantized one, and loads its bytes as BF16 without a word; SGLang's class is made after vLLM's. So that
one is never written: scales of rows and of tokens are refused.

Scales are multiplied by weight_scale_2 where compressed-tensors divides by its inverse: values may differ in the last
bit of float32.

Source: ModelOpt 0.47, `torch/export/{quant_utils,convert_hf_config}`, `qtensor/nvfp4_tensor`; vLLM 0.32,
`quantization/modelopt.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmx.applying.stored import StoredWeight
from dmx.errors import FormatError
from dmx.exporting._fresh_load import MODELOPT
from dmx.exporting.layouts import LayerPlan, Layers, Layout, TensorSpec, decoded_by
from dmx.exporting.packing import (
    amax_of_static_scale,
    as_float8,
    code_bits,
    static_scale,
)
from dmx.formats import E4M3_OF_TENSOR, FP8, NVFP4, BlockFormat
from dmx.numerics.scaled import inverse_global_scale

PRODUCER = {"name": "dmx", "version": "0.1"}
CONFIG_FILE = "hf_quant_config.json"
_INPUT_SCALE = "input_scale"


def _specs(block_format: BlockFormat, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    out, into = shape
    if block_format is FP8:
        return {
            "weight": TensorSpec(torch.float8_e4m3fn, shape),
            "weight_scale": TensorSpec(torch.float32, ()),
        }
    return {
        "weight": TensorSpec(torch.uint8, (out, into * code_bits(block_format) // 8)),
        "weight_scale": TensorSpec(torch.float8_e4m3fn, (out, block_format.blocks(into))),
        "weight_scale_2": TensorSpec(torch.float32, ()),
    }


def _encode_stored(stored: StoredWeight) -> dict[str, Tensor]:
    codes = as_float8(stored.codes, stored.block_format)
    if stored.block_format is FP8:
        return {"weight": codes, "weight_scale": stored.scales.amax()}
    assert stored.inv_global is not None
    return {
        "weight": codes,
        "weight_scale": stored.scales.view(torch.float8_e4m3fn),
        "weight_scale_2": stored.inv_global.reshape(()).reciprocal(),
    }


def _decode(tensors: Mapping[str, Tensor], block_format: BlockFormat) -> StoredWeight:
    codes, scales, nothing = tensors["weight"], tensors["weight_scale"], torch.zeros(0)
    if block_format is FP8:
        rows = scales.float().reshape(1, 1).expand(len(codes), 1).contiguous()
        return StoredWeight(FP8, codes.view(torch.uint8), rows, nothing)
    inverse = tensors["weight_scale_2"].float().reshape(1).reciprocal()
    return StoredWeight(NVFP4, codes, scales.view(torch.uint8), nothing, inverse)


def _input_tensors(layer: LayerPlan) -> dict[str, Tensor]:
    if layer.input is None:
        return {}
    assert layer.input_amax is not None
    if layer.input is FP8:
        assert layer.input_rule is not None
        return {_INPUT_SCALE: static_scale(layer.input_amax, FP8, layer.input_rule)}
    assert E4M3_OF_TENSOR.element is not None
    inverse = inverse_global_scale(layer.input_amax, NVFP4.element, E4M3_OF_TENSOR.element)
    return {_INPUT_SCALE: inverse.reciprocal()}


def _input_amax(scale: Tensor, block_format: BlockFormat) -> float:
    of_scale = block_format.scale.element
    return amax_of_static_scale(scale, block_format) * (of_scale.max_normal if of_scale else 1)


def _algorithm(layer: LayerPlan) -> dict[str, Any]:
    if layer.weight is FP8:
        return {"quant_algo": "FP8"}
    name = "W4A16_NVFP4" if layer.input is None else "NVFP4"
    return {"quant_algo": name, "group_size": NVFP4.block_size}


def quantization(layers: Layers, kept: Sequence[str]) -> dict[str, Any]:
    """Content of CONFIG_FILE."""
    return {
        "producer": PRODUCER,
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "quantized_layers": {name: _algorithm(layer) for name, layer in layers.items()},
            "exclude_modules": list(kept),
        },
    }


def _group(layer: LayerPlan) -> dict[str, Any]:
    """As ModelOpt describes an algorithm in words of compressed-tensors."""
    shared: dict[str, Any] = {
        "dynamic": False,
        "num_bits": code_bits(layer.weight),
        "type": "float",
    }
    if layer.weight.block_size:
        shared["group_size"] = layer.weight.block_size
    return (
        {"weights": shared}
        if layer.input is None
        else {"input_activations": shared, "weights": shared}
    )


def _config(layers: Layers, kept: Sequence[str]) -> dict[str, Any]:
    stated = quantization(layers, kept)["quantization"]
    kinds = {_algorithm(layer)["quant_algo"]: _group(layer) for layer in layers.values()}
    return {
        "quant_method": "modelopt",
        "quant_algo": stated["quant_algo"],
        "config_groups": {
            f"group_{i}": {
                **group,
                "targets": sorted(
                    n for n, x in layers.items() if _algorithm(x)["quant_algo"] == name
                ),
            }
            for i, (name, group) in enumerate(kinds.items())
        },
        "producer": PRODUCER,
        "quantized_layers": stated["quantized_layers"],
        "ignore": stated["exclude_modules"],
    }


def _check(layers: Layers, inputs: bool) -> None:
    eight = [name for name, layer in layers.items() if layer.weight is FP8]
    if eight and not inputs:
        raise FormatError(
            f"target=modelopt_checkpoint, inputs=false: its readers quantize the inputs of FP8 layers by a scale of the "
            f"files ({len(eight)} layers, first {eight[0]}). Use inputs=true, or target=compressed_tensors."
        )
    free = [name for name in eight if layers[name].input_amax is None]
    if free:
        raise FormatError(
            f"target=modelopt_checkpoint has one static scale for FP8 inputs, and input_amax says nothing of "
            f"{len(free)} layers, first {free[0]}. Measure it: static_inputs=true of dmx export, or "
            "dmx.calibrate_inputs(model, assignment, batches, static=True), which quantizes inputs so everywhere; or use "
            "target=compressed_tensors, whose FP8 has a scale for each row and token."
        )


def _input_rule(layers: Layers) -> str:
    del layers
    return "by the static scales of the files; NVFP4: amax / 6 of each 16 under them"


def _files(layers: Layers, kept: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {CONFIG_FILE: quantization(layers, kept)}


LAYOUT = Layout(
    name="modelopt_checkpoint",
    packages=(),
    specs=_specs,
    decode=decoded_by(_decode),
    config=_config,
    check=_check,
    input_rule=_input_rule,
    packed=False,
    files=_files,
    may_differ=2.0**-8,
    reader=MODELOPT,
    encode_stored=_encode_stored,
    decode_stored=_decode,
    input_tensors=_input_tensors,
    input_amax={_INPUT_SCALE: _input_amax},
)
