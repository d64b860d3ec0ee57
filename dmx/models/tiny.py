"""Small models made here, without a download: random, or trained for seconds on CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dmx.data import DataConfig, encode, load_text, token_batches
from dmx.errors import ModelError

TINY_ARCHITECTURES = ("llama", "smollm2", "qwen2", "qwen3", "qwen3_moe")
END_OF_TEXT = "<|endoftext|>"


@dataclass(kw_only=True)
class TinyConfig:
    """A small model made from a config, without a download: random, or trained for seconds.

    `smollm2` is Llama with tied embeddings, as SmolLM2 is; the others tie where `tied` says so.
    The vocabulary is the 256 bytes and <|endoftext|>, padded to a multiple of 32.
    """

    architecture: str = "llama"
    """llama, smollm2, qwen2, qwen3, qwen3_moe."""
    hidden_size: int = 64
    intermediate_size: int = 128
    """Of qwen3_moe, of each expert."""
    experts: int = 8
    """Of each block of qwen3_moe; the others have none."""
    experts_per_token: int = 2
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    """null = hidden_size / heads."""
    vocab_size: int = 288
    max_positions: int = 2048
    tied: bool = False
    seed: int = 0
    train_steps: int = 0
    """AdamW steps on the embedded text; 0 leaves the weights random."""
    train_window: int = 256
    """Tokens; longer windows than this the model reads worse."""
    train_batch_size: int = 4
    train_lr: float = 4e-3

    def __post_init__(self) -> None:
        if self.architecture not in TINY_ARCHITECTURES:
            raise ModelError(
                f"model.tiny.architecture={self.architecture!r} is unknown. "
                f"Known: {', '.join(TINY_ARCHITECTURES)}."
            )
        if not 1 <= self.experts_per_token <= self.experts:
            raise ModelError(
                f"model.tiny.experts_per_token={self.experts_per_token} must lie in 1 to "
                f"experts={self.experts}."
            )
        if self.vocab_size < 257:
            raise ModelError(
                f"model.tiny.vocab_size={self.vocab_size} is too small: 256 bytes and "
                f"{END_OF_TEXT} need at least 257."
            )
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ModelError(
                f"model.tiny.hidden_size={self.hidden_size} is no multiple of "
                f"heads={self.heads}. Change one of them, or set head_dim."
            )
        if self.heads % self.kv_heads:
            raise ModelError(
                f"model.tiny.heads={self.heads} is no multiple of kv_heads={self.kv_heads}."
            )


def byte_tokenizer() -> Any:
    """A tokenizer made in memory: token id = byte value, and 256 = <|endoftext|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Source: GPT-2 `bytes_to_unicode`: printable bytes stand for themselves, the others for the
    characters from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def tiny_model_config(tiny: TinyConfig) -> Any:
    import transformers

    classes = {
        "llama": transformers.LlamaConfig,
        "smollm2": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
    }
    mixture = {
        "num_experts": tiny.experts,
        "num_experts_per_tok": tiny.experts_per_token,
        "moe_intermediate_size": tiny.intermediate_size,
    }
    return classes[tiny.architecture](
        vocab_size=tiny.vocab_size,
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        head_dim=tiny.head_dim or tiny.hidden_size // tiny.heads,
        max_position_embeddings=tiny.max_positions,
        tie_word_embeddings=tiny.tied or tiny.architecture == "smollm2",
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=None,
        **(mixture if tiny.architecture == "qwen3_moe" else {}),
    )


def make_tiny(tiny: TinyConfig, *, attn_implementation: str | None = None) -> Any:
    """The model of a TinyConfig: float32, on CPU, in eval mode; torch's random state stays."""
    from transformers import AutoModelForCausalLM

    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tiny.seed)
        model = AutoModelForCausalLM.from_config(
            tiny_model_config(tiny), dtype=torch.float32, **options
        )
    if tiny.train_steps:
        text = load_text(DataConfig(name="embedded", split="calibration"))
        train_tiny(
            model,
            encode(byte_tokenizer(), text),
            tiny.train_steps,
            window=tiny.train_window,
            batch_size=tiny.train_batch_size,
            lr=tiny.train_lr,
            seed=tiny.seed,
        )
    return model.eval()


def train_tiny(
    model: Any,
    tokens: Tensor,
    steps: int,
    *,
    window: int = 256,
    batch_size: int = 4,
    lr: float = 4e-3,
    seed: int = 0,
) -> list[float]:
    """Train a small model in place for a few seconds: AdamW, linear decay, seeded.

    Args:
        model: float32; left in eval mode, without gradients, requires_grad as it was.
        tokens: (tokens,) int64, at least one batch.
        steps: optimizer steps; batches are cycled, reshuffled each pass.

    Returns:
        the loss of each step, nats/token.
    """
    device = next(model.parameters()).device
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses: list[float] = []
    batches: list[Tensor] = []
    model.train()
    while len(losses) < steps:
        batches = batches or token_batches(tokens, window, batch_size, seed=seed + len(losses))
        ids = batches.pop().to(device)
        logits = model(ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    optimizer.zero_grad()
    model.eval()
    return losses
