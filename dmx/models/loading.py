"""Language models for a search: from the hub, a folder, a GGUF file, or small and made here.

    meta_model(config)            shapes only, on the meta device: budget ranges before any weight
    load_model(config, device)    weights and tokenizer, in eval mode, with provenance

A model that only looks loaded, with weights missing or freshly drawn, is an error. So is one that
is quantized already; what else a search refuses is `check_searchable`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmx.errors import ModelError
from dmx.formats import check_choice
from dmx.models.config import ModelConfig
from dmx.models.dtype import dtype_of
from dmx.models.finite import check_finite_weights
from dmx.models.gguf import gguf_config, read_once
from dmx.models.identity import architecture_sha256
from dmx.models.locating import Where, explained, load_options, locate, revision_of
from dmx.models.searchable import check_not_quantized
from dmx.models.sharding import spread
from dmx.models.streaming import MEMORIES, stream_blocks
from dmx.models.tiny import byte_tokenizer, make_tiny, tiny_model_config
from dmx.models.weight_files import check_tokenizer_files, check_weight_files
from dmx.processes import Processes


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to search, its tokenizer, and what a record says about it."""

    model: nn.Module
    tokenizer: Any
    provenance: dict[str, str | None]
    """id, revision, dtype, architecture_sha256, note."""
    left_out: tuple[str, ...] = ()
    """Tensors of its files that the model has no place for: heads that predict further tokens, and the like."""


def load_model(
    config: ModelConfig,
    device: str | torch.device = "cpu",
    shared_by: Processes | None = None,
    *,
    memory: str = "all",
) -> LoadedModel:
    """Weights and tokenizer on `device`, in eval mode; nothing is written to disk but hub caches.

    Args:
        shared_by: processes that shard the weights, and all load them; the main one reads the files. None: all of them are here.
        memory: all | block: the decoder blocks stay in CPU memory (`dmx.models.streaming`).

    Raises:
        ModelError: the model is not there, not allowed, not whole, not finite, or not a causal language model.
    """
    check_choice(memory, MEMORIES, "memory")
    if shared_by is not None and shared_by.size > 1:
        if memory == "block":
            raise ModelError(
                "memory=block: weights that processes shard lie on their devices. Use memory=all."
            )
        return _load_sharded(config, torch.device(device), shared_by)
    dtype = dtype_of(config.dtype, device)
    left_out: tuple[str, ...] = ()
    if config.tiny is not None:
        model = make_tiny(config.tiny, attn_implementation=config.attn_implementation)
        tokenizer = byte_tokenizer()
        revision: str | None = f"seed={config.tiny.seed},train_steps={config.tiny.train_steps}"
    else:
        where = locate(config)
        with _reading(where):
            model_config = _read_config(config, where)
            model, left_out = _read_weights(config, where, model_config, dtype)
            tokenizer = _read_tokenizer(config, where)
        revision = revision_of(where)
    provenance = {
        "id": config.id,
        "revision": revision,
        "dtype": str(dtype).removeprefix("torch."),
        "architecture_sha256": architecture_sha256(model.config),
        "note": config.note,
    }
    # Parameters alone: rotary frequencies are float32 buffers in every loader, and rounding them to
    # bf16 moves the perplexity (SmolLM2 by 0.04 %).
    # What transformers loaded has the dtype that was asked for, or float32 where the model insists on it.
    for parameter in model.parameters():
        made_here = config.tiny is not None or config.gguf_file is not None
        place = parameter.device if memory == "block" else device
        parameter.data = parameter.data.to(place, dtype if made_here else parameter.dtype)
    if memory == "block":
        stream_blocks(model, device)
    else:
        model.to(device)
    try:
        check_finite_weights(model)
    except ModelError as error:
        raise ModelError(f"model.id={config.id}: {error}") from error
    return LoadedModel(model.eval(), tokenizer, provenance, left_out)


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer that `load_model` gives, alone.

    Raises:
        ModelError: it is not there, or not whole.
    """
    if config.tiny is not None:
        return byte_tokenizer()
    where = locate(config)
    with _reading(where):
        return _read_tokenizer(config, where)


def _load_sharded(config: ModelConfig, device: torch.device, processes: Processes) -> LoadedModel:
    """Of a model that the main process reads, its rows; no process has more of it on its device than one tensor whole."""
    here: list[LoadedModel] = []

    def read() -> tuple[Any, ...]:
        dtype = str(dtype_of(config.dtype, device)).removeprefix("torch.")
        one = load_model(replace(config, dtype=dtype))
        here.append(one)
        return one.tokenizer, one.provenance, one.left_out

    tokenizer, provenance, left_out = processes.agree(read)
    model = meta_model(config)
    spread(model, here[0].model if here else None, processes, device)
    return LoadedModel(model.eval(), tokenizer, provenance, left_out)


def meta_model(config: ModelConfig) -> Any:
    """The model on the meta device: names, shapes and ties, no weights and no memory.

    Of a hub model only its config.json is fetched, of a GGUF file only the header is read.
    """
    if config.tiny is not None:
        model_config = tiny_model_config(config.tiny)
    else:
        where = locate(config)
        with _reading(where):
            model_config = _read_config(config, where)
    with torch.device("meta"):
        return _from_config(config, model_config).eval()


def max_positions(model_config: Any) -> int | None:
    """The longest window the model has positions for, in tokens; None where it states none."""
    stated = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return int(stated) if stated is not None else None


# ---------------------------------------------------------------- reading


def _read_config(config: ModelConfig, where: Where) -> Any:
    from transformers import AutoConfig

    with explained(config, on_hub=where.commit is not None):
        if where.gguf is not None:
            return gguf_config(where.source, str(config.gguf_file), where.gguf.stat().st_mtime_ns)
        return AutoConfig.from_pretrained(where.source, **load_options(config, where))


def _from_config(config: ModelConfig, model_config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype_of(config.dtype, "meta")}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    try:
        return AutoModelForCausalLM.from_config(model_config, **options)
    except (ValueError, ImportError) as error:
        raise ModelError(f"model.id={config.id}: transformers cannot make it: {error}") from error


def _read_weights(
    config: ModelConfig, where: Where, model_config: Any, dtype: torch.dtype
) -> tuple[Any, tuple[str, ...]]:
    """The model, and tensors of its files that it has no place for."""
    import transformers

    check_not_quantized(model_config, config.id)
    if where.gguf is None and where.commit is None:  # the hub's own files are checked as they come
        check_weight_files(Path(where.source))
    options = load_options(config, where)
    if config.gguf_file is not None and hasattr(transformers, "GgufConfig"):
        # without it the layers may stay packed and are no nn.Linear
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    with explained(config, on_hub=where.commit is not None), _noting_unexpected() as unexpected:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            where.source,
            config=model_config,
            dtype=dtype,
            output_loading_info=True,
            **options,
        )
    model, info = loaded
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        keys = sorted(str(key) for key in info.get(problem, ()))
        if keys:
            raise ModelError(
                f"model.id={config.id}: the weights are not whole: {problem} {', '.join(keys[:4])}"
                f"{' ...' if len(keys) > 4 else ''} ({len(keys)}). Get the files again."
            )
    if left_out := sorted({*unexpected, *map(str, info.get("unexpected_keys", ()))}):
        warnings.warn(
            f"model.id={config.id}: {len(left_out)} tensors of its files have no place in {type(model).__name__} and "
            f"are left out, of results and of exports: {', '.join(left_out[:4])}"
            f"{' ...' if len(left_out) > 4 else ''}.",
            stacklevel=3,
        )
    # dequantized weights are plain ones: say so, or saving the model would claim otherwise
    if config.gguf_file is not None and hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tuple(left_out)


@contextlib.contextmanager
def _noting_unexpected() -> Iterator[set[str]]:
    """Names of tensors that transformers finds no place for while it loads, also of those that its models tell it to
    say nothing of, but for buffers that old files hold (frequencies, positions, masks)."""
    from transformers import PreTrainedModel

    noted: set[str] = set()
    method = "_adjust_missing_and_unexpected_keys"
    adjust = getattr(PreTrainedModel, method)
    buffers = ("inv_freq", "position_ids", "attn.bias", "masked_bias")

    def note(model: Any, loading_info: Any) -> None:
        noted.update(k for k in loading_info.unexpected_keys if not k.endswith(buffers))
        adjust(model, loading_info)

    setattr(PreTrainedModel, method, note)
    try:
        yield noted
    finally:
        setattr(PreTrainedModel, method, adjust)


def _read_tokenizer(config: ModelConfig, where: Where) -> Any:
    from transformers import AutoTokenizer

    if where.gguf is None and where.commit is None:
        check_tokenizer_files(Path(where.source))
    with explained(config, on_hub=where.commit is not None):
        tokenizer = AutoTokenizer.from_pretrained(where.source, **load_options(config, where))
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
def _reading(where: Where) -> Iterator[None]:
    """Quietly; the package gguf is of use to its files alone."""
    with _quiet_transformers(), read_once() if where.gguf else contextlib.nullcontext():
        yield


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
