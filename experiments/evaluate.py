"""Measure assignments on a text and on tasks; writes record.json and report.html.

    python -m experiments.evaluate "assignments=[bf16,mxfp4,outputs/run/assignment.json]" \
        data=wikitext2 eval=zero_shot safety=calibrated
"""

from pathlib import Path

from omegaconf import DictConfig

from dmx.assignment import Assignment
from dmx.formats import BF16, get_block_format
from dmx.models import meta_model
from dmx.searching import SearchConfig
from experiments._config import EvaluateRun, build_root
from experiments._rows import Bench, check_windows, row_label
from experiments._run import Run, entry_point


@entry_point("evaluate")
def main(cfg: DictConfig) -> None:
    config = build_root(EvaluateRun, cfg)
    # Read every file before anything is loaded: a damaged one must show at once.
    files = {
        name: Assignment.load(name)
        for name in config.assignments
        if name.endswith(".json") or "/" in name or Path(name).is_file()
    }
    formats = {
        name: get_block_format(name, setting="assignments")
        for name in config.assignments
        if name not in files
    }
    calibration = config.calibration if config.safety != "off" else None
    meta = meta_model(config.model)
    check_windows(meta, calibration, config.evaluation if config.eval.perplexity else None)
    for given in files.values():
        given.check(meta)
    with Run(cfg, config.run, "evaluate") as run:
        if run.show_if_finished():
            return
        bench = Bench(
            run, config.model, config.data, config.evaluation,
            calibration=calibration, measured=config.eval, safety=config.safety,
        )  # fmt: skip
        for index, name in enumerate(config.assignments):
            if name in files:
                label = row_label(files[name].search, Path(name).stem)
                bench.rows(label, f"assignment-{index}.json", lambda n=name: (files[n], {}))  # type: ignore[misc]
            elif formats[name] is BF16:
                bench.unquantized()
            else:
                bench.uniform(formats[name], SearchConfig(name="uniform"))
        run.finish(seed=None, verdict=None)


if __name__ == "__main__":
    main()
