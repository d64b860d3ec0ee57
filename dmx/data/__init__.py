"""Text and tokens: from a hub, from files, or from what every Python carries."""

from dmx.data.config import DataConfig, DataPair
from dmx.data.sources import data_folder
from dmx.data.texts import Text, load_text
from dmx.data.tokens import check_tokens, check_window, encode, token_batches

__all__ = [
    "DataConfig",
    "DataPair",
    "Text",
    "check_tokens",
    "check_window",
    "data_folder",
    "encode",
    "load_text",
    "token_batches",
]
