"""Search a format per layer under a budget; writes the assignment, its history and a report.

python -m experiments.search model=smollm2_135m data=wikitext2 budget.limit=5.0
python -m experiments.search model=smollm2_135m rounding=gptq gptq.damping=0.01
"""

import dataclasses

from omegaconf import DictConfig

from dmx.assignment.assignment import Assignment
from dmx.models import meta_model
from dmx.searching import search_space
from experiments.reporting.results import verdicts
from experiments.running.config import SearchRun, build_root
from experiments.running.pace import Pace
from experiments.running.rows import Bench, check_windows
from experiments.running.run import Run, entry_point


@entry_point("search")
def main(cfg: DictConfig) -> float | None:
    config = build_root(SearchRun, cfg)
    # What follows from shapes alone is refused before weights load.
    meta = meta_model(config.model)
    search_space(meta, config.search).check_budget(config.budget, warn=False)
    check_windows(meta, config.calibration, config.evaluation)
    with Run(cfg, config.run, "search") as run:
        if run.show_if_finished():
            return run.main_result()
        bench = Bench(
            run, config.model, config.data, config.evaluation, calibration=config.calibration,
            roundings=list(dict.fromkeys(("nearest", config.rounding))), gptq=config.gptq,
        )  # fmt: skip
        pace = Pace(bench, config) if config.pace else None
        if "bf16" in config.baselines:
            bench.unquantized()
        search = config.search
        if search.learns_rotation:
            # First, so that all rows have the rotations that it learns.
            bench.searched(search, config.budget, name="assignment")
            search = dataclasses.replace(
                search, transform_file=str(run.path("transform.safetensors"))
            )
        for block_format in config.uniform:
            bench.uniform(block_format, search)
        for name in config.opponents:
            opponent = dataclasses.replace(search, name=name, polish_rounds=0)
            bench.searched(opponent, config.budget, name=name)
        if not config.search.learns_rotation:
            bench.searched(config.search, config.budget, name="assignment")
        if config.search.name == "differentiable":
            found = Assignment.load(run.path("assignment.json")).search
            run.actual["search"] = {"steps": found.steps, "cuda_graph": found.cuda_graph}
        if pace is not None:
            run.facts["pace"] = pace.ended()
        claims = verdicts(run.rows)
        run.finish(seed=config.search.seed, verdict=claims[0] if len(claims) == 1 else None)
        return run.main_result()


if __name__ == "__main__":
    main()
