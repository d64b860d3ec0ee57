"""Models with the shapes of their names and random weights, made on the device; their tokens."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool

    @property
    def quantized(self) -> int:
        """Elements of the linear layers in decoder blocks."""
        kv = self.hidden // self.heads * self.kv_heads
        return self.layers * self.hidden * (2 * self.hidden + 2 * kv + 3 * self.intermediate)

    @property
    def outer(self) -> int:
        """Elements of embeddings and head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    def facts(self) -> dict[str, Any]:
        """What a step's time and memory depend on, for records."""
        return {
            "model": self.name,
            "quantized": self.quantized,
            "outer": self.outer,
            "layers": self.layers,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "vocab": self.vocab,
        }


SMOLLM2 = Shape("SmolLM2-135M", 576, 1536, 30, 9, 3, 49152, True)
SMOLLM2_360M = Shape("SmolLM2-360M", 960, 2560, 32, 15, 5, 49152, True)
LLAMA_1B = Shape("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 128256, True)
LLAMA_3B = Shape("Llama-3.2-3B", 3072, 8192, 28, 24, 8, 128256, True)
LLAMA_8B = Shape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128256, False)
LLAMA_70B = Shape("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128256, False)
LLAMA_405B = Shape("Llama-3.1-405B", 16384, 53248, 126, 128, 8, 128256, False)
LLAMA_32B = Shape("Llama, 32 B", 5120, 27648, 64, 40, 8, 152064, False)
TINY = Shape("tiny", 64, 128, 2, 4, 2, 288, True)
GROWTH = Shape("growth", 1024, 2816, 8, 16, 4, 8192, True)

NAMED = {"tiny": TINY, "smollm2": SMOLLM2, "1b": LLAMA_1B, "8b": LLAMA_8B, "32b": LLAMA_32B}
"""As command lines name them."""


def llama_config(shape: Shape) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
    )


def make_model(shape: Shape, device: str) -> nn.Module:
    """bf16, random weights, frozen, in eval mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(llama_config(shape), dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def make_tokens(shape: Shape, rows: int, length: int, seed: int = 0) -> Tensor:
    """(rows, length) int64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocab, (rows, length), generator=generator)
