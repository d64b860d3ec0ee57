"""Rotations that a search learns beside its offsets: one for each input of layers.

Layers of a fused group (q/k/v, gate/up) read one input and so share its rotation. All matrices are
one (n, 32, 32) float32 parameter that the search owns; layers see views of it in the dtype of the
model. They start at the Hadamard matrix and move by `CayleySGD`.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dmx.formats import BLOCK_SIZE
from dmx.models.linears import fused_group
from dmx.transforms.block import hadamard_block
from dmx.transforms.stage import Transform
from dmx.transforms.stiefel import CayleySGD


class LearnedRotations:
    """State and steps of all rotations of a search."""

    def __init__(
        self,
        in_features: Mapping[str, int],
        *,
        per_block: bool,
        momentum: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """in_features: of every layer that is quantized. dtype: of the model."""
        inputs = {fused_group(layer): n for layer, n in in_features.items()}
        self.inputs, self.per_block, self.dtype = list(inputs), per_block, dtype
        self.sizes = [n // BLOCK_SIZE if per_block else 1 for n in inputs.values()]
        self.input_of = {layer: self.inputs.index(fused_group(layer)) for layer in in_features}
        start = hadamard_block().repeat(sum(self.sizes), 1, 1).to(device)
        self.matrices = start.requires_grad_()
        self.optimizer = CayleySGD(self.matrices, momentum)

    def views(self) -> tuple[Tensor, ...]:
        """For each input (32, 32) or (n_blocks, 32, 32), in the model's dtype; differentiable."""
        parts = self.matrices.to(self.dtype).split(self.sizes)
        return parts if self.per_block else tuple(part[0] for part in parts)

    def step(self, gradient: Tensor, lr: float) -> Tensor:
        """gradient: as the matrices; where it is not finite it is taken as zero.

        Returns:
            (inputs,) float32 on the device: 1 where it was not finite.
        """
        bad = ~gradient.isfinite().all(-1).all(-1)
        self.optimizer.step(gradient.masked_fill(bad[:, None, None], 0.0), lr)
        return torch.stack([part.any() for part in bad.split(self.sizes)]).float()

    def transform(self) -> Transform:
        starts = [0, *accumulate(self.sizes)]
        matrices = self.matrices.detach().cpu()
        return Transform("learned", rotations={
            name: (matrices[a:b] if self.per_block else matrices[a]).clone()
            for name, a, b in zip(self.inputs, starts, starts[1:], strict=False)
        })  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {"matrices": self.matrices.detach().cpu(), "buffer": self.optimizer.buffer.cpu()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        self.matrices.copy_(state["matrices"])
        self.optimizer.buffer.copy_(state["buffer"])
