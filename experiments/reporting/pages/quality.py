"""docs/results/quality.md and its appendices: all `quality_*` records of experiments.compare."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..differences import common, paired_difference
from ..groups import INPUTS_NOTE, bits_unit, budget_cell
from ..markdown import markdown
from ..plots.budgets import BudgetPoint, difference_figure
from ..pooling import (
    DESCENT,
    Presets,
    Table,
    Tables,
    base_settings,
    by_text,
    main_place,
    model_name,
    ordered,
    pooled,
    text_name,
    unquantized,
)
from ..record import Record
from .cells import (
    best_heuristic,
    by_budget,
    mean_perplexity,
    percent_text,
    runs_text,
    verdict,
)
from .experts import experts_tables
from .glance import glance_table, settings_of
from .headline import drawn, sentences
from .quality_ablation import ablation_page
from .quality_methods import methods_page
from .quality_tasks import tasks_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STATED = (
    "family", "score_batches", "steps", "objective", "descent.penalty", "descent.gradient_scale",
    "descent.lr", "descent.lr_schedule", "descent.momentum",
)  # fmt: skip
"""Named once on the page; heuristics have the first two."""
_MADE_BY_MODEL = "SmolLM2-135M"
_MADE_BY = (
    "- Made by `dmx compare model=smollm2_135m_instruct_gguf data=wikitext2 search.units=layer search.steps=200 "
    'search.score_batches=8 seeds=3 "budgets=[4.25,4.5,5,5.5,6]" "weights=[nearest,gptq]" eval=zero_shot` with '
    '`search=polished "searches=[kl_per_bit,fisher,differentiable,differentiable+polish]"`; with `search=exact` and '
    "`search.transform=hadamard_block`; with `search=learned` (without `search.steps`). Besides: `search.units=fused`, "
    "`search.choices=separate`. Each record in docs/results/records holds all its settings."
)
_FUSED_NOTE = (
    "Perplexity, runs in brackets. Fused: q, k and v have one format, gate and up have one, as runtimes "
    "that merge them need."
)


@dataclass
class Pages:
    """What the records of quality give."""

    texts: dict[str, str] = field(default_factory=dict)
    """File name -> markdown."""
    pictures: dict[str, Figure] = field(default_factory=dict)
    """File name -> figure."""


def quality_pages(records: Sequence[Record], presets: Presets) -> Pages:
    """quality.md with its picture, and its appendices."""
    tables = pooled(records, presets)
    searched = {t: g for t, g in tables.items() if any(x.budget for x in g)}
    test = {t: g for t, g in searched.items() if not t.is_validation}
    pages = Pages()
    lines = ["# quality", ""]
    if said := sentences(tables, test):
        lines += [" ".join(said), ""]
    lines += [
        "Perplexity at equal bits: dMX, and heuristics on the same inputs. In full, with standard deviations "
        "over seeds: [every method](quality_methods.md). Besides: [zero-shot tasks](quality_tasks.md), "
        "[settings of the search](quality_ablation.md). Which setting to take: [README](../../README.md)."
    ]
    figure, caption = picture(tables)
    if figure is not None:
        pages.pictures["quality.png"] = figure
        lines += ["", f"![{caption}](quality.png)", "", caption]

    def add(title: str, part: Sequence[str]) -> None:
        if part:
            lines.extend(["", f"## {title}", "", *part])

    add(f"{', '.join(main_place(tables))}, W+A: at a glance", glance_table(tables))
    for of, name in by_text(test):
        add(f"Against the best heuristic: {name}", difference_table(of))
    for of, name in by_text(test):
        add(f"Fused units against layer units: {name}", fused_table(of))
    for of, name in by_text(test):
        add(f"Experts: {name}", experts_tables(of, tables))
    if not test:
        lines += ["", "No records of a test text yet."]
    add("How it was measured", conditions(records, presets))
    pages.texts["quality.md"] = "\n".join(lines) + "\n"
    if test:
        pages.texts["quality_methods.md"] = methods_page(tables, test)
    if text := tasks_page(tables):
        pages.texts["quality_tasks.md"] = text
    if text := ablation_page(tables):
        pages.texts["quality_ablation.md"] = text
    return pages


# --- tables ----------------------------------------------------------------------------------------


def difference_table(tables: Tables) -> list[str]:
    """Of one model: every dMX method minus the best heuristic of its table, by budget, and a
    sentence that counts."""
    budgets = sorted(
        {
            g.budget
            for groups in tables.values()
            for g in groups
            if g.method.is_dmx and g.budget and best_heuristic(g.budget, groups)
        }
    )
    rows, verdicts = [], Counter[str]()
    for table, groups in ordered(tables):
        for label in dict.fromkeys(g.method.short_label for g in groups if g.method.is_dmx):
            cells = []
            for budget in budgets:
                at = {g.method.short_label: g for g in groups if g.budget == budget}
                ours, best = at.get(label), best_heuristic(budget, groups)
                if ours is None or best is None:
                    cells.append("–")
                    continue
                said = verdict(ours, best)
                verdicts[said] += said != "same"
                text = said if said == "same" else percent_text(ours, best)
                cells.append({"lower": f"**{text}**", "higher": f"*{text}*"}.get(said, text))
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
    return [*markdown(["setting", "method", *map(budget_cell, budgets)], rows), "", note]


def fused_table(tables: Tables) -> list[str]:
    """Of one model: what a choice for each fused group costs against one for each layer."""
    rows = []
    for table, groups in ordered(tables):
        if table.shared.units == "layer":
            continue
        alike = tables.get(replace(table, shared=replace(table.shared, units="layer")), ())
        layer = {(g.method.short_label, g.budget): g for g in alike}
        for group in sorted(groups, key=by_budget):
            other = layer.get((group.method.short_label, group.budget))
            if group.budget and other is not None:
                rows.append(
                    [
                        table.setting,
                        group.method.short_label,
                        budget_cell(group.budget),
                        runs_text(group),
                        runs_text(other),
                        percent_text(group, other),
                    ]
                )
    head = ("setting", "method", "budget", "fused", "layer", "fused minus layer, %")
    return [*markdown(head, rows), "", _FUSED_NOTE] if rows else []


def picture(tables: Tables) -> tuple[Figure | None, str]:
    """dMX and the best heuristic by budget, a curve for each setting that `drawn` takes, of the main model
    and text."""
    model, text = main_place(tables)
    settings = settings_of(tables)
    unit = bits_unit([g for setting in settings for g in setting.groups])
    curves = []
    for setting in drawn(settings):
        points = []
        for budget in (b for b in setting.budgets if b.unit == unit):
            ours, theirs = setting.at(budget).ours, setting.at(budget).heuristic
            if ours is None:
                continue
            if theirs is None or theirs is ours:
                points.append(BudgetPoint(budget.limit, mean_perplexity(ours), math.nan, math.nan))
                continue
            ours, theirs = common(ours, theirs)
            noise = 100 * (paired_difference(ours, theirs).noise or 0.0)
            values = mean_perplexity(ours), mean_perplexity(theirs)
            points.append(BudgetPoint(budget.limit, *values, noise))
        if points:
            curves.append((setting.label, points))
    if not curves:
        return None, ""
    full = [mean_perplexity(g) for g in unquantized(tables, model, text)]
    caption = f"{model}, {text}: of each setting the dMX method and the heuristic that are best on this text."
    if hidden := len(settings) - len(curves):
        caption += f" Not drawn: {hidden} settings that are worse, nearly as another, or measured at one budget."
    return difference_figure(curves, full[0] if full else None, unit), caption


# --- how it was measured ---------------------------------------------------------------------------


def conditions(records: Sequence[Record], presets: Presets) -> list[str]:
    """Settings, models, texts, devices, and what ± means."""
    base = base_settings(records, presets)
    models = dict.fromkeys(
        f"{model_name(r)}, {r.model.dtype}: {(r.model.note or 'no note').strip()}" for r in records
    )
    data = dict.fromkeys(
        f"Text {text_name(r)}: {d.windows} windows of {d.window} tokens; calibration "
        f"{c.name}, {c.batches} batches of {c.batch_shape[0]} x {c.batch_shape[1]}."
        for r in records
        if (d := r.data["evaluation"]) and (c := r.data.get("calibration")) and c.batch_shape
    )
    devices = sorted({r.device.name for r in records})
    versions = sorted({r.versions["torch"] for r in records})
    asked = ", ".join(f"{key.removeprefix(DESCENT)}={base[key]}" for key in _STATED)
    units = sorted({row.budget.unit for r in records for row in r.rows if row.budget})
    made_by = [_MADE_BY] if any(r.model.id.startswith(_MADE_BY_MODEL) for r in records) else []
    inputs = (
        [INPUTS_NOTE] if any(row.method.input_format for r in records for row in r.rows) else []
    )
    shared = ""
    if _overlap(records):
        shared = " Several runs shared a card, so seconds of a search are upper bounds."
    return [
        f"- All runs have {asked}, but for what a method's name says. Heuristics have the first two. "
        f"With a learned rotation names say what differs from search=learned (steps={presets.learned['steps']}). "
        "Units are layers where nothing else is said. "
        "dMX: search=exact; + polish: rounds of verified exchanges after it.",
        f"- Budgets are in {' or '.join(units)}. {_unused(records)}",
        "- A heuristic has the transform and weights of the dMX beside it; with a learned rotation it is given the one that dMX learned.",
        "- The best heuristic of a cell is the one with the lowest mean perplexity on that text itself.",
        *made_by,
        *(f"- {line}" for line in (*inputs, *models, *data, *_learning(records))),
        f"- Device: {', '.join(devices)}; torch {', '.join(versions)}; "
        f"{max(r.finished for r in records)[:10]}.{shared}",
        "- ± after a perplexity: standard deviation over seeds, each the mean of its runs (a search on a card is not the "
        "same twice). In brackets: runs. ± after a difference: paired standard error over windows, with the scatter of "
        "seeds; on the seeds that both have.",
    ]


def _learning(records: Sequence[Record]) -> list[str]:
    """How weights learned, by setting, also where it goes without saying."""
    known: dict[str, list[str]] = {}
    for record in records:
        drawn = record.data.get("training") or record.data.get("calibration")
        for row in record.rows:
            facts = row.weights or {}
            if "steps" in facts and drawn is not None and drawn.batch_shape is not None:
                batch, window = drawn.batch_shape
                said = f"{facts['steps']} steps of {batch} x {window} tokens at {facts['lr']:g}"
                settings = known.setdefault(said, [])
                setting = Table.of("", text_name(record), row.method).title.removeprefix(", ")
                if setting not in settings:
                    settings.append(setting)
    return [f"Learned in {said}: {'; '.join(of)}." for said, of in sorted(known.items())]


def _overlap(records: Sequence[Record]) -> bool:
    """Whether two runs on one kind of card overlap in time."""
    for device in {r.device.name for r in records}:
        known = [r for r in records if r.device.name == device]
        spans = sorted((r.started, r.finished) for r in known if r.started)
        if any(after[0] < before[1] for before, after in itertools.pairwise(spans)):
            return True
    return False


def _unused(records: Sequence[Record]) -> str:
    """How near choices come to their budgets; less than 0 would exceed them."""
    left = [
        row.budget.limit - bits
        for record in records
        for row in record.rows
        if row.budget and (bits := row.metric(row.budget.unit)) is not None
    ]
    return f"Bits that choices leave unused: {min(left):.3f} to {max(left):.3f}." if left else ""
