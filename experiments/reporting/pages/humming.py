"""The page of a record of scripts/benchmarks/humming.py: products of MX weights by another library's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..markdown import markdown

SCHEMA = "dmx.humming/1"
ERRORS = ("format", "inputs", "weights", "error", "worst output", "emulated")


def humming_page(title: str, record: Mapping[str, Any]) -> str:
    """Errors, and times by shape."""
    errors, times = record["errors"], record["times"]
    machine, note = record["machine"], record.get("note")
    lines = [
        f"# {title}",
        "",
        _said(errors, times),
        "",
        f"- {machine['name']}, torch {machine['torch']}, humming-kernels {record['humming']}, kernels compiled by "
        f"{record['compiler']} when first met; the whole run {record['seconds']:.0f} s."
        + (f" {note}" if note else ""),
        "- Weights are packed by dmx and given to humming byte for byte. FP8 inputs: one scale a token, e4m3, and e5m2 "
        "beside weights in e5m2; the error is of the product alone, of the inputs that the kernel had.",
        "",
        "## Errors",
        "",
        "Relative to F.linear in float32 of the weights as dmx decodes them: of all outputs, and of the worst output "
        "feature. Emulated: that of F.linear in bf16, as dmx runs them. Wide rows and blocks differ by up to 2**30 in size, "
        "blocks beside FP8 inputs by 2**14.",
        "",
        *markdown(ERRORS, map(_error, errors)),
        "",
        "## Times",
        "",
        "Microseconds of one product, weights from memory, quantizing of inputs included; in brackets how many times "
        "F.linear's speed in bf16.",
        "",
    ]
    for out, inner in dict.fromkeys((row["out"], row["in"]) for row in times):
        own = [row for row in times if (row["out"], row["in"]) == (out, inner)]
        lines += [f"### {out} x {inner}", "", *_times(own), ""]
    failed = _failures([*errors, *times])
    return "\n".join([*lines, *failed]).rstrip() + "\n"


def _said(errors: Sequence[Mapping[str, Any]], times: Sequence[Mapping[str, Any]]) -> str:
    good = [row for row in errors if "failed" not in row]
    normal = [row["error"] for row in good if row["weights"] == "normal"]
    worst = max(good, key=lambda row: row["worst_output"], default=None)
    timed = [row for row in times if "failed" not in row]
    ratios = [row["bf16_us"] / row["us"] for row in timed if row["tokens"] == 1]
    lost = dict.fromkeys(f"{row['out']} x {row['in']}" for row in times if "failed" in row)
    without = f", the missing ones are of {', '.join(lost)}" if lost else ""
    fast = (
        f"; one token: {min(ratios):.2f} to {max(ratios):.2f} times bf16's speed" if ratios else ""
    )
    most = (
        f" and {worst['worst_output']:.1e} in the worst output feature of all ({worst['format']} with {worst['inputs']} "
        f"inputs, {worst['weights']})"
        if worst
        else ""
    )
    return (
        f"{len(good)} of {len(errors)} products whose errors were asked for ran, with a relative error of at most "
        f"{max(normal, default=0.0):.1e} on normal weights{most}; {len(timed)} of {len(times)} were timed{without}{fast}."
    )


def _error(row: Mapping[str, Any]) -> list[str]:
    head = [row["format"], row["inputs"], row["weights"]]
    if "failed" in row:
        return [*head, "not run", "", ""]
    return [*head, *(f"{row[key]:.1e}" for key in ("error", "worst_output", "emulated"))]


def _times(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A column a number of tokens."""
    tokens = list(dict.fromkeys(row["tokens"] for row in rows))
    cells = {(row["format"], row["inputs"], row["tokens"]): row for row in rows}
    plain = {row["tokens"]: row["bf16_us"] for row in rows}
    body = [["bf16", "bf16", *(f"{plain[m]:.1f}" for m in tokens)]]
    for name, inputs in dict.fromkeys((row["format"], row["inputs"]) for row in rows):
        own = [cells.get((name, inputs, m), {"failed": ""}) for m in tokens]
        body.append([name, inputs, *map(_time, own)])
    return markdown(
        ("weights", "inputs", *(f"{m} token{'s' if m > 1 else ''}" for m in tokens)), body
    )


def _time(row: Mapping[str, Any]) -> str:
    return "-" if "failed" in row else f"{row['us']:.1f} ({row['bf16_us'] / row['us']:.2f})"


def _failures(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Each sentence once, with what it was said of."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if "failed" in row:
            said.setdefault(row["failed"], []).append(f"{row['format']} {row['inputs']}")
    return [f"- Not run: {', '.join(dict.fromkeys(who))}: {why}" for why, who in said.items()]
