"""Where a layer stands in a model, by its name, and formats counted by projection."""

from collections.abc import Mapping

PROJECTIONS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
"""Last part of a layer's name -> its short name, in the order of a block."""


def locate(layer: str) -> tuple[str, int | None, str]:
    """(stack, block, projection) of a layer name; `model.layers.3.mlp.up_proj` -> ("model.layers",
    3, "up")."""
    parts = layer.split(".")
    leaf = PROJECTIONS.get(parts[-1], parts[-1])
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if index is None:
        return "", None, leaf
    return ".".join(parts[:index]), int(parts[index]), leaf


def format_counts(
    formats: Mapping[str, str], input_formats: Mapping[str, str] | None = None
) -> dict[str, dict[str, dict[str, int]]]:
    """weight (and input, where it has formats of its own) -> projection -> format -> layers."""
    sides = {"weight": formats} | ({"input": input_formats} if input_formats else {})
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for side, of in sides.items():
        for layer, name in of.items():
            layers = counts.setdefault(side, {}).setdefault(locate(layer)[2], {})
            layers[name] = layers.get(name, 0) + 1
    return counts
