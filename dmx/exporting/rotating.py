"""Inputs that are rotated at run time, as compressed-tensors says it: `transform_config`.

    hadamard        a 32 x 32 Hadamard matrix for every input: one group "R", no tensors
    random-matrix   a matrix for each input of layers, as learned rotations are: a group "R<i>" an input, and
                    <layer>.R<i>_input.weight float32 (32, 32) for each of its layers: R * sqrt(32)

The weights are rotated already (`weight_input` says so); the runtime rotates inputs. vLLM does: one matrix for
each group of the config, so inputs with matrices of their own need groups of their own; no bias, one
tensor-parallel rank. It divides matrices by sqrt(32), compressed-tensors 0.20 does not. transformers ignores
the key without a word, and its logits are then wrong.

Source: vLLM 0.32, `compressed_tensors/transform/{linear,module}.py`; compressed-tensors 0.20, `transform`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from dmx.errors import FormatError
from dmx.formats import BLOCK_SIZE
from dmx.models.linears import fused_group
from dmx.transforms.stage import Transform

KEY = "transform_config"
_PART = "_input.weight"
FACTOR = math.sqrt(BLOCK_SIZE)
"""By which matrices in files are larger."""


def _groups(transform: Transform, layers: Iterable[str]) -> dict[str, list[str]]:
    """Name of a group of the config -> its layers."""
    rotated = [layer for layer in layers if transform.rotates(layer)]
    if transform.name != "learned":
        return {"R": rotated}
    inputs = list(dict.fromkeys(fused_group(layer) for layer in rotated))
    return {
        f"R{i}": [layer for layer in rotated if fused_group(layer) == name]
        for i, name in enumerate(inputs)
    }


def transform_config(transform: Transform, layers: Iterable[str]) -> dict[str, Any]:
    """What `quantization_config` holds under KEY; layers: those that are quantized."""
    kind = "random-matrix" if transform.name == "learned" else "hadamard"
    return {
        "config_groups": {
            name: {
                "type": kind,
                "apply": [
                    {"targets": rotated, "location": "input", "inverse": False, "ignore": []},
                    {"targets": rotated, "location": "weight_input", "inverse": True, "ignore": []},
                ],
                "randomize": False,
                "requires_grad": False,
                "head_dim": BLOCK_SIZE,
                "precision": "torch.float32",
            }
            for name, rotated in _groups(transform, layers).items()
        }
    }


def rotation_tensors(transform: Transform, layers: Iterable[str]) -> dict[str, Tensor]:
    """Full tensor name -> float32 (32, 32), of the matrices that files hold."""
    if transform.name != "learned":
        return {}
    return {
        f"{layer}.{group}{_PART}": transform.rotation(layer).float().cpu() * FACTOR
        for group, rotated in _groups(transform, layers).items()
        for layer in rotated
    }


def rotation_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Full tensor name -> layer, of the matrices that a `quantization_config` asks for."""
    return {
        f"{layer}.{name}{_PART}": layer
        for name, group in _stated(config).items()
        if group["type"] == "random-matrix"
        for layer in group["apply"][0]["targets"]
    }


def read_transform(
    config: Mapping[str, Any], matrices: Mapping[str, Tensor], layers: Iterable[str]
) -> Transform:
    """The transform of a `quantization_config`.

    Args:
        matrices: layer -> tensor of the file. layers: those that are quantized.

    Raises:
        FormatError: a config that this project does not write.
    """
    groups = _stated(config)
    if not groups:
        return Transform()
    if {group["type"] for group in groups.values()} == {"random-matrix"}:
        rotations = {fused_group(layer): matrix / FACTOR for layer, matrix in matrices.items()}
        return Transform("learned", rotations=rotations)
    rotated = {layer for group in groups.values() for layer in group["apply"][0]["targets"]}
    if rotated == set(layers):
        return Transform("hadamard_block")
    return Transform("hadamard_selected", inputs=frozenset(map(fused_group, rotated)))


def _stated(config: Mapping[str, Any]) -> dict[str, Any]:
    groups: dict[str, Any] = (config.get(KEY) or {}).get("config_groups") or {}
    for name, group in groups.items():
        locations = [one.get("location") for one in group.get("apply", ())]
        if (
            group.get("type") not in ("hadamard", "random-matrix")
            or group.get("head_dim") != BLOCK_SIZE
            or group.get("randomize")
            or locations != ["input", "weight_input"]
        ):
            raise FormatError(
                f"{KEY}: group {name} is {group.get('type')} of {group.get('head_dim')} channels at "
                f"{', '.join(map(str, locations))}; read here are hadamard and random-matrix of {BLOCK_SIZE}, "
                "not randomized, at input and weight_input."
            )
    return groups
