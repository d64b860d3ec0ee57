"""The linear layers of a model, by name: which there are, which run as one product, how large they are."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from dmx.errors import ModelError

FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Last components of sibling modules that read one input, and that vLLM joins to one linear layer."""


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Name -> module of every linear layer, in the order of the model."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def fused_group(name: str) -> str:
    """Of a layer: the group that shares one input and one choice, `parent.{q_proj,k_proj,v_proj}`; the
    layer itself where it is in none. The only place that builds such names, which nobody parses."""
    parent, _, last = name.rpartition(".")
    for group in FUSED_GROUPS:
        if last in group:
            return f"{parent}.{{{','.join(group)}}}"
    return name


def match_layers(patterns: Iterable[str], names: Sequence[str], setting: str) -> dict[str, str]:
    """name -> first pattern that matches it. Globs match whole names, never substrings.

    Raises:
        ModelError: a pattern that matches no layer.
    """
    matched: dict[str, str] = {}
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            raise ModelError(
                f"{setting}: pattern {pattern!r} matches none of the {len(names)} linear layers, "
                f"for example {', '.join(names[:3])}. Globs match whole names: '*.down_proj'."
            )
        for hit in hits:
            matched.setdefault(hit, pattern)
    return matched


def own_elements(linears: Mapping[str, nn.Linear], names: Iterable[str]) -> dict[str, int]:
    """Weight elements of each named layer; a weight that several share counts with the first."""
    sizes, seen = {}, set()
    for name in names:
        weight = linears[name].weight
        sizes[name] = 0 if id(weight) in seen else weight.numel()
        seen.add(id(weight))
    return sizes
