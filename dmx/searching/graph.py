"""CUDA graphs of a whole forward and backward pass: thousands of launches become one.

Transformers builds attention masks with control flow that reads values back, which a capture
forbids; while capturing it builds an explicit mask instead, and attention leaves its fast path. A
purely causal model needs no mask at all, so for the time of the search its attention is the same
`sdpa` function under a name for which transformers makes no mask.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ATTENTION_NAME = "dmx_causal_sdpa"
WARM_UP_CALLS = 3
"""PyTorch's notes on CUDA graphs ask for a few eager calls on a side stream before a capture."""


def is_purely_causal(model: nn.Module, length: int) -> bool:
    """Whether attention is sdpa, causal, and no sliding window is shorter than `length`."""
    config: Any = getattr(model, "config", None)
    if config is None or getattr(config, "_attn_implementation", None) != "sdpa":
        return False
    window = getattr(config, "sliding_window", None)
    # Configs without layer_types, such as Mistral's, use the window that they state in every layer.
    default = ["full_attention" if window is None else "sliding_attention"]
    kinds = set(getattr(config, "layer_types", None) or default) - {"full_attention"}
    return not kinds or (kinds == {"sliding_attention"} and window is not None and window >= length)


@contextmanager
def maskless_attention(model: nn.Module) -> Iterator[None]:
    """sdpa without mask building, inside; for models that `is_purely_causal`."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION_NAME, sdpa_attention_forward)
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = before


class GraphedStep:
    """`step(tokens, temperature)` captured once and replayed with new values in the same places.

    The result of a call is overwritten by the next one.
    """

    def __init__(
        self,
        step: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        tokens: Tensor,
        temperature: Tensor,
    ) -> None:
        self.tokens, self.temperature = tokens.clone(), temperature.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_CALLS):
                step(self.tokens, self.temperature)
        torch.cuda.current_stream().wait_stream(side)
        # What the warm-up freed on the side stream is of no use to the graph's own pool.
        torch.cuda.empty_cache()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = step(self.tokens, self.temperature)

    def __call__(self, tokens: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        self.tokens.copy_(tokens)
        self.temperature.copy_(temperature)
        self.graph.replay()
        return self.results
