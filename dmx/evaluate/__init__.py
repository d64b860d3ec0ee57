"""Measuring models: perplexity and divergence."""
