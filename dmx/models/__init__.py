"""Language models: loading, tiny ones without a download, and what every stage asks of a model."""

from dmx.models.config import ModelConfig
from dmx.models.identity import architecture_sha256
from dmx.models.loading import LoadedModel, load_model, load_tokenizer, max_positions, meta_model
from dmx.models.searchable import check_searchable
from dmx.models.tiny import TinyConfig, byte_tokenizer, train_tiny

__all__ = [
    "LoadedModel",
    "ModelConfig",
    "TinyConfig",
    "architecture_sha256",
    "byte_tokenizer",
    "check_searchable",
    "load_model",
    "load_tokenizer",
    "max_positions",
    "meta_model",
    "train_tiny",
]
