"""The page of records of scripts/benchmarks/large.py: seconds and memory of each stage on models of 8 B and more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..markdown import markdown

SCHEMA = "dmx.large/1"
STAGE_TEXT = {
    "make": "the model is made",
    "scan": "`kl_per_bit`, 8 x 1024 tokens",
    "fisher": "`fisher`, 8 x 1024 tokens",
    "search": "search, {steps} steps of 2 x 1024 tokens, KL",
    "gptq": "GPTQ, 8 batches of 2 x 1024 tokens",
    "learn": "learned weights, {steps} steps of each block",
    "export": "export for Quark",
}
MEMORY_TEXT = {"all": "whole on the card", "block": "held block by block"}


def large_page(bodies: Mapping[str, Mapping[str, Any]]) -> str:
    """A table for each run."""
    runs = [run for _, body in sorted(bodies.items()) for run in body["runs"]]
    lines = ["# Large models, stage by stage", "", _said(runs)]
    for run in runs:
        lines += ["", f"## {run['shape']}, {MEMORY_TEXT[run['memory']]}", "", _conditions(run), ""]
        lines += _stages(run)
    return "\n".join(lines) + "\n"


def _seconds(run: Mapping[str, Any]) -> float:
    return sum(stage["seconds"] for stage in run["stages"])


def _said(runs: list[Mapping[str, Any]]) -> str:
    """The run of most stages, and the largest shape that is held block by block."""
    longest = max(runs, key=lambda run: len(run["stages"]))
    text = (
        f"{len(longest['stages'])} stages on {longest['shape']} with random weights take {_seconds(longest) / 60:.1f} minutes of one "
        f"{longest['machine']['name']}"
    )
    if not (blocks := [run for run in runs if run["memory"] == "block"]):
        return text + "."
    peaks = [
        f"{peak:.1f} GiB of it at {run['shape']}"
        for run in blocks
        if (peak := max((s.get("peak_gib") or 0.0 for s in run["stages"]), default=0.0))
    ]
    return f"{text}; held block by block, a search takes {' and '.join(peaks)}."


def _conditions(run: Mapping[str, Any]) -> str:
    machine = run["machine"]
    room = "" if run["card"] is None else f", of which the process may use {run['card']:g} GiB"
    return (
        f"One {machine['name']}{room}; torch {machine['torch']}, {machine['when']}. Weights are random, bf16; one run of "
        "`python -m scripts.benchmarks.large`."
    )


def _stages(run: Mapping[str, Any]) -> list[str]:
    body = []
    for stage in run["stages"]:
        peak, copied = stage.get("peak_gib"), stage.get("copied_gb")
        body.append(
            [
                STAGE_TEXT[stage["stage"]].format(steps=run["steps"]),
                stage.get("failed") or f"{stage['seconds']:.1f}",
                "–" if peak is None else f"{peak:.1f}",
                "–" if copied is None else f"{copied:,.0f}",
            ]
        )
    body.append(["together", f"{_seconds(run):.1f}", "", ""])
    return markdown(("stage", "s", "peak GiB of the card", "GB copied"), body)
