"""Train a language model from scratch with MoR recipes; writes record.json and report.html.

    python -m experiments.train_mor mor=[bf16,tensor,block_two_way] model=tiny_random data=embedded
    accelerate launch -m experiments.train_mor experiment=pretrain_49m seeds=[0,1,2]

`data.calibration` is the training text, `data.evaluation` the validation text. Each recipe and
seed has its own folder; a run that died goes on from its last checkpoint.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator
from omegaconf import DictConfig

import mor
from dmx.data import DataPair
from dmx.formats import check_choice
from dmx.models import ModelConfig
from mor.training import TrainConfig

from .reporting.recipes import comparison, comparison_text
from .reporting.report_training import write_training_report
from .running.composing import build_root
from .running.guard import console, entry_point
from .running.run import Run
from .running.settings import ConfigError, RunConfig
from .running.training import Training


@dataclass(kw_only=True)
class TrainMorRun:
    """python -m experiments.train_mor"""

    model: ModelConfig
    data: DataPair
    mor: dict[str, Any]
    """Recipe name -> fields of MorConfig, or null for plain linear layers."""
    train: TrainConfig
    seeds: list[int]
    """Weights and order of the text."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config to change, for example num_hidden_layers; model_type=qwen3 makes
    it another model of about these sizes."""
    save_models: bool = False
    """Keep each trained model in <recipe>-<seed>/model, as transformers loads it (model.id=...)."""
    run: RunConfig

    def __post_init__(self) -> None:
        if not self.mor or not self.seeds:
            raise ConfigError(
                "mor and seeds must name at least one recipe and seed: mor=[bf16,tensor] seeds=[0]"
            )
        self.run.check_whole("training")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds={self.seeds} names a seed twice. Name each once.")
        allowed = tuple(f.name for f in dataclasses.fields(mor.MorConfig))
        for name, fields in self.mor.items():
            for key in fields or ():
                check_choice(key, allowed, f"mor.{name} key")
        recipes = {
            name: None if fields is None else mor.MorConfig(**fields)
            for name, fields in self.mor.items()
        }
        self.plan = Training(
            self.model, self.architecture, self.train, recipes, self.seeds, self.save_models
        )


@entry_point("train_mor", TrainMorRun)
def main(cfg: DictConfig) -> None:
    """Trains and writes models' logs, record.json and report.html."""
    config = build_root(TrainMorRun, cfg)
    device = config.run.torch_device()
    accelerator = Accelerator(mixed_precision=config.train.precision, cpu=device.type == "cpu")
    config.plan.check(accelerator.device)
    with Run(cfg, config.run, "train_mor", write_training_report) as run:
        if run.show_if_finished():
            return
        config.plan.measure(run, config.data, accelerator)
        run.comparison = comparison(run.trained)
        run.actual |= {
            "run": {"device": str(accelerator.device)},
            "processes": accelerator.num_processes,
        }
        run.finish(seed=config.seeds[0] if len(config.seeds) == 1 else None, verdict=None)
        for entry in run.comparison:
            console.print(comparison_text(entry), highlight=False)


if __name__ == "__main__":
    main()
