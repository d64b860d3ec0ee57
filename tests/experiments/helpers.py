"""Typed rows and records as runs leave them, for tests of what is made of them."""

import dataclasses
import math
from typing import Any

import numpy as np

from experiments.reporting.record import (
    Device,
    Limit,
    Method,
    ModelFacts,
    Record,
    Row,
    TaskResult,
    TextFacts,
    TrainingRow,
)
from mor.state import OPERANDS

BITS = "element_bits"
FULL = Method()
SEARCHED: dict[str, Any] = {"quantized": "W+A", "family": "mxfp6_mxfp4", "units": "layer"}


def method(search: str = "differentiable", **fields: Any) -> Method:
    """A search of single layers, weights and inputs."""
    return Method(**{"search": search} | SEARCHED | fields)


DMX, KL = method(), method("kl")


def uniform(name: str, **fields: Any) -> Method:
    return Method(search="uniform", format=name, quantized="W+A", **fields)


def row(of: Method = DMX, nlls: Any = (3.4,), limit: float | None = 5.0, **fields: Any) -> Row:
    """A measured row.

    Args:
        nlls: of each window, nats/token; one number is every window of 50.
        limit: element_bits of the budget; None for a method without one.
    """
    values = np.full(50, nlls) if np.ndim(nlls) == 0 else np.asarray(nlls, dtype=float)
    nll, bits = float(values.mean()), fields.get("element_bits", limit or 16.0)
    known = {f.name: None for f in dataclasses.fields(Row)}
    measured: dict[str, Any] = {
        "method": of,
        "budget": None if limit is None else Limit(limit, BITS),
        "seed": 0,
        "element_bits": bits,
        "bits_per_element": bits + 0.25 if bits < 16 else bits,
        "whole_model_bits_per_element": 0.79 * bits + 3.36,
        "perplexity": math.exp(nll),
        "nll": nll,
        "tokens": len(values) * 2047,
        "windows": len(values),
        "window_nll": tuple(values.tolist()),
        "eval_seconds": 12.4,
        "reasons": {"search_seconds": "nothing was searched"},
    }
    return Row(**known | measured | fields)


def answers(**items: list[int]) -> dict[str, TaskResult]:
    """task -> results with these items right, 1, or wrong, 0."""
    return {
        task: TaskResult(
            "acc",
            sum(right) / len(right),
            0.1,
            len(right),
            tuple(map(float, right)),
            "x",
            task,
            "1",
        )
        for task, right in items.items()
    }


def text(name: str = "wikitext2/test", windows: int = 50) -> TextFacts:
    return TextFacts(
        name=name,
        source=f"of {name}",
        sha256=name,
        tokens=windows * 2048,
        windows=windows,
        window=2048,
    )


CALIBRATION = TextFacts(
    name="fineweb+c4", source="f", sha256="c", tokens=524288, batches=128, batch_shape=(4, 1024)
)


def record(*results: Row | TrainingRow, **fields: Any) -> Record:
    """The record of a run that measured these."""
    settings = {"steps": 200, "family": "mxfp6_mxfp4", "units": "layer", "scale_rule": "floor"}
    facts: dict[str, Any] = {
        "command": "compare",
        "started": "2026-02-03T10:00:00+00:00",
        "finished": "2026-02-03T10:04:31+00:00",
        "wall_seconds": 271.3,
        "versions": {"torch": "2.13.0", "transformers": "5.1.0"},
        "device": Device("NVIDIA H100 80GB HBM3", "cuda", 16),
        "peak_memory_bytes": 9_437_184_000,
        "seed": 0,
        "requested": {"search": settings},
        "actual": {"search": settings},
        "model": ModelFacts("someone/model", None, "bfloat16", "ab" * 32, None),
        "data": {"calibration": CALIBRATION, "evaluation": text()},
        "verdict": None,
        "warnings": (),
    }
    return Record(**facts | {"results": results} | fields)


def training_row(recipe: str, nll: float | None = 5.6, seed: int = 0, **fields: Any) -> TrainingRow:
    """A run of train_mor: the loss falls to `nll` over three validations."""
    known = {f.name: None for f in dataclasses.fields(TrainingRow)}
    losses = [9.0, 7.0, nll]
    decided = {"tensor_share": {"bf16": 0.0}, "element_share": {"bf16": 0.0}}
    measured: dict[str, Any] = {
        "recipe": recipe,
        "seed": seed,
        "folder": f"{recipe}-{seed}",
        "parameters": 48_800_000,
        "steps": 300,
        "train_tokens": 9_000_000,
        "train_seconds": 60.0,
        "tokens": 1000,
        "windows": 4,
        "nll": nll,
        "perplexity": None if nll is None else math.exp(nll),
        "loss_curve": {"validation": {"step": [100, 200, 299], "loss": losses}},
        "fp8_tensor_share": None if recipe == "bf16" else 1.0,
        "operands": None if recipe == "bf16" else dict.fromkeys(OPERANDS, decided),
        "reasons": {},
    }
    return TrainingRow(**known | measured | fields)
