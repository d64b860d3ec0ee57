"""What a layout of files is: names, dtypes and shapes of a layer's tensors, and its config.

One file a target (`compressed_tensors`, `quark`, `humming`, `modelopt`, `torchao`) fills in a `Layout`; everything else
in this package works on any of them, layer by layer.
"""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from dmx.applying.stored import StoredWeight
from dmx.assignment.assignment import Assignment
from dmx.errors import RunError
from dmx.exporting._fresh_load import TRANSFORMERS
from dmx.formats import BlockFormat, Operand, ScaleRule

MODULES = {"compressed-tensors": "compressed_tensors", "amd-quark": "quark", "torchao": "torchao"}
"""pip name of a loader's package -> what it is imported as."""


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor of a file is."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of the tensor in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class LayerPlan:
    """How one quantized layer is stored, and how its loader is asked to quantize its input."""

    shape: tuple[int, int]
    """(out_features, in_features)"""
    weight: BlockFormat
    weight_rule: ScaleRule
    input: BlockFormat | None
    """None: the loader leaves the input alone."""
    input_rule: ScaleRule | None
    weight_amax: float | None = None
    """That the scales of the weight are made for; None: its own."""
    input_amax: float | None = None
    """That the global scale of the input is made for, in fp8 its one, static scale; None: each tensor's, or token's, own."""

    @property
    def bytes(self) -> int:
        """What bits_per_element says the weight takes; whole, since blocks fill every row."""
        bits = self.weight.bits("bits_per_element", self.shape)
        return round(self.shape[0] * self.shape[1] * bits / 8)


Layers = Mapping[str, LayerPlan]
"""layer name -> its plan, in the order of the model"""


@dataclass(frozen=True)
class Layout:
    """How one target stores a model. Tensor names are relative to the layer: `weight_scale`."""

    name: str
    packages: tuple[str, ...]
    """What transformers needs beside itself to load it; pip names."""
    specs: Callable[[BlockFormat, tuple[int, int]], dict[str, TensorSpec]]
    """format, (out, in) -> name -> dtype and shape"""
    decode: Callable[[Mapping[str, Tensor], BlockFormat, torch.dtype], Tensor]
    """name -> tensor back to the (out, in) weight"""
    config: Callable[[Layers, Sequence[str]], dict[str, Any]]
    """`quantization_config` of config.json; the names are those of the layers left in BF16"""
    check: Callable[[Layers, bool], None]
    """Raises FormatError for what the formats alone do not tell; the flag says whether inputs are
    quantized, too."""
    input_rule: Callable[[Layers], str]
    """How the loader scales inputs, in words."""
    encode: Callable[[Tensor, BlockFormat, ScaleRule], dict[str, Tensor]] | None = None
    """Of MX formats, which give their own values back to the bit: (out, in) weight -> name -> tensor; needed where the
    layout holds one"""
    exact_inputs: bool = False
    """The loader's input quantization equals ours bit for bit."""
    packed: bool = True
    """The tensors' bytes equal bits_per_element."""
    encode_stored: Callable[[StoredWeight], dict[str, Tensor]] | None = None
    """Of the others: a weight as an assignment keeps it"""
    decode_stored: Callable[[Mapping[str, Tensor], BlockFormat], StoredWeight] | None = None
    """Inverse of `encode_stored`, but for the sample"""
    input_tensors: Callable[[LayerPlan], dict[str, Tensor]] = lambda _: {}
    """What a file holds of a layer's input: name -> tensor"""
    input_amax: Mapping[str, Callable[[Tensor, BlockFormat], float]] = field(default_factory=dict)
    """Name of such a tensor -> inverse of `input_tensors`, up to the last bit"""
    files: Callable[[Layers, Sequence[str]], dict[str, dict[str, Any]]] = lambda *_: {}
    """Further JSON files: name -> content; arguments as of `config`."""
    may_differ: float = 0.0
    """Relative error of logits of loaded weights that its reader's arithmetic explains; 0: equal to the bit."""
    reader: str = TRANSFORMERS
    """What the fresh process loads with: transformers, or, inputs left alone, one of `_fresh_load.READERS`."""
    metadata: Callable[[Layers, Sequence[str]], dict[str, str]] = lambda *_: {}
    """Beside the tensors, in the header of every file; the names are those of the plain tensors."""
    since: Mapping[BlockFormat, Mapping[str, str]] = field(default_factory=dict)
    """format -> package -> its first version that reads it, where one that is still around does not"""

    def requirements(self, layers: Layers) -> list[str]:
        """Of pip, to load files with these formats: `compressed-tensors>=0.20.0`."""
        oldest = _oldest(self, layers)
        return [p + (f">={oldest[p][0]}" if p in oldest else "") for p in self.packages]


def decoded_by(
    decode_stored: Callable[[Mapping[str, Tensor], BlockFormat], StoredWeight],
) -> Callable[[Mapping[str, Tensor], BlockFormat, torch.dtype], Tensor]:
    """`decode` of a layout, from its `decode_stored`."""
    return lambda tensors, block_format, dtype: decode_stored(tensors, block_format).values(dtype)


def layers_of(assignment: Assignment, *, inputs: bool = False) -> dict[str, LayerPlan]:
    """layer -> how it is stored, of the layers whose weights are quantized."""
    of_input = assignment.block_formats("input") if inputs else {}
    return {
        layer: LayerPlan(
            shape=assignment.shapes[layer],
            weight=weight,
            weight_rule=assignment.rule("weight", weight),
            input=(own := of_input.get(layer)),
            input_rule=None if own is None else assignment.rule("input", own),
            weight_amax=assignment.amax_of_weight(layer),
            input_amax=None if own is None else assignment.amax_of_input(layer),
        )
        for layer, weight in assignment.block_formats("weight").items()
    }


def left_in_bf16(assignment: Assignment) -> list[str]:
    """Linear layers that are stored as they are."""
    quantized = assignment.block_formats("weight")
    return [n for n in (*assignment.formats, *assignment.unquantized) if n not in quantized]


def describe_rules(layers: Layers, operand: Operand) -> str:
    """The scale rules of an operand in words: one, or one a format."""
    each = [
        (layer.weight, layer.weight_rule)
        if operand == "weight"
        else (layer.input, layer.input_rule)
        for layer in layers.values()
    ]
    rules = {block_format: rule for block_format, rule in each if block_format is not None}
    if len(set(rules.values())) == 1:
        return f"`{next(iter(rules.values()))}`"
    return ", ".join(f"`{rule}` for {block_format}" for block_format, rule in rules.items())


def check_packages(layout: Layout, layers: Layers) -> None:
    """Raise RunError unless the loader's packages are installed, in versions that read these formats."""
    packages = layout.packages
    missing = [p for p in packages if importlib.util.find_spec(MODULES[p]) is None]
    if missing:
        raise RunError(
            f"verify=true loads the files with {', '.join(packages)}, and "
            f"{', '.join(missing)} is not installed. Run: pip install {' '.join(missing)} (or "
            "pip install -e '.[export]'), or set verify=false."
        )
    for package, (needed, block_format) in _oldest(layout, layers).items():
        found = metadata.version(package)
        if _numbers(found) < _numbers(needed):
            raise RunError(
                f"verify=true loads the files with {package}, and {found} is installed, which does not read "
                f"{block_format}: that needs {needed} or newer. Run: pip install '{package}>={needed}', choose formats "
                f"without {block_format} (search.family), or set verify=false."
            )


def _oldest(layout: Layout, layers: Layers) -> dict[str, tuple[str, BlockFormat]]:
    """package -> the version that these formats need, and one that needs it."""
    needed: dict[str, tuple[str, BlockFormat]] = {}
    for block_format in dict.fromkeys(layer.weight for layer in layers.values()):
        for package, version in layout.since.get(block_format, {}).items():
            if package not in needed or _numbers(needed[package][0]) < _numbers(version):
                needed[package] = version, block_format
    return needed


def _numbers(version: str) -> tuple[int, ...]:
    """0.20.0a2 -> (0, 20, 0): what is before a release counts as it."""
    found = map(int, re.findall(r"\d+", version))
    return (*found, 0, 0)[:3]
