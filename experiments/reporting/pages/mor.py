"""docs/results/mor.md: `mor_*` records of experiments.train_mor, and the safety net's (pages/net.py).

Rows of all training records are pooled; those that differ in seed alone are one group. The training
table has the settings with the most rows, without an outlier; the grid has the other learning rates
and batch sizes of the same model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from mor.state import OPERANDS

from ..groups import RecipeGroup, group_recipes
from ..markdown import markdown, met
from ..plots.training import fallback_map, validation_curves
from ..recipes import BASELINE, TOLERANCE, comparison
from ..record import Record, TrainingRow
from ..texts import number_text, spread_text
from ..training_logs import digits_log
from .net import net_lines, net_sentence, safety_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def pooled(records: Sequence[Record]) -> dict[Settings, list[RecipeGroup]]:
    """Groups of recipes by settings, those with most rows first."""
    rows: dict[Settings, list[TrainingRow]] = {}
    recipes: dict[str, dict[str, Any]] = {}
    for record in records:
        asked = record.requested
        train, outlier = asked["train"], asked["train"]["outlier"]
        shape = ", ".join(f"{k}={v}" for k, v in sorted(asked["architecture"].items()))
        injected = f"{outlier['layer']} times 2^{outlier['exponent']} before step {outlier['step']}"
        for row in record.training_rows:
            settings = Settings(
                f"{record.model.id}, {shape}" if shape else record.model.id,
                record.data["validation"].source,
                train["window"],
                train["lr"],
                train["batch_size"],
                row.steps,
                injected if outlier["step"] >= 0 else "",
                outlier["step"],
            )
            recipe = asked["mor"][row.recipe] or {}
            usual = recipes.setdefault(row.recipe, recipe)
            keys = sorted(k for k in recipe | usual if recipe.get(k) != usual.get(k))
            label = " ".join([row.recipe, *(f"{k}={recipe.get(k)}" for k in keys)])
            of, named = rows.setdefault(settings, []), replace(row, recipe=label)
            if named not in of:  # a record that stands twice counts once
                of.append(named)
    groups = {settings: group_recipes(of) for settings, of in rows.items()}
    return dict(sorted(groups.items(), key=lambda item: -len(rows[item[0]])))


# --- tables ----------------------------------------------------------------------------------------


class Against(NamedTuple):
    """A recipe beside bf16, on the seeds that both have."""

    bf16: str
    percent: str
    allowed: str
    verdict: str


def against_bf16(groups: Sequence[RecipeGroup]) -> dict[str, Against]:
    """By recipe; those without a seed in common with bf16 are left out."""
    beside = {}
    for entry in comparison(row for group in groups for row in group.rows):
        level, allowed, share = entry.baseline_nats, entry.allowed_nats, entry.difference_share
        if level is not None and allowed is not None and share is not None:
            scatter = TOLERANCE * level < (entry.difference_nats or 0.0) <= allowed
            beside[entry.recipe] = Against(
                number_text(level),
                f"{100 * share:+.2f}",
                f"≤ +{100 * allowed / level:.2f}",
                met(entry.within)
                + ", by scatter" * scatter
                + ", one seed" * (len(entry.seeds) == 1),
            )
        elif not entry.within:
            beside[entry.recipe] = Against("–", "–", "–", f"{met(False)}, {entry.reason}")
    return beside


def training_table(groups: Sequence[RecipeGroup]) -> list[str]:
    """A row a recipe: losses, the tolerance, the share of FP8."""
    compared = against_bf16(groups)
    rows = [
        [
            group.label,
            ", ".join(map(str, sorted({r.seed for r in group.rows}))),
            spread_text(group.statistic("nll")),
            *compared.get(group.label, Against("–", "–", "–", "")),
            _percent(group, "fp8_tensor_share"),
        ]
        for group in _baseline_first(groups)
    ]
    head = (
        "recipe",
        "seeds",
        "validation loss",
        "bf16, same seeds",
        "minus bf16, %",
        "allowed, %",
        "tolerance",
        "FP8 tensors, %",
    )
    return markdown(head, rows)


def _baseline_first(groups: Sequence[RecipeGroup]) -> list[RecipeGroup]:
    return sorted(groups, key=lambda g: g.label != BASELINE)


def _percent(group: RecipeGroup, metric: str) -> str:
    mean = group.statistic(metric).mean
    return "–" if mean is None else f"{100 * mean:.2f}"


def operand_table(groups: Sequence[RecipeGroup]) -> list[str]:
    """FP8 share of the tensors by operand, %."""
    rows = []
    for group in groups:
        decided = [r.operands for r in group.rows if r.operands]
        if decided:
            bf16 = [sum(of[o]["tensor_share"]["bf16"] for of in decided) for o in OPERANDS]
            rows.append([group.label, *(f"{100 * (1 - x / len(decided)):.2f}" for x in bf16)])
    return markdown(("recipe", *(o.replace("_", " ") for o in OPERANDS)), rows) if rows else []


def grid_table(tables: Mapping[Settings, Sequence[RecipeGroup]]) -> list[str]:
    """Learning rate x batch size; a column a recipe."""
    recipes = list(dict.fromkeys(g.label for groups in tables.values() for g in groups))
    recipes.sort(key=lambda name: name != BASELINE)
    rows = []
    for settings, groups in sorted(tables.items(), key=lambda i: (i[0].batch_size, i[0].lr)):
        compared, of = against_bf16(groups), {g.label: g for g in groups}
        cells = []
        for name in recipes:
            text = "–"
            if name in of:
                text = f"{spread_text(of[name].statistic('nll'))} ({len(of[name].rows)})"
            if name in compared:
                text += f", {compared[name].percent} %: {compared[name].verdict}"
            cells.append(text)
        rows.append([f"{settings.lr:g}", settings.batch_size, settings.steps, *cells])
    return markdown(("lr", "batch", "steps", *recipes), rows)


def loss_before(row: TrainingRow, step: int) -> float | None:
    """The last validation loss before a step."""
    curve = row.loss_curve.get("validation") or {"step": [], "loss": []}
    losses = [x for s, x in zip(curve["step"], curve["loss"], strict=True) if s < step]
    return losses[-1] if losses else None


def fell_back(digits: Mapping[str, Any] | None, step: int) -> dict[str, list[str]]:
    """operand -> layers with more in BF16 from a step on than ever before it.

    Args:
        digits: a row's `fallback_digits`.
    """
    layers: dict[str, list[str]] = {}
    if digits is None:
        return layers
    first = next((i for i, s in enumerate(digits["step"]) if s >= step), len(digits["step"]))
    for layer, operands in digits["shares"].items():
        for operand, text in operands.items():
            before, after = text[: max(first - 1, 0)], text[first:]  # a column may hold both
            if max(after, default="0") > max(before, default="0"):
                layers.setdefault(operand, []).append(layer)
    return layers


def outlier_table(settings: Settings, groups: Sequence[RecipeGroup]) -> list[str]:
    """A row a recipe, of its first seed: losses before and after, and what fell back."""
    rows = []
    base = {row.seed: row.nll for g in groups if g.label == BASELINE for row in g.rows}
    for group in _baseline_first(groups):
        row = group.rows[0]
        full, before = base.get(row.seed), loss_before(row, settings.outlier_step)
        fell = "–" if row.operands is None else "not in the record"
        if row.fallback_digits:
            operands = fell_back(row.fallback_digits, settings.outlier_step).items()
            layers = (f"{o.replace('_', ' ')}: {_layers(names)}" for o, names in operands)
            fell = "; ".join(layers) or "none"
        is_compared = row.nll and full and group.label != BASELINE
        rows.append(
            [
                group.label,
                row.seed,
                "–" if before is None else number_text(before),
                "not finite" if row.nll is None else number_text(row.nll),
                f"{100 * (row.nll / full - 1):+.2f}" if is_compared else "–",  # type: ignore[operator]
                fell,
            ]
        )
    head = (
        "recipe",
        "seed",
        "loss before",
        "loss at the end",
        "minus bf16, %",
        "more in BF16 from then on",
    )
    return markdown(head, rows)


def _layers(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{len(names)} layers"


# --- the page --------------------------------------------------------------------------------------


def mor_page(
    trainings: Sequence[Record], nets: Sequence[Mapping[str, Any]]
) -> tuple[str, dict[str, Figure]]:
    """Text of mor.md, and its pictures by name.

    Args:
        trainings: records of experiments.train_mor.
        nets: what scripts/safety_net.py wrote.
    """
    pictures: dict[str, Figure] = {}
    tables = pooled(trainings)
    plain = {s: g for s, g in tables.items() if not s.outlier}
    hurt = {s: g for s, g in tables.items() if s.outlier}
    said = [_training_sentence(plain), _outlier_sentence(hurt), *map(net_sentence, nets[:1])]
    lines = [
        "# mor",
        "",
        " ".join(filter(None, said)),
        "",
        "What the recipes do, and what the safety net is for: [docs/mor.md](../mor.md). Speed: [bench.md](bench.md).",
        *_training_lines(plain, trainings, pictures),
        *_outlier_lines(hurt, trainings, pictures),
    ]
    for number, record in enumerate(nets):
        name = f"mor_safety{_suffix(number)}.png"
        lines += ["", "## Safety net", "", *net_lines(record, name)]
        if record.get("curve"):
            pictures[name] = safety_curve(record)
    return "\n".join(lines) + "\n", pictures


def _training_sentence(tables: Mapping[Settings, Sequence[RecipeGroup]]) -> str | None:
    groups = next(iter(tables.values()), ())
    entries = comparison(row for group in groups for row in group.rows)
    shares = [e.difference_share for e in entries if e.difference_share is not None]
    fp8 = [s for g in groups if (s := g.statistic("fp8_tensor_share").mean) is not None]
    if not shares or not fp8:
        return None
    inside = sum(e.within for e in entries)
    return (
        f"Trained from scratch, {inside} of {len(entries)} recipes end within the tolerance of bf16's loss "
        f"({100 * min(shares):+.2f} to {100 * max(shares):+.2f} %), with {100 * min(fp8):.0f} to {100 * max(fp8):.0f} % of the "
        "decisions on tensors in FP8."
    )


def _outlier_sentence(tables: Mapping[Settings, Sequence[RecipeGroup]]) -> str | None:
    for settings, groups in tables.items():
        base = {row.seed: row.nll for g in groups if g.label == BASELINE for row in g.rows}
        gaps = [
            f"{g.label} ends {100 * (row.nll / full - 1):+.2f} % from it"
            for g in groups
            if g.label != BASELINE and (row := g.rows[0]).nll and (full := base.get(row.seed))
        ]
        if gaps:
            step = settings.outlier_step
            return f"After outliers that bf16 does not feel, put in before step {step}, {' and '.join(gaps)}."
    return None


def _suffix(number: int) -> str:
    """Of the pictures of the first, second ... part of one kind."""
    return f"_{number + 1}" if number else ""


def _training_lines(
    tables: Mapping[Settings, Sequence[RecipeGroup]],
    records: Sequence[Record],
    pictures: dict[str, Figure],
) -> list[str]:
    lines: list[str] = []
    for number, shared in enumerate(dict.fromkeys(s.is_grid_of for s in tables)):
        grid = {s: g for s, g in tables.items() if s.is_grid_of == shared}
        settings, groups = next(iter(grid.items()))
        lines += [
            "",
            "## Training",
            "",
            _settings_line(settings, groups),
            f"- Tolerance: worse than bf16 by {100 * TOLERANCE:g} % of its loss at most, or by two "
            "standard errors of the difference of means over seeds where that is larger; both on the "
            "seeds that a recipe and bf16 have. A lower loss is met.",
            _devices_line(records),
            "- ± after a loss: standard deviation over seeds.",
            "",
            *training_table(groups),
        ]
        if by_operand := operand_table(groups):
            lines += ["", "FP8 share of the decisions on tensors, by operand, %:", "", *by_operand]
        if figure := validation_curves(groups, BASELINE):
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
    tables: Mapping[Settings, Sequence[RecipeGroup]],
    records: Sequence[Record],
    pictures: dict[str, Figure],
) -> list[str]:
    lines: list[str] = []
    for number, (settings, groups) in enumerate(tables.items()):
        lines += [
            "",
            "## An outlier in the middle of training",
            "",
            f"- {settings.outlier}; full precision does not feel it.",
            _settings_line(settings, groups),
            _devices_line(records),
            "",
            *outlier_table(settings, groups),
        ]
        for group in groups:
            digits = group.rows[0].fallback_digits
            if digits and digits["shares"]:
                name = f"mor_outlier_{group.label}{_suffix(number)}.png"
                pictures[name] = fallback_map(digits["layers"], digits_log(digits))
                lines += ["", f"{group.label}: share in BF16, layers from top to bottom:", ""]
                lines += [f"![share in BF16, {group.label}]({name})"]
    return lines


def _settings_line(settings: Settings, groups: Sequence[RecipeGroup]) -> str:
    row = groups[0].rows[0]
    return (
        f"- {row.parameters / 1e6:.1f} M parameters, newly drawn ({settings.architecture}); "
        f"{row.train_tokens:,} tokens, {settings.steps} steps of {settings.batch_size} x "
        f"{settings.window}, lr {settings.lr:g}; validation text {settings.text}."
    )


def _devices_line(records: Sequence[Record]) -> str:
    devices = sorted({r.device.name for r in records})
    versions = sorted({r.versions["torch"] for r in records})
    last = max(r.finished for r in records)[:10]
    return f"- Device: {', '.join(devices)}; torch {', '.join(versions)}; {last}."
