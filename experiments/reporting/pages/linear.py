"""The page of a record of scripts/benchmarks/mor.py: one linear layer, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..markdown import markdown


def linear_page(title: str, record: Mapping[str, Any]) -> str:
    """Times by size and recipe."""
    head = ("in = out", "recipe", "ms", "low, high", "times bf16's speed")
    body, measured = [], [row for row in record["rows"] if not row.get("failed")]
    for row in record["rows"]:
        if row.get("failed"):
            body.append([row["size"], row["recipe"], "not run", "", ""])
            continue
        spread = f"{row['ms_low']:.3f}, {row['ms_high']:.3f}"
        body.append(
            [row["size"], row["recipe"], f"{row['ms']:.3f}", spread, f"{row['speedup']:.3f}"]
        )
    sizes = sorted({row["size"] for row in measured})
    mor = [row for row in measured if row["recipe"].startswith("mor")]
    best = [max((r["speedup"] for r in mor if r["size"] == size), default=0.0) for size in sizes]
    said = ", ".join(
        f"{speed:.2f} at {size}" for size, speed in zip(sizes, best, strict=True) if speed
    )
    thread = "autograd's own" if record.get("engine_thread", True) else "the calling"
    lines = [
        f"# {title}",
        "",
        f"Forward and backward of one linear layer: the faster recipe of mor has this many times bf16's speed: {said}.",
        "",
        *markdown(head, body),
        "",
        f"- {record['device']}, torch {record['torch']}, {record['rows'][0]['tokens']} tokens, bf16; "
        f"backward passes in {thread} thread.",
    ]
    return "\n".join(lines) + "\n"
