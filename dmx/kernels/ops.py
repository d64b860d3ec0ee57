"""The door to the fast kernels: names, arguments and results of `dmx.numerics`, equal bit for bit.

Backends: `triton` (tensors on a GPU), `cpp` (tensors on the CPU), `reference` (anywhere). Which one
runs is decided by `choose_backend` alone, from the tensor's device and a request: `set_backend`,
else the environment variable DMX_BACKEND, else `auto`. It is said once through `logging`, and a
backend that was asked for and is missing is an error. None of these functions is differentiable;
`dmx.continuous_fake_quant` and `dmx.fake_quant` put autograd around them.

Where sums run in another order than in the reference, results differ by float32 rounding: the
offset's gradient, and losses of rows with their gradients.
"""

import importlib.util
import logging
import os
import warnings
from functools import cache
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from dmx import numerics
from dmx.errors import RunError
from dmx.formats import (
    BlockFormat,
    ScaleRule,
    check_choice,
    get_block_format,
    scale_rule_of,
)
from dmx.kernels import cpu
from dmx.numerics import moments
from dmx.numerics.continuous import N_PATH_PARAMETERS, gradients_of, is_line, is_mixed
from dmx.numerics.line import N_LINE_PARAMETERS
from dmx.numerics.mixed_line import (
    N_MIXED_PARAMETERS,
    mixed_derivatives,
    mixed_fake_quant,
    sides_of,
)
from dmx.numerics.moments import Moments, StepNumbers
from dmx.numerics.mx import QuantizedTensor, check_axis, check_input, check_out, wide_values
from dmx.numerics.packing import check_packable, pack_codes

logger = logging.getLogger(__name__)

Backend = Literal["auto", "reference", "cpp", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
_DEVICE_OF = {"cpp": "cpu", "triton": "cuda"}

_requested: str | None = None


def set_backend(name: str | None) -> None:
    """Ask for a backend in this process; None goes back to DMX_BACKEND.

    Raises:
        FormatError: no such backend.
    """
    global _requested
    if name is not None:
        check_choice(name, BACKENDS, "backend")
    _requested = name


def choose_backend(device: torch.device | str, requested: str | None = None) -> str:
    """Backend for tensors on `device`: "reference", "cpp" or "triton".

    Args:
        requested: one of BACKENDS; None takes `set_backend`, DMX_BACKEND or "auto", in this order.

    Raises:
        FormatError: no such backend. RunError: it was asked for and cannot run here.
    """
    requested = requested or _requested or os.environ.get("DMX_BACKEND") or "auto"
    return _choose(torch.device(device).type, requested)


def actual_backend(device: torch.device | str) -> str:
    """What runs for tensors on `device` under the present request, for the record of a run."""
    return choose_backend(device)


@cache
def _choose(device_type: str, requested: str) -> str:
    check_choice(requested, BACKENDS, "backend")
    natural = {"cpu": "cpp", "cuda": "triton"}.get(device_type, "reference")
    chosen = natural if requested == "auto" else requested
    missing = _why_missing(chosen, device_type)
    if missing and requested != "auto":
        raise RunError(
            f"backend={requested!r} cannot run on device {device_type!r}: {missing}. "
            "Set DMX_BACKEND=auto, or DMX_BACKEND=reference, which runs everywhere."
        )
    if missing:
        chosen = "reference"
        warnings.warn(
            f"Quantization on {device_type!r} runs on the slow reference backend "
            f"(requested=auto): {missing}.",
            stacklevel=4,
        )
    logger.info("backend on %s: %s (requested=%s)", device_type, chosen, requested)
    return chosen


def _why_missing(backend: str, device_type: str) -> str | None:
    if _DEVICE_OF.get(backend, device_type) != device_type:
        return f"it works on {_DEVICE_OF[backend]} tensors only"
    if backend == "cpp" and cpu.find_compiler() is None:
        return "no C++ compiler was found ($CXX, c++, g++, clang++); install one"
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def _triton_mx() -> ModuleType:
    """Imported late: machines without a GPU need no triton."""
    from dmx.kernels import triton_mx

    return triton_mx


def _triton_scaled() -> ModuleType:
    from dmx.kernels import triton_scaled

    return triton_scaled


def _triton_mixed() -> ModuleType:
    from dmx.kernels import triton_mixed

    return triton_mixed


def _triton_moments() -> ModuleType:
    from dmx.kernels import triton_moments

    return triton_moments


def _triton_continuous(parameters: Tensor) -> ModuleType:
    """The kernels of a row of parameters: of the element path, or of the straight line."""
    from dmx.kernels import triton_continuous, triton_line

    return triton_line if is_line(parameters) else triton_continuous


def _triton_loss() -> ModuleType:
    from dmx.kernels import triton_loss

    return triton_loss


def _checked(
    x: Tensor, block_format: str | BlockFormat, axis: int, scale_rule: ScaleRule | None
) -> tuple[BlockFormat, int, ScaleRule]:
    block_format = get_block_format(block_format)
    rule = scale_rule_of(block_format, scale_rule)
    check_input(x)
    return block_format, check_axis(x, axis), rule


def backend_of(x: Tensor, block_format: BlockFormat, scale_rule: ScaleRule) -> str:
    """What runs for a tensor, a format and a rule: on the CPU formats other than MX have kernels for the
    rules that look at amax alone.

    Raises:
        RunError: kernels were asked for, and there are none.
    """
    if block_format.is_mx or x.device.type != "cpu" or cpu.has_scaled(scale_rule):
        return choose_backend(x.device)
    return _reference_backend(x.device.type)


def _reference_backend(device_type: str) -> str:
    return _without_kernels(device_type, _requested or os.environ.get("DMX_BACKEND") or "auto")


@cache
def _without_kernels(device_type: str, requested: str) -> str:
    """Raises RunError for a backend that is asked for by name where it has no kernel."""
    check_choice(requested, BACKENDS, "backend")
    if requested not in ("auto", "reference"):
        raise RunError(
            f"backend={requested!r} has no kernels for nvfp4 by 4over6 and mse on {device_type!r}, only by "
            "amax/6. Set DMX_BACKEND=auto, or DMX_BACKEND=reference, which runs everywhere."
        )
    logger.info("nvfp4 by 4over6 and mse on %s: reference (requested=%s)", device_type, requested)
    return "reference"


@torch.no_grad()
def fake_quant(
    x: Tensor,
    block_format: str | BlockFormat,
    *,
    axis: int = -1,
    scale_rule: ScaleRule | None = None,
    amax: Tensor | float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Quantize and dequantize in one step; see `dmx.numerics.fake_quant`."""
    block_format, axis, rule = _checked(x, block_format, axis, scale_rule)
    check_out(x, out)
    backend = backend_of(x, block_format, rule)
    if backend == "cpp" and not block_format.is_mx:
        return cpu.scaled_fake_quant(x, block_format, axis, rule, amax, out)
    if backend == "cpp":
        return cpu.fake_quant(x, block_format, axis, rule, out)
    if backend == "triton" and not block_format.is_mx:
        return _triton_scaled().fake_quant(x, block_format, axis, rule, amax, out)
    if backend == "triton":
        return _triton_mx().fake_quant(x, block_format, axis, rule, out)
    return numerics.fake_quant(x, block_format, axis=axis, scale_rule=rule, amax=amax, out=out)


@torch.no_grad()
def fake_quant_to(
    x: Tensor,
    out: Tensor,
    block_format: str | BlockFormat,
    *,
    scale_rule: ScaleRule | None = None,
    amax: float | None = None,
) -> Tensor:
    """`fake_quant` of x along the last axis, converted to the dtype of `out` as it is written there.

    Args:
        x, out: fp32, bf16 or fp16, of one shape and device, both contiguous.
        amax: as of `fake_quant`.
    """
    block_format, axis, rule = _checked(x, block_format, -1, scale_rule)
    check_input(out)
    if out.shape != x.shape or out.device != x.device:
        raise ValueError(
            f"out must have the shape and device of x: {tuple(x.shape)} {x.device}, got "
            f"{tuple(out.shape)} {out.device}"
        )
    if not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError("x and out must be contiguous")
    if backend_of(x, block_format, rule) == "triton":
        if block_format.is_mx:
            return _triton_mx().fake_quant_to(x, out, block_format, rule)
        return _triton_scaled().fake_quant_to(x, out, block_format, rule, amax)
    return out.copy_(fake_quant(x, block_format, axis=axis, scale_rule=rule, amax=amax))


@torch.no_grad()
def quantize(
    x: Tensor,
    block_format: str | BlockFormat,
    *,
    axis: int = -1,
    scale_rule: ScaleRule | None = None,
    amax: Tensor | float | None = None,
) -> QuantizedTensor:
    """Codes and scales; see `dmx.numerics.quantize`."""
    block_format, axis, rule = _checked(x, block_format, axis, scale_rule)
    if not block_format.is_mx:  # codes are wanted once, for a file
        return numerics.quantize(x, block_format, axis=axis, scale_rule=rule, amax=amax)
    backend = choose_backend(x.device)
    if backend == "cpp":
        return cpu.quantize(x, block_format, axis, rule)
    if backend == "triton":
        return _triton_mx().quantize(x, block_format, axis, rule)
    return numerics.quantize(x, block_format, axis=axis, scale_rule=rule)


@torch.no_grad()
def quantize_packed(
    x: Tensor, block_format: str | BlockFormat, *, scale_rule: ScaleRule | None = None
) -> tuple[Tensor, Tensor]:
    """Packed codes and scales along the last axis, as exported files keep them; of MX formats.

    Returns:
        uint8 (..., n * bits / 8) in the layout of `dmx.numerics.packing`, and the scale codes,
        uint8 (..., ceil(n/32)). In formats without a NaN code a NaN block packs as zeros; its
        scale code 255 marks it.

    Raises:
        As `quantize`; ValueError when n does not fill whole groups of 2 (4 bits) or 4 (6 bits).
    """
    block_format, _axis, rule = _checked(x, block_format, -1, scale_rule)
    check_packable(x.shape[-1], block_format.element.bits)
    backend = choose_backend(x.device)
    if backend == "cpp":
        return cpu.quantize_packed(x, block_format, rule)
    if backend == "triton":
        return _triton_mx().quantize_packed(x, block_format, rule)
    quantized = numerics.quantize(x, block_format, scale_rule=rule)
    return pack_codes(quantized.codes, block_format.element.bits), quantized.scale_codes


def _check_continuous(x: Tensor, parameters: Tensor) -> None:
    check_input(x)
    check_axis(x, -1)
    sizes = (N_PATH_PARAMETERS, N_LINE_PARAMETERS, N_MIXED_PARAMETERS)
    if parameters.ndim != 1 or len(parameters) not in sizes or parameters.dtype != torch.float32:
        raise ValueError(
            f"parameters must be one row of path_parameters, ({N_PATH_PARAMETERS},) float32, or of "
            f"line_parameters, ({N_LINE_PARAMETERS},) or ({N_MIXED_PARAMETERS},) float32, got "
            f"{tuple(parameters.shape)} {parameters.dtype}"
        )
    if parameters.device != x.device:
        raise ValueError(f"parameters are on {parameters.device}, x on {x.device}")


def _wide_values(
    x: Tensor,
    axis: int,
    block_format: BlockFormat,
    scale_rule: ScaleRule,
    amax: Tensor | float | None,
) -> tuple[Tensor, Tensor]:
    """Values of one side of a line and whether each is inside; see `dmx.numerics.mx.wide_values`."""
    if not block_format.is_mx and backend_of(x, block_format, scale_rule) == "cpp":
        return cpu.wide_values(x, block_format, scale_rule, amax)
    return wide_values(x, axis, block_format, scale_rule, amax)


def _is_mixed_on_cpu(x: Tensor, parameters: Tensor, backend: str) -> bool:
    """Whether the CPU kernels know both formats of a line, one of them no MX format, under their rules."""
    return backend == "cpp" and all(
        rule is None or not isinstance(f, BlockFormat) or backend_of(x, f, rule) == "cpp"
        for f, rule in sides_of(parameters)
    )


def _mixed_on_cpu(
    x: Tensor, parameters: Tensor, amax: Tensor | float | None, out: Tensor | None
) -> Tensor:
    """Values on such a line; at its stops the kernel of one format does half of the work."""
    share = float(parameters[0])
    if share not in (0.0, 1.0):
        return cpu.mixed_fake_quant(x, parameters, amax, out)
    block_format, rule = sides_of(parameters)[int(share)]
    if not isinstance(block_format, BlockFormat):
        return x.clone() if out is None else out.copy_(x)
    fixed = amax if block_format.needs_input_amax else None
    return fake_quant(x, block_format, scale_rule=rule, amax=fixed, out=out)


@torch.no_grad()
def continuous_fake_quant(
    x: Tensor,
    parameters: Tensor,
    *,
    amax: Tensor | float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The continuous quantizer along the last axis; see `dmx.numerics.continuous_fake_quant`.

    Args:
        out: receives the result; shape and dtype of x, may be x itself.
    """
    _check_continuous(x, parameters)
    check_out(x, out)
    backend = choose_backend(x.device)
    if is_mixed(parameters) and backend == "triton":
        return _triton_mixed().continuous_fake_quant(x, parameters, amax, out)
    if is_mixed(parameters) and _is_mixed_on_cpu(x, parameters, backend):
        return _mixed_on_cpu(x, parameters, amax, out)
    if is_mixed(parameters):
        result = mixed_fake_quant(x, parameters, amax, by=_wide_values)
        return result if out is None else out.copy_(result)
    if backend == "cpp":
        return cpu.continuous_fake_quant(x, parameters, out)
    if backend == "triton":
        return _triton_continuous(parameters).continuous_fake_quant(x, parameters, out)
    result = numerics.continuous_fake_quant(x, parameters)
    return result if out is None else out.copy_(result)


@torch.no_grad()
def continuous_fake_quant_backward(
    grad: Tensor,
    x: Tensor,
    parameters: Tensor,
    *,
    amax: Tensor | float | None = None,
    needs_grad_x: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """Both gradients in one pass; see `dmx.numerics.continuous_fake_quant_backward`.

    Args:
        needs_grad_x: False skips grad_x (returned as None), as for frozen weights.
    """
    _check_continuous(x, parameters)
    check_out(x, grad)
    backend = choose_backend(x.device)
    if is_mixed(parameters) and backend == "triton":
        kernels = _triton_mixed()
        return kernels.continuous_fake_quant_backward(grad, x, parameters, amax, needs_grad_x)
    if is_mixed(parameters) and _is_mixed_on_cpu(x, parameters, backend):
        return cpu.mixed_fake_quant_backward(grad, x, parameters, amax, needs_grad_x)
    if is_mixed(parameters):
        derivatives = mixed_derivatives(x, parameters, amax, by=_wide_values)
        grad_x, grad_offset = gradients_of(grad, *derivatives)
        return (grad_x if needs_grad_x else None), grad_offset
    if backend == "cpp":
        return cpu.continuous_fake_quant_backward(grad, x, parameters, needs_grad_x)
    if backend == "triton":
        kernels = _triton_continuous(parameters)
        return kernels.continuous_fake_quant_backward(grad, x, parameters, needs_grad_x)
    grad_x, grad_offset = numerics.continuous_fake_quant_backward(grad, x, parameters)
    return (grad_x if needs_grad_x else None), grad_offset


def _check_rows(logits: Tensor, gradient: Tensor | None) -> None:
    check_input(logits)
    if logits.ndim != 2:
        raise ValueError(f"logits must be (rows, vocab), got {tuple(logits.shape)}")
    check_out(logits, gradient)
    if gradient is not None and not gradient.is_contiguous():
        raise ValueError("gradient must be contiguous")


@torch.no_grad()
def cross_entropy_rows(
    logits: Tensor, targets: Tensor, *, gradient: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """Loss of each row and its gradient; see `dmx.numerics.cross_entropy_rows`."""
    _check_rows(logits, gradient)
    if targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be ({logits.shape[0]},) int64, got {tuple(targets.shape)} "
            f"{targets.dtype}"
        )
    backend = choose_backend(logits.device)
    if backend == "cpp":
        return cpu.cross_entropy_rows(logits, targets, gradient, factor)
    if backend == "triton":
        return _triton_loss().cross_entropy_rows(logits, targets, gradient, factor)
    return numerics.cross_entropy_rows(logits, targets, gradient=gradient, factor=factor)


@torch.no_grad()
def kl_rows(
    reference: Tensor,
    logits: Tensor,
    *,
    gradient: Tensor | None = None,
    factor: float = 1.0,
    normalized: bool = False,
) -> Tensor:
    """KL(reference, model) of each row and its gradient; see `dmx.numerics.kl_rows`."""
    _check_rows(logits, gradient)
    if reference.shape != logits.shape:
        raise ValueError(
            f"reference must be {tuple(logits.shape)} as logits, got {tuple(reference.shape)}"
        )
    backend = choose_backend(logits.device)
    if backend == "cpp":
        return cpu.kl_rows(reference, logits, gradient, factor, normalized)
    if backend == "triton":
        # The kernel normalizes as it goes, at no cost; log probabilities are logits, too.
        return _triton_loss().kl_rows(reference, logits, gradient, factor)
    return numerics.kl_rows(
        reference, logits, gradient=gradient, factor=factor, normalized=normalized
    )


@torch.no_grad()
def add_fisher(grad: Tensor, exact: Tensor, quantized: Tensor, sums: Tensor) -> None:
    """One sum of squared gradients times squared errors; see `dmx.numerics.add_fisher`."""
    if not grad.shape == exact.shape == quantized.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (grad, exact, quantized))
        raise ValueError(f"grad, exact and quantized must have one shape, got {shapes}")
    if sums.ndim != 1 or not sums.is_contiguous() or sums.dtype != torch.float32:
        raise ValueError(
            f"sums must be (n,) float32 without gaps, got {tuple(sums.shape)} {sums.dtype}"
        )
    if choose_backend(grad.device) == "triton":
        _triton_loss().add_fisher(grad, exact, quantized, sums)
    else:
        numerics.add_fisher(grad, exact, quantized, sums)


@torch.no_grad()
def narrow_adamw(
    masters: Tensor,
    gradient: Tensor,
    factor: Tensor,
    first: Moments,
    second: Moments,
    numbers: StepNumbers,
) -> None:
    """A step of AdamW in place; see `dmx.numerics.moments.narrow_adamw`."""
    if choose_backend(masters.device) == "triton":
        _triton_moments().narrow_adamw(masters, gradient, factor, first, second, numbers)
    else:
        moments.narrow_adamw(masters, gradient, factor, first, second, numbers)
