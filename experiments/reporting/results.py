"""Result rows of a record -> groups over seeds, paired differences, the verdict. Numbers only.

    difference = mean over windows of (nll_w - nll_w of the reference)            nats/token
    stderr     = sample standard deviation of that difference / sqrt(windows)

Both searches are measured on the same windows, so most of the variance over windows cancels in the
pair. With several seeds, each window is averaged over the seeds first, and the seeds' own scatter
is added when it is decided whether a difference is more than noise.
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dmx.evaluate.statistics import paired_difference as mean_difference

Row = Mapping[str, Any]

SIGNIFICANT = 1.0
"""A difference counts when it exceeds this many paired standard errors; below, it is a tie. The
standard error stands beside every difference, so that a stricter reader can ask for more."""

HEURISTICS = ("kl", "kl_per_bit", "fisher", "weight_mse")


@dataclass(frozen=True)
class Statistic:
    """One metric over the rows of a group."""

    mean: float | None
    spread: float | None
    """Sample standard deviation over rows; None for fewer than two rows."""
    count: int
    reason: str
    """Why the metric, or some rows of it, is missing; empty when complete."""


@dataclass(frozen=True)
class Group:
    """Rows that differ in seed alone."""

    label: str
    search: str | None
    budget: tuple[float, str] | None
    """(limit, unit)."""
    operands: str | None
    """"W" or "W+A" where the record says it."""
    rows: tuple[Row, ...]
    transform: str | None = None
    """Searches are compared with those of the same transform."""
    is_separate: bool = False
    """Weights and inputs chose separately, and both count in the bits: such rows are compared among
    themselves, in a table of their own."""

    @property
    def name(self) -> str:
        return f"{self.label} ({self.operands})" if self.operands else self.label

    @property
    def title(self) -> str:
        return f"{self.name}, {budget_text(self.budget)}" if self.budget else self.name

    @property
    def kind(self) -> tuple[str | None, str | None, bool]:
        """What must be alike for two searches to be compared, the budget apart."""
        return self.operands, self.transform, self.is_separate

    @property
    def seeds(self) -> list[tuple[Row, ...]]:
        """Rows by seed, so that one that ran twice weighs no more than the others; a row without a
        seed stands alone."""
        found: dict[Any, list[Row]] = {}
        for index, row in enumerate(self.rows):
            seed = row.get("seed")
            found.setdefault(("row", index) if seed is None else seed, []).append(row)
        return [tuple(rows) for rows in found.values()]

    def on_seeds(self, seeds: Container[Any]) -> "Group":
        """The group with its rows of these seeds alone."""
        return replace(self, rows=tuple(row for row in self.rows if row.get("seed") in seeds))

    @property
    def is_dmx(self) -> bool:
        return (self.search or "").split("+")[0] == "differentiable"

    def statistic(self, metric: str) -> Statistic:
        """Mean and spread over seeds of a row's metric; rows without it count into the reason."""
        by_seed = [
            [float(r[metric]) for r in rows if r.get(metric) is not None] for rows in self.seeds
        ]
        values = [float(np.mean(found)) for found in by_seed if found]
        reason = "; ".join(
            dict.fromkeys(
                str(row.get(f"{metric}_reason") or "not in the record")
                for row in self.rows
                if row.get(metric) is None
            )
        )
        if not values:
            return Statistic(None, None, 0, reason)
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return Statistic(float(np.mean(values)), spread, len(values), reason)

    def window_nll(self) -> np.ndarray | None:
        """(windows,) float64 nats/token, mean over the seeds; None when a row lacks it or lengths
        differ."""
        lists = [row.get("window_nll") for row in self.rows]
        if any(not values for values in lists) or len({len(v) for v in lists if v}) != 1:
            return None
        found = [np.mean([row["window_nll"] for row in rows], axis=0) for rows in self.seeds]
        return np.asarray(found, dtype=np.float64).mean(axis=0)


@dataclass(frozen=True)
class Difference:
    """nll of one group minus nll of its reference, in nats/token; negative is better. For
    `item_difference`: shares of 1 over items, positive is better."""

    mean: float | None
    stderr: float | None
    """Paired, over windows; None for a single window."""
    windows: int
    reference: str
    reason: str
    noise: float | None = None
    """stderr with the scatter over seeds added; what a claim is tested against."""

    @property
    def is_clear(self) -> bool:
        """More than `SIGNIFICANT` standard errors from zero."""
        known = self.mean is not None and self.noise is not None
        return known and abs(self.mean or 0.0) > SIGNIFICANT * (self.noise or 0.0)


def budget_text(budget: tuple[float, str] | None) -> str:
    return f"{budget[0]:g} {budget[1]}" if budget else "no budget"


def group_rows(results: Iterable[Row]) -> list[Group]:
    """Rows by label, budget, operands, transform and choice, in order of first appearance."""
    grouped: dict[Group, list[Row]] = {}
    for row in results:
        budget = row.get("budget")
        key = Group(
            row["label"],
            row.get("search"),
            (float(budget["limit"]), str(budget["unit"])) if budget else None,
            row.get("operands"),
            rows=(),
            transform=(row.get("transform") or {}).get("name"),
            is_separate=row.get("choice_per") == "operand",
        )
        grouped.setdefault(key, []).append(row)
    return [replace(key, rows=tuple(rows)) for key, rows in grouped.items()]


def by_operands(groups: Iterable[Group]) -> tuple[list[Group], list[Group]]:
    """Groups with one choice for both operands, and those with a choice for each."""
    sides: tuple[list[Group], list[Group]] = [], []
    for group in groups:
        sides[group.is_separate].append(group)
    return sides


SEPARATE_NOTE = (
    "Weight and input of a layer have a choice each, and both count in the bits, weighted by "
    "multiply-accumulates; what is stored is the weights alone (whole model)."
)


def bits_unit(groups: Iterable[Group]) -> str:
    """The unit that most budgets name; element_bits without any budget."""
    units = Counter(group.budget[1] for group in groups if group.budget)
    return units.most_common(1)[0][0] if units else "element_bits"


def paired_difference(group: Group, reference: Group) -> Difference:
    """Paired difference of nll over windows (module docstring)."""
    ours, theirs = group.window_nll(), reference.window_nll()
    if ours is None or theirs is None:
        lacking = group if ours is None else reference
        return Difference(
            None, None, 0, reference.title, f"no common window_nll for {lacking.title}"
        )
    if len(ours) != len(theirs):
        reason = f"measured on {len(ours)} and {len(theirs)} windows"
        return Difference(None, None, 0, reference.title, reason)
    mean, stderr, count = mean_difference(ours.tolist(), theirs.tolist())
    if stderr is None:
        reason = "one window gives no standard error"
        return Difference(mean, None, 1, reference.title, reason)
    noise = math.sqrt(stderr**2 + _seed_variance(group) + _seed_variance(reference))
    return Difference(mean, stderr, count, reference.title, "", noise)


@dataclass(frozen=True)
class Accuracy:
    """One zero-shot task over the rows of a group; shares of 1."""

    value: float
    stderr: float | None
    """Over items. Seeds see the same items, so averaging over them does not shrink it."""
    metric: str
    count: int
    seeds: int
    source: str


def zero_shot_tasks(groups: Iterable[Group]) -> list[str]:
    """Every task that some row has, in order of first appearance."""
    return list(
        dict.fromkeys(t for g in groups for row in g.rows for t in row.get("zero_shot") or {})
    )


def accuracy(group: Group, task: str) -> Accuracy | None:
    """None where no row of the group has the task."""
    found = [row["zero_shot"][task] for row in group.rows if (row.get("zero_shot") or {}).get(task)]
    if not found:
        return None
    errors = [f["stderr"] for f in found if f["stderr"] is not None]
    return Accuracy(
        float(np.mean([f["value"] for f in found])),
        float(np.mean(errors)) if errors else None,
        found[0]["metric"],
        found[0]["count"],
        len(found),
        str(found[0].get("source") or "not in the record"),
    )


def item_difference(group: Group, reference: Group, task: str) -> Difference:
    """Accuracy of one group minus that of another, paired over the items of a task, shares of 1;
    positive is better. Items are averaged over the rows of a group first."""
    sides = []
    for side in (group, reference):
        found = [(row.get("zero_shot") or {}).get(task) or {} for row in side.rows]
        if not all(f.get("items") for f in found):
            return Difference(
                None, None, 0, reference.title, f"no items of {task} for {side.title}"
            )
        sides.append(found)
    asked = {(f.get("sha256"), f["metric"], len(f["items"])) for found in sides for f in found}
    if len(asked) > 1:
        return Difference(None, None, 0, reference.title, f"{task}: not the same items")
    means = [np.mean([f["items"] for f in found], axis=0) for found in sides]
    mean, stderr, count = mean_difference(*means)
    return Difference(mean, stderr, count, reference.title, "", stderr)


def best_other(group: Group, groups: Sequence[Group], task: str) -> Group | None:
    """The most accurate of the other quantized groups on a task."""
    found = [
        (share.value, other)
        for other in groups
        if other is not group and other.label != "bf16" and (share := accuracy(other, task))
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _seed_variance(group: Group) -> float:
    """Variance of the group's mean nll over its seeds; 0 for one seed, which shows no scatter."""
    found = group.statistic("nll")
    return found.spread**2 / found.count if found.spread is not None else 0.0


def reference_of(group: Group, groups: Sequence[Group], search: str | None = None) -> Group | str:
    """The group of `search` that `group` is compared with, or the reason why there is none.

    Same kind, rounding, safety net and budget; a group without a budget takes the only one there is.

    Args:
        search: None: `kl`, the paper's, where it was run, else the heuristic of the lowest loss.
    """
    _, *parts = (group.search or "").split("+")
    suffix = "".join(f"+{part}" for part in parts if part != "polish")
    names = HEURISTICS if search is None else (search,)
    alike = [
        g for g in groups
        if g.kind == group.kind and g.search in [f"{name}{suffix}" for name in names]
        and (group.budget is None or g.budget == group.budget) and g.statistic("nll").mean is not None
    ]  # fmt: skip
    if search is None and (kl := [g for g in alike if g.search == f"{names[0]}{suffix}"]):
        alike = kl
    if not alike:
        return f"no {search or 'heuristic'} result at the same budget"
    if group.budget is None and len(alike) > 1:
        return f"several {alike[0].search} results, none of them at this row's budget"
    return min(alike, key=lambda g: g.statistic("nll").mean or 0.0)


def reference_name(groups: Sequence[Group]) -> str:
    """Of the search that `reference_of` finds for these groups; `reference` where they differ."""
    found = [reference_of(group, groups) for group in groups]
    names = {str(g.search).split("+")[0] for g in found if isinstance(g, Group)}
    return names.pop() if len(names) == 1 else "reference" if names else HEURISTICS[0]


def difference_to(group: Group, groups: Sequence[Group], search: str | None = None) -> Difference:
    reference = reference_of(group, groups, search)
    if isinstance(reference, str):
        return Difference(None, None, 0, search or "heuristic", reference)
    if reference is group:
        return Difference(None, None, 0, reference.title, "the reference itself")
    return paired_difference(group, reference)


def verdicts(results: Iterable[Row]) -> list[dict[str, Any]]:
    """One verdict per dMX group that has a heuristic at its budget (`reference_of`).

    Returns:
        dicts with `text`, `difference_nats`, `stderr_nats` (paired, over windows), `beats`
        (True only beyond SIGNIFICANT standard errors), `budget`, `against`.
    """
    groups = group_rows(results)
    found = []
    for group in groups:
        reference = reference_of(group, groups)
        if not group.is_dmx or isinstance(reference, str):
            continue
        difference = paired_difference(group, reference)
        found.append(
            {
                "text": _verdict_text(group, reference, difference),
                "difference_nats": difference.mean,
                "stderr_nats": difference.stderr,
                "beats": bool(difference.is_clear and (difference.mean or 0.0) < 0),
                "budget": dict(zip(("limit", "unit"), group.budget, strict=True))
                if group.budget
                else None,
                "against": reference.label,
            }
        )
    return found


def verdict_texts(record: Mapping[str, Any]) -> list[str]:
    """What a record claims: its own verdict, or where it has several dMX results one for each."""
    found, recorded = verdicts(record["results"]), record.get("verdict")
    return [recorded["text"]] if recorded and len(found) < 2 else [v["text"] for v in found]


def _verdict_text(group: Group, reference: Group, difference: Difference) -> str:
    name = "dMX" if group.name == "dmx" else group.name
    where = f" at {budget_text(group.budget)}" if group.budget else ""
    ours, theirs = group.statistic("perplexity"), reference.statistic("perplexity")
    against = f"perplexity {spread_text(ours)} against {spread_text(theirs)}"
    if difference.mean is None or difference.stderr is None:
        claim = f"{name} and {reference.name}{where} cannot be compared"
        return f"{claim}: {difference.reason}; {against}."
    side = "lower" if difference.mean < 0 else "higher"
    amount = f"{abs(difference.mean):.4f} ± {difference.stderr:.4f} nats/token {side}"
    if difference.mean == 0:
        amount = "equal"
    if not difference.is_clear:
        claim = f"tie: {name} and {reference.name} cannot be told apart{where}"
    elif difference.mean < 0:
        claim = f"{name} beats {reference.name}{where}"
    else:
        claim = f"{name} does not beat {reference.name}{where}"
    seeds = min(len(group.seeds), len(reference.seeds))
    sample = f"{difference.windows} windows, {'one seed' if seeds == 1 else f'{seeds} seeds'}"
    return f"{claim}: loss {amount} (paired over {sample}), {against}."


def points_text(mean: float | None, stderr: float | None) -> str:
    """A difference of shares in percentage points, ± its standard error; – where there is none."""
    if mean is None:
        return "–"
    return f"{100 * mean:+.1f}" + ("" if stderr is None else f" ± {100 * stderr:.1f}")


def number_text(value: float, digits: int = 4) -> str:
    """`digits` significant digits, thousands separated; inf and nan by name."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def spread_text(statistic: Statistic, digits: int = 4) -> str:
    """`mean`, or `mean ± spread` when there are several rows; – when there are none."""
    if statistic.mean is None:
        return "–"
    if statistic.spread is None:
        return number_text(statistic.mean, digits)
    mean = number_text(statistic.mean, digits)
    decimals = len(mean.partition(".")[2])
    return f"{mean} ± {statistic.spread:.{decimals}f}"
