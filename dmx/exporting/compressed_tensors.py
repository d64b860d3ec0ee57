"""compressed-tensors: MXFP4, MXFP6 E2M3, MXFP8 E4M3, NVFP4 and FP8, read by transformers and (all but MXFP6) by
vLLM.

    MXFP4, MXFP6   weight_packed uint8 (out, in * bits / 8), weight_scale uint8 (out, in / 32)
    MXFP8          weight float8_e4m3fn (out, in),           weight_scale uint8 (out, in / 32)
    NVFP4          weight_packed uint8 (out, in / 2),        weight_scale float8_e4m3fn (out, in / 16),
                   weight_global_scale float32 (1,): what scales are divided by; with inputs also
                   input_global_scale float32 (1,): what those of the input are divided by
    FP8            weight float8_e4m3fn (out, in),           weight_scale float32 (out, 1); where the input has one
                   scale for all tokens, input_scale float32 (1,): amax / 448

Every layer is named in full: a class name such as `Linear` among the targets would also catch
layers that stay in BF16. `quantization_status` must say compressed, or the loader quantizes
uninitialized weights.

Source: compressed-tensors 0.20, `compressors/{mxfp4,mxfp6,mxfp8,nvfp4,naive_quantized}` and
`quantization/quant_config`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmx.applying.stored import StoredWeight
from dmx.assignment.targets import COMPRESSED_TENSORS_INPUT_RULES, COMPRESSED_TENSORS_INPUTS
from dmx.errors import FormatError
from dmx.exporting.layouts import LayerPlan, Layers, Layout, TensorSpec, decoded_by
from dmx.exporting.packing import (
    amax_of_static_scale,
    as_float8,
    check_finite,
    code_bits,
    static_scale,
)
from dmx.formats import (
    E4M3_OF_TENSOR,
    FP8,
    MXFP4,
    MXFP6_E2M3,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
    ScaleRule,
)
from dmx.models.experts import experts_path
from dmx.numerics.scaled import inverse_global_scale

FORMAT_NAMES = {
    MXFP4: "mxfp4-pack-quantized",
    MXFP6_E2M3: "mxfp6-pack-quantized",
    MXFP8_E4M3: "mxfp8-quantized",
    NVFP4: "nvfp4-pack-quantized",
    FP8: "float-quantized",
}
_GLOBAL, _GLOBAL_OF_INPUT = "weight_global_scale", "input_global_scale"
_STATIC = "input_scale"


def _codes_name(block_format: BlockFormat) -> str:
    return "weight" if code_bits(block_format) == 8 else "weight_packed"


def _specs(block_format: BlockFormat, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    out, into = shape
    bits = code_bits(block_format)
    dtype = torch.float8_e4m3fn if bits == 8 else torch.uint8
    specs = {
        _codes_name(block_format): TensorSpec(dtype, (out, into * bits // 8)),
        "weight_scale": TensorSpec(_scale_dtype(block_format), (out, block_format.blocks(into))),
    }
    if block_format.scale.global_bits:
        specs[_GLOBAL] = TensorSpec(torch.float32, (1,))
    return specs


def _scale_dtype(block_format: BlockFormat) -> torch.dtype:
    if block_format.is_mx:
        return torch.uint8
    return torch.float32 if block_format.scale.element is None else torch.float8_e4m3fn


def _encode(weight: Tensor, block_format: BlockFormat, scale_rule: ScaleRule) -> dict[str, Tensor]:
    check_finite(weight)
    return _encode_stored(StoredWeight.of(weight, weight, block_format, scale_rule))


def _encode_stored(stored: StoredWeight) -> dict[str, Tensor]:
    block_format = stored.block_format
    scales = stored.scales
    if scales.dtype == torch.uint8:
        scales = scales.view(_scale_dtype(block_format))
    tensors = {
        _codes_name(block_format): as_float8(stored.codes, block_format),
        "weight_scale": scales,
    }
    if stored.inv_global is not None:
        tensors[_GLOBAL] = stored.inv_global
    return tensors


def _decode(tensors: Mapping[str, Tensor], block_format: BlockFormat) -> StoredWeight:
    codes, scales = tensors[_codes_name(block_format)], tensors["weight_scale"]
    if _scale_dtype(block_format) == torch.float32:
        scales = scales.float()  # other tools write those of rows in bf16
    else:
        scales = scales.view(torch.uint8)
    nothing = torch.zeros(0)
    return StoredWeight(
        block_format, codes.view(torch.uint8), scales, nothing, tensors.get(_GLOBAL)
    )


def _inverse_global_scale(amax: float | Tensor) -> Tensor:
    assert E4M3_OF_TENSOR.element is not None
    return inverse_global_scale(amax, NVFP4.element, E4M3_OF_TENSOR.element).reshape(1)


def _input_tensors(layer: LayerPlan) -> dict[str, Tensor]:
    if layer.input is None or layer.input_amax is None:
        return {}
    if layer.input.needs_input_amax:
        return {_GLOBAL_OF_INPUT: _inverse_global_scale(layer.input_amax)}
    assert layer.input_rule is not None
    return {_STATIC: static_scale(layer.input_amax, layer.input, layer.input_rule).reshape(1)}


def _is_static(layer: LayerPlan) -> bool:
    """Whether the file says the scale of the input's rows, which else are tokens with one each."""
    return layer.input is FP8 and layer.input_amax is not None


def _arguments(
    block_format: BlockFormat, *, dynamic: bool, of_rows: str = "channel"
) -> dict[str, Any]:
    # local: blocks' scales are those of each tensor, the global one lies in the file
    when = "local" if dynamic and block_format.needs_input_amax else dynamic
    shared = {
        "num_bits": code_bits(block_format),
        "type": "float",
        "symmetric": True,
        "dynamic": when,
    }
    if not block_format.block_size:
        return {**shared, "strategy": "token" if dynamic else of_rows}
    scales = str(_scale_dtype(block_format))
    return {
        **shared,
        "strategy": "tensor_group" if block_format.scale.global_bits else "group",
        "group_size": block_format.block_size,
        "scale_dtype": scales,
        "zp_dtype": scales,
    }


def _group(
    weight: BlockFormat, of_input: BlockFormat | None, is_static: bool, names: list[str]
) -> dict[str, Any]:
    inputs = None
    if of_input is not None:
        inputs = _arguments(of_input, dynamic=not is_static, of_rows="tensor")
    return {
        "targets": names,
        "format": FORMAT_NAMES[weight],
        "weights": _arguments(weight, dynamic=False),
        "input_activations": inputs,
        "output_activations": None,
    }


def _ignored(layers: Layers, kept: Sequence[str]) -> list[str]:
    """Names that are left alone; where a block quantizes none of its experts, one pattern for all of them, which every
    reader takes: a large mixture has thousands."""
    quantized = {experts_path(name) for name in layers}
    found: dict[str, None] = {}
    for name in kept:
        path = experts_path(name)
        is_whole = path is not None and path not in quantized
        found[f"re:{re.escape(str(path))}[.].*" if is_whole else name] = None
    return list(found)


def _config(layers: Layers, kept: Sequence[str]) -> dict[str, Any]:
    groups: dict[tuple[BlockFormat, BlockFormat | None, bool], list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault((layer.weight, layer.input, _is_static(layer)), []).append(name)
    used = {FORMAT_NAMES[weight] for weight, *_ in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": used.pop() if len(used) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{i}": _group(*formats, names)
            for i, (formats, names) in enumerate(groups.items())
        },
        "ignore": _ignored(layers, kept),
        "kv_cache_scheme": None,
    }


def _check(layers: Layers, inputs: bool) -> None:
    asked = {name: layer.input for name, layer in layers.items() if layer.input is not None}
    refused = {name: f.name for name, f in asked.items() if f.name not in COMPRESSED_TENSORS_INPUTS}
    if refused:
        raise FormatError(
            f"inputs=true: compressed-tensors does not quantize inputs to "
            f"{', '.join(sorted(set(refused.values())))} ({len(refused)} layers, first "
            f"{next(iter(refused))}). Use inputs=false, or target=quark or torchao."
        )


def _input_rule(layers: Layers) -> str:
    inputs = {layer.input for layer in layers.values()}
    rules, own = (
        [],
        ", ".join(f"`{r[0]}` for {f}" for f, r in COMPRESSED_TENSORS_INPUT_RULES.items()),
    )
    if inputs - {FP8, NVFP4, None}:
        rules.append(
            "amax rounded to one mantissa bit before its exponent is taken, for 4 and for 8 bits "
            f"(compressed-tensors' own rule: {own})"
        )
    for is_static in sorted({_is_static(layer) for layer in layers.values() if layer.input is FP8}):
        scales = "by static scales of the files" if is_static else "amax / 448 of each token"
        rules.append(
            f"FP8: {scales}; in transformers scales and quotients have the dtype of the input"
        )
    if NVFP4 in inputs:
        rules.append(
            "NVFP4: amax / 6 of each 16, under the global scale of the file; the quotient is rounded to the "
            "dtype of the input"
        )
    return "; ".join(rules)


LAYOUT = Layout(
    name="compressed_tensors",
    packages=("compressed-tensors",),
    since={MXFP6_E2M3: {"compressed-tensors": "0.20.0"}},
    specs=_specs,
    encode=_encode,
    decode=decoded_by(_decode),
    encode_stored=_encode_stored,
    decode_stored=_decode,
    config=_config,
    check=_check,
    input_rule=_input_rule,
    input_tensors=_input_tensors,
    # 6 * 448 / amax is its own inverse
    input_amax={
        _GLOBAL_OF_INPUT: lambda tensor, _: float(_inverse_global_scale(tensor)),
        _STATIC: amax_of_static_scale,
    },
)
