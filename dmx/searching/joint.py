"""Weights that descend together with the offsets, so that formats are chosen for weights that will learn.

A choice for weights as they are need not be the best one for weights that learn under it afterwards. Here masters
of all searched layers take a step of AdamW along with each step of the offsets, under the continuous quantizer;
gradients pass it straight through. They only serve the choice: at the end they are thrown away, and the weights
stage that follows (`dmx.learn_weights`) starts from the original ones. The full-precision model that the objective
compares with keeps these, too.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dmx.errors import ModelError, RunError
from dmx.models.linears import linear_layers
from dmx.processes import Processes
from dmx.searching.bank import SearchLinear
from dmx.searching.config import JointConfig
from dmx.weights.learned_layers import FlatWeights, shared_weight
from dmx.weights.learned_optimizer import AdamW, warm_cosine


class JointWeights(FlatWeights):
    """Masters of the searched layers, their optimizer, and what the layers see: the masters in the model's dtype.

    Args:
        layers: names of the layers whose weights descend.
        steps: of the search.
        seed: of the search.

    Raises:
        ModelError: layers that share one weight.
    """

    def __init__(
        self, model: nn.Module, layers: Iterable[str], config: JointConfig, steps: int, seed: int
    ) -> None:
        linears = linear_layers(model)
        weights = {name: linears[name].weight.detach() for name in layers}
        if (shared := shared_weight({name: linears[name] for name in weights})) is not None:
            raise ModelError(
                f"search.name=joint: {shared[0]} and {shared[1]} share one weight, which would descend "
                "twice. Leave them out (search.exclude), or use search.name=differentiable."
            )
        super().__init__(weights, torch.float32)
        self.config, self.steps = config, steps
        self.optimizer = AdamW(self.values, torch.float32, seed)
        self.show()

    @torch.no_grad()
    def show(self) -> None:
        """Let the layers see the masters as they now are."""
        self.seen.copy_(self.values)

    def attach(self, model: nn.Module) -> None:
        """To the layers of a model under search."""
        for name in self.places:
            layer = model.get_submodule(name)
            assert isinstance(layer, SearchLinear)
            layer.learning, layer.rows = self.views(name), self.rows.get(name)

    @torch.no_grad()
    def update(self, step: int, processes: Processes) -> Tensor:
        """One step along the gradient; its norm, 0-d float32. No synchronization with the host."""
        rate = warm_cosine(step, self.steps, self.config.lr, self.config.warmup)
        norm = self.optimizer.step_clipped(
            self.gradient, rate, self.config.max_norm, processes, in_pieces=bool(self.rows)
        )
        self.show()
        return norm

    def check_finite(self, norm: float, step: int) -> None:
        """Raise RunError where the gradient's norm is not finite."""
        if not math.isfinite(norm):
            raise RunError(
                f"search.name=joint: the gradient of the weights in step {step} is not finite "
                f"(search.joint.lr={self.config.lr:g}). Lower search.joint.lr or raise search.joint.warmup; "
                "where it is step 0, look for Inf or NaN in the model, and use bfloat16 or float32 instead "
                "of float16. Nothing was written of this."
            )

    def state(self) -> dict[str, Tensor]:
        """Tensors that `load` takes back, of a sharded model in the main process; all processes ask together."""
        state = {"masters": self.values} | self.optimizer.state()
        return {name: self.to_file(tensor) for name, tensor in state.items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], step: int) -> None:
        """Go on after `step` steps."""
        own = {n: self.from_file(tensors[n]) for n in ("masters", *self.optimizer.state())}
        self.values.copy_(own["masters"])
        self.optimizer.load(own, step)
        self.show()
