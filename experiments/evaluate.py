"""Measure assignments on a text and on tasks; writes record.json and report.html.

    python -m experiments.evaluate "assignments=[bf16,mxfp4,outputs/run/assignment.json]" \
        data=wikitext2 eval=zero_shot safety=calibrated
    python -m experiments.evaluate evaluation.quantized=[W] \
        "assignments=[outputs/run/assignment.json,exported,other_tool/quantize_config.json]"
    python -m experiments.evaluate "assignments=[bf16,mxfp4,mxfp6]" transform=hadamard_block
"""

from dataclasses import dataclass

from omegaconf import DictConfig

from dmx.data import DataPair
from dmx.formats import BLOCK_FORMATS, check_choice
from dmx.models import ModelConfig, meta_model
from dmx.searching import SearchConfig, search_space
from dmx.searching.config import RotationConfig
from dmx.transforms.stage import UNMEASURED_TRANSFORMS

from .running import settings
from .running.bench import Bench, check_windows
from .running.composing import build_root
from .running.guard import entry_point
from .running.run import Run
from .running.sources import Source, check_files, measure_source, read_source


@dataclass(kw_only=True)
class EvaluateRun:
    """python -m experiments.evaluate"""

    model: ModelConfig
    data: DataPair
    calibration: settings.CalibrationConfig
    """Only for the safety net, and for inputs in nvfp4."""
    evaluation: settings.EvaluationConfig
    eval: settings.EvalConfig
    assignments: list[str]
    """Paths of assignment.json files, of exported folders, of other tools' configs; or names of MX
    formats for uniform ones; or bf16."""
    transform: str
    """none | hadamard_block | hadamard_full | learned, of uniform formats; an assignment.json has its
    own."""
    transform_file: str | None
    """transform=learned: path of a transform.safetensors."""
    safety: str
    """off | calibrated: mor's safety net around every given assignment, as a row of its own."""
    run: settings.RunConfig

    def __post_init__(self) -> None:
        check_choice(self.transform, UNMEASURED_TRANSFORMS, "transform")
        if (self.transform == "learned") != (self.transform_file is not None):
            raise settings.ConfigError(
                f"transform={self.transform} with transform_file={self.transform_file}: learned "
                "rotations need the file that a search wrote, others take none. Set "
                "transform=learned transform_file=path/to/transform.safetensors"
            )
        check_choice(self.safety, settings.SAFETY, "safety")
        if not self.assignments:
            names = ", ".join(BLOCK_FORMATS)
            raise settings.ConfigError(
                "assignments is empty: give paths of assignment.json files, bf16, or uniform "
                f"formats ({names}): assignments=[bf16,path/to/assignment.json]"
            )


@entry_point("evaluate", EvaluateRun)
def main(cfg: DictConfig) -> None:
    """Measures and writes record.json and report.html."""
    config = build_root(EvaluateRun, cfg)
    # Read every file before anything is loaded: a damaged one must show at once.
    sources = [read_source(name, "assignments") for name in config.assignments]
    check_files(sources, config.model, config.run)
    uniform = SearchConfig(
        name="uniform",
        transform=config.transform,
        rotation=RotationConfig(file=config.transform_file),
    )
    meta = meta_model(config.model)
    given = [source.on(meta) if source.uniform is None else None for source in sources]
    needs = config.evaluation.sees_inputs and any(map(Source.needs_calibration, sources, given))
    calibration = config.calibration if config.safety != "off" or needs else None
    check_windows(meta, calibration, config.evaluation if config.eval.perplexity else None)
    search_space(meta, uniform)  # a transform file is read, and refused, before weights load
    with Run(cfg, config.run, "evaluate") as run:
        if run.show_if_finished():
            return
        bench = Bench(
            run, config.model, config.data, config.evaluation,
            calibration=calibration, measured=config.eval, safety=config.safety,
        )  # fmt: skip
        for index, (source, assignment) in enumerate(zip(sources, given, strict=True)):
            measure_source(bench, source, assignment, uniform, f"assignment-{index}.json")
        run.finish(seed=None, verdict=None)


if __name__ == "__main__":
    main()
