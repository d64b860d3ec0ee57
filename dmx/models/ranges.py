"""How large the inputs of layers become on calibration data."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from dmx.models.linears import linear_layers
from dmx.models.memory import MicroBatch
from dmx.models.running import evaluating, run_whole
from dmx.processes import Processes

AMAX_BATCHES = 16
"""Calibration batches that are looked at, the first so many."""


@torch.no_grad()
def input_amax(
    model: nn.Module,
    layers: Iterable[str],
    batches: Sequence[Tensor],
    micro: MicroBatch | None = None,
) -> dict[str, float]:
    """layer -> largest finite magnitude of its input, as it enters the product: rotated where it is. All processes have the
    same numbers, those of one.

    Args:
        model: not quantized, with its transform.
        batches: (batch, length) int64, whole in every process, which runs its own rows; the first AMAX_BATCHES of them.
        micro: rows that run at a time, None: whole batches.
    """
    linears = linear_layers(model)
    device = next(model.parameters()).device
    processes = Processes(device)
    largest = {name: torch.zeros((), device=device) for name in layers}

    def watch(name: str, layer: nn.Linear) -> torch.utils.hooks.RemovableHandle:
        def see(_: nn.Module, args: tuple[Tensor]) -> None:
            x, rotation = args[0].detach(), getattr(layer, "input_transform", None)
            x = x if rotation is None else rotation(x)
            magnitude = torch.where(x.isfinite(), x.abs(), 0).amax().float()
            largest[name] = torch.maximum(largest[name], magnitude)

        return layer.register_forward_pre_hook(see)

    handles = [watch(name, linears[name]) for name in largest]
    try:
        with evaluating(model):
            for batch in batches[:AMAX_BATCHES]:
                run_whole(model, processes.own_rows(batch).to(device), micro)
    finally:
        for handle in handles:
            handle.remove()
    if not largest:
        return {}
    values = processes.largest(torch.stack([*largest.values()]).double())
    return dict(zip(largest, values.tolist(), strict=True))
