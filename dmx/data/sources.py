"""Where texts come from: a folder of local copies, the hub, files, or what every Python carries.

With DMX_DATA set, the named data sets are read from that folder and from nowhere else; without it
they come from the hub; `embedded`, `files` and `synthetic` need neither.
"""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from dmx.data.config import DataConfig
from dmx.data.overlap import without_shared
from dmx.data.readers import read_plain, read_rows
from dmx.errors import DataError
from dmx.hub import datasets_offline, hub_error_kind, hub_is_reachable

JOIN_TEXT = "\n\n"
EMBEDDED_CALIBRATION_SHARE = 0.8
FINEWEB_DOCUMENTS = 300
C4_DOCUMENTS = 584


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
            loaded = datasets.load_dataset(path, subset, split=split, streaming=rows is not None)
            return [row["text"] for row in islice(loaded, rows)]
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
        return read_plain(path_), f"DMX_DATA: {path_.name}, read as one text"
    path_ = _local_file(folder, f"wikitext2_raw/rows-{split}.parquet", config)
    return JOIN_TEXT.join(read_rows(path_, "text")), f"DMX_DATA: {path_.name}, join=rows"


def _load_wikitext2_train_head(config: DataConfig) -> tuple[str, str]:
    folder = data_folder()
    if folder is None:
        raise DataError(
            "data.name=wikitext2_train_head exists only as a local copy: point DMX_DATA at a "
            "folder with it, or use data.name=wikitext2 data.split=train from the hub."
        )
    path = _local_file(folder, "calibration/wikitext2-train-head.jsonl.gz", config)
    return JOIN_TEXT.join(read_rows(path, "text")), f"DMX_DATA: {path.name}"


def _load_fineweb(config: DataConfig) -> tuple[str, str]:
    """The first 300 documents of FineWeb's default configuration."""
    folder = data_folder()
    if folder is None:
        rows = _hub_rows("HuggingFaceFW/fineweb", "default", "train", config, FINEWEB_DOCUMENTS)
        return JOIN_TEXT.join(rows), f"hub: HuggingFaceFW/fineweb default train[:{len(rows)}]"
    path = _local_file(folder, "calibration/fineweb-300.jsonl.gz", config)
    return JOIN_TEXT.join(read_rows(path, "text")), f"DMX_DATA: {path.name}"


def _load_c4(config: DataConfig) -> tuple[str, str]:
    """584 C4 pages. The local copy is a published sample; the hub gives other, cleaned pages."""
    folder = data_folder()
    if folder is None:
        rows = _hub_rows("allenai/c4", "en", "train", config, C4_DOCUMENTS)
        return JOIN_TEXT.join(rows), f"hub: allenai/c4 en train[:{len(rows)}]"
    path = _local_file(folder, "calibration/c4-584.jsonl.gz", config)
    return JOIN_TEXT.join(read_rows(path, "text")), f"DMX_DATA: {path.name}"


def _load_fineweb_c4(config: DataConfig) -> tuple[str, str]:
    (fineweb, source), (c4, other) = _load_fineweb(config), _load_c4(config)
    return fineweb + JOIN_TEXT + c4, f"{source}; {other}"


def _load_embedded(config: DataConfig) -> tuple[str, str]:
    """The Python language reference that every CPython carries; differs between versions.

    It repeats itself: paragraphs of the first four fifths that share 13 words in a row with the last fifth, which
    is for evaluation, are no part of the calibration text.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "data.name=embedded: this Python lacks pydoc_data.topics. Use a full CPython, or "
            "data.name=files with your own text."
        ) from error
    text = JOIN_TEXT.join(topics[key] for key in sorted(topics))
    cut = int(EMBEDDED_CALIBRATION_SHARE * len(text))
    part = text[cut:]
    if config.split == "calibration":
        part = without_shared(text[:cut], part, JOIN_TEXT)
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
        pieces += read_rows(path, config.column)
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

LOADERS: dict[str, Callable[[DataConfig], tuple[str, str]]] = {
    "embedded": _load_embedded,
    "wikitext2": _load_wikitext2,
    "wikitext2_train_head": _load_wikitext2_train_head,
    "fineweb": _load_fineweb,
    "c4": _load_c4,
    "fineweb+c4": _load_fineweb_c4,
    "files": _load_files,
    "synthetic": _load_synthetic,
}
"""Name -> (text, a sentence on its source); the names are those of `dmx.data.config.SPLITS`."""
