"""The page of one record of experiments.compare or experiments.evaluate."""

from __future__ import annotations

from collections.abc import Sequence

from ..differences import difference_to, paired_difference, reference_of
from ..groups import INPUTS_NOTE, SEPARATE_NOTE, Group, by_choices, group_rows
from ..markdown import markdown
from ..pooling import search_settings
from ..record import HEURISTICS, Limit, Record
from ..tables import limit_text
from ..texts import nats_text, spread_text

HEAD = (
    "method", "budget", "seeds", "perplexity", "element_bits", "bits_per_element",
    "minus kl, nats/token", "minus kl_per_bit", "search, s",
)  # fmt: skip


def compare_page(title: str, record: Record, picture: str | None) -> str:
    """What the record says, its table and conditions.

    Args:
        picture: file name of the plot, where there is one.
    """
    lines = [f"# {title}", "", _said(record), "", *results_table(record)]
    if picture:
        lines += ["", f"![perplexity over bits]({picture})"]
    return "\n".join([*lines, "", *conditions(record)]) + "\n"


def _said(record: Record) -> str:
    """dMX against the best heuristic and against the paper's, and its perplexities."""
    groups = group_rows(record.rows)
    ours = sorted(
        (g for g in groups if g.method.is_dmx and g.budget and g.statistic("nll").mean is not None),
        key=lambda g: g.budget or Limit(0, ""),
    )
    sentences = []
    for what, search in (
        ("the best heuristic that was run", None),
        ("kl, the paper's heuristic", HEURISTICS[0]),
    ):
        said = []
        for group in ours:
            other = reference_of(group, groups, search)
            if (
                isinstance(other, Group)
                and (difference := paired_difference(group, other)).stderr is not None
            ):
                name = f" ({other.method.search})" if search is None else ""
                said.append(
                    f"{nats_text(difference.mean, difference.stderr)} at {group.budget}{name}"
                )
        if said:
            sentences.append(f"Loss of dMX minus that of {what}, nats/token: {', '.join(said)}.")
    said = [f"{spread_text(g.statistic('perplexity'))} at {g.budget}" for g in ours]
    full = [spread_text(g.statistic("perplexity")) for g in groups if g.method.is_unquantized]
    if said:
        sentences.append(
            f"Perplexity of dMX: {', '.join(said)}{f'; bf16 {full[0]}' if full else ''}."
        )
    return " ".join(sentences) or "No dMX result."


def results_table(record: Record) -> list[str]:
    """Choices that are separate for weights and inputs stand in a table of their own."""
    joint, separate = by_choices(group_rows(record.rows))
    parts = [_table(joint)] if joint else []
    if separate:
        parts.append([SEPARATE_NOTE, "", *_table(separate)])
    if any(group.method.input_format for group in joint):
        parts.append([INPUTS_NOTE])
    return [line for part in parts for line in ("", *part)][1:]


def _table(groups: Sequence[Group]) -> list[str]:
    rows = [
        [
            group.name,
            limit_text(group),
            len(group.rows) if group.method.is_searched else "",
            spread_text(group.statistic("perplexity")),
            _number(group, "element_bits", 3),
            _number(group, "bits_per_element", 3),
            _difference(group, groups, "kl"),
            _difference(group, groups, "kl_per_bit"),
            _number(group, "search_seconds", 1),
        ]
        for group in groups
    ]
    return markdown(HEAD, rows)


def _difference(group: Group, groups: Sequence[Group], against: str) -> str:
    difference = difference_to(group, groups, against)
    return "–" if difference.stderr is None else nats_text(difference.mean, difference.stderr)


def _number(group: Group, metric: str, digits: int) -> str:
    mean = group.statistic(metric).mean
    return "–" if mean is None else f"{mean:.{digits}f}"


def _rules(record: Record) -> str:
    """Of the searched rows, as their labels have them."""
    texts = dict.fromkeys(row.method.scale_rules for row in record.rows if row.method.is_searched)
    return " or ".join(texts) or "floor"


def conditions(record: Record) -> list[str]:
    """Model, texts, settings, device, and what ± means."""
    evaluation, calibration = record.data["evaluation"], record.data.get("calibration")
    parts = [
        f"Model: {record.model.id}, {record.model.dtype}. {record.model.note or ''}",
        f"Evaluation: {evaluation.name}, {evaluation.windows} windows of {evaluation.window} tokens.",
    ]
    if calibration and calibration.batch_shape:
        rows, length = calibration.batch_shape
        drawn = f"{calibration.batches} batches of {rows} x {length}"
        parts.append(f"Calibration: {calibration.name}, {drawn}.")
    if record.requested.get("search"):
        search = search_settings(record)
        parts.append(
            f"Units: {search['units']}; family {search['family']}; scale rule {_rules(record)}; "
            f"dMX: {search['steps']} steps, {search['objective']}, lr {search['descent.lr']:g}, momentum "
            f"{search['descent.momentum']:g}; scans on {search['score_batches'] or 'all'} batches."
        )
    versions = ", ".join(f"{k} {record.versions[k]}" for k in ("torch", "transformers"))
    parts.append(f"Device: {record.device.name}; {versions}; {record.finished[:10]}.")
    parts.append(
        "± after a perplexity is the standard deviation over seeds, after a difference the paired "
        "standard error over windows."
    )
    return [f"- {part.strip()}" for part in parts]
