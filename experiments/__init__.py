"""Hydra entry points: compose, validate, call the library, write the record."""
