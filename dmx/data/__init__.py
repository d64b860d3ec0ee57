"""Text and tokens: from a hub, from files, or from what every Python carries."""

from dmx.data.texts import DataConfig, DataPair, Text, encode, load_text, token_batches

__all__ = ["DataConfig", "DataPair", "Text", "encode", "load_text", "token_batches"]
