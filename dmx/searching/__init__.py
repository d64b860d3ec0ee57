"""Searches: which format each unit would like, under a budget."""

from dmx.searching.config import SearchConfig, SearchSettings
from dmx.searching.result import SearchResult
from dmx.searching.run import search, search_space, seeing_inputs, uniform_assignment

__all__ = [
    "SearchConfig",
    "SearchResult",
    "SearchSettings",
    "search",
    "search_space",
    "seeing_inputs",
    "uniform_assignment",
]
