"""Which model this is: a hash of its architecture, and a fingerprint of its weights."""

import json
from typing import Any

import torch
from torch import nn

from dmx.files import sha256
from dmx.models.sharding import whole
from dmx.models.streaming import brought

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
    facts = {key: _attribute(text, key) for key in ARCHITECTURE_KEYS}
    if is_tied is not None:
        facts["tie_word_embeddings"] = is_tied
    rope = _attribute(text, "rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    theta = rope.get("rope_theta", _attribute(text, "rope_theta") or 0)
    facts["rope_theta"] = theta if isinstance(theta, list) else float(theta)
    heads = facts["num_attention_heads"]
    if heads:  # older configs leave out what follows from the others
        facts["num_key_value_heads"] = facts["num_key_value_heads"] or heads
        if not facts["head_dim"] and isinstance(heads, int):
            facts["head_dim"] = facts["hidden_size"] // heads
    for key, value in facts.items():
        facts[key] = format(value, ".6g") if isinstance(value, float) else value
    return sha256(json.dumps(facts, sort_keys=True).encode())


def _attribute(text: Any, key: str) -> Any:
    """Of a config: None where it has none, a list with that of every layer where they differ.

    transformers refuses to read such an attribute from the config of the whole model, with a RuntimeError.
    """
    try:
        return getattr(text, key, None)
    except RuntimeError:
        return [getattr(layer, key, None) for layer in text.per_layer_config]


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """What tells two models apart: architecture, dtype, and a cheap sum of every parameter."""
    config = getattr(model, "config", None)
    sums = [
        float(whole(p).sum(dtype=torch.float32))
        for _, p in brought(model, model.named_parameters())
    ]
    return {
        "architecture": architecture_sha256(config) if config is not None else None,
        "weights": sha256(json.dumps(sums).encode()),
        "dtype": str(next(model.parameters()).dtype),
    }
