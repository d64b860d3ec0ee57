"""Running a model: its logits, in eval mode, and without masks where attention is causal anyway.

Transformers builds attention masks with control flow that reads values back: on a GPU every pass waits for
the device, and the capture of a CUDA graph forbids it. While capturing, an explicit mask is built instead, and
attention leaves its fast path. A purely causal model needs no mask at all, so inside `maskless_attention` its
attention is the same `sdpa` function under a name for which transformers makes no mask.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from dmx.models.memory import MicroBatch

ATTENTION_NAME = "dmx_causal_sdpa"


def model_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """(batch, length) int64 -> (batch, length, vocab) in the model's dtype."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def run_whole(model: nn.Module, tokens: Tensor, micro: MicroBatch | None = None) -> None:
    """All of a batch (batch, length), for what hooks see of it; what they see again must change nothing.

    Args:
        micro: rows that run at a time; None: all.
    """
    if micro is None:
        model_logits(model, tokens)
        return

    def run() -> None:
        for part in micro.parts(tokens):
            model_logits(model, part)

    micro.run(run, len(tokens))


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Every module of the models in eval mode inside; each in its own mode after, also after an
    exception. Modules that take others' places meanwhile are for the caller to take out again."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def is_purely_causal(model: nn.Module, length: int) -> bool:
    """Whether attention is sdpa, also inside `maskless_attention`, causal, and no sliding window is
    shorter than `length`."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) not in ("sdpa", ATTENTION_NAME):
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


def quick_attention(model: nn.Module, tokens: Tensor) -> AbstractContextManager[None]:
    """On a GPU, building a mask waits for the device in every pass; causal models need none."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    if on_gpu and is_purely_causal(model, tokens.shape[1]):
        return maskless_attention(model)
    return nullcontext()
