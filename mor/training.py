"""Training a language model from scratch with MoR in its linear layers, or without.

Weights are float32, products run under autocast in BF16, MoR decides inside that. Everything that
a step needs follows from the seed and the step's number, so a run that died goes on from its last
checkpoint with the same numbers. Losses stay on the device until they are written.

A run's folder: train.jsonl (a row a step), validation.jsonl (a row a validation), mor.jsonl
(`MorLogger`), checkpoint.pt (the last one only).
"""

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from mor._base import write_atomic
from mor.config import MorConfig, MorError
from mor.outliers import FrozenChannels, check_outlier, largest_channel, rescale_channels
from mor.products import uses_hardware
from mor.statistics import MorLogger, cut_torn_line
from mor.swap import decision_state, load_decision_state, swap_linears

CHECKPOINT = "checkpoint.pt"


@dataclass
class OutlierConfig:
    """A function-preserving outlier in the middle of a run; see `mor.outliers`."""

    step: int = -1
    """Before this step; -1 = never."""
    layer: str = "model.layers.0.mlp"
    """Name of the MLP."""
    channels: list[int] = field(default_factory=list)
    """Which intermediate channels; they are held from then on. Empty: the one with the largest
    weight in up_proj, which sets the highest amax."""
    exponent: int = 17
    """up_proj rows times 2**exponent, down_proj columns times 2**-exponent."""


@dataclass
class TrainConfig:
    """One training run; checks itself."""

    epochs: float = 1.0
    """Passes over the training windows, shuffled anew each."""
    max_steps: int | None = None
    """Stop after so many steps; null = what epochs give. The schedule ends there too."""
    window: int = 1024
    """Tokens a sequence."""
    batch_size: int = 16
    """Sequences a step, over all processes."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    warmup_share: float = 0.05
    """Share of the steps with a linear rise to lr."""
    final_lr_share: float = 0.1
    """lr at the last step, as a share of the peak; cosine in between."""
    weight_decay: float = 0.1
    """On matrices; norms and biases have none."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    clip: float = 1.0
    """Largest gradient norm."""
    precision: str = "bf16"
    """bf16: autocast. no: float32 throughout."""
    activation_checkpointing: bool = False
    validate_every: int = 100
    """Steps between two validations; the last step is always validated."""
    validation_windows: int | None = None
    """The first so many; null = all."""
    checkpoint_every: int = 200
    """Steps between two checkpoints; the last step always has one."""
    log_every: int = 50
    """Steps between two reads of losses and counters from the device."""
    outlier: OutlierConfig = field(default_factory=OutlierConfig)

    def __post_init__(self) -> None:
        if isinstance(self.outlier, dict):
            self.outlier = OutlierConfig(**self.outlier)
        counts = ("batch_size", "validate_every", "checkpoint_every", "log_every")
        for name in (*counts, "window", "max_steps", "validation_windows"):
            value, low = getattr(self, name), 2 if name == "window" else 1
            if value is not None and value < low:
                raise MorError(f"train.{name}={value} must be at least {low}")
        for name in ("epochs", "lr", "clip"):
            if not getattr(self, name) > 0:
                raise MorError(f"train.{name}={getattr(self, name)} must be > 0")
        for name in ("warmup_share", "final_lr_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise MorError(f"train.{name}={getattr(self, name)} must lie between 0 and 1")
        if not self.weight_decay >= 0:
            raise MorError(f"train.weight_decay={self.weight_decay} must be at least 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise MorError(
                f"train.betas={list(self.betas)} must be two numbers from 0 to below 1, as [0.9, 0.95]"
            )
        if self.precision not in ("bf16", "no"):
            raise MorError(f"train.precision={self.precision!r} is not allowed. Allowed: bf16, no.")

    def steps_for(self, n_windows: int) -> int:
        """Steps of a run over n_windows training windows.

        Raises:
            MorError: the text does not fill one batch.
        """
        if n_windows < self.batch_size:
            raise MorError(
                f"the training text fills {n_windows} windows of {self.window} tokens, one step "
                f"takes train.batch_size={self.batch_size}. Use more text, or less of either."
            )
        steps = max(1, round(self.epochs * (n_windows // self.batch_size)))
        return steps if self.max_steps is None else min(steps, self.max_steps)


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Linear warm-up, then cosine to `final_lr_share` at the last step; step counts from 0."""
    warmup = round(config.warmup_share * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    low = config.final_lr_share
    return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


def batch_indices(step: int, n_windows: int, batch_size: int, seed: int) -> Tensor:
    """Windows of a step: each pass is a new permutation, its incomplete last batch is dropped."""
    per_epoch = n_windows // batch_size
    epoch, position = divmod(step, per_epoch)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(n_windows, generator=generator)
    return order[position * batch_size : (position + 1) * batch_size]


def next_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean negative log likelihood of each row, float32: (B, T, V), (B, T) -> (B,), nats/token.

    One row at a time, and again in the backward pass: float32 copies of all logits would be most of
    a step's memory (batches of 32 x 1024 tokens and a vocabulary of 49,152: 6.4 GB each).
    """

    def row_loss(row: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(row[:-1].float(), targets[1:])

    losses = [
        checkpoint(row_loss, row, targets, use_reentrant=False)
        for row, targets in zip(logits, tokens, strict=True)
    ]
    return torch.stack(losses)


@dataclass(frozen=True)
class TrainResult:
    """window_nll: (windows,) float64 on the validation text at the end, nats/token."""

    steps: int
    tokens: int
    window_nll: Tensor
    seconds: float
    """Of training steps, validation apart, over all starts of the run."""


class _Log:
    """Rows of device values, written `every` rows; the last row of a step counts."""

    def __init__(self, path: Path, every: int, active: bool) -> None:
        self.path, self.every, self.active = path, every, active
        if active:
            cut_torn_line(path)
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if len(self.rows) >= self.every:
            self.flush()

    def flush(self) -> None:
        if self.rows and self.active:
            names = [n for n, v in self.rows[0].items() if isinstance(v, Tensor)]
            if names:
                stacked = torch.stack(
                    [torch.stack([r[n].double() for n in names]) for r in self.rows]
                )
                for row, values in zip(self.rows, stacked.tolist(), strict=True):
                    row.update(zip(names, map(_finite, values), strict=True))
            with self.path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in self.rows)
        self.rows = []


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a log; of rows with one step the last counts (a resume wrote it again)."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return sorted({row["step"]: row for row in rows}.values(), key=lambda row: row["step"])


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
    processes = accelerator.num_processes
    if config.batch_size % processes:
        raise MorError(
            f"train.batch_size={config.batch_size} is no multiple of the {processes} processes"
        )
    if config.outlier.step >= steps:
        raise MorError(
            f"train.outlier.step={config.outlier.step} is never reached: the run has {steps} steps, "
            "the first is 0. Use an earlier one, more steps, or -1 for no outlier."
        )
    check_training(model, config, mor_config, accelerator.device)
    if accelerator.is_main_process:
        for stale in folder.glob(f".{CHECKPOINT}.*.tmp"):  # of a kill while it was written
            stale.unlink(missing_ok=True)
    if mor_config is not None:
        swap_linears(model, mor_config)
    if config.activation_checkpointing:
        _enable_activation_checkpointing(model)
    optimizer = torch.optim.AdamW(
        _parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
    )
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    run = _TrainingRun(model, wrapped, optimizer, config, accelerator, folder, steps, seed)
    start, seconds = run.resume()
    is_main = accelerator.is_main_process
    log = _Log(folder / "train.jsonl", config.log_every, is_main)
    validation_log = _Log(folder / "validation.jsonl", 1, is_main)
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
            validation_log.add({"step": step, "loss": _finite(float(losses.mean()))})
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


def _enable_activation_checkpointing(model: nn.Module) -> None:
    # transformers renames this; both forms mean the same.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        enable: Any = getattr(model, name, None)
        if enable is not None:
            enable({"use_reentrant": False})
            return
    raise MorError(f"{type(model).__name__} has no activation checkpointing to switch on")


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


class _TrainingRun:
    """Model, optimizer and outlier of a run, and its checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        wrapped: nn.Module,
        optimizer: Any,
        config: TrainConfig,
        accelerator: Accelerator,
        folder: Path,
        steps: int,
        seed: int,
    ) -> None:
        self.model, self.wrapped, self.optimizer = model, wrapped, optimizer
        self.config, self.accelerator = config, accelerator
        self.path = folder / CHECKPOINT
        self.seed = seed
        # A checkpoint of another schedule or order would be continued with wrong numbers.
        self.identity = {
            "steps": steps, "seed": seed, "batch_size": config.batch_size, "lr": config.lr,
            "window": config.window, "outlier_step": config.outlier.step,
        }  # fmt: skip
        self.held: FrozenChannels | None = None
        self.has_mor = any(hasattr(m, "handle") for m in model.modules())

    def step(self, step: int, windows: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """One optimizer step; loss and gradient norm, 0-d, on the device."""
        outlier = self.config.outlier
        if step == outlier.step:
            rescale_channels(self.model, outlier.layer, self._channels(), outlier.exponent)
            self._hold()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        indices = batch_indices(step, len(windows), self.config.batch_size, self.seed)
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        batch = windows[indices[rank::processes]].to(self.accelerator.device, non_blocking=True)
        self.wrapped.train()
        self.optimizer.zero_grad(set_to_none=True)
        with self.accelerator.autocast():
            logits = self.wrapped(input_ids=batch, use_cache=False).logits
        loss = next_token_losses(logits, batch).mean()
        # Backward passes with Python in them would wait for autograd's own thread at every layer.
        with torch.autograd.set_multithreading_enabled(False):
            self.accelerator.backward(loss)
        if self.held is not None:
            self.held.clear_gradients()
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        if self.held is not None:
            self.held.restore()
        return self.accelerator.reduce(loss.detach(), reduction="mean"), norm.detach()

    @torch.no_grad()
    def validate(self, windows: Tensor) -> Tensor:
        """(windows,) float64 mean loss of each, on the CPU; each process reads all of them."""
        self.model.eval()
        rows = []
        for batch in windows.split(self.config.batch_size):
            batch = batch.to(self.accelerator.device)
            with self.accelerator.autocast():
                logits = self.model(input_ids=batch, use_cache=False).logits
            rows.append(next_token_losses(logits, batch))
        self.model.train()
        return torch.cat(rows).double().cpu()

    def _channels(self) -> list[int]:
        # Scaled up, the largest is the largest still: a resumed run finds the same one.
        outlier = self.config.outlier
        return outlier.channels or [largest_channel(self.model, outlier.layer)]

    def _hold(self) -> None:
        self.held = FrozenChannels(self.model, self.config.outlier.layer, self._channels())

    def save(self, step: int, seconds: float) -> None:
        if not self.accelerator.is_main_process:
            return
        state = {
            "identity": self.identity,
            "step": step,
            "seconds": seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "mor": decision_state(self.model) if self.has_mor else None,
            "is_held": self.held is not None,
        }
        write_atomic(self.path, lambda file: torch.save(state, file))

    def resume(self) -> tuple[int, float]:
        """Step to go on with, seconds spent so far."""
        if not self.path.exists():
            return 0, 0.0
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise MorError(
                f"{self.path} is damaged ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}). Delete it to train from the start."
            ) from error
        if not isinstance(state, dict) or "identity" not in state:
            raise MorError(
                f"{self.path} is damaged (it holds no training state). Delete it to train from the "
                "start."
            )
        found = state["identity"] | {"mor": state["mor"] is not None}
        asked = self.identity | {"mor": self.has_mor}
        if found != asked:
            raise MorError(
                f"{self.path} is the checkpoint of another run ({found}, asked {asked}). Choose "
                "another folder, or delete it."
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["mor"] is not None:
            load_decision_state(self.model, state["mor"])
        if state["is_held"]:
            self._hold()
        return state["step"], state["seconds"]


_SHARED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""What a config of another `model_type` takes over."""


def fresh_weights(model: nn.Module, seed: int, **architecture: Any) -> nn.Module:
    """A model with newly drawn float32 weights, of the same class or of `model_type`.

    Args:
        architecture: fields of the model's config to change, for example num_hidden_layers=8. With
            model_type=qwen3 (any causal language model of transformers) the others start from
            that type's defaults and this model's sizes.

    Raises:
        MorError: the config has no such field, or transformers knows no such type.
    """
    config: Any = copy.deepcopy(model.config)
    kind = architecture.pop("model_type", config.model_type)
    if kind != config.model_type:
        shared = {name: getattr(config, name, None) for name in _SHARED_FIELDS} | architecture
        try:
            config = AutoConfig.for_model(kind)
        except ValueError as error:
            raise MorError(
                f"architecture.model_type={kind!r} is not known to transformers. Known ones are, for "
                "example, llama, qwen3, smollm3."
            ) from error
        _check_fields(config, architecture)
        config = AutoConfig.for_model(kind, **shared)
    else:
        _check_fields(config, architecture)
        for name, value in architecture.items():
            setattr(config, name, value)
        if "num_hidden_layers" in architecture and getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    config.dtype = torch.float32
    with _seeded(seed):
        if kind == model.config.model_type:  # type: ignore[union-attr]
            fresh = type(model)(config)
        else:
            fresh = AutoModelForCausalLM.from_config(config)
    return fresh.float()


def _check_fields(config: Any, architecture: dict[str, Any]) -> None:
    for name in architecture:
        if not hasattr(config, name):
            raise MorError(
                f"architecture.{name} is no field of {type(config).__name__}; common ones: "
                "num_hidden_layers, hidden_size, intermediate_size, num_attention_heads, "
                "num_key_value_heads, head_dim"
            )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's global generator at `seed` inside, as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
