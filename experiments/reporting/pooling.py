"""Rows of many records of experiments.compare, by table and method.

A row's method gets the settings in which its record differs from the presets (search=exact, with
learned rotations search=learned, with a polish search=polished, search=joint of its own); rows that
differ in seed alone, or repeat one, are one group.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dmx.errors import DmxError
from dmx.formats import get_family
from dmx.searching.config import USED_BY

from .groups import Group, group_rows
from .record import USUAL_FAMILY, Limit, Method, Record, Row
from .stages import usual_drawn, with_stage
from .stored import flatten

USUAL = Method(quantized="W+A", family=USUAL_FAMILY, units="layer")
"""Of the fields that a table's title names, what goes without saying."""
FINEST = ("family", "scale_rules", "transform", "weights", "stage")
"""Of these fields, tables that differ in nothing else stand beside each other."""
_SHARED = ("weighting", "exclude", "fixed", "include_lm_head", "target", "score_batches")
"""Settings that heuristics have too; the others, but for the polish, belong to dMX alone."""
DESCENT = "descent."
"""What names of a descent's settings are shown without: nothing else has such names."""
_NEVER = (
    "name", "seed", "family", "units", "experts", "choices", "input_format", "transform", "rotation.file", "scale_rule", "allow_unsearched",
    "descent.path",
    "descent.cuda_graph", "descent.gradient_checkpointing", "descent.evaluate_every",
    "descent.checkpoint_every", "descent.keep_reference",
)  # fmt: skip
"""Settings that the method's own fields tell, or that change no result."""


@dataclass(frozen=True, kw_only=True)
class Presets:
    """What files of configs/search set, as dotted keys below `search`."""

    exact: Mapping[str, Any]
    polished: Mapping[str, Any]
    learned: Mapping[str, Any]
    joint: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """What must be alike for rows to stand in one table."""

    model: str
    text: str
    shared: Method
    """The fields that a title names; the others as by default."""

    @classmethod
    def of(cls, model: str, text: str, method: Method) -> Table:
        """The table of a method's rows."""
        named = method.titles()
        shared = method.without(*(f.name for f in fields(method) if f.name not in named))
        # Uniform formats and bf16 have no units and no family: they stand with what is usual.
        units, family = shared.units or USUAL.units, shared.family or USUAL.family
        return cls(model, text, replace(shared, units=units, family=family))

    @property
    def title(self) -> str:
        """Model, text, and all that a title names."""
        return ", ".join([self.model, self.text, *filter(None, self.shared.titles().values())])

    @property
    def setting(self) -> str:
        """What is unusual about it, or `plain`."""
        parts = []
        for f in fields(self.shared):
            value, say = getattr(self.shared, f.name), f.metadata["label"] or f.metadata["title"]
            if f.metadata["title"] is not None and value != getattr(USUAL, f.name, f.default):
                parts.append(say(value))
        return ", ".join(filter(None, parts)) or "plain"

    @property
    def is_validation(self) -> bool:
        """Of a text on which settings were chosen."""
        return self.text.endswith("/validation")

    def is_usual(self, *but: str) -> bool:
        """Whether it is as usual in every field, some apart."""
        named = (f for f in fields(self.shared) if f.metadata["title"] is not None)
        return all(
            getattr(self.shared, f.name) == getattr(USUAL, f.name, f.default)
            for f in named
            if f.name not in but
        )


Tables = Mapping[Table, Sequence[Group]]


def model_name(record: Record) -> str:
    """A local folder by its last two parts."""
    name = record.model.id
    return "/".join(Path(name).parts[-2:]) if name.startswith("/") else name


def text_name(record: Record) -> str:
    """Of the evaluation text; files by their names."""
    text = record.data["evaluation"]
    return text.source if text.name == "files" else text.name


def search_settings(record: Record) -> dict[str, Any]:
    """What was asked of the search, as dotted keys; a list of formats by its name."""
    settings = flatten(record.requested["search"])
    if isinstance(formats := settings.get("family"), list):
        settings["family"] = get_family(formats).name
    if settings.get("polish.rounds") == "auto":
        # As many as it became; a comparison, whose searches are polished by name, has the usual number.
        del settings["polish.rounds"]
        became = flatten(record.actual).get("search.polish.rounds")
        settings |= {} if became is None else {"polish.rounds": became}
    return settings


def base_settings(records: Iterable[Record], presets: Presets) -> dict[str, Any]:
    """What methods are named against: exact.yaml, the polish of polished.yaml, and what most records
    have where both are silent."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        for key, value in search_settings(record).items():
            counts.setdefault(key, Counter())[json.dumps(value)] += 1
    common = {key: json.loads(values.most_common(1)[0][0]) for key, values in counts.items()}
    return common | dict(presets.polished) | dict(presets.exact)


def variant(
    settings: Mapping[str, Any], base: Mapping[str, Any], method: Method, presets: Presets
) -> str:
    """What differs from the base, among the settings that this method reads."""
    rotates = method.transform == "learned"
    if rotates:
        base = {**base, **presets.learned}
    if method.search == "joint":
        base = {**base, **presets.joint}
    named = []
    for key, value in settings.items():
        is_read = method.is_dmx or key in _SHARED or key.startswith("polish")
        is_idle = (
            (key.startswith("rotation") and not rotates)
            or (key.startswith("polish") and not method.polish)
            or (key == "residual_block" and method.transform != "hadamard_full")
            or (key.startswith("joint") and method.search != "joint")
            or (key == "score_batches" and key not in USED_BY.get(method.search or "", ()))
        )
        if (
            is_read
            and not is_idle
            and not key.startswith("scale_rules")
            and key not in _NEVER
            and value != base.get(key)
        ):
            name = key.removeprefix(DESCENT)
            named.append(f"{name}={value:g}" if type(value) is float else f"{name}={value}")
    return " ".join(named)


def pooled(records: Sequence[Record], presets: Presets) -> dict[Table, list[Group]]:
    """Groups of all records by table; rows without a finite perplexity are left out.

    Raises:
        DmxError: records of one model and text are not measured alike.
    """
    base, usual_text = base_settings(records, presets), usual_drawn(records)
    rows: dict[Table, list[Row]] = {}
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        place = model_name(record), text_name(record)
        ours = _conditions(record)
        if ours != (usual := known.setdefault(place, ours)):
            raise DmxError(
                f"Records of {', '.join(place)} are not measured alike: {usual} and {ours}. Keep one "
                "kind in docs/results/records; another model has another model.id."
            )
        settings = search_settings(record)
        for row in record.rows:
            if row.perplexity is None or not math.isfinite(row.perplexity):
                continue
            method = row.method
            if method.is_searched:
                method = replace(method, settings=variant(settings, base, method, presets))
                if row.expert_tokens and settings.get("experts") == "each":
                    method = replace(method, experts="each")
            told = with_stage(replace(row, method=method), record, usual_text)
            rows.setdefault(Table.of(*place, told.method), []).append(told)
    return {table: group_rows(_once(of)) for table, of in rows.items()}


def _conditions(record: Record) -> dict[str, Any]:
    """What must be alike for rows of a model and text to be pooled."""
    evaluation, calibration = record.data["evaluation"], record.data.get("calibration")
    drawn = (
        (calibration.name, calibration.batches, calibration.batch_shape) if calibration else None
    )
    model = record.model
    return {
        "dtype": model.dtype,
        "model": model.revision
        or model.note,  # weights made here have no revision; their note says how
        "windows": (evaluation.windows, evaluation.window),
        "text": evaluation.sha256,
        "calibration": drawn,
    }


def _once(rows: Iterable[Row]) -> list[Row]:
    """Of rows that several records measured alike, the first with zero-shot tasks, else the first."""
    kept: dict[tuple[Method, Limit | None, int | None, float | None], Row] = {}
    for row in rows:
        key = row.method, row.budget, row.seed, row.nll
        if key not in kept or (row.zero_shot and not kept[key].zero_shot):
            kept[key] = row
    return list(kept.values())


# --- tables in order -------------------------------------------------------------------------------


def ordered(tables: Tables) -> list[tuple[Table, Sequence[Group]]]:
    """The main model first, then by model, text and what is unusual."""
    main = main_place(tables)

    def key(table: Table) -> tuple[Any, ...]:
        named = [name for name in reversed(table.shared.titles()) if name not in FINEST]
        values = [(name, getattr(table.shared, name)) for name in (*named, *FINEST)]
        unusual = [(value != getattr(USUAL, name, None), str(value)) for name, value in values]
        return table.model != main[0], table.model, table.text, unusual

    return sorted(tables.items(), key=lambda item: key(item[0]))


def main_place(tables: Tables) -> tuple[str, str]:
    """Model and text with most rows; a test text where there is one."""
    sizes: Counter[tuple[bool, str, str]] = Counter()
    for table, groups in tables.items():
        rows = sum(len(group.rows) for group in groups)
        sizes[not table.is_validation, table.model, table.text] += rows
    _, model, text = max(sizes, key=lambda key: (key[0], sizes[key]), default=(True, "", ""))
    return model, text


def by_text(tables: Tables) -> list[tuple[dict[Table, Sequence[Group]], str]]:
    """Tables of one model and text, and its name; the text where the model has several."""
    places = dict.fromkeys((t.model, t.text) for t, _ in ordered(tables))
    texts = Counter(model for model, _ in places)
    return [
        (
            {t: g for t, g in tables.items() if (t.model, t.text) == place},
            ", ".join(place) if texts[place[0]] > 1 else place[0],
        )
        for place in places
    ]


def unquantized(tables: Tables, model: str, text: str) -> list[Group]:
    """bf16 rows stand in a table of their own, for nothing of them is quantized."""
    return [
        g
        for t, groups in tables.items()
        if (t.model, t.text) == (model, text)
        for g in groups
        if g.method.is_unquantized
    ]
