"""Search a format per layer under a budget; writes the assignment, its history and a report.

python -m experiments.search model=smollm2_135m data=wikitext2 budget.limit=5.0
python -m experiments.search model=smollm2_135m weights=gptq gptq.damping=0.01
python -m experiments.search model=smollm2_135m data=wikitext2_more weights=learned learn.steps=1000
"""

from dataclasses import dataclass

from omegaconf import DictConfig

from dmx.assignment.assignment import Assignment
from dmx.assignment.budget import Budget
from dmx.formats import check_choice
from dmx.models import meta_model
from dmx.searching import search_space
from dmx.weights.config import WEIGHTS

from .reporting.verdicts import verdicts
from .running.bench import Bench, check_windows
from .running.composing import build_root
from .running.guard import entry_point
from .running.pace import Pace
from .running.plan import BASELINE_WEIGHTS, SearchPlan
from .running.run import Run
from .running.settings import BASELINES, SearchingRun, check_each


@dataclass(kw_only=True)
class SearchRun(SearchingRun):
    """python -m experiments.search"""

    budget: Budget
    baselines: list[str]
    """Rows beside the search: bf16, uniform (every MX format) or names of formats, kl and other
    heuristics."""
    pace: bool
    """Time plain training steps first and between the stages, say how long the run will take here, and count its
    work in such steps."""
    weights: str
    """nearest | mse | local_hessian | gptq | learned: every searched assignment is measured a second time, with such
    weights."""
    baseline_weights: str
    """same | nearest: whether the assignments of heuristics get `weights` as well."""

    def __post_init__(self) -> None:
        check_choice(self.weights, WEIGHTS, "weights")
        check_choice(self.baseline_weights, BASELINE_WEIGHTS, "baseline_weights")
        check_each("baselines", self.baselines, BASELINES)
        self.check_stages([self.weights])
        self.check_memory([self.search.name], [self.weights])
        if self.pace:
            self.run.check_whole("pace=true, which times a plain step,")
        self.plan = SearchPlan(
            self.search,
            self.budget,
            self.baselines,
            self.weights,
            self.baseline_weights,
            self.evaluation.quantized,
        )
        self.plan.check(self.calibration.batches)


@entry_point("search", SearchRun)
def main(cfg: DictConfig) -> float | None:
    """Measures and writes the files of a run; returns the perplexity, for sweepers."""
    config = build_root(SearchRun, cfg)
    # What follows from shapes alone is refused before weights load.
    meta = meta_model(config.model)
    search_space(meta, config.search).check_budget(config.budget, warn=False)
    training = config.training_for([config.weights], [config.search.name])
    check_windows(meta, config.calibration, config.evaluation, training)
    with Run(cfg, config.run, "search") as run:
        if run.show_if_finished():
            return run.main_result()
        bench = Bench.of(run, config, config.plan.stages, [config.search.name])
        plan, ran = config.plan.settled(bench)
        pace = Pace(bench, plan) if config.pace else None
        plan.measure(bench)
        run.pace = None if pace is None else pace.ended()
        if config.search.descends:
            done = Assignment.load(run.path("assignment.json")).search
            ran["descent"] = {"cuda_graph": done.cuda_graph}
            if done.kept is None:
                ran["steps"] = done.steps
            else:  # search.steps is at most
                ran |= {"steps_taken": done.steps, "kept": done.kept}
                ran["kept_because"] = done.kept_because
        run.actual["search"] |= ran
        claims = verdicts(run.measured)
        run.finish(seed=config.search.seed, verdict=claims[0] if len(claims) == 1 else None)
        return run.main_result()


if __name__ == "__main__":
    main()
