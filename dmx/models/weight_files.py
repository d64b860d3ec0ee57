"""Whether the files of a model are whole, told from their first bytes and their sizes before anything loads them.

Libraries answer a Git LFS pointer, a cut download or an index of another version with an error of their parser
that names no file. Nothing here reads a tensor.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmx.errors import ModelError
from dmx.files import lfs_pointer, parse_json, read_json

_INDEX = ".index.json"
_SINGLE = ("model.safetensors", "pytorch_model.bin")
"""What transformers looks for, in this order, each alone or with an index."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check_weight_files(folder: Path) -> None:
    """Raise ModelError for the first of the files that transformers would read which is not whole.

    Args:
        folder: of a model. Files that are absent are for transformers to miss.
    """
    for name in _SINGLE:
        if (folder / name).is_file():
            check_whole(folder / name)
            return
        if (folder / (name + _INDEX)).is_file():
            _check_index(folder / (name + _INDEX))
            return


def check_tokenizer_files(folder: Path) -> None:
    """Raise ModelError for the first of a tokenizer's files that is not whole."""
    for name in _TOKENIZER:
        if (folder / name).is_file():
            check_whole(folder / name)


def check_whole(path: Path) -> None:
    """Raise ModelError for a pointer of Git LFS, or a file that is cut off or not of its kind."""
    if pointer := lfs_pointer(path):
        raise ModelError(pointer)
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        raise _damaged(path, "it is empty")
    if path.suffix == ".safetensors":
        safetensors_header(path)
    elif path.suffix == ".json":
        try:
            read_json(path)
        except ValueError as error:
            raise _damaged(path, f"it is no JSON ({error})") from error
    elif path.suffix == ".gguf" and not start.startswith(b"GGUF"):
        raise _damaged(path, "it does not begin with GGUF")
    elif start.startswith(b"PK") and not zipfile.is_zipfile(path):  # what torch.save writes
        raise _damaged(path, "it is cut off")


def safetensors_header(path: Path) -> Mapping[str, Any]:
    """Tensors of a safetensors file: name -> dtype, shape, data_offsets.

    Raises:
        ModelError: it is none, or its size is not the one that its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= size - 8:
            raise _damaged(path, f"of a header of {length} bytes {max(size - 8, 0)} are there")
        text = file.read(length)
    try:
        header: dict[str, Any] = parse_json(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in tensors.values()]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _damaged(path, f"its header cannot be read: {type(error).__name__}") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise _damaged(path, f"it has {size:,} bytes and its header says {expected:,}")
    return tensors


def _check_index(path: Path) -> None:
    """An index, and the files that it names."""
    check_whole(path)
    try:
        shard_of = read_json(path)["weight_map"]
        shards = sorted({str(name) for name in shard_of.values()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    for shard in shards:
        file = path.parent / shard
        if Path(shard).name != shard:
            raise _damaged(path, f"it names {shard}, which is no file beside it")
        if not file.is_file():
            raise ModelError(f"{path} names {shard}, which is not there. Get that file, too.")
        check_whole(file)
        if file.suffix == ".safetensors":
            held = safetensors_header(file)
            lacking = [name for name, of in shard_of.items() if of == shard and name not in held]
            if lacking:
                raise _damaged(path, f"it says that {shard} holds {lacking[0]}, which it does not")


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"{path} is damaged: {why}. Get the file again from where it came.")
