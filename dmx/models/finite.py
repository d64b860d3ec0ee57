"""Where NaN and Inf begin: the first weight that is not finite, or the first module of a pass that gives one.

A NaN in one weight makes every loss NaN, and a search that compares those still ends in an assignment. So the
weights are looked at before a search spends anything, and a loss that is not finite names where it comes from.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dmx.errors import ModelError
from dmx.models.running import evaluating, model_logits
from dmx.models.sharding import whole
from dmx.models.streaming import brought

_WAY_OUT = (
    "Where float16 overflows, load the model in bfloat16 or float32 (model.dtype); else look at the text "
    "and at the weights."
)


def check_finite_weights(model: nn.Module) -> None:
    """Raise ModelError that names the first parameter, or kept buffer, with NaN or Inf.

    On the meta device nothing is looked at.
    """
    for name, tensor in brought(model, model.state_dict(keep_vars=True).items()):
        if not isinstance(tensor, Tensor) or tensor.is_meta or not tensor.is_floating_point():
            continue
        value_of = whole(tensor)
        if not bool(value_of.isfinite().all()):
            place = tuple((~value_of.isfinite()).nonzero()[0].tolist())
            value = float(value_of[place])
            raise ModelError(
                f"{name}{list(place)} of {type(model).__name__} is {value} ({tensor.dtype}): nothing that is "
                "measured on it means anything. Get the weights again; where a conversion to float16 "
                "overflowed, convert to bfloat16."
            )


@torch.no_grad()
def first_not_finite(model: nn.Module, batches: Iterable[Tensor]) -> str | None:
    """The first module of a pass whose output holds NaN or Inf, in words; None where all are finite.

    Args:
        batches: (batch, length) int64; looked at one after the other, in eval mode.
    """
    found: list[str] = []
    device = next(model.parameters()).device

    def watch(name: str) -> Any:
        def see(module: nn.Module, _args: Any, output: Any) -> None:
            if not found and not all(bool(t.isfinite().all()) for t in _float_tensors(output)):
                found.append(f"the output of {name or 'the model'} ({type(module).__name__})")

        return see

    handles = [m.register_forward_hook(watch(name)) for name, m in model.named_modules()]
    try:
        with evaluating(model):
            for batch in batches:
                model_logits(model, batch.to(device))
                if found:
                    return found[0]
    finally:
        for handle in handles:
            handle.remove()
    return None


def not_finite(model: nn.Module, batches: Iterable[Tensor], what: str, when: str) -> ModelError:
    """The error to raise for a number that is not finite, with where that begins.

    Args:
        model: in the state in which the number came about, or unquantized.
        what: the number. when: how the model ran.
    """
    where = first_not_finite(model, batches)
    first = f"{when}, first in {where}" if where else f"in no module's output {when}"
    return ModelError(f"{what} is not finite: NaN or Inf {first}. {_WAY_OUT}")


def _float_tensors(value: Any) -> Iterable[Tensor]:
    """Floating-point tensors of what a module returns."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _float_tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _float_tensors(part)
