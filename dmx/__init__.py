"""A learned number format for every layer of a language model, under a bit budget.

The public names are imported when they are first used: `import dmx` alone, and with it `dmx --help`,
loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmx.applying.apply import apply, restore
    from dmx.applying.calibrate import calibrate_inputs
    from dmx.applying.quantizers import continuous_fake_quant, fake_quant
    from dmx.applying.sharing import share_scales
    from dmx.assignment.assignment import Assignment
    from dmx.assignment.budget import Budget
    from dmx.evaluate.divergence import kl_divergence
    from dmx.evaluate.perplexity import perplexity
    from dmx.evaluate.zero_shot import zero_shot
    from dmx.exporting import export, load_exported
    from dmx.kernels.ops import quantize
    from dmx.models.streaming import stream_blocks
    from dmx.searching import SearchConfig, SearchResult, search
    from dmx.weights.gptq import gptq
    from dmx.weights.learn_config import LearnConfig
    from dmx.weights.learned import learn_weights
    from dmx.weights.local_hessian import local_hessian

__version__ = "0.1.0"

__all__ = [
    "Assignment",
    "Budget",
    "LearnConfig",
    "SearchConfig",
    "SearchResult",
    "apply",
    "calibrate_inputs",
    "continuous_fake_quant",
    "export",
    "fake_quant",
    "gptq",
    "kl_divergence",
    "learn_weights",
    "load_exported",
    "local_hessian",
    "perplexity",
    "quantize",
    "restore",
    "search",
    "share_scales",
    "stream_blocks",
    "zero_shot",
]

_HOMES = {
    "applying.apply": ("apply", "restore"),
    "applying.calibrate": ("calibrate_inputs",),
    "applying.quantizers": ("continuous_fake_quant", "fake_quant"),
    "applying.sharing": ("share_scales",),
    "assignment.assignment": ("Assignment",),
    "assignment.budget": ("Budget",),
    "evaluate.divergence": ("kl_divergence",),
    "evaluate.perplexity": ("perplexity",),
    "evaluate.zero_shot": ("zero_shot",),
    "exporting": ("export", "load_exported"),
    "kernels.ops": ("quantize",),
    "models.streaming": ("stream_blocks",),
    "searching": ("SearchConfig", "SearchResult", "search"),
    "weights.gptq": ("gptq",),
    "weights.learn_config": ("LearnConfig",),
    "weights.learned": ("learn_weights",),
    "weights.local_hessian": ("local_hessian",),
}
"""Module -> its public names, as above; a test holds the two together."""
_HOME_OF = {name: f"dmx.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dmx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
