"""`MorLinear` into a model and out again, and what a resumed run needs to decide as before."""

import fnmatch
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mor._base import put_back, replace_layers
from mor.config import MorConfig, MorError
from mor.linear import MorLinear
from mor.state import layer_states

_ORIGINALS = "_mor_originals"


def swap_linears(
    model: nn.Module,
    config: MorConfig,
    *,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
) -> nn.Module:
    """Replace linear layers by `MorLinear` around the same Parameters, in place.

    Args:
        include: globs of layer names; None = all but the output embedding, which the paper
            leaves in BF16.
        exclude: globs of layer names to leave alone.

    Returns:
        The model.

    Raises:
        MorError: a pattern matches no linear layer, nothing is left, or the model has MoR already.
    """
    linears = {n: m for n, m in model.named_modules(remove_duplicate=False) if type(m) is nn.Linear}
    if _ORIGINALS in model.__dict__ or any(isinstance(m, MorLinear) for m in model.modules()):
        raise MorError(
            "the model has MorLinear layers already; call mor.restore_linears(model) first"
        )
    if include is None:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        chosen = {n for n, m in linears.items() if m is not head}
    else:
        chosen = _matching(linears, include, "include")
    chosen -= _matching(linears, exclude, "exclude")
    if not chosen:
        if include is None and not exclude:
            raise MorError(
                "MoR has nothing to replace: the model has no nn.Linear beside its output embedding. "
                "Use a model with linear layers, or none of MoR (mor=[bf16])."
            )
        raise MorError(
            f"include={include!r} and exclude={exclude!r} leave no linear layer of "
            f"{len(linears)}; loosen them"
        )

    def make(name: str, linear: nn.Linear) -> nn.Linear | None:
        return MorLinear.wrap(linear, config) if name in chosen else None

    object.__setattr__(model, _ORIGINALS, replace_layers(model, make))
    return model


def _matching(linears: dict[str, nn.Linear], patterns: Iterable[str], setting: str) -> set[str]:
    if isinstance(patterns, str):
        patterns = (patterns,)
    found: set[str] = set()
    for pattern in patterns:
        names = fnmatch.filter(linears, pattern)
        if not names:
            raise MorError(
                f"{setting}={pattern!r} matches no linear layer. Layers: "
                f"{', '.join(list(linears)[:8])}{', ...' if len(linears) > 8 else ''}."
            )
        found.update(names)
    return found


def restore_linears(model: nn.Module) -> nn.Module:
    """Put the nn.Linear layers back; they hold the trained Parameters.

    Raises:
        MorError: `swap_linears` was not called on this model.
    """
    if _ORIGINALS not in model.__dict__:
        raise MorError("mor.swap_linears was not called on this model; nothing to restore")
    put_back(model, model.__dict__.pop(_ORIGINALS))
    return model


def decision_state(model: nn.Module) -> dict[str, Any]:
    """What a resumed run needs to decide as this one would: held decisions, passes, counters."""
    return {
        name: {
            "passes": s.passes,
            "is_deciding": s.is_deciding,
            "formats": dict(s.formats),
            "frozen": {k: v.cpu() for k, v in s.frozen.items()},
            "host": torch.from_numpy(s.host.copy()),
            "device": None if s.device is None else s.device.cpu(),
        }
        for name, s in layer_states(model).items()
    }


def load_decision_state(model: nn.Module, saved: dict[str, Any]) -> None:
    """Inverse of `decision_state`.

    Raises:
        MorError: the layers are others.
    """
    states = layer_states(model)
    if set(states) != set(saved):
        different = sorted(set(states) ^ set(saved))[:4]
        raise MorError(f"the saved decisions are for other layers, for example {different}")
    for name, module in model.named_modules():
        if name not in states:
            continue
        state, entry = states[name], saved[name]
        device = next(module.parameters()).device
        state.passes, state.is_deciding = entry["passes"], entry["is_deciding"]
        state.formats = dict(entry["formats"])
        state.frozen = {k: v.to(device) for k, v in entry["frozen"].items()}
        state.host[:] = entry["host"].numpy()
        state.device = None if entry["device"] is None else entry["device"].to(device)
