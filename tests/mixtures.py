"""Tiny mixtures of experts, of random weights, and token ids for them."""

import torch
import transformers as tf

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
CONFIGS = {
    "qwen3_moe": tf.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32),
    "qwen2_moe": tf.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=64),
    "mixtral": tf.MixtralConfig(**SIZES, num_local_experts=4, intermediate_size=32),
    "olmoe": tf.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=3, intermediate_size=32),
}
"""Every architecture whose experts are known."""
BLOCKS = [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
STACKED = [f"{block}.{kind}" for block in BLOCKS for kind in ("gate_up_proj", "down_proj")]


def mixture(kind="qwen3_moe", dtype=torch.float32, **more):
    """A model, in eval mode; the router's weights are not all zero."""
    config = CONFIGS[kind] if not more else type(CONFIGS[kind])(**CONFIGS[kind].to_dict() | more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def token_ids(count=2):
    """(2, 16) int64 each."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (2, 16), generator=generator) for _ in range(count)]


def logits(model):
    """(2, 16, 96)"""
    device = next(model.parameters()).device
    with torch.no_grad():
        return model(input_ids=token_ids(1)[0].to(device), use_cache=False).logits
