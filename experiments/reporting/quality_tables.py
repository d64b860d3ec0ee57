"""Rows of all `quality_*` records by table and method, and the best heuristic of each.

Rows of all records are pooled. A row's method is its search and, for dMX, the settings in which its
record differs from configs/search/exact.yaml (with learned rotations learned.yaml, with a polish
polished.yaml); rows that differ in seed alone, or repeat one, are one group. "Best heuristic" is the one
with the lowest mean perplexity at the same model, text, operands, transform, rounding and budget.
"""

import functools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dmx.errors import DmxError
from experiments.reporting.reading import Record
from experiments.reporting.results import HEURISTICS, Group, group_rows, paired_difference

SETTINGS = Path(__file__).resolve().parents[2] / "configs" / "search"
_SHARED = (
    "family", "weighting", "exclude", "fixed", "include_lm_head", "target", "scale_rule",
    "score_batches", "polish_rounds", "polish_batches",
)  # fmt: skip
"""Settings that heuristics have too; the others belong to dMX alone."""
_NEVER = (
    "name", "seed", "units", "operands", "transform", "transform_file", "allow_unsearched", "cuda_graph",
    "gradient_checkpointing", "evaluate_every", "checkpoint_every",
)  # fmt: skip
"""Settings that stand in the table's title, or change no result."""
BAR_MODEL, BAR_TEXT = "SmolLM2-135M", "wikitext2/test"
"""What bars are for; weights and inputs, a choice for both."""


@dataclass(frozen=True)
class Table:
    """What must be alike for rows to stand in one table."""

    model: str
    text: str
    operands: str
    is_separate: bool
    units: str
    transform: str
    rounding: str

    @property
    def title(self) -> str:
        unusual = [part for part in self._unusual if part != self.operands]
        return ", ".join([self.model, self.text, self.operands, *unusual]) + (
            f": transform {self.transform}, rounding {self.rounding}"
        )

    @property
    def _unusual(self) -> list[str]:
        units = [] if self.units == "layer" else [f"{self.units} units"]
        return [
            *units,
            *(["separate operands"] if self.is_separate else []),
            *(["W"] if self.operands == "W" else []),
        ]

    @property
    def setting(self) -> str:
        """The transform, and what is not usual besides."""
        parts = [self.transform, *([] if self.rounding == "nearest" else [self.rounding])]
        return ", ".join([*parts, *self._unusual])

    @property
    def has_bars(self) -> bool:
        return (
            self.model.startswith(BAR_MODEL) and self.text == BAR_TEXT
            and self.operands == "W+A" and self.units == "layer" and not self.is_separate
        )  # fmt: skip


def model_name(record: Record) -> str:
    """A local folder by its last two parts."""
    name = str(record["model"]["id"])
    return "/".join(Path(name).parts[-2:]) if name.startswith("/") else name


def text_name(record: Record) -> str:
    found = record["data"]["evaluation"]
    return str(found["source"] if found["name"] == "files" else found["name"])


def base_settings(records: Iterable[Record]) -> dict[str, Any]:
    """What methods are named against: exact.yaml, the polish of polished.yaml, and what most records have
    where both are silent."""
    found: dict[str, Counter[str]] = {}
    for record in records:
        for key, value in record["requested"]["search"].items():
            found.setdefault(key, Counter())[json.dumps(value)] += 1
    common = {key: json.loads(values.most_common(1)[0][0]) for key, values in found.items()}
    return common | search_file("polished") | search_file("exact")


@functools.cache
def search_file(name: str) -> dict[str, Any]:
    """What a file of configs/search sets; not to be changed."""
    found: Any = OmegaConf.to_container(OmegaConf.load(SETTINGS / f"{name}.yaml"))
    return {key: value for key, value in found.items() if key != "defaults"}


def variant(
    settings: Mapping[str, Any], base: Mapping[str, Any], kind: str, *, is_polished: bool
) -> str:
    """What differs from the base, among the settings that a search of this kind reads."""
    rotation = settings.get("transform") == "learned"
    if rotation:
        base = {**base, **search_file("learned")}
    named = []
    for key, value in settings.items():
        known = key in _SHARED or kind.startswith("differentiable")
        idle = key.startswith("rotation") and not rotation
        idle = idle or (key.startswith("polish") and not is_polished)
        if key == "residual_block" and settings.get("transform") != "hadamard_full":
            idle = True
        if known and not idle and key not in _NEVER and value != base.get(key):
            named.append(f"{key}={value:g}" if type(value) is float else f"{key}={value}")
    return " ".join(named)


def pooled(records: Sequence[Record]) -> dict[Table, list[Group]]:
    """Groups of all records by table; `label` is the method, `Group.operands` is left out."""
    base = base_settings(records)
    rows: dict[Table, list[dict[str, Any]]] = {}
    conditions: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        name = model_name(record), text_name(record)
        found = _conditions(record)
        if found != (usual := conditions.setdefault(name, found)):
            raise DmxError(
                f"Records of {', '.join(name)} are not measured alike: {usual} and {found}. Keep one kind in "
                "docs/results/records."
            )
        for row in record["results"]:
            if row.get("perplexity") is None or not math.isfinite(row["perplexity"]):
                continue
            kind, search = row["search"] or "", record["requested"]["search"]
            rounding = (row.get("rounding") or {}).get("name", "nearest")
            table = Table(
                *name, row["operands"] or "",
                row.get("choice_per") == "operand", search["units"] if kind else "layer",
                (row.get("transform") or {}).get("name", "none"), rounding,
            )  # fmt: skip
            label = row["label"]
            if kind not in ("", "uniform"):
                label = method(row)
                extra = variant(search, base, kind, is_polished=" + polish" in label)
                label = f"{label} {extra}".strip()
            rows.setdefault(table, []).append(row | {"label": label, "operands": None})
    return {table: group_rows(_once(found)) for table, found in rows.items()}


def _conditions(record: Record) -> dict[str, Any]:
    """What must be alike for rows of a model and text to be pooled."""
    evaluation, calibration = record["data"]["evaluation"], record["data"]["calibration"] or {}
    return {
        "dtype": record["model"]["dtype"],
        "windows": (evaluation["windows"], evaluation["window"]),
        "text": evaluation["sha256"],
        "calibration": [calibration.get(key) for key in ("name", "batches", "batch_shape")],
    }


def method(row: Mapping[str, Any]) -> str:
    """A row's label without what stands in the table's title."""
    kind = str(row["search"]).split("+")[0]
    parts = ["dMX" if kind == "differentiable" else kind]
    parts += [part for part in ("polish", "net") if f" + {part}" in row["label"]]
    return " + ".join(parts)


def _once(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of rows that several records measured alike, the first with zero-shot tasks, else the first."""
    kept: dict[str, dict[str, Any]] = {}
    for row in rows:
        key = json.dumps([row["label"], row.get("budget"), row.get("seed"), row["nll"]])
        if key not in kept or (row.get("zero_shot") and not kept[key].get("zero_shot")):
            kept[key] = row
    return list(kept.values())


def best_heuristic(budget: tuple[float, str] | None, groups: Iterable[Group]) -> Group | None:
    """Of a table's bare heuristics at the budget, the one with the lowest mean perplexity."""
    found = [
        g for g in groups
        if g.budget == budget and (g.search or "").split("+")[0] in HEURISTICS and " + " not in g.label
    ]  # fmt: skip
    return min(found, key=mean_perplexity, default=None)


def mean_perplexity(group: Group) -> float:
    mean = group.statistic("perplexity").mean
    assert mean is not None  # `pooled` leaves rows without it out
    return mean


def common(group: Group, reference: Group) -> tuple[Group, Group]:
    """Both on the seeds that both have; as they are where they have none in common."""
    seeds = {r["seed"] for r in group.rows} & {r["seed"] for r in reference.rows}
    if not seeds:
        return group, reference
    return group.on_seeds(seeds), reference.on_seeds(seeds)


def percent(group: Group, reference: Group) -> float:
    group, reference = common(group, reference)
    return 100 * (mean_perplexity(group) / mean_perplexity(reference) - 1)


def percent_text(group: Group, reference: Group | None) -> str:
    """Difference of mean perplexities, ± the paired standard error over windows with the scatter
    of seeds."""
    if reference is None or reference is group:
        return "–"
    noise = paired_difference(*common(group, reference)).noise
    decimals = 2 if noise is not None and 100 * noise < 0.05 else 1
    share = round(percent(group, reference), decimals) + 0.0  # no -0.0
    text = f"{share:+.{decimals}f}"
    return text if noise is None else f"{text} ± {100 * noise:.{decimals}f}"


def is_validation(table: Table) -> bool:
    return table.text.endswith("/validation")
