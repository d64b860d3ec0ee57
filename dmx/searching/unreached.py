"""Layers that no calibration token runs, and experts of whom too few tokens say something."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dmx.assignment.space import SearchSpace
from dmx.files import read_json, write_json
from dmx.models.backbone import unreached_layers
from dmx.models.experts import counting_tokens, experts_path
from dmx.models.linears import linear_layers, match_layers
from dmx.models.memory import MicroBatch
from dmx.processes import Processes, own_rank
from dmx.searching.config import SearchSettings

FEW_TOKENS = 64
"""Tokens below which what was measured of one expert says little of it."""
UNREACHED_FILE = "unreached.json"
"""Of a search's folder: the layers that no calibration token runs."""


class Unreached:
    """`unreached_layers`, kept in a search's folder once it has ended: then the model is not run again."""

    def __init__(
        self,
        model: nn.Module,
        batches: list[Tensor],
        hashed: str,
        folder: Path | None,
        micro: MicroBatch,
    ) -> None:
        """hashed: `batches_sha256` of the batches."""
        self.path = None if folder is None else folder / UNREACHED_FILE
        self.of = {"layers": list(linear_layers(model)), "batches": hashed}
        processes = Processes(next(model.parameters()).device)
        known = processes.agree(self._known)
        if known is None:
            own = [processes.own_rows(batch) for batch in batches]
            with counting_tokens(model) as tokens:
                unreached = unreached_layers(model, own, micro, whole=bool(tokens))
            known = _unreached_by_all(model, unreached, processes), _total_tokens(tokens, processes)
        self.layers, self.expert_tokens = known

    def _known(self) -> tuple[list[str], dict[str, list[int]]] | None:
        if self.path is None:
            return None
        try:
            kept = read_json(self.path)
        except (OSError, ValueError):  # not there or damaged: found again
            return None
        if not isinstance(kept, dict):
            return None
        known, tokens = kept.pop("unreached", None), kept.pop("expert_tokens", {})
        is_whole = isinstance(known, list) and isinstance(tokens, dict) and kept == self.of
        return (known, tokens) if is_whole else None

    def keep(self) -> None:
        """For a search that has ended; one that failed leaves nothing."""
        if self.path is not None and own_rank() == 0:
            tokens = {"expert_tokens": self.expert_tokens} if self.expert_tokens else {}
            write_json(self.path, {**self.of, "unreached": self.layers, **tokens})


def unreached_alone(
    unreached: Sequence[str], model: nn.Module, config: SearchSettings
) -> list[str]:
    """Layers that no token runs, but for experts that share their choice with others that some run."""
    if config.experts == "each":
        return list(unreached)
    reached = {experts_path(name) for name in linear_layers(model) if name not in set(unreached)}
    return [name for name in unreached if experts_path(name) not in reached - {None}]


def _unreached_by_all(model: nn.Module, own: Sequence[str], processes: Processes) -> list[str]:
    """Layers that no process runs, which share the rows of batches.

    Args:
        own: those that this one does not run.
    """
    names, unreached = list(linear_layers(model)), set(own)
    flags = torch.tensor([name in unreached for name in names], device=processes.own_device)
    counts = processes.total(flags.int()).tolist()
    return [n for n, count in zip(names, counts, strict=True) if count == processes.size]


def _total_tokens(own: Mapping[str, Tensor], processes: Processes) -> dict[str, list[int]]:
    """Tokens of each expert, of the rows of all processes."""
    return {
        path: processes.total(counts.to(processes.own_device)).tolist()
        for path, counts in own.items()
    }


def warn_of_unreached(unreached: Sequence[str], space: SearchSpace, config: SearchSettings) -> None:
    """Name the layers that no token runs, but for those that search.exclude names itself."""
    excluded = match_layers(config.exclude, [*space.shapes, *space.unquantized], "search.exclude")
    if silent := [name for name in unreached if name not in excluded]:
        warnings.warn(
            f"{len(silent)} of {len(space.shapes) + len(space.unquantized)} linear layers are run by no "
            f"calibration token and stay in BF16, outside the budget: first {', '.join(silent[:3])}.",
            stacklevel=3,
        )


def warn_of_rare_experts(tokens: Mapping[str, Sequence[int]], config: SearchSettings) -> None:
    """Name the experts of whom too few tokens say something, where each has a choice of its own."""
    rare = {
        f"{path}.{expert}": count
        for path, counts in tokens.items()
        for expert, count in enumerate(counts)
        if 0 < count < FEW_TOKENS
    }
    if rare and config.experts == "each":
        first, count = min(rare.items(), key=lambda item: item[1])
        warnings.warn(
            f"{len(rare)} of {sum(map(len, tokens.values()))} experts are given fewer than {FEW_TOKENS} calibration "
            f"tokens, fewest {first} ({count}): a low score says that the text does not need them, not that they bear "
            "fewer bits. Give more text (calibration.batches), or use search.experts=block.",
            stacklevel=4,
        )
