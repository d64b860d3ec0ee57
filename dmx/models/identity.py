"""Which model this is: a hash of its architecture, and a fingerprint of its weights."""

import json
from typing import Any

import torch
from torch import nn

from dmx.files import sha256

ARCHITECTURE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "rms_norm_eps",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


def architecture_sha256(model_config: Any, *, is_tied: bool | None = None) -> str:
    """Hash of what makes two models the same architecture; equal before saving and after loading.

    Covers ARCHITECTURE_KEYS and rope_theta, not dtype, names, token ids or library versions.
    Floats count with six digits: a GGUF file holds them in float32.

    Args:
        is_tied: the hash as if `tie_word_embeddings` were so; None: as it is. Folded rotations untie.
    """
    text = model_config.get_text_config()
    facts = {key: getattr(text, key, None) for key in ARCHITECTURE_KEYS}
    if is_tied is not None:
        facts["tie_word_embeddings"] = is_tied
    rope = getattr(text, "rope_parameters", None) or {}
    facts["rope_theta"] = float(rope.get("rope_theta", getattr(text, "rope_theta", None) or 0))
    heads = facts["num_attention_heads"]
    if heads:  # older configs leave out what follows from the others
        facts["num_key_value_heads"] = facts["num_key_value_heads"] or heads
        facts["head_dim"] = facts["head_dim"] or facts["hidden_size"] // heads
    for key, value in facts.items():
        facts[key] = format(value, ".6g") if isinstance(value, float) else value
    return sha256(json.dumps(facts, sort_keys=True).encode())


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """What tells two models apart: architecture, dtype, and a cheap sum of every parameter."""
    config = getattr(model, "config", None)
    sums = [float(p.detach().sum(dtype=torch.float32)) for p in model.parameters()]
    return {
        "architecture": architecture_sha256(config) if config is not None else None,
        "weights": sha256(json.dumps(sums).encode()),
        "dtype": str(next(model.parameters()).dtype),
    }
