"""The part of docs/results/mor.md on the safety net: records of scripts/safety_net.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..markdown import markdown
from ..plots.safety import bits_figure
from ..record import Method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "mor.safety_net/1"
Net = Mapping[str, Any]
"""A record."""
Point = Mapping[str, Any]
"""Of its curve: search or format, threshold of the net or null, perplexity, bits, fallback_rate."""


def net_sentence(record: Net) -> str:
    """What the net costs and saves."""
    clean, hurt = record["clean"], record.get("outliers")
    cost = 100 * (clean["with"] / clean["without"] - 1)
    text = (
        f"The safety net changes perplexity on clean text by {cost:+.2f} % ({100 * clean['report']['fallback_rate']:.2f} % of "
        "the tensors fall back)"
    )
    if hurt is None:
        return f"{text}."
    return (
        f"{text}; with outliers in {len(hurt['layers'])} layers it keeps perplexity at {hurt['with']:.2f}, which is "
        f"{hurt['without']:.2f} without it and {hurt['clean']:.2f} without outliers."
    )


def net_lines(record: Net, picture: str) -> list[str]:
    """Clean data, outliers and the curve, a table each.

    Args:
        picture: file name of the curve's.
    """
    clean = record["clean"]
    share = clean["report"]["fallback_rate"]
    lines = [
        f"{record['model']['id']}, {record['assignment']}, {record['tokens']:,} tokens in windows of "
        f"{record['window']}, margin {record['margin']:g}, {record['device']}. Perplexity in full "
        f"precision {clean['full_precision']:.2f}.", "",
        *markdown(("clean data", "measured"), [
            ["tensors that fell back, %", f"{100 * share:.2f}"],
            ["perplexity without, with the net", f"{clean['without']:.3f}, {clean['with']:.3f}"],
        ]),
    ]  # fmt: skip
    if hurt := record.get("outliers"):
        base = hurt["clean"]
        kinds = (("without the net", "without"), ("with the net", "with"))
        rows = [[name, f"{hurt[key]:.2f}", f"{hurt[key] / base:.3f}"] for name, key in kinds]
        lines += [
            "",
            f"Outliers: {hurt['channels']} channels in the MLPs of layers "
            f"{', '.join(map(str, hurt['layers']))}, up_proj times 2^17 and down_proj times 2^-17. "
            f"Full precision does not feel them ({hurt['full_precision']:.2f}, then "
            f"{hurt['full_precision_with_outliers']:.2f}).",
            "",
            *markdown(
                ("with outliers", "perplexity", "over clean"),
                [["clean, no outliers", f"{base:.2f}", ""], *rows],
            ),
            "",
            f"Fell back with outliers: {100 * hurt['report']['fallback_rate']:.2f} % of the tensors, "
            f"{hurt['report']['effective_element_bits']:.2f} effective bits, in: "
            f"{', '.join(hurt['fell_back'])}.",
        ]
    points = record.get("curve")
    if not points:
        return [
            *lines,
            "",
            "The curve of perplexity over effective bits is not in the records yet.",
        ]
    drawn = f"![perplexity over effective bits]({picture})"
    return [*lines, "", *curve_table(points), "", drawn, "", *bargain(points)]


def _name(point: Point) -> str:
    """dMX, kl_per_bit; mxfp4 for one format everywhere."""
    return point["format"] or Method(search=point["search"]).label


def _is_guarded(point: Point) -> bool:
    return point["threshold"] is not None


def curve_table(points: Sequence[Point]) -> list[str]:
    """By effective bits."""
    rows = [
        [
            f"{_name(p)} with net, threshold {p['threshold']:g}" if _is_guarded(p) else _name(p),
            f"{p['perplexity']:.2f}",
            f"{p['element_bits']:.3f}",
            f"{p['weight_element_bits']:.3f}",
            f"{p['input_element_bits']:.3f}",
            f"{100 * p['fallback_rate']:.1f}" if _is_guarded(p) else "–",
        ]
        for p in sorted(points, key=lambda p: p["element_bits"])
    ]
    head = ("", "perplexity", "effective bits", "weights", "inputs", "fell back, %")
    return markdown(head, rows)


def bargain(points: Sequence[Point]) -> list[str]:
    """Whether bits that a net spends are worth those of a search."""
    net = [p for p in points if _is_guarded(p)]
    searched = [p for p in points if p["search"] and not _is_guarded(p)]
    if not net or not searched:
        return []
    best = min(net, key=lambda p: p["perplexity"])
    cheapest = min(searched, key=lambda p: p["element_bits"])
    relation = "above" if best["perplexity"] > cheapest["perplexity"] else "not above"
    return [
        "The net is a guard for what a model was not searched for. As a way to spend bits: the lowest perplexity of "
        f"MXFP4 under a net, {best['perplexity']:.2f} at {best['element_bits']:.1f} effective bits, is {relation} that of "
        f"{_name(cheapest)} at {cheapest['element_bits']:.1f} bits, {cheapest['perplexity']:.2f}."
    ]


def safety_curve(record: Net) -> Figure:
    """Full precision, the record's model under the net on clean text, the net over uniform MXFP4, and
    other assignments at their own bits: a line a method."""
    clean = record["clean"]
    lines: dict[str, list[tuple[float, float]]] = {}
    for p in sorted(record["curve"], key=lambda p: not _is_guarded(p)):
        name = f"{_name(p)} with net" if _is_guarded(p) else _name(p)
        lines.setdefault(name, []).append((p["element_bits"], p["perplexity"]))
    label = f"{_name(record)} with net, clean text"
    star = label, clean["report"]["effective_element_bits"], clean["with"]
    return bits_figure(lines, star, clean["full_precision"])
