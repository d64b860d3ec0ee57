"""Tensor-level FP8 operands and their products: the arithmetic behind `MorLinear`'s fast path.

    S = Q / amax                         GAM scaling with one block: the group's scale itself
    codes = cast(x * S)                  a torch float8 tensor
    x ~ codes / S,  a @ b.T ~ (codes_a @ codes_b.T) / S_a / S_b

Equal to `mor.quantize` with partition=tensor; here the codes are kept, so that Hopper and newer
can multiply them, and the operand that a backward product needs transposed is written transposed
(the FP8 matrix product wants both operands contiguous along the contraction).

On CUDA the casts are the Triton kernels of `mor.kernels.triton_fp8`; these functions are their
reference.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mor.config import ELEMENTS, FLOAT8
from mor.partition import to_matrix
from mor.policy import mean_relative_error, relative_error_sums
from mor.scaling import MAX_INV_SCALE

FP8_CAPABILITY = (8, 9)
"""First compute capability with FP8 matrix products."""
FP8_MULTIPLE = 16
"""torch._scaled_mm wants the contraction and the columns of the result in multiples of this."""


@dataclass(slots=True)
class Fp8:
    """A matrix in FP8: codes times `scale`, to the last bit codes / `inv_scale`."""

    codes: Tensor
    """(R, C) float8, contiguous."""
    scale: Tensor
    """1 / S, (1,) float32 at an address that the matrix product reads; NaN if not finite."""
    largest: Tensor
    """(n, P), `amax` of this matrix and of those that were cast with it."""
    row: int
    """Of `largest`."""
    format: str

    @property
    def inv_scale(self) -> Tensor:
        """S, (1,) float32. Made when asked for: only what is dequantized needs it."""
        return scales_of(self.largest[self.row], self.format)[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Values in `dtype`, divided in float32 as the definition says."""
        return (self.codes.float() / self.inv_scale).to(dtype)


class Cast(NamedTuple):
    """FP8 forms of one matrix; None where not asked for."""

    plain: Fp8 | None
    transposed: Fp8 | None
    """Of the transpose."""


def amax(*tensors: Tensor) -> Tensor:
    """Partial largest magnitudes, (n, P) float32: the maximum of a row is the tensor's amax. It is
    inf where the tensor holds NaN or Inf, 0 where it is empty. P is `config.partials(device)`.

    Args:
        tensors: one or two, on one device.
    """
    if tensors[0].is_cuda:
        from mor.kernels import triton_fp8

        return triton_fp8.amax(tensors)
    largest = torch.stack(
        [x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device) for x in tensors]
    )
    return torch.where(largest.isfinite(), largest, torch.inf)[:, None]


def scales_of(largest: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """The scale 1 / S and its inverse S = Q / amax, (1,) float32; 1 for a zero tensor, NaN for one
    that is not finite.

    Args:
        largest: (P,), a row of `amax`.
    """
    largest = largest.amax(0, keepdim=True)
    top = torch.full_like(largest, ELEMENTS[format].max_normal)
    inv_scale = (top / largest).clamp(max=MAX_INV_SCALE)
    inv_scale = torch.where(largest == 0, 1.0, inv_scale)
    inv_scale = torch.where(largest.isfinite(), inv_scale, torch.nan)
    return inv_scale.reciprocal(), inv_scale


def cast(
    tensors: Sequence[Tensor],
    largest: Tensor,
    format: str,
    *,
    plain: bool = True,
    transposed: bool = False,
    measured: bool = False,
    landing: Tensor | None = None,
) -> tuple[list[Cast], Tensor | None]:
    """FP8 codes of matrices, of their transposes or of both (16-bit ones in one read), and the
    errors of the casts.

    Args:
        tensors: one or two (R, C) matrices, fp32, bf16 or fp16.
        largest: (n, P), `amax` of these tensors.
        measured: whether the relative errors are wanted.
        landing: (n,) float64 pinned memory of the host that the GPU writes relative errors to;
            they are there once the stream has come so far.

    Returns:
        One `Cast` for each, and the errors as (n,) float64: inf of what is not finite.
    """
    if tensors[0].is_cuda:
        from mor.kernels import triton_fp8

        codes, transposed_codes, scales, errors = triton_fp8.cast(
            tensors,
            largest,
            format,
            plain=plain,
            transposed=transposed,
            measured=measured,
            landing=landing,
        )
        return [
            Cast(
                Fp8(codes[i], scale, largest, i, format) if plain else None,
                Fp8(transposed_codes[i], scale, largest, i, format) if transposed else None,
            )
            for i, scale in enumerate(scales)
        ], errors
    casts, errors_of = [], []
    for i, x in enumerate(tensors):
        scale, inv_scale = scales_of(largest[i], format)
        matrix = (x.float() * inv_scale).to(FLOAT8[format])
        own = Fp8(matrix.contiguous(), scale, largest, i, format)
        other = Fp8(matrix.t().contiguous(), scale, largest, i, format) if transposed else None
        casts.append(Cast(own if plain else None, other))
        if measured:
            wide, narrow = (
                y[None, :, None, :] for y in (to_matrix(x).float(), own.dequantize(torch.float32))
            )
            errors_of.append(mean_relative_error(*relative_error_sums(wide, narrow)).reshape(1))
    return casts, torch.cat(errors_of) if measured else None


@functools.cache
def has_fp8_products(device: torch.device) -> bool:
    """Whether the device multiplies FP8 matrices (Hopper, Ada and newer)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def fits_hardware(format_a: str, format_b: str, a_rows: int, b_rows: int, columns: int) -> bool:
    """Whether `torch._scaled_mm` takes this product: E5M2 x E5M2 has no hardware form."""
    both_e5m2 = format_a == format_b == "e5m2"
    aligned = b_rows % FP8_MULTIPLE == 0 and columns % FP8_MULTIPLE == 0
    return not both_e5m2 and aligned and min(a_rows, b_rows, columns) > 0


def real_product(a: Fp8, b: Fp8, dtype: torch.dtype, *, fast_accumulation: bool) -> Tensor:
    """a @ b.T by the FP8 units: (M, K), (N, K) -> (M, N) of dtype.

    Fast accumulation keeps about 14 bits between additions; without it partial sums are promoted
    to float32 every few steps.
    """
    return torch._scaled_mm(
        a.codes,
        b.codes.t(),
        scale_a=a.scale,
        scale_b=b.scale,
        out_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )


def emulated_product(a: Fp8, b: Fp8, dtype: torch.dtype) -> Tensor:
    """The same product with float32 accumulation; codes are exact in BF16."""
    exact = wide_product(a.codes.to(torch.bfloat16), b.codes.to(torch.bfloat16))
    return (exact * (a.scale * b.scale)).to(dtype)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T of BF16 matrices, accumulated and returned in float32."""
    if a.is_cuda:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return a.float() @ b.float().t()


def bf16_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b.T of matrices that enter in BF16, as dtype."""
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    if dtype == torch.bfloat16:
        return a @ b.t()
    return wide_product(a, b).to(dtype)
