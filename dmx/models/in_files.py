"""How parameters lie in exported files: in BF16, but for those that a model keeps in float32."""

import re
from collections.abc import Collection

import torch
from torch import Tensor, nn

from dmx.models.linears import linear_layers, plain_name


def keeps_float32(model: nn.Module, name: str) -> bool:
    """Whether a loader leaves this parameter or buffer in float32 whatever dtype it is asked for
    (`_keep_in_fp32_modules_strict` of transformers)."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){pattern}($|\.)", name) for pattern in patterns)


def float32_layers(model: nn.Module) -> list[str]:
    """Linear layers whose weights stay in float32."""
    return [name for name in linear_layers(model) if keeps_float32(model, f"{name}.weight")]


def file_dtype(model: nn.Module, name: str, tensor: Tensor) -> torch.dtype:
    """What an unquantized tensor of the state dict is stored as."""
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if keeps_float32(model, name) else torch.bfloat16


def unquantized_bits(model: nn.Module, quantized: Collection[str]) -> int:
    """Bits that files hold besides the weights of `quantized` layers; the model may be on meta.

    A tensor under several names counts once; one that a quantized layer shares (the table of a tied head)
    counts, since the layer's own tensors cannot stand for it.
    """
    weights = {f"{layer}.weight" for layer in quantized}
    names: dict[int, list[str]] = {}
    state = {plain_name(k): v for k, v in model.state_dict(keep_vars=True).items()}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    bits = 0
    for shared in names.values():
        others = [name for name in shared if name not in weights]
        if others:
            tensor = state[others[0]]
            bits += 8 * file_dtype(model, others[0], tensor).itemsize * tensor.numel()
    return bits
