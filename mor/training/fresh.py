"""Models with newly drawn weights, of a known model's kind or of another of its sizes."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mor.config import MorError

_SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "tie_word_embeddings",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""What a config of another `model_type` takes over."""


def fresh_weights(model: nn.Module, seed: int, **architecture: Any) -> nn.Module:
    """A model with newly drawn float32 weights, of the same class or of `model_type`.

    Args:
        architecture: fields of the model's config to change, for example num_hidden_layers=8. With
            model_type=qwen3 (any causal language model of transformers) the others start from
            that type's defaults and this model's sizes.

    Raises:
        MorError: the config has no such field, or transformers knows no such type.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = copy.deepcopy(model.config)
    kind = architecture.pop("model_type", config.model_type)
    if kind != config.model_type:
        shared = {name: getattr(config, name, None) for name in _SHARED_FIELDS} | architecture
        try:
            config = AutoConfig.for_model(kind)
        except ValueError as error:
            raise MorError(
                f"architecture.model_type={kind!r} is not known to transformers. Known ones are, for "
                "example, llama, qwen3, smollm3."
            ) from error
        _check_fields(config, architecture)
        config = AutoConfig.for_model(kind, **shared)
    else:
        _check_fields(config, architecture)
        for name, value in architecture.items():
            setattr(config, name, value)
        if "num_hidden_layers" in architecture and getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    config.dtype = torch.float32
    with _seeded(seed):
        if kind == model.config.model_type:  # type: ignore[union-attr]
            fresh = type(model)(config)
        else:
            fresh = AutoModelForCausalLM.from_config(config)
    return fresh.float()


def _check_fields(config: Any, architecture: dict[str, Any]) -> None:
    for name in architecture:
        if not hasattr(config, name):
            raise MorError(
                f"architecture.{name} is no field of {type(config).__name__}; common ones: "
                "num_hidden_layers, hidden_size, intermediate_size, num_attention_heads, "
                "num_key_value_heads, head_dim"
            )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's global generator at `seed` inside, as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
