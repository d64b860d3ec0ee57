"""docs/results/peers.md: records of scripts/peers, other tools' choices and weights under our evaluator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..markdown import markdown
from ..record import Record, Row, TextFacts

COMMAND = "peers"
HEAD = ("tool", "candidates", "budget", "bits")
OURS = ("ours", "ours_weights")
"""Peers that are this project."""
SHOWN = ("adaptive", "adaptive_polish", "kl_per_bit_learned", "adaptive_polish_learned")
"""Of our methods those that are held against other tools: the default search with and without its polish, and what learns
after a search of ours."""
CHECKS = (
    "tool",
    "candidates",
    "budget",
    "tokens",
    "dtype",
    "windows",
    "its own, nats/token",
    "ours under its rule",
    "largest difference",
)


def peers_page(records: Sequence[Record]) -> str:
    """A section for what is comparable: one model, its texts, units, calibration tokens and machine."""
    sections: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        sections.setdefault(_place(record), []).append(record)
    lines = [
        "# peers",
        "",
        "Other tools' automatic formats on the same model, calibration tokens, candidates, units and budget, all "
        "measured by one evaluator: perplexity of the formats alone, weights to nearest, by each scale rule for weights "
        "and inputs. `weights` rows are a tool's finished weights. How to run it: `python -m scripts.peers -h`, "
        "`make peers` for the tools.",
    ]
    lines += _against_others([sections[place] for place in sorted(sections, key=str)])
    for place in sorted(sections, key=str):
        lines += ["", *_section(sections[place])]
    lines += ["", *_checks(records), "", *_notes(records)]
    return "\n".join(lines).rstrip() + "\n"


def _place(record: Record) -> tuple[Any, ...]:
    evaluation = record.data["evaluation"]
    asked = record.requested
    return (
        record.model.id,
        record.model.dtype,
        asked["units"],
        asked["tokens"],
        evaluation.sha256,
        record.data["calibration"].sha256,
        record.device.name,
    )


def _against_others(sections: Sequence[Sequence[Record]]) -> list[str]:
    """Our default search and finished weights beside the best that another tool gave for the same request."""
    kinds = list(dict.fromkeys(k for of in sections for r in of for k in map(_kind, r.rows)))
    lines = [line for of in sections for line in _beside_best(of, kinds)]
    if not lines:
        return []
    head = ["tokens, units", "candidates", "budget", "ours", "s", "best other tool", "s"]
    return [
        "",
        "## Against the best other tool",
        "",
        "Perplexity of ours minus that of the other tool that is best under the rule, %; formats alone against formats alone, "
        "finished weights against finished weights, whose seconds hold those of choosing their formats. Our searches "
        "were told the rule floor. Where auto-round's notes below say amp off, its seconds are those of float32.",
        "",
        *markdown([*head, *(f"{quantized}, {rules}" for quantized, rules in kinds)], lines),
    ]


def _beside_best(
    records: Sequence[Record], kinds: Sequence[tuple[str, str]]
) -> Iterator[list[Any]]:
    ours = [r for r in records if r.requested["peer"] in OURS and r.requested["method"] in SHOWN]
    for record in sorted(ours, key=lambda r: (_request(r), SHOWN.index(r.requested["method"]))):
        others = [
            r
            for r in records
            if r.requested["peer"] not in OURS and _request(r) == _request(record)
        ]
        if others:
            best = [_best_under(kind, others) for kind in kinds]
            named = {r.actual["label"]: r for r in best if r is not None}
            asked = record.requested
            yield [
                f"{asked['tokens']:,}, {asked['units']}",
                _candidates(record),
                f"{asked['limit']:g}",
                record.actual["label"],
                _whole_seconds(record, records),
                "; ".join(named),
                "; ".join(_whole_seconds(r, records) for r in named.values()),
                *(_change(kind, record, other) for kind, other in zip(kinds, best, strict=True)),
            ]


def _request(record: Record) -> tuple[Any, ...]:
    """What a result of another tool must share to be held against."""
    asked = record.requested
    return (asked["family"], asked["limit"], record.actual["gives"] == "weights", asked["seed"])


def _under(kind: tuple[str, str], record: Record) -> float | None:
    return next((row.perplexity for row in record.rows if _kind(row) == kind), None)


def _best_under(kind: tuple[str, str], records: Sequence[Record]) -> Record | None:
    found = [(value, r) for r in records if (value := _under(kind, r)) is not None]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _change(kind: tuple[str, str], ours: Record, other: Record | None) -> str:
    own, theirs = _under(kind, ours), None if other is None else _under(kind, other)
    return "" if own is None or theirs is None else f"{100 * (own / theirs - 1):+.1f}"


def _whole_seconds(record: Record, records: Sequence[Record]) -> str:
    """Of a result, with those of the fastest search that chose the formats of finished weights; a dash where none did."""
    seconds: float = record.actual["seconds"]
    if record.actual["gives"] != "weights":
        return f"{seconds:.0f}"
    chose = [
        r.actual["seconds"]
        for r in records
        if r.actual["gives"] == "formats" and r.actual["formats"] == record.actual["formats"]
    ]
    return f"{seconds + min(chose):.0f}" if chose else "–"


def _section(records: Sequence[Record]) -> list[str]:
    first = records[0]
    evaluation = first.data["evaluation"]
    kinds = list(dict.fromkeys(_kind(row) for record in records for row in record.rows))
    tasks = list(
        dict.fromkeys(t for record in records for row in record.rows for t in row.zero_shot or {})
    )
    head = [*HEAD, *(f"{quantized}, {rules}" for quantized, rules in kinds)]
    head += [f"{t} (%)" for t in tasks] + ["search, s", "peak, GiB"]
    ordered = sorted(records, key=lambda r: (r.requested["family"], r.requested["limit"], _best(r)))
    return [
        f"## {first.model.id}, {first.requested['tokens']} calibration tokens, {first.requested['units']} units",
        "",
        _texts(first, evaluation),
        "",
        *markdown(head, (_line(record, kinds, tasks) for record in ordered)),
    ]


def _texts(record: Record, evaluation: TextFacts) -> str:
    calibration = record.data["calibration"]
    shape = calibration.batch_shape or (1, 0)
    return (
        f"Calibration: {calibration.name}, {calibration.tokens:,} tokens in rows of {shape[-1]}. Perplexity: "
        f"{evaluation.name}, {evaluation.windows} windows of {evaluation.window}. {record.model.dtype} on "
        f"{record.device.name}, {record.device.threads} thread{'s' * (record.device.threads > 1)}; search times were taken "
        "beside other work where the machine is a shared one."
    )


def _candidates(record: Record) -> str:
    return "/".join(f.removeprefix("mxfp").partition("_")[0] for f in record.requested["family"])


def _kind(row: Row) -> tuple[str, str]:
    """What is quantized, and by which rules of inputs: finished weights have one of their own."""
    return str(row.method.quantized), row.method.scale_rules.rpartition("input: ")[2]


def _best(record: Record) -> float:
    found = [row.perplexity for row in record.rows if row.perplexity is not None]
    return min(found, default=float("inf"))


def _line(record: Record, kinds: Sequence[tuple[str, str]], tasks: Sequence[str]) -> list[Any]:
    asked, actual = record.requested, record.actual
    rows = {_kind(row): row for row in record.rows}
    first = record.rows[0]
    label = actual["label"] + (" (weights)" if actual["gives"] == "weights" else "")
    return [
        label,
        _candidates(record),
        f"{asked['limit']:g}",
        f"{first.element_bits:.3f}",
        *(_perplexity(rows.get(kind)) for kind in kinds),
        *(_task(first, task) for task in tasks),
        f"{actual['seconds']:.0f}",
        f"{actual['peak_memory_bytes'] / 2**30:.2f}",
    ]


def _perplexity(row: Row | None) -> str:
    return "" if row is None or row.perplexity is None else f"{row.perplexity:.2f}"


def _task(row: Row, task: str) -> str:
    result = (row.zero_shot or {}).get(task)
    return "" if result is None else f"{100 * result.value:.1f}"


def _checks(records: Sequence[Record]) -> list[str]:
    checked = [record for record in records if record.actual["own"]]
    if not checked:
        return []
    return [
        "## Whether we read them rightly",
        "",
        "Each tool measured its own quantized model, weights and inputs, on the first windows of the evaluation text; "
        "beside it our evaluator with the formats that we read, under the scale rule that is the tool's, in the dtype of the row. "
        "Where the notes below say amp off, auto-round computed in float32 whatever the dtype, so that the two differ by more.",
        "",
        *markdown(CHECKS, map(_check, checked)),
    ]


def _check(record: Record) -> list[Any]:
    own = record.actual["own"]
    differences = [abs(a - b) for a, b in zip(own["theirs"], own["ours"], strict=True)]
    return [
        record.actual["label"],
        "/".join(record.requested["family"]),
        f"{record.requested['limit']:g}",
        f"{record.requested['tokens']:,}",
        record.model.dtype,
        len(own["theirs"]),
        f"{sum(own['theirs']) / len(own['theirs']):.5f}",
        f"{sum(own['ours']) / len(own['ours']):.5f} ({own['rule']})",
        f"{max(differences):.1g}",
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
        text = f"- {record.actual['label']} ({said})" + "".join(f"; {note}" for note in notes) + "."
        seen[text] = None
    return lines + list(seen)
