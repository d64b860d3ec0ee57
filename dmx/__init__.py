"""A learned MXFP format for every layer of a language model, under a bit budget."""

from dmx.assignment import Assignment
from dmx.budget import Budget
from dmx.evaluate.divergence import kl_divergence
from dmx.evaluate.harness import zero_shot
from dmx.evaluate.perplexity import perplexity
from dmx.exporting import export, load_exported
from dmx.kernels.ops import quantize
from dmx.layers import apply, restore
from dmx.quantizers import continuous_fake_quant, fake_quant
from dmx.rounding import gptq
from dmx.searching import SearchConfig, SearchResult, search

__version__ = "0.1.0"

__all__ = [
    "Assignment",
    "Budget",
    "SearchConfig",
    "SearchResult",
    "apply",
    "continuous_fake_quant",
    "export",
    "fake_quant",
    "gptq",
    "kl_divergence",
    "load_exported",
    "perplexity",
    "quantize",
    "restore",
    "search",
    "zero_shot",
]
