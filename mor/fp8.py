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
from dataclasses import dataclass

import torch
from torch import Tensor

from mor.config import ELEMENTS, Metric
from mor.partition import to_matrix
from mor.policy import metric_error
from mor.scaling import MAX_SCALE

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8_CAPABILITY = (8, 9)
"""First compute capability with FP8 matrix products."""
FP8_MULTIPLE = 16
"""torch._scaled_mm wants the contraction and the columns of the result in multiples of this."""


@dataclass(frozen=True)
class Fp8:
    """codes: (R, C) float8, contiguous. scales: (2,) float32, 1 / S and S; NaN if not finite.

    1 / S stands first: the matrix product reads it by its address, which is aligned there.
    """

    codes: Tensor
    scales: Tensor
    format: str

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Values in `dtype`, divided in float32 as the definition says."""
        return (self.codes.float() / self.scales[1]).to(dtype)


def amax(x: Tensor) -> Tensor:
    """Largest magnitude, (1,) float32; inf if x holds NaN or Inf, 0 if x is empty."""
    if x.is_cuda and x.numel():
        from mor.kernels import triton_fp8

        return triton_fp8.amax(x)
    if not x.numel():
        return torch.zeros(1, device=x.device)
    largest = x.abs().amax().float().reshape(1)
    return torch.where(largest.isfinite(), largest, torch.inf)


def scales_of(largest: Tensor, format: str) -> Tensor:
    """(2,) float32: 1 / S and S = Q / amax; 1 for a zero tensor, NaN for one that is not finite."""
    top = torch.full_like(largest, ELEMENTS[format].max_normal)
    scale = (top / largest).clamp(max=MAX_SCALE)
    scale = torch.where(largest == 0, 1.0, scale)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return torch.cat((scale.reciprocal(), scale))


def cast(x: Tensor, largest: Tensor, format: str, *, transposed: bool = False) -> Fp8:
    """FP8 codes of the matrix x, or of its transpose.

    Args:
        x: (R, C) fp32, bf16 or fp16.
        largest: (1,) float32, `amax(x)`.
    """
    if x.is_cuda and x.numel():
        from mor.kernels import triton_fp8

        codes, turned, scales, _ = triton_fp8.cast(
            x, largest, format, plain=not transposed, turned=transposed, measured=False
        )
        found = turned if transposed else codes
        assert found is not None
        return Fp8(found, scales, format)
    scales = scales_of(largest, format)
    codes = (x.float() * scales[1]).to(FLOAT8[format])
    return Fp8(codes.t().contiguous() if transposed else codes.contiguous(), scales, format)


def cast_both(x: Tensor, largest: Tensor, format: str) -> tuple[Fp8, Fp8]:
    """`cast(x)` and `cast(x, transposed=True)`; of 16-bit x in one read."""
    if x.is_cuda and x.numel():
        from mor.kernels import triton_fp8

        codes, turned, scales, _ = triton_fp8.cast(
            x, largest, format, plain=True, turned=True, measured=False
        )
        assert codes is not None and turned is not None
        return Fp8(codes, scales, format), Fp8(turned, scales, format)
    return cast(x, largest, format), cast(x, largest, format, transposed=True)


def cast_and_measure(
    x: Tensor, largest: Tensor, format: str, metric: Metric, *, both: bool = False
) -> tuple[Fp8, Fp8 | None, Tensor]:
    """As `cast`; with `both` the transpose too, else None; and the error of the cast as (1,)
    float64: inf if x is not finite."""
    if x.is_cuda and x.numel() and metric == "relative_error":
        from mor.kernels import triton_fp8

        codes, turned, scales, error = triton_fp8.cast(
            x, largest, format, plain=True, turned=both, measured=True
        )
        assert codes is not None and error is not None
        return (
            Fp8(codes, scales, format),
            Fp8(turned, scales, format) if turned is not None else None,
            error,
        )
    result = cast(x, largest, format)
    wide = to_matrix(x).float()[None, :, None, :]
    measured = metric_error(wide, result.dequantize(torch.float32)[None, :, None, :], metric)
    other = cast(x, largest, format, transposed=True) if both else None
    return result, other, measured.reshape(1)


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
        scale_a=a.scales[0],
        scale_b=b.scales[0],
        out_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )


def emulated_product(a: Fp8, b: Fp8, dtype: torch.dtype) -> Tensor:
    """The same product with float32 accumulation; codes are exact in BF16."""
    exact = wide_product(a.codes.to(torch.bfloat16), b.codes.to(torch.bfloat16))
    return (exact * (a.scales[0] * b.scales[0])).to(dtype)


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
