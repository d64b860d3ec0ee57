"""Rotations of blocks of 32 channels along the contraction axis of a product.

    y = x W^T = (x R) (W R)^T          R block-diagonal, blocks 32 x 32, orthogonal

A block is an MX block, so R spreads an outlier over the elements that share its scale, and no
further. The weight is rotated once; the input is rotated in every pass, 32 products an element.

Source: QuaRot, arXiv 2404.00456, for the identity; blocks as wide as the format's, as in MR-GPTQ,
arXiv 2509.23202.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dmx.files import sha256
from dmx.formats import BLOCK_SIZE
from dmx.models.products import groups_of, product
from dmx.models.swap import adopt
from dmx.transforms.hadamard import hadamard_matrix


def hadamard_block() -> Tensor:
    """(32, 32) float32: Sylvester's matrix over sqrt(32), the same for every block."""
    return hadamard_matrix(BLOCK_SIZE).float()


def rotate(x: Tensor, matrix: Tensor) -> Tensor:
    """Each block of 32 along the last axis times the matrix; accumulated in float32 by the product.

    Args:
        x: (..., n), n a multiple of 32. matrix: (32, 32), in the dtype of x. Differentiable in both.

    Returns:
        Shape and dtype of x.
    """
    return (x.unflatten(-1, (-1, BLOCK_SIZE)) @ matrix).flatten(-2)


def by_rotation(x: Tensor, grad: Tensor) -> Tensor:
    """Gradient of `rotate(x, matrix)` by the matrix; (32, 32) in the dtype of x.

    Args:
        grad: by the result; shape of x.
    """
    return x.reshape(-1, BLOCK_SIZE).mT @ grad.reshape(-1, BLOCK_SIZE)


class BlockRotation:
    """`rotate` by a float32 matrix, in the dtype and on the device of its input."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        key = (x.device, x.dtype)
        if key not in self._copies:
            # A tensor made in inference mode could not serve a later pass with gradients.
            with torch.inference_mode(False), torch.no_grad():
                self._copies[key] = self.matrix.to(x.device, x.dtype)
        return rotate(x, self._copies[key])

    @property
    def digest(self) -> str:
        """Tells rotations apart."""
        return sha256(self.matrix.cpu().numpy().tobytes())

    @torch.no_grad()
    def of_weight(self, weight: Tensor) -> Tensor:
        """W R, computed in float64 and rounded once to the dtype of W; (out_features, in_features)."""
        matrix = self.matrix.to(weight.device, torch.float64)
        return rotate(weight.double(), matrix).to(weight.dtype)


class RotatedLinear(nn.Linear):
    """`F.linear(x R, W R, bias)`: the layer that it replaces, up to rounding. Layers that adopt it
    take its weight and its `input_transform`."""

    input_transform: Any

    @classmethod
    def wrap(cls, linear: nn.Linear, rotation: BlockRotation, weight: nn.Parameter) -> nn.Linear:
        """weight: the rotated one; that of `linear` where it is rotated in its place."""
        layer = adopt(cls, linear)
        if weight is not linear.weight:
            layer._parameters = {**linear._parameters, "weight": weight}
        layer.input_transform = rotation
        return layer

    def forward(self, x: Tensor) -> Tensor:
        return product(self.input_transform(x), self.weight, self.bias, groups_of(self))
