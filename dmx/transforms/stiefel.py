"""Gradient descent on rotations: Cayley SGD with momentum.

    M <- momentum * M - G                   G: gradient by R
    A  = (M R^T - R M^T) / 2                skew-symmetric: the direction along the rotations
    M <- A R                                the momentum, projected
    R <- (I - lr/2 A)^-1 (I + lr/2 A) R     Cayley transform: orthogonal again

with the step lr capped at 1 / |A| (Frobenius), so that no gradient rotates a block by more than about
a radian. The paper solves the last line by iteration; blocks of 32 are solved exactly, in float64.

Source: Li, Fuxin, Todorovic, Efficient Riemannian Optimization on the Stiefel Manifold via the
Cayley Transform, ICLR 2020 (arXiv 2002.01113), algorithm 1, for square matrices.
"""

import torch
from torch import Tensor


class CayleySGD:
    """Steps of many square rotations at once, in place."""

    def __init__(self, matrices: Tensor, momentum: float) -> None:
        """matrices: (n, k, k) float32, orthogonal."""
        self.matrices, self.momentum = matrices, momentum
        self.buffer = torch.zeros_like(matrices)

    @torch.no_grad()
    def step(self, gradient: Tensor, lr: float) -> None:
        """gradient: (n, k, k) float32 by the matrices, finite. Waits for no device."""
        rotation = self.matrices.double()
        moment = self.momentum * self.buffer.double() - gradient.double()
        product = moment @ rotation.mT
        skew = (product - product.mT) / 2
        self.buffer.copy_(skew @ rotation)
        norm = torch.linalg.matrix_norm(skew)
        half = skew * (torch.clamp(lr * norm, max=1.0) / norm.clamp(min=1e-300) / 2)[:, None, None]
        eye = torch.eye(rotation.shape[-1], dtype=torch.float64, device=rotation.device)
        rotated, _ = torch.linalg.solve_ex(eye - half, (eye + half) @ rotation)
        # Rounding to float32 would add up over the steps; one Newton step towards the nearest
        # orthogonal matrix takes it back.
        rotated = rotated @ (3 * eye - rotated.mT @ rotated) / 2
        self.matrices.copy_(rotated)
