"""Text, tokens and windows: what a search calibrates on and what an evaluation reads.

    config --load_text--> Text --encode--> tokens (1-d int64) --token_batches--> (batch, window)

Where a text comes from is never a guess. With DMX_DATA set, the named data sets are read from
that folder and from nowhere else; without it they come from the hub; `embedded`, `files` and
`synthetic` need neither. Every text carries a hash and a sentence on its source for the record.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmx.errors import DataError
from dmx.hub import datasets_offline, hub_error_kind, hub_is_reachable

JOINS = ("rows", "document")
JOIN_TEXT = "\n\n"
EMBEDDED_CALIBRATION_SHARE = 0.8
FINEWEB_DOCUMENTS = 300
C4_DOCUMENTS = 584


@dataclass(kw_only=True)
class DataConfig:
    """One text. A data choice (`DataPair`) names two: for calibration and for evaluation."""

    name: str = "embedded"
    """embedded, wikitext2, wikitext2_train_head, fineweb, c4, fineweb+c4, files, synthetic."""
    split: str | None = None
    """wikitext2: train, validation, test. embedded, synthetic: calibration, evaluation."""
    files: list[str] = field(default_factory=list)
    """For name=files: .txt .raw .jsonl .jsonl.gz .parquet, read in this order."""
    column: str = "text"
    """The text field of .jsonl, .jsonl.gz and .parquet files."""
    join: str = "rows"
    """rows: rows joined by a blank line. document: the text as the author's file has it
    (wikitext2: wiki.*.raw read as one text; files: joined by nothing)."""
    max_characters: int | None = None
    """Keep the first so many characters; null = all."""
    seed: int = 0
    """For name=synthetic only."""

    def __post_init__(self) -> None:
        if self.name not in _LOADERS:
            raise DataError(f"data.name={self.name!r} is unknown. Known: {', '.join(_LOADERS)}.")
        if self.join not in JOINS:
            raise DataError(f"data.join={self.join!r} is unknown. Known: {', '.join(JOINS)}.")
        if self.join == "document" and self.name not in {"wikitext2", "files"}:
            raise DataError(
                f"data.join=document is for name=wikitext2 or files, not {self.name!r}. "
                "Use join=rows."
            )
        allowed = _SPLITS.get(self.name, ())
        if self.split is not None and self.split not in allowed:
            known = f"one of {', '.join(allowed)}" if allowed else "null: it has no splits"
            raise DataError(f"data.split={self.split!r} for name={self.name}: must be {known}.")
        if self.split is None and allowed:
            raise DataError(
                f"data.split is missing for name={self.name}. Choose one of {', '.join(allowed)}."
            )
        if bool(self.files) != (self.name == "files"):
            found = f"data.files={self.files!r} with data.name={self.name!r}"
            raise DataError(
                f"{found}: files and name=files go together. Give both or neither; on the command line they "
                "are data.calibration.files=[...] and data.evaluation.files=[...], .name likewise."
            )
        if self.max_characters is not None and self.max_characters < 1:
            raise DataError(f"data.max_characters={self.max_characters} must be > 0 or null.")


@dataclass(kw_only=True)
class DataPair:
    """A data choice: what the search sees, and what the result is measured on."""

    calibration: DataConfig
    evaluation: DataConfig


@dataclass(frozen=True)
class Text:
    """A text and where it came from."""

    text: str
    name: str
    """What tables call it: data set and split, as `wikitext2/test`."""
    sha256: str
    """Of the UTF-8 bytes of `text`."""
    source: str
    """One sentence for the record: files, hub id or Python version."""


def load_text(config: DataConfig) -> Text:
    """The text that `config` names.

    Raises:
        DataError: a file is missing, a field is missing, the text is empty, or the hub is needed
            and out of reach.
    """
    text, source = _LOADERS[config.name](config)
    if config.max_characters is not None:
        text = text[: config.max_characters]
    if not text.strip():
        raise DataError(f"data.name={config.name}: the text is empty ({source}).")
    name = config.name if config.split is None else f"{config.name}/{config.split}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Text(text=text, name=name, sha256=digest, source=source)


# ---------------------------------------------------------------- where texts come from


def data_folder() -> Path | None:
    """The folder that DMX_DATA names, or None where it is unset.

    Raises:
        DataError: DMX_DATA is set and is no folder.
    """
    value = os.environ.get("DMX_DATA", "").strip()
    if not value:
        return None
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"DMX_DATA={value} is no folder. Point it at a folder with local copies of the data sets (a file "
            "that it lacks is named when it is read), or unset it to use the Hugging Face hub."
        )
    return folder


def _local_file(folder: Path, relative: str, config: DataConfig) -> Path:
    path = folder / relative
    if not path.is_file():
        raise DataError(
            f"data.name={config.name}: {path} does not exist. DMX_DATA={folder} is set, so only "
            f"local copies are read. Put {relative} there, or unset DMX_DATA to use the hub."
        )
    return path


def _hub_rows(
    path: str, subset: str | None, split: str, config: DataConfig, rows: int | None = None
) -> list[str]:
    """Rows of a hub data set's text column; with `rows`, the first so many, streamed.

    A stream is never served from the cache, so it needs the hub itself.
    """
    reachable = hub_is_reachable()
    ways_out = (
        "Connect to the network, or point DMX_DATA at a folder with local copies "
        "(data=embedded needs neither)."
    )
    if rows is not None and not reachable:
        raise DataError(
            f"data.name={config.name}: the Hugging Face hub is out of reach and {path} is "
            f"streamed from it. {ways_out}"
        )
    import datasets

    try:
        with datasets_offline(not reachable):
            found = datasets.load_dataset(path, subset, split=split, streaming=rows is not None)
            return [row["text"] for row in islice(found, rows)]
    except Exception as error:
        kind = hub_error_kind(error)
        if kind == "offline" or not reachable:
            raise DataError(
                f"data.name={config.name}: {path} is not in the local cache and the Hugging Face "
                f"hub is out of reach. {ways_out}"
            ) from error
        raise DataError(
            f"data.name={config.name}: the hub did not serve {path} ({kind}: {error}). {ways_out}"
        ) from error


def _load_wikitext2(config: DataConfig) -> tuple[str, str]:
    """WikiText-2 raw. join=rows is the usual text for perplexity at a fixed length.

    A blank line of the original file (" " and a line end) is an empty row, every other row keeps
    its line end; so the file is rebuilt exactly from the rows.
    """
    folder, split = data_folder(), config.split
    if folder is None:
        path, subset = "Salesforce/wikitext", "wikitext-2-raw-v1"
        rows = _hub_rows(path, subset, str(split), config)
        text = JOIN_TEXT.join(rows) if config.join == "rows" else "".join(r or " \n" for r in rows)
        return text, f"hub: {path} {subset} {split}, join={config.join}"
    if split == "train":
        raise DataError(
            "data.name=wikitext2 data.split=train: local copies (DMX_DATA is set) hold only its "
            "start. Use data.name=wikitext2_train_head, or unset DMX_DATA to use the hub."
        )
    if config.join == "document":
        short = {"validation": "valid", "test": "test"}[str(split)]
        path_ = _local_file(folder, f"wikitext2_raw/wiki.{short}.raw", config)
        return _read_plain(path_), f"DMX_DATA: {path_.name}, read as one text"
    path_ = _local_file(folder, f"wikitext2_raw/rows-{split}.parquet", config)
    return JOIN_TEXT.join(_read_rows(path_, "text")), f"DMX_DATA: {path_.name}, join=rows"


def _load_wikitext2_train_head(config: DataConfig) -> tuple[str, str]:
    folder = data_folder()
    if folder is None:
        raise DataError(
            "data.name=wikitext2_train_head exists only as a local copy: point DMX_DATA at a "
            "folder with it, or use data.name=wikitext2 data.split=train from the hub."
        )
    path = _local_file(folder, "calibration/wikitext2-train-head.jsonl.gz", config)
    return JOIN_TEXT.join(_read_rows(path, "text")), f"DMX_DATA: {path.name}"


def _load_fineweb(config: DataConfig) -> tuple[str, str]:
    """The first 300 documents of FineWeb's default configuration."""
    folder = data_folder()
    if folder is None:
        rows = _hub_rows("HuggingFaceFW/fineweb", "default", "train", config, FINEWEB_DOCUMENTS)
        return JOIN_TEXT.join(rows), f"hub: HuggingFaceFW/fineweb default train[:{len(rows)}]"
    path = _local_file(folder, "calibration/fineweb-300.jsonl.gz", config)
    return JOIN_TEXT.join(_read_rows(path, "text")), f"DMX_DATA: {path.name}"


def _load_c4(config: DataConfig) -> tuple[str, str]:
    """584 C4 pages. The local copy is a published sample; the hub gives other, cleaned pages."""
    folder = data_folder()
    if folder is None:
        rows = _hub_rows("allenai/c4", "en", "train", config, C4_DOCUMENTS)
        return JOIN_TEXT.join(rows), f"hub: allenai/c4 en train[:{len(rows)}]"
    path = _local_file(folder, "calibration/c4-584.jsonl.gz", config)
    return JOIN_TEXT.join(_read_rows(path, "text")), f"DMX_DATA: {path.name}"


def _load_fineweb_c4(config: DataConfig) -> tuple[str, str]:
    (fineweb, source), (c4, other) = _load_fineweb(config), _load_c4(config)
    return fineweb + JOIN_TEXT + c4, f"{source}; {other}"


def _load_embedded(config: DataConfig) -> tuple[str, str]:
    """The Python language reference that every CPython carries; differs between versions."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "data.name=embedded: this Python lacks pydoc_data.topics. Use a full CPython, or "
            "data.name=files with your own text."
        ) from error
    text = JOIN_TEXT.join(topics[key] for key in sorted(topics))
    cut = int(EMBEDDED_CALIBRATION_SHARE * len(text))
    part = text[:cut] if config.split == "calibration" else text[cut:]
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return part, f"pydoc_data.topics of {python}, {len(topics)} topics, sorted"


def _load_files(config: DataConfig) -> tuple[str, str]:
    pieces: list[str] = []
    for name in config.files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise DataError(
                f"data.files: {path} does not exist (looked from {Path.cwd()}). "
                "Give an absolute path, or one from the folder where the command runs."
            )
        pieces += _read_rows(path, config.column)
    joined = (JOIN_TEXT if config.join == "rows" else "").join(pieces)
    return joined, "files: " + ", ".join(Path(name).name for name in config.files)


def _load_synthetic(config: DataConfig) -> tuple[str, str]:
    """Sentences of a small grammar, drawn by seed: enough structure for a tiny model to learn.

    Only `Random.random` is used, whose sequence Python keeps between versions.
    """
    rng = random.Random(f"{config.seed}/{config.split}")

    def pick(words: str) -> str:
        options = words.split()
        return options[int(rng.random() * len(options))]

    def thing() -> str:
        return f"{pick('the a one every')} {pick(_ADJECTIVES)} {pick(_NOUNS)}"

    def sentence() -> str:
        text = f"{thing()} {pick(_VERBS)} {thing()} {pick('near under behind after')} {thing()}."
        return text[0].upper() + text[1:]

    paragraphs = (" ".join(sentence() for _ in range(8)) for _ in range(500))
    return JOIN_TEXT.join(paragraphs), f"synthetic sentences, seed {config.seed}"


_ADJECTIVES = "small large bright quiet narrow early broken green heavy hollow distant plain"
_NOUNS = "river engine letter garden window signal teacher bridge number forest market table"
_VERBS = "follows carries counts finds holds moves reads hides builds answers crosses keeps"

_LOADERS: dict[str, Callable[[DataConfig], tuple[str, str]]] = {
    "embedded": _load_embedded,
    "wikitext2": _load_wikitext2,
    "wikitext2_train_head": _load_wikitext2_train_head,
    "fineweb": _load_fineweb,
    "c4": _load_c4,
    "fineweb+c4": _load_fineweb_c4,
    "files": _load_files,
    "synthetic": _load_synthetic,
}
_SPLITS = {
    "wikitext2": ("train", "validation", "test"),
    "embedded": ("calibration", "evaluation"),
    "synthetic": ("calibration", "evaluation"),
}


# ---------------------------------------------------------------- files


def _read_plain(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # bytes first: line ends stay as they are
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}). Convert it to UTF-8.") from error


def _read_rows(path: Path, column: str) -> list[str]:
    """Texts of one file, one a row; a plain text file is one row."""
    name = path.name
    if name.endswith((".txt", ".raw")):
        return [_read_plain(path)]
    if name.endswith((".jsonl", ".jsonl.gz")):
        opener: Any = gzip.open if name.endswith(".gz") else open
        try:
            with opener(path, "rt", encoding="utf-8") as lines:
                return _column((json.loads(line) for line in lines if line.strip()), column, path)
        except (json.JSONDecodeError, UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise DataError(f"{path} is not JSON Lines ({error}).") from error
    if name.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet as parquet

        try:
            table = parquet.read_table(path)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path} is not a Parquet file ({error}).") from error
        if column not in table.column_names:
            raise _no_column(path, column, table.column_names)
        return _column(({column: value} for value in table[column].to_pylist()), column, path)
    raise DataError(
        f"{path}: the file type is unknown. Known: .txt .raw .jsonl .jsonl.gz .parquet."
    )


def _column(rows: Iterable[Any], column: str, path: Path) -> list[str]:
    texts: list[str] = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or column not in row:
            raise _no_column(path, column, list(row) if isinstance(row, dict) else [])
        if not isinstance(row[column], str):
            found = type(row[column]).__name__
            raise DataError(f"{path}, row {number}: {column} holds a {found}, not text.")
        texts.append(row[column])
    return texts


def _no_column(path: Path, column: str, found: Iterable[str]) -> DataError:
    return DataError(
        f"data.column={column!r} is not in {path}. Found: {', '.join(found) or 'no fields'}."
    )


# ---------------------------------------------------------------- tokens


def encode(tokenizer: Any, text: Text | str) -> Tensor:
    """Token ids of a text, without special tokens.

    Args:
        tokenizer: a transformers tokenizer.
        text: any length; the "longer than the model" warning is not for windows, so it is off.

    Returns:
        (tokens,) int64.
    """
    string = text.text if isinstance(text, Text) else text
    ids = tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise DataError unless tokens are 1-d int64 ids in [0, vocab_size)."""
    if tokens.dim() != 1 or tokens.dtype != torch.int64:
        raise DataError(
            f"tokens must be 1-d int64, got shape {tuple(tokens.shape)} {tokens.dtype}."
        )
    if tokens.numel() == 0:
        raise DataError("tokens are empty: the text gave no tokens.")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise DataError(
            f"token id {wrong} is outside the model's vocabulary of {vocab_size}. "
            "Encode the text with the tokenizer of this model."
        )


def check_window(window: int, max_positions: int | None) -> None:
    """Raise DataError for a window the model has no positions for (None: no limit known)."""
    if window < 2:
        raise DataError(f"window={window} must be at least 2: one token to predict the next.")
    if max_positions is not None and window > max_positions:
        raise DataError(
            f"window={window} is longer than the model's {max_positions} positions. "
            f"Use a window of at most {max_positions}."
        )


def token_batches(
    tokens: Tensor, window: int, batch_size: int, *, seed: int | None, n_batches: int | None = None
) -> list[Tensor]:
    """Non-overlapping windows in shuffled order, in batches; what does not fill one is dropped.

    Args:
        tokens: (tokens,) int64.
        window: tokens a window.
        batch_size: windows a batch.
        seed: order of the windows; None keeps the text's order.
        n_batches: the first so many batches; None = all that the text fills.

    Returns:
        batches of (batch_size, window) int64, each with its own memory.

    Raises:
        DataError: the text is too short for one batch or for n_batches.
    """
    for name, value in (("window", window), ("batch_size", batch_size), ("n_batches", n_batches)):
        if value is not None and value < 1:
            raise DataError(f"{name}={value} must be at least 1.")
    if tokens.dim() != 1:
        raise DataError(f"tokens must be 1-d, got shape {tuple(tokens.shape)}.")
    count = tokens.numel() // window
    if count < 1:
        raise DataError(
            f"the text has {tokens.numel()} tokens, less than one window of {window}. "
            "Use a longer text or a smaller window."
        )
    available = count // batch_size
    if available < (n_batches or 1):
        raise DataError(
            f"the text fills {count} windows of {window} tokens: {available} batches of "
            f"{batch_size}, {n_batches or 1} needed. Use a longer text, a smaller window or batch "
            "size, or fewer batches."
        )
    windows = tokens[: count * window].view(count, window)
    order = torch.arange(count)
    if seed is not None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    chosen = order[: (n_batches or available) * batch_size]
    return [windows[index].clone() for index in chosen.split(batch_size)]
