"""An outlier that full precision does not feel: a channel of an MLP scaled up, and down again.

One row of up_proj times 2**k and the matching column of down_proj times 2**-k: the same function
exactly in BF16 and float32 (powers of two change no mantissa), and a trial for every quantizer in
between, whose amax the channel now sets.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from mor.config import MorError


def rescale_channels(
    model: nn.Module, mlp_name: str, channels: Sequence[int], exponent: int = 17
) -> None:
    """Scale channels between up_proj and down_proj of one MLP by 2**exponent, in place.

    Raises:
        MorError: no such MLP, a channel out of range, or fp16 weights, which would overflow.
    """
    with torch.no_grad():
        for slice_, factor in _slices(model, mlp_name, channels, exponent):
            slice_.mul_(factor)


def check_outlier(model: nn.Module, mlp_name: str, channels: Sequence[int]) -> None:
    """Raise what `rescale_channels` would; reads shapes only, so a meta model does."""
    _projections(model, mlp_name)
    list(_slices(model, mlp_name, channels, 0))


def largest_channel(model: nn.Module, mlp_name: str) -> int:
    """Intermediate channel with the largest weight in up_proj."""
    up, _ = _projections(model, mlp_name)
    return int(up.weight.detach().abs().amax(1).argmax())


class FrozenChannels:
    """Holds rescaled channels still while the rest trains.

    Adam's step does not scale with the weight: unheld, one step of size lr on a down_proj column
    of 2**-17 would change the function by 2**17 * lr in every recipe, BF16 too.
    """

    def __init__(self, model: nn.Module, mlp_name: str, channels: Sequence[int]) -> None:
        self._where = model, mlp_name, list(channels)
        self._held = [s.detach().clone() for s, _ in _slices(*self._where, 0)]

    def clear_gradients(self) -> None:
        """Call before the gradient norm is taken."""
        for slice_, _ in _slices(*self._where, 0, gradients=True):
            slice_.zero_()

    def restore(self) -> None:
        """Call after the optimizer's step, which moves even what has no gradient (decay)."""
        with torch.no_grad():
            for (slice_, _), held in zip(_slices(*self._where, 0), self._held, strict=True):
                slice_.copy_(held)


def _slices(
    model: nn.Module,
    mlp_name: str,
    channels: Sequence[int],
    exponent: int,
    *,
    gradients: bool = False,
) -> Iterator[tuple[Tensor, float]]:
    """Views of each channel's up_proj row and down_proj column, with its factor."""
    up, down = _projections(model, mlp_name)
    if up.weight.dtype == torch.float16 and exponent:
        raise MorError("outliers of 2**17 overflow fp16 weights; use bfloat16 or float32")
    for channel in channels:
        if not 0 <= channel < up.out_features:
            raise MorError(
                f"outlier channel {channel} is out of range: {mlp_name} has {up.out_features}"
            )
        for weight, sign in ((up.weight, 1), (down.weight, -1)):
            tensor = weight.grad if gradients else weight
            if tensor is not None:
                yield tensor[channel] if sign > 0 else tensor[:, channel], 2.0 ** (sign * exponent)


def _projections(model: nn.Module, mlp_name: str) -> tuple[nn.Linear, nn.Linear]:
    """up_proj and down_proj."""
    modules = dict(model.named_modules())
    up, down = (modules.get(f"{mlp_name}.{name}") for name in ("up_proj", "down_proj"))
    if not (isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
        known = [n.removesuffix(".up_proj") for n in modules if n.endswith(".up_proj")]
        raise MorError(
            f"outlier.layer={mlp_name!r} is no MLP with up_proj and down_proj. "
            f"Found: {', '.join(known) or 'none'}."
        )
    return up, down
