"""Results that are kept, each under everything that it depends on."""

from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from dmx.applying.linear import quantized_layers
from dmx.applying.quantizers import BlockQuantizer
from dmx.applying.stored import StoredWeight
from dmx.evaluate.zero_shot.tasks import Task
from dmx.models.identity import model_fingerprint
from dmx.state import Cache, code_version

SCHEMA = "dmx.zero_shot/1"
DECIDING_MODULES = ("dmx.evaluate.zero_shot.scoring", "dmx.evaluate.zero_shot.tasks")
"""They and all that they import decide an answer."""


def result_cache(folder: str | Path | None) -> Cache:
    """Results of tasks in a folder; None keeps nothing."""
    where = None if folder is None else Path(folder)
    return Cache(where, schema=SCHEMA, what="zero-shot cache file", way_out="measure again")


def result_key(model: nn.Module, task: Task) -> dict[str, Any] | None:
    """Everything that a model's result of a task depends on; None where that cannot be told."""
    formats = quantization(model)
    if formats is None:
        return None
    versions = {name: metadata.version(name) for name in ("lm_eval", "torch", "transformers")}
    return {
        "model": model_fingerprint(model),
        "device": next(model.parameters()).device.type,
        "quantization": formats,
        "task": task.name,
        "metric": task.metric,
        "source": task.source,
        "requests": task.sha256,
        "code": [code_version(module) for module in DECIDING_MODULES],
        "versions": versions,
    }


def quantization(model: nn.Module) -> dict[str, list[str | None]] | None:
    """layer -> [weight quantizer, input quantizer] of the assignment that is applied, and its input
    transform where there is one; {} without an assignment, None where a quantizer is not one of dmx
    alone (guarded by another package)."""
    quantizers: dict[str, list[str | None]] = {}
    for name, layer in quantized_layers(model).items():
        texts: list[str | None] = []
        for quantizer in (layer.weight_quantizer, layer.input_quantizer):
            if quantizer is None:
                texts.append(None)
            elif type(quantizer) is BlockQuantizer:
                amax = "" if quantizer.amax is None else f" amax {quantizer.amax!r}"
                texts.append(f"{quantizer.block_format} {quantizer.scale_rule}{amax}")
            elif type(quantizer) is StoredWeight:
                texts.append(f"{quantizer.block_format} stored {quantizer.digest}")
            else:
                return None
        if layer.input_transform is not None:
            texts.append(layer.input_transform.digest)
        quantizers[name] = texts
    return quantizers
