"""Several searches, budgets and seeds on one loaded model, in one table and one report.

python -m experiments.compare model=smollm2_135m budgets=[4.5,5] searches=[kl,fisher] seeds=3
python -m experiments.compare "searches=[kl,differentiable+polish]" search.polish.rounds=12
python -m experiments.compare budgets=[5] searches=[fisher,differentiable] weights=[nearest,gptq,learned]
python -m experiments.compare collect=multirun/budget_curve
python -m experiments.compare ablate=outputs/run/assignment.json
"""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from dmx.assignment.assignment import Assignment
from dmx.formats import BitUnit, check_choice
from dmx.weights.config import WEIGHTS

from .running import settings
from .running.ablation import print_ablation
from .running.bench import Bench
from .running.collect import collect_runs
from .running.composing import build_root
from .running.csv_table import write_csv
from .running.guard import entry_point
from .running.plan import Asked, Comparison
from .running.polishing import polished_rounds, with_rounds
from .running.run import Run


@dataclass(kw_only=True)
class CompareRun(settings.SearchingRun):
    """python -m experiments.compare"""

    budgets: list[float]
    """Limits, in `unit`."""
    unit: BitUnit
    searches: list[str]
    """Names of searches; `name+polish` polishes its result for search.polish.rounds."""
    seeds: int
    """Calibration samples 0 .. seeds-1, each with every search and budget."""
    baselines: list[str]
    """bf16, uniform (every MX format), or a format, which every layer then has."""
    collect: str | None
    """Folder whose runs are joined into one report, instead of searching."""
    ablate: str | None
    """Path of an assignment.json whose units are lowered and raised one by one, instead."""
    eval: settings.EvalConfig
    safety: str
    """off | calibrated: mor's safety net around every searched assignment, as a row of its own."""
    weights: list[str]
    """nearest, mse, local_hessian, gptq, learned: what becomes of the weights of every searched assignment, each a row."""

    def __post_init__(self) -> None:
        check_choice(self.safety, settings.SAFETY, "safety")
        settings.check_some("weights", self.weights, WEIGHTS)
        settings.check_each("baselines", self.baselines, settings.UNIFORM)
        self.check_stages(self.weights)
        asked = Asked.all(self.searches)
        # Here a search is polished where its name says so, and auto only says how long.
        self.search = with_rounds(self.search, polished_rounds() * any(a.polish for a in asked))
        self.plan = Comparison(asked, self.search, self.budgets, self.unit, self.seeds)
        self.check_memory(self.plan.names, self.weights)
        self.plan.check(self.calibration.batches, needs_all=not (self.collect or self.ablate))


@entry_point("compare", CompareRun)
def main(cfg: DictConfig) -> None:
    """Measures and writes results.csv, record.json and report.html."""
    config = build_root(CompareRun, cfg)
    if not config.collect:
        measured = config.evaluation if config.eval.perplexity else None
        training = config.training_for(config.weights, config.plan.names)
        config.plan.check_shapes(config.model, config.calibration, measured, training)
    asked = Assignment.load(config.ablate) if config.ablate else None
    with Run(cfg, config.run, "compare") as run:
        if run.show_if_finished():
            return
        if config.collect:
            collect_runs(Path(config.collect), run)
        else:
            bench = Bench.of(
                run,
                config,
                config.weights,
                config.plan.names,
                measured=config.eval,
                safety=config.safety,
            )
            if asked is not None:
                return print_ablation(bench, config.search, asked, str(config.ablate))
            config.plan.measure(bench, config.baselines)
        run.processes.agree(lambda: write_csv(run.path("results.csv"), run.measured))
        run.finish(seed=None, verdict=None)


if __name__ == "__main__":
    main()
