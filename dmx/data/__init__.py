"""Text and tokens: from a hub, from files, or from what every Python carries."""

from dmx.data.config import DataConfig, DataPair
from dmx.data.overlap import Overlap, shared_sequences
from dmx.data.sources import data_folder
from dmx.data.texts import Text, check_overlap, load_text
from dmx.data.tokens import (
    Tokens,
    check_tokens,
    check_window,
    encode,
    text_tokens,
    token_batches,
    windows_of,
)

__all__ = [
    "DataConfig",
    "DataPair",
    "Overlap",
    "Text",
    "Tokens",
    "check_overlap",
    "check_tokens",
    "check_window",
    "data_folder",
    "encode",
    "load_text",
    "shared_sequences",
    "text_tokens",
    "token_batches",
    "windows_of",
]
