"""What docs/results/quality.md begins with: the best settings, dMX against heuristics, inputs, and counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..groups import Group
from ..pooling import USUAL, Table, Tables, main_place, unquantized
from ..record import Limit, Method
from ..stages import NATURAL_ORDER
from .cells import best_heuristic, mean_perplexity, percent, verdict
from .glance import Setting, is_flat, main_settings, settings_of


def sentences(tables: Tables, test: Tables) -> list[str]:
    """The page in at most four sentences."""
    settings = settings_of(tables)
    full = next(iter(unquantized(tables, *main_place(tables))), None)
    said = (
        _best(main_place(tables)[0], settings, full),
        _against_heuristics(settings),
        _inputs(settings, full),
        _count(test),
    )
    return [sentence for sentence in said if sentence]


def common_budget(settings: Sequence[Setting]) -> Limit | None:
    """At which most settings have dMX beside a heuristic and something to choose; of equals the largest."""
    counts = Counter(
        budget
        for setting in settings
        for budget in setting.budgets
        if all(setting.at(budget)) and not setting.at(budget).is_flat
    )
    return max(counts, key=lambda budget: (counts[budget], budget), default=None)


def alike_but_rules(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Settings that differ in nothing but scale rules, the one with most budgets first."""
    found: dict[Method, list[Setting]] = {}
    for setting in settings:
        found.setdefault(replace(setting.key, scale_rules=USUAL.scale_rules), []).append(setting)
    return [sorted(of, key=lambda s: -len(s.budgets)) for of in found.values()]


MOST_LINES = 8
"""Of a picture: more cannot be told apart."""
_APART = 1.02
"""Ratio of perplexities that a line must reach somewhere to be another one than a line that is drawn."""


def drawn(settings: Sequence[Setting]) -> list[Setting]:
    """Which settings a picture shows: nothing besides, and the best of those that differ visibly.

    Of settings that differ in scale rules alone, that with most budgets; none with a single budget where
    others have several.
    """
    known = [of[0] for of in alike_but_rules(main_settings(settings)) if _line(of[0])]
    several = [s for s in known if len(_line(s)) > 1] or known
    budget = common_budget(several)

    def height(setting: Setting) -> float:
        line = _line(setting)
        return line[max((b for b in line if not budget or b <= budget), default=min(line))]

    taken = [s for s in several if _done(s) == ""]
    for setting in sorted(several, key=height):
        is_new = setting not in taken and not any(_is_near(setting, other) for other in taken)
        if is_new and len(taken) < MOST_LINES:
            taken.append(setting)
    return [s for s in settings if s in taken]


def _line(setting: Setting) -> dict[Limit, float]:
    found = {budget: setting.at(budget).ours for budget in setting.budgets}
    return {budget: mean_perplexity(group) for budget, group in found.items() if group}


def _is_near(setting: Setting, other: Setting) -> bool:
    """Whether two lines share most of their budgets and lie within `_APART` there."""
    ours, theirs = _line(setting), _line(other)
    shared = set(ours) & set(theirs)
    is_within = all(max(ours[b], theirs[b]) < _APART * min(ours[b], theirs[b]) for b in shared)
    return 2 * len(shared) > len(ours) and is_within


def _best(model: str, settings: Sequence[Setting], full: Group | None) -> str | None:
    """The three best settings, and dMX alone, at the common budget; of inputs like weights."""
    shown = [of[0] for of in alike_but_rules(main_settings(settings)) if _inputs_follow(of[0])]
    budget = common_budget(shown)
    values: dict[str, float] = {}
    for setting in shown:
        if budget and (ours := setting.at(budget).dmx):
            # Other stages have one name here: the best of them.
            is_natural = setting.key.stage == NATURAL_ORDER
            name = _done(setting) + f" in {NATURAL_ORDER}" * is_natural
            values[name] = min(mean_perplexity(ours), values.get(name, math.inf))
    if not values or full is None:
        return None
    alone = values.pop("", None)
    best = sorted(values, key=lambda name: values[name])[:3]
    said = [f"{values[name]:.2f} with {name}" for name in best]
    if alone is not None:
        said.append(f"{alone:.2f} alone" if best else f"{alone:.2f}")
    return f"On {model} at {budget}, where bf16 has {mean_perplexity(full):.2f}, dMX has {_list(said)}."


def _done(setting: Setting) -> str:
    """What was done besides choosing formats, in words; nothing where nothing was."""
    name = Table("", "", replace(setting.key, scale_rules=USUAL.scale_rules, stage="")).setting
    return "" if name == "plain" else name.replace(", ", " and ")


def _inputs_follow(setting: Setting) -> bool:
    return setting.key.input_format is None


def _against_heuristics(settings: Sequence[Setting]) -> str | None:
    """dMX against heuristics, of the best setting that has them at several budgets, and of the usual one."""
    shown = [s for s in main_settings(settings) if _inputs_follow(s)]
    budget = common_budget(shown)
    compared = [s for s in shown if budget in s.budgets and all(s.at(budget))] if budget else []
    if not compared:
        return None
    assert budget is not None
    best = min(compared, key=lambda s: mean_perplexity(s.at(budget).dmx or s.groups[0]))
    plain = [s for s in compared if _done(s) == "" and s is not best][:1]
    parts = [_changes(s) for s in (best, *plain)]
    return f"Against the best heuristic with the same weights, {'; '.join(parts)}."


def _changes(setting: Setting) -> str:
    """The dMX method with most budgets, then the best by mean over them, against the best heuristic at each."""
    shares: dict[Method, dict[Limit, float]] = {}
    for group in setting.groups:
        best = best_heuristic(group.budget, setting.groups)
        if group.method.is_dmx and group.budget and best is not None and not is_flat(group):
            shares.setdefault(group.method, {})[group.budget] = percent(group, best)
    means = {method: sum(of.values()) / len(of) for method, of in shares.items()}
    method = min(means, key=lambda m: (-len(shares[m]), means[m]))
    of = sorted(shares[method].items())
    said = _list([f"{share:+.1f} % at {budget.limit:g}" for budget, share in of])
    mean = f", {means[method]:+.1f} % on average" if len(of) > 1 else ""
    where = f" with {done}" if (done := _done(setting)) else ""
    return (
        f"{method.without('path').short_label}{where} changes perplexity by {said} "
        f"{of[-1][0].unit}{mean}"
    )


def _inputs(settings: Sequence[Setting], full: Group | None) -> str | None:
    """What inputs in a format of their own bring, where perplexity is lowest."""
    alike = {setting.key: setting for setting in settings}
    found: list[tuple[float, float, Limit, Setting, Setting]] = []
    for setting in settings:
        other = alike.get(replace(setting.key, input_format=None))
        if _inputs_follow(setting) or other is None:
            continue
        for budget in set(setting.budgets) & set(other.budgets):
            ours, theirs = setting.at(budget).ours, other.at(budget).ours
            if ours is not None and theirs is not None:
                values = mean_perplexity(ours), mean_perplexity(theirs)
                found.append((*values, budget, setting, other))
    if not found or full is None:
        return None
    apart, together, budget, setting, other = min(found, key=lambda item: item[0])
    where = f" with {done}" if (done := _done(other)) else ""
    name, inputs = setting.bits_text, setting.key.input_format
    once = ", one seed" if all(len(g.seeds) == 1 for g in setting.at(budget).known) else ""
    said = (
        f"at {budget}{where} dMX has {apart:.2f} with every input in {inputs} ({name}, bits of weights alone{once}), "
        f"{together:.2f} where inputs have the formats of the weights."
    )
    most = together - apart > apart - mean_perplexity(full)
    return (
        f"{'Inputs in few bits cost more than weights' if most else 'Inputs in more bits'}: {said}"
    )


def _count(test: Tables) -> str | None:
    """Cells of all texts that were not chosen on."""
    counts: Counter[str] = Counter()
    for groups in test.values():
        for group in groups:
            best = best_heuristic(group.budget, groups)
            if group.method.is_dmx and best is not None:
                counts[verdict(group, best)] += 1
    del counts["same"]
    if not counts.total():
        return None
    return (
        f"Of {counts.total()} cells of all models, transforms and budgets, dMX is lower than the best heuristic "
        f"by more than one standard error in {counts['lower']}, higher in {counts['higher']}, and within it in "
        f"{counts['within']}."
    )


def _list(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
