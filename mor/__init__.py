"""MoR: FP8 where it is good enough, BF16 where it is not, decided while it runs."""

from mor.config import FORMATS, MorConfig, MorError
from mor.linear import (
    MorLinear,
    decision_state,
    load_decision_state,
    restore_linears,
    swap_linears,
)
from mor.policy import MorTensor, quantize
from mor.safety import SafetyNet
from mor.statistics import MorLogger, reset_stats, stats

__all__ = [
    "FORMATS",
    "MorConfig",
    "MorError",
    "MorLinear",
    "MorLogger",
    "MorTensor",
    "SafetyNet",
    "decision_state",
    "load_decision_state",
    "quantize",
    "reset_stats",
    "restore_linears",
    "stats",
    "swap_linears",
]
