"""Report of training runs: loss curves of all recipes over each other, and what MoR decided.

Everything comes from the files of the run folder: record.json, and for each row the logs in its
own folder (train.jsonl, validation.jsonl, mor.jsonl).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from dmx.files import write_text
from experiments.reporting import plots as _plots
from experiments.reporting.html import Html, el, page, picture, scroll_table, section
from experiments.reporting.provenance import asked_and_ran, environment
from experiments.reporting.reading import read_record
from experiments.reporting.results import Group, group_rows, spread_text
from mor.log import read_log
from mor.state import OPERANDS
from mor.training import read_rows

_COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MAX_COLUMNS = 240
"""Columns of a heat map; more steps are averaged."""
_SMOOTHING = 0.9
"""Of the training loss: share of the past in the moving average."""
_CURVE_POINTS = 200
_DIGIT_COLUMNS = 60
"""Of what a record keeps of the logs."""
TOLERANCE = 0.005
"""Share of BF16's loss by which MoR may be worse and count as equal."""


def comparison(groups: Sequence[Group], baseline: str = "bf16") -> list[dict[str, Any]]:
    """Final validation loss of each recipe against the baseline's, on the seeds that both have.

    Within the tolerance is what is worse by no more than the larger of `TOLERANCE` and two standard
    errors of the difference of means over seeds (known from two seeds each), or is better. A recipe
    whose loss is not finite on a seed where the baseline's is, is outside.
    """
    base = next((g for g in groups if g.label == baseline), None)
    found: list[dict[str, Any]] = []
    for group in groups:
        if base is None or group is base:
            continue
        finite = {row["seed"] for row in base.rows if row["nll"] is not None}
        seeds = sorted({row["seed"] for row in group.rows} & finite)
        lost = [row["seed"] for row in group.rows if row["seed"] in finite and row["nll"] is None]
        ours, theirs = (g.on_seeds(seeds).statistic("nll") for g in (group, base))
        entry: dict[str, Any] = {"recipe": group.label, "seeds": seeds, "within": not lost}
        found.append(entry)
        if lost or ours.mean is None or theirs.mean is None:
            reason = f"no seed in common with {baseline}"
            if lost:
                reason = f"seed {', '.join(map(str, lost))}: loss is not finite"
            elif not finite:
                reason = f"the loss of {baseline} is not finite"
            entry |= {"difference_nats": None, "difference_reason": reason}
            continue
        difference = ours.mean - theirs.mean
        stderr = None
        if ours.spread is not None and theirs.spread is not None:
            stderr = (ours.spread**2 / ours.count + theirs.spread**2 / theirs.count) ** 0.5
        allowed = max(TOLERANCE * theirs.mean, 2 * (stderr or 0.0))
        entry |= {
            "difference_nats": difference,
            "difference_share": difference / theirs.mean,
            "stderr_nats": stderr,
            "allowed_nats": allowed,
            "baseline_nats": theirs.mean,
            "within": difference <= allowed,
        }
    return found


def comparison_text(entry: Mapping[str, Any]) -> str:
    """One sentence."""
    if not entry["within"] and entry["difference_nats"] is None:
        return f"{entry['recipe']} is outside the tolerance of bf16: {entry['difference_reason']}."
    if entry["difference_nats"] is None:
        return f"{entry['recipe']}: no comparison with bf16 ({entry['difference_reason']})."
    verb = "is within" if entry["within"] else "is outside"
    spread = "" if entry["stderr_nats"] is None else f" ± {entry['stderr_nats']:.4f}"
    return (
        f"{entry['recipe']} {verb} the tolerance of bf16: {entry['difference_nats']:+.4f}{spread} "
        f"nats/token ({100 * entry['difference_share']:+.2f} %), "
        f"allowed {entry['allowed_nats']:+.4f}."
    )


def write_training_report(folder: Path) -> Path:
    """Write report.html of a training run."""
    record = read_record(folder)
    groups = group_rows(record["results"])
    model = (record.get("model") or {}).get("id") or "unknown model"
    sentences = [comparison_text(entry) for entry in comparison(groups)]
    text = page(
        f"MoR training report: {model}",
        " · ".join((model, record["command"], record["finished"])),
        record.get("warnings") or [],
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


def _results(groups: Sequence[Group]) -> Html:
    names = ("recipe", "seeds", "validation loss", "perplexity", "FP8 tensors", "tokens/s")
    head = el("tr", (el("th", n, scope="col", cls=None if n == "recipe" else "num") for n in names))
    rows = []
    for group in groups:
        share = group.statistic("fp8_tensor_share")
        cells = (
            str(len(group.rows)),
            spread_text(group.statistic("nll")),
            spread_text(group.statistic("perplexity")),
            "–" if share.mean is None else f"{100 * share.mean:.2f} %",
            spread_text(group.statistic("tokens_per_second")),
        )
        rows.append(
            el("tr", el("th", group.label, scope="row"), (el("td", c, cls="num") for c in cells))
        )
    note = "Loss in nats/token on the validation text at the last step; ± over seeds."
    return el("div", scroll_table(head, rows), el("p", note, cls="note"))


def _loss_pictures(folder: Path, groups: Sequence[Group]) -> Html:
    pictures = []
    for name, title in (("validation", "Validation loss"), ("train", "Training loss, smoothed")):
        with matplotlib.rc_context(_plots._STYLE):
            figure, axes = _plots._new(_plots._WIDTH, 3.6)
            for colour, group in zip(_COLOURS * len(groups), groups, strict=False):
                for index, row in enumerate(group.rows):
                    rows = read_rows(folder / row["folder"] / f"{name}.jsonl")
                    step = [r["step"] for r in rows]
                    loss = np.array([np.nan if r["loss"] is None else r["loss"] for r in rows])
                    axes.plot(
                        step, _smooth(loss) if name == "train" else loss, color=colour,
                        linewidth=1.2, alpha=0.8, label=None if index else group.label,
                    )  # fmt: skip
            axes.set_ylabel("nats/token")
            _plots._steps_axis(axes)
            _plots._legend(axes)
        pictures.append(picture(figure, f"{title}; one line a seed."))
    return el("div", pictures, cls="figures")


def _smooth(values: np.ndarray) -> np.ndarray:
    """Exponential moving average, unbiased at the start; a gap stays a gap."""
    result, average, weight = np.full(len(values), np.nan), 0.0, 0.0
    for i, value in enumerate(values):
        if np.isfinite(value):
            average = _SMOOTHING * average + (1 - _SMOOTHING) * value
            weight = _SMOOTHING * weight + (1 - _SMOOTHING)
            result[i] = average / weight
    return result


def loss_curve(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """train, validation -> step, loss (nats/token): what a record keeps of the logs of a run.

    The training loss is the mean over at most `_CURVE_POINTS` pieces of the steps, each named by its
    last one; null where nothing in a piece was finite.
    """
    found: dict[str, dict[str, list[Any]]] = {}
    for name in ("train", "validation"):
        rows = read_rows(folder / f"{name}.jsonl")
        pieces = np.array_split(np.arange(len(rows)), min(len(rows), _CURVE_POINTS))
        kept = [[rows[i]["loss"] for i in p if rows[i]["loss"] is not None] for p in pieces]
        found[name] = {
            "step": [rows[p[-1]]["step"] for p in pieces],
            "loss": [round(float(np.mean(k)), 4) if k else None for k in kept],
        }
    return found


def fallback_digits(layers: Sequence[str], log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A run's BF16 shares, short enough for a record.

    Returns:
        step: first step of each column; shares: layer -> operand -> a digit a column, the largest
        share of elements in BF16 in tenths rounded up (9 for 0.9 and more). Operands that never fell
        back are left out.
    """
    columns = np.array_split(np.arange(len(log)), min(len(log), _DIGIT_COLUMNS))
    shares: dict[str, dict[str, str]] = {}
    for i, layer in enumerate(layers):
        for j, operand in enumerate(OPERANDS):
            largest = [max(log[k]["elements_bf16"][i][j] or 0.0 for k in c) for c in columns]
            if any(largest):
                digits = "".join(str(min(9, int(np.ceil(10 * share)))) for share in largest)
                shares.setdefault(layer, {})[operand] = digits
    return {"step": [log[c[0]]["step"] for c in columns], "layers": list(layers), "shares": shares}


def digits_log(digits: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows for `fallback_map` out of `fallback_digits`; 9 is read as 1."""

    def share(layer: str, operand: str, column: int) -> float:
        text = digits["shares"].get(layer, {}).get(operand)
        return 0.0 if text is None else {9: 1.0}.get(int(text[column]), int(text[column]) / 10)

    return [
        {
            "step": step,
            "elements_bf16": [[share(x, o, c) for o in OPERANDS] for x in digits["layers"]],
        }
        for c, step in enumerate(digits["step"])
    ]


def _decisions(folder: Path, groups: Sequence[Group]) -> list[Html]:
    """Table of shares by operand, and a heat map for each recipe's first seed."""
    parts: list[Html] = []
    with_mor = [g for g in groups if g.rows[0].get("operands_mor")]
    if not with_mor:
        return parts
    head = el(
        "tr", el("th", "recipe", scope="col"),
        (el("th", n.replace("_", " "), scope="col", cls="num") for n in OPERANDS),
    )  # fmt: skip
    rows = []
    for group in with_mor:
        shares = [
            np.mean([1 - row["operands_mor"][n]["element_share"]["bf16"] for row in group.rows])
            for n in OPERANDS
        ]
        cells = (el("td", f"{100 * share:.2f} %", cls="num") for share in shares)
        rows.append(el("tr", el("th", group.label, scope="row"), cells))
    note = "Share of elements in FP8, by operand, over all layers and steps."
    parts.append(el("div", scroll_table(head, rows), el("p", note, cls="note")))
    maps = []
    for group in with_mor:
        header, log = read_log(folder / group.rows[0]["folder"] / "mor.jsonl")
        caption = (
            f"{group.label}, seed {group.rows[0]['seed']}: share of elements in BF16, layers from "
            "top to bottom, steps from left to right."
        )
        maps.append(picture(fallback_map(header["layers"], log), caption, "png"))
    parts.append(el("div", maps, cls="figures"))
    return parts


def fallback_map(layers: Sequence[str], log: Sequence[Mapping[str, Any]]) -> Figure:
    """Share of elements in BF16: a panel an operand, a row a layer, a column a step or more."""
    table = np.array(
        [
            [[np.nan if s is None else s for s in layer] for layer in row["elements_bf16"]]
            for row in log
        ],
        dtype=float,
    )
    steps = [row["step"] for row in log]
    pieces = np.array_split(np.arange(len(log)), min(len(log), _MAX_COLUMNS))
    # Rows may stand for unequal numbers of steps; the last one is taken to be as long as the one before.
    after = steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else 1)
    edges = np.array([*(steps[piece[0]] for piece in pieces), after]) - 0.5
    with np.errstate(invalid="ignore"):
        # The largest of the averaged steps: a single fallback must stay visible.
        columns = [np.fmax.reduce(table[piece], axis=0) for piece in pieces]
    image = np.stack(columns, axis=1)
    with matplotlib.rc_context(_plots._STYLE):
        height = 1.2 + 0.02 * len(layers)
        figure, panels = _plots._new(_plots._WIDTH, len(OPERANDS) * height, len(OPERANDS))
        for index, (axes, operand) in enumerate(zip(panels, OPERANDS, strict=True)):
            mesh = axes.pcolormesh(
                edges, np.arange(len(layers) + 1) - 0.5, image[:, :, index], vmin=0, vmax=1,
                cmap="viridis_r", rasterized=True,
            )  # fmt: skip
            axes.invert_yaxis()
            axes.set_ylabel(operand.replace("_", "\n"), rotation=0, ha="right", va="center")
            axes.grid(False)
            axes.tick_params(labelbottom=operand == OPERANDS[-1])
        panels[-1].set_xlabel("step")
        figure.colorbar(mesh, ax=panels, shrink=0.4, label="share in BF16")
    return figure
