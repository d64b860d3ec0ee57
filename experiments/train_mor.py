"""Train a language model from scratch with MoR recipes; writes record.json and report.html.

    python -m experiments.train_mor mor=[bf16,tensor,block_two_way] model=tiny_random data=embedded
    accelerate launch -m experiments.train_mor experiment=pretrain_49m seeds=[0,1,2]

`data.calibration` is the training text, `data.evaluation` the validation text. Each recipe and
seed has its own folder; a run that died goes on from its last checkpoint.
"""

import dataclasses
import math
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

import mor
from dmx.data import DataConfig, DataPair, check_window, encode, load_text
from dmx.errors import DmxError, RunError
from dmx.files import write_json
from dmx.formats import check_choice
from dmx.models import LoadedModel, ModelConfig, load_model, max_positions, meta_model
from dmx.progress import progress
from experiments.reporting.report_training import (
    comparison,
    comparison_text,
    fallback_digits,
    loss_curve,
    write_training_report,
)
from experiments.reporting.results import group_rows
from experiments.running.config import ConfigError, RunConfig, _defaults, build_root
from experiments.running.run import Run, console, entry_point, tokens_sha256
from mor.log import read_log
from mor.training import TrainConfig, check_training, fresh_weights, train


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
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds={self.seeds} names a seed twice. Name each once.")
        allowed = tuple(f.name for f in dataclasses.fields(mor.MorConfig))
        for name, fields in self.mor.items():
            for key in fields or ():
                check_choice(key, allowed, f"mor.{name} key")
        self.recipes = {
            name: None if fields is None else mor.MorConfig(**fields)
            for name, fields in self.mor.items()
        }


def _register() -> None:
    train_defaults = dataclasses.asdict(TrainConfig())
    node = {
        "model": _defaults(ModelConfig),
        "data": {"calibration": _defaults(DataConfig), "evaluation": _defaults(DataConfig)},
        "train": train_defaults,
        "architecture": {},
        "save_models": False,
        "run": _defaults(RunConfig),
    }
    ConfigStore.instance().store(name="_train_mor", node=node, package="_global_")


_register()


@entry_point("train_mor")
def main(cfg: DictConfig) -> None:
    config = build_root(TrainMorRun, cfg)
    device = config.run.torch_device()
    accelerator = Accelerator(mixed_precision=config.train.precision, cpu=device.type == "cpu")
    _check(config, accelerator.device)
    with accelerator.main_process_first():
        run = Run(cfg, config.run, "train_mor", write_training_report)
    with run:
        if not run.show_if_finished():
            _train(config, run, accelerator)


def _check(config: TrainMorRun, device: torch.device) -> None:
    """Refuse what follows from shapes alone, before weights load and before a folder is taken."""
    meta = meta_model(config.model)
    if config.architecture:
        try:
            with torch.device("meta"):
                meta = fresh_weights(meta, 0, **config.architecture)
        except DmxError:
            raise
        except Exception as error:  # whatever a library makes of values that fit no model
            asked = ", ".join(f"{name}={value}" for name, value in config.architecture.items())
            raise ConfigError(
                f"architecture: {asked} gives no causal language model ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}). Change these fields, or leave them out."
            ) from error
    check_window(config.train.window, max_positions(meta.config))
    for recipe in config.recipes.values():
        check_training(meta, config.train, recipe, device)
        if recipe is not None:
            mor.restore_linears(mor.swap_linears(meta, recipe))


def _train(config: TrainMorRun, run: Run, accelerator: Accelerator) -> None:
    """Every asked recipe in turn, then the record and the report."""
    texts = {
        "training": load_text(config.data.calibration),
        "validation": load_text(config.data.evaluation),
    }
    loaded = load_model(config.model)
    tokens = {name: encode(loaded.tokenizer, text) for name, text in texts.items()}
    window = config.train.window
    windows = {name: t[: len(t) // window * window].view(-1, window) for name, t in tokens.items()}
    for name, found in windows.items():
        if not len(found):
            raise ConfigError(
                f"the {name} text has {len(tokens[name])} tokens, less than one train.window="
                f"{window}. Use a longer text or a smaller window."
            )
    run.facts = {
        "model": loaded.provenance | {"note": "newly drawn weights, trained from scratch"},
        "data": {
            name: {
                "name": text.name, "source": text.source, "sha256": tokens_sha256(tokens[name]),
                "tokens": len(tokens[name]), "windows": len(windows[name]), "window": window,
            }
            for name, text in texts.items()
        },
    }  # fmt: skip
    for seed in config.seeds:
        for name in config.recipes:
            make = partial(_trained, run, config, loaded, windows, accelerator, name, seed)
            if accelerator.is_main_process:
                run.row(f"{name}-{seed}", make)
            elif not run.row_path(f"{name}-{seed}").exists():
                make()  # takes part; its row has the counts of its own share of the batches
    if not accelerator.is_main_process:
        return
    entries = comparison(group_rows(run.rows))
    run.actual |= {
        "run": {"device": str(accelerator.device)},
        "processes": accelerator.num_processes,
    }
    run.facts["comparison"] = entries
    run.finish(seed=config.seeds[0] if len(config.seeds) == 1 else None, verdict=None)
    for entry in entries:
        console.print(comparison_text(entry), highlight=False)


def _trained(
    run: Run, config: TrainMorRun, loaded: LoadedModel, windows: dict[str, torch.Tensor],
    accelerator: Accelerator, recipe: str, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """One recipe and seed: trained, and its row for the record."""
    folder = run.path(f"{recipe}-{seed}")
    model = fresh_weights(loaded.model, seed, **config.architecture)
    steps = config.train.steps_for(len(windows["training"]))
    quiet = not accelerator.is_main_process
    with progress(f"{recipe}, seed {seed}", steps, quiet=quiet) as advance:
        result = train(
            model, windows["training"], windows["validation"], config.train,
            config.recipes[recipe], folder=folder, seed=seed, accelerator=accelerator,
            on_step=advance,
        )  # fmt: skip
    if config.save_models and accelerator.is_main_process:
        _save_model(model, loaded, folder / "model")
    accelerator.wait_for_everyone()  # the main process wrote the logs that the row is read from
    row: dict[str, Any] = {
        "label": recipe, "seed": seed, "folder": folder.name, "search": None, "assignment": None,
        "operands": None, "budget": None, "parameters": sum(p.numel() for p in model.parameters()),
        "steps": result.steps, "train_tokens": result.tokens, "train_seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds if result.seconds else None,
        "windows": len(result.window_nll),
        "tokens": len(result.window_nll) * (config.train.window - 1),
        "loss_curve": loss_curve(folder),
    }  # fmt: skip
    nll = float(result.window_nll.mean())
    if math.isfinite(nll):
        row |= {"nll": nll, "perplexity": math.exp(min(nll, 700.0))}
        row["window_nll"] = result.window_nll.tolist()
    else:
        row |= dict.fromkeys(("nll", "perplexity", "window_nll"))
        row["nll_reason"] = row["perplexity_reason"] = "the loss is not finite"
    for name in ("element_bits", "bits_per_element", "whole_model_bits_per_element"):
        row |= {name: None, f"{name}_reason": "a training run, no assignment"}
    row |= {"search_seconds": None, "search_seconds_reason": "no search"}
    row |= {"eval_seconds": None, "eval_seconds_reason": "not timed apart"}
    row |= {"zero_shot": None, "zero_shot_reason": "not asked for"}
    if config.recipes[recipe] is None:
        return row | {"fp8_tensor_share": None, "fp8_tensor_share_reason": "no MoR in this recipe"}
    statistics = mor.stats(model)
    if accelerator.is_main_process:
        write_json(folder / "stats.json", statistics)
    if config.train.outlier.step >= 0:
        header, log = read_log(folder / "mor.jsonl")
        row["fallback_digits"] = fallback_digits(header["layers"], log)
    return row | {
        "fp8_tensor_share": statistics["fp8_tensor_share"],
        "operands_mor": statistics["operands"],
        "products_mor": statistics["products"],
    }


def _save_model(model: Any, loaded: LoadedModel, folder: Path) -> None:
    """Weights, config and tokenizer; the folder appears when it is whole."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        # State dicts of MorLinear and nn.Linear are alike, so the layers can stay what they are.
        model.save_pretrained(part)
        loaded.tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise RunError(
            f"save_models=true: cannot write {folder} ({error.strerror or error}). Make room, or take "
            "away what stands there; the same command goes on from the last step."
        ) from error


if __name__ == "__main__":
    main()
