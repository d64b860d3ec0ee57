"""Scales of blocks by what they change in a layer's output, not in its weight.

The squared error of the output that one block of 32 weights makes alone, with X the inputs that the product sees on
calibration data, is

    |X_b d|^2 = d^T H_b d,   d = w_b - q_b,   H_b = X_b^T X_b

where b are the columns of the block: H_b is a block on the diagonal of the Hessian that GPTQ uses. Each block takes,
of the four exponents of the scale rule `mse`, the one with the least of it; of those alike the one with the least
squared error, and so where no input reaches a block. Weights stay rounded to nearest under their scales; with H the
identity the choice is that of `mse`.

What results are values of the format whose scales `mse` finds again: the assignment has that rule for its weights,
and every export carries them.

Source: the local Hessian of ModelOpt's calibration of that name, which searches the scales of NVFP4; the candidates
are those of `mse`.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmx.applying.linear import QuantLinear
from dmx.applying.stored import StoredWeight
from dmx.assignment.assignment import Assignment
from dmx.errors import RunError
from dmx.formats import BLOCK_SIZE, BlockFormat
from dmx.models.sharding import whole
from dmx.numerics.mx import from_blocks, to_blocks
from dmx.numerics.rounding import exact_power_of_two, float_exponent
from dmx.numerics.scaling import scale_candidates, sum_by_pairs
from dmx.progress import Stopwatch
from dmx.weights.config import check_local_hessian
from dmx.weights.recorder import Recorder
from dmx.weights.rounding import Rounding, round_on

CHUNK = 1 << 24
"""Elements of a weight that are tried at a time: several float32 copies of them exist."""


def local_hessians(hessian: Tensor) -> Tensor:
    """(blocks, 32, 32), the blocks on the diagonal of (in, in); a short last one with zeros."""
    missing = -len(hessian) % BLOCK_SIZE
    whole_blocks = F.pad(hessian, (0, missing, 0, missing))
    rows = whole_blocks.unflatten(0, (-1, BLOCK_SIZE)).unflatten(2, (-1, BLOCK_SIZE))
    return rows.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def output_errors(error: Tensor, local: Tensor) -> Tensor:
    """d^T H_b d of each block.

    Args:
        error: (rows, blocks, 32) float32. local: (blocks, 32, 32) float32.

    Returns:
        (rows, blocks) float32.
    """
    weighted = torch.bmm(error.transpose(0, 1), local).transpose(0, 1)
    return sum_by_pairs(weighted * error)


@torch.no_grad()
def round_by_hessian(weight: Tensor, hessian: Tensor, block_format: BlockFormat) -> Tensor:
    """Round a weight to nearest, each block under the scale of least error of the output.

    Args:
        weight: (out, in) fp32, bf16 or fp16. hessian: (in, in) float32, X^T X.
        block_format: an MX format.

    Returns:
        (out, in) float32, values of the format; `fake_quant` by the rule `mse` gives the same.

    Raises:
        RunError: the Hessian is not finite.
    """
    if not bool(hessian.isfinite().all()):
        raise RunError(
            "local_hessian: the Hessian is not finite: the inputs of a layer overflow on the calibration "
            "data. Use another dtype (bfloat16) or other data."
        )
    local = local_hessians(hessian)
    # The choice does not depend on the size of a block of H; of this one no sum of products overflows or vanishes.
    largest = local.diagonal(dim1=1, dim2=2).amax(1)
    local = local * exact_power_of_two(-float_exponent(largest))[:, None, None]
    rows = max(1, CHUNK // weight.shape[1])
    parts = [_rounded(part, local, block_format) for part in weight.detach().split(rows)]
    return torch.cat(parts)


def _rounded(weight: Tensor, local: Tensor, block_format: BlockFormat) -> Tensor:
    blocks = to_blocks(weight, -1)
    best = torch.zeros_like(blocks)
    least = torch.full(blocks.shape[:-1], torch.inf, device=blocks.device)
    least_square = least.clone()
    for _, values, error in scale_candidates(blocks, block_format.element):
        found, square = output_errors(error, local), sum_by_pairs(error.square())
        is_better = (found < least) | ((found == least) & (square < least_square))
        best = torch.where(is_better[..., None], values, best)
        least = torch.where(is_better, found, least)
        least_square = torch.where(is_better, square, least_square)
    return from_blocks(best, weight.shape, -1)


class _LocalHessian(Rounding):
    name = "local_hessian"

    def round_group(self, part: dict[str, QuantLinear], names: list[str], seen: Recorder) -> None:
        for name in names:
            block_format, weight = self.formats[name], whole(part[name].weight)
            rounded = round_by_hessian(weight, seen.hessian, block_format)
            self.keep(part, name, StoredWeight.of(rounded, weight, block_format, "mse"))


def local_hessian(
    model: nn.Module,
    assignment: Assignment,
    batches: Iterable[Tensor],
    *,
    inputs: bool = True,
    folder: str | Path | None = None,
    clock: Stopwatch | None = None,
) -> Assignment:
    """The assignment with weights rounded to nearest under scales of least output error; formats and bits stay.

    Args:
        model: that the assignment was made for, without it applied; it is left as it was.
        batches: int64 token ids (batch, length), all of one shape, as for `search`.
        inputs: see `LocalHessianConfig`.
        folder: keeps the state of a stopped run (`local_hessian_state`), from which the same call goes on with the
            same numbers; it may be deleted afterwards.
        clock: of the call; the seconds of the stopped run that it goes on from are added.

    Returns:
        An assignment with the scale rule `mse` for weights whose `weights` says how; its tensors are written by `save`.

    Raises:
        As `gptq`; RunError for formats other than MX, too.
    """
    check_local_hessian(assignment.block_formats("weight").values())
    return round_on(
        model,
        assignment.with_rule("weight", "mse"),
        batches,
        _LocalHessian,
        name=_LocalHessian.name,
        module=__name__,
        settings={"inputs": inputs},
        inputs=inputs,
        folder=folder,
        clock=clock,
    )
