"""What a search costs beside the model itself: one command, one table, CPU and GPU.

    python -m scripts.benchmarks                        # every section, on what this machine has
    python -m scripts.benchmarks --only steps scans     # some sections
    python -m scripts.benchmarks --report               # the table again, from the kept numbers
    python -m scripts.benchmarks --report --merge other/bench.json   # sections measured elsewhere, too

A library that does not fit beside the others is timed from an environment of its own and merged:

    other/bin/python -m scripts.benchmarks --only peers --device cpu --out other
    python -m scripts.benchmarks --report --merge other/bench.json

Sections:
    kernels   every kernel against a copy (benchmarks/kernels.py)
    peers     fake quantization by other libraries, against a copy and ours in the same process
    steps     a search step against a plain step of the same model and batch, with peak memory
    long      all steps of a search with the default settings
    large     ten steps of a Llama of 8 B shape on one card
    scans     searches by scores, after loading
    growth    how a step's time and memory grow with layers, width and tokens

How a plain step is timed says `benchmarks/steps.py`. Models have the shapes of their names and random
weights, made on the device: times and memory depend on shapes alone.

Numbers go to docs/results/bench.json, section by section, and the tables to docs/results/bench.md;
the goals (`benchmarks/targets.py`), each met or missed, are printed.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks import kernels as own_kernels
from scripts.benchmarks import peers as other_libraries
from scripts.benchmarks import steps
from scripts.benchmarks.machine import clear, machine, say
from scripts.benchmarks.report import report, targets_text

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
ON_CPU = ("kernels", "peers", "steps", "scans")


def sizes_and_dtypes(device: str, tiny: bool) -> tuple[list[int], list[torch.dtype]]:
    if tiny:
        return [64], [torch.float32]
    return [4096] if device == "cpu" else [4096, 8192], [torch.float32, torch.bfloat16]


def kernels(device: str, tiny: bool) -> list[dict[str, Any]]:
    keys = ("device", "size", "dtype", "kernel", "ms", "x_copy", "of_limit", "gb_s")
    measured = []
    for row in own_kernels.rows(device, *sizes_and_dtypes(device, tiny)):
        measured.append(dict(zip(keys, row, strict=True)))
        say(" ".join(row))
    return measured


def peers(device: str, tiny: bool) -> list[dict[str, Any]]:
    here = machine(device)
    where = [here["name"], *([f"threads {here['threads']}"] if "threads" in here else [])]
    label = ", ".join([*where, f"torch {here['torch']}"])
    measured = []
    for row in other_libraries.peer_rows(device, *sizes_and_dtypes(device, tiny)):
        measured.append(row | {"where": label})
        say(" ".join(other_libraries.shown(value) for value in row.values()))
    return measured


def merge(body: dict[str, Any], other: dict[str, Any]) -> None:
    """Adds sections that were measured elsewhere to `body`, in place of its own. Of `peers`, rows:
    every environment has libraries of its own, and a time replaces a reason for having none."""
    for device, sections in other.items():
        mine = body.setdefault(device, {})
        if "peers" in mine and "peers" in sections:
            rows = other_libraries.join_peers(mine["peers"]["rows"], sections["peers"]["rows"])
            sections = sections | {"peers": mine["peers"] | {"rows": rows}}
        mine.update(sections)


MEASURE: dict[str, Callable[[str, bool], list[dict[str, Any]]]] = {
    "kernels": kernels,
    "peers": peers,
    "steps": steps.steps,
    "long": steps.long,
    "large": steps.large,
    "scans": steps.scans,
    "growth": steps.growth,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(MEASURE), help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if any")
    parser.add_argument("--threads", type=int, help="on the CPU")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument(
        "--merge", nargs="+", type=Path, default=[], help="bench.json files of other machines"
    )
    parser.add_argument("--note", help="kept beside the machine, such as what else ran on it")
    parser.add_argument("--tiny", action="store_true", help="seconds, to try the script itself")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of bench.json, bench.md")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    path = arguments.out / "bench.json"
    body: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for other in arguments.merge:
        merge(body, json.loads(other.read_text()))
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments.out.mkdir(parents=True, exist_ok=True)
    default = tuple(MEASURE) if device == "cuda" or arguments.tiny else ON_CPU
    for name in () if arguments.report else (arguments.only or default):
        started = time.perf_counter()
        rows = MEASURE[name](device, arguments.tiny)
        clear(device)
        note = {"note": arguments.note} if arguments.note else {}
        body.setdefault(device, {})[name] = {"machine": machine(device) | note, "rows": rows}
        # After every section: what is measured stays, whatever comes after.
        path.write_text(json.dumps(body, indent=1) + "\n")
        (arguments.out / "bench.md").write_text(report(body))
        say(f"{name}: {time.perf_counter() - started:.0f} s")
    text = report(body)
    path.write_text(json.dumps(body, indent=1) + "\n")
    (arguments.out / "bench.md").write_text(text)
    print(text)
    print(targets_text(body))


if __name__ == "__main__":
    main()
