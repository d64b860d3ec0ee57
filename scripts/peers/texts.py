"""The texts of --calibration and --evaluation, read and refused under these names before a model is loaded."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dmx.data import DataConfig, Text, Tokens, encode, load_text, text_tokens
from dmx.data.config import SPLITS
from dmx.errors import DataError, RunError
from dmx.models import ModelConfig, load_tokenizer

NAMES = [
    f"{name}:{split}" if split else name
    for name, splits in SPLITS.items()
    for split in splits or ("",)
    if name != "files"
]
"""Data sets, each with a split where it has some."""
_SETTING = re.compile(r"data\.name=([\w+]+)(?: data\.split=(\w+))?")
"""As errors of `dmx.data` name what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Both texts and their tokens."""

    calibration: Text
    evaluation: Text
    tokens: Tokens
    """Of the calibration text."""
    measured: Tokens
    """Of the evaluation text."""
    token_window: int
    """Tokens of a row of the calibration text."""

    def check_enough(
        self, asked: Sequence[int], calibration: str, window: int, evaluation: str
    ) -> None:
        """Raise RunError for more calibration tokens than the text fills rows with, and for an evaluation text that
        fills no window.

        Args:
            asked, calibration, window, evaluation: as --tokens and the other options have them.
        """
        own = text_tokens(self.tokens, self.token_window)
        rows = len(self.tokens) // own if own > 0 else 0
        if max(asked) > rows * self.token_window:
            raise RunError(
                f"--tokens {max(asked)}: --calibration {calibration} fills {rows} rows of --token-window {self.token_window}, "
                f"{rows * self.token_window} tokens. Give no more, other rows, or another text."
            )
        if len(self.measured) < max(1, text_tokens(self.measured, window)):
            raise RunError(
                f"--window {window}: --evaluation {evaluation} has {len(self.measured)} tokens, which fill none. Give a "
                "smaller window, or another text."
            )


def read_texts(model: ModelConfig, calibration: str, evaluation: str, token_window: int) -> Texts:
    """By their names, with the tokens that the model's tokenizer makes; the model itself is not loaded.

    Raises:
        RunError: a text or the tokenizer is not there.
    """
    text = _text("--calibration", calibration)
    measured = _text("--evaluation", evaluation)
    tokenizer = load_tokenizer(model)
    return Texts(
        calibration=text,
        evaluation=measured,
        tokens=encode(tokenizer, text),
        measured=encode(tokenizer, measured),
        token_window=token_window,
    )


def _text(option: str, name: str) -> Text:
    """Of `wikitext2:test`; what is wrong with it is said under the option's name."""
    of, _, split = name.partition(":")
    try:
        return load_text(DataConfig(name=of, split=split or None))
    except DataError as error:
        said = str(error).replace("data=embedded", f"{option} embedded:{option[2:]}")
        said = _SETTING.sub(lambda m: f"{option} {':'.join(filter(None, m.groups()))}", said)
        raise RunError(said) from error
