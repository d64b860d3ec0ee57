"""What is known of long texts, kept on disk between processes: encoding millions of tokens takes a minute, and
looking for sequences of an evaluation text in them some seconds; reading either takes a moment.

    <cache folder>/texts/<key>.safetensors    ids of one text by one tokenizer, or what two texts share

The key of ids is a hash of all that they depend on: the text, the tokenizer's backend as it writes itself
(vocabulary, merges, normalizer, what a digit is split by), the class around it, and the versions of both
libraries. Tokenizers whose rules are Python code have no such key, and nothing of them is kept. Files are whole
or absent; a damaged one is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmx.errors import DataError, RunError
from dmx.state import State, StateFile, cache_folder

SIZE_SETTING = "DMX_TEXTS_GIB"
"""Environment variable: GiB that all these files may take; 0 = nothing is kept."""
SIZE = 1.0
"""GiB, where the variable is not set: some 30 texts of eight million tokens."""
SHORTEST = 1 << 20
"""Characters that are worth it; fewer are encoded in a second or two."""

_log = logging.getLogger(__name__)


def kept_ids(tokenizer: Any, text: str, encode: Callable[[], Tensor]) -> Tensor:
    """What `encode` gives for a text, from disk where an earlier process left it there.

    Args:
        tokenizer: that `encode` uses.
        encode: gives (tokens,) int64.

    Returns:
        (tokens,) int64, the same ids either way.

    Raises:
        DataError: DMX_TEXTS_GIB is no size.
    """
    rules = _rules(tokenizer) if is_kept(text) else None
    if rules is None:
        return encode()

    def made() -> State:
        ids = encode()
        assert ids.numel() == 0 or int(ids.max()) < 1 << 31  # rows of a vocabulary
        return State(tensors={"ids": ids.to(torch.int32)})

    return kept({"ids": rules, "text": text_sha256(text)}, made).tensors["ids"].to(torch.int64)


def is_kept(*texts: str) -> bool:
    """Whether what is made of texts is worth keeping, and may be kept.

    Raises:
        DataError: DMX_TEXTS_GIB is no size.
    """
    return _limit() > 0 and sum(map(len, texts)) >= SHORTEST


def text_sha256(text: str) -> str:
    """Of the text itself; also of one with half characters, which UTF-8 does not have."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def kept(key: Mapping[str, Any], make: Callable[[], State]) -> State:
    """What `make` gives, from disk where an earlier process left it there.

    Args:
        key: JSON, all that it depends on.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_folder() / "texts" / f"{digest}.safetensors"
    file = StateFile(path, digest, "", "text", "make it again")
    try:
        if (known := file.load()) is not None:
            with suppress(OSError):  # a folder that one may only read serves as well
                os.utime(path)  # the last to make room
            return known
    except (RunError, OSError) as error:
        _log.warning("%s Made again.", error)
    made = make()
    try:
        file.save(made)
        _make_room(path.parent)
    except (RunError, OSError) as error:
        _log.warning(
            "What is known of a text is not kept for the next process: %s DMX_CACHE names another folder, "
            "%s=0 keeps nothing.", error, SIZE_SETTING,
        )  # fmt: skip
    return made


def _limit() -> int:
    """Bytes that all files may take."""
    asked = os.environ.get(SIZE_SETTING) or str(SIZE)
    try:
        gib = float(asked)
    except ValueError:
        gib = math.nan
    if not 0 <= gib < math.inf:
        raise DataError(
            f"{SIZE_SETTING}={asked} must be a number of GiB, for what is kept of long texts in "
            f"{cache_folder() / 'texts'}; 0 keeps nothing."
        )
    return int(gib * (1 << 30))


def _make_room(folder: Path) -> None:
    """Remove the files that were not used for longest, where all take more than they may."""
    limit, total = _limit(), 0
    facts = [(path, path.stat()) for path in folder.glob("*.safetensors")]
    for path, stat in sorted(facts, key=lambda item: -item[1].st_mtime_ns):
        total += stat.st_size
        if total > limit:
            path.unlink(missing_ok=True)


def _rules(tokenizer: Any) -> dict[str, Any] | None:
    """All that decides what a tokenizer makes of a text; None for one that does not say it."""
    import tokenizers
    import transformers

    kind = type(tokenizer)
    if not kind.__module__.startswith("transformers."):  # code of its own decides
        return None
    try:
        backend = tokenizer.backend_tokenizer.to_str()
    except (
        Exception
    ):  # it has none, or parts in Python, for which the library raises plain Exception
        return None
    return {
        "backend": text_sha256(backend),
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "splits_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "versions": [transformers.__version__, tokenizers.__version__],
    }
