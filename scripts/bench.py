"""What a search costs beside the model itself: one command, one table, CPU and GPU.

    python scripts/bench.py                        # every section, on what this machine has
    python scripts/bench.py --only steps scans     # some sections
    python scripts/bench.py --report               # the table again, from the kept numbers
    python scripts/bench.py --report --merge other/bench.json   # sections measured elsewhere, too

A library that does not fit beside the others is timed from an environment of its own and merged:

    other/bin/python scripts/bench.py --only peers --device cpu --out other
    python scripts/bench.py --report --merge other/bench.json

Sections:
    kernels   every kernel against a copy (bench_kernels.py)
    peers     fake quantization by other libraries, against a copy and ours in the same process
    steps     a search step against a plain step of the same model and batch, with peak memory
    long      all steps of a search with the default settings
    large     ten steps of a Llama of 8 B shape on one card
    scans     searches by scores, after loading
    growth    how a step's time and memory grow with layers, width and tokens

The plain step: bf16, eager, weights frozen, forward and backward to the input embeddings, with
cross entropy in float32, on an equal batch. Both are timed on the wall clock, the device waited
for before and after; medians of one process, so ratios are within one run. Models have the shapes
of their names and random weights, made on the device: times and memory depend on shapes alone.

Numbers go to docs/results/bench.json, section by section, and the table to docs/results/bench.md.
"""

import argparse
import dataclasses
import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_kernels

import dmx
from dmx.assignment.budget import Budget
from dmx.kernels import ops
from dmx.searching import SearchConfig, search_space
from dmx.searching.differentiable import DifferentiableSearch

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
SECTIONS = ("kernels", "peers", "steps", "long", "large", "scans", "growth")
ON_CPU = ("kernels", "peers", "steps", "scans")
REPEATS = 9
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool


SMOLLM2 = Shape("SmolLM2-135M", 576, 1536, 30, 9, 3, 49152, True)
LLAMA_1B = Shape("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 128256, True)
LLAMA_8B = Shape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128256, False)
TINY = Shape("tiny", 64, 128, 2, 4, 2, 288, True)
GROWTH = Shape("growth", 1024, 2816, 8, 16, 4, 8192, True)


def make_model(shape: Shape, device: str) -> nn.Module:
    """bf16, random weights, frozen, in eval mode."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def make_tokens(shape: Shape, rows: int, length: int, seed: int = 0) -> Tensor:
    """(rows, length) int64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocab, (rows, length), generator=generator)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_mib(device: str) -> float | None:
    """Peak of allocated device memory since `clear`; None on a CPU."""
    return torch.cuda.max_memory_allocated() / MIB if device == "cuda" else None


# --- plain step and search step ----------------------------------------------------------------


def plain_step(model: Any, tokens: Tensor) -> None:
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    ).backward()


def time_plain(
    model: nn.Module, tokens: Tensor, device: str, repeats: int
) -> tuple[float, float | None]:
    """Median seconds of a plain step and its peak memory in MiB."""
    clear(device)
    there = tokens.to(device)
    times = []
    for i in range(repeats + 2):
        wait(device)
        started = time.perf_counter()
        plain_step(model, there)
        wait(device)
        if i >= 2:
            times.append(time.perf_counter() - started)
    return statistics.median(times), peak_mib(device)


class TimedSearch(DifferentiableSearch):
    """Keeps the seconds of every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds: list[float] = []

    def take_step(self, *args: Any) -> dict[str, Any]:
        wait(self.device.type)
        started = time.perf_counter()
        row = super().take_step(*args)
        wait(self.device.type)
        self.seconds.append(time.perf_counter() - started)
        return row


def run_search(
    model: nn.Module, batches: list[Tensor], device: str, **settings: Any
) -> dict[str, Any]:
    """A gradient search; median seconds of a step, seconds of all, peak memory."""
    clear(device)
    config = SearchConfig(units="layer", **settings)
    space = search_space(model, config)
    search = TimedSearch(model, batches, space, Budget(5.0), config, folder=None, fingerprint="")
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random weights may leave every offset where it was
        search.run()
    wait(device)
    return {
        "search_seconds": statistics.median(search.seconds),
        "total_seconds": time.perf_counter() - started,
        "search_mib": peak_mib(device),
        "graph": search.uses_graph,
    }


def compare_steps(
    model: nn.Module, shape: Shape, rows: int, length: int, device: str, repeats: int,
    variants: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each variant of the search's settings, beside the plain step."""
    batches = [make_tokens(shape, rows, length)]
    base = {"model": shape.name, "rows": rows, "length": length}
    try:
        seconds, mib = time_plain(model, batches[0], device, repeats)
        base |= {"plain_seconds": seconds, "plain_mib": mib}
    except torch.OutOfMemoryError:
        base |= {"plain_seconds": None, "plain_mib": None}
    for variant in variants:
        row = base | {"settings": variant}
        settings = {"steps": repeats + 2, "evaluate_every": 10**6} | variant
        try:
            row |= run_search(model, batches, device, **settings)
        except torch.OutOfMemoryError:
            row |= {"search_seconds": None, "search_mib": None, "graph": None}
        yield row
        say(f"{shape.name} {rows} x {length} {variant}: {describe(row)}")


def describe(row: dict[str, Any]) -> str:
    return (
        f"{milli(row['search_seconds'])} ms against {milli(row['plain_seconds'])} ms, "
        f"{whole(row['search_mib'])} against {whole(row['plain_mib'])} MiB"
    )


OBJECTIVES: list[dict[str, Any]] = [{"objective": "cross_entropy"}, {"objective": "kl"}]


def steps(device: str, tiny: bool) -> list[dict[str, Any]]:
    if tiny:
        plan = [(TINY, [(2, 32)])]
    elif device == "cpu":
        plan = [(SMOLLM2, [(1, 256)])]
    else:
        plan = [
            (SMOLLM2, [(4, 1024), (8, 2048)]),
            (LLAMA_1B, [(4, 1024), (4, 2048)]),
            (LLAMA_8B, [(1, 1024), (1, 2048)]),
        ]
    found: list[dict[str, Any]] = []
    for shape, batches in plan:
        model = make_model(shape, device)
        for rows, length in batches:
            variants = list(OBJECTIVES)
            if (rows, length) == batches[-1] and device == "cuda":
                variants.append({"objective": "cross_entropy", "gradient_checkpointing": True})
            repeats = 3 if device == "cpu" else REPEATS
            found += compare_steps(model, shape, rows, length, device, repeats, variants)
        del model
    return found


def long(device: str, tiny: bool) -> list[dict[str, Any]]:
    """400 steps of 8 x 2048 tokens, measurements of the hard model included."""
    shape, rows, length, n = (TINY, 2, 32, 6) if tiny else (SMOLLM2, 8, 2048, 400)
    model = make_model(shape, device)
    batches = [make_tokens(shape, rows, length, seed) for seed in range(16)]
    row = run_search(model, batches, device, steps=n)
    return [{"model": shape.name, "rows": rows, "length": length, "steps": n} | row]


def large(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Ten steps of 1 x 2048 tokens at 8 B shape, as a user calls them."""
    shape, length = (TINY, 32) if tiny else (LLAMA_8B, 2048)
    model = make_model(shape, device)
    batches = [make_tokens(shape, 1, length, seed) for seed in range(4)]
    found = []
    for objective in ("cross_entropy", "kl"):
        row = run_search(model, batches, device, steps=10, objective=objective)
        found.append(
            {"model": shape.name, "rows": 1, "length": length, "steps": 10, "objective": objective}
            | row
        )
        say(f"10 steps at 8 B, {objective}: {row['total_seconds']:.1f} s")
    return found


def scans(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Twice each: the first run compiles kernels where the cache is cold."""
    shape = TINY if tiny else SMOLLM2
    model = make_model(shape, device)
    small, big = ((1, 128, 1), (1, 128, 1)) if device == "cpu" else ((8, 1024, 1), (4, 1024, 8))
    if tiny:
        small = big = (1, 32, 1)
    found = []
    for name, family, (rows, length, n) in (
        ("kl", "mxfp6_mxfp4", small),
        ("kl_per_bit", "mxfp8_mxfp6_mxfp4", small),
        ("fisher", "mxfp8_mxfp6_mxfp4", big),
        ("weight_mse", "mxfp8_mxfp6_mxfp4", small),
    ):
        if name == "kl_per_bit" and device == "cpu" and not tiny:
            continue  # three times the kl scan
        batches = [make_tokens(shape, rows, length, seed) for seed in range(n)]
        config = SearchConfig(name=name, family=family, units="layer")
        clear(device)
        seconds = []
        for _ in range(1 if device == "cpu" else 4 if name == "kl" else 2):
            wait(device)
            started = time.perf_counter()
            result = dmx.search(model, batches, Budget(5.0), config)
            seconds.append(time.perf_counter() - started)
        found.append({
            "search": name, "family": family, "model": shape.name, "layers": len(result.units),
            "batches": n, "rows": rows, "length": length, "first_seconds": seconds[0],
            "seconds": statistics.median(seconds[1:] or seconds), "search_mib": peak_mib(device),
        })  # fmt: skip
        say(f"{name}: {seconds}")
    return found


def growth(device: str, tiny: bool) -> list[dict[str, Any]]:
    """One dimension at a time, from layers 8, width 1024, 4 x 1024 tokens."""
    base, rows, length = (TINY, 2, 32) if tiny else (GROWTH, 4, 1024)
    factors = (1.0, 2.0) if tiny else (0.5, 1.0, 2.0, 4.0)
    found = []
    for axis in ("layers", "width", "tokens"):
        for factor in factors:
            shape, n = base, rows
            if axis == "layers":
                shape = dataclasses.replace(base, layers=int(base.layers * factor))
            elif axis == "width":
                shape = dataclasses.replace(
                    base, hidden=int(base.hidden * factor), heads=int(base.heads * factor),
                    intermediate=int(base.intermediate * factor),
                    kv_heads=max(1, int(base.kv_heads * factor)),
                )  # fmt: skip
            else:
                n = int(rows * factor)
            model = make_model(shape, device)
            row = next(compare_steps(model, shape, n, length, device, 5, OBJECTIVES[:1]))
            size = {"layers": shape.layers, "width": shape.hidden, "tokens": n * length}[axis]
            found.append(row | {"axis": axis, "size": size})
            del model
    return found


def sizes_and_dtypes(device: str, tiny: bool) -> tuple[list[int], list[torch.dtype]]:
    if tiny:
        return [64], [torch.float32]
    return [4096] if device == "cpu" else [4096, 8192], [torch.float32, torch.bfloat16]


def kernels(device: str, tiny: bool) -> list[dict[str, Any]]:
    keys = ("device", "size", "dtype", "kernel", "ms", "x_copy", "of_limit", "gb_s")
    found = []
    for row in bench_kernels.rows(device, *sizes_and_dtypes(device, tiny)):
        found.append(dict(zip(keys, row, strict=True)))
        say(" ".join(row))
    return found


def peers(device: str, tiny: bool) -> list[dict[str, Any]]:
    here = machine(device)
    where = [here["name"], *([f"threads {here['threads']}"] if "threads" in here else [])]
    label = ", ".join([*where, f"torch {here['torch']}"])
    found = []
    for row in bench_kernels.peer_rows(device, *sizes_and_dtypes(device, tiny)):
        found.append(row | {"where": label})
        say(" ".join(bench_kernels.shown(value) for value in row.values()))
    return found


def merge(body: dict[str, Any], other: dict[str, Any]) -> None:
    """Adds sections that were measured elsewhere to `body`, in place of its own. Of `peers`, rows:
    every environment has libraries of its own, and a time replaces a reason for having none."""
    for device, sections in other.items():
        mine = body.setdefault(device, {})
        if "peers" in mine and "peers" in sections:
            rows = join_peers(mine["peers"]["rows"], sections["peers"]["rows"])
            sections = sections | {"peers": mine["peers"] | {"rows": rows}}
        mine.update(sections)


def join_peers(rows: list[dict[str, Any]], newer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return row["size"], row["dtype"], row["library"].partition(" ")[0], row["format"]

    joined = {key(row): row for row in rows}
    for row in newer:
        if row["ms"] is not None or key(row) not in joined:
            joined[key(row)] = row
    return list(joined.values())


# --- report ------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    found: dict[str, Any] = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": installed("transformers"),
        "backend": ops.actual_backend(device),
    }
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        found |= {
            "name": torch.cuda.get_device_name(),
            "driver": driver.splitlines()[0],
            "cuda": torch.version.cuda,
            "triton": installed("triton"),
        }
    else:
        names = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        found |= {"name": names[0] if names else platform.machine()}
        found["threads"] = torch.get_num_threads()
    return found


def milli(seconds: float | None) -> str:
    return "out of memory" if seconds is None else f"{seconds * 1e3:.1f}"


def whole(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def ratio(a: float | None, b: float | None) -> str:
    return "-" if a is None or b is None else f"{a / b:.2f}"


def table(header: str, body: list[list[str]]) -> list[str]:
    names = [name.strip() for name in header.split("|")]
    return [
        "| " + " | ".join(names) + " |",
        "|" + " --- |" * len(names),
        *("| " + " | ".join(row) + " |" for row in body),
        "",
    ]


def settings_text(settings: dict[str, Any]) -> str:
    text = settings["objective"].replace("_", " ")
    return text + (", checkpointing" if settings.get("gradient_checkpointing") else "")


def steps_table(rows: list[dict[str, Any]]) -> list[str]:
    return table(
        "model | batch | objective | plain ms | search ms | times | plain MiB | search MiB | times "
        "| CUDA graph",
        [
            [
                r["model"], f"{r['rows']} x {r['length']}", settings_text(r["settings"]),
                milli(r["plain_seconds"]), milli(r["search_seconds"]),
                ratio(r["search_seconds"], r["plain_seconds"]),
                whole(r["plain_mib"]), whole(r["search_mib"]),
                ratio(r["search_mib"], r["plain_mib"]),
                {True: "yes", False: "no", None: "-"}[r["graph"]],
            ]
            for r in rows
        ],
    )  # fmt: skip


def totals_table(rows: list[dict[str, Any]]) -> list[str]:
    return table(
        "model | steps | batch | objective | seconds in all | ms a step | peak MiB",
        [
            [
                r["model"], str(r["steps"]), f"{r['rows']} x {r['length']}",
                r.get("objective", "cross_entropy").replace("_", " "),
                f"{r['total_seconds']:.1f}", milli(r["search_seconds"]), whole(r["search_mib"]),
            ]
            for r in rows
        ],
    )  # fmt: skip


def scans_table(rows: list[dict[str, Any]]) -> list[str]:
    return table(
        "search | candidates | model | layers | batches | first run s | s | peak MiB",
        [
            [
                r["search"], r["family"].replace("_", ", "), r["model"], str(r["layers"]),
                f"{r['batches']} of {r['rows']} x {r['length']}", f"{r['first_seconds']:.2f}",
                f"{r['seconds']:.2f}", whole(r["search_mib"]),
            ]
            for r in rows
        ],
    )  # fmt: skip


def exponent(rows: list[dict[str, Any]], key: str) -> str:
    """Slope of log(key) over log(size), by least squares."""
    points = [(r["size"], r[key]) for r in rows if r[key]]
    if len(points) < 2:
        return "-"
    sizes, values = np.log(np.array(points)).T
    return f"{np.polyfit(sizes, values, 1)[0]:.2f}"


GROWTH_KEYS = ("plain_seconds", "search_seconds", "plain_mib", "search_mib")


def growth_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = table(
        "axis | size | plain ms | search ms | plain MiB | search MiB",
        [
            [r["axis"], str(r["size"]), milli(r["plain_seconds"]), milli(r["search_seconds"]),
             whole(r["plain_mib"]), whole(r["search_mib"])]
            for r in rows
        ],
    )  # fmt: skip
    lines += ["Exponents p of the fit size^p (least squares in logarithms):", ""]
    axes = dict.fromkeys(r["axis"] for r in rows)
    body = []
    for axis in axes:
        own = [r for r in rows if r["axis"] == axis]
        body.append([axis, *(exponent(own, key) for key in GROWTH_KEYS)])
    return lines + table("axis | plain time | search time | plain memory | search memory", body)


def kernels_table(rows: list[dict[str, Any]]) -> list[str]:
    return table(
        "size | dtype | kernel | ms | times a copy | of its limit | GB/s",
        [
            [r["size"], r["dtype"], r["kernel"], r["ms"], r["x_copy"], r["of_limit"], r["gb_s"]]
            for r in rows
        ],
    )


def peers_table(rows: list[dict[str, Any]]) -> list[str]:
    return table(
        "size | dtype | library | format | ms | times a copy | times ours | where",
        [
            [
                r["size"], r["dtype"], r["library"], r["format"],
                *([r["reason"], "-", "-"] if r["ms"] is None
                  else [f"{r['ms']:.2f}", f"{r['x_copy']:.1f}", f"{r['x_ours']:.1f}"]),
                r["where"],
            ]
            for r in rows
        ],
    )  # fmt: skip


TABLES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], list[str]]]] = {
    "steps": ("Search step against plain step", steps_table),
    "long": ("A whole search", totals_table),
    "large": ("Ten steps at 8 B", totals_table),
    "scans": ("Searches by scores", scans_table),
    "growth": ("Growth", growth_table),
    "kernels": ("Kernels", kernels_table),
    "peers": ("Fake quantization by other libraries", peers_table),
}


def check_of(name: str, values: list[float], limit: float, *, at_least: bool) -> list[str]:
    """A row of the table of targets: the worst value against its limit."""
    if not values or any(math.isnan(v) for v in values):
        return [name, f"{'>=' if at_least else '<='} {limit:g}", "not measured", "-"]
    worst = min(values) if at_least else max(values)
    met = worst >= limit if at_least else worst <= limit
    return [
        name, f"{'>=' if at_least else '<='} {limit:g}", f"{worst:.2f}", "yes" if met else "**no**"
    ]  # fmt: skip


def targets(device: str, found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """The goals of the project, with the worst of the values that each speaks of."""
    rows = found.get("kernels", [])

    def kernel(start: str, key: str, dtype: str = "") -> list[float]:
        return [
            float(r[key]) for r in rows
            if r["kernel"].startswith(start) and r["dtype"].startswith(dtype)
        ]  # fmt: skip

    if device == "cpu":
        return [
            check_of(f"{f} {d}, times a copy", kernel(f"fake_quant {f}", "x_copy", d), n,
                     at_least=False)
            for d, n in (("float32", 3), ("bfloat16", 5)) for f in ("mxfp4", "mxfp8")
        ]  # fmt: skip

    def step(kind: str, a: str, b: str) -> list[float]:
        return [
            r[a] / r[b] if r[a] and r[b] else math.nan
            for r in found.get("steps", [])
            if r["model"] == SMOLLM2.name and r["settings"] == {"objective": kind}
        ]

    def seconds(section: str, key: str, **wanted: Any) -> list[float]:
        return [
            r[key] for r in found.get(section, [])
            if all(r.get(k) == v for k, v in wanted.items())
        ]  # fmt: skip

    both = [("cross_entropy", 1.8), ("kl", 2.3)]
    return [
        check_of("fake quantization, share of copy speed", kernel("fake_quant", "of_limit"), 0.9,
                 at_least=True),
        check_of("continuous forward", kernel("continuous", "of_limit"), 0.85, at_least=True),
        check_of("continuous backward, share of its limit", kernel("backward", "of_limit"), 0.7,
                 at_least=True),
        check_of("packing, share of its limit", kernel("quantize_packed", "of_limit"), 0.8,
                 at_least=True),
        *(
            check_of(f"SmolLM2-135M step, {kind.replace('_', ' ')}, times plain",
                     step(kind, "search_seconds", "plain_seconds"), limit, at_least=False)
            for kind, limit in both
        ),
        *(
            check_of(f"SmolLM2-135M peak memory, {kind.replace('_', ' ')}, times plain",
                     step(kind, "search_mib", "plain_mib"), 1.5, at_least=False)
            for kind, _ in both
        ),
        check_of("400 steps of 8 x 2048, s", seconds("long", "total_seconds"), 120, at_least=False),
        check_of("kl scan of 210 layers, s", seconds("scans", "seconds", search="kl"), 3,
                 at_least=False),
        check_of("fisher, three candidates, s", seconds("scans", "seconds", search="fisher"), 4,
                 at_least=False),
        check_of("8 B, 10 steps, peak GiB",
                 [m / 1024 for m in seconds("large", "search_mib")], 80, at_least=False),
    ]  # fmt: skip


def report(body: dict[str, Any]) -> str:
    lines = [
        "# Speed",
        "",
        "Made by `python scripts/bench.py` from `bench.json`; what is measured, and how, stands at "
        "the top of that script. Models have the shapes of their names and random weights. Each "
        "section was measured by one process: compare numbers within a section.",
        "",
    ]
    for device in sorted(body, reverse=True):  # the GPU first
        sections = body[device]
        lines += [f"## {'GPU' if device == 'cuda' else 'CPU'}", ""]
        found = {name: section["rows"] for name, section in sections.items()}
        lines += ["Targets, each with the worst of the values that it speaks of:", ""]
        lines += table("target | limit | measured | met", targets(device, found))
        for name, (title, make) in TABLES.items():
            if name not in sections:
                continue
            where = {k: v for k, v in sections[name]["machine"].items() if v is not None}
            note = where.pop("note", "")
            told = ", ".join(v if k == "name" else f"{k} {v}" for k, v in where.items())
            lines += [
                f"### {title}",
                "",
                f"{told}. {note}".rstrip(),
                "",
                *make(sections[name]["rows"]),
            ]
    return "\n".join(lines).rstrip() + "\n"


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="default: all")
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
    default = SECTIONS if device == "cuda" or arguments.tiny else ON_CPU
    for name in () if arguments.report else (arguments.only or default):
        started = time.perf_counter()
        rows = globals()[name](device, arguments.tiny)
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


if __name__ == "__main__":
    main()
