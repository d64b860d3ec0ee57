"""Settings of one training run, and the learning rate that follows from them."""

import math
from dataclasses import dataclass, field

from mor.config import MorError


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
    """Of AdamW; two numbers from 0 to below 1."""
    clip: float = 1.0
    """Largest gradient norm."""
    precision: str = "bf16"
    """bf16: autocast. no: float32 throughout."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass, to save memory."""
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
