"""docs/results/mor.md: `mor_*` records of experiments.train_mor; the safety net by `_page_net`.

Rows of all training records are pooled; those that differ in seed alone are one group. The training
table has the settings with the most rows, without an outlier; the grid has the other learning rates
and batch sizes of the same model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.reporting import plots as _plots
from experiments.reporting.markdown import markdown, met
from experiments.reporting.pages.net import bargain, curve_table, safety_curve, safety_lines
from experiments.reporting.reading import Record
from experiments.reporting.report_training import (
    _COLOURS,
    TOLERANCE,
    comparison,
    digits_log,
    fallback_map,
)
from experiments.reporting.results import Group, group_rows, number_text, spread_text
from mor.state import OPERANDS

ASKED_RECIPES = ("tensor", "tensor_e5m2")
"""Recipes of which a share of FP8 is asked, for every operand."""
LEAST_FP8_SHARE = 0.95
"""Share of the decisions on tensors."""


@dataclass(frozen=True)
class Settings:
    """What must be alike for recipes to be compared."""

    architecture: str
    text: str
    window: int
    lr: float
    batch_size: int
    steps: int
    outlier: str
    """Empty: none."""
    outlier_step: int = -1

    @property
    def is_grid_of(self) -> tuple[str, str, int, str]:
        """What a grid over learning rates and batch sizes shares."""
        return self.architecture, self.text, self.window, self.outlier


def pooled(records: Sequence[Record]) -> dict[Settings, list[Group]]:
    """Groups of recipes by settings, those with most rows first."""
    rows: dict[Settings, list[dict[str, Any]]] = {}
    recipes: dict[str, dict[str, Any]] = {}
    for record in records:
        asked = record["requested"]
        train, outlier = asked["train"], asked["train"]["outlier"]
        active = outlier["step"] >= 0
        shape = ", ".join(f"{k}={v}" for k, v in sorted(asked["architecture"].items()))
        for row in record["results"]:
            settings = Settings(
                f"{record['model']['id']}, {shape}" if shape else record["model"]["id"],
                record["data"]["validation"]["source"], train["window"], train["lr"],
                train["batch_size"], row["steps"],
                f"{outlier['layer']} times 2^{outlier['exponent']} before step {outlier['step']}"
                if active else "",
                outlier["step"],
            )  # fmt: skip
            recipe = asked["mor"][row["label"]] or {}
            usual = recipes.setdefault(row["label"], recipe)
            keys = sorted(k for k in recipe | usual if recipe.get(k) != usual.get(k))
            label = " ".join([row["label"], *(f"{k}={recipe.get(k)}" for k in keys)])
            of, named = rows.setdefault(settings, []), row | {"label": label}
            if named not in of:  # a record that stands twice counts once
                of.append(named)
    found = {settings: group_rows(of) for settings, of in rows.items()}
    return dict(sorted(found.items(), key=lambda item: -len(rows[item[0]])))


# --- training --------------------------------------------------------------------------------------


class Against(NamedTuple):
    """A recipe beside bf16, on the seeds that both have."""

    bf16: str
    percent: str
    allowed: str
    verdict: str


def against_bf16(groups: Sequence[Group]) -> dict[str, Against]:
    """By recipe; those without a seed in common with bf16 are left out."""
    found = {}
    for entry in comparison(groups):
        if entry["difference_nats"] is not None:
            level = entry["baseline_nats"]
            found[entry["recipe"]] = Against(
                number_text(level),
                f"{100 * entry['difference_share']:+.2f}",
                f"≤ +{100 * entry['allowed_nats'] / level:.2f}",
                met(entry["within"])
                + (
                    ", by scatter"
                    if TOLERANCE * level < entry["difference_nats"] <= entry["allowed_nats"]
                    else ""
                )
                + (", one seed" if len(entry["seeds"]) == 1 else ""),
            )
        elif not entry["within"]:
            reason = entry["difference_reason"]
            found[entry["recipe"]] = Against("–", "–", "–", f"{met(False)}, {reason}")
    return found


def training_table(groups: Sequence[Group]) -> list[str]:
    compared = against_bf16(groups)
    rows = [
        [
            group.label, ", ".join(map(str, sorted({r["seed"] for r in group.rows}))),
            spread_text(group.statistic("nll")), *compared.get(group.label, Against("–", "–", "–", "")),
            _percent(group, "fp8_tensor_share"),
        ]
        for group in sorted(groups, key=lambda g: g.label != "bf16")
    ]  # fmt: skip
    head = (
        "recipe", "seeds", "validation loss", "bf16, same seeds", "minus bf16, %", "allowed, %", "tolerance",
        "FP8 tensors, %",
    )  # fmt: skip
    return markdown(head, rows)


def _percent(group: Group, metric: str) -> str:
    mean = group.statistic(metric).mean
    return "–" if mean is None else f"{100 * mean:.2f}"


def operand_table(groups: Sequence[Group]) -> list[str]:
    """FP8 share of the tensors by operand, %; judged for `ASKED_RECIPES`."""
    rows = []
    for group in groups:
        found = [r["operands_mor"] for r in group.rows if r.get("operands_mor")]
        if not found:
            continue
        cells = []
        for operand in OPERANDS:
            share = sum(1 - f[operand]["tensor_share"]["bf16"] for f in found) / len(found)
            judged = group.label in ASKED_RECIPES
            cells.append(
                f"{100 * share:.2f}" + (f": {met(share >= LEAST_FP8_SHARE)}" if judged else "")
            )
        rows.append([group.label, *cells])
    return markdown(("recipe", *(o.replace("_", " ") for o in OPERANDS)), rows) if rows else []


def grid_table(tables: Mapping[Settings, Sequence[Group]]) -> list[str]:
    """Learning rate x batch size; a column a recipe."""
    recipes = list(dict.fromkeys(g.label for groups in tables.values() for g in groups))
    recipes.sort(key=lambda name: name != "bf16")
    rows = []
    for settings, groups in sorted(tables.items(), key=lambda i: (i[0].batch_size, i[0].lr)):
        compared = against_bf16(groups)
        cells = []
        for name in recipes:
            group = next((g for g in groups if g.label == name), None)
            text = "–"
            if group is not None:
                text = f"{spread_text(group.statistic('nll'))} ({len(group.rows)})"
                if name in compared:
                    text += f", {compared[name].percent} %: {compared[name].verdict}"
            cells.append(text)
        rows.append([f"{settings.lr:g}", settings.batch_size, settings.steps, *cells])
    return markdown(("lr", "batch", "steps", *recipes), rows)


def loss_before(row: Mapping[str, Any], step: int) -> float | None:
    """The last validation loss before a step."""
    curve = (row.get("loss_curve") or {}).get("validation") or {"step": [], "loss": []}
    found = [x for s, x in zip(curve["step"], curve["loss"], strict=True) if s < step]
    return found[-1] if found else None


def fell_back(row: Mapping[str, Any], step: int) -> dict[str, list[str]]:
    """operand -> layers with more in BF16 from a step on than ever before it."""
    digits = row.get("fallback_digits")
    found: dict[str, list[str]] = {}
    if digits is None:
        return found
    first = next((i for i, s in enumerate(digits["step"]) if s >= step), len(digits["step"]))
    for layer, operands in digits["shares"].items():
        for operand, text in operands.items():
            before, after = text[: max(first - 1, 0)], text[first:]  # a column may hold both
            if max(after, default="0") > max(before, default="0"):
                found.setdefault(operand, []).append(layer)
    return found


def outlier_table(settings: Settings, groups: Sequence[Group]) -> list[str]:
    rows = []
    base = {row["seed"]: row["nll"] for g in groups if g.label == "bf16" for row in g.rows}
    for group in sorted(groups, key=lambda g: g.label != "bf16"):
        row = group.rows[0]
        full = base.get(row["seed"])
        before = loss_before(row, settings.outlier_step)
        fell = "–" if row.get("operands_mor") is None else "not in the record"
        if row.get("fallback_digits"):
            fell = "; ".join(
                f"{operand.replace('_', ' ')}: {_layers(names)}"
                for operand, names in fell_back(row, settings.outlier_step).items()
            ) or "none"  # fmt: skip
        rows.append([
            group.label, row["seed"], "–" if before is None else number_text(before),
            "not finite" if row["nll"] is None else number_text(row["nll"]),
            f"{100 * (row['nll'] / full - 1):+.2f}" if row["nll"] and full and group.label != "bf16" else "–",
            fell,
        ])  # fmt: skip
    head = (
        "recipe", "seed", "loss before", "loss at the end", "minus bf16, %", "more in BF16 from then on",
    )  # fmt: skip
    return markdown(head, rows)


def _layers(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{len(names)} layers"


def curves(groups: Sequence[Group]) -> Figure | None:
    """Validation loss by recipe, mean over the seeds that all have; below it what each differs by from
    bf16 on the same seeds, with bars from the least to the largest."""
    known = {group.label: found for group in groups if (found := _validation(group))}
    if not known:
        return None
    base = known.get("bf16", {})
    # The same seeds for all, or lines would differ in seeds too.
    shown = set.intersection(*(set(of) for of in known.values()))
    with matplotlib.rc_context(_plots._STYLE):
        figure, (top, bottom) = _plots._new(
            _plots._WIDTH, 5.6, 2, height_ratios=(3, 2), sharex=True
        )
        for index, ((label, of), colour) in enumerate(
            zip(known.items(), _COLOURS * len(known), strict=False)
        ):
            style = {"color": colour, "marker": "o", "markersize": 3.5, "linewidth": 1.2}
            steps = sorted(set.intersection(*(set(curve) for curve in of.values())))
            top.plot(steps, [np.mean([of[seed][s] for seed in shown & of.keys() or of]) for s in steps],
                     label=f"{label} ({len(of)})", **style)  # fmt: skip
            pairs = [(of[seed], base[seed]) for seed in of if seed in base]
            if label == "bf16" or not pairs:
                continue
            steps = [s for s in steps if all(s in theirs for _, theirs in pairs)]
            gaps = np.array(
                [[100 * (ours[s] / theirs[s] - 1) for s in steps] for ours, theirs in pairs]
            )
            mean = gaps.mean(axis=0)
            apart = 0.008 * max(steps, default=0) * (index - len(known) / 2)
            bottom.errorbar(
                np.array(steps) + apart, mean, yerr=(mean - gaps.min(axis=0), gaps.max(axis=0) - mean),
                capsize=2, **style,
            )  # fmt: skip
        bottom.axhline(0, color=_plots._QUIET, linewidth=0.9)
        top.set_ylabel("validation, nats/token")
        bottom.set_ylabel("minus bf16, %")
        _plots._steps_axis(bottom)
        _plots._legend(top, columns=3)
    return figure


def _validation(group: Group) -> dict[int, dict[int, float]]:
    """seed -> step -> validation loss, where finite."""
    found = {}
    for row in group.rows:
        if curve := (row.get("loss_curve") or {}).get("validation"):
            pairs = zip(curve["step"], curve["loss"], strict=True)
            found[row["seed"]] = {step: loss for step, loss in pairs if loss is not None}
    return found


# --- the page --------------------------------------------------------------------------------------


def mor_page(trainings: Sequence[Record], nets: Sequence[Record]) -> tuple[str, dict[str, Figure]]:
    """Text of mor.md, and its pictures by name."""
    pictures: dict[str, Figure] = {}
    tables = pooled(trainings)
    lines = [
        "# mor",
        "",
        "FP8 where it is good enough, decided at run time: training, and the safety net. What the recipes do: "
        "[docs/mor.md](../mor.md). Speed: [bench.md](bench.md).",
        *_training_lines({s: g for s, g in tables.items() if not s.outlier}, trainings, pictures),
        *_outlier_lines({s: g for s, g in tables.items() if s.outlier}, trainings, pictures),
    ]
    for number, record in enumerate(nets):
        lines += ["", "## Safety net", "", *safety_lines(record)]
        if points := record.get("curve"):
            name = f"mor_safety{_suffix(number)}.png"
            pictures[name] = safety_curve(record)
            lines += [
                "",
                *curve_table(points),
                "",
                f"![perplexity over effective bits]({name})",
                "",
                *bargain(points),
            ]
    return "\n".join(lines) + "\n", pictures


def _suffix(number: int) -> str:
    """Of the pictures of the first, second ... part of one kind."""
    return f"_{number + 1}" if number else ""


def _training_lines(
    tables: Mapping[Settings, Sequence[Group]], records: Sequence[Record],
    pictures: dict[str, Figure],
) -> list[str]:  # fmt: skip
    lines: list[str] = []
    for number, shared in enumerate(dict.fromkeys(s.is_grid_of for s in tables)):
        grid = {s: g for s, g in tables.items() if s.is_grid_of == shared}
        settings, groups = next(iter(grid.items()))
        lines += [
            "", "## Training", "", _settings_line(settings, groups),
            f"- Tolerance: worse than bf16 by {100 * TOLERANCE:g} % of its loss at most, or by two "
            "standard errors of the difference of means over seeds where that is larger; both on the "
            "seeds that a recipe and bf16 have. A lower loss is met.",
            _devices_line(records), "- ± after a loss: standard deviation over seeds.", "",
            *training_table(groups),
        ]  # fmt: skip
        if by_operand := operand_table(groups):
            lines += [
                "", "FP8 share of the decisions on tensors, by operand, %; at least "
                f"{100 * LEAST_FP8_SHARE:g} is asked of recipes {' and '.join(f'`{r}`' for r in ASKED_RECIPES)}:",
                "", *by_operand,
            ]  # fmt: skip
        if figure := curves(groups):
            name = f"mor_loss{_suffix(number)}.png"
            pictures[name] = figure
            lines += [
                "",
                f"![loss over steps]({name})",
                "",
                "Above: seeds that all recipes have, so that lines differ in recipe alone. Below: minus bf16 on the same seeds, "
                "as many as stand in brackets, bars from the least to the largest; points of a step stand side by side.",
            ]
        if len(grid) > 1:
            lines += ["", "### Learning rates and batch sizes", "", *grid_table(grid)]
    return lines


def _outlier_lines(
    tables: Mapping[Settings, Sequence[Group]], records: Sequence[Record],
    pictures: dict[str, Figure],
) -> list[str]:  # fmt: skip
    lines: list[str] = []
    for number, (settings, groups) in enumerate(tables.items()):
        lines += [
            "", "## An outlier in the middle of training", "",
            f"- {settings.outlier}; full precision does not feel it.",
            _settings_line(settings, groups), _devices_line(records), "",
            *outlier_table(settings, groups),
        ]  # fmt: skip
        for group in groups:
            digits = group.rows[0].get("fallback_digits")
            if digits and digits["shares"]:
                name = f"mor_outlier_{group.label}{_suffix(number)}.png"
                pictures[name] = fallback_map(digits["layers"], digits_log(digits))
                lines += ["", f"{group.label}: share in BF16, layers from top to bottom:", ""]
                lines += [f"![share in BF16, {group.label}]({name})"]
    return lines


def _settings_line(settings: Settings, groups: Sequence[Group]) -> str:
    row = groups[0].rows[0]
    return (
        f"- {row['parameters'] / 1e6:.1f} M parameters, newly drawn ({settings.architecture}); "
        f"{row['train_tokens']:,} tokens, {settings.steps} steps of {settings.batch_size} x "
        f"{settings.window}, lr {settings.lr:g}; validation text {settings.text}."
    )


def _devices_line(records: Sequence[Record]) -> str:
    devices = sorted({r["device"]["name"] for r in records})
    versions = sorted({r["versions"]["torch"] for r in records})
    return (
        f"- Device: {', '.join(devices)}; torch {', '.join(versions)}; "
        f"{max(r['finished'] for r in records)[:10]}."
    )
