"""A text by its configuration, with what a record says about it.

    config --load_text--> Text --encode--> tokens (1-d int64) --token_batches--> (batch, window)

Where a text comes from is never a guess (`dmx.data.sources`). Every text carries a hash and a
sentence on its source for the record.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import asdict, dataclass

from dmx.data.config import DataConfig
from dmx.data.kept import is_kept, kept, text_sha256
from dmx.data.overlap import Overlap, shared_sequences
from dmx.data.sources import LOADERS
from dmx.errors import DataError
from dmx.state import State, code_version


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
    text, source = LOADERS[config.name](config)
    if config.max_characters is not None:
        text = text[: config.max_characters]
    if not text.strip():
        raise DataError(f"data.name={config.name}: the text is empty ({source}).")
    name = config.name if config.split is None else f"{config.name}/{config.split}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Text(text=text, name=name, sha256=digest, source=source)


def check_overlap(evaluation: Text, training: Text) -> Overlap:
    """What an evaluation text shares with a text for learning, with a warning where that is anything."""
    found = _overlap(evaluation.text, training.text)
    if found.sequences:
        warnings.warn(
            f"the evaluation text ({evaluation.name}) shares {found.sequences:,} of its {found.total:,} "
            f"sequences of {found.words} words ({100 * found.share:.3g} %) with the text that weights learn "
            f"from ({training.name}): what is measured on it is too good. Learn from another text "
            "(data.training), or measure on another one.",
            stacklevel=1,
        )
    return found


def _overlap(evaluation: str, training: str) -> Overlap:
    """As `shared_sequences`; of long texts what an earlier process found."""
    if not is_kept(evaluation, training):
        return shared_sequences(evaluation, training)
    key = {
        "overlap": code_version(shared_sequences.__module__),
        "evaluation": text_sha256(evaluation),
        "training": text_sha256(training),
    }
    return Overlap(
        **kept(key, lambda: State(facts=asdict(shared_sequences(evaluation, training)))).facts
    )
