"""Report of training runs: loss curves of all recipes over each other, and what MoR decided.

Everything comes from the files of the run folder: record.json, and for each row the logs in its
own folder (train.jsonl, validation.jsonl, mor.jsonl).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dmx.files import write_text
from mor.log import read_log
from mor.state import OPERANDS
from mor.training import read_rows

from .groups import RecipeGroup, group_recipes
from .html import Html, el, page, picture, scroll_table, section
from .plots.training import fallback_map, loss_lines
from .reading import read_record
from .recipes import comparison, comparison_text
from .report_settings import asked_and_ran, environment
from .tables import recipe_cells


def write_training_report(folder: Path) -> Path:
    """Write report.html of a training run; the path of the page.

    Raises:
        RunError: record.json is missing or of another schema.
    """
    record = read_record(folder)
    groups = group_recipes(record.training_rows)
    sentences = [comparison_text(entry) for entry in comparison(record.training_rows)]
    text = page(
        f"MoR training report: {record.model.id}",
        " · ".join((record.model.id, record.command, record.finished)),
        record.warnings,
        Html(el("h1", "Training with MoR") + "".join(el("p", s) for s in sentences)),
        [
            section("Results", _results(groups)),
            section("Loss", _loss_pictures(folder, groups)),
            section("What was decided", _decisions(folder, groups)),
            section("What was asked and what ran", asked_and_ran(record)),
            section("Environment", environment(record)),
        ],
    )
    return write_text(folder / "report.html", text)


def _results(groups: Sequence[RecipeGroup]) -> Html:
    names = ("recipe", "seeds", "validation loss", "perplexity", "FP8 tensors", "tokens/s")
    head = el("tr", (el("th", n, scope="col", cls=None if n == "recipe" else "num") for n in names))
    rows = []
    for group in groups:
        row = (el("td", c, cls="num") for c in recipe_cells(group))
        rows.append(el("tr", el("th", group.label, scope="row"), row))
    note = "Loss in nats/token on the validation text at the last step; ± over seeds."
    return el("div", scroll_table(head, rows), el("p", note, cls="note"))


def _loss_pictures(folder: Path, groups: Sequence[RecipeGroup]) -> Html:
    pictures = []
    for name, title in (("validation", "Validation loss"), ("train", "Training loss, smoothed")):
        curves = []
        for group in groups:
            for row in group.rows:
                rows = read_rows(folder / row.folder / f"{name}.jsonl")
                curves.append((group.label, [r["step"] for r in rows], [r["loss"] for r in rows]))
        figure = loss_lines(curves, smoothed=name == "train")
        pictures.append(picture(figure, f"{title}; one line a seed."))
    return el("div", pictures, cls="figures")


def _decisions(folder: Path, groups: Sequence[RecipeGroup]) -> list[Html]:
    """Table of shares by operand, and a heat map for each recipe's first seed."""
    with_mor = [g for g in groups if g.rows[0].operands]
    if not with_mor:
        return []
    names = (el("th", n.replace("_", " "), scope="col", cls="num") for n in OPERANDS)
    rows, maps = [], []
    for group in with_mor:
        decided = [row.operands for row in group.rows if row.operands]
        shares = [np.mean([1 - of[n]["element_share"]["bf16"] for of in decided]) for n in OPERANDS]
        cells = (el("td", f"{100 * share:.2f} %", cls="num") for share in shares)
        rows.append(el("tr", el("th", group.label, scope="row"), cells))
        header, log = read_log(folder / group.rows[0].folder / "mor.jsonl")
        caption = (
            f"{group.label}, seed {group.rows[0].seed}: share of elements in BF16, layers from "
            "top to bottom, steps from left to right."
        )
        maps.append(picture(fallback_map(header["layers"], log), caption, "png"))
    table = scroll_table(el("tr", el("th", "recipe", scope="col"), names), rows)
    note = "Share of elements in FP8, by operand, over all layers and steps."
    return [
        el("div", table, el("p", note, cls="note")),
        el("div", maps, cls="figures"),
    ]
