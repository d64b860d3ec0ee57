"""The safety net under a quantized model: a tensor that its format no longer holds goes to BF16.

    net = SafetyNet.calibrate(model, assignment, batches)
    dmx.apply(model, assignment, safety=net)

Each operand of each layer has a threshold: `margin` times the largest relative error that its
quantizer made on calibration data. A tensor above it, or one that is not finite, is used in BF16
for that call. The choice is made and counted on the device; nothing waits.

The calibrated thresholds and the margin of 1.25 are our choice; the measure (mean relative error
over non-zero elements) is that of MoR, arXiv 2512.22804.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mor._base import (
    Assignment,
    BlockFormat,
    Quantizer,
    applied,
    evaluating,
    model_logits,
    read_json,
    relative_error,
    write_json,
)
from mor.config import MorError
from mor.policy import round_to_bf16

SCHEMA = "mor.safety/1"
GUARDED_OPERANDS = ("weight", "input")
DEFAULT_MARGIN = 1.25
BF16_BITS = 16.0

_CALLS, _FALLBACKS, _ELEMENTS, _FALLBACK_ELEMENTS = range(4)
_COUNTERS = 4


def _errors_of(x: Tensor, y: Tensor) -> Tensor:
    """Relative error, 0-d float32; inf where x or y is not finite."""
    error = relative_error(x.detach(), y.detach())
    return torch.where(error.isnan(), torch.inf, error)


class GuardedQuantizer:
    """A quantizer that gives the BF16 values instead where its error is above `threshold`."""

    def __init__(self, quantizer: Quantizer, threshold: float) -> None:
        self.quantizer = quantizer
        self.block_format: BlockFormat = quantizer.block_format
        self.threshold = threshold
        self.counters: Tensor | None = None
        """(4,) float64 on the device: calls, fallbacks, elements, elements that fell back."""

    def __call__(self, x: Tensor) -> Tensor:
        y = self.quantizer(x)
        with torch.no_grad():
            is_held = _errors_of(x, y) <= self.threshold
            self._count(is_held, x.numel())
        return torch.where(is_held, y, round_to_bf16(x))

    def _count(self, is_held: Tensor, elements: int) -> None:
        if self.counters is None or self.counters.device != is_held.device:
            previous = self.counters
            self.counters = torch.zeros(_COUNTERS, dtype=torch.float64, device=is_held.device)
            if previous is not None:
                self.counters += previous.to(is_held.device)
        fallen = (~is_held).double()
        one = torch.ones_like(fallen)
        self.counters += torch.stack((one, fallen, one * elements, fallen * elements))


class _RecordingQuantizer:
    """Keeps the largest error seen, and lets everything pass."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.block_format: BlockFormat = quantizer.block_format
        self.largest: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.quantizer(x)
        error = _errors_of(x, y)
        self.largest = error if self.largest is None else torch.maximum(self.largest, error)
        return y


class _Recorder:
    def __init__(self) -> None:
        self.quantizers: dict[tuple[str, str], _RecordingQuantizer] = {}

    def guard(self, quantizer: Quantizer, layer_name: str, operand: str) -> Quantizer:
        recording = _RecordingQuantizer(quantizer)
        self.quantizers[layer_name, operand] = recording
        return recording


@dataclass(frozen=True)
class Calibrated:
    """largest_error: seen in calibration, share of 1. block_format: that it was seen with."""

    largest_error: float
    block_format: str


@dataclass
class SafetyNet:
    """Thresholds of a model's quantizers; hand it to `dmx.apply(..., safety=net)`.

    One net guards one model at a time: it counts what its guards saw since it was made.
    """

    calibrated: dict[str, dict[str, Calibrated]]
    """layer name -> operand ("weight", "input") -> what calibration saw. Empty: `constant`."""
    margin: dict[str, float]
    """operand -> factor on the largest error."""
    constant_threshold: float | None = None
    guards: dict[tuple[str, str], GuardedQuantizer] = field(default_factory=dict, repr=False)

    @classmethod
    def calibrate(
        cls,
        model: nn.Module,
        assignment: Assignment,
        batches: Iterable[Tensor],
        *,
        margin: float | Mapping[str, float] = DEFAULT_MARGIN,
    ) -> "SafetyNet":
        """Run the quantized model over calibration data and remember the largest errors.

        Args:
            model: without an assignment applied; it is left as it was.
            batches: int64 token ids (batch, length).
            margin: factor on the largest error, > 0; a dict gives weight and input their own.
                Weights do not change at run time, so theirs may be close to 1.

        Raises:
            MorError: no batches, a margin that is not > 0, or errors that are not finite.
        """
        margins = _margins(margin)
        recorder = _Recorder()
        n_batches, device = 0, next(model.parameters()).device
        with evaluating(model), torch.no_grad(), applied(model, assignment, safety=recorder):
            for batch in batches:
                model_logits(model, batch.to(device))
                n_batches += 1
        if not n_batches:
            raise MorError("batches is empty: the safety net needs calibration data to see errors")
        calibrated: dict[str, dict[str, Calibrated]] = {}
        for (layer, operand), quantizer in recorder.quantizers.items():
            if quantizer.largest is None:
                continue  # never ran, so it has no threshold; guard() says so if it is needed
            largest = float(quantizer.largest)
            if not math.isfinite(largest):
                raise MorError(
                    f"{layer}.{operand} was not finite on calibration data; the model overflows "
                    "there. Use another dtype (bf16 in place of fp16) or other data."
                )
            entry = Calibrated(largest, str(quantizer.block_format))
            calibrated.setdefault(layer, {})[operand] = entry
        return cls(calibrated, margins)

    @classmethod
    def constant(cls, threshold: float) -> "SafetyNet":
        """The same threshold everywhere, for curves of quality over effective bits."""
        if not threshold > 0:
            raise MorError(f"safety.threshold={threshold} must be > 0 (a relative error of 1)")
        return cls({}, _margins(DEFAULT_MARGIN), constant_threshold=threshold)

    def with_margin(self, margin: float | Mapping[str, float]) -> "SafetyNet":
        """A fresh net from the same calibration."""
        return SafetyNet(self.calibrated, _margins(margin), self.constant_threshold)

    def threshold(self, layer_name: str, operand: str) -> float:
        """Relative error above which the operand falls back.

        Raises:
            MorError: calibration did not see it.
        """
        if self.constant_threshold is not None:
            return self.constant_threshold
        entry = self.calibrated.get(layer_name, {}).get(operand)
        if entry is None:
            raise MorError(
                f"the safety net has no threshold for {layer_name}.{operand}: it was calibrated "
                "for another model or assignment, or the layer never ran. Calibrate it again."
            )
        return entry.largest_error * self.margin[operand]

    def guard(self, quantizer: Quantizer, layer_name: str, operand: str) -> GuardedQuantizer:
        """The quantizer with its net; `dmx.apply` calls this.

        Raises:
            MorError: no threshold, or calibrated with another format.
        """
        threshold = self.threshold(layer_name, operand)
        entry = self.calibrated.get(layer_name, {}).get(operand)
        if entry is not None and entry.block_format != str(quantizer.block_format):
            raise MorError(
                f"the safety net of {layer_name}.{operand} was calibrated with "
                f"{entry.block_format}, the assignment says {quantizer.block_format}. "
                "Calibrate it for this assignment."
            )
        guarded = GuardedQuantizer(quantizer, threshold)
        self.guards[layer_name, operand] = guarded
        return guarded

    def reset(self) -> None:
        """Counters to zero."""
        for guarded in self.guards.values():
            guarded.counters = None

    def report(self) -> dict[str, Any]:
        """What the guards saw, JSON-ready; waits for the device once.

        `fallback_rate` is a share of tensors, `element_fallback_rate` of elements. Effective bits:
        elements times the bits they were used in (16 on fallback) per element, once nominal and
        once with scales; weights and inputs apart. None where nothing ran.
        """
        keys = [key for key, guarded in self.guards.items() if guarded.counters is not None]
        stacked = [self.guards[key].counters for key in keys]
        rows = torch.stack([t for t in stacked if t is not None]).cpu().tolist() if keys else []
        counted = dict(zip(keys, rows, strict=True))
        layers: dict[str, dict[str, float]] = {}
        for (layer, operand), row in counted.items():
            layers.setdefault(layer, {})[operand] = row[_FALLBACKS] / row[_CALLS]
        return {
            "schema": "mor.safety_report/1",
            **self._totals(counted),
            **{
                operand: self._totals({k: r for k, r in counted.items() if k[1] == operand})
                for operand in GUARDED_OPERANDS
            },
            "layers": layers,
        }

    def _totals(self, counted: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
        calls, fallbacks, elements, fallen = (
            sum(row[i] for row in counted.values()) for i in range(_COUNTERS)
        )

        def bits(of: str) -> float | None:
            used = 0.0
            for key, row in counted.items():
                nominal = getattr(self.guards[key].block_format, of)
                kept = row[_ELEMENTS] - row[_FALLBACK_ELEMENTS]
                used += nominal * kept + BF16_BITS * row[_FALLBACK_ELEMENTS]
            return used / elements if elements else None

        return {
            "tensors": int(calls),
            "fallbacks": int(fallbacks),
            "fallback_rate": fallbacks / calls if calls else None,
            "element_fallback_rate": fallen / elements if elements else None,
            "effective_element_bits": bits("element_bits"),
            "effective_bits_per_element": bits("bits_per_element"),
        }

    def save(self, path: str | Path) -> Path:
        """JSON, beside the assignment (by convention safety.json)."""
        layers = {
            layer: {
                operand: {"largest_error": e.largest_error, "block_format": e.block_format}
                for operand, e in operands.items()
            }
            for layer, operands in self.calibrated.items()
        }
        return write_json(
            path,
            {
                "schema": SCHEMA,
                "margin": self.margin,
                "constant_threshold": self.constant_threshold,
                "layers": layers,
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> "SafetyNet":
        """What `save` wrote.

        Raises:
            MorError: unreadable, of another schema, or damaged.
        """
        try:
            data = read_json(Path(path))
            if data["schema"] != SCHEMA:
                raise MorError(f"{path} has schema {data['schema']!r}, this version reads {SCHEMA}")
            layers = {
                layer: {operand: Calibrated(**entry) for operand, entry in operands.items()}
                for layer, operands in data["layers"].items()
            }
            return cls(layers, _margins(data["margin"]), data["constant_threshold"])
        except MorError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise MorError(
                f"{path} is no safety net: {error}. Write one with SafetyNet.calibrate(...).save."
            ) from error


def _margins(margin: float | Mapping[str, float]) -> dict[str, float]:
    margins = (
        dict(margin) if isinstance(margin, Mapping) else dict.fromkeys(GUARDED_OPERANDS, margin)
    )
    if set(margins) != set(GUARDED_OPERANDS) or not all(m > 0 for m in margins.values()):
        raise MorError(
            f"safety.margin={margin!r} must be a number > 0, or one for each of "
            f"{', '.join(GUARDED_OPERANDS)}"
        )
    return {operand: float(m) for operand, m in margins.items()}
