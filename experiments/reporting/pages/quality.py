"""docs/results/quality.md: all `quality_*` records of experiments.compare in one page."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from experiments.reporting.maps import PROJECTIONS
from experiments.reporting.markdown import markdown, met
from experiments.reporting.plots import difference_figure
from experiments.reporting.quality_tables import (
    BAR_MODEL,
    BAR_TEXT,
    Table,
    base_settings,
    best_heuristic,
    common,
    is_validation,
    mean_perplexity,
    model_name,
    percent,
    percent_text,
    pooled,
    search_file,
    text_name,
)
from experiments.reporting.reading import Record
from experiments.reporting.results import (
    SIGNIFICANT,
    Group,
    accuracy,
    bits_unit,
    item_difference,
    paired_difference,
    points_text,
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

_MADE_BY = [
    "- Made by `experiments.compare model=smollm2_135m_instruct_gguf data=wikitext2 search.units=layer search.steps=200 "
    'search.score_batches=8 seeds=3 "budgets=[4.25,4.5,5,5.5,6]" "rounding=[nearest,gptq]" eval=zero_shot` with '
    '`search=polished "searches=[kl_per_bit,fisher,differentiable,differentiable+polish]"`; with `search=exact` and '
    "`search.transform=hadamard_block`; with `search=learned` (without `search.steps`). Besides: `search.units=fused`, "
    "`search.operands=separate`. Each record in docs/results/records holds all its settings.",
]

_FUSED_NOTE = (
    "Perplexity, runs in brackets. Fused: q, k and v have one format, gate and up have one, as runtimes "
    "that merge them need."
)


def ablation(tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    rows = []
    for table, groups in tables.items():
        for group in sorted(groups, key=lambda g: (g.budget or (0.0, ""), mean_perplexity(g))):
            if group.budget is None or group.search == "uniform":
                continue
            best = best_heuristic(group.budget, groups)
            against = "no heuristic" if best is None else percent_text(group, best)
            seconds = group.statistic("search_seconds").mean
            rows.append([
                table.setting, group.label, _limit(group.budget), len(group.rows),
                spread_text(group.statistic("perplexity")), against,
                "–" if seconds is None else f"{seconds:.0f}",
            ])  # fmt: skip
    head = (
        "transform", "method", "budget", "runs", "perplexity", "minus best heuristic, %", "search, s",
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
    return markdown(["method", *map(_limit, budgets)], rows)


def _limit(budget: tuple[float, str] | None) -> str:
    """As a table's cell; element_bits go without saying."""
    if budget is None:
        return "–"
    return f"≤ {budget[0]:g}" + ("" if budget[1] == "element_bits" else f" {budget[1]}")


def _perplexity_text(group: Group) -> str:
    """Two decimals, also of a weak model."""
    return spread_text(group.statistic("perplexity"), 5 if mean_perplexity(group) >= 100 else 4)


def overview(tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    """Of the model and text of the bars: in each table the best heuristic and dMX, by budget."""
    shown = {t: g for t, g in _ordered(tables) if t.has_bars}
    budgets = sorted({g.budget for groups in shown.values() for g in groups if g.budget})

    def cell(group: Group | None, name: str = "") -> str:
        if group is None:
            return "–"
        text = f"{mean_perplexity(group):.2f} ({len(group.rows)})"
        return f"{text} {name}".strip()

    rows = []
    for table, groups in shown.items():
        best = [best_heuristic(budget, groups) for budget in budgets]
        if any(best):
            cells = [cell(g, g.label if g else "") for g in best]
            rows.append([table.transform, table.rounding, "best heuristic", *cells])
        for label in dict.fromkeys(g.label for g in groups if g.is_dmx):
            of = {g.budget: g for g in groups if g.label == label}
            rows.append(
                [table.transform, table.rounding, label, *(cell(of.get(b)) for b in budgets)]
            )
    if not rows:
        return []
    heads = map(_limit, budgets)
    first = next(iter(shown))
    full = references(_unquantized(tables, first.model, first.text))
    note = "Mean perplexity, runs in brackets; lower is better."
    note = f"{note} {full}." if full else note
    return [*markdown(["transform", "rounding", "method", *heads], rows), "", note]


def bars(table: Table, group: Group, best: Group | None) -> str:
    """What is asked of dMX in this table at this budget, and whether it is met."""
    limit = group.budget[0] if group.budget and group.budget[1] == "element_bits" else None
    if not table.has_bars or limit not in REACH:
        return ""

    def margin(wanted: float) -> str:
        if best is None:
            return f"≥ {wanted:g} % below: no heuristic"
        found = -percent(group, best)
        return f"≥ {wanted:g} % below: {found:.2f}, {met(found >= wanted)}"

    def at_most(wanted: float) -> str:
        return f"≤ {wanted:g}: {met(mean_perplexity(group) <= wanted)}"

    nearest = table.rounding == "nearest"
    if table.transform == "none":
        return margin(PLAIN_MARGINS[limit]) if nearest else ""
    found = [at_most(ROTATED_PERPLEXITY[limit]), margin(ROTATED_MARGIN)] if nearest else []
    return "; ".join([*found, f"reach {at_most(REACH[limit])}"])


def difference_table(tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    """Of one model: every dMX method minus the best heuristic of its table, by budget, and a
    sentence that counts."""
    budgets = sorted({g.budget for groups in tables.values() for g in groups if g.budget})
    rows, verdicts = [], Counter[str]()
    for table, groups in _ordered(tables):
        for label in dict.fromkeys(g.label for g in groups if g.is_dmx):
            cells = []
            for budget in budgets:
                at = {g.label: g for g in groups if g.budget == budget}
                ours, best = at.get(label), best_heuristic(budget, groups)
                if ours is None or best is None:
                    cells.append("–")
                    continue
                verdict = _verdict(ours, best)
                verdicts[verdict] += verdict != "same"
                text = verdict if verdict == "same" else percent_text(ours, best)
                cells.append({"lower": f"**{text}**", "higher": f"*{text}*"}.get(verdict, text))
            if any(cell != "–" for cell in cells):
                rows.append([table.setting, label, *cells])
    if not rows:
        return []
    note = "Perplexity minus that of the best heuristic, %."
    if verdicts.total():
        note += (
            f" dMX is lower by more than one standard error in {verdicts['lower']} of {verdicts.total()} cells "
            f"(bold), higher in {verdicts['higher']} (italic)."
        )
    if any("same" in row for row in rows):
        note += " Same: no difference at all, as where every layer can have the dearest format."
    return [*markdown(["transform", "method", *map(_limit, budgets)], rows), "", note]


def _verdict(group: Group, reference: Group) -> str:
    found = paired_difference(*common(group, reference))
    if found.mean is not None and abs(found.mean) < 1e-12:  # sums of other orders apart
        return "same"
    if not found.is_clear:
        return "within"
    return "lower" if (found.mean or 0.0) < 0 else "higher"


def bar_table(tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    """What was asked of dMX, what it reached, and whether that is met."""
    rows = []
    for table, groups in _ordered(tables):
        for group in sorted(
            (g for g in groups if g.is_dmx), key=lambda g: (g.budget or (0.0, ""), g.label)
        ):
            best = best_heuristic(group.budget, groups)
            if wanted := bars(table, group, best):
                rows.append([
                    table.setting, _limit(group.budget), group.label, f"{mean_perplexity(group):.2f}",
                    percent_text(group, best), wanted,
                ])  # fmt: skip
    head = ("transform", "budget", "method", "perplexity", "minus best heuristic, %", "asked")
    note = (
        "Asked before it was measured. What a bar that is missed was tried with, and why it stops there: "
        "[lab notes](../lab-notes.md)."
    )
    return [*markdown(head, rows), "", note] if rows else []


def task_tables(tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    """Of one model: zero-shot accuracy of all methods, and dMX against the best heuristic, item by
    item."""
    measured = {
        t: [found for g in groups if (found := _with_tasks(g))] for t, groups in tables.items()
    }
    every = [g for groups in measured.values() for g in groups]
    tasks = zero_shot_tasks(every)
    full = next((g for g in every if g.search is None), None)
    accuracies, differences = [], []
    for table, groups in sorted(measured.items(), key=lambda x: (full not in x[1], _order(x[0]))):
        for group in sorted(groups, key=_by_budget):
            where = [
                "–" if group is full else table.setting, group.label, _limit(group.budget), len(group.rows),
            ]  # fmt: skip
            shares = [accuracy(group, task) for task in tasks]
            known = [a.value for a in shares if a]
            mean = f"{100 * sum(known) / len(known):.1f}" if len(known) == len(tasks) else "–"
            accuracies.append(
                [*where, *(f"{100 * a.value:.1f}" if a else "–" for a in shares), mean]
            )
            best = best_heuristic(group.budget, tables[table])
            for other in (best and _with_tasks(best), full) if group.is_dmx else ():
                if other is not None:
                    differences.append([*where, other.label, *_points(group, other, tasks)])
    if not accuracies:
        return []
    metrics = [
        ", ".join([task, *{a.metric: None for g in every if (a := accuracy(g, task))}])
        for task in tasks
    ]
    head = ("transform", "method", "budget", "runs")
    lines = [*markdown((*head, *metrics, "mean"), accuracies), "", "Percent right."]
    if differences:
        lines += [
            "", *markdown((*head, "minus", *tasks, "mean"), differences), "",
            "Percentage points, paired item by item, ± their standard error; runs are averaged first. "
            "Bold: dMX is better by more than one standard error; italic: worse. The best heuristic is that of perplexity.",
        ]  # fmt: skip
    return lines


def _by_budget(group: Group) -> tuple[Any, ...]:
    """Order of a table's rows: heuristics first at each budget."""
    return group.budget or (0.0, ""), group.is_dmx


def _with_tasks(group: Group) -> Group | None:
    """The group's rows that were measured on tasks."""
    rows = tuple(row for row in group.rows if row.get("zero_shot"))
    return replace(group, rows=rows) if rows else None


def _points(group: Group, reference: Group, tasks: Sequence[str]) -> list[str]:
    """Differences by task, and their mean where every task has one."""
    found = [item_difference(group, reference, task) for task in tasks]
    known = [(d.mean, d.stderr) for d in found if d.mean is not None and d.stderr is not None]
    cells = [_marked(d.mean, d.stderr) for d in found]
    if len(known) < len(tasks):
        return [*cells, "–"]
    means, errors = zip(*known, strict=True)
    return [*cells, _marked(sum(means) / len(means), math.hypot(*errors) / len(errors))]


def _marked(mean: float | None, stderr: float | None) -> str:
    """Points; bold where dMX is better by more than a standard error, italic where it is worse."""
    text = points_text(mean, stderr)
    if mean is None or stderr is None or abs(mean) <= SIGNIFICANT * stderr:
        return text
    return f"**{text}**" if mean > 0 else f"*{text}*"


def fused_table(tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    """Of one model: what a choice for each fused group costs against one for each layer."""
    rows = []
    for table, groups in _ordered(tables):
        if table.units == "layer":
            continue
        layer = {(g.label, g.budget): g for g in tables.get(replace(table, units="layer"), ())}
        for group in sorted(groups, key=_by_budget):
            other = layer.get((group.label, group.budget))
            if group.budget and other is not None:
                rows.append([
                    table.setting, group.label, _limit(group.budget),
                    f"{mean_perplexity(group):.2f} ({len(group.rows)})",
                    f"{mean_perplexity(other):.2f} ({len(other.rows)})", percent_text(group, other),
                ])  # fmt: skip
    head = ("transform", "method", "budget", "fused", "layer", "fused minus layer, %")
    return [*markdown(head, rows), "", _FUSED_NOTE] if rows else []


def kept_high(tables: Mapping[Table, Sequence[Group]]) -> list[str]:
    """Of one model: share of layers above MXFP4 by projection; mean over runs."""
    rows = []
    counted = [
        projection for groups in tables.values() for g in groups for row in g.rows
        for projection in (row.get("format_counts") or {}).get("weight", {})
    ]  # fmt: skip
    usual = [p for p in PROJECTIONS.values() if p in counted]
    projections = [*usual, *(p for p in dict.fromkeys(counted) if p not in usual)]
    for table, groups in _ordered(tables):
        if table.rounding != "nearest" or table.operands == "W":  # the same choices again
            continue
        for group in sorted(groups, key=_by_budget):
            counts = [row["format_counts"] for row in group.rows if row.get("format_counts")]
            if group.budget is None or group.search == "uniform" or not counts:
                continue
            sides = ("weight", "input") if table.is_separate else ("weight",)
            for side in sides:
                shares = [
                    [_share_high(of) for c in counts if (of := c.get(side, c["weight"]).get(p))]
                    for p in projections
                ]
                if any(min(of, default=1) < 1 for of in shares):  # else nothing was chosen
                    rows.append([
                        table.setting, group.label,
                        _limit(group.budget) + (f", {side}s" if len(sides) > 1 else ""),
                        *(f"{100 * sum(of) / len(of):.0f}" if of else "–" for of in shares),
                    ])  # fmt: skip
    head = ("transform", "method", "budget", *projections)
    note = "Share of the layers of each projection, mean over runs."
    return [*markdown(head, rows), "", note] if rows else []


def _share_high(formats: Mapping[str, int]) -> float:
    total = sum(formats.values())
    return 1 - formats.get("mxfp4", 0) / total if total else 0.0


def picture(tables: Mapping[Table, Sequence[Group]]) -> tuple[Figure | None, str]:
    """dMX and the best heuristic by budget, a curve for each transform and rounding of one model and
    text: the test text of the model with most rows, the validation text where no test exists."""
    joint = {
        t: g for t, g in tables.items()
        if not t.is_separate and t.operands != "W" and t.units == "layer"
    }  # fmt: skip
    sizes: Counter[tuple[bool, str, str]] = Counter()
    for table, groups in joint.items():
        sizes[not is_validation(table), table.model, table.text] += sum(len(g.rows) for g in groups)
    if not sizes:
        return None, ""
    _, model, text = max(sizes, key=lambda key: (key[0], sizes[key]))
    of = [(t, groups) for t, groups in _ordered(joint) if (t.model, t.text) == (model, text)]
    unit = bits_unit([g for _, groups in of for g in groups])
    curves = []
    for table, groups in of:
        points = []
        for budget in sorted({g.budget for g in groups if g.budget and g.budget[1] == unit}):
            found = [g for g in groups if g.budget == budget and g.is_dmx]
            ours = min(found, key=mean_perplexity, default=None)
            theirs = best_heuristic(budget, groups)
            if ours is not None and theirs is not None:
                ours, theirs = common(ours, theirs)
                noise = paired_difference(ours, theirs).noise or 0.0
                points.append(
                    (budget[0], mean_perplexity(ours), mean_perplexity(theirs), 100 * noise)
                )
        if points:
            curves.append((table.setting.replace("_", " "), points))
    if not curves:
        return None, ""
    full = [mean_perplexity(g) for g in _unquantized(tables, model, text)]
    return (
        difference_figure(curves, full[0] if full else None, unit),
        f"{model}, {text}: of each transform and rounding the dMX method and the heuristic that are best on this text.",
    )


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
    units = sorted(
        {row["budget"]["unit"] for r in records for row in r["results"] if row["budget"]}
    )
    is_ours = any(
        r["model"]["id"].startswith(BAR_MODEL) and text_name(r) == BAR_TEXT for r in records
    )
    made_by = _MADE_BY if is_ours else []
    shared = ""
    if _shared(records):
        shared = " Several runs shared a card, so seconds of a search are upper bounds."
    return [
        f"- All runs have {asked}, but for what a method's name says. Heuristics have the first two. "
        f"With a learned rotation names say what differs from search=learned (steps={search_file('learned')['steps']}). "
        "Units are layers where nothing else is said. "
        "dMX: search=exact; + polish: rounds of verified exchanges after it.",
        f"- Budgets are in {' or '.join(units)}. {_reached(records)}",
        "- A heuristic has the transform and rounding of the dMX beside it; with a learned rotation it is given the one that dMX learned.",
        "- The best heuristic of a cell is the one with the lowest mean perplexity on that text itself.",
        *made_by,
        *(f"- {line}" for line in (*models, *data)),
        f"- Device: {', '.join(devices)}; torch {', '.join(versions)}; "
        f"{max(r['finished'] for r in records)[:10]}.{shared}",
        "- ± after a perplexity: standard deviation over seeds, each the mean of its runs (a search on a card is not the "
        "same twice). In brackets: runs. ± after a difference: paired standard error over windows, with the scatter of "
        "seeds; on the seeds that both have.",
    ]


def _shared(records: Sequence[Record]) -> bool:
    """Whether two runs on one kind of card overlap in time."""
    for device in {r["device"]["name"] for r in records}:
        spans = sorted(
            (r["started"], r["finished"]) for r in records
            if r["device"]["name"] == device and r["started"] and r["finished"]
        )  # fmt: skip
        if any(after[0] < before[1] for before, after in itertools.pairwise(spans)):
            return True
    return False


def _reached(records: Sequence[Record]) -> str:
    """How near choices come to their budgets; less than 0 would exceed them."""
    left = [
        row["budget"]["limit"] - row[row["budget"]["unit"]]
        for record in records
        for row in record["results"]
        if row.get("budget") and row.get(row["budget"]["unit"]) is not None
    ]
    return f"Bits that choices leave unused: {min(left):.3f} to {max(left):.3f}." if left else ""


def quality_page(records: Sequence[Record]) -> tuple[str, Figure | None]:
    """Text of quality.md, and its picture."""
    tables = pooled(records)
    searched = {t: g for t, g in tables.items() if any(x.budget for x in g)}
    validation = {t: g for t, g in searched.items() if is_validation(t)}
    test = {t: g for t, g in searched.items() if not is_validation(t)}
    figure, caption = picture(tables)
    lines = [
        "# quality",
        "",
        "Perplexity at equal bits: dMX, and heuristics on the same inputs. "
        "Which setting to take: [README](../../README.md#results).",
    ]

    def add(title: str, part: Sequence[str]) -> None:
        if part:
            lines.extend(["", f"## {title}", "", *part])

    if figure is not None:
        lines += ["", f"![{caption}](quality.png)", "", caption]
    add(f"{BAR_MODEL}, {BAR_TEXT}, W+A: at a glance", overview(tables))
    for of, name in _by_text(test):
        add(f"Against the best heuristic: {name}", difference_table(of))
    add("What was asked", bar_table(test))
    add("How it was measured", conditions(records))
    for table, groups in _ordered(test):
        line = references(list(groups) + _unquantized(tables, table.model, table.text))
        add(table.title, [*([f"{line}.", ""] if line else []), *method_table(groups)])
    if not test:
        lines += ["", "No records of a test text yet."]
    every = {t: g for t, g in tables.items() if not is_validation(t)}
    for title, part, source in (
        ("Fused units against layer units", fused_table, test),
        ("Zero-shot tasks", task_tables, every),
        ("Layers above MXFP4, %", kept_high, test or validation),
    ):
        for of, name in _by_text(source):
            add(f"{title}: {name}", part(of))
    for of, name in _by_text(validation):
        first = next(iter(of))
        known = [g for groups in of.values() for g in groups]
        line = references(known + _unquantized(tables, first.model, first.text))
        add(
            f"Settings, on the validation text: {name}",
            [*([f"{line}.", ""] if line else []), *ablation(of)],
        )
    return "\n".join(lines) + "\n", figure


def _unquantized(tables: Mapping[Table, Sequence[Group]], model: str, text: str) -> list[Group]:
    """bf16 rows stand in a table of their own, for they have no operands."""
    return [
        g for t, groups in tables.items() if (t.model, t.text) == (model, text)
        for g in groups if g.search is None
    ]  # fmt: skip


def _order(table: Table) -> tuple[Any, ...]:
    return (
        not table.model.startswith(BAR_MODEL), table.model, table.text, table.operands == "W",
        table.is_separate, table.units != "layer", table.transform != "none", table.transform,
        table.rounding != "nearest",
    )  # fmt: skip


def _ordered(tables: Mapping[Table, Sequence[Group]]) -> list[tuple[Table, Sequence[Group]]]:
    return sorted(tables.items(), key=lambda item: _order(item[0]))


def _by_text(
    tables: Mapping[Table, Sequence[Group]],
) -> list[tuple[dict[Table, Sequence[Group]], str]]:
    """Tables of one model and text, and its name; the text where the model has several."""
    places = dict.fromkeys((t.model, t.text) for t, _ in _ordered(tables))
    texts = Counter(model for model, _ in places)
    return [
        (
            {t: g for t, g in tables.items() if (t.model, t.text) == place},
            ", ".join(place) if texts[place[0]] > 1 else place[0],
        )
        for place in places
    ]
