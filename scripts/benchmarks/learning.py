"""Twenty learning steps at 1 B and 8 B shape, end to end and block by block, beside a plain training step.

    python -m scripts.benchmarks.learning --json learning.json
    python -m scripts.benchmarks.learning --json learning.json --shapes 8b
    python -m scripts.benchmarks.learning --json learning.json --shapes smollm2 --rows 8 --length 1024
    python -m scripts.benchmarks.learning --json learning.json --shapes tiny       # to try the script itself

The plain step: bf16, forward and backward with the gradients of all weights, cross entropy in float32, fused AdamW, on a GPU
one CUDA graph, as a learning step is.

Random weights in bf16 on the device. The time of a step is that of a run with twenty more steps, less that of the
shorter one, after a run that compiles what both use; so measurements before and after, and captures, are not in it. The record is written after each row, so that
a run that is cut leaves those that it has; seconds and memory of one that did not fit are null.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dmx
from dmx.files import write_json
from dmx.formats import MXFP4
from dmx.models.graph import StepGraphs
from dmx.searching import SearchConfig, uniform_assignment
from scripts.benchmarks.machine import clear, machine, median_seconds, peak_mib, say, wait
from scripts.benchmarks.shapes import NAMED, TINY, Shape, make_model, make_tokens

STEPS = 20
FEW = 5
SMALL = {"masters": "bfloat16", "optimizer_state": "int8"}
MODES: dict[str, dict[str, Any]] = {
    "end to end": {},
    "end to end, small state": SMALL,
    "blocks": {"steps": 0},
    "blocks, small state": {"steps": 0, **SMALL},
}
PLAIN = "plain training step"


def seconds(model: nn.Module, batches: list[Tensor], device: str, config: dmx.LearnConfig) -> float:
    assignment = uniform_assignment(model, MXFP4, SearchConfig(name="uniform"))
    wait(device)
    started = time.perf_counter()
    dmx.learn_weights(model, assignment, batches, config)
    wait(device)
    return time.perf_counter() - started


def row(model: nn.Module, batches: list[Tensor], device: str, mode: str) -> dict[str, Any]:
    """Seconds of a step and peak memory; of blocks, a step of each block."""
    settings = MODES[mode]
    name = "block_steps" if "steps" in settings else "steps"
    clear(device)
    try:
        _, few, many = (
            seconds(model, batches, device, dmx.LearnConfig(**settings | {name: n}, held_batches=0))
            for n in (1, FEW, FEW + STEPS)
        )
    except torch.OutOfMemoryError:
        return {"mode": mode, "step_seconds": None, "peak_mib": None}
    return {"mode": mode, "step_seconds": (many - few) / STEPS, "peak_mib": peak_mib(device)}


def plain_row(model: Any, tokens: Tensor, device: str) -> dict[str, Any]:
    """Median seconds of a plain training step and its peak memory; the weights stay as they are."""
    clear(device)
    tokens = tokens.to(device)
    weights = list(model.parameters())
    needed = [w.requires_grad for w in weights]

    def step() -> tuple[Tensor]:
        logits = model(tokens, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return (loss.detach(),)

    try:
        for weight in weights:
            weight.requires_grad_(True)
        optimizer = torch.optim.AdamW(
            weights, lr=0.0, weight_decay=0.0, fused=True, capturable=device == "cuda"
        )
        graphs = StepGraphs(device == "cuda")
        seconds = median_seconds(lambda: graphs("plain", step), device, STEPS, unseen=FEW)
        found = {"step_seconds": seconds, "peak_mib": peak_mib(device)}
    except torch.OutOfMemoryError:
        found = {"step_seconds": None, "peak_mib": None}
    for weight, is_needed in zip(weights, needed, strict=True):
        weight.grad = None
        weight.requires_grad_(is_needed)
    return {"mode": PLAIN} | found


def rows_of(shape: Shape, device: str, rows: int, length: int) -> Iterator[dict[str, Any]]:
    """Every mode on one shape, after the plain step."""
    model = make_model(shape, device)
    batches = [make_tokens(shape, rows, length, seed) for seed in range(4)]
    head = {"model": shape.name, "rows": rows, "length": length}
    yield head | plain_row(model, batches[0], device)
    for mode in MODES:
        yield head | row(model, batches, device, mode)
    del model
    clear(device)  # before the next one is made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="write the record there")
    parser.add_argument("--shapes", nargs="+", choices=NAMED, default=["1b", "8b"])
    parser.add_argument("--rows", type=int, default=2, help="of a batch")
    parser.add_argument("--length", type=int, help="tokens of a row; default: 1024, of tiny 32")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {"machine": machine(device), "rows": []}
    shapes = [NAMED[name] for name in asked.shapes]
    lengths = [asked.length or (32 if shape is TINY else 1024) for shape in shapes]
    for found in (
        found
        for shape, length in zip(shapes, lengths, strict=True)
        for found in rows_of(shape, device, asked.rows, length)
    ):
        record["rows"].append(found)
        write_json(asked.json, record)
        say(json.dumps(found))


if __name__ == "__main__":
    main()
