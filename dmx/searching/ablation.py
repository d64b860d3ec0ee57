"""What each unit of an assignment is worth: the loss if it is lowered, the gain if it is raised."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dmx.assignment.space import SearchSpace
from dmx.formats import Format
from dmx.models.experts import linear_experts
from dmx.models.running import model_logits
from dmx.progress import progress
from dmx.searching.bank import Bank, searching_model
from dmx.searching.config import SearchSettings
from dmx.searching.objective import task_loss


@torch.no_grad()
def unit_ablation(
    model: nn.Module,
    batches: Sequence[Tensor],
    space: SearchSpace,
    choice: np.ndarray,
    config: SearchSettings,
) -> list[dict[str, Any]]:
    """A row for each unit: unit, format, loss_if_lowered, gain_if_raised.

    Args:
        choice: (U,) candidate index of each unit.
        config: names the objective that is measured, in nats/token over `batches`.

    Returns:
        Differences to the loss of the whole choice; null where there is no lower or higher format.
    """
    device = next(model.parameters()).device
    top = len(space.formats) - 1
    changes = [
        (u, step) for u, index in enumerate(choice) for step in (-1, 1) if 0 <= index + step <= top
    ]
    with (
        linear_experts(model, config.experts_form),
        searching_model(model, space, config.format_family, config.scale_rules.by_format()) as bank,
        progress("ablation", len(batches) * (len(changes) + 1)) as advance,
    ):
        losses = np.zeros(len(changes) + 1)
        for batch in batches:
            tokens = batch.to(device)
            reference = None
            if config.objective == "kl":
                bank.set_full()
                reference = model_logits(model, tokens)
            for i, change in enumerate([None, *changes]):
                bank.set_formats(_changed(space, choice, change))
                losses[i] += _loss(model, bank, config, tokens, reference) / len(batches)
                advance("")
    rows = []
    difference = dict(zip(changes, losses[1:] - losses[0], strict=True))
    for u, unit in enumerate(space.units):
        raised = difference.get((u, 1))
        rows.append(
            {
                "unit": unit.name,
                "format": space.formats[int(choice[u])].name,
                "loss_if_lowered": difference.get((u, -1)),
                "gain_if_raised": None if raised is None else -raised,
            }
        )
    return rows


def _changed(
    space: SearchSpace, choice: np.ndarray, change: tuple[int, int] | None
) -> list[Format | None]:
    changed = np.array(choice)
    if change is not None:
        changed[change[0]] += change[1]
    return [space.formats[int(i)] for i in changed]


def _loss(
    model: nn.Module, bank: Bank, config: SearchSettings, tokens: Tensor, reference: Tensor | None
) -> float:
    return float(task_loss(config.objective, model_logits(model, tokens), tokens, reference))
