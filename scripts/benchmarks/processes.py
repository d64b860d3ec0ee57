"""One process against several, with weights whole in each and sharded: tokens a second, peak memory, the same results.

    python -m scripts.benchmarks.processes --processes 2            # on two cards: a Llama of 1 B shape
    python -m scripts.benchmarks.processes --processes 2 --device cpu --tiny

Steps of a gradient search on a batch that is the same for all ways, and perplexities of random tokens. Weights are random
and of one seed, made on the device. Two launches: one process alone, and so many by torchrun, first with whole and
then with sharded weights (FSDP2). The record, processes.json in --out, holds a row for each way; the goals are printed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmx.applying.apply import applied
from dmx.evaluate.perplexity import perplexity_of, window_losses
from dmx.files import write_json
from dmx.formats import MXFP4
from dmx.models.sharding import own_bytes, spread
from dmx.processes import Processes
from dmx.searching import SearchConfig, uniform_assignment
from scripts.benchmarks.machine import MIB, clear, machine, say
from scripts.benchmarks.report import ratio, table, whole
from scripts.benchmarks.shapes import LLAMA_1B, TINY, Shape, make_model, make_tokens
from scripts.benchmarks.steps import run_search

WINDOWS = 8
GOALS = (
    ("memory of sharded weights, times one process", "sharded", "mib", 0.65),
    ("tokens a second with whole weights, times one process", "whole", "tokens_per_second", 1.8),
)
"""The first is to stay below, the second to reach its number; of two processes."""


def made(shape: Shape, processes: Processes, *, sharded: bool) -> nn.Module:
    """Frozen, in eval mode, on this process's device; bf16, float32 on a CPU."""

    def on(device: str) -> nn.Module:
        model = make_model(shape, device)
        return model.float() if processes.own_device.type == "cpu" else model

    here = str(processes.own_device)
    if not sharded:
        return on(here)
    model = on("meta")
    spread(model, on(here) if processes.is_main else None, processes, processes.own_device)
    return model.requires_grad_(False)


def slowest(processes: Processes, ran: dict[str, Any]) -> tuple[float, float | None]:
    """Seconds of a step and peak MiB of `run_search`, each of the process that has most; the same in all."""

    def most(value: float | None) -> float:
        return float(processes.largest(torch.tensor(value or 0.0, device=processes.own_device)))

    return most(ran["search_seconds"]), most(ran["search_mib"]) or None


def measure(
    shape: Shape, rows: int, length: int, device: str, way: str, steps: int
) -> dict[str, Any]:
    """A row of the record; the same in all processes, of which memory is the largest."""
    processes = Processes(torch.device(device))
    model = made(shape, processes, sharded=way == "sharded")
    clear(device)
    batches = [make_tokens(shape, rows, length, seed) for seed in range(2)]
    ran = run_search(model, batches, device, steps=steps)
    seconds, mib = slowest(processes, ran)
    tokens = make_tokens(shape, 1, WINDOWS * length, seed=7)[0]
    assignment = uniform_assignment(model, MXFP4, SearchConfig(name="uniform"))
    perplexities = []
    for applying in (None, assignment):
        with applied(model, applying):
            losses = window_losses(model, tokens, window=length, batch_size=1, processes=processes)
        perplexities.append(perplexity_of(float(losses.mean())))
    return {
        "way": way,
        "processes": processes.size,
        "step_seconds": seconds,
        "tokens_per_second": rows * length / seconds,
        "mib": mib,
        "weights_mib": own_bytes(model) / MIB,
        "graph": ran["graph"],
        "perplexity": perplexities[0],
        "perplexity_mxfp4": perplexities[1],
    }


def measure_here(arguments: argparse.Namespace) -> None:
    """In one of the processes of a launch: its ways, into a file each that the main one writes."""
    shape = TINY if arguments.tiny else LLAMA_1B
    for way in arguments.ways:
        row = measure(
            shape, arguments.rows, arguments.length, arguments.device, way, arguments.steps
        )
        if Processes(torch.device(arguments.device)).is_main:
            write_json(arguments.out / f"{way}.json", row)
        clear(arguments.device)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def launch(arguments: argparse.Namespace, processes: int, ways: list[str]) -> list[dict[str, Any]]:
    """The rows of some ways, from processes of their own."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command = [
        sys.executable, *(launcher if processes > 1 else []), "-m", "scripts.benchmarks.processes",
        "--device", arguments.device, "--out", str(arguments.out), "--rows", str(arguments.rows),
        "--length", str(arguments.length), "--steps", str(arguments.steps), *(["--tiny"] if arguments.tiny else []), "--ways", *ways,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return [json.loads((arguments.out / f"{way}.json").read_text()) for way in ways]


def report(rows: list[dict[str, Any]]) -> str:
    """A table, and each goal beside what was measured; shares are of the first row."""
    first = rows[0]
    lines = table(
        "way | processes | ms a step | tokens/s | times | peak MiB | times | weights MiB | CUDA graph | perplexity | MXFP4",
        [
            [
                row["way"],
                str(row["processes"]),
                f"{row['step_seconds'] * 1e3:.1f}",
                whole(row["tokens_per_second"]),
                ratio(row["tokens_per_second"], first["tokens_per_second"]),
                whole(row["mib"]),
                ratio(row["mib"], first["mib"]),
                whole(row["weights_mib"]),
                "yes" if row["graph"] else "no",
                f"{row['perplexity']:.6g}",
                f"{row['perplexity_mxfp4']:.6g}",
            ]
            for row in rows
        ],
    )
    by_way = {row["way"]: row for row in rows}
    goals = [
        [text, str(limit), ratio(by_way[way][key], first[key])] for text, way, key, limit in GOALS
    ]
    digits = {f"{row['perplexity']:.4g}" for row in rows}
    goals.append(["perplexity of all to four digits", "1", str(len(digits))])
    return "\n".join([*lines, *table("goal | limit | measured", goals)])


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rows", type=int, default=8, help="of the batch that all share")
    parser.add_argument("--length", type=int, default=1024, help="tokens a row")
    parser.add_argument("--steps", type=int, default=12, help="of the search; the median counts")
    parser.add_argument("--tiny", action="store_true", help="seconds, to try the script itself")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument(
        "--ways", nargs="+", choices=("alone", "whole", "sharded"), help=argparse.SUPPRESS
    )
    return parser


def main() -> None:
    arguments = parser().parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.ways:
        measure_here(arguments)
        return
    rows = [
        *launch(arguments, 1, ["alone"]),
        *launch(arguments, arguments.processes, ["whole", "sharded"]),
    ]
    body = {"machine": machine(arguments.device), "rows": rows}
    write_json(arguments.out / "processes.json", body)
    say(report(rows))


if __name__ == "__main__":
    main()
