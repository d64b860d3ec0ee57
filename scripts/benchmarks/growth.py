"""Seconds and memory of a search step for Llamas from 0.13 to 8 B, on one card and on several: what docs/results/scaling.md fits.

    python -m scripts.benchmarks.growth --json growth_h200_1.json --seconds 150
    torchrun --nproc_per_node 2 -m scripts.benchmarks.growth --json growth_h200_2.json --seconds 150
    python -m scripts.benchmarks.growth --device cpu --tiny --json growth.json

Random bf16 weights, made on the device; objective=kl, whose reference runs in each step, as for batches that come once.
One process measures beside each search step the plain step of `benchmarks/steps.py`, and once for each model a search
step without its CUDA graph. Several processes measure weights whole in each, and sharded (FSDP2), rows of a batch
split; seconds and memory are those of the process that has most.

The record is written after each row, and no row is begun after --seconds. Models stand in an order in which a run that is cut
has the smallest and the largest.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmx.errors import RunError
from dmx.files import check_writable, write_json
from dmx.models.sharding import own_bytes
from dmx.processes import Processes
from experiments.reporting.scaling import SCHEMA
from scripts.benchmarks.machine import MIB, clear, machine, say
from scripts.benchmarks.processes import made, slowest
from scripts.benchmarks.shapes import (
    LLAMA_1B,
    LLAMA_3B,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    SMOLLM2,
    SMOLLM2_360M,
    TINY,
    Shape,
    make_tokens,
)
from scripts.benchmarks.steps import KL, REPEATS, compare_steps, run_search

SHAPES = (LLAMA_1B, LLAMA_8B, SMOLLM2, LLAMA_3B, SMOLLM2_360M)
ALONE = ((1, 1024), (2, 1024), (8, 1024), (2, 4096))
"""(rows, length) of batches; the last has the tokens of the one before, and longer rows."""
TOGETHER = ((2, 1024), (8, 1024))
ASKED = (LLAMA_8B, LLAMA_70B, LLAMA_405B)
"""What the page predicts."""
Rows = Iterator[dict[str, Any]]


def repeats_of(tiny: bool) -> int:
    """Of the plain step; a search has two more."""
    return 3 if tiny else REPEATS


def alone(model: nn.Module, shape: Shape, device: str, tiny: bool) -> Rows:
    """Rows of one process; the first batch without a graph, too."""
    batches = ((2, 32), (4, 32)) if tiny else ALONE
    for index, (rows, length) in enumerate(batches):
        variants = [KL] if index else [KL, KL | {"cuda_graph": "off"}]
        yield from compare_steps(model, shape, rows, length, device, repeats_of(tiny), variants)


def together(model: nn.Module, shape: Shape, processes: Processes, device: str, tiny: bool) -> Rows:
    """Rows of one of several processes, the same in all."""
    for rows, length in ((2 * processes.size, 32),) if tiny else TOGETHER:
        batches = [make_tokens(shape, rows, length)]
        ran = run_search(model, batches, device, steps=repeats_of(tiny) + 2, **KL)
        seconds, mib = slowest(processes, ran)
        yield {
            "rows": rows,
            "length": length,
            "settings": KL,
            "search_seconds": seconds,
            "search_mib": mib,
            "graph": ran["graph"],
            "keeps_reference": ran["keeps_reference"],
        }


def rows_of(shape: Shape, processes: Processes, device: str, tiny: bool) -> Rows:
    """Rows of one shape, each way that so many processes have."""
    for way in ("alone",) if processes.size == 1 else ("whole", "sharded"):
        model = made(shape, processes, sharded=way == "sharded")
        head = shape.facts() | {"way": way, "weights_mib": own_bytes(model) / MIB}
        found = (
            alone(model, shape, device, tiny)
            if way == "alone"
            else together(model, shape, processes, device, tiny)
        )
        for row in found:
            yield head | row
        del model, found
        clear(device)


def measure(
    shapes: tuple[Shape, ...], device: str, seconds: float, path: Path, *, tiny: bool = False
) -> dict[str, Any]:
    """The record, written by the main process after each row."""
    started = time.monotonic()
    processes = Processes(torch.device(device))
    card = torch.cuda.get_device_properties(0).total_memory / MIB if device == "cuda" else None
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine(device),
        "card_mib": card,
        "processes": processes.size,
        "steps": repeats_of(tiny) + 2,
        "asked": [shape.facts() for shape in ASKED],
        "rows": [],
    }

    def is_late() -> bool:
        return time.monotonic() - started > seconds

    for row in (row for shape in shapes for row in rows_of(shape, processes, device, tiny)):
        record["rows"].append(row)
        record["seconds"] = time.monotonic() - started
        if processes.is_main:
            write_json(path, record)
            say(
                f"{record['seconds']:.0f} s: {row['model']} {row['way']} {row['rows']} x {row['length']}: "
                f"{row['search_seconds']} s, {row['search_mib']} MiB"
            )
        if processes.agree(is_late):
            if processes.is_main:
                say(f"--seconds {seconds:g} are over: what is left was not measured")
            break
    processes.close()
    return record


def parse() -> argparse.Namespace:
    """What cannot be measured or written is refused before a model is made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path, required=True, help="write the record there")
    parser.add_argument("--seconds", type=float, default=150, help="no new row after these")
    counts = range(1, len(SHAPES) + 1)
    parser.add_argument(
        "--shapes", type=int, choices=counts, default=len(SHAPES), help="the first of them"
    )
    parser.add_argument("--tiny", action="store_true", help="seconds, to try the script itself")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device here; --device cpu --tiny tries the script")
    if asked.json.is_dir():
        parser.error(f"--json {asked.json} is a folder: name a file")
    try:
        check_writable(asked.json.parent, "--json")
    except RunError as error:
        parser.error(f"--json {asked.json}: {error}")
    return asked


def main() -> None:
    asked = parse()
    shapes = (TINY,) if asked.tiny else SHAPES[: asked.shapes]
    measure(shapes, asked.device, asked.seconds, asked.json, tiny=asked.tiny)


if __name__ == "__main__":
    main()
