"""Training a language model with MoR in its linear layers, or without.

A run's folder: train.jsonl (a row a step), validation.jsonl (a row a validation), mor.jsonl
(`MorLogger`), checkpoint.pt (the last one only). Losses stay on the device until they are written.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mor._base import finite
from mor.config import MorConfig, MorError
from mor.log import MorLogger
from mor.outliers import check_outlier
from mor.products import uses_hardware
from mor.swap import swap_linears
from mor.training.config import TrainConfig, learning_rate
from mor.training.rows import RowLog
from mor.training.run import CHECKPOINT, TrainingRun


@dataclass(frozen=True)
class TrainResult:
    """window_nll: (windows,) float64 on the validation text at the end, nats/token."""

    steps: int
    tokens: int
    window_nll: Tensor
    seconds: float
    """Of training steps, validation apart, over all starts of the run."""


def train(
    model: nn.Module,
    train_windows: Tensor,
    validation_windows: Tensor,
    config: TrainConfig,
    mor_config: MorConfig | None,
    *,
    folder: str | Path,
    seed: int,
    accelerator: Accelerator | None = None,
    on_step: Callable[[str], None] | None = None,
) -> TrainResult:
    """Train a model in place; goes on from the folder's checkpoint if there is one.

    Args:
        model: a causal language model (`.logits` of `input_ids`), float32 weights.
        train_windows, validation_windows: (n, window) int64, on the CPU.
        mor_config: None trains with plain linear layers.
        seed: order of the windows. (Weights come with the model.)
        on_step: called after each step with a short note, for a progress bar.

    Raises:
        MorError: too little text, a batch that the processes cannot share, or a checkpoint of
            other settings.
    """
    accelerator = accelerator or Accelerator(mixed_precision=config.precision)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    steps = config.steps_for(len(train_windows))
    _check_steps(config, steps, accelerator.num_processes)
    check_training(model, config, mor_config, accelerator.device)
    is_main = accelerator.is_main_process
    if is_main:
        for stale in folder.glob(f".{CHECKPOINT}.*.tmp"):  # of a kill while it was written
            stale.unlink(missing_ok=True)
    if mor_config is not None:
        swap_linears(model, mor_config)
    run = TrainingRun.prepare(model, config, accelerator, folder, steps, seed)
    start, seconds = run.resume()
    log = RowLog(folder / "train.jsonl", config.log_every, is_main)
    validation_log = RowLog(folder / "validation.jsonl", 1, is_main)
    counters = None
    if mor_config is not None and is_main:
        counters = MorLogger(model, folder / "mor.jsonl", flush_every=config.log_every)
    validation = validation_windows[: config.validation_windows]
    losses = torch.empty(0)
    for step in range(start, steps):
        began = time.perf_counter()
        rate = learning_rate(step, steps, config)
        loss, norm = run.step(step, train_windows, rate)
        if counters is not None:
            counters.step(step)
        seconds += time.perf_counter() - began
        log.add({"step": step, "loss": loss, "lr": rate, "grad_norm": norm, "seconds": seconds})
        is_last = step == steps - 1
        if is_last or (step + 1) % config.validate_every == 0:
            losses = run.validate(validation)
            validation_log.add({"step": step, "loss": finite(float(losses.mean()))})
        if is_last or (step + 1) % config.checkpoint_every == 0:
            log.flush()
            if counters is not None:
                counters.flush()
            run.save(step + 1, seconds)
        if on_step is not None:
            on_step(f"lr {rate:.1e}")
    if not losses.numel():
        losses = run.validate(validation)
    tokens = steps * config.batch_size * train_windows.shape[1]
    return TrainResult(steps, tokens, losses, seconds)


def _check_steps(config: TrainConfig, steps: int, processes: int) -> None:
    if config.batch_size % processes:
        raise MorError(
            f"train.batch_size={config.batch_size} is no multiple of the {processes} processes"
        )
    if config.outlier.step >= steps:
        raise MorError(
            f"train.outlier.step={config.outlier.step} is never reached: the run has {steps} steps, "
            "the first is 0. Use an earlier one, more steps, or -1 for no outlier."
        )


def check_training(
    model: nn.Module, config: TrainConfig, mor_config: MorConfig | None, device: torch.device
) -> None:
    """Raise MorError for settings that fail only when they are first used; reads shapes only.

    Args:
        model: may be on the meta device, with plain linear layers.
        device: where it will be trained.
    """
    if config.outlier.step >= 0:
        check_outlier(model, config.outlier.layer, config.outlier.channels)
    if mor_config is not None:
        uses_hardware(mor_config, device)
