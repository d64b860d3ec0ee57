"""Training of recipes: what is refused before it, each recipe and seed in turn, models that are kept."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

import mor
from dmx.data import DataPair, check_window, encode, load_text, windows_of
from dmx.errors import DmxError, RunError
from dmx.files import write_json
from dmx.models import LoadedModel, ModelConfig, load_model, max_positions, meta_model
from dmx.progress import progress
from mor.training import TrainConfig, check_training, fresh_weights, train

from ..reporting.record import ModelFacts, TrainingRow
from .provenance import windows_facts
from .rows import make_training_row
from .run import Run
from .settings import ConfigError

Recipes = Mapping[str, mor.MorConfig | None]
"""Name -> MoR; None = plain linear layers."""


@dataclass(frozen=True)
class Training:
    """Recipes x seeds, with one set of settings."""

    model: ModelConfig
    architecture: Mapping[str, Any]
    config: TrainConfig
    recipes: Recipes
    seeds: list[int]
    save_models: bool

    def check(self, device: torch.device) -> None:
        """Refuse what follows from shapes alone, before weights load and before a folder is taken.

        Raises:
            ConfigError: architecture fields that make no model. DmxError: as the library says.
        """
        meta = meta_model(self.model)
        if self.architecture:
            try:
                with torch.device("meta"):
                    meta = fresh_weights(meta, 0, **self.architecture)
            except DmxError:
                raise
            except Exception as error:  # whatever a library makes of values that fit no model
                asked = ", ".join(f"{name}={value}" for name, value in self.architecture.items())
                raise ConfigError(
                    f"architecture: {asked} gives no causal language model ({type(error).__name__}: "
                    f"{' '.join(str(error).split())[:200]}). Change these fields, or leave them out."
                ) from error
        check_window(self.config.window, max_positions(meta.config))
        for recipe in self.recipes.values():
            check_training(meta, self.config, recipe, device)
            if recipe is not None:
                mor.restore_linears(mor.swap_linears(meta, recipe))

    def measure(self, run: Run, data: DataPair, accelerator: Accelerator) -> None:
        """The rows of all recipes and seeds.

        Args:
            data: calibration is the training text, evaluation the validation text.
        """
        run.unsharded("train_mor")
        texts = {"training": load_text(data.calibration), "validation": load_text(data.evaluation)}
        loaded = load_model(self.model)
        window = self.config.window
        tokens = {name: encode(loaded.tokenizer, text, data.bos) for name, text in texts.items()}
        windows = {name: windows_of(ids, window) for name, ids in tokens.items()}
        for name, rows in windows.items():
            if not len(rows):
                raise ConfigError(
                    f"the {name} text has {len(tokens[name])} tokens, less than one train.window="
                    f"{window}. Use a longer text or a smaller window."
                )
        fresh = {"note": "newly drawn weights, trained from scratch"}
        run.model = ModelFacts.from_dict(loaded.provenance | fresh, "model")
        run.data = {name: windows_facts(texts[name], tokens[name], window) for name in texts}
        for seed in self.seeds:
            for name in self.recipes:
                make = partial(self._trained, run, loaded, windows, accelerator, name, seed)
                run.row(f"{name}-{seed}", make, TrainingRow)

    def _trained(
        self, run: Run, loaded: LoadedModel, windows: Mapping[str, torch.Tensor],
        accelerator: Accelerator, recipe: str, seed: int,
    ) -> TrainingRow:  # fmt: skip
        """One recipe and seed: trained, and its row for the record."""
        folder = run.path(f"{recipe}-{seed}")
        model = fresh_weights(loaded.model, seed, **self.architecture)
        steps = self.config.steps_for(len(windows["training"]))
        with progress(f"{recipe}, seed {seed}", steps) as advance:
            result = train(
                model, windows["training"], windows["validation"], self.config,
                self.recipes[recipe], folder=folder, seed=seed, accelerator=accelerator,
                on_step=advance,
            )  # fmt: skip
        if self.save_models and accelerator.is_main_process:
            save_model(model, loaded, folder / "model")
        accelerator.wait_for_everyone()  # the main process wrote the logs that the row is read from
        statistics = None if self.recipes[recipe] is None else mor.stats(model)
        if statistics is not None and accelerator.is_main_process:
            write_json(folder / "stats.json", statistics)
        return make_training_row(
            recipe, seed, folder, model, result, window=self.config.window, statistics=statistics,
            with_digits=statistics is not None and self.config.outlier.step >= 0,
        )  # fmt: skip


def save_model(model: Any, loaded: LoadedModel, folder: Path) -> None:
    """Weights, config and tokenizer; the folder appears when it is whole.

    Raises:
        RunError: it cannot be written.
    """
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
