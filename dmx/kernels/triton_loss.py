# mypy: allow-untyped-defs
"""Losses of rows of logits on a GPU, with their gradients. `ops.py` is the door.

A program takes one row: it reads the logits once for the loss, with running maxima, and once more
where a gradient is asked for. Nothing of the logits' size is kept in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 4096, 8
"""Logits read at once, and warps of a program."""


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    gradient_ptr,
    n,
    scale,
    NEEDS_GRADIENT: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * n
    gradient_ptr += row * n
    lane = tl.arange(0, TILE)
    target = tl.load(targets_ptr + row)
    top = float("-inf")
    total = 0.0
    for start in range(0, n, TILE):
        mask = start + lane < n
        x = tl.load(logits_ptr + start + lane, mask=mask, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(top, tl.max(x, axis=0))
        # Where all so far are -inf, subtracting the maximum would make NaN of them.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), axis=0)
        top = highest
    counts = target >= 0
    aimed = tl.load(logits_ptr + tl.maximum(target, 0)).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(counts, (top - aimed) + tl.log(total), 0.0))
    if NEEDS_GRADIENT:
        factor = tl.where(counts, scale / total, 0.0)
        subtracted = tl.where(counts, scale, 0.0)
        for start in range(0, n, TILE):
            mask = start + lane < n
            x = tl.load(logits_ptr + start + lane, mask=mask, other=0.0).to(tl.float32)
            y = tl.exp(x - top) * factor - tl.where(start + lane == target, subtracted, 0.0)
            y = tl.where(counts, y, 0.0)  # 0 * NaN is NaN
            tl.store(gradient_ptr + start + lane, y.to(gradient_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _kl_kernel(
    reference_ptr,
    logits_ptr,
    losses_ptr,
    gradient_ptr,
    n,
    scale,
    NEEDS_GRADIENT: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    reference_ptr += row * n
    logits_ptr += row * n
    gradient_ptr += row * n
    lane = tl.arange(0, TILE)
    top_q = float("-inf")
    top_p = float("-inf")
    total_q = 0.0
    total_p = 0.0
    # sum of exp(q - top_q) * (q - p): differences of close logits are exact
    weighted = 0.0
    for start in range(0, n, TILE):
        mask = start + lane < n
        q = tl.load(reference_ptr + start + lane, mask=mask, other=float("-inf")).to(tl.float32)
        p = tl.load(logits_ptr + start + lane, mask=mask, other=float("-inf")).to(tl.float32)
        highest_q = tl.maximum(top_q, tl.max(q, axis=0))
        highest_p = tl.maximum(top_p, tl.max(p, axis=0))
        base_q = tl.where(highest_q == float("-inf"), 0.0, highest_q)
        base_p = tl.where(highest_p == float("-inf"), 0.0, highest_p)
        shrink = tl.exp(top_q - base_q)
        e = tl.exp(q - base_q)
        total_q = total_q * shrink + tl.sum(e, axis=0)
        total_p = total_p * tl.exp(top_p - base_p) + tl.sum(tl.exp(p - base_p), axis=0)
        weighted = weighted * shrink + tl.sum(tl.where(e > 0, e * (q - p), 0.0), axis=0)
        top_q = highest_q
        top_p = highest_p
    loss = (weighted / total_q - (top_q - top_p)) + (tl.log(total_p) - tl.log(total_q))
    tl.store(losses_ptr + row, loss)
    if NEEDS_GRADIENT:
        factor_q = scale / total_q
        factor_p = scale / total_p
        for start in range(0, n, TILE):
            mask = start + lane < n
            q = tl.load(reference_ptr + start + lane, mask=mask, other=0.0).to(tl.float32)
            p = tl.load(logits_ptr + start + lane, mask=mask, other=0.0).to(tl.float32)
            y = tl.exp(p - top_p) * factor_p - tl.exp(q - top_q) * factor_q
            tl.store(gradient_ptr + start + lane, y.to(gradient_ptr.dtype.element_ty), mask=mask)


def cross_entropy_rows(
    logits: Tensor, targets: Tensor, gradient: Tensor | None, factor: float
) -> Tensor:
    """See `dmx.numerics.cross_entropy_rows`; arguments are checked by the door."""
    logits = logits.contiguous()
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if losses.numel():
        with torch.cuda.device_of(logits):
            _cross_entropy_kernel[(logits.shape[0],)](
                logits,
                targets.contiguous(),
                losses,
                logits if gradient is None else gradient,
                logits.shape[1],
                factor,
                NEEDS_GRADIENT=gradient is not None,
                TILE=TILE,
                num_warps=WARPS,
            )
    return losses


def kl_rows(reference: Tensor, logits: Tensor, gradient: Tensor | None, factor: float) -> Tensor:
    """See `dmx.numerics.kl_rows`; arguments are checked by the door."""
    reference, logits = reference.contiguous(), logits.contiguous()
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if losses.numel():
        with torch.cuda.device_of(logits):
            _kl_kernel[(logits.shape[0],)](
                reference,
                logits,
                losses,
                logits if gradient is None else gradient,
                logits.shape[1],
                factor,
                NEEDS_GRADIENT=gradient is not None,
                TILE=TILE,
                num_warps=WARPS,
            )
    return losses


@triton.jit
def _fisher_kernel(
    grad_ptr, exact_ptr, quantized_ptr, sums_ptr, n, PROGRAMS: tl.constexpr, TILE: tl.constexpr
):
    program = tl.program_id(0)
    lane = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    start = program.to(tl.int64) * TILE
    while start < n:
        at = tl.multiple_of(start, TILE) + lane
        mask = at < n
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        exact = tl.load(exact_ptr + at, mask=mask, other=0.0).to(tl.float32)
        error = tl.load(quantized_ptr + at, mask=mask, other=0.0).to(tl.float32) - exact
        total += (grad * grad) * (error * error)
        start += PROGRAMS * TILE
    # Launches of one stream follow each other: nobody else adds to this program's sum.
    tl.store(sums_ptr + program, tl.load(sums_ptr + program) + tl.sum(total, axis=0))


def add_fisher(grad: Tensor, exact: Tensor, quantized: Tensor, sums: Tensor) -> None:
    """See `dmx.numerics.add_fisher`; arguments are checked by the door."""
    if grad.numel():
        with torch.cuda.device_of(grad):
            _fisher_kernel[(sums.numel(),)](
                grad.contiguous(),
                exact.contiguous(),
                quantized.contiguous(),
                sums,
                grad.numel(),
                PROGRAMS=sums.numel(),
                TILE=2048,
                num_warps=8,
            )
