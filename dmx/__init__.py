"""A learned MXFP format for every layer of a language model, under a bit budget."""

from dmx.applying.layers import apply, restore
from dmx.applying.quantizers import continuous_fake_quant, fake_quant
from dmx.assignment.assignment import Assignment
from dmx.assignment.budget import Budget
from dmx.evaluate.divergence import kl_divergence
from dmx.evaluate.perplexity import perplexity
from dmx.evaluate.zero_shot import zero_shot
from dmx.exporting import export, load_exported
from dmx.kernels.ops import quantize
from dmx.searching import SearchConfig, SearchResult, search
from dmx.weights.gptq import gptq

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
