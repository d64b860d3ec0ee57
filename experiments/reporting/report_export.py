"""The section of a report on exported files: bytes, and what the verification found."""

from __future__ import annotations

from typing import Any

from .html import Html, pairs_table
from .record import Record


def export_section(record: Record) -> Html | None:
    """The table; None for a record of another command."""
    facts = record.export
    if facts is None:
        return None
    size, check = facts.bytes or {}, facts.verification or {}
    pairs = {
        "target": facts.target,
        "profile": facts.profile,
        "inputs": "quantized by the loader" if facts.inputs else "not quantized",
        "rule of the inputs": facts.input_rule,
        "bytes of quantized tensors": size.get("quantized_bytes"),
        "weights x bits_per_element / 8": size.get("bits_per_element_bytes"),
        "bytes of all tensors": size.get("total"),
        "loaded with": check.get("loader"),
        "versions": ", ".join(f"{k} {v}" for k, v in (check.get("versions") or {}).items()),
        "tokens compared": check.get("tokens"),
        "logits equal bit for bit": check.get("equal"),
        "largest difference of a logit": check.get("max_difference"),
        "KL(fake-quantized, files), nats/token": check.get("kl"),
    }
    return pairs_table((k, _text(v)) for k, v in pairs.items() if v not in (None, ""))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
