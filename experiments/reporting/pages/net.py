"""The part of docs/results/mor.md on the safety net: records of scripts/safety_net.py."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.reporting import plots as _plots
from experiments.reporting.markdown import markdown, met
from experiments.reporting.reading import Record
from experiments.reporting.report_training import _COLOURS

LARGEST_RATE, LARGEST_RATIO = 0.02, 1.0005
"""On clean data: share of tensors that fall back, and perplexity with the net over without."""
LARGEST_SAVED, LEAST_HURT = 1.01, 1.1
"""With outliers, perplexity over clean: with the net, and without it, or the test shows nothing."""


def safety_lines(record: Record) -> list[str]:
    """Clean data and outliers, a table each."""
    clean = record["clean"]
    share, loss = clean["report"]["fallback_rate"], clean["with"] / clean["without"]
    lines = [
        f"{record['model']['id']}, {record['assignment']}, {record['tokens']:,} tokens in windows of "
        f"{record['window']}, margin {record['margin']:g}, {record['device']}. Perplexity in full "
        f"precision {clean['full_precision']:.2f}.", "",
        *markdown(("clean data", "measured", "limit", ""), [
            ["tensors that fell back, %", f"{100 * share:.2f}", f"< {100 * LARGEST_RATE:g}", met(share < LARGEST_RATE)],
            ["perplexity without, with the net", f"{clean['without']:.3f}, {clean['with']:.3f}",
             f"with ≤ {LARGEST_RATIO:g} x without", met(loss <= LARGEST_RATIO)],
        ]),
    ]  # fmt: skip
    if found := record.get("outliers"):
        base = found["clean"]
        lines += [
            "", f"Outliers: {found['channels']} channels in the MLPs of layers "
            f"{', '.join(map(str, found['layers']))}, up_proj times 2^17 and down_proj times 2^-17. "
            f"Full precision does not feel them ({found['full_precision']:.2f}, then "
            f"{found['full_precision_with_outliers']:.2f}).", "",
            *markdown(("with outliers", "perplexity", "over clean", "limit", ""), [
                ["clean, no outliers", f"{base:.2f}", "", "", ""],
                ["without the net", f"{found['without']:.2f}", f"{found['without'] / base:.3f}",
                 f"≥ {LEAST_HURT:g}, or the test shows nothing", met(found["without"] >= LEAST_HURT * base)],
                ["with the net", f"{found['with']:.2f}", f"{found['with'] / base:.3f}", f"≤ {LARGEST_SAVED:g}",
                 met(found["with"] <= LARGEST_SAVED * base)],
            ]), "",
            f"Fell back with outliers: {100 * found['report']['fallback_rate']:.2f} % of the tensors, "
            f"{found['report']['effective_element_bits']:.2f} effective bits, in: "
            f"{', '.join(found['fell_back'])}.",
        ]  # fmt: skip
    if not record.get("curve"):
        lines += ["", "The curve of perplexity over effective bits is not in the records yet."]
    return lines


def _method(label: str) -> str:
    """Of an assignment that is named by its folder in a comparison: search, without budget and seed."""
    return re.sub(r"-[\d.]+-seed\d+$", "", label)


def curve_table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            _method(p["label"]), f"{p['perplexity']:.2f}", f"{p['element_bits']:.3f}",
            f"{p['weight_element_bits']:.3f}", f"{p['input_element_bits']:.3f}",
            f"{100 * p['fallback_rate']:.1f}" if "fallback_rate" in p else "–",
        ]
        for p in sorted(points, key=lambda p: p["element_bits"])
    ]  # fmt: skip
    head = ("", "perplexity", "effective bits", "weights", "inputs", "fell back, %")
    return markdown(head, rows)


def bargain(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether bits that a net spends are worth those of a search."""
    net = [p for p in points if "fallback_rate" in p]
    searched = [p for p in points if "fallback_rate" not in p and _method(p["label"]) != p["label"]]
    if not net or not searched:
        return []
    best = min(net, key=lambda p: p["perplexity"])
    cheapest = min(searched, key=lambda p: p["element_bits"])
    relation = "above" if best["perplexity"] > cheapest["perplexity"] else "not above"
    return [
        "The net is a guard for what a model was not searched for. As a way to spend bits: the lowest perplexity of "
        f"MXFP4 under a net, {best['perplexity']:.2f} at {best['element_bits']:.1f} effective bits, is {relation} that of "
        f"{_method(cheapest['label'])} at {cheapest['element_bits']:.1f} bits, {cheapest['perplexity']:.2f}."
    ]


def safety_curve(record: Record) -> Figure:
    """Full precision, the record's model under the net on clean text, the net over uniform MXFP4, and
    other assignments at their own bits: a line a method."""
    points, clean = record["curve"], record["clean"]
    guarded = _method(record["assignment"]).replace("differentiable", "dMX")
    with matplotlib.rc_context(_plots._STYLE):
        figure, axes = _plots._new(_plots._WIDTH, 3.6)
        lines: dict[str, list[tuple[float, float]]] = {}
        for p in sorted(points, key=lambda p: "fallback_rate" not in p):
            name = "mxfp4 with net" if "fallback_rate" in p else _method(p["label"])
            lines.setdefault(name, []).append((p["element_bits"], p["perplexity"]))
        for (name, found), colour, marker in zip(
            lines.items(), _COLOURS[1:] * len(lines), "osD^v<>P*" * 9, strict=False
        ):
            bits, values = zip(*sorted(found), strict=True)
            axes.plot(bits, values, color=colour, marker=marker, label=name)
        axes.plot(
            clean["report"]["effective_element_bits"], clean["with"], color=_COLOURS[0], marker="*",
            markersize=9, linestyle="none", label=f"{guarded} with net, clean text",
        )  # fmt: skip
        full = clean["full_precision"]
        axes.axhline(full, color=_plots._QUIET, linestyle=(0, (1, 2)), label=f"bf16 {full:.2f}")
        low, high = (f([full, *(p["perplexity"] for p in points)]) for f in (min, max))
        if high / low > 3:
            _plots._log_axis(axes, low, high)
        axes.set_xlabel("effective element_bits, weights and inputs")
        axes.set_ylabel("perplexity")
        _plots._legend(axes, columns=3)
    return figure
