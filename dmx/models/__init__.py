"""Language models: loading, tiny ones without a download, and what every stage asks of a model."""

from dmx.models.loading import LoadedModel, ModelConfig, load_model

__all__ = ["LoadedModel", "ModelConfig", "load_model"]
