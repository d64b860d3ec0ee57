"""Which format an operand, or each of its blocks, is good enough in. Pure: no modules, no state.

tensor            first format of the ladder whose error is below its threshold, else BF16
block_two_way     E4M3 if its summed relative error is below E5M2's, else BF16
block_three_way   as two-way, but instead of BF16 take E5M2 if amax / smallest non-zero magnitude
                  of the block is at most 57344 / 2**-14, E5M2's normal range

The whole operand is the group of the GAM scale. An operand, or block, with any NaN or Inf goes to
BF16. A block without non-zero values is E4M3. Nothing here waits for the device. On a GPU the block
policies are the kernels of `mor.kernels.triton_blocks`; what stands here is their reference.

Source: MoR, arXiv 2512.22804. Errors are accumulated in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mor._base import E5M2, check_input
from mor.config import BF16_INDEX, ELEMENTS, FORMATS, LARGEST_BF16_IN_FP16, MorConfig
from mor.partition import (
    WITHIN_BLOCK,
    BlockShape,
    from_blocks,
    parse_partition,
    spread,
    to_blocks,
    to_matrix,
)
from mor.scaling import amax_to_gam_inv_scale, block_amax, gam_fake_quant

E4M3_INDEX, E5M2_INDEX = FORMATS.index("e4m3"), FORMATS.index("e5m2")
E5M2_RANGE = E5M2.max_normal / E5M2.min_normal


@dataclass(frozen=True)
class MorTensor:
    """What MoR made of an operand.

    values: shape and dtype of x. decision: uint8 index into `mor.FORMATS`; 0-d for policy tensor,
    the block grid else. relative_error: 0-d float32, of the first format tried, on the whole
    operand; inf if it is not finite. errors: (n_fp8_formats,) float64, relative errors in
    the order of the ladder (block policies: of E4M3 and E5M2).
    """

    values: Tensor
    decision: Tensor
    relative_error: Tensor
    errors: Tensor


def round_to_bf16(x: Tensor) -> Tensor:
    """Nearest BF16 value in the dtype of x; fp16 stops at 65280, since 65536 is no fp16 number."""
    rounded = x.to(torch.bfloat16).to(x.dtype)
    if x.dtype == torch.float16:
        limit = torch.full_like(rounded, LARGEST_BF16_IN_FP16).copysign(x)
        rounded = torch.where(rounded.isinf() & x.isfinite(), limit, rounded)
    return rounded


def relative_error_sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of |x-y|/|x| over the non-zero x of each block (float64), and how many (int64).

    Args:
        x, y: float32 block views.
    """
    nonzero = x != 0
    error = torch.where(nonzero, (x - y).abs() / x.abs(), 0.0)
    return error.sum(WITHIN_BLOCK, dtype=torch.float64), nonzero.sum(WITHIN_BLOCK)


def mean_relative_error(sums: Tensor, counts: Tensor) -> Tensor:
    """Mean over all blocks, 0-d float64; 0 if nothing is non-zero, inf if it is not a number."""
    mean = sums.sum() / counts.sum().clamp(min=1)
    return torch.where(mean.isnan(), torch.inf, mean)


def quantize(x: Tensor, config: MorConfig, *, frozen: Tensor | None = None) -> MorTensor:
    """Decide on x and apply the decision; without autograd.

    Args:
        x: fp32, bf16 or fp16, any shape, also empty or non-contiguous.
        frozen: an earlier decision to apply in place of a new one; what is not finite still goes
            to BF16.

    Raises:
        TypeError: another dtype. ValueError: frozen has another shape than the decision.
    """
    check_input(x)
    x = x.detach()
    of_policy = _quantize_tensor if config.policy == "tensor" else _quantize_blocks
    return of_policy(x, config, frozen)


def _check_frozen(frozen: Tensor, expected: torch.Size) -> None:
    if frozen.shape != expected:
        raise ValueError(
            f"frozen must have the shape of the decision, {tuple(expected)}, got "
            f"{tuple(frozen.shape)}; decide again after a change of shape"
        )


def _quantize_tensor(x: Tensor, config: MorConfig, frozen: Tensor | None) -> MorTensor:
    shape = parse_partition(config.partition)
    blocks = to_blocks(to_matrix(x).float(), shape)
    amax = block_amax(blocks)
    tries = {}
    for name in config.fp8_formats:
        y = gam_fake_quant(blocks, amax_to_gam_inv_scale(amax, ELEMENTS[name]), ELEMENTS[name])
        tries[name] = y, mean_relative_error(*relative_error_sums(blocks, y))
    values = round_to_bf16(x)
    decision = torch.full((), BF16_INDEX, dtype=torch.uint8, device=x.device)
    # From the end of the ladder to its start: the earliest format that is accepted wins.
    finite = amax.isfinite().all()
    for name, (y, error) in reversed(tries.items()):
        accepted = error < config.threshold_of(name)
        if frozen is not None:
            _check_frozen(frozen, decision.shape)
            accepted = (frozen == FORMATS.index(name)) & finite
        values = torch.where(accepted, from_blocks(y, x).to(x.dtype), values)
        decision = torch.where(accepted, FORMATS.index(name), decision).to(torch.uint8)
    errors = [error for _, error in tries.values()]
    if not errors:  # the ladder is bf16 alone
        rounded = to_blocks(to_matrix(values).float(), shape)
        relative_error = mean_relative_error(*relative_error_sums(blocks, rounded))
        return MorTensor(values, decision, relative_error.float(), relative_error.new_zeros(0))
    return MorTensor(values, decision, errors[0].float(), torch.stack(errors))


def _quantize_blocks(x: Tensor, config: MorConfig, frozen: Tensor | None) -> MorTensor:
    shape, matrix = parse_partition(config.partition), to_matrix(x)
    if frozen is not None:
        _check_frozen(frozen, shape.grid(matrix))
    if x.is_cuda and x.numel():
        from mor.kernels import triton_blocks

        size = shape.of(matrix)
        if triton_blocks.fits(*size, matrix.shape[1]):
            blocks = triton_blocks.quantize_blocks(
                matrix,
                *size,
                e5m2_range=E5M2_RANGE,
                three_way=config.policy == "block_three_way",
                frozen=frozen,
            )
            errors = [mean_relative_error(sums, blocks.counts) for sums in blocks.sums]
            values = blocks.values.reshape(x.shape)
            return MorTensor(values, blocks.decision, errors[0].float(), torch.stack(errors))
    return _reference_blocks(x, shape, config, frozen)


def _reference_blocks(
    x: Tensor, shape: BlockShape, config: MorConfig, frozen: Tensor | None
) -> MorTensor:
    blocks = to_blocks(to_matrix(x).float(), shape)
    amax = block_amax(blocks)
    values_e4m3, values_e5m2 = (
        gam_fake_quant(blocks, amax_to_gam_inv_scale(amax, element), element)
        for element in ELEMENTS.values()
    )
    error_e4m3, counts = relative_error_sums(blocks, values_e4m3)
    error_e5m2, _ = relative_error_sums(blocks, values_e5m2)
    decision = torch.full(amax.shape, BF16_INDEX, dtype=torch.uint8, device=x.device)
    if config.policy == "block_three_way":
        magnitude = blocks.abs()
        nonzero = torch.where(magnitude > 0, magnitude, torch.inf)
        smallest = nonzero.amin(WITHIN_BLOCK) if blocks.numel() else amax
        # In float64 the product is exact.
        in_range = amax.double() <= E5M2_RANGE * smallest.double()
        decision = torch.where(in_range, E5M2_INDEX, decision)
    decision = torch.where((error_e4m3 < error_e5m2) | (counts == 0), E4M3_INDEX, decision)
    if frozen is not None:
        decision = frozen
    decision = torch.where(amax.isfinite(), decision, BF16_INDEX).to(torch.uint8)
    wide = spread(decision)
    rounded = to_blocks(to_matrix(round_to_bf16(x)).float(), shape)
    values = torch.where(wide == E4M3_INDEX, values_e4m3, rounded)
    values = torch.where(wide == E5M2_INDEX, values_e5m2, values)
    errors = [mean_relative_error(e, counts) for e in (error_e4m3, error_e5m2)]
    return MorTensor(
        from_blocks(values, x).to(x.dtype), decision, errors[0].float(), torch.stack(errors)
    )
