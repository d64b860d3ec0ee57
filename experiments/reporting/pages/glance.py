"""Every setting of the main model in one line: the dMX and the heuristic that are best there, by budget.

A setting is what was done to the model besides choosing formats. Tables that differ in nothing but how a
scale rule was written are one setting, and its label is short: W4A8 where every input has one format, and
the rule of the weights alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dmx.formats import FORMATS

from ..groups import Group, budget_cell
from ..markdown import markdown
from ..pooling import FINEST, USUAL, Table, Tables, main_place, ordered, unquantized
from ..record import USUAL_FAMILY, Limit, Method
from .cells import best_heuristic, cheapest_format, mean_perplexity, references

_EVEN = "mxfp4 even"
"""The one scale rule with a short name here."""


def is_flat(group: Group) -> bool:
    """Whether all weights have one format, so that there was nothing to choose."""
    return only_format(group) is not None


def only_format(group: Group) -> str | None:
    """The format that all weights have; None where they differ."""
    formats = _formats([group])
    return formats.pop() if len(formats) == 1 else None


class Pair(NamedTuple):
    """The best of each kind at one budget; None where none was run."""

    dmx: Group | None
    heuristic: Group | None

    @property
    def known(self) -> list[Group]:
        """Those that were run."""
        return [group for group in self if group is not None]

    @property
    def is_flat(self) -> bool:
        """Whether there was nothing to choose: every search has the same formats."""
        return any(map(is_flat, self.known))

    @property
    def ours(self) -> Group | None:
        """dMX; any search where there was nothing to choose."""
        return self.dmx or (self.heuristic if self.is_flat else None)


@dataclass(frozen=True)
class Setting:
    """What was done to the model besides choosing formats, and what was measured with it."""

    key: Method
    """Its fields that a table's title names; of the scale rules those of the weights alone."""
    groups: tuple[Group, ...]

    @property
    def label(self) -> str:
        """What is unusual about it: `W4A8, learned weights, even`; `plain` where nothing is."""
        rules = self.key.scale_rules
        but_inputs = replace(self.key, input_format=None)
        short = replace(but_inputs, scale_rules=USUAL.scale_rules) if rules == _EVEN else but_inputs
        said = Table("", "", short).setting
        parts = [
            self.bits_text,
            "" if said == "plain" else said,
            "even" if rules == _EVEN else "",
        ]
        return ", ".join(filter(None, parts)) or "plain"

    @property
    def budgets(self) -> list[Limit]:
        """The smallest first."""
        return sorted({g.budget for g in self.groups if g.budget and g.method.is_searched})

    @property
    def is_apart(self) -> bool:
        """Of another family, or measured once."""
        once = len(self.budgets) == 1 and all(len(g.seeds) == 1 for g in self.groups)
        return once or self.key.family != USUAL_FAMILY

    def at(self, budget: Limit) -> Pair:
        """The best dMX and the best heuristic at a budget, by mean perplexity on this text."""
        ours = [g for g in self.groups if g.budget == budget and g.method.is_dmx]
        return Pair(
            min(ours, key=mean_perplexity, default=None), best_heuristic(budget, self.groups)
        )

    @property
    def bits_text(self) -> str:
        """`W4A8` where every input has one format, by the cheapest format of weights; else nothing."""
        if self.key.input_format is None:
            return ""
        cheapest = cheapest_format(self.key)
        inputs = FORMATS[self.key.input_format]
        return f"W{cheapest.element_bits:g}A{inputs.element_bits:g}"


def settings_of(tables: Tables, units: str = "layer") -> list[Setting]:
    """Of the main model and text, all that has these units and the usual choices."""
    place = main_place(tables)
    found: dict[Method, list[Group]] = {}
    for table, groups in ordered(tables):
        is_usual = table.is_usual(*FINEST, "input_format", "units")
        if (table.model, table.text) == place and is_usual and table.shared.units == units:
            key = replace(table.shared, scale_rules=_rules(table.shared, groups))
            known = found.pop(key, [])  # so that it stands where its last table does
            found[key] = [*known, *(g for g in groups if g.budget)]
    return [Setting(key, tuple(groups)) for key, groups in found.items() if groups]


def _rules(shared: Method, groups: Iterable[Group]) -> str:
    """Scale rules of the weights where inputs have the same or the usual one; of one format by its name."""
    weights, _, inputs = shared.scale_rules.removeprefix("weight: ").partition("; input: ")
    if inputs not in ("", USUAL.scale_rules) or (inputs and shared.input_format is None):
        return shared.scale_rules
    formats = _formats(groups)
    if weights == USUAL.scale_rules or " " in weights or len(formats) != 1:
        return weights
    return f"{formats.pop()} {weights}"


def _formats(groups: Iterable[Group]) -> set[str]:
    """Of all weights."""
    return {
        name
        for group in groups
        for row in group.rows
        for counts in (row.format_counts or {}).get("weight", {}).values()
        for name, layers in counts.items()
        if layers
    }


def main_settings(settings: Sequence[Setting]) -> list[Setting]:
    """Those that fill a line; all where none does."""
    return [s for s in settings if not s.is_apart] or list(settings)


# --- tables ----------------------------------------------------------------------------------------


def glance_table(tables: Tables) -> list[str]:
    """A line for each setting, then those that were measured once or are of another family."""
    settings = settings_of(tables)
    shown = main_settings(settings)
    budgets = sorted({budget for setting in shown for budget in setting.budgets})
    rows = [[s.label, *(_pair_text(s.at(budget)) for budget in budgets)] for s in shown]
    if not rows:
        return []
    lines = [*markdown(["setting", *map(budget_cell, budgets)], rows), "", _note(tables, shown)]
    if others := _apart_rows([s for s in settings if s not in shown]):
        said = "Besides, of other families or measured once:"
        head = ["setting", "method", "budget", "perplexity"]
        lines += ["", said, "", *markdown(head, others)]
    return lines


def _pair_text(pair: Pair) -> str:
    if not pair.known:
        return "–"
    if pair.is_flat:
        return _number_text(max(pair.known, key=lambda g: len(g.seeds)))
    return " / ".join("–" if g is None else _number_text(g) for g in pair)


def _number_text(group: Group) -> str:
    return f"{mean_perplexity(group):.2f}{'†' if len(group.seeds) == 1 else ''}"


def _apart_rows(settings: Iterable[Setting]) -> list[list[str]]:
    return [
        [setting.label, g.method.short_label, budget_cell(g.budget), _number_text(g)]
        for setting in settings
        for budget in setting.budgets
        for g in setting.at(budget).known
    ]


def _note(tables: Tables, shown: Sequence[Setting]) -> str:
    """What the cells and the labels of the table mean."""
    cells = [s.at(budget) for s in shown for budget in s.budgets]
    said = [
        "Mean perplexity of dMX / of the best heuristic, each the best of those that were run; lower is better.",
        "†: one seed." if any(len(g.seeds) == 1 for pair in cells for g in pair.known) else "",
        "One number: all layers have one format, so there is nothing to choose."
        if any(pair.is_flat for pair in cells)
        else "",
        "Plain: no transform, weights rounded to nearest, scale rule floor.",
        "Even: the scale rule of MXFP4 is even."
        if any(s.key.scale_rules == _EVEN for s in shown)
        else "",
        *inputs_notes(shown),
    ]
    full = references(unquantized(tables, *main_place(tables)))
    return " ".join(filter(None, [*said, f"{full}." if full else ""]))


def inputs_notes(shown: Iterable[Setting]) -> list[str]:
    """What `W4A8` means, of the settings that are so."""
    seeds: dict[tuple[str, str], set[int]] = {}
    for setting in shown:
        if setting.key.input_format:
            known = seeds.setdefault((setting.bits_text, setting.key.input_format), set())
            known.update(len(group.seeds) for group in setting.groups)
    return [
        f"{name}: every input is {inputs}, formats of weights alone are chosen, and their bits alone count"
        f"{'; one seed' if counts == {1} else ''}."
        for (name, inputs), counts in seeds.items()
    ]
