"""Rotations that a search learns beside its offsets: one for each input of layers.

Layers of a fused group (q/k/v, gate/up) read one input and so share its rotation. All matrices are
one (n, 32, 32) float32 parameter that the search owns; layers see views of it in the dtype of the
model. They start at the Hadamard matrix and move by `CayleySGD`.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dmx.models.linears import fused_group
from dmx.transforms.block import hadamard_block
from dmx.transforms.stage import Transform
from dmx.transforms.stiefel import CayleySGD


class LearnedRotations:
    """State and steps of all rotations of a search."""

    def __init__(
        self,
        layers: Iterable[str],
        *,
        momentum: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """layers: all that are quantized. dtype: of the model."""
        layers = list(layers)
        inputs = dict.fromkeys(fused_group(layer) for layer in layers)
        self.inputs, self.dtype = list(inputs), dtype
        self.input_of = {layer: self.inputs.index(fused_group(layer)) for layer in layers}
        start = hadamard_block().repeat(len(self.inputs), 1, 1).to(device)
        self.matrices = start.requires_grad_()
        self.optimizer = CayleySGD(self.matrices, momentum)

    def views(self) -> tuple[Tensor, ...]:
        """For each input (32, 32), in the model's dtype; differentiable."""
        return self.matrices.to(self.dtype).unbind(0)

    def step(self, gradient: Tensor, lr: float) -> Tensor:
        """gradient: as the matrices; where it is not finite it is taken as zero.

        Returns:
            (inputs,) float32 on the device: 1 where it was not finite.
        """
        bad = ~gradient.isfinite().all(-1).all(-1)
        self.optimizer.step(gradient.masked_fill(bad[:, None, None], 0.0), lr)
        return bad.float()

    def transform(self) -> Transform:
        """The rotations as they are now, for all that follows the search."""
        matrices = self.matrices.detach().cpu()
        rotations = {name: matrices[i].clone() for i, name in enumerate(self.inputs)}
        return Transform("learned", rotations=rotations)

    def state(self) -> dict[str, Tensor]:
        """What `load` needs to go on."""
        return {
            "rotations": self.matrices.detach().cpu(),
            "rotations_momentum": self.optimizer.buffer.cpu(),
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        self.matrices.copy_(state["rotations"])
        self.optimizer.buffer.copy_(state["rotations_momentum"])
