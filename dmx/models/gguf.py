"""Reading GGUF files through transformers without reading them over and over."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np


def gguf_config(folder: str, name: str, modified: int) -> Any:
    """The transformers config of a GGUF file, a copy of its own at each call.

    Args:
        modified: the file's st_mtime_ns, so that a file that was replaced is read again.
    """
    return copy.deepcopy(_read_header(folder, name, modified))


@functools.lru_cache(maxsize=4)
def _read_header(folder: str, name: str, modified: int) -> Any:
    """The header's vocabulary alone takes seconds to read: once for meta_model and load_model."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, gguf_file=name)


def _of_arrays(reader: type[Any]) -> type[Any]:
    """A GGUFReader of the file's bytes as an array, which keeps the mapping alive."""
    data = property(
        lambda self: self._data, lambda self, mapped: setattr(self, "_data", np.asarray(mapped))
    )
    return type("GGUFReader", (reader,), {"data": data})


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Within it, transformers' GGUF loader parses a file once and makes its name map once.

    By itself it does the first several times and the second once a module, and parses through `np.memmap`, of which
    each of a million slices costs several times that of an array: 7.7 s instead of 16.5 s with the file parsed once, for
    a 135M model on one core. All of these are pure functions of their arguments.
    """
    if importlib.util.find_spec("gguf") is None:
        yield
        return
    gguf: Any = importlib.import_module("gguf")
    loader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    reader, name_map, bar = gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm
    gguf.GGUFReader = functools.lru_cache(maxsize=1)(_of_arrays(reader))
    gguf.get_tensor_name_map = functools.lru_cache(maxsize=1)(name_map)
    loader.tqdm = lambda items, **_: items  # the one bar that transformers' switch does not reach
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm = reader, name_map, bar
