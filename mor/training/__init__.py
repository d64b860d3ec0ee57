"""Training a language model from scratch with MoR in its linear layers, or without."""

from mor.training.config import OutlierConfig, TrainConfig, learning_rate
from mor.training.fresh import fresh_weights
from mor.training.loop import TrainResult, check_training, train
from mor.training.rows import read_rows
from mor.training.run import CHECKPOINT, batch_indices, next_token_losses

__all__ = [
    "CHECKPOINT",
    "OutlierConfig",
    "TrainConfig",
    "TrainResult",
    "batch_indices",
    "check_training",
    "fresh_weights",
    "learning_rate",
    "next_token_losses",
    "read_rows",
    "train",
]
