"""What becomes of the weights after the search, and how the stages that round on data calibrate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dmx.errors import RunError
from dmx.formats import BlockFormat, Format

WEIGHTS = ("nearest", "mse", "local_hessian", "gptq", "learned")
"""What `weights` may say: nearest leaves them to the format and its scale rule, mse takes that rule for all
of them, local_hessian chooses among the scales of mse on calibration data, gptq rounds on these, learned trains them
under their formats."""


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
        _check_batches("gptq", self.batches)


@dataclass(kw_only=True)
class LocalHessianConfig:
    """How local_hessian calibrates; used where `weights` says it."""

    inputs: bool = True
    """Calibrate on quantized inputs, as W+A runs; false = on full-precision inputs, as W runs."""
    batches: int | None = 32
    """Calibration batches, the first so many; null = all."""

    def __post_init__(self) -> None:
        _check_batches("local_hessian", self.batches)


def _check_batches(stage: str, batches: int | None) -> None:
    if batches is not None and batches < 1:
        raise RunError(f"{stage}.batches={batches} must be at least 1, or null for all")


def check_local_hessian(formats: Iterable[Format]) -> None:
    """Refuse formats that weights may have and that have no power of two for each block.

    Args:
        formats: layers in BF16 stay as they are.

    Raises:
        RunError: one is no MX format.
    """
    for other in formats:
        if isinstance(other, BlockFormat) and not other.is_mx:
            raise RunError(
                f"weights=local_hessian, and weights may be in {other}: only MX formats have a power of two for each "
                "block to choose. Use weights=mse or gptq, or search.family and search.fixed of MX formats."
            )


def check_damping(damping: float) -> None:
    """Raise RunError unless damping is a finite number > 0."""
    if not (math.isfinite(damping) and damping > 0):
        raise RunError(
            f"gptq.damping={damping} must be a finite number > 0: columns that no input reaches make "
            "the Hessian singular without it. The paper's value is 0.01."
        )
