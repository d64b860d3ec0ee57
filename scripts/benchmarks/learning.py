"""Twenty learning steps at 1 B and 8 B shape, end to end and block by block.

    python -m scripts.benchmarks.learning --json learning.json
    python -m scripts.benchmarks.learning --json learning.json --shapes 8b
    python -m scripts.benchmarks.learning --json learning.json --shapes tiny       # to try the script itself

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
from dmx.searching import SearchConfig, uniform_assignment
from scripts.benchmarks.machine import clear, machine, peak_mib, say, wait
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


def rows_of(shape: Shape, device: str) -> Iterator[dict[str, Any]]:
    """Every mode on one shape."""
    length = 32 if shape is TINY else 1024
    model = make_model(shape, device)
    batches = [make_tokens(shape, 2, length, seed) for seed in range(4)]
    for mode in MODES:
        head = {"model": shape.name, "rows": 2, "length": length}
        yield head | row(model, batches, device, mode)
    del model
    clear(device)  # before the next one is made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="write the record there")
    parser.add_argument("--shapes", nargs="+", choices=NAMED, default=["1b", "8b"])
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {"machine": machine(device), "rows": []}
    for found in (found for name in asked.shapes for found in rows_of(NAMED[name], device)):
        record["rows"].append(found)
        write_json(asked.json, record)
        say(json.dumps(found))


if __name__ == "__main__":
    main()
