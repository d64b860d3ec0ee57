"""Steps of a search against plain steps of the same model and batch, whole searches, and scans.

The plain step: bf16, eager, weights frozen, forward and backward to the input embeddings, with
cross entropy in float32, on an equal batch. Both are timed on the wall clock, the device waited
for before and after; medians of one process, so ratios are within one run.
"""

import dataclasses
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import dmx
from dmx.assignment.budget import Budget
from dmx.errors import DmxError
from dmx.models.plain import plain_step
from dmx.searching import SearchConfig, search_space
from dmx.searching.config import DescentConfig
from dmx.searching.differentiable import DifferentiableSearch
from scripts.benchmarks.machine import clear, median_seconds, peak_mib, say, wait
from scripts.benchmarks.report import describe
from scripts.benchmarks.shapes import (
    GROWTH,
    LLAMA_1B,
    LLAMA_8B,
    SMOLLM2,
    TINY,
    Shape,
    make_model,
    make_tokens,
)

REPEATS = 9
NOT_MEASURED: dict[str, Any] = {"search_seconds": None, "search_mib": None, "graph": None}


def time_plain(
    model: nn.Module, tokens: Tensor, device: str, repeats: int
) -> tuple[float, float | None]:
    """Median seconds of a plain step and its peak memory in MiB."""
    clear(device)
    there = tokens.to(device)
    seconds = median_seconds(lambda: plain_step(model, there), device, repeats, unseen=2)
    return seconds, peak_mib(device)


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
    own = {k: v for k, v in settings.items() if k in ("steps", "objective")}
    descent = DescentConfig(**{k: v for k, v in settings.items() if k not in own})
    config = SearchConfig(units="layer", **own, descent=descent)
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
        "keeps_reference": search.keeps_references,
    }


def compare_steps(
    model: nn.Module,
    shape: Shape,
    rows: int,
    length: int,
    device: str,
    repeats: int,
    variants: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
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
            row |= NOT_MEASURED
        except (RuntimeError, DmxError) as error:
            if variant.get("cuda_graph") != "on":
                raise
            row |= NOT_MEASURED | {"reason": str(error).strip().splitlines()[0]}
        yield row
        say(f"{shape.name} {rows} x {length} {variant}: {describe(row)}")


KL: dict[str, Any] = {"objective": "kl", "keep_reference": "off"}
KL_KEPT = KL | {"keep_reference": "on"}
OBJECTIVES: list[dict[str, Any]] = [{"objective": "cross_entropy"}, KL, KL_KEPT]
"""A batch comes again in every step here: without its reference kept a step is that of a batch seen once."""
CHECKPOINTED: dict[str, Any] = {
    "objective": "cross_entropy",
    "gradient_checkpointing": True,
    "cuda_graph": "off",
}


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
                variants.append(CHECKPOINTED)
                captured = {"gradient_checkpointing": True, "cuda_graph": "on"}
                variants += [variant | captured for variant in OBJECTIVES]
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
    for variant in OBJECTIVES:
        row = run_search(model, batches, device, steps=10, **variant)
        base = {"model": shape.name, "rows": 1, "length": length, "steps": 10}
        found.append(base | {"objective": variant["objective"]} | row)
        say(f"10 steps at 8 B, {variant}: {row['total_seconds']:.1f} s")
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
        found.append(
            {
                "search": name,
                "family": family,
                "model": shape.name,
                "layers": len(result.units),
                "batches": n,
                "rows": rows,
                "length": length,
                "first_seconds": seconds[0],
                "seconds": statistics.median(seconds[1:] or seconds),
                "search_mib": peak_mib(device),
            }
        )
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
                    base,
                    hidden=int(base.hidden * factor),
                    heads=int(base.heads * factor),
                    intermediate=int(base.intermediate * factor),
                    kv_heads=max(1, int(base.kv_heads * factor)),
                )
            else:
                n = int(rows * factor)
            model = make_model(shape, device)
            row = next(compare_steps(model, shape, n, length, device, 5, OBJECTIVES[:1]))
            size = {"layers": shape.layers, "width": shape.hidden, "tokens": n * length}[axis]
            found.append(row | {"axis": axis, "size": size})
            del model
    return found
