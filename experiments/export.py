"""Write a model under an assignment as another runtime loads it, and load it again to be sure.

    python -m experiments.export assignment=outputs/run/assignment.json target=quark
    python -m experiments.export assignment=a.json target=compressed_tensors inputs=true windows=8

Leaves `model` (or `folder`) for the runtime, and config.yaml, record.json and report.html.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from torch import Tensor

from dmx.assignment.assignment import Assignment
from dmx.data import DataPair, encode, load_text
from dmx.exporting import EXPORT_TARGETS, PROFILES, check_model, check_new, make_plan, write_plan
from dmx.formats import BF16, check_choice
from dmx.models import ModelConfig, load_model, meta_model
from experiments.running.config import ConfigError, RunConfig, _defaults, build_root
from experiments.running.export_rows import actual_settings, export_facts, export_rows, verdict_text
from experiments.running.run import Run, entry_point, tokens_sha256
from experiments.running.sources import read_source


@dataclass(kw_only=True)
class ExportRun:
    """python -m experiments.export"""

    model: ModelConfig
    data: DataPair
    assignment: str
    """Path of an assignment.json, or of another tool's config; or an MX format for all layers."""
    target: str
    """assignment | compressed_tensors | quark | torchao, or names alone: llm_compressor |
    modelopt | auto_round | llama_cpp."""
    profile: str | None
    """Of compressed_tensors: vllm | transformers; null = the strictest that holds the formats."""
    inputs: bool
    """Have the runtime quantize inputs, too."""
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
        if self.profile is not None:
            check_choice(self.profile, PROFILES, "profile")
        if not self.max_shard_gigabytes > 0:
            raise ConfigError(f"max_shard_gigabytes={self.max_shard_gigabytes} must be above 0")
        if self.windows < 0 or self.window < 2:
            raise ConfigError(f"windows={self.windows} must be at least 0, window={self.window} 2")
        if self.windows and not self.verify:
            raise ConfigError(f"windows={self.windows} needs verify=true")


_GROUPS = {"model": ModelConfig, "run": RunConfig}
ConfigStore.instance().store(
    name="_export",
    node={name: _defaults(cls) for name, cls in _GROUPS.items()},
    package="_global_",
)


@entry_point("export")
def main(cfg: DictConfig) -> None:
    config = build_root(ExportRun, cfg)
    source = read_source(config.assignment, "assignment")
    if source.uniform is BF16 or source.files is not None:
        raise ConfigError(
            f"assignment={config.assignment} gives no formats to quantize this model to. Give an "
            "assignment.json or an MX format."
        )
    target = {name: getattr(config, name) for name in ("target", "profile", "inputs", "verify")}
    if config.folder and not Path(config.run.folder, "record.json").exists():
        check_new(Path(config.folder))
    plan = make_plan(source.given, **target) if isinstance(source.given, Assignment) else None
    meta = meta_model(config.model)
    plan = plan or make_plan(source.on(meta), **target)
    check_model(plan, meta, Path(config.folder or config.run.folder))
    text = load_text(config.data.evaluation) if config.windows else None
    with Run(cfg, config.run, "export") as run:
        if run.show_if_finished():
            return
        folder = Path(config.folder) if config.folder else run.path("model")
        if not config.folder:
            shutil.rmtree(folder, ignore_errors=True)  # of a start that died before its record
        loaded = load_model(config.model, run.device)
        tokens = None if text is None else _windows(config, encode(loaded.tokenizer, text))
        shard = int(config.max_shard_gigabytes * 1e9)
        done = write_plan(
            plan, loaded.model, folder, tokenizer=loaded.tokenizer, tokens=tokens, max_shard_bytes=shard,
        )  # fmt: skip
        assignment = plan.assignment
        # After the export, so that one that fails leaves a folder which a corrected command may use.
        assignment.save(run.path("assignment.json"))
        run.facts = {
            "model": loaded.provenance,
            "data": {},
            "export": export_facts(done, assignment),
        }
        if text is not None and tokens is not None:
            run.facts["data"] = {"evaluation": {
                "name": text.name, "source": text.source, "sha256": tokens_sha256(tokens),
                "tokens": tokens.numel(), "windows": config.windows, "window": config.window,
            }}  # fmt: skip
        run.actual = actual_settings(done, loaded.model)
        export_rows(run, done, loaded.model, assignment, config.windows)
        run.finish(seed=None, verdict={"text": verdict_text(done)})
        print(f"{'files':16} {done.folder}")


def _windows(config: ExportRun, stream: Tensor) -> Tensor:
    """(windows, window) int64, the first of the text."""
    count = config.windows * config.window
    if len(stream) < count:
        raise ConfigError(
            f"windows={config.windows} of window={config.window} need {count} tokens, the "
            f"evaluation text has {len(stream)}. Lower one of them."
        )
    return stream[:count].reshape(config.windows, config.window)


if __name__ == "__main__":
    main()
