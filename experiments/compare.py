"""Several searches, budgets and seeds on one loaded model, in one table and one report.

    python -m experiments.compare model=smollm2_135m budgets=[4.5,5,5.5] \
        searches=[kl,kl_per_bit,fisher,differentiable] seeds=3
    python -m experiments.compare "searches=[kl_per_bit,kl_per_bit+polish,differentiable+polish]" \
        search.polish_rounds=12
    python -m experiments.compare budgets=[5] searches=[fisher,differentiable] rounding=[nearest,gptq]
    python -m experiments.compare collect=multirun/budget_curve
    python -m experiments.compare ablate=outputs/run/assignment.json
"""

import csv
import dataclasses
import io
import itertools
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from dmx.assignment.assignment import Assignment
from dmx.assignment.budget import Budget
from dmx.errors import AssignmentError
from dmx.files import write_json, write_text
from dmx.formats import MX_FORMATS
from dmx.models import meta_model
from dmx.searching import search_space
from dmx.searching.ablation import unit_ablation
from dmx.transforms.stage import Transform, transformed
from experiments.running.collect import collect_runs
from experiments.running.config import CompareRun, build_root
from experiments.running.rows import Bench, check_windows
from experiments.running.run import Run, entry_point

CSV_COLUMNS = (
    "label", "search", "operands", "choice_per", "budget_limit", "budget_unit", "seed", "element_bits",
    "bits_per_element", "whole_model_bits_per_element", "perplexity", "nll", "windows",
    "search_seconds", "search_peak_memory_bytes", "eval_seconds", "assignment",
)  # fmt: skip


@entry_point("compare")
def main(cfg: DictConfig) -> None:
    config = build_root(CompareRun, cfg)
    if not config.collect:
        meta = meta_model(config.model)
        measured = config.evaluation if config.eval.perplexity else None
        check_windows(meta, config.calibration, measured)
        space = search_space(meta, config.search)
        for limit in config.budgets:
            space.check_budget(Budget(limit, config.unit), warn=False)
    asked = Assignment.load(config.ablate) if config.ablate else None
    with Run(cfg, config.run, "compare") as run:
        if run.show_if_finished():
            return
        if config.collect:
            collect_runs(Path(config.collect), run)
        else:
            bench = Bench(
                run, config.model, config.data, config.evaluation,
                calibration=config.calibration, measured=config.eval, safety=config.safety,
                roundings=config.rounding, gptq=config.gptq,
            )  # fmt: skip
            if asked is not None:
                _print_ablation(bench, config, asked)
                return
            _fill(bench, config)
        write_text(run.path("results.csv"), _csv(run))
        run.finish(seed=None, verdict=None)


def _fill(bench: Bench, config: CompareRun) -> None:
    if "bf16" in config.baselines:
        bench.unquantized()
    if "uniform" in config.baselines:
        uniform = config.search
        if uniform.learns_rotation:  # by each search anew; uniform rows have what they start from
            uniform = dataclasses.replace(uniform, transform="hadamard_block")
        for block_format in MX_FORMATS:
            bench.uniform(block_format, uniform)
    # The search that learns rotations first: at each budget and seed the others take its.
    learner = config.learner
    names = sorted(config.searches, key=lambda name: name != learner)
    # Seeds outermost: a run that is stopped early then still compares all methods on one seed.
    for offset, limit, name in itertools.product(range(config.seeds), config.budgets, names):
        seed = config.search.seed + offset
        place = f"{limit:g}-seed{seed}"
        learned = bench.run.path(f"{learner}-{place}/transform.safetensors") if learner else None
        settings = config.settings(name, seed, str(learned) if learned else None)
        folder = f"{name}-{place}"
        bench.searched(settings, Budget(limit, config.unit), name="assignment", folder=folder)


def _csv(run: Run) -> str:
    """Rows of the run as CSV; a missing metric is an empty field."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in run.rows:
        budget = row.get("budget") or {}
        writer.writerow(
            row | {"budget_limit": budget.get("limit"), "budget_unit": budget.get("unit")}
        )
    return buffer.getvalue()


def _print_ablation(bench: Bench, config: CompareRun, assignment: Assignment) -> None:
    """What lowering and raising each unit of an assignment does to the loss; also ablation.json."""
    space = search_space(bench.model, config.search)
    names = [f.name for f in space.formats]
    try:
        choice = space.choice_of(assignment.formats, assignment.input_formats)
    except (KeyError, ValueError) as error:
        raise AssignmentError(
            f"ablate={config.ablate}: {error} does not fit search.family={config.search.family} "
            f"({', '.join(names)}) with search.units={config.search.units} and "
            f"search.operands={config.search.operands}. Set them as they were when it was searched."
        ) from error
    batches = bench.batches(0)[: config.search.score_batches]
    with transformed(bench.model, Transform.of(assignment), assignment.quantized):
        rows = unit_ablation(bench.model, batches, space, choice, config.search)
    write_json(bench.run.path("ablation.json"), rows)
    table = Table(
        "unit", "format", "lowered: loss rises by", "raised: loss falls by", title="nats/token"
    )
    for row in sorted(rows, key=lambda r: -(r["loss_if_lowered"] or 0.0)):
        cells = [
            f"{row[k]:+.5f}" if row[k] is not None else "–"
            for k in ("loss_if_lowered", "gain_if_raised")
        ]
        table.add_row(row["unit"], row["format"], *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
