"""Weights that were rounded beforehand: packed codes and scale bytes a layer, as one safetensors file.

    <layer>.codes    uint8 (out, bytes), packed as `dmx.numerics.packing` says, rows padded to blocks
    <layer>.scales   uint8 (out, blocks), E8M0 or E4M3; fp8: float32 (out, 1)
    <layer>.global   float32 (1,), what E4M3 scales are divided by; nvfp4 alone
    <layer>.sample   float32 (<= 64,), some elements of the weight that was rounded

The file takes bits_per_element and is exact. The sample tells whether a model still has the weights
that were rounded: the file would silently bring back those of another model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError
from dmx.files import sha256
from dmx.formats import BlockFormat, ScaleRule, get_format
from dmx.kernels import ops
from dmx.models.sharding import whole
from dmx.numerics.mx import QuantizedTensor
from dmx.numerics.packing import pack_codes, unpack_codes

SAMPLE_SIZE = 64
SAMPLES_MAY_DIFFER = 2.0**-8
"""Relative, root mean square: rounding to bfloat16 explains 2**-9, another model's weights exceed it."""
AMAX_MAY_DIFFER = 2.0**-6
"""Relative, of one value, which may be rotated in bfloat16."""


def _parts(block_format: BlockFormat) -> tuple[str, ...]:
    return (
        "codes",
        "scales",
        *(["inv_global"] if block_format.scale.global_bits else []),
        "sample",
    )


_NAMES = {"inv_global": "global"}
"""Field -> its name in the file, where that is another."""


def sample_of(weight: Tensor) -> Tensor:
    """Up to 64 elements of a weight, float32 on the CPU."""
    flat = whole(weight).flatten()
    return flat[:: max(1, flat.numel() // SAMPLE_SIZE)][:SAMPLE_SIZE].float().cpu()


@dataclass(eq=False)
class StoredWeight:
    """A quantizer that gives the weight that is stored, whatever weight it is called on.

    Nothing flows back to that weight: the stored one does not depend on it.
    """

    block_format: BlockFormat
    codes: Tensor
    scales: Tensor
    sample: Tensor
    inv_global: Tensor | None = None
    """(1,) float32, what E4M3 scales are divided by."""
    _home: tuple[Tensor, Tensor, Tensor | None] | None = field(default=None, repr=False)
    """The same in CPU memory, once it has left that."""

    @classmethod
    def of(
        cls,
        rounded: Tensor,
        weight: Tensor,
        block_format: BlockFormat,
        scale_rule: ScaleRule,
        amax: Tensor | float | None = None,
    ) -> "StoredWeight":
        """Keep a weight as the format holds it under the rule.

        Args:
            rounded: (out, in) float32; where it was rounded already, values of the format.
            weight: (out, in), what it was rounded from.
            amax: what the scales of rounded values were made for; see `dmx.numerics.quantize`.
        """
        padded = F.pad(rounded, (0, -rounded.shape[1] % (block_format.block_size or 1)))
        sample = sample_of(weight)
        if block_format.is_mx:
            codes, scales = ops.quantize_packed(padded, block_format, scale_rule=scale_rule)
            return cls(block_format, codes, scales, sample)
        made = ops.quantize(padded, block_format, scale_rule=scale_rule, amax=amax)
        inv_global = None if made.inv_global_scale is None else made.inv_global_scale.reshape(1)
        codes = pack_codes(made.codes, block_format.element.bits)
        return cls(block_format, codes, made.scale_codes, sample, inv_global)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the codes and scales."""
        kept = (self.codes, self.scales, self.inv_global)
        return sha256(b"".join(t.cpu().numpy().tobytes() for t in kept if t is not None))

    def values(self, dtype: torch.dtype) -> Tensor:
        """(out, columns) in whole blocks, on the device of the codes."""
        codes = unpack_codes(self.codes, self.block_format.element.bits)
        return QuantizedTensor(
            codes, self.scales, self.block_format, -1, dtype, self.inv_global
        ).dequantize()

    def __call__(self, x: Tensor) -> Tensor:
        """The stored weight in the shape and dtype of x, and on its device."""
        if self.codes.device != x.device:
            if self.codes.device.type == "cpu":
                self._home = self.codes, self.scales, self.inv_global
            self.codes, self.scales = self.codes.to(x.device), self.scales.to(x.device)
            if self.inv_global is not None:
                self.inv_global = self.inv_global.to(x.device)
        return self.values(x.dtype)[:, : x.shape[1]].contiguous()

    def rest(self) -> None:
        """Lie in CPU memory until it is called again."""
        if self._home is None:
            fixed = None if self.inv_global is None else self.inv_global.cpu()
            self._home = self.codes.cpu(), self.scales.cpu(), fixed
        self.codes, self.scales, self.inv_global = self._home

    @classmethod
    def join(cls, parts: Sequence["StoredWeight"], sample: Tensor) -> "StoredWeight":
        """One weight of the rows of several, whose scale of a whole tensor, if they have one, is one."""
        first = parts[0]
        shared = [part.inv_global for part in parts if part.inv_global is not None]
        assert all(torch.equal(one, shared[0]) for one in shared)
        codes, scales = (
            torch.cat(p) for p in zip(*((p.codes, p.scales) for p in parts), strict=True)
        )
        return cls(first.block_format, codes, scales, sample, first.inv_global)

    def split(self, parts: int) -> list["StoredWeight"]:
        """Those of equal shares of the rows; they say nothing of what was rounded."""
        nothing = torch.zeros(0)
        pairs = zip(self.codes.chunk(parts), self.scales.chunk(parts), strict=True)
        return [
            StoredWeight(self.block_format, codes, scales, nothing, self.inv_global)
            for codes, scales in pairs
        ]

    def check(self, weight: Tensor, layer: str) -> None:
        """Raise AssignmentError unless `weight` is the one that was rounded, up to its dtype; a part says nothing."""
        if not len(self.sample):
            return
        difference = float((sample_of(weight) - self.sample).norm() / self.sample.norm())
        if not difference <= SAMPLES_MAY_DIFFER and not torch.equal(sample_of(weight), self.sample):
            raise AssignmentError(
                f"the assignment's weights were made from other weights: {layer} differs by "
                f"{difference:.2%} from the weight that was rounded. Load the model that was "
                "rounded (id, revision, transform), or round this one."
            )


@torch.no_grad()
def check_amax(weight: Tensor, stated: float, layer: str) -> None:
    """Raise AssignmentError for a weight that goes beyond what its scales are made for, up to its dtype: it would be cut
    off there.

    Args:
        stated: `Assignment.amax_of_weight`.
    """
    own = float(torch.where(weight.isfinite(), weight.abs(), 0).amax())
    if own > stated * (1 + AMAX_MAY_DIFFER):
        raise AssignmentError(
            f"weight_amax of the assignment says {stated:.4g} of {layer}, whose weight reaches {own:.4g} here: the scales were "
            "made for other weights. Load the model that the assignment was made for (id, revision, transform), "
            "search this one, or take weight_amax out: an export for a runtime that shares scales states it anew."
        )


def to_tensors(weights: Mapping[str, StoredWeight]) -> dict[str, Tensor]:
    """The tensors of the file, on the CPU."""
    return {
        f"{layer}.{_NAMES.get(part, part)}": getattr(stored, part).cpu().contiguous()
        for layer, stored in weights.items()
        for part in _parts(stored.block_format)
    }


def to_bytes(weights: Mapping[str, StoredWeight], fingerprint: str) -> bytes:
    """Content of the file; equal weights and fingerprints give equal bytes."""
    return save(to_tensors(weights), {"fingerprint": fingerprint})


def from_bytes(
    content: bytes, formats: Mapping[str, str], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, StoredWeight]:
    """Inverse of `to_bytes`; arguments and errors: see `from_tensors`."""
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise _refuse(f"is damaged ({error})") from error
    return from_tensors(tensors, formats, shapes)


def from_tensors(
    tensors: Mapping[str, Tensor], formats: Mapping[str, str], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, StoredWeight]:
    """Inverse of `to_tensors`.

    Args:
        formats, shapes: of the layers that must be there; those in bf16 are not.

    Raises:
        AssignmentError: the file is damaged, or holds other layers, formats or shapes.
    """
    left = dict(tensors)
    weights: dict[str, StoredWeight] = {}
    for layer, name in formats.items():
        block_format = get_format(name)
        if not isinstance(block_format, BlockFormat):
            continue
        parts = {p: left.pop(f"{layer}.{_NAMES.get(p, p)}", None) for p in _parts(block_format)}
        if any(part is None for part in parts.values()):
            raise _refuse(f"lacks {layer}")
        codes, scales = parts["codes"], parts["scales"]
        assert codes is not None and scales is not None
        out, into = shapes[layer]
        blocks = block_format.blocks(into)
        padded = blocks * (block_format.block_size or into)
        expected = (out, padded * block_format.element.bits // 8)
        if tuple(codes.shape) != expected or tuple(scales.shape) != (out, blocks):
            raise _refuse(f"holds {layer} in another format or shape than {name} {out} x {into}")
        has_codes = block_format.is_mx or block_format.scale.element is not None
        of_scales = torch.uint8 if has_codes else torch.float32
        if codes.dtype != torch.uint8 or scales.dtype != of_scales:
            shown = f"uint8 and {str(of_scales).removeprefix('torch.')}"
            if of_scales == torch.uint8:
                shown = "uint8"
            raise _refuse(f"holds {layer} as {codes.dtype} and {scales.dtype}, expected {shown}")
        weights[layer] = StoredWeight(block_format, **parts)  # type: ignore[arg-type]
    if left:
        raise _refuse(f"holds {next(iter(left))}, which is no part of the assignment")
    return weights


ROUNDED_TO_NEAREST = ("mse",)
"""Stages of the weights that keep no file: the scale rules say all of them."""


def stored_weights(assignment: Assignment) -> dict[str, StoredWeight]:
    """layer -> the weight that the assignment stores; {} where weights are rounded to nearest.

    Raises:
        AssignmentError: its file is missing, damaged, or does not fit the assignment.
    """
    if assignment.weights is None or assignment.weights["name"] in ROUNDED_TO_NEAREST:
        return {}
    return from_bytes(assignment.content("weights"), assignment.formats, assignment.shapes)


def _refuse(why: str) -> AssignmentError:
    return AssignmentError(
        f"the file of the assignment's weights {why}. Copy it again from where the assignment "
        "came, or round again."
    )
