"""The page of the records of scripts/benchmarks/growth.py: what a search step costs as models and cards grow."""

SCHEMA = "dmx.growth/1"
