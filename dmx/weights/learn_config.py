"""How weights learn: settings that check themselves."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmx.errors import DataError, RunError, setting_text
from dmx.formats import SWITCH, BlockFormat, Format, check_choice
from dmx.models.memory import OOM
from dmx.weights.learned_optimizer import STATES, warm_cosine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

FEWEST_TO_HOLD = 8
"""Batches, one of which is held back; below, none is unless it is asked for."""
PASSES = 10
"""Over the batches that are learned from, where no number of steps is given: fewer are as good for some formats, and
from 20 on the perplexity of other text rises (docs/lab-notes/weights.md)."""
MOST_STEPS = 600
"""Where no number of steps is given."""
MANY_PASSES = 2 * PASSES
"""A batch that is seen more often is likely to be learned by heart, which a warning says."""
LEARNED_NAMES = {"weights": "learned", "scales": "learned_scales", "rounding": "learned_rounding"}
"""What learns -> how an assignment calls it."""
IDLE = {
    "weights": ("scale_lr",),
    "scales": ("lr", "masters", "block_steps"),
    "rounding": ("scale_lr", "lr", "warmup", "max_norm", "masters", "optimizer_state"),
}
"""What may learn -> settings that it does not use."""


@dataclass(kw_only=True)
class LearnConfig:
    """How weights learn; used where `weights` says learned."""

    steps: int | None = None
    """End to end, one batch a step; 0 only with `block_steps`. null = PASSES over the batches that are learned from,
    MOST_STEPS at most. train=rounding takes none."""
    block_steps: int = 0
    """Steps in which each decoder block learns by itself before that, on at most so many batches; see
    `learned_blocks`. Only one block has masters and moments at a time."""
    train: str = "weights"
    """weights | scales: weights stay, and each block of them chooses among the scales of the rule `mse`; for MX
    formats (`dmx.weights.learned_scales`). rounding: weights stay, and each learns block by block which neighbour it is
    rounded to; likewise (`dmx.weights.learned_rounding`)."""
    lr: float = 2e-4
    """Highest rate of AdamW."""
    scale_lr: float = 0.1
    """train=scales: the same, of preferences for scales."""
    warmup: int = 20
    """Steps in which the rate rises to `lr`, at most a third of all, of block steps a tenth; it falls to 0 by half a
    cosine after."""
    max_norm: float = 1.0
    """Of the gradient over all weights; a longer one is shortened to it."""
    seed: int = 0
    """Order of the batches."""
    inputs: bool = True
    """Learn with quantized inputs, as W+A runs; false = with full-precision inputs, as W runs."""
    held_batches: int | None = None
    """Batches, the last so many, that are not learned from: KL before and after is measured on them. null =
    one in eight, at most 4. With 0 it is measured on the first batches, and says so."""
    micro_batch: int | None = None
    """Rows of a batch that run at a time, to save memory; null = all."""
    oom: str = "stop"
    """stop | halve: where the memory does not hold the rows that run at a time, go on with half as many."""
    masters: str = "float32"
    """float32 | bfloat16 (rounded stochastically): what learns."""
    optimizer_state: str = "float32"
    """float32 | bfloat16 | int8 (by blocks, `dmx.numerics.moments`), rounded stochastically: AdamW's two moments."""
    keep_reference: str = "auto"
    """auto | on | off: keep what the full-precision model gave for a batch, so that a batch that comes again
    costs no pass of it. auto: where memory allows."""
    gradient_checkpointing: bool = False
    cuda_graph: str = "auto"
    """auto | on | off: capture forward and backward in a CUDA graph. auto: on a GPU, for purely causal sdpa
    models without gradient checkpointing. Checkpointed steps are captured with on alone until that has been
    measured on a card."""
    checkpoint_every: int = 200
    """Steps between checkpoints, where a folder is given; a Ctrl-C leaves one, too."""

    def __post_init__(self) -> None:
        check_choice(self.train, tuple(IDLE), "learn.train")
        check_choice(self.masters, tuple(DTYPES), "learn.masters")
        check_choice(self.optimizer_state, tuple(STATES), "learn.optimizer_state")
        check_choice(self.oom, OOM, "learn.oom")
        for name in ("keep_reference", "cuda_graph"):
            check_choice(getattr(self, name), SWITCH, f"learn.{name}")
        for name in ("inputs", "gradient_checkpointing"):
            if type(getattr(self, name)) is not bool:
                raise RunError(f"learn.{name}={getattr(self, name)!r} must be true or false")
        for name in ("lr", "scale_lr", "max_norm"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and value > 0):
                raise RunError(f"learn.{name}={value!r} must be a finite number > 0")
        for name, low in (
            ("block_steps", 0),
            ("steps", 0 if self.block_steps or self.train == "rounding" else 1),
            ("warmup", 0),
            ("seed", 0),
            ("held_batches", 0),
            ("micro_batch", 1),
            ("checkpoint_every", 1),
        ):
            value = getattr(self, name)
            may_be_null = name in ("steps", "held_batches", "micro_batch")
            if value is None and may_be_null:
                continue
            if type(value) is not int or value < low:
                more = ", or null" if may_be_null else ""
                more += ", or 0 with learn.block_steps" if (name, low) == ("steps", 1) else ""
                raise RunError(
                    f"learn.{name}={value!r} must be a whole number, at least {low}{more}"
                )
        self._check_end_to_end()
        self._check_train()

    def _check_train(self) -> None:
        """Refuse settings of what does not learn."""
        for name in self.idle:
            if getattr(self, name) != getattr(LearnConfig, name):
                other = next(train for train, idle in IDLE.items() if name not in idle)
                raise RunError(
                    f"learn.{name}={getattr(self, name)} is for learn.train={other}, and learn.train="
                    f"{self.train}. Leave learn.{name} out, or set learn.train={other}."
                )
        if self.train == "rounding" and (self.steps or not self.block_steps):
            raise RunError(
                f"learn.train=rounding with learn.steps={setting_text(self.steps)} learn.block_steps={self.block_steps}: roundings "
                "learn block by block alone. Set learn.block_steps=200 learn.steps=0."
            )

    @property
    def idle(self) -> tuple[str, ...]:
        """Settings that what learns does not use."""
        return IDLE[self.train]

    def check_formats(self, formats: Iterable[Format]) -> None:
        """Refuse formats that a search may choose and that have nothing to learn, before it runs.

        Args:
            formats: layers in BF16 stay as they are.

        Raises:
            RunError: train is scales or rounding, and one is no MX format.
        """
        for other in formats if self.train != "weights" else ():
            if isinstance(other, BlockFormat) and not other.is_mx:
                raise RunError(
                    f"learn.train={self.train}, and the search may choose {other}: only MX formats have a power of two "
                    "for each block to choose. Set learn.train=weights, or search.family and search.fixed of MX "
                    "formats."
                )

    def check_by_block(self) -> None:
        """Refuse what a model that is held block by block cannot do; RunError."""
        if self._may_go_end_to_end:
            raise RunError(
                f"learn.steps={setting_text(self.steps)}: masters, moments and gradients of all weights lie on the device in steps end to "
                "end, and the model is held block by block (run.memory=block). Use learn.block_steps=200 learn.steps=0, "
                "or run.memory=all."
            )

    @property
    def masters_dtype(self) -> torch.dtype:
        """Of what learns."""
        return DTYPES[self.masters]

    @property
    def rate_setting(self) -> str:
        """Name of the setting of the highest rate."""
        return "learn.lr" if self.train == "weights" else "learn.scale_lr"

    @property
    def peak_rate(self) -> float:
        """Highest rate of AdamW, of what learns."""
        return self.lr if self.train == "weights" else self.scale_lr

    def _check_end_to_end(self) -> None:
        """Refuse settings of the steps end to end where there are none."""
        if self._may_go_end_to_end:
            return
        asked = {
            "micro_batch": self.micro_batch is not None,
            "oom": self.oom == "halve",
            "gradient_checkpointing": self.gradient_checkpointing,
            "keep_reference": self.keep_reference == "on",
            "cuda_graph": self.cuda_graph == "on",
        }
        if self.train == "rounding":
            none, more = "learn.train=rounding", ""
        else:
            none, more = "learn.steps=0", ", or set learn.steps > 0"
        for name, is_asked in asked.items():
            if is_asked:
                raise RunError(
                    f"learn.{name}={getattr(self, name)} is of the steps end to end, and {none} "
                    f"takes none. Leave learn.{name} out{more}."
                )

    @property
    def _may_go_end_to_end(self) -> bool:
        """Whether there are steps end to end, given any text."""
        return self.steps != 0 and self.train != "rounding"

    def steps_for(self, learned: int) -> int:
        """Steps end to end.

        Args:
            learned: batches to learn from.
        """
        if not self._may_go_end_to_end:
            return 0
        return min(MOST_STEPS, PASSES * learned) if self.steps is None else self.steps

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of a step, 0 to steps - 1."""
        return warm_cosine(step, steps, self.peak_rate, min(self.warmup, steps // 3))

    def held_of(self, batches: int) -> int:
        """How many of so many batches are not learned from."""
        return min(4, batches // FEWEST_TO_HOLD) if self.held_batches is None else self.held_batches

    def split(self, batches: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Batches to learn from, and those to measure on.

        Raises:
            DataError: none would be left to learn from.
        """
        held = self.held_of(len(batches))
        if held >= len(batches):
            raise DataError(
                f"learn.held_batches={held} of {len(batches)} batches leaves none to learn from. "
                "Give more batches, or hold fewer."
            )
        learned = list(batches[: len(batches) - held])
        return learned, list(batches[len(batches) - held :])

    def warn_of_little_text(self, learned: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        """Where each batch is seen too often, or where none can be held back, before anything learns.

        Args:
            learned, held: as `split` gives them.
        """
        count, tokens = len(learned), sum(batch.numel() for batch in learned)
        usual = LearnConfig().steps_for(count)
        for name, steps, fewer in (
            ("block_steps", self.block_steps, f"learn.block_steps={MANY_PASSES * count}"),
            ("steps", self.steps_for(count), f"learn.steps={usual}, which null takes"),
        ):
            if steps > MANY_PASSES * count:
                warnings.warn(
                    f"learn.{name}={steps} on {batches_text(count)}, {tokens:,} tokens: each is seen {steps / count:.0f} times, more "
                    f"than {MANY_PASSES}, and so few tokens are learned by heart. Give more text (data.training, "
                    f"training.batches), or fewer steps ({fewer}).",
                    stacklevel=1,  # a place in this package, whose warnings a run keeps
                )
        if not held and self.held_batches is None:
            warnings.warn(
                f"{batches_text(count)} to learn from: too few to hold one back (from {FEWEST_TO_HOLD} on one is), so KL before and "
                "after is measured on what was learned from, and says nothing of other text. Give more text "
                "(data.training, training.batches), or set learn.held_batches.",
                stacklevel=1,
            )


def not_better_text(facts: Mapping[str, Any]) -> str | None:
    """What to warn of where learned weights are no better than what they started from, on text that they did not learn from.

    Args:
        facts: what an assignment or a row says of its weights. Without batches held back KL was measured on those learned
            from, which a search may have chosen the formats by, too, and shows nothing of the sort.
    """
    trains = [train for train, name in LEARNED_NAMES.items() if name == facts.get("name")]
    if not trains or not facts.get("held_batches") or facts["kl_after"] < facts["kl_before"]:
        return None
    (train,) = trains
    name = "steps" if facts["steps"] else "block_steps"
    rate = f", or a lower learn.lr ({facts['lr']:g})" if train == "weights" else ""
    return (
        f"learn.train={train}: KL on {batches_text(facts['held_batches'])} held back was {facts['kl_before']:.4f} nats/token "
        f"before and is {facts['kl_after']:.4f} after, so what was learned is no better than what it started from, weights to "
        "nearest. It is kept as asked for; use the assignment before it (weights=nearest). Or give more text (data.training, "
        f"training.batches), fewer steps than learn.{name}={facts[name]}{rate}."
    )


def batches_text(count: int) -> str:
    """`1 batch`, `2 batches`."""
    return f"{count} batch{'es' * (count != 1)}"
