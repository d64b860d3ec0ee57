"""Measurements as tables in markdown."""

from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.benchmarks.targets import settings_text, targets


def milli(seconds: float | None) -> str:
    return "out of memory" if seconds is None else f"{seconds * 1e3:.1f}"


def whole(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def ratio(a: float | None, b: float | None) -> str:
    return "-" if a is None or b is None else f"{a / b:.2f}"


def describe(row: dict[str, Any]) -> str:
    if "reason" in row:
        return str(row["reason"])
    return (
        f"{milli(row['search_seconds'])} ms against {milli(row['plain_seconds'])} ms, "
        f"{whole(row['search_mib'])} against {whole(row['plain_mib'])} MiB"
    )


def table(header: str, body: list[list[str]]) -> list[str]:
    names = [name.strip() for name in header.split("|")]
    return [
        "| " + " | ".join(names) + " |",
        "|" + " --- |" * len(names),
        *("| " + " | ".join(row) + " |" for row in body),
        "",
    ]


def steps_table(rows: list[dict[str, Any]]) -> list[str]:
    return table(
        "model | batch | objective | plain ms | search ms | times | plain MiB | search MiB | times "
        "| CUDA graph",
        [
            [
                r["model"],
                f"{r['rows']} x {r['length']}",
                settings_text(r["settings"]),
                milli(r["plain_seconds"]),
                r["reason"] if "reason" in r else milli(r["search_seconds"]),
                ratio(r["search_seconds"], r["plain_seconds"]),
                whole(r["plain_mib"]),
                whole(r["search_mib"]),
                ratio(r["search_mib"], r["plain_mib"]),
                {True: "yes", False: "no", None: "-"}[r["graph"]],
            ]
            for r in rows
        ],
    )


def totals_table(rows: list[dict[str, Any]]) -> list[str]:
    return table(
        "model | steps | batch | objective | seconds in all | ms a step | peak MiB",
        [
            [
                r["model"],
                str(r["steps"]),
                f"{r['rows']} x {r['length']}",
                r.get("objective", "cross_entropy").replace("_", " ")
                + (", reference kept" if r.get("keeps_reference") else ""),
                f"{r['total_seconds']:.1f}",
                milli(r["search_seconds"]),
                whole(r["search_mib"]),
            ]
            for r in rows
        ],
    )


def scans_table(rows: list[dict[str, Any]]) -> list[str]:
    return table(
        "search | candidates | model | layers | batches | first run s | s | peak MiB",
        [
            [
                r["search"],
                r["family"].replace("_", ", "),
                r["model"],
                str(r["layers"]),
                f"{r['batches']} of {r['rows']} x {r['length']}",
                f"{r['first_seconds']:.2f}",
                f"{r['seconds']:.2f}",
                whole(r["search_mib"]),
            ]
            for r in rows
        ],
    )


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
            [
                r["axis"],
                str(r["size"]),
                milli(r["plain_seconds"]),
                milli(r["search_seconds"]),
                whole(r["plain_mib"]),
                whole(r["search_mib"]),
            ]
            for r in rows
        ],
    )
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
                r["size"],
                r["dtype"],
                r["library"],
                r["format"],
                *(
                    [r["reason"], "-", "-"]
                    if r["ms"] is None
                    else [f"{r['ms']:.2f}", f"{r['x_copy']:.1f}", f"{r['x_ours']:.1f}"]
                ),
                r["where"],
            ]
            for r in rows
        ],
    )


TABLES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], list[str]]]] = {
    "steps": ("Search step against plain step", steps_table),
    "long": ("A whole search", totals_table),
    "large": ("Ten steps at 8 B", totals_table),
    "scans": ("Searches by scores", scans_table),
    "growth": ("Growth", growth_table),
    "kernels": ("Kernels", kernels_table),
    "peers": ("Fake quantization by other libraries", peers_table),
}


def report(body: dict[str, Any]) -> str:
    lines = [
        "# Speed",
        "",
        "Made by `python -m scripts.benchmarks` from `bench.json`; what is measured, and how, stands "
        "at the top of `scripts/benchmarks/__main__.py`. Models have the shapes of their names and random weights. Each "
        "section was measured by one process: compare numbers within a section.",
        "",
    ]
    for device in sorted(body, reverse=True):  # the GPU first
        sections = body[device]
        lines += [f"## {'GPU' if device == 'cuda' else 'CPU'}", ""]
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


def targets_text(body: dict[str, Any]) -> str:
    """The goals by device, each with the worst of the values that it speaks of."""
    lines: list[str] = []
    for device in sorted(body, reverse=True):
        rows = {name: section["rows"] for name, section in body[device].items()}
        lines += [f"Targets, {device}:", ""]
        lines += table("target | limit | measured | verdict", targets(device, rows))
    return "\n".join(lines)
