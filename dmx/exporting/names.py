"""Names in files of tensors that a runtime reads under others than transformers 5 gives them: those that the model's own
files have. Models and assignments keep transformers' names.

    mixtral    model.layers.0.mlp.gate                     model.layers.0.block_sparse_moe.gate
               model.layers.0.mlp.experts.7.gate_proj      model.layers.0.block_sparse_moe.experts.7.w1
               ....up_proj, ....down_proj                  ....w3, ....w2

Source: vLLM 0.32, `model_executor/models/mixtral.py` (`ckpt_names`) and the path of its modules.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from dmx.assignment.targets import Target
from dmx.models.backbone import text_config

_Pairs = tuple[tuple[str, str], ...]
_OWN_NAMES: dict[str, tuple[tuple[str, str], _Pairs]] = {
    "mixtral": (
        ("mlp", "block_sparse_moe"),
        (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
    )
}
"""model_type -> the module of a block's mixture and the layers of an expert, each here and in files."""
_EXPERT_LAYER = r"(?<=\.experts\.)(\d+)\.{}(?=\.|$)"
Rename = Callable[[str], str]


def has_own_names(model: nn.Module, target: Target) -> bool:
    """Whether the target's files have the model's experts one by one, under the names of the model's own files."""
    return getattr(text_config(model), "model_type", None) in target.own_names


def file_names(model: nn.Module, target: Target) -> Rename:
    """Name of a module or tensor -> its name in the files of a target; itself for most."""
    if not has_own_names(model, target):
        return str
    (block, in_files), layers = _OWN_NAMES[text_config(model).model_type]
    return _renaming(block, in_files, layers)


def model_names(model: nn.Module) -> Rename:
    """Inverse of `file_names`; names that files have as transformers does stay as they are."""
    kind = str(getattr(text_config(model), "model_type", None))
    if kind not in _OWN_NAMES:
        return str
    (block, in_files), layers = _OWN_NAMES[kind]
    return _renaming(in_files, block, tuple((theirs, ours) for ours, theirs in layers))


def config_names(model: nn.Module, config: Mapping[str, Any]) -> Rename:
    """Name of a module -> what a quantization config calls it: its name in files where the config speaks so."""
    kind = str(getattr(text_config(model), "model_type", None))
    if kind not in _OWN_NAMES:
        return str
    (block, in_files), layers = _OWN_NAMES[kind]
    return _renaming(block, in_files, layers) if in_files in json.dumps(config) else str


def _renaming(block: str, new_block: str, layers: _Pairs) -> Rename:
    def renamed(name: str) -> str:
        name = re.sub(rf"\.{block}\.(?=(gate|experts)(\.|$))", f".{new_block}.", name)
        for layer, new in layers:
            name = re.sub(_EXPERT_LAYER.format(layer), rf"\1.{new}", name)
        return name

    return renamed
