"""docs/results/peers.md: records of scripts/peers, other tools' choices and weights under our evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from ..markdown import markdown
from ..record import Record
from .peers_against import against_others, verdict
from .peers_curves import by_tokens
from .peers_results import (
    Kind,
    Result,
    by_place,
    called,
    candidates,
    label_of,
    mean_text,
    place_text,
    results_of,
    rows_of,
)
from .peers_tools import each_tool, unquantized

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMMAND = "peers"
HEAD = ("tool", "budget", "bits", "seeds")
CHECKS = (
    "tool",
    "candidates",
    "dtype",
    "cells",
    "windows",
    "its own, nats/token",
    "ours under its rule",
    "largest difference",
)
WORDS = (
    "- W+A: weights and inputs are quantized; W: weights alone.",
    "- `floor`, `even`: the [scale rule](../concepts.md#formats), by which a block gets its scale.",
    "- `beside N`: N other runs were under way on the same machine while these seconds were taken, which makes them longer.",
    "- `told X`: the method was told to choose for the scale rule X, or, told W, for inputs that stay as they are; without it, for "
    "W+A and, of ours, for `floor`. `(told X)` after a difference: nothing of ours was told what the column is of, and what "
    "was told X stands there.",
)
"""Of the tables, before the first of them."""


def peers_page(
    records: Sequence[Record], others: Sequence[Record] = ()
) -> tuple[str, dict[str, Figure]]:
    """The page and its pictures; a section for what is comparable: one model, its texts, units, machine and number of
    calibration tokens.

    Args:
        others: of other commands, for the model that is not quantized and for uniform formats.
    """
    results = results_of(records)
    said, curves, figures = by_tokens(results)
    about = (
        "Other tools' automatic formats on the same model, calibration tokens, candidates, units and budget, all "
        "measured by one evaluator: perplexity of the formats alone, weights to nearest, by each scale rule for weights "
        "and inputs. `weights` rows are a tool's finished weights."
    )
    lines = [
        "# peers",
        "",
        *verdict(results),
        " ".join(text for text in (said, about) if text),
        "",
        "How to run it: `python -m scripts.peers -h`, `make peers` for the tools. Means over seeds ± their standard error, "
        "seconds as medians; another seed draws other calibration tokens, and one seed has no error.",
        *unquantized(results, others),
        "",
        *WORDS,
        *each_tool(results),
    ]
    lines += [*against_others(results), *curves]
    for place in by_place(results):
        for tokens in sorted({r.tokens for r in place}):
            lines += ["", *_section([r for r in place if r.tokens == tokens])]
    lines += [*_checks(records), "", *_notes(records)]
    return "\n".join(lines).rstrip() + "\n", figures


def _section(results: Sequence[Result]) -> list[str]:
    """Of one place and number of tokens: tables by candidates of perplexity, of weights alone, and of tasks."""
    first = results[0].first
    lines = [
        f"## {place_text(first)}, {first.requested['tokens']:,} calibration tokens in rows of {rows_of(first):,}",
        "",
        _texts(first),
    ]
    for family in sorted({r.family for r in results}):
        of = [r for r in results if r.family == family]
        of.sort(key=lambda r: (r.limit, _best(r), r.label))
        lines += ["", f"Candidates {candidates(family)}:", "", *_perplexities(of)]
        lines += _weights_alone(of)
        lines += _tasks(of)
    return lines


def _texts(record: Record) -> str:
    calibration, evaluation = record.data["calibration"], record.data["evaluation"]
    return (
        f"Calibration: {calibration.name}. Perplexity: "
        f"{evaluation.name}, {evaluation.windows} windows of {evaluation.window}. "
        f"{record.device.threads} thread{'s' * (record.device.threads > 1)} of the CPU; search times were taken "
        "beside other work where the machine is a shared one."
    )


def _name(result: Result) -> str:
    return result.label + (" (weights)" if result.gives == "weights" else "")


def _kinds(results: Sequence[Result], quantized: str | None = None) -> list[Kind]:
    kinds = dict.fromkeys(k for r in results for k in r.kinds)
    return [k for k in kinds if quantized in (None, k[0])]


def _best(result: Result) -> float:
    """Of weights and inputs where it was measured in them, as the first table shows it."""
    kinds = _kinds([result], "W+A") or result.kinds
    found = [mean(v) for k in kinds if (v := list(result.perplexities(k).values()))]
    return min(found, default=float("inf"))


def _perplexities(results: Sequence[Result]) -> list[str]:
    """Of weights and inputs, with what the search took; of weights alone where there is nothing else."""
    kinds = _kinds(results, "W+A") or _kinds(results)
    return markdown(
        [*HEAD, *map(", ".join, kinds), "search, s", "peak, GiB"],
        (
            [
                _name(r),
                f"{r.limit:g}",
                f"{r.bits:.3f}",
                len(r.seeds),
                *(_cell(r, kind) for kind in kinds),
                r.time.text,
                f"{r.gib:.2f}",
            ]
            for r in results
        ),
    )


def _cell(result: Result, kind: Kind) -> str:
    return mean_text(list(result.perplexities(kind).values()))


def _weights_alone(results: Sequence[Result]) -> list[str]:
    kinds = _kinds(results, "W")
    if not kinds or len(kinds) == len(_kinds(results)):
        return []
    return [
        "",
        "Weights alone quantized:",
        "",
        *markdown(
            ["tool", "budget", *(rule for _, rule in kinds)],
            (
                [_name(r), f"{r.limit:g}", *(_cell(r, kind) for kind in kinds)]
                for r in results
                if any(r.perplexities(kind) for kind in kinds)
            ),
        ),
    ]


def _tasks(results: Sequence[Result]) -> list[str]:
    """Accuracy in zero-shot tasks, %; a line for each way of quantizing."""
    tasks = list(dict.fromkeys(t for r in results for t in r.tasks()))
    rows = [
        [_name(r), f"{r.limit:g}", ", ".join(kind), *shown]
        for r in results
        for kind in r.kinds
        if any(shown := _accuracies(r, kind, tasks))
    ]
    if not rows:
        return []
    head = ["tool", "budget", "quantized", *tasks, *(["mean"] if len(tasks) > 1 else [])]
    return ["", "Zero-shot tasks, %:", "", *markdown(head, rows)]


def _accuracies(result: Result, kind: Kind, tasks: Sequence[str]) -> list[str]:
    """Of each task and, where every seed has all of several, their mean."""
    by_task = [[100 * v for v in result.accuracies(kind, task)] for task in tasks]
    cells = [mean_text(values, 1) for values in by_task]
    if len(tasks) < 2:
        return cells
    whole = len({len(values) for values in by_task}) == 1
    means = [mean(values) for values in zip(*by_task, strict=True)] if whole else []
    return [*cells, mean_text(means, 1)]


def _checks(records: Sequence[Record]) -> list[str]:
    checked: dict[tuple[str, str, str, str], list[Record]] = {}
    for record in records:
        if own := record.actual["own"]:
            family = "/".join(record.requested["family"])
            key = (label_of(record), family, record.model.dtype, own["rule"])
            checked.setdefault(key, []).append(record)
    if not checked:
        return []
    return [
        "",
        "## Whether we read them rightly",
        "",
        "Each tool measured its own quantized model, weights and inputs, on the first windows of the evaluation text; "
        "beside it our evaluator with the formats that we read, under the scale rule that is the tool's, in the dtype of the row: "
        "means over the cells. Where the tool stands with amp off, auto-round computed in float32 whatever the dtype, so that the "
        "two differ by more.",
        "",
        *markdown(CHECKS, (_check(*key, of) for key, of in checked.items())),
    ]


def _check(label: str, family: str, dtype: str, rule: str, records: Sequence[Record]) -> list[Any]:
    theirs = [nll for record in records for nll in record.actual["own"]["theirs"]]
    ours = [nll for record in records for nll in record.actual["own"]["ours"]]
    return [
        label,
        family,
        dtype,
        len(records),
        len(theirs),
        f"{mean(theirs):.5f}",
        f"{mean(ours):.5f} ({rule})",
        f"{max(abs(a - b) for a, b in zip(theirs, ours, strict=True)):.1g}",
    ]


def _notes(records: Sequence[Record]) -> list[str]:
    """How each ran, what it cannot do, and its version."""
    lines = ["## How each ran", ""]
    seen: dict[str, None] = {}
    for record in records:
        peers = {
            k.removeprefix("peer "): v for k, v in record.versions.items() if k.startswith("peer ")
        }
        said = ", ".join(f"{k} {v}" for k, v in peers.items())
        notes = (*record.actual["notes"], *(f"cannot: {text}" for text in record.actual["cannot"]))
        text = f"- {called(record)} ({said})" + "".join(f"; {note}" for note in notes) + "."
        seen[text] = None
    return lines + list(seen)
