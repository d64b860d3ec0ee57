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


def tensors_once(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Each tensor of the state dict with all of its names, which are several where weights are tied; in the order
    of the model."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), ([], tensor))[0].append(plain_name(name))
    return list(found.values())


def unquantized_bits(model: nn.Module, quantized: Collection[str]) -> int:
    """Bits that files hold besides the weights of `quantized` layers; the model may be on meta.

    A tensor under several names counts once; one that a quantized layer shares (the table of a tied head)
    counts, since the layer's own tensors cannot stand for it.
    """
    weights = {f"{layer}.weight" for layer in quantized}
    bits = 0
    for names, tensor in tensors_once(model):
        others = [name for name in names if name not in weights]
        if others:
            bits += 8 * file_dtype(model, others[0], tensor).itemsize * tensor.numel()
    return bits
