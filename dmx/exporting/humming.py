"""humming's own layout: every MX format side by side, inputs left alone or in FP8, read by vLLM with humming-kernels.

    weight        int32 (out, in * bits / 32): codes in one stream, from the lowest bit on
    weight_scale  float8_e8m0fnu (out, in / 32)

`dynamic` names a format for each layer by a pattern for the start of its name in vLLM, where q/k/v and gate/up are one
layer of another name: the patterns match both names. Keys are those of humming's schema, not their short forms: the same
config is read a second time for inputs, where `dtype` and `group_size` would quantize them. Inputs in FP8 are asked for there,
in vLLM 0.32, and without a fallback, which beside scales of blocks would be BF16. There is no format for layers
that no pattern names: vLLM stops at one. It asks so for the embeddings and for attention, too, which are no linear layers, so one
pattern leaves every module whose last name is none of the quantized layers'. It leaves lm_head in BF16, whatever a file holds of it.

Source: vLLM 0.26 and 0.32, `quantization/humming.py`; humming-kernels 0.1.10 and 0.1.20, `schema/humming.py`,
`kernel/pack_weight.cuh`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmx.errors import FormatError
from dmx.exporting._fresh_load import HUMMING
from dmx.exporting.layouts import Layers, Layout, TensorSpec
from dmx.exporting.packing import code_bits, decode_weight, encode_weight
from dmx.formats import (
    BLOCK_SIZE,
    FP8,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    BlockFormat,
    ScaleRule,
)
from dmx.models.linears import MERGED_LAYERS

DTYPES = {
    MXFP4: "float4e2m1",
    MXFP6_E2M3: "float6e2m3",
    MXFP6_E3M2: "float6e3m2",
    MXFP8_E4M3: "float8e4m3",
    MXFP8_E5M2: "float8e5m2",
}
FP8_TOKENS: Mapping[str, Any] = {
    "a_dtype": "float8e4m3",
    "input_scale_dtype": "float32",
    "input_scale_group_size": 0,
    "input_quant_mode": "dynamic_token",
    "allow_fallback": False,
}
"""Of a layer whose input is in FP8, a scale a token."""
HEAD = "lm_head"
"""In whose names vLLM quantizes nothing."""


def _specs(block_format: BlockFormat, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    out, into = shape
    words = into * code_bits(block_format) // 32
    return {
        "weight": TensorSpec(torch.int32, (out, words)),
        "weight_scale": TensorSpec(torch.float8_e8m0fnu, (out, into // block_format.block_size)),
    }


def _encode(weight: Tensor, block_format: BlockFormat, scale_rule: ScaleRule) -> dict[str, Tensor]:
    packed, scales = encode_weight(weight, block_format, scale_rule)
    return {
        "weight": packed.view(torch.uint8).contiguous().view(torch.int32),
        "weight_scale": scales.view(torch.float8_e8m0fnu),
    }


def _decode(tensors: Mapping[str, Tensor], block_format: BlockFormat, dtype: torch.dtype) -> Tensor:
    return decode_weight(tensors["weight"], tensors["weight_scale"], block_format, dtype)


def _last_names(name: str) -> list[str]:
    """Of a layer, alone and merged with its neighbours."""
    last = name.rpartition(".")[2]
    return [last, *(whole for whole, parts in MERGED_LAYERS.items() if last in parts)]


def _pattern(name: str) -> str:
    """Of a layer, alone or merged with its neighbours."""
    parent = name.rpartition(".")[0]
    names = "|".join(map(re.escape, _last_names(name)))
    return f"{re.escape(parent)}\\.(?:{names})$" if parent else f"(?:{names})$"


def _others(layers: Layers) -> str:
    """Of the modules that are called like none of the layers."""
    names = sorted({last for name in layers for last in _last_names(name)})
    return f"(?!(?:.*\\.)?(?:{'|'.join(map(re.escape, names))})$)"


def _config(layers: Layers, kept: Sequence[str]) -> dict[str, Any]:
    left: dict[str, dict[str, str]] = {f"-:{_others(layers)}": {}}
    left |= {f"-:{_pattern(name)}": {} for name in kept}
    own = {
        f"+:{_pattern(n)}": {"b_dtype": DTYPES[layer.weight], **(FP8_TOKENS if layer.input else {})}
        for n, layer in layers.items()
    }
    return {
        "quant_method": "humming",
        "bs_dtype": "float8e8m0",
        "weight_scale_type": "group",
        "weight_scale_group_size": BLOCK_SIZE,
        "dynamic": left | own,
    }


def _check(layers: Layers, inputs: bool) -> None:
    asked = {name: layer for name, layer in layers.items() if inputs and layer.input is not None}
    if others := [n for n, x in asked.items() if x.input is not FP8]:
        raise FormatError(
            f"target=humming, inputs=true: its kernels multiply inputs in bf16, or in fp8 with a scale a token; {len(others)} "
            f"layers ask for others, first {others[0]}: {asked[others[0]].input}. Use inputs=false, or search again with "
            "search.input_format=fp8."
        )
    if static := [n for n, x in asked.items() if x.input_amax is not None]:
        raise FormatError(
            f"target=humming, inputs=true: its kernels scale inputs in fp8 by the token, and {len(static)} layers have one "
            f"scale for all, first {static[0]}. Leave static_inputs out."
        )
    if heads := [name for name in layers if HEAD in name]:
        raise FormatError(
            f"target=humming: vLLM leaves {heads[0]} in BF16 there. Leave it out (search.exclude) and search again, or "
            "use target=compressed_tensors."
        )


LAYOUT = Layout(
    name="humming",
    packages=(),
    specs=_specs,
    encode=_encode,
    decode=_decode,
    config=_config,
    check=_check,
    input_rule=lambda layers: "FP8: amax / 448 of each token",
    reader=HUMMING,
)
