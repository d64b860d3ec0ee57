"""Run as a script: what transformers makes of folders, loaded as its users do. Knows nothing of dmx.

Takes jobs as `engine_worker` does and writes the same; speed is not measured, and options and kernels that stand in mean
nothing here. What quantizes is in the modules, so their class is both scheme and kernel.
"""

import json
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
import worker
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def linear_layers(model: Any) -> dict[str, Any]:
    """All but the one to the vocabulary, which no engine counts with them."""
    last = model.get_output_embeddings()
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not last}


def facts_of(model: Any) -> dict[str, Any]:
    """As of `engine_worker`; nothing is merged."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return {
        "architecture": type(model).__name__,
        "layers": {name: part_names(layer) for name, layer in linear_layers(model).items()},
        "fused": {},
        "weight_bytes": sum(t.numel() * t.element_size() for t in tensors.values()),
    }


def part_names(layer: nn.Module) -> dict[str, str]:
    """method, scheme and kernel of a linear layer: its class, and how compressed-tensors left its weight."""
    kind = type(layer).__name__
    status = getattr(layer, "quantization_status", None)
    scheme = "none" if status is None else f"compressed-tensors, {status.value}"
    return {"method": kind, "scheme": scheme, "kernel": kind}


@torch.no_grad()
def log_probabilities(model: Any, tokens: Tensor) -> Tensor:
    """(rows, window - 1) float64: of each token after the first, given those before it."""
    rows = []
    for row in tokens.to(model.device):
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
        rows.append(logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0].double().cpu())
    return torch.stack(rows)


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    tokens = load_file(job["tokens"])["tokens"]
    started = time.perf_counter()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.to(job["device"]).eval()
    log_probabilities(model, tokens[:1, :2])  # the first call decompresses, always to bfloat16
    model = model.to(getattr(torch, job["dtype"]))
    loaded = time.perf_counter() - started
    operands = worker.Operands(linear_layers)
    operands.watch(model)
    log_probabilities(model, tokens[:1])
    operands.release(model)
    facts = facts_of(model)
    tensors = {n: t.flatten(0, -2) for n, t in operands.kept.items()}
    tensors["log_probabilities"] = log_probabilities(model, tokens)
    save_file({name: t.contiguous() for name, t in tensors.items()}, job["out"])
    report = {
        **facts,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "device": model.device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": dict(Counter(layer["kernel"] for layer in facts["layers"].values())),
        "load_seconds": loaded,
        "speed": None,
        "peak_bytes": {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024},
    }
    Path(job["out"] + ".json").write_text(json.dumps(report))


if __name__ == "__main__":
    worker.start(main)
