"""Searches: which format each unit would like, under a budget."""

from dmx.searching.config import SearchConfig, SearchSettings
from dmx.searching.result import SearchResult
from dmx.searching.run import search, uniform_assignment
from dmx.searching.space import search_space, seeing_inputs

__all__ = [
    "SearchConfig",
    "SearchResult",
    "SearchSettings",
    "search",
    "search_space",
    "seeing_inputs",
    "uniform_assignment",
]
