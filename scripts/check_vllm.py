"""Resolve every layer of exported folders with vLLM's own config classes; compare with the assignment.

    python -m venv vllm-env && vllm-env/bin/pip install vllm
    vllm-env/bin/python scripts/check_vllm.py exported-folder [...]

Needs no GPU and nothing of dmx: vLLM asks its config for a layer's scheme by name, and q/k/v and
gate/up by the name of the fused layer. No kernel runs, so numbers are not checked here.
"""

import importlib.metadata
import json
import sys
from pathlib import Path

import torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""packed_modules_mapping of vLLM's Llama, Qwen2 and Qwen3."""


class LinearBase(torch.nn.Module):
    """Stands in for vLLM's linear layers, whose class name a catch-all target would match."""


def vllm_layers(names):
    """Layer names as vLLM's models have them -> the layers of the checkpoint in each."""
    layers = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        fused = next((f for f, shards in FUSED.items() if leaf in shards), leaf)
        layers.setdefault(f"{parent}.{fused}" if parent else fused, []).append(name)
    return layers


def compressed_tensors_format(config, name):
    scheme = config.get_scheme_dict(LinearBase(), name)
    if scheme is None:
        return "bf16", None
    weights, inputs = scheme["weights"], scheme["input_activations"]
    if config._is_mxfp4(weights):
        return "mxfp4", inputs and inputs.num_bits
    if config._is_mxfp8(weights):
        return "mxfp8_e4m3", inputs and inputs.num_bits
    return f"unknown: {weights.type} {weights.num_bits} bits", None


def quark_format(config, name):
    if should_ignore_layer(
        name, ignore=config.quant_config["exclude"], fused_mapping=config.packed_modules_mapping
    ):
        return "bf16", None
    weights, inputs, scheme = config.get_scheme_cls(LinearBase, name)
    assert scheme.__name__ == "QuarkOCP_MX", scheme
    dtype = {
        "fp4": "mxfp4",
        "fp6_e2m3": "mxfp6_e2m3",
        "fp6_e3m2": "mxfp6_e3m2",
        "fp8_e4m3": "mxfp8_e4m3",
    }[config._find_matched_config(name, LinearBase)["weight"]["dtype"]]
    assert weights is not None
    return dtype, inputs


def check(folder):
    folder = Path(folder)
    assignment = json.loads((folder / "assignment.json").read_text())
    body = json.loads((folder / "config.json").read_text())["quantization_config"]
    kinds = {
        "compressed-tensors": (CompressedTensorsConfig, compressed_tensors_format),
        "quark": (QuarkConfig, quark_format),
    }
    kind, resolve = kinds[body["quant_method"]]
    config = kind.from_config(body)
    config.packed_modules_mapping = FUSED
    wanted = assignment["formats"] | dict.fromkeys(assignment["unquantized"], "bf16")
    layers, wrong = vllm_layers(wanted), []
    for name, shards in layers.items():
        try:
            found = resolve(config, name)[0]
        except (ValueError, NotImplementedError, AssertionError) as error:
            found = f"{type(error).__name__}: {error}"
        if {found} != {wanted[shard] for shard in shards}:
            wrong.append(f"  {name}: {found}, assigned {[wanted[s] for s in shards]}")
    print(f"{folder}: {len(layers)} vLLM layers of {len(wanted)}, {len(wrong)} differ")
    print("\n".join(wrong[:10]))
    return not wrong


if __name__ == "__main__":
    print("vllm", importlib.metadata.version("vllm"), "torch", torch.__version__)
    sys.exit(0 if all([check(folder) for folder in sys.argv[1:]]) else 1)
