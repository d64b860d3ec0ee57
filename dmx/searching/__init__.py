"""Searches: which format each unit would like, under a budget."""

from dmx.searching.config import SearchConfig
from dmx.searching.result import SearchResult
from dmx.searching.run import search, search_space, uniform_assignment

__all__ = ["SearchConfig", "SearchResult", "search", "search_space", "uniform_assignment"]
