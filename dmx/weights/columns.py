"""The mathematics of GPTQ on one weight: columns rounded in turn, each error made good in the rest.

    H   = X^T X + damping * mean(diag) * I,   U upper with H^-1 = U^T U     (GPTQ's factor 2 cancels)
    e_i = (w_i - q_i) / U_ii,   w_j -= U_ij e_i  for j > i

With MX formats, 32 columns share a scale in each row. It is fixed when their first column is
reached, by the assignment's scale rule, from the weights as they then are. GPTQ's order by activity, of
single columns, would tear the blocks apart, which are contiguous along in_features: either columns keep their
natural order, or whole blocks are ordered (`activity_order`), within which it is the natural one.

The scale may be searched instead: the columns of a block are rounded under each of the four exponents of the
rule `mse`, and each row keeps the one with the least sum of e_i^2. That sum is what the block adds to the error of the
layer's output (with the damping, and once later columns have made good what they can), since an output error
d^T H d is the sum of the e_i^2 of all columns. The values lie on a lattice on which `mse` finds them again without error.

A finished block may lie on a lattice that the scale rule would not choose for it (its largest value
has shrunk, or, under `ceil`, grown). It is quantized once more by the rule, and where that changes
a row, the errors of the block are computed again from its end: e solves U^T e = w - q there.
`fake_quant` gives its own results back, so that rounding the result again, by the same format and
rule, changes no value: exports and loaded files need nothing but the weights.

Scales of formats other than MX depend on more than a block (`dmx.numerics.scaled`). What they take from the
whole, the amax of the weight (nvfp4) or of each row (fp8), is that of the weight before its first column is
rounded, and stays. In nvfp4 blocks of 16 then fix their E4M3 scales as above; in fp8 a row has its one
scale from the start, and errors that push a value beyond 448 of it are clamped and made good later. Rounding
the result again needs the same amax: stored weights keep the scales themselves.

Source: GPTQ, arXiv 2210.17323, algorithm 1 and section 3.3 (lazy batches, Cholesky); block scales,
their search and order, the second quantization and the correction for inputs are ours.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dmx.errors import RunError
from dmx.formats import BLOCK_SIZE, BlockFormat, ElementFormat, ScaleRule
from dmx.kernels import ops
from dmx.models.graph import GraphedStep
from dmx.numerics import amax_to_scale_exponent, block_to_scale_exponent, round_to_element
from dmx.numerics.rounding import exact_power_of_two, float_exponent
from dmx.numerics.scaled import block_scales
from dmx.numerics.scaling import mse_exponents

LAZY_COLUMNS = 128
"""Columns whose errors reach the rest of the weight in one product; from the paper."""


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """U of the formulas above, (n, n) float32, upper; computed in float64.

    Args:
        hessian: (n, n) float32, a sum of x^T x. Columns without input have zeros; damping makes
            them independent of the others, so they are rounded to nearest.

    Raises:
        RunError: not finite, or not positive definite even with the damping.
    """
    h = hessian.double()
    mean = h.diagonal().mean()
    if not bool(mean.isfinite()):
        raise RunError(
            "gptq: the Hessian is not finite: the inputs of a layer overflow on the calibration "
            "data. Use another dtype (bfloat16) or other data."
        )
    if not bool(mean > 0):
        return torch.eye(len(h), device=h.device)
    h.diagonal().add_(damping * mean)
    # H with both axes flipped has a lower factor; flipped back it is upper: H = M M^T, U = M^-1.
    lower, failed = torch.linalg.cholesky_ex(h.flip(0, 1))
    if bool(failed):
        raise RunError(f"gptq.damping={damping}: the Hessian has no Cholesky factor. Raise it.")
    identity = torch.eye(len(h), dtype=torch.float64, device=h.device)
    return torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True).float()


def activity_order(hessian: Tensor, size: int) -> Tensor:
    """(n,) int64, the columns in the order in which they are rounded: blocks of `size` as wholes, those with the largest
    mean of the Hessian's diagonal first.

    The errors of a block are made good by those after it, so that the block whose errors weigh most comes first.

    Args:
        hessian: (n, n) float32. A last block of fewer columns stays last.
    """
    columns = torch.arange(len(hessian), device=hessian.device)
    whole = len(columns) // size * size
    mean = hessian.diagonal()[:whole].double().unflatten(0, (-1, size)).mean(1)
    ordered = columns[:whole].unflatten(0, (-1, size))[mean.argsort(descending=True, stable=True)]
    return torch.cat([ordered.flatten(), columns[whole:]])


def round_columns(x: Tensor, factor: Tensor, element: ElementFormat) -> tuple[Tensor, Tensor]:
    """The inner loop over the columns of one block of 32, in units of its scale.

    Args:
        x: (columns, rows) float32; used up. factor: (columns, columns), the block's part of U.

    Returns:
        Element values and errors e, both (columns, rows).
    """
    values, errors = torch.empty_like(x), torch.empty_like(x)
    diagonal = factor.diagonal()
    for i in range(len(x)):
        values[i] = round_to_element(x[i], element)
        torch.sub(x[i], values[i], out=errors[i]).div_(diagonal[i])
        x[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return values, errors


RoundColumns = Callable[[Tensor, Tensor, ElementFormat], tuple[Tensor, Tensor]]


class GraphedColumns:
    """`round_columns` on a GPU, captured for each shape and element: its many small launches take
    far longer than what they launch. Results are overwritten by the next call."""

    def __init__(self) -> None:
        self._captured: dict[Any, GraphedStep] = {}

    def __call__(self, x: Tensor, factor: Tensor, element: ElementFormat) -> tuple[Tensor, Tensor]:
        key = (x.shape, element)
        if key not in self._captured:
            self._captured[key] = GraphedStep(partial(round_columns, element=element), x, factor)
        values, errors = self._captured[key](x, factor)
        return values, errors


def fixed_amax(
    weight: Tensor, block_format: BlockFormat, stated: float | None = None
) -> Tensor | None:
    """What the scales of a weight (out, in) take from the whole of it: None (MX), its amax, 0-d (nvfp4), or
    that of each row, (out, 1) (fp8).

    Args:
        stated: what the assignment says that they are made for.
    """
    if block_format.is_mx:
        return None
    if stated is not None:
        return weight.new_tensor(stated, dtype=torch.float32)
    magnitudes = weight.detach().float().abs()
    return magnitudes.amax() if block_format.block_size else magnitudes.amax(1, keepdim=True)


def _to_units(
    block: Tensor, block_format: BlockFormat, scale_rule: ScaleRule, amax: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A block (columns, rows) in units of its scale in each row, and the scales (rows,)."""
    if block_format.is_mx:
        padded = F.pad(block, (0, 0, 0, block_format.block_size - len(block)))
        exponent = block_to_scale_exponent(padded.T, block_format.element, scale_rule)
        return _in_units_of(exponent, block)
    size = block_format.block_size or len(block)
    blocks = F.pad(block, (0, 0, 0, size - len(block))).T[:, None]
    scale = block_scales(blocks, block_format, scale_rule, amax).scale[:, 0]
    return torch.where(scale > 0, block / scale, block), scale


def _in_units_of(exponent: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    # Powers of two: the loop in units of the scale gives the bits of the loop without.
    return block * exact_power_of_two(-exponent), exact_power_of_two(exponent)


def _round_searching(
    block: Tensor, factor: Tensor, element: ElementFormat, by: RoundColumns
) -> tuple[Tensor, Tensor]:
    """Values and errors of a block (columns, rows) under the scale of each row whose errors are least; of those
    alike under the largest."""
    exponents = mse_exponents(amax_to_scale_exponent(block.abs().amax(0), element))
    best, best_errors = torch.zeros_like(block), torch.zeros_like(block)
    least = torch.full_like(block[0], torch.inf)
    # In units of one scale, and of a column that the others are not far from, squares neither overflow nor vanish where
    # they matter, however large inputs are.
    column = exact_power_of_two(float_exponent(factor.diagonal().amin()))
    for exponent in exponents:
        units, scale = _in_units_of(exponent, block)
        values, errors = by(units, factor, element)
        found = (errors * (column * exact_power_of_two(exponent - exponents[0]))).square().sum(0)
        is_better = found < least
        best = torch.where(is_better, values * scale, best)
        best_errors = torch.where(is_better, errors * scale, best_errors)
        least = torch.where(is_better, found, least)
    return best, best_errors


@torch.no_grad()
def round_weight(
    weight: Tensor,
    factor: Tensor,
    block_format: BlockFormat,
    scale_rule: ScaleRule,
    *,
    by: RoundColumns = round_columns,
    amax: float | None = None,
    search: bool = False,
) -> Tensor:
    """Round one weight, or the stacked weights of layers that share their input: in formats without a
    scale of the whole tensor.

    Args:
        weight: (out, in) fp32, bf16 or fp16. factor: (in, in) float32 of `inverse_factor`.
        by: rounds the columns of a block; a `GraphedColumns` gives the same bits sooner on a GPU.
        amax: that scales are made for; None: the weight's own.
        search: try the four exponents of `mse` in each block of an MX format; the rule must be that one.

    Returns:
        (out, in) float32, values of the format; `fake_quant` by it, the rule and the `fixed_amax` of the
        weight gives the same.
    """
    element, size = block_format.element, block_format.block_size or BLOCK_SIZE
    fixed = fixed_amax(weight, block_format, amax)
    free = weight.detach().float().T.contiguous()  # (in, out): a column of the weight is a row
    rounded, columns = torch.empty_like(free), len(free)
    for start in range(0, columns, LAZY_COLUMNS):
        end = min(start + LAZY_COLUMNS, columns)
        errors = torch.empty_like(free[start:end])
        for first in range(start, end, size):
            last = min(first + size, end)
            block, own = free[first:last], factor[first:last, first:last]
            if search:
                values, error = _round_searching(block, own, element, by)
            else:
                units, scale = _to_units(block, block_format, scale_rule, fixed)
                values, error = (t * scale for t in by(units, own, element))
            ruled = ops.fake_quant(values, block_format, axis=0, scale_rule=scale_rule, amax=fixed)
            again = torch.linalg.solve_triangular(own.T, block - ruled, upper=False)
            error = torch.where((ruled != values).any(0), again, error)
            rounded[first:last], errors[first - start : last - start] = ruled, error
            free[last:end].addmm_(factor[first:last, last:end].T, error, alpha=-1)
        free[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return rounded.T.contiguous()


def corrected_weight(weight: Tensor, factor: Tensor, cross: Tensor) -> Tensor:
    """`weight + weight C^T H^-1`: the best weight for inputs that are quantized.

    Args:
        weight: (out, in) float32. factor: of `inverse_factor`. cross: C, (in, in) float32.
    """
    return weight + weight @ cross.T @ factor.T @ factor
