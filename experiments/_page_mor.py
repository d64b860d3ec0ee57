"""docs/results/mor.md: `mor_*` records of experiments.train_mor and scripts/safety_net.py.

Rows of all training records are pooled; those that differ in seed alone are one group. The training
table has the settings with the most rows, without an outlier; the grid has the other learning rates
and batch sizes of the same model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments import _plots
from experiments._page_quality import markdown, met
from experiments._report_training import (
    _COLOURS,
    TOLERANCE,
    comparison,
    digits_log,
    fallback_map,
)
from experiments._results import Group, group_rows, number_text, spread_text
from mor.statistics import OPERANDS

Record = Mapping[str, Any]

LARGEST_RATE, LARGEST_RATIO = 0.02, 1.0005
"""On clean data: share of tensors that fall back, and perplexity with the net over without."""
LARGEST_SAVED, LEAST_HURT = 1.01, 1.1
"""With outliers, perplexity over clean: with the net, and without it, or the test shows nothing.
All four as scripts/safety_net.py judges."""


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
    rows: dict[Settings, list[Mapping[str, Any]]] = {}
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
            rows.setdefault(settings, []).append(row | {"label": label})
    found = {settings: group_rows(of) for settings, of in rows.items()}
    return dict(sorted(found.items(), key=lambda item: -len(rows[item[0]])))


# --- training --------------------------------------------------------------------------------------


def against_bf16(groups: Sequence[Group]) -> dict[str, tuple[str, str, str]]:
    """recipe -> difference in %, what is allowed in %, met or missed; on the seeds that both have."""
    base = next((g for g in groups if g.label == "bf16"), None)
    found = {}
    for group in groups:
        if base is None or group is base:
            continue
        seeds = {r["seed"] for r in group.rows} & {r["seed"] for r in base.rows}
        sides = [
            replace(g, rows=tuple(r for r in g.rows if r["seed"] in seeds)) for g in (base, group)
        ]
        if not seeds or (entry := comparison(sides)[0])["difference_nats"] is None:
            continue
        level = sides[0].statistic("nll").mean
        assert level is not None
        found[group.label] = (
            f"{100 * entry['difference_share']:+.2f}",
            f"± {100 * entry['allowed_nats'] / level:.2f}",
            met(entry["within"]),
        )
    return found


def training_table(groups: Sequence[Group]) -> list[str]:
    compared = against_bf16(groups)
    rows = [
        [
            group.label, ", ".join(str(s) for s in sorted(r["seed"] for r in group.rows)),
            spread_text(group.statistic("nll")), *compared.get(group.label, ("–", "–", "")),
            _percent(group, "fp8_tensor_share"),
            spread_text(group.statistic("tokens_per_second"), 3),
        ]
        for group in sorted(groups, key=lambda g: g.label != "bf16")
    ]  # fmt: skip
    head = (
        "recipe", "seeds", "validation loss", "minus bf16, %", "allowed, %", "tolerance",
        "FP8 tensors, %", "tokens/s",
    )  # fmt: skip
    return markdown(head, rows)


def _percent(group: Group, metric: str) -> str:
    mean = group.statistic(metric).mean
    return "–" if mean is None else f"{100 * mean:.2f}"


def operand_table(groups: Sequence[Group]) -> list[str]:
    """FP8 share of the tensors by operand; blocks where a policy decides by block."""
    rows = []
    for group in groups:
        found = [r["operands_mor"] for r in group.rows if r.get("operands_mor")]
        if found:
            shares = [sum(1 - f[o]["tensor_share"]["bf16"] for f in found) for o in OPERANDS]
            rows.append([group.label, *(f"{100 * share / len(found):.2f}" for share in shares)])
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
                    share, _, verdict = compared[name]
                    text += f", {share} %: {verdict}"
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
    for group in sorted(groups, key=lambda g: g.label != "bf16"):
        row = group.rows[0]
        before = loss_before(row, settings.outlier_step)
        fell = "–" if row.get("operands_mor") is None else "not in the record"
        if row.get("fallback_digits"):
            fell = "; ".join(
                f"{operand.replace('_', ' ')}: {_layers(names)}"
                for operand, names in fell_back(row, settings.outlier_step).items()
            ) or "none"  # fmt: skip
        rows.append([
            group.label, row["seed"], "–" if before is None else number_text(before),
            "not finite" if row["nll"] is None else number_text(row["nll"]), fell,
        ])  # fmt: skip
    head = ("recipe", "seed", "loss before", "loss at the end", "more in BF16 from then on")
    return markdown(head, rows)


def _layers(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{len(names)} layers"


def curves(groups: Sequence[Group]) -> Figure | None:
    """Validation and training loss of all recipes over each other; one line a seed."""
    known = [g for g in groups if any(row.get("loss_curve") for row in g.rows)]
    if not known:
        return None
    with matplotlib.rc_context(_plots._STYLE):
        figure, panels = _plots._new(_plots._WIDTH, 6.2, 2)
        for axes, name in zip(panels, ("validation", "train"), strict=True):
            for colour, group in zip(_COLOURS * len(known), known, strict=False):
                shown = [row["loss_curve"][name] for row in group.rows if row.get("loss_curve")]
                for index, curve in enumerate(shown):
                    loss = [float("nan") if x is None else x for x in curve["loss"]]
                    axes.plot(
                        curve["step"], loss, color=colour, linewidth=1.1, alpha=0.8,
                        marker="o" if name == "validation" else None, markersize=3,
                        label=None if index else group.label,
                    )  # fmt: skip
            axes.set_ylabel(f"{name}, nats/token")
            _plots._steps_axis(axes)
        _plots._legend(panels[0])
    return figure


# --- safety net ------------------------------------------------------------------------------------


def safety_lines(record: Record) -> list[str]:
    """Clean data and outliers, a table each."""
    clean = record["clean"]
    share, loss = clean["report"]["fallback_rate"], clean["with"] / clean["without"]
    lines = [
        f"{record['model']['id']}, {record['assignment']}, {record['tokens']:,} tokens in windows of "
        f"{record['window']}, margin {record['margin']:g}, {record['device']}. Perplexity in full "
        f"precision {clean['full_precision']:.2f}.", "",
        *markdown(("clean data", "measured", "limit", ""), [
            ["tensors that fell back, %", f"{100 * share:.2f}", f"< {100 * LARGEST_RATE:g}", met(share < LARGEST_RATE)],
            ["perplexity without, with the net", f"{clean['without']:.3f}, {clean['with']:.3f}",
             f"with ≤ {LARGEST_RATIO:g} x without", met(loss <= LARGEST_RATIO)],
        ]),
    ]  # fmt: skip
    if found := record.get("outliers"):
        base = found["clean"]
        lines += [
            "", f"Outliers: {found['channels']} channels in the MLPs of layers "
            f"{', '.join(map(str, found['layers']))}, up_proj times 2^17 and down_proj times 2^-17. "
            f"Full precision does not feel them ({found['full_precision']:.2f}, then "
            f"{found['full_precision_with_outliers']:.2f}).", "",
            *markdown(("with outliers", "perplexity", "over clean", "limit", ""), [
                ["clean, no outliers", f"{base:.2f}", "", "", ""],
                ["without the net", f"{found['without']:.2f}", f"{found['without'] / base:.3f}",
                 f"≥ {LEAST_HURT:g}, or the test shows nothing", met(found["without"] >= LEAST_HURT * base)],
                ["with the net", f"{found['with']:.2f}", f"{found['with'] / base:.3f}", f"≤ {LARGEST_SAVED:g}",
                 met(found["with"] <= LARGEST_SAVED * base)],
            ]), "",
            f"Fell back with outliers: {100 * found['report']['fallback_rate']:.2f} % of the tensors, "
            f"{found['report']['effective_element_bits']:.2f} effective bits, in: "
            f"{', '.join(found['fell_back'])}.",
        ]  # fmt: skip
    if not record.get("curve"):
        lines += ["", "The curve of perplexity over effective bits is not in the records yet."]
    return lines


def curve_table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            p["label"], f"{p['perplexity']:.2f}", f"{p['element_bits']:.3f}",
            f"{p['weight_element_bits']:.3f}", f"{p['input_element_bits']:.3f}",
            f"{100 * p['fallback_rate']:.1f}" if "fallback_rate" in p else "–",
        ]
        for p in sorted(points, key=lambda p: p["element_bits"])
    ]  # fmt: skip
    head = ("", "perplexity", "effective bits", "weights", "inputs", "fell back, %")
    return markdown(head, rows)


def safety_curve(points: Sequence[Mapping[str, Any]]) -> Figure:
    """The net over uniform MXFP4 as a line, other assignments at their own bits."""
    with matplotlib.rc_context(_plots._STYLE):
        figure, axes = _plots._new(_plots._WIDTH, 3.6)
        net = sorted(
            (p["element_bits"], p["perplexity"]) for p in points if "fallback_rate" in p
        )  # fmt: skip
        if net:
            bits, values = zip(*net, strict=True)
            axes.plot(bits, values, color=_COLOURS[1], marker="o", label="mxfp4 with net")
        others = [p for p in points if "fallback_rate" not in p]
        for p, colour, marker in zip(
            others, _COLOURS[2:] * len(others), "sD^v<>P*" * 9, strict=False
        ):
            axes.plot(
                p["element_bits"], p["perplexity"], color=colour, marker=marker, linestyle="none",
                label=p["label"],
            )  # fmt: skip
        low, high = (f(p["perplexity"] for p in points) for f in (min, max))
        if high / low > 3:
            _plots._log_axis(axes, low, high)
        axes.set_xlabel("effective element_bits, weights and inputs")
        axes.set_ylabel("perplexity")
        _plots._legend(axes, columns=3)
    return figure


# --- the page --------------------------------------------------------------------------------------


def mor_page(trainings: Sequence[Record], nets: Sequence[Record]) -> tuple[str, dict[str, Figure]]:
    """Text of mor.md, and its pictures by name."""
    pictures: dict[str, Figure] = {}
    lines = [
        "# mor",
        "",
        "FP8 where it is good enough, decided at run time: training, and the net.",
    ]
    tables = pooled(trainings)
    plain = {s: g for s, g in tables.items() if not s.outlier}
    for number, shared in enumerate(dict.fromkeys(s.is_grid_of for s in plain)):
        grid = {s: g for s, g in plain.items() if s.is_grid_of == shared}
        settings, groups = next(iter(grid.items()))
        suffix = f"_{number + 1}" if number else ""
        lines += ["", "## Training", "", *_facts(settings, groups, trainings), ""]
        lines += training_table(groups)
        if by_operand := operand_table(groups):
            lines += ["", "FP8 share of the decisions on tensors, by operand, %:", "", *by_operand]
        if figure := curves(groups):
            pictures[f"mor_loss{suffix}.png"] = figure
            lines += ["", f"![loss over steps](mor_loss{suffix}.png)"]
        if len(grid) > 1:
            lines += ["", "### Learning rates and batch sizes", "", *grid_table(grid)]
    for number, (settings, groups) in enumerate((s, g) for s, g in tables.items() if s.outlier):
        lines += ["", "## An outlier in the middle of training", ""]
        lines += [f"- {settings.outlier}; full precision does not feel it."]
        lines += [*_facts(settings, groups, trainings)[::2], ""]
        lines += outlier_table(settings, groups)
        for group in groups:
            digits = group.rows[0].get("fallback_digits")
            if digits and digits["shares"]:
                name = f"mor_outlier_{group.label}{f'_{number + 1}' if number else ''}.png"
                pictures[name] = fallback_map(digits["layers"], digits_log(digits))
                lines += ["", f"{group.label}: share in BF16, layers from top to bottom:", ""]
                lines += [f"![share in BF16, {group.label}]({name})"]
    for number, record in enumerate(nets):
        lines += ["", "## Safety net", "", *safety_lines(record)]
        if points := record.get("curve"):
            name = f"mor_safety{f'_{number + 1}' if number else ''}.png"
            pictures[name] = safety_curve(points)
            lines += ["", *curve_table(points), "", f"![perplexity over effective bits]({name})"]
    return "\n".join(lines) + "\n", pictures


def _facts(settings: Settings, groups: Sequence[Group], records: Sequence[Record]) -> list[str]:
    row = groups[0].rows[0]
    devices = sorted({r["device"]["name"] for r in records})
    versions = sorted({r["versions"]["torch"] for r in records})
    return [
        f"- {row['parameters'] / 1e6:.1f} M parameters, newly drawn ({settings.architecture}); "
        f"{row['train_tokens']:,} tokens, {settings.steps} steps of {settings.batch_size} x "
        f"{settings.window}, lr {settings.lr:g}; validation text {settings.text}.",
        f"- Tolerance: {100 * TOLERANCE:g} % of bf16's loss, or two standard errors of the "
        "difference of means over seeds where that is larger; both on the seeds that a recipe and "
        "bf16 have.",
        f"- Device: {', '.join(devices)}; torch {', '.join(versions)}; "
        f"{max(r['finished'] for r in records)[:10]}. Several runs shared the card: tokens/s are "
        "lower bounds and compare nothing.",
        "- ± after a loss: standard deviation over seeds.",
    ]
