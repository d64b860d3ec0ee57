"""Write a model under an assignment as another runtime loads it, and load it again to be sure.

    python -m experiments.export assignment=outputs/run/assignment.json target=quark
    python -m experiments.export assignment=a.json target=compressed_tensors inputs=true windows=8
    python -m experiments.export assignment=fp8 target=modelopt_checkpoint inputs=true static_inputs=true

Leaves `model` (or `folder`) for the runtime, and config.yaml, record.json and report.html.
"""

from dataclasses import dataclass

from omegaconf import DictConfig

from dmx.data import DataPair, load_text
from dmx.exporting import EXPORT_TARGETS, PROFILES
from dmx.formats import check_choice
from dmx.models import ModelConfig

from .running.composing import build_root
from .running.exports import Export, export_verdict
from .running.guard import entry_point
from .running.run import Run
from .running.settings import CalibrationConfig, ConfigError, RunConfig, check_at_least


@dataclass(kw_only=True)
class ExportRun:
    """python -m experiments.export"""

    model: ModelConfig
    data: DataPair
    assignment: str
    """Path of an assignment.json, or of another tool's config; or a block format for all layers."""
    target: str
    """assignment | compressed_tensors | quark | humming | modelopt_checkpoint | torchao, or names alone:
    llm_compressor | modelopt | auto_round | llama_cpp."""
    profile: str | None
    """Of compressed_tensors: vllm | transformers; null = the strictest that holds the formats."""
    inputs: bool
    """Have the runtime quantize inputs, too."""
    static_inputs: bool
    """Measure scales of inputs on data.calibration and keep them in the files: of fp8 one a layer instead of one
    a token, of nvfp4 the global one."""
    calibration: CalibrationConfig
    """Only for static_inputs."""
    folder: str | None
    """Receives the files; must not exist. null = `model` in the run's folder."""
    verify: bool
    """Load the files in a fresh process and compare logits."""
    max_shard_gigabytes: float
    """Of one safetensors file."""
    windows: int
    """> 0: verify on so many windows of the evaluation text, and say both perplexities."""
    window: int
    """tokens a window"""
    run: RunConfig

    def __post_init__(self) -> None:
        if self.target in PROFILES:
            raise ConfigError(
                f"target={self.target} is a profile: target=compressed_tensors profile={self.target}"
            )
        check_choice(self.target, EXPORT_TARGETS, "target")
        self.run.check_whole("export")
        if self.profile is not None:
            check_choice(self.profile, PROFILES, "profile")
        if not self.max_shard_gigabytes > 0:
            raise ConfigError(f"max_shard_gigabytes={self.max_shard_gigabytes} must be above 0")
        check_at_least("windows", self.windows, 0)
        check_at_least("window", self.window, 2)
        if self.windows and not self.verify:
            raise ConfigError(f"windows={self.windows} needs verify=true")
        self.export = Export(
            self.target, self.profile, self.inputs, self.verify, self.max_shard_gigabytes,
            self.windows, self.window, self.calibration if self.static_inputs else None,
        )  # fmt: skip


@entry_point("export", ExportRun)
def main(cfg: DictConfig) -> None:
    """Writes the files for the runtime, record.json and report.html."""
    config = build_root(ExportRun, cfg)
    plan = config.export.check(config.model, config.assignment, config.folder, config.run.folder)
    text = load_text(config.data.evaluation) if config.windows else None
    measured_on = load_text(config.data.calibration) if config.static_inputs else None
    with Run(cfg, config.run, "export") as run:
        run.alone("export")
        if run.show_if_finished():
            return
        done = config.export.write(
            run, config.model, plan, text, config.folder, config.data.bos, measured_on=measured_on
        )
        run.finish(seed=None, verdict=export_verdict(done))
        print(f"{'files':16} {done.folder}")


if __name__ == "__main__":
    main()
