# mypy: allow-untyped-defs
"""Launches of the continuous quantizers' kernels, which differ in what a row of parameters says."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from dmx.formats import BLOCK_SIZE
from dmx.kernels.buffers import rows_of, writable_in_place

Tile = Mapping[int, tuple[int, int]]
"""By bytes of an input element: blocks a program takes and warps it has."""


def launch_forward(
    kernel: Any, tile: Tile, x: Tensor, parameters: Tensor, out: Tensor | None
) -> Tensor:
    """kernel(x, parameters, out, n, n_blocks) over all blocks along the last axis."""
    last = x.contiguous()
    direct = out is not None and writable_in_place(x, out)
    target = out if direct and out is not None else torch.empty_like(last)
    _rows, n, n_blocks = rows_of(last)
    if n_blocks:
        blocks, warps = tile[x.element_size()]
        with torch.cuda.device(x.device):
            kernel[(triton.cdiv(n_blocks, blocks),)](
                last,
                parameters.contiguous(),
                target,
                n,
                n_blocks,
                RAGGED=n % BLOCK_SIZE != 0,
                BLOCKS=blocks,
                num_warps=warps,
                enable_fp_fusion=False,
            )
    return target if direct or out is None else out.copy_(target)


def launch_backward(
    kernel: Any, tile: Tile, grad: Tensor, x: Tensor, parameters: Tensor, needs_grad_x: bool
) -> tuple[Tensor | None, Tensor]:
    """kernel(grad, x, parameters, grad_x, sums, n, n_blocks) likewise; grad_x, and the sum of the sums."""
    last = x.contiguous()
    _rows, n, n_blocks = rows_of(last)
    grad_x = torch.empty_like(last) if needs_grad_x else None
    if not n_blocks:
        return grad_x, torch.zeros((), device=x.device)
    blocks, warps = tile[x.element_size()]
    programs = triton.cdiv(n_blocks, blocks)
    sums = torch.empty(programs, dtype=torch.float32, device=x.device)
    with torch.cuda.device(x.device):
        kernel[(programs,)](
            grad.contiguous(),
            last,
            parameters.contiguous(),
            last if grad_x is None else grad_x,
            sums,
            n,
            n_blocks,
            NEEDS_GRAD_X=needs_grad_x,
            RAGGED=n % BLOCK_SIZE != 0,
            BLOCKS=blocks,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return grad_x, sums.sum()
