"""Rows that differ in seed alone, as groups, and what a metric is over them. Numbers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

import numpy as np

from .record import Limit, Method, Row, TrainingRow, budget_text

R = TypeVar("R", Row, TrainingRow)


@dataclass(frozen=True)
class Statistic:
    """One metric over the rows of a group."""

    mean: float | None
    spread: float | None
    """Sample standard deviation over seeds; None for fewer than two."""
    count: int
    """Seeds."""
    reason: str
    """Why the metric, or some rows of it, is missing; empty when complete."""


@dataclass(frozen=True, kw_only=True)
class Seeds(Generic[R]):
    """Rows of one thing, by seed."""

    rows: tuple[R, ...]

    @property
    def seeds(self) -> list[tuple[R, ...]]:
        """Rows by seed, so that one that ran twice weighs no more than the others; a row without a
        seed stands alone."""
        by_seed: dict[object, list[R]] = {}
        for index, row in enumerate(self.rows):
            key = ("row", index) if row.seed is None else row.seed
            by_seed.setdefault(key, []).append(row)
        return [tuple(rows) for rows in by_seed.values()]

    def on_seeds(self, seeds: Container[int | None]) -> Self:
        """The group with its rows of these seeds alone."""
        return replace(self, rows=tuple(row for row in self.rows if row.seed in seeds))

    def statistic(self, metric: str) -> Statistic:
        """Mean and spread over seeds of a row's metric; rows without it count into the reason."""
        by_seed = [[v for r in rows if (v := r.metric(metric)) is not None] for rows in self.seeds]
        values = [float(np.mean(of)) for of in by_seed if of]
        reasons = dict.fromkeys(r.reason(metric) for r in self.rows if r.metric(metric) is None)
        if not values:
            return Statistic(None, None, 0, "; ".join(reasons))
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return Statistic(float(np.mean(values)), spread, len(values), "; ".join(reasons))


@dataclass(frozen=True, kw_only=True)
class Group(Seeds[Row]):
    """Rows of one method at one budget."""

    method: Method
    budget: Limit | None

    @property
    def label(self) -> str:
        """The method's."""
        return self.method.label

    @property
    def name(self) -> str:
        """The method's label, and what it quantizes."""
        return self.method.name

    @property
    def title(self) -> str:
        """Name and budget."""
        return f"{self.name}, {budget_text(self.budget)}" if self.budget else self.name

    @property
    def place(self) -> tuple[object, ...]:
        """What groups must have in common to be compared: the method's kind, and the budget."""
        return self.budget, self.method.kind

    def window_nll(self) -> np.ndarray | None:
        """(windows,) float64 nats/token, mean over the seeds; None when a row lacks it or lengths
        differ."""
        lists = [row.window_nll for row in self.rows]
        if any(not values for values in lists) or len({len(v) for v in lists if v}) != 1:
            return None
        means = [np.mean([row.window_nll or () for row in rows], axis=0) for rows in self.seeds]
        return np.asarray(means, dtype=np.float64).mean(axis=0)


@dataclass(frozen=True, kw_only=True)
class RecipeGroup(Seeds[TrainingRow]):
    """Rows of one recipe of mor."""

    label: str


def group_rows(rows: Iterable[Row]) -> list[Group]:
    """Rows by method and budget, in order of first appearance. What a search came to on one seed or another does not
    divide them, or a mean would be of the seeds that it went well on."""
    grouped: dict[tuple[Method, Limit | None], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.method.without("kept"), row.budget), []).append(row)
    return [
        Group(method=_common(m, of), budget=b, rows=tuple(of)) for (m, b), of in grouped.items()
    ]


def _common(method: Method, rows: Iterable[Row]) -> Method:
    """Of rows that are alike in all but what they kept."""
    kept = {row.method.kept for row in rows}
    return replace(method, kept=kept.pop()) if len(kept) == 1 else method


def group_recipes(rows: Iterable[TrainingRow]) -> list[RecipeGroup]:
    """Rows by recipe, in order of first appearance."""
    grouped: dict[str, list[TrainingRow]] = {}
    for row in rows:
        grouped.setdefault(row.recipe, []).append(row)
    return [RecipeGroup(label=label, rows=tuple(of)) for label, of in grouped.items()]


def by_choices(groups: Iterable[Group]) -> tuple[list[Group], list[Group]]:
    """Groups with one choice for both operands, and those with a choice for each."""
    sides: tuple[list[Group], list[Group]] = [], []
    for group in groups:
        sides[group.method.choices == "separate"].append(group)
    return sides


SEPARATE_NOTE = (
    "Weight and input of a layer have a choice each, and both count in the bits, weighted by "
    "multiply-accumulates; what is stored is the weights alone (whole model)."
)


INPUTS_NOTE = (
    "Where a label names the format of the inputs, every input has it; weights alone were chosen, and "
    "their bits alone count."
)


def bits_unit(groups: Iterable[Group]) -> str:
    """The unit that most budgets name; element_bits without any budget."""
    units = Counter(group.budget.unit for group in groups if group.budget)
    return units.most_common(1)[0][0] if units else "element_bits"


def budget_cell(budget: Limit | None) -> str:
    """As a table's cell; element_bits go without saying."""
    if budget is None:
        return "–"
    return f"≤ {budget.limit:g}" + ("" if budget.unit == "element_bits" else f" {budget.unit}")
