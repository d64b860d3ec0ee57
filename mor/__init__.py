"""MoR: FP8 where it is good enough, BF16 where it is not, decided while it runs."""

from mor.config import FORMATS, MorConfig, MorError
from mor.policy import MorTensor, quantize

__all__ = ["FORMATS", "MorConfig", "MorError", "MorTensor", "quantize"]
