"""Quantizers: callables from tensor to tensor, with straight-through gradients around the kernels.

`fake_quant` and `continuous_fake_quant` are the public differentiable forms of the functions of
the same names in `dmx.numerics`; what runs is chosen by `dmx.kernels.ops`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dmx.formats import (
    PATHS,
    AskedPath,
    BlockFormat,
    Family,
    ScaleRule,
    check_choice,
    get_block_format,
)
from dmx.kernels import ops
from dmx.numerics import continuous_parameters
from dmx.numerics.mx import check_input


@runtime_checkable
class Quantizer(Protocol):
    """What a quantized layer calls on a weight or an input; `mor`'s safety net wraps one."""

    @property
    def block_format(self) -> BlockFormat:
        """What it quantizes to."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class _FakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        block_format: BlockFormat,
        axis: int,
        scale_rule: ScaleRule | None,
        amax: Tensor | float | None,
    ) -> Tensor:
        return ops.fake_quant(x, block_format, axis=axis, scale_rule=scale_rule, amax=amax)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grads[0], None, None, None, None


def fake_quant(
    x: Tensor,
    block_format: str | BlockFormat,
    *,
    axis: int = -1,
    scale_rule: ScaleRule | None = None,
    amax: Tensor | float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x as the block format holds it, in the dtype of x; the gradient passes straight through.

    Args:
        x: fp32, bf16 or fp16; any shape with at least one axis, also empty or non-contiguous.
        axis: blocks run along it, of 32 values in MX formats; a short last block stands as it is.
        scale_rule: None = the usual one of the format for weights: floor, amax/6 (nvfp4), amax/448 (fp8).
        amax: of nvfp4 the largest magnitude of the tensor that its global scale is made for, of fp8 of each
            row; None = that of x.
        out: receives the result; has x's shape and dtype, may be x, not under grad.

    Returns:
        Shape and dtype of x. A block with NaN or Inf is NaN as a whole.

    Raises:
        TypeError: float64 or integers. FormatError: unknown format or rule, or bf16.
        ValueError: out of another shape or dtype, or out while x needs a gradient.

    Source: OCP Microscaling Formats v1.0, sections 5 and 6.3; nvfp4 and fp8: `dmx.numerics.scaled`.
    """
    block_format = get_block_format(block_format)
    if torch.is_grad_enabled() and x.requires_grad:
        if out is not None:
            raise ValueError("out= cannot be used while x needs a gradient; use torch.no_grad()")
        result: Tensor = _FakeQuant.apply(x, block_format, axis, scale_rule, amax)
        return result
    return ops.fake_quant(x, block_format, axis=axis, scale_rule=scale_rule, amax=amax, out=out)


class _ContinuousFakeQuant(torch.autograd.Function):
    """Saves x and the row of parameters; the backward pass recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, offset: Tensor, parameters: Tensor, amax: float | None
    ) -> Tensor:
        ctx.save_for_backward(x, parameters)
        ctx.amax = amax
        return ops.continuous_fake_quant(x, parameters, amax=amax)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, parameters = ctx.saved_tensors
        grad_x, grad_offset = ops.continuous_fake_quant_backward(
            grads[0], x, parameters, amax=ctx.amax, needs_grad_x=ctx.needs_input_grad[0]
        )
        return grad_x, grad_offset, None, None


def continuous_fake_quant(
    x: Tensor,
    offset: Tensor,
    family: str | Sequence[str] | Family,
    *,
    scale_rules: Sequence[ScaleRule | None] | None = None,
    path: AskedPath = "auto",
    amax: float | None = None,
) -> Tensor:
    """x at a real-valued position between the formats of a family; differentiable in both.

    Args:
        x: fp32, bf16 or fp16; blocks along the last axis.
        offset: 0-d float32 in [0, 2], on the device of x.
        family: a known name, or two to four formats of rising bits.
        scale_rules: of each format; None: the usual ones.
        path: element | line | auto, the element path where there is one; see `dmx.numerics.continuous`.
        amax: as of `fake_quant`.

    Returns:
        Shape and dtype of x.

    Raises:
        TypeError: dtype of x or of offset. ValueError: offset is not 0-d, or outside [0, 2]; the
        range is checked on the CPU only, since reading a value from a GPU would wait for it.
        FormatError: unknown family, rule or path, or an element path that there is not.

    Source: dMX, arXiv 2606.04115; formulas in `dmx.numerics.continuous`.
    """
    check_input(x)
    if not isinstance(offset, Tensor) or offset.dtype != torch.float32:
        kind = offset.dtype if isinstance(offset, Tensor) else type(offset).__name__
        raise TypeError(f"offset must be float32, got {kind}; use torch.tensor(1.0)")
    if offset.ndim != 0:
        raise ValueError(f"offset must be 0-d, got shape {tuple(offset.shape)}")
    if offset.device.type == "cpu" and not 0 <= (value := offset.item()) <= 2:
        raise ValueError(f"offset must lie in [0, 2], got {value:g}; clamp it first")
    check_choice(path, PATHS, "path")
    parameters = continuous_parameters(offset, family, scale_rules, path)
    result: Tensor = _ContinuousFakeQuant.apply(x, offset, parameters, amax)
    return result


@dataclass(frozen=True)
class BlockQuantizer:
    """One block format along the last axis."""

    block_format: BlockFormat
    scale_rule: ScaleRule | None = None
    """None = the usual one of the format."""
    amax: float | None = None
    """As of `fake_quant`; of inputs in nvfp4, by calibration."""

    def __call__(self, x: Tensor) -> Tensor:
        return fake_quant(x, self.block_format, scale_rule=self.scale_rule, amax=self.amax)
