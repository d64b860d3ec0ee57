"""CUDA graphs of a whole forward and backward pass: thousands of launches become one.

A capture forbids what transformers does to build masks, so it needs a model that is purely causal, under
`dmx.models.running.maskless_attention`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP_CALLS = 3
"""PyTorch's notes on CUDA graphs ask for a few eager calls on a side stream before a capture."""


class GraphedStep:
    """`step(*inputs)` captured once and replayed with new values in the same places.

    The result of a call is overwritten by the next one.
    """

    def __init__(self, step: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> None:
        self.inputs = [value.clone() for value in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_CALLS):
                step(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        # What the warm-up freed on the side stream is of no use to the graph's own pool.
        torch.cuda.empty_cache()
        self.graph, own = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self.graph):
                self.results = step(*self.inputs)
        finally:
            # Else that of a capture that failed, which may be tried again with fewer rows, stays the current one.
            torch.cuda.set_stream(own)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for kept, given in zip(self.inputs, inputs, strict=True):
            kept.copy_(given)
        self.graph.replay()
        return self.results


class StepGraphs:
    """Steps by name, each captured at its first call, or called as they are.

    Args:
        captures: whether they are captured; then the result of a call is overwritten by the next one of its name.
    """

    def __init__(self, captures: bool) -> None:
        self.captures = captures
        self._graphs: dict[str, GraphedStep] = {}

    def __call__(
        self, name: str, step: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """What the step gives for these inputs."""
        if not self.captures:
            return step(*inputs)
        if name not in self._graphs:
            self._graphs[name] = GraphedStep(step, *inputs)
        return self._graphs[name](*inputs)

    def forget(self) -> None:
        """Let go of all, whose memory is free before the next capture."""
        self._graphs = {}
