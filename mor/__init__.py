"""MoR: FP8 where it is good enough, BF16 where it is not, decided while it runs."""

from mor.config import FORMATS, MorConfig, MorError
from mor.linear import MorLinear
from mor.log import MorLogger
from mor.policy import MorTensor, quantize
from mor.safety import SafetyNet
from mor.statistics import reset_stats, stats
from mor.swap import decision_state, load_decision_state, restore_linears, swap_linears

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
