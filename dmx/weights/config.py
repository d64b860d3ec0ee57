"""What becomes of the weights after the search, and how the stages that round on data calibrate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dmx.errors import RunError
from dmx.formats import BlockFormat, Format, check_choice

WEIGHTS = ("nearest", "mse", "local_hessian", "gptq", "learned")
"""What `weights` may say: nearest leaves them to the format and its scale rule, mse takes that rule for all
of them, local_hessian chooses among the scales of mse on calibration data, gptq rounds on these, learned trains them
under their formats."""

GPTQ_SCALES = ("rule", "search")
"""What `gptq.scales` may say."""
GPTQ_ORDERS = ("activity", "natural")
"""What `gptq.order` may say."""


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
    scales: str = "rule"
    """Scales of blocks: rule = by the assignment's scale rules; search = of the four exponents of the rule mse the one
    that leaves the least error after compensation, MX formats alone."""
    order: str = "activity"
    """In which columns are rounded: activity = blocks that share a scale as wholes, those with the largest inputs first,
    which leaves the most columns to make their errors good; natural = as they stand."""
    batches: int | None = 32
    """Calibration batches, the first so many; null = all."""

    def __post_init__(self) -> None:
        check_damping(self.damping)
        check_choice(self.scales, GPTQ_SCALES, "gptq.scales")
        check_choice(self.order, GPTQ_ORDERS, "gptq.order")
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
    """Refuse formats that `weights=local_hessian` cannot take; see `_check_exponents`."""
    _check_exponents(formats, "weights=local_hessian", "weights=mse or gptq")


def check_searched_scales(formats: Iterable[Format]) -> None:
    """Refuse formats that `gptq.scales=search` cannot take; see `_check_exponents`."""
    _check_exponents(formats, "gptq.scales=search", "gptq.scales=rule")


def _check_exponents(formats: Iterable[Format], setting: str, instead: str) -> None:
    """Refuse formats that weights may have and that have no power of two for each block.

    Args:
        formats: layers in BF16 stay as they are.
        setting, instead: what cannot take them, and what can.

    Raises:
        RunError: one is no MX format.
    """
    for other in formats:
        if isinstance(other, BlockFormat) and not other.is_mx:
            raise RunError(
                f"{setting}, and weights may be in {other}: only MX formats have a power of two for each "
                f"block to choose. Use {instead}, or search.family and search.fixed of MX formats."
            )


def check_damping(damping: float) -> None:
    """Raise RunError unless damping is a finite number > 0."""
    if not (math.isfinite(damping) and damping > 0):
        raise RunError(
            f"gptq.damping={damping} must be a finite number > 0: columns that no input reaches make "
            "the Hessian singular without it. The paper's value is 0.01."
        )
