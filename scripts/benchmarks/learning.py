"""Twenty learning steps at 1 B and 8 B shape, end to end and block by block, as JSON lines.

    python -m scripts.benchmarks.learning [--tiny]

Random weights in bf16 on the device. The time of a step is that of a run with twenty more steps, less that of the
shorter one, after a run that compiles what both use; so measurements before and after, and captures, are not in it.
"""

import argparse
import json
import time
from typing import Any

import torch
from torch import Tensor, nn

import dmx
from dmx.formats import MXFP4
from dmx.searching import SearchConfig, uniform_assignment
from scripts.benchmarks.machine import clear, peak_mib, wait
from scripts.benchmarks.shapes import LLAMA_1B, LLAMA_8B, TINY, make_model, make_tokens

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="to try the script itself")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in (TINY,) if parser.parse_args().tiny else (LLAMA_1B, LLAMA_8B):
        length = 32 if shape is TINY else 1024
        model = make_model(shape, device)
        batches = [make_tokens(shape, 2, length, seed) for seed in range(4)]
        for mode in MODES:
            facts = {"model": shape.name, "rows": 2, "length": length}
            print(json.dumps(facts | row(model, batches, device, mode)), flush=True)
        del model


if __name__ == "__main__":
    main()
