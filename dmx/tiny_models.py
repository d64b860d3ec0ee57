"""Small models made without a download, under one public name: `make_tiny(TinyConfig())`."""

from dmx.models.tiny import END_OF_TEXT, TinyConfig, byte_tokenizer, make_tiny, train_tiny

__all__ = ["END_OF_TEXT", "TinyConfig", "byte_tokenizer", "make_tiny", "train_tiny"]
