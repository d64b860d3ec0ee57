"""The adaptive search: scores first, by gradient from there where there is text enough, and the better of both.

    scores     the choice of `kl_per_bit`, on `search.score_batches`
    descent    from raw offsets that stand for these scores, on all batches but those held out, in as many steps as
               MOST_PASSES over them allow, `search.steps` at most
    judgement  the choice of the descent is taken where its KL to the full-precision model on the batches held out is
               lower than that of the scores by more than its standard error over rows

With fewer than FEWEST_BATCHES batches there is no descent. So the choice is that of the scores wherever steps do not
show, on text that they have not seen, that they are worth it.
"""

import math
from collections.abc import Sequence
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
"""One batch of so many is held out of the descent."""
MOST_PASSES = 4
"""Over the batches of the descent."""
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
    """Two choices on text that was held out: KL of the descent's minus that of the scores', nats/token."""

    mean: float
    stderr: float

    @property
    def kept(self) -> Kept:
        """Which choice is taken."""
        return "descent" if self.mean + self.stderr < 0 else "scores"

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ± {self.stderr:.2g} nats/token"


@torch.no_grad()
def judge(
    model: nn.Module,
    space: SearchSpace,
    config: SearchConfig,
    held: Sequence[Tensor],
    descended: np.ndarray,
    scored: np.ndarray,
) -> Judgement:
    """Both choices on the batches held out; equal in all processes.

    Raises:
        ModelError: a KL is not finite.
    """
    processes = Processes(next(model.parameters()).device)
    choices = [[space.formats[int(i)] for i in choice] for choice in (descended, scored)]
    rules = config.scale_rules.by_format()
    rows = []
    with searching_model(model, space, config.format_family, rules) as bank:
        for batch in held:
            own = processes.own_rows(batch)
            kls = torch.zeros(2, len(batch), dtype=torch.float64, device=processes.own_device)
            first = processes.rank * len(own)
            kls[:, first : first + len(own)] = _row_kls(model, bank, config, own, choices)
            rows.append(processes.total(kls).cpu())
    of_rows = torch.cat(rows, 1).numpy()
    if not np.isfinite(of_rows).all():
        raise not_finite(model, held, "a KL", "on the calibration text, quantized")
    difference = of_rows[0] - of_rows[1]
    return Judgement(
        float(difference.mean()), float(difference.std(ddof=1) / math.sqrt(difference.size))
    )


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
