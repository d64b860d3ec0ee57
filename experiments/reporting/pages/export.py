"""docs/results/export.md: records of experiments.export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dmx.errors import RunError

from ..markdown import markdown
from ..record import Record

HEAD = (
    "model", "target", "layers a format", "inputs", "element_bits", "quantized bytes",
    "fake-quantized", "files", "logits", "largest difference", "KL, nats/token",
)  # fmt: skip


def export_page(records: Sequence[Record]) -> str:
    """A row an export: perplexity of the model in memory and of the files, as the loader measured it."""
    records = sorted(
        records, key=lambda r: (-r.data["evaluation"].tokens, r.model.id, r.started or "")
    )
    lines: list[str] = []
    versions: dict[str, str] = {}
    rules: dict[str, str] = {}
    for record in records:
        facts, text = record.export, record.data["evaluation"]
        note = (record.model.note or "no note").strip().rstrip(".")
        lines.append(
            f"{record.model.id}: {note}. Text: {text.name}, {text.windows} windows of {text.window} tokens. "
            f"Device: {record.device.name}."
        )
        versions |= _check(record)["versions"]
        if facts and facts.input_rule:
            rules[facts.target] = facts.input_rule
    return "\n".join([
        "# export", "", _said(records), "",
        "Exported, loaded by the target's own loader in a fresh process, and measured there; formats "
        "drawn by chance, so perplexities say nothing of quality. Weights only, or with inputs that "
        "the loader quantizes by its own rule.", "",
        *markdown(HEAD, map(_cells, records)), "",
        *(f"- {line}" for line in dict.fromkeys(lines)),
        f"- Versions: {', '.join(f'{k} {v}' for k, v in sorted(versions.items()))}; "
        f"{max(r.finished for r in records)[:10]}.",
        *(f"- Inputs, {target}: {rule}." for target, rule in sorted(rules.items())),
    ]) + "\n"  # fmt: skip


def _check(record: Record) -> dict[str, Any]:
    """What the verification measured.

    Raises:
        RunError: the export was not verified.
    """
    if record.export is None or record.export.verification is None:
        raise RunError(f"{record.command} of {record.started} has no verification: export again.")
    return dict(record.export.verification)


def _said(records: Sequence[Record]) -> str:
    equal = [_check(r)["equal"] for r in records]
    largest = max((_check(r)["kl"] for r in records if not _check(r)["equal"]), default=None)
    text = f"Of {len(records)} exports, {sum(equal)} give the logits of the fake-quantized model bit for bit."
    if largest is None:
        return text
    return f"{text} The others differ by a KL of at most {largest:.3g} nats/token."


def _cells(record: Record) -> list[Any]:
    facts, (memory, files) = record.export, record.rows
    assert facts is not None
    check = _check(record)
    profile = f", {facts.profile}" if facts.profile else ""
    return [
        record.model.id,
        facts.target + profile,
        ", ".join(f"{count} {name}" for name, count in sorted(facts.formats.items())),
        "by the loader" if facts.inputs else "no",
        f"{memory.element_bits:.4f}",
        f"{(facts.bytes or {})['quantized_bytes']:,}",
        memory.perplexity,
        files.perplexity,
        "equal" if check["equal"] else "differ",
        f"{check['max_difference']:.4g}",
        f"{check['kl']:.3g}",
    ]
