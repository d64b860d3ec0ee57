"""Measure assignments on a text and on tasks; writes record.json and report.html.

    python -m experiments.evaluate "assignments=[bf16,mxfp4,outputs/run/assignment.json]" \
        data=wikitext2 eval=zero_shot safety=calibrated
    python -m experiments.evaluate evaluation.operands=[W] \
        "assignments=[outputs/run/assignment.json,exported,other_tool/quantize_config.json]"
    python -m experiments.evaluate "assignments=[bf16,mxfp4,mxfp6]" transform=hadamard_block
"""

from omegaconf import DictConfig

from dmx.formats import BF16, get_block_format
from dmx.models import meta_model
from dmx.searching import SearchConfig, search_space
from experiments.running.config import EvaluateRun, build_root
from experiments.running.rows import Bench, check_windows
from experiments.running.run import Run, entry_point
from experiments.running.sources import check_files_dtype, read_source


@entry_point("evaluate")
def main(cfg: DictConfig) -> None:
    config = build_root(EvaluateRun, cfg)
    # Read every file before anything is loaded: a damaged one must show at once.
    sources = [read_source(name, "assignments") for name in config.assignments]
    uniform = SearchConfig(
        name="uniform", transform=config.transform, transform_file=config.transform_file
    )
    calibration = config.calibration if config.safety != "off" else None
    meta = meta_model(config.model)
    check_windows(meta, calibration, config.evaluation if config.eval.perplexity else None)
    search_space(meta, uniform)  # a transform file is read, and refused, before weights load
    check_files_dtype(sources, config.model)
    given = {i: s.on(meta) for i, s in enumerate(sources) if s.uniform is None}
    with Run(cfg, config.run, "evaluate") as run:
        if run.show_if_finished():
            return
        bench = Bench(
            run, config.model, config.data, config.evaluation,
            calibration=calibration, measured=config.eval, safety=config.safety,
        )  # fmt: skip
        for index, source in enumerate(sources):
            if source.uniform is BF16:
                bench.unquantized()
            elif source.uniform is not None:
                bench.uniform(get_block_format(source.uniform), uniform)
            else:
                assignment = given[index]
                with bench.weights_of(source.files):
                    bench.rows(
                        source.label(assignment), f"assignment-{index}.json",
                        lambda found=assignment: (found, {}),  # type: ignore[misc]
                    )  # fmt: skip
        run.finish(seed=None, verdict=None)


if __name__ == "__main__":
    main()
