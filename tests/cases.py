"""Hard inputs that every implementation must treat as the reference does; also used by the bench.

Everything is made on the CPU from seeds and bit patterns, so all machines see the same values.
"""

import torch
from torch import Tensor

from dmx.formats import (
    BF16,
    BLOCK_SIZE,
    ELEMENT_FORMATS,
    FP8,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    BlockFormat,
    ElementFormat,
    Family,
    ScaleRule,
)
from dmx.numerics import codes_to_element

# b where the path changes its form, the stops, and values between them.
OFFSETS = (0.0, 0.1, 0.5, 0.7, 1.0, 1.3, 1.9, 2.0)


FOUR = Family(
    "four", (MXFP4, BlockFormat("mxfp5_e2m2", ElementFormat("e2m2", 2, 2)), MXFP6_E3M2, MXFP8_E4M3)
)
"""Uneven steps of bits: 1, 1, 2; no MX format has five."""
LINES: tuple[tuple[Family, tuple[ScaleRule, ...]], ...] = (
    (Family("a", (MXFP4, MXFP6_E3M2)), ("floor", "floor")),
    (Family("b", (MXFP4, MXFP8_E5M2)), ("even", "rceil")),
    (Family("c", (MXFP6_E2M3, MXFP8_E4M3)), ("mse", "ceil")),
    (Family("d", (MXFP4, MXFP6_E2M3, MXFP8_E4M3)), ("ceil", "mse", "even")),
    (FOUR, ("rceil", "floor", "even", "mse")),
)
"""Families with the rules of their formats, for the straight line: each format and rule on either side."""
MIXED_LINES: tuple[tuple[Family, tuple[ScaleRule | None, ...]], ...] = (
    (Family("e", (NVFP4, FP8)), ("amax/6", "amax/448_float32")),
    (Family("f", (MXFP4, NVFP4)), ("mse", "4over6")),
    (Family("g", (MXFP4, FP8, BF16)), ("even", "amax/448", None)),
    (
        Family("h", (NVFP4, MXFP6_E3M2, MXFP8_E5M2, BF16)),
        ("mse", "rceil", "floor", None),
    ),
)
"""Likewise with formats other than MX ones, which have a row of parameters of their own."""


def neighbours(values: Tensor) -> Tensor:
    """Each value with the floats just below and above it in its dtype, flat."""
    integer = torch.int32 if values.dtype == torch.float32 else torch.int16
    bits = values.contiguous().view(integer)
    near = torch.stack([bits - 1, bits, bits + 1]).view(values.dtype)
    # One below +0 is a NaN pattern; those are another case's business.
    return torch.where(near.isfinite(), near, values).flatten()


def _in_blocks(values: Tensor, first: float) -> Tensor:
    """(blocks, 32) whose first value sets the scale and whose others are `values`, zero-padded."""
    width = BLOCK_SIZE - 1
    padded = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % width))
    body = padded.reshape(-1, width)
    return torch.cat([torch.full_like(body[:, :1], first), body], dim=1)


def _grid(element: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Every representable value, every midpoint, and their neighbours, under three block maxima."""
    grid = codes_to_element(torch.arange(2**element.bits, dtype=torch.uint8), element)
    grid = grid[grid.isfinite()].sort().values
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([-0.0])])
    near = neighbours(points.to(dtype))
    top = 2.0**element.emax
    near = near[near.abs() < 2 * top]
    return torch.cat([_in_blocks(near, first) for first in (top, element.max_normal, 1.99 * top)])


def _binades(dtype: torch.dtype) -> Tensor:
    """Blocks whose amax is each power of two, and each mantissa at which a scale rule decides."""
    generator = torch.Generator().manual_seed(1)
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    mantissas = torch.tensor([1, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.96875], dtype=torch.float64)
    amax = (powers[:, None] * mantissas).flatten()
    amax = amax[amax <= torch.finfo(dtype).max].to(dtype)
    amax = neighbours(amax[amax > 0])
    body = torch.rand(amax.numel(), BLOCK_SIZE - 1, generator=generator) * 2 - 1
    # Decaying magnitudes reach the subnormals of every format.
    body = body * 2.0 ** -torch.randint(0, 24, body.shape, generator=generator)
    return torch.cat([amax[:, None], (body * amax[:, None].float()).to(dtype)], dim=1)


def _non_finite(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, 3 * BLOCK_SIZE, generator=generator)
    x[0, 5], x[1, 31], x[2, 32], x[3, 95] = torch.nan, torch.inf, -torch.inf, torch.nan
    x[4, 32:64], x[5, 0], x[5, 1] = torch.nan, torch.inf, torch.nan
    x[6], x[7, :32] = torch.inf, 0.0
    return x.to(dtype)


def hard_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """Name -> tensor of `dtype`; the last axis is quantized. Some are empty, some strided."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(48, 257, generator=generator)
    wide = (wide * 2.0 ** torch.randint(-12, 12, (48, 1), generator=generator)).to(dtype)
    bits = torch.randint(-(2**31), 2**31, (64, 128), generator=generator, dtype=torch.int64)
    bits = bits.to(torch.int32) if dtype == torch.float32 else (bits >> 16).to(torch.int16)
    subnormal = torch.arange(-48, 48).to(bits.dtype).abs().view(dtype).reshape(3, BLOCK_SIZE)
    cases = {f"grid_{name}": _grid(e, dtype) for name, e in ELEMENT_FORMATS.items()}
    return cases | {
        "binades": _binades(dtype),
        "zeros": torch.tensor([0.0, -0.0]).to(dtype).repeat(3, BLOCK_SIZE),
        "subnormals": torch.cat([subnormal, -subnormal]),
        "non_finite": _non_finite(dtype),
        "random_bits": bits.view(dtype),
        "ragged": wide,
        "short": wide[:, :7].contiguous(),
        "one": wide[0, :1].contiguous(),
        "empty_rows": wide[:0, :64],
        "empty_blocks": wide[:3, :0],
        "four_axes": wide[:, :256].reshape(2, 3, 8, 256),
        "transposed": wide.t(),
        "sliced": wide[::2, 1:],
        "expanded": wide[:1, :64].expand(5, 64),
    }
