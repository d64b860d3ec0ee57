"""The adaptive search: scores first, by gradient from there where there is text enough, and the best of all.

    scores     the choices of `kl_per_bit` and of `fisher`, on `search.score_batches`
    descent    from raw offsets that stand for the better of these scores, on all batches but those held out, in as
               many steps as MOST_PASSES over them allow, `search.steps` at most
    judgement  on the batches held out: of the choices whose KL to the full-precision model is lower than that of
               kl_per_bit's by more than the standard error of the difference over rows the one of the lowest KL,
               kl_per_bit's where there is none. Which scores are the better ones is judged likewise

With fewer than FEWEST_BATCHES batches nothing can be judged, and the choice is that of kl_per_bit. So it is wherever
another does not show, on text that no step has seen, that it is better.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dmx.assignment.budget import Budget
from dmx.assignment.facts import Kept
from dmx.assignment.space import SearchSpace
from dmx.formats import Format
from dmx.kernels import ops
from dmx.models.finite import not_finite
from dmx.models.running import model_logits
from dmx.processes import Processes
from dmx.searching.bank import Bank, searching_model
from dmx.searching.config import SearchConfig, SearchSettings

FEWEST_BATCHES = 8
"""Below, a descent would have so few batches, and a judgement so few rows, that neither says anything."""
HELD_SHARE = 4
"""One batch of so many is held out of the descent, not of the scores, which know all that they are measured on: a
descent that is kept beat them on text of theirs."""
MOST_PASSES = 4
"""Over the batches of the descent."""
JUDGED = 5
"""Passes over the batches held out: the full-precision model and both scores' choices, and again that model and the
descent's."""
REACH = 0.35
"""How far scores move a raw offset from the middle between two formats, of the way from one to the other; below a
half, so that each still follows its gradient."""


def split_batches(batches: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Batches of the descent and those held out, spread over the text; all in the first where they are too few."""
    if len(batches) < FEWEST_BATCHES:
        return list(batches), []
    held = set(range(HELD_SHARE - 1, len(batches), HELD_SHARE))
    return (
        [b for i, b in enumerate(batches) if i not in held],
        [b for i, b in enumerate(batches) if i in held],
    )


def adaptive_steps(config: SearchSettings, n_batches: int) -> int:
    """Of the descent where there are so many batches, those held out among them; 0: none."""
    if n_batches < FEWEST_BATCHES:
        return 0
    return min(config.steps, MOST_PASSES * (n_batches - n_batches // HELD_SHARE))


def start_from(
    preference: np.ndarray, space: SearchSpace, budget: Budget, choice: np.ndarray
) -> np.ndarray:
    """(U,) float32 raw offsets in [0, 2] for a choice by scores: a step that is worth twice or half as much per bit as
    the last that the budget has room for lies a quarter of REACH above or below the middle.

    Args:
        preference: (U, F-1) saved per added bit. choice: (U,) what came of it.
    """
    n_steps = preference.shape[1]
    taken = np.arange(n_steps) < choice[:, None]
    worth = preference[preference > 0]
    if not worth.size:
        return np.full(len(choice), 1.0, dtype=np.float32)
    inside = preference[taken & (preference > 0)]
    price = inside.min() if inside.size else worth.max()
    ratio = np.log2(np.maximum(preference, 1e-6 * price) / price)
    shares = 0.5 + np.clip(0.25 * REACH * ratio, -REACH, REACH)
    raw: np.ndarray = (shares.sum(1) * (2 / n_steps)).astype(np.float32)
    return raw


@dataclass(frozen=True)
class Judgement:
    """A choice on text that was held out: its KL minus that of the choice of kl_per_bit, nats/token."""

    mean: float
    stderr: float

    @classmethod
    def of(cls, kls: np.ndarray, scored: np.ndarray) -> "Judgement":
        """Of the (rows,) KL of a choice and of kl_per_bit's."""
        difference = kls - scored
        return cls(
            float(difference.mean()), float(difference.std(ddof=1) / math.sqrt(difference.size))
        )

    @property
    def is_better(self) -> bool:
        """By more than an error."""
        return self.mean + self.stderr < 0

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ± {self.stderr:.2g}"


class Jury:
    """Judges choices on the batches held out, and measures each once.

    Args:
        measure: (U,) choices -> (choices, rows) their KL to the full-precision model.
    """

    def __init__(self, measure: Callable[[Sequence[np.ndarray]], np.ndarray]) -> None:
        self.measure = measure
        self.judgements: dict[Kept, Judgement | None] = {}
        """Of all but kl_per_bit; None: its choice."""
        self._kls: dict[tuple[int, ...], np.ndarray] = {}

    def best(self, choices: Mapping[Kept, np.ndarray]) -> Kept:
        """Whose choice is taken; the first of equal ones.

        Args:
            choices: (U,) int64 each, that of the `scores` among them.
        """
        keys = {whose: tuple(choice.tolist()) for whose, choice in choices.items()}
        if len(set(keys.values())) > 1:
            missing = {
                keys[whose]: c for whose, c in choices.items() if keys[whose] not in self._kls
            }
            if missing:
                measured = self.measure(list(missing.values()))
                self._kls |= dict(zip(missing, measured, strict=True))
        scored = keys.pop("scores")
        self.judgements = {
            whose: None if key == scored else Judgement.of(self._kls[key], self._kls[scored])
            for whose, key in keys.items()
        }
        better = {w: j.mean for w, j in self.judgements.items() if j is not None and j.is_better}
        return min(better, key=better.__getitem__, default="scores")

    def __str__(self) -> str:
        return ", ".join(
            f"{whose} {'the choice of kl_per_bit' if judgement is None else judgement}"
            for whose, judgement in self.judgements.items()
        )


@torch.no_grad()
def held_kls(
    model: nn.Module,
    space: SearchSpace,
    config: SearchConfig,
    held: Sequence[Tensor],
    choices: Sequence[np.ndarray],
) -> np.ndarray:
    """(choices, rows) float64 KL to the full-precision model of each row held out, nats/token; equal in all processes.

    Raises:
        ModelError: a KL is not finite.
    """
    processes = Processes(next(model.parameters()).device)
    formats = [[space.formats[int(i)] for i in choice] for choice in choices]
    rules = config.scale_rules.by_format()
    rows = []
    with searching_model(model, space, config.format_family, rules) as bank:
        for batch in held:
            own = processes.own_rows(batch)
            shape = (len(choices), len(batch))
            kls = torch.zeros(shape, dtype=torch.float64, device=processes.own_device)
            first = processes.rank * len(own)
            kls[:, first : first + len(own)] = _row_kls(model, bank, config, own, formats)
            rows.append(processes.total(kls).cpu())
    of_rows: np.ndarray = torch.cat(rows, 1).numpy()
    if not np.isfinite(of_rows).all():
        raise not_finite(model, held, "a KL", "on the calibration text, quantized")
    return of_rows


def _row_kls(
    model: nn.Module,
    bank: Bank,
    config: SearchConfig,
    batch: Tensor,
    choices: Sequence[Sequence[Format]],
) -> Tensor:
    """(choices, rows) float64 mean KL of each row, nats/token."""
    micro = config.rows_at_a_time()

    def measured() -> Tensor:
        parts = []
        for part in micro.parts(batch):
            tokens = part.to(next(model.parameters()).device)
            bank.set_full()
            reference = model_logits(model, tokens).flatten(0, 1)
            of_part = []
            for formats in choices:
                bank.set_formats([*formats])
                kl = ops.kl_rows(reference, model_logits(model, tokens).flatten(0, 1))
                of_part.append(kl.double().view(tokens.shape).mean(1))
            parts.append(torch.stack(of_part))
        return torch.cat(parts, 1)

    return micro.run(measured, len(batch))
