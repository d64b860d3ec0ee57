"""What MoR tries, on which region one decision counts, and when a try is good enough."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from mor._base import E4M3, E5M2, DmxError, ElementFormat, check_choice

Policy = Literal["tensor", "block_two_way", "block_three_way"]
Metric = Literal["relative_error"]
Products = Literal["auto", "real", "emulated"]

FORMATS = ("e4m3", "e5m2", "bf16")
"""What a decision indexes."""
BF16_INDEX = FORMATS.index("bf16")
ELEMENTS: dict[str, ElementFormat] = {"e4m3": E4M3, "e5m2": E5M2}
LARGEST_BF16_IN_FP16 = 65280.0
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

DEFAULT_THRESHOLD = 0.045
"""E4M3's: twice the mean relative error of its own rounding, 2.25 %."""
DEFAULT_THRESHOLDS = {"e4m3": DEFAULT_THRESHOLD, "e5m2": 2 * DEFAULT_THRESHOLD}
"""E5M2's own rounding is 4.5 %: at one threshold for both, its acceptance would be a coin toss."""

_PARTITION = re.compile(r"([1-9]\d*)x([1-9]\d*)")


def partials(device: torch.device) -> int:
    """Columns of `fp8.amax`: a GPU leaves the last maximum to whoever needs it, to save a launch."""
    return 512 if device.type == "cuda" else 1


class MorError(DmxError):
    """A setting of MoR that does not exist or does not fit the others."""


@dataclass
class MorConfig:
    """A policy of MoR; checks itself.

    Source: MoR, arXiv 2512.22804 (policies, relative error, thresholds). E5M2's own threshold and
    `refresh_every` are ours.
    """

    policy: Policy = "tensor"
    """tensor: one decision for the whole operand. block_two_way, block_three_way: one a block."""
    partition: str = "tensor"
    """Region of one scale: tensor, row, column or RxC. With a block policy also of one decision."""
    formats: tuple[str, ...] = ("e4m3", "bf16")
    """Tried in this order; the last is bf16, which takes everything. Only for policy=tensor."""
    threshold: Any = DEFAULT_THRESHOLD
    """A float for all FP8 formats, or a dict by format (unnamed: its default): accept below it, share
    of 1. The default 0.045 is E4M3's and gives E5M2 its own default, 0.09."""
    metric: Metric = "relative_error"
    """relative_error: mean |x-y|/|x| over non-zero x. The only one."""
    refresh_every: int = 1
    """Steps between two decisions of one layer; between them the scales still follow the data."""
    products: Products = "auto"
    """auto: FP8 matrix products where the card has them, else emulated. real: an error there."""

    def __post_init__(self) -> None:
        self.formats = tuple(self.formats)
        check_choice(self.policy, get_args(Policy), "mor.policy")
        check_choice(self.metric, get_args(Metric), "mor.metric")
        check_choice(self.products, get_args(Products), "mor.products")
        self._check_partition()
        self._check_formats()
        self._check_thresholds()
        if not isinstance(self.refresh_every, int) or self.refresh_every < 1:
            raise MorError(
                f"mor.refresh_every={self.refresh_every!r} is not allowed: steps between two "
                "decisions, a whole number of at least 1 (1 decides each step)."
            )

    def _check_partition(self) -> None:
        fits = self.partition in ("tensor", "row", "column") or _PARTITION.fullmatch(self.partition)
        if not fits:
            raise MorError(
                f"mor.partition={self.partition!r} is not allowed. "
                "Allowed: tensor, row, column, or RxC with both at least 1 (as 128x128, 1x128)."
            )
        if self.policy != "tensor" and self.partition == "tensor":
            raise MorError(
                f"mor.policy={self.policy} decides per block, mor.partition=tensor has none. "
                "Set mor.partition=128x128 (the paper's), row, column or RxC, or mor.policy=tensor."
            )

    def _check_formats(self) -> None:
        for name in self.formats:
            check_choice(name, FORMATS, "mor.formats")
        repeated = len(set(self.formats)) < len(self.formats)
        if repeated or not self.formats or self.formats[-1] != "bf16":
            raise MorError(
                f"mor.formats={list(self.formats)} is no ladder: each format once, and bf16 last, "
                "because it takes everything. Examples: [e4m3, bf16], [e4m3, e5m2, bf16], [bf16]."
            )
        if self.policy != "tensor" and self.formats != ("e4m3", "bf16"):
            raise MorError(
                f"mor.policy={self.policy} has its formats built in, mor.formats="
                f"{list(self.formats)} would be ignored. Leave mor.formats out, or set "
                "mor.policy=tensor."
            )

    def _check_thresholds(self) -> None:
        if self.policy != "tensor" and self.threshold != DEFAULT_THRESHOLD:
            raise MorError(
                f"mor.policy={self.policy} compares E4M3 with E5M2 and has no threshold; "
                f"mor.threshold={self.threshold!r} would be ignored. Leave it out, or set "
                "mor.policy=tensor."
            )
        if isinstance(self.threshold, Mapping):
            for name in self.threshold:
                check_choice(name, self.fp8_formats, "mor.threshold")
            values = list(self.threshold.values())
        else:
            values = [self.threshold]
        for value in values:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not value > 0:
                raise MorError(
                    f"mor.threshold={self.threshold!r} is not allowed: a number > 0, or a dict of "
                    f"such by format ({', '.join(ELEMENTS)})."
                )

    @property
    def fp8_formats(self) -> tuple[str, ...]:
        """The formats of the ladder that can be refused."""
        return self.formats[:-1]

    def threshold_of(self, name: str) -> float:
        """Threshold of one format; see `threshold`."""
        if isinstance(self.threshold, Mapping):
            return float(self.threshold.get(name, DEFAULT_THRESHOLDS[name]))
        if self.threshold == DEFAULT_THRESHOLD:
            return DEFAULT_THRESHOLDS[name]
        return float(self.threshold)
