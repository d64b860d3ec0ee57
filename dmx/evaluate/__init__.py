"""Measuring models: perplexity, divergence and zero-shot accuracy."""
