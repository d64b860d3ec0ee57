"""What a layout of files is: names, dtypes and shapes of a layer's tensors, and its config.

One file a target (`compressed_tensors`, `quark`, `torchao`) fills in a `Layout`; everything else
in this package works on any of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmx.assignment.assignment import Assignment
from dmx.formats import BlockFormat, Operand, ScaleRule


@dataclass(frozen=True)
class TensorSpec:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """How one target stores a model. Tensor names are relative to the layer: `weight_scale`."""

    name: str
    packages: tuple[str, ...]
    """What transformers needs beside itself to load it; pip names."""
    specs: Callable[[BlockFormat, tuple[int, int]], dict[str, TensorSpec]]
    """format, (out, in) -> name -> dtype and shape"""
    encode: Callable[[Tensor, BlockFormat, ScaleRule], dict[str, Tensor]]
    """(out, in) weight -> name -> tensor"""
    decode: Callable[[Mapping[str, Tensor], BlockFormat, torch.dtype], Tensor]
    """name -> tensor back to the (out, in) weight"""
    config: Callable[[Assignment, bool], dict[str, Any]]
    """`quantization_config` of config.json; the flag says whether inputs are quantized too"""
    check: Callable[[Assignment, bool], None]
    """Raises FormatError for what the formats alone do not tell."""
    input_rule: Callable[[Assignment], str]
    """How the loader scales inputs, in words."""
    exact_inputs: bool = False
    """The loader's input quantization equals ours bit for bit."""
    packed: bool = True
    """The tensors' bytes equal bits_per_element."""
    metadata: Callable[[Assignment, bool, list[str]], dict[str, str]] = lambda *_: {}
    """Beside the tensors, in the header of every file."""


def quantized(assignment: Assignment) -> dict[str, BlockFormat]:
    """layer -> format of the layers that are stored quantized (bf16 ones are not)."""
    return assignment.block_formats("weight")


def left_in_bf16(assignment: Assignment) -> list[str]:
    kept = quantized(assignment)
    return [n for n in (*assignment.formats, *assignment.unquantized) if n not in kept]


def used_rules(assignment: Assignment, operand: Operand) -> dict[BlockFormat, ScaleRule]:
    """format -> scale rule of the formats that an operand is quantized to."""
    return {f: assignment.rule(operand, f) for f in assignment.block_formats(operand).values()}


def describe_rules(assignment: Assignment, operand: Operand) -> str:
    """The scale rules of an operand in words: one, or one a format."""
    rules = used_rules(assignment, operand)
    if len(set(rules.values())) == 1:
        return f"`{next(iter(rules.values()))}`"
    return ", ".join(f"`{rule}` for {block_format}" for block_format, rule in rules.items())


def layer_bytes(block_format: BlockFormat, shape: tuple[int, int]) -> int:
    """params * bits_per_element / 8, whole because in_features is a multiple of 32."""
    return round(shape[0] * shape[1] * block_format.bits_per_element / 8)
