"""The goals of the project in speed and memory, each with the worst of the values that it speaks of."""

import math
from typing import Any

from scripts.benchmarks.shapes import SMOLLM2

CAPTURED = (("cross entropy, checkpointing in a graph", 2.0), ("kl, checkpointing in a graph", 2.5))
"""Kinds of steps that all models have, and how often they may take a plain one's time."""


def settings_text(settings: dict[str, Any]) -> str:
    """Of a step of a search, as tables call it."""
    text = settings["objective"].replace("_", " ")
    if settings.get("keep_reference") == "on":
        text += ", reference kept"
    if settings.get("gradient_checkpointing"):
        text += ", checkpointing"
        text += " in a graph" if settings.get("cuda_graph") == "on" else ""
    return text


def check_of(name: str, values: list[float], limit: float, *, at_least: bool) -> list[str]:
    """A row of the table of targets: the worst value against its limit."""
    if not values or any(math.isnan(v) for v in values):
        return [name, f"{'>=' if at_least else '<='} {limit:g}", "not measured", "-"]
    worst = min(values) if at_least else max(values)
    met = worst >= limit if at_least else worst <= limit
    return [
        name,
        f"{'>=' if at_least else '<='} {limit:g}",
        f"{worst:.2f}",
        "met" if met else "missed",
    ]


def targets(device: str, found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """The goals of the project, with the worst of the values that each speaks of."""
    rows = found.get("kernels", [])

    def kernel(start: str, key: str, dtype: str = "") -> list[float]:
        return [
            float(r[key])
            for r in rows
            if r["kernel"].startswith(start) and r["dtype"].startswith(dtype)
        ]

    if device == "cpu":
        return [
            check_of(
                f"{f} {d}, times a copy", kernel(f"fake_quant {f}", "x_copy", d), n, at_least=False
            )
            for d, n in (("float32", 3), ("bfloat16", 5))
            for f in ("mxfp4", "mxfp8")
        ]

    def step(kind: str, a: str, b: str, model: str | None = SMOLLM2.name) -> list[float]:
        return [
            r[a] / r[b] if r[a] and r[b] else math.nan
            for r in found.get("steps", [])
            if model in (None, r["model"]) and settings_text(r["settings"]) == kind
        ]

    def seconds(section: str, key: str, **wanted: Any) -> list[float]:
        return [
            r[key] for r in found.get(section, []) if all(r.get(k) == v for k, v in wanted.items())
        ]

    kinds = [("cross entropy", 1.8), ("kl", 2.3)]
    if step("kl, reference kept", "search_seconds", "plain_seconds"):  # older records have none
        kinds.append(("kl, reference kept", 1.8))
    return [
        check_of(
            "fake quantization, share of copy speed",
            kernel("fake_quant", "of_limit"),
            0.9,
            at_least=True,
        ),
        check_of("continuous forward", kernel("continuous", "of_limit"), 0.85, at_least=True),
        check_of(
            "continuous backward, share of its limit",
            kernel("backward", "of_limit"),
            0.7,
            at_least=True,
        ),
        check_of(
            "packing, share of its limit", kernel("quantize_packed", "of_limit"), 0.8, at_least=True
        ),
        *(
            check_of(
                f"SmolLM2-135M step, {kind}, times plain",
                step(kind, "search_seconds", "plain_seconds"),
                limit,
                at_least=False,
            )
            for kind, limit in kinds
        ),
        *(
            check_of(
                f"SmolLM2-135M peak memory, {kind}, times plain",
                step(kind, "search_mib", "plain_mib"),
                1.5,
                at_least=False,
            )
            for kind, _ in kinds
        ),
        *(
            check_of(
                f"steps of all models, {kind}, times plain", found_steps, limit, at_least=False
            )
            for kind, limit in CAPTURED
            if (found_steps := step(kind, "search_seconds", "plain_seconds", None))
        ),
        check_of("400 steps of 8 x 2048, s", seconds("long", "total_seconds"), 120, at_least=False),
        check_of(
            "kl scan of 210 layers, s", seconds("scans", "seconds", search="kl"), 3, at_least=False
        ),
        check_of(
            "fisher, three candidates, s",
            seconds("scans", "seconds", search="fisher"),
            4,
            at_least=False,
        ),
        check_of(
            "8 B, 10 steps, peak GiB",
            [m / 1024 for m in seconds("large", "search_mib")],
            80,
            at_least=False,
        ),
    ]
