"""docs/results/quality.md: all `quality_*` records of experiments.compare in one page."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from experiments._maps import PROJECTIONS
from experiments._markdown import markdown, met
from experiments._plots import pareto
from experiments._quality_tables import (
    BAR_MODEL,
    BAR_TEXT,
    Table,
    base_settings,
    best_heuristic,
    best_transformed,
    is_dmx,
    is_validation,
    mean_perplexity,
    model_name,
    percent,
    percent_text,
    pooled,
    text_name,
)
from experiments._reading import Record
from experiments._results import (
    SIGNIFICANT,
    Group,
    accuracy,
    item_difference,
    spread_text,
    zero_shot_tasks,
)

_STATED = (
    "family", "score_batches", "steps", "objective", "penalty", "gradient_scale", "lr",
    "lr_schedule", "momentum", "start",
)  # fmt: skip
"""Named once on the page; heuristics have the first two."""

PLAIN_MARGINS = {4.5: 3.0, 5.0: 3.0, 5.5: 2.0}
"""Budget, element_bits -> % below the best heuristic, without a transform."""
ROTATED_PERPLEXITY = {4.5: 28.6, 5.0: 25.9, 5.5: 24.0}
"""Budget -> perplexity with a transform, rounded to nearest; and `ROTATED_MARGIN` besides."""
ROTATED_MARGIN = 2.0
REACH = {4.5: 27.5, 5.0: 25.0, 5.5: 23.3}
"""Budget -> perplexity to reach with a transform, by any rounding."""

_FUSED_NOTE = (
    "Perplexity, seeds in brackets. Fused: q, k and v have one format, gate and up have one, as runtimes "
    "that merge them need."
)


def ablation(tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    rows = []
    for table, groups in tables.items():
        for group in sorted(groups, key=lambda g: (g.budget or (0.0, ""), mean_perplexity(g))):
            if group.budget is None or group.search == "uniform":
                continue
            best = best_heuristic(group, groups)
            against = "no heuristic" if best is None else percent_text(group, best)
            seconds = group.statistic("search_seconds").mean
            rows.append([
                table.setting, group.label, f"≤ {group.budget[0]:g}", len(group.rows),
                spread_text(group.statistic("perplexity")), against,
                "–" if seconds is None else f"{seconds:.0f}",
            ])  # fmt: skip
    head = (
        "transform", "method", "budget", "seeds", "perplexity", "minus best heuristic, %", "search, s",
    )  # fmt: skip
    return markdown(head, rows)


def references(groups: Iterable[Group]) -> str:
    """bf16 and uniform formats in a line."""
    return ", ".join(
        f"{g.label} {mean_perplexity(g):.2f}" for g in groups if g.search in (None, "uniform")
    )


def method_table(groups: Sequence[Group]) -> list[str]:
    """Method x budget."""
    searched = [g for g in groups if g.budget is not None and g.search != "uniform"]
    budgets = sorted({g.budget for g in searched if g.budget})
    cells = {(g.label, g.budget): g for g in searched}
    labels = sorted(dict.fromkeys(g.label for g in searched), key=lambda x: x.startswith("dMX"))
    rows = [
        [label]
        + [
            f"{_perplexity_text(found)} ({len(found.rows)})"
            if (found := cells.get((label, budget))) else "–"
            for budget in budgets
        ]
        for label in labels
    ]  # fmt: skip
    return markdown(["method", *(f"≤ {limit:g} {unit}" for limit, unit in budgets)], rows)


def _perplexity_text(group: Group) -> str:
    """Two decimals, also of a weak model."""
    return spread_text(group.statistic("perplexity"), 5 if mean_perplexity(group) >= 100 else 4)


def overview(tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    """Of the model and text of the bars: in each table the best heuristic and dMX, by budget."""
    shown = {t: g for t, g in sorted(tables.items(), key=lambda x: _order(x[0])) if t.has_bars}
    budgets = sorted({g.budget for groups in shown.values() for g in groups if g.budget})

    def cell(group: Group | None, name: str = "") -> str:
        if group is None:
            return "–"
        text = f"{mean_perplexity(group):.2f} ({len(group.rows)})"
        return f"{text} {name}".strip()

    rows = []
    for table, groups in shown.items():
        at = {b: [g for g in groups if g.budget == b] for b in budgets}
        best = [best_heuristic(at[b][0], at[b]) if at[b] else None for b in budgets]
        if any(best):
            cells = [cell(g, g.label if g else "") for g in best]
            rows.append([table.transform, table.rounding, "best heuristic", *cells])
        for label in dict.fromkeys(g.label for g in groups if is_dmx(g)):
            found = [next((g for g in at[b] if g.label == label), None) for b in budgets]
            rows.append([table.transform, table.rounding, label, *map(cell, found)])
    if not rows:
        return []
    heads = [f"≤ {limit:g} {unit}" for limit, unit in budgets]
    full = references(_unquantized(tables, next(iter(shown))))
    note = "Mean perplexity, seeds in brackets; lower is better."
    note = f"{note} {full}." if full else note
    return [*markdown(["transform", "rounding", "method", *heads], rows), "", note]


def bars(table: Table, group: Group, best: Group | None) -> tuple[str, str]:
    """(bar, reach): what is asked of dMX in this table at this budget, and met or missed."""
    limit = group.budget[0] if group.budget and group.budget[1] == "element_bits" else None
    if not table.has_bars or limit not in REACH:
        return "", ""
    gain = None if best is None else -percent(group, best)
    found = mean_perplexity(group)
    if table.transform == "none":
        if table.rounding != "nearest":
            return "", ""
        margin = PLAIN_MARGINS[limit]
        verdict = "no heuristic" if gain is None else met(gain >= margin)
        return f"≥ {margin:g} % below: {verdict}", ""
    bar = ""
    if table.rounding == "nearest":
        verdict = "no heuristic" if gain is None else met(gain >= ROTATED_MARGIN)
        wanted = ROTATED_PERPLEXITY[limit]
        bar = f"≤ {wanted:g}: {met(found <= wanted)}; ≥ {ROTATED_MARGIN:g} % below: {verdict}"
    return bar, f"≤ {REACH[limit]:g}: {met(found <= REACH[limit])}"


def against_heuristics(table: Table, tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    """A row for each dMX method and budget of a table."""
    groups = tables[table]
    rows = []
    for group in sorted(filter(is_dmx, groups), key=lambda g: (g.budget or (0.0, ""), g.label)):
        if group.budget is None:
            continue
        best, of_any = best_heuristic(group, groups), best_transformed(table, group, tables)
        bits = group.statistic(group.budget[1])
        named, overall = "–", ("–", "–")
        if best is not None:
            named = f"{best.label} {mean_perplexity(best):.2f}"
        if of_any is not None:
            transform, other = of_any
            overall = (
                f"{other.label}, {transform}: {mean_perplexity(other):.2f}",
                percent_text(group, other),
            )
        rows.append([
            f"≤ {group.budget[0]:g}", group.label, "–" if bits.mean is None else f"{bits.mean:.3f}",
            named, percent_text(group, best), *overall, *bars(table, group, best),
        ])  # fmt: skip
    head = [
        "budget", "method", "bits reached", "best heuristic", "minus it, %",
        "best heuristic, any transform", "minus it, %", "bar", "reach",
    ]  # fmt: skip
    for column in (8, 7):  # where nothing is asked, no column
        if not any(row[column] for row in rows):
            head.pop(column)
            rows = [row[:column] + row[column + 1 :] for row in rows]
    return markdown(head, rows) if rows else []


def task_tables(tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    """Zero-shot accuracy of all methods, and dMX against the best heuristic, item by item."""
    asked = {t: [found for g in groups if (found := _asked(g))] for t, groups in tables.items()}
    every = [g for groups in asked.values() for g in groups]
    tasks = zero_shot_tasks(every)
    accuracies, differences = [], []
    for table, groups in sorted(asked.items(), key=lambda item: _order(item[0])):
        full = next(iter(_unquantized(asked, table)), None)
        for group in sorted(groups, key=_by_budget):
            where = [
                table.model, "–" if group.search is None else table.setting, group.label,
                f"≤ {group.budget[0]:g}" if group.budget else "–", len(group.rows),
            ]  # fmt: skip
            shares = [accuracy(group, task) for task in tasks]
            known = [a.value for a in shares if a]
            mean = f"{100 * sum(known) / len(known):.1f}" if len(known) == len(tasks) else "–"
            accuracies.append(
                [*where, *(f"{100 * a.value:.1f}" if a else "–" for a in shares), mean]
            )
            for other in (best_heuristic(group, groups), full) if is_dmx(group) else ():
                if other is not None:
                    differences.append([*where, other.label, *_points(group, other, tasks)])
    if not accuracies:
        return []
    metrics = [
        f"{task}, {next(a.metric for g in every if (a := accuracy(g, task)))}" for task in tasks
    ]
    head = ("model", "transform", "method", "budget", "seeds")
    lines = [*markdown((*head, *metrics, "mean"), accuracies), "", "Percent right."]
    if differences:
        lines += [
            "", *markdown((*head, "minus", *tasks, "mean"), differences), "",
            "Percentage points, paired item by item, ± their standard error; seeds are averaged first. "
            "Bold: more than one standard error below. The best heuristic is that of perplexity.",
        ]  # fmt: skip
    return lines


def _by_budget(group: Group) -> tuple[Any, ...]:
    """Order of a table's rows: heuristics first at each budget."""
    return group.budget or (0.0, ""), is_dmx(group)


def _asked(group: Group) -> Group | None:
    """The group's rows that were measured on tasks."""
    rows = tuple(row for row in group.rows if row.get("zero_shot"))
    return replace(group, rows=rows) if rows else None


def _points(group: Group, reference: Group, tasks: Sequence[str]) -> list[str]:
    """Differences by task, and their mean where every task has one."""
    found = [item_difference(group, reference, task) for task in tasks]
    known = [(d.mean, d.stderr) for d in found if d.mean is not None and d.stderr is not None]
    cells = [_points_text(d.mean, d.stderr) for d in found]
    if len(known) < len(tasks):
        return [*cells, "–"]
    means, errors = zip(*known, strict=True)
    return [*cells, _points_text(sum(means) / len(means), math.hypot(*errors) / len(errors))]


def _points_text(mean: float | None, stderr: float | None) -> str:
    if mean is None or stderr is None:
        return "–"
    text = f"{100 * mean:+.1f} ± {100 * stderr:.1f}"
    return f"**{text}**" if mean < -SIGNIFICANT * stderr else text


def fused_table(tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    """What a choice for each fused group costs against one for each layer."""
    rows = []
    for table, groups in sorted(tables.items(), key=lambda item: _order(item[0])):
        if table.units == "layer":
            continue
        layer = {(g.label, g.budget): g for g in tables.get(replace(table, units="layer"), ())}
        for group in sorted(groups, key=_by_budget):
            other = layer.get((group.label, group.budget))
            if group.budget and other is not None:
                rows.append([
                    table.model, table.setting, group.label, f"≤ {group.budget[0]:g}",
                    f"{mean_perplexity(group):.2f} ({len(group.rows)})",
                    f"{mean_perplexity(other):.2f} ({len(other.rows)})", percent_text(group, other),
                ])  # fmt: skip
    head = ("model", "transform", "method", "budget", "fused", "layer", "fused minus layer, %")
    return markdown(head, rows) if rows else []


def kept_high(tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    """Share of layers above MXFP4 by projection; mean over seeds."""
    rows = []
    for table, groups in sorted(tables.items(), key=lambda item: _order(item[0])):
        if table.rounding != "nearest" or table.operands == "W":  # the same choices again
            continue
        for group in sorted(groups, key=_by_budget):
            counts = [row["format_counts"] for row in group.rows if row.get("format_counts")]
            if group.budget is None or group.search == "uniform" or not counts:
                continue
            sides = ("weight", "input") if table.is_separate else ("weight",)
            for side in sides:
                shares = [
                    sum(_share_high(c.get(side, c["weight"]).get(p, {})) for c in counts)
                    / len(counts)
                    for p in PROJECTIONS.values()
                ]
                rows.append([
                    table.model, table.setting, group.label,
                    f"≤ {group.budget[0]:g}" + (f", {side}s" if len(sides) > 1 else ""),
                    *(f"{100 * share:.0f}" for share in shares),
                ])  # fmt: skip
    head = ("model", "transform", "method", "budget", *PROJECTIONS.values())
    return markdown(head, rows) if rows else []


def _share_high(formats: Mapping[str, int]) -> float:
    total = sum(formats.values())
    return 1 - formats.get("mxfp4", 0) / total if total else 0.0


def picture(tables: Mapping[Table, Sequence[Group]]) -> tuple[Figure | None, str]:
    """dMX and the best heuristic over bits, for each transform of one model and text, rounded to
    nearest, at the budgets that all have: the test text of the model with most rows, the validation
    text where no test exists."""
    joint = {
        t: g for t, g in tables.items()
        if not t.is_separate and t.operands != "W" and t.units == "layer" and t.rounding == "nearest"
    }  # fmt: skip
    sizes: Counter[tuple[bool, str, str]] = Counter()
    for table, groups in joint.items():
        sizes[not is_validation(table), table.model, table.text] += sum(len(g.rows) for g in groups)
    if not sizes:
        return None, ""
    _, model, text = max(sizes, key=lambda key: (key[0], sizes[key]))
    of = {t: g for t, g in joint.items() if (t.model, t.text) == (model, text)}
    with_dmx = {t: {g.budget for g in groups if is_dmx(g)} for t, groups in of.items()}
    common = set.intersection(*filter(None, with_dmx.values())) if any(with_dmx.values()) else set()
    shown: list[Group] = []
    for table, groups in of.items():
        shown += [g for g in groups if g.search in (None, "uniform")]
        for budget in sorted(b for b in common if b is not None):
            at = [g for g in groups if g.budget == budget]
            if not at:
                continue
            ours = min(filter(is_dmx, at), key=mean_perplexity, default=None)
            theirs = best_heuristic(at[0], at)
            for found, what in ((theirs, "best heuristic"), (ours, "dmx")):
                if found is not None:
                    name = table.transform.replace("_", " ")
                    label = what if table.transform == "none" else f"{what} + {name}"
                    kind = "differentiable" if what == "dmx" else what
                    shown.append(replace(found, label=label, search=kind))
    return pareto(shown, zoom=True), f"{model}, {text}: the best dMX and the best heuristic."


def conditions(records: Sequence[Record]) -> list[str]:
    base = base_settings(records)
    models = dict.fromkeys(
        f"{model_name(r)}, {r['model']['dtype']}: {(r['model']['note'] or 'no note').strip()}"
        for r in records
    )
    data = dict.fromkeys(
        f"Text {text_name(r)}: {d['windows']} windows of {d['window']} tokens; calibration "
        f"{c['name']}, {c['batches']} batches of {c['batch_shape'][0]} x {c['batch_shape'][1]}."
        for r in records
        if (d := r["data"]["evaluation"]) and (c := r["data"]["calibration"])
    )
    devices = sorted({r["device"]["name"] for r in records})
    versions = sorted({r["versions"]["torch"] for r in records})
    asked = ", ".join(f"{key}={base[key]}" for key in _STATED)
    return [
        f"- All runs have {asked}, but for what a method's name says. Heuristics have the first two. "
        "dMX with a learned rotation: differs from search=learned. "
        "Units are layers where nothing else is said. dMX: search=exact; + polish: rounds of verified exchanges after it.",
        '- Bars are what this project asked of itself before it measured; a negative "minus it, %" is a lower perplexity. '
        "Fewer seeds than three: the run was stopped.",
        *(f"- {line}" for line in (*models, *data)),
        f"- Device: {', '.join(devices)}; torch {', '.join(versions)}; "
        f"{max(r['finished'] for r in records)[:10]}. Several runs shared a card, so seconds of a "
        "search are upper bounds.",
        "- ± after a perplexity: standard deviation over seeds, their number in brackets. ± after a "
        "difference: paired standard error over windows, with the scatter of seeds.",
    ]


def quality_page(records: Sequence[Record]) -> tuple[str, Figure | None]:
    """Text of quality.md, and its picture."""
    tables = pooled(records)
    searched = {t: g for t, g in tables.items() if any(x.budget for x in g)}
    validation = {t: g for t, g in searched.items() if is_validation(t)}
    test = {t: g for t, g in searched.items() if not is_validation(t)}
    lines = [
        "# quality",
        "",
        "Perplexity at equal bits: dMX, and heuristics on the same inputs.",
        "",
    ]
    lines += conditions(records)
    if found := overview(tables):
        lines += ["", f"## {BAR_MODEL}, {BAR_TEXT}, W+A: at a glance", "", *found]
    for table, groups in sorted(test.items(), key=lambda item: _order(item[0])):
        lines += ["", f"## {table.title}", ""]
        if line := references(groups + _unquantized(tables, table)):
            lines += [f"{line}.", ""]
        lines += method_table(groups)
        if compared := against_heuristics(table, test):
            lines += ["", *compared]
    if not test:
        lines += ["", "No records of a test text yet."]
    if fused := fused_table(test):
        lines += ["", "## Fused units against layer units", "", *fused, "", _FUSED_NOTE]
    if tasks := task_tables({t: g for t, g in tables.items() if not is_validation(t)}):
        lines += ["", "## Zero-shot tasks", "", *tasks]
    if validation:
        for model, text in dict.fromkeys((t.model, t.text) for t in validation):
            of = {t: g for t, g in validation.items() if (t.model, t.text) == (model, text)}
            known = [line for t, g in tables.items() if (t.model, t.text) == (model, text)
                     and (line := references(g))]  # fmt: skip
            lines += ["", f"## Settings, on the validation text: {model}, {text}", ""]
            if known:
                lines += [", ".join(known) + ".", ""]
            lines += ablation(of)
    for title, part in (("test texts", test), ("validation texts", validation)):
        if high := kept_high(part):
            lines += ["", f"## Layers above MXFP4, %, {title}", "", *high]
            lines += ["", "Share of the layers of each projection, mean over seeds."]
    figure, caption = picture(tables)
    if figure is not None:
        lines += ["", f"![{caption}](quality.png)", "", caption]
    return "\n".join(lines) + "\n", figure


def _unquantized(tables: Mapping[Table, Sequence[Group]], table: Table) -> list[Group]:
    """bf16 rows stand in a table of their own, for they have no operands."""
    return [
        g for t, groups in tables.items() if (t.model, t.text) == (table.model, table.text)
        for g in groups if g.search is None
    ]  # fmt: skip


def _order(table: Table) -> tuple[Any, ...]:
    return (
        not table.model.startswith(BAR_MODEL), table.model, table.text, table.operands == "W",
        table.is_separate, table.units != "layer", table.transform != "none", table.transform,
        table.rounding != "nearest",
    )  # fmt: skip
