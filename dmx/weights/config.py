"""What becomes of the weights after the search, and how GPTQ calibrates."""

import math
from dataclasses import dataclass

from dmx.errors import RunError

WEIGHTS = ("nearest", "mse", "gptq", "learned")
"""What `weights` may say: nearest leaves them to the format and its scale rule, mse takes that rule for all
of them, gptq rounds them on calibration data, learned trains them under their formats."""


@dataclass(kw_only=True)
class GptqConfig:
    """How GPTQ calibrates; used where `weights` says gptq."""

    damping: float = 0.01
    """Share of the mean of the Hessian's diagonal that is added to it; > 0. From the paper."""
    inputs: bool = True
    """Calibrate on quantized inputs, as W+A runs; false = on full-precision inputs, as W runs."""
    correct_inputs: bool = False
    """Round to weights that also make good what quantizing the inputs loses: better as W+A, worse
    than nearest as W."""
    batches: int | None = 32
    """Calibration batches, the first so many; null = all."""

    def __post_init__(self) -> None:
        check_damping(self.damping)
        if self.batches is not None and self.batches < 1:
            raise RunError(f"gptq.batches={self.batches} must be at least 1, or null for all")


def check_damping(damping: float) -> None:
    """Raise RunError unless damping is a finite number > 0."""
    if not (math.isfinite(damping) and damping > 0):
        raise RunError(
            f"gptq.damping={damping} must be a finite number > 0: columns that no input reaches make "
            "the Hessian singular without it. The paper's value is 0.01."
        )
