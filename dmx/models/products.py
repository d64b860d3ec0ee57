"""The product of a linear layer, and its two gradients: one for all rows, or one for each group of rows.

The experts of a block lie in one weight, (experts * out, in), expert by expert (`dmx.models.experts`). Their input
holds the rows of one expert after those of another, and rows meet the weight of their own expert alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Groups:
    """Which rows of an input belong to which expert: they are sorted by it."""

    ends: Tensor
    """(experts,) int32: the row after the last of each expert."""

    def stacked(self, weight: Tensor) -> Tensor:
        """(experts * out, in) -> (experts, out, in)"""
        return weight.unflatten(0, (len(self.ends), -1))


def groups_of(layer: nn.Module) -> Groups | None:
    """Of the rows that a layer is given now; None where one weight is for all rows."""
    return getattr(layer, "groups", None)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups | None) -> Tensor:
    """`F.linear`, by groups of rows where there are groups.

    Args:
        x: (..., in), with groups (rows, in). weight: (out, in), with groups (experts * out, in).
        bias: (out,); None with groups.

    Returns:
        (..., out)
    """
    if groups is None:
        return F.linear(x, weight, bias)
    assert bias is None
    return _grouped(x, groups.stacked(weight).mT, groups)


def product_by_input(grad: Tensor, weight: Tensor, groups: Groups | None) -> Tensor:
    """Gradient by x, in the shape of x, from that of the product."""
    return grad @ weight if groups is None else _grouped(grad, groups.stacked(weight), groups)


def product_by_weight(grad: Tensor, x: Tensor, groups: Groups | None) -> Tensor:
    """Gradient by the weight, in its shape, from that of the product."""
    if groups is None:
        return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    return _grouped(grad.t(), x, groups).flatten(0, 1)


def _grouped(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    """`torch.nn.functional.grouped_mm`, which transformers runs experts with; one product each where torch has none."""
    op: Any = getattr(F, "grouped_mm", None)
    if op is not None:
        result: Tensor = op(a, b, offs=groups.ends)
        return result
    ends = groups.ends.tolist()
    bounds = list(zip([0, *ends], ends, strict=False))
    if b.dim() == 3:
        return torch.cat([a[i:j] @ b[e] for e, (i, j) in enumerate(bounds)])
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in bounds])
