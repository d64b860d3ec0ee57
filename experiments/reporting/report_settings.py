"""Sections of a report on what was asked, what ran, and where."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from .html import Html, el, pairs_table, scroll_table
from .record import Record
from .stored import flatten
from .texts import bytes_text, seconds_text, work_text


def _value_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


_OPEN = (None, "auto")
"""Values that leave a setting to the run: whatever it took is as asked."""


def asked_and_ran(record: Record) -> Html | None:
    """Every setting, and beside it what the run saw of it; those that it did not check have a –."""
    requested, actual = flatten(record.requested), flatten(record.actual)
    requested.pop("", None), actual.pop("", None)
    keys = dict.fromkeys((*requested, *actual))
    if not keys:
        return None
    checked = [k for k in requested if k in actual]
    differing = [k for k in checked if requested[k] not in _OPEN and requested[k] != actual[k]]
    rows = []
    for key in sorted(keys, key=lambda k: (k not in differing, k not in actual)):
        texts = [_value_text(side[key]) if key in side else "–" for side in (requested, actual)]
        cls = "differs" if key in differing else None
        rows.append(
            el("tr", el("th", key, scope="row"), (el("td", text) for text in texts), cls=cls)
        )
    head = el("tr", (el("th", text, scope="col") for text in ("setting", "asked", "ran")))
    says = (
        f"{len(differing)} of {len(checked)} checked settings differ, first and in red."
        if differing
        else f"All {len(checked)} checked settings ran as asked."
    )
    table = scroll_table(head, rows, cls="pairs")
    body = table if differing else el("details", el("summary", "Show them"), table)
    return el("div", el("p", says, cls="bad" if differing else "good"), body)


def environment(record: Record) -> Html:
    """Command, times, memory, seeds, device, model, texts and versions."""
    pairs: dict[str, Any] = {
        "command": record.command,
        "started": record.started,
        "finished": record.finished,
    }
    if record.wall_seconds is not None:
        pairs["wall time"] = seconds_text(record.wall_seconds)
    if record.pace is not None:
        pairs["work"] = work_text(record.pace)
    if record.peak_memory_bytes is not None:
        pairs["peak memory"] = bytes_text(record.peak_memory_bytes)
    seeds = sorted({row.seed for row in record.results if row.seed is not None})
    pairs["seed"] = seeds if len(seeds) > 1 else record.seed
    parts = asdict(record)
    for key in ("device", "model", "data", "versions"):
        pairs |= flatten(parts[key], key)
    return pairs_table(
        (key, "–" if value is None else _value_text(value)) for key, value in pairs.items()
    )
