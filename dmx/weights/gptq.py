"""GPTQ after the search: weights rounded so that their errors cancel in what a layer gives.

Nearest rounding makes each weight's own error small. GPTQ makes the error of the layer's output
small, `||X W^T - X Q^T||^2`, with X the inputs that the product sees on calibration data
(`dmx.weights.columns` holds the mathematics of one weight, `dmx.weights.rounding` the walk over the model).

Quantizing the inputs X' to X loses something, too, which rounding to the original weights cannot
mend. `correct_inputs` rounds to weights that do, as far as a linear map can: those of the least
squares fit of X' W^T by X,

    W + W C^T H^-1,   C = X^T (X' - X)

Scales of blocks follow from the assignment's rules, or are searched (`scales="search"`): the assignment then has the
rule `mse` for weights, which finds them again.

Columns are rounded block by block with the largest inputs first, or as they stand (`order="natural"`).

Source: GPTQ, arXiv 2210.17323; the correction for inputs, the search of scales and the order of blocks are ours.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from dmx.applying.linear import QuantLinear
from dmx.applying.stored import StoredWeight
from dmx.assignment.assignment import Assignment
from dmx.formats import BLOCK_SIZE, BlockFormat, check_choice
from dmx.models.sharding import whole
from dmx.progress import Stopwatch
from dmx.weights.columns import (
    GraphedColumns,
    RoundColumns,
    activity_order,
    corrected_weight,
    fixed_amax,
    inverse_factor,
    round_columns,
    round_weight,
)
from dmx.weights.config import GPTQ_ORDERS, GPTQ_SCALES, check_damping, check_searched_scales
from dmx.weights.recorder import Recorder
from dmx.weights.rounding import Rounding, States, round_on
from dmx.weights.traversal import Traversal


class _Gptq(Rounding):
    name = "gptq"

    def __init__(
        self,
        traversal: Traversal,
        assignment: Assignment,
        states: States,
        *,
        damping: float,
        correct_inputs: bool,
        search: bool,
        by_activity: bool,
    ) -> None:
        super().__init__(traversal, assignment, states, with_cross=correct_inputs)
        self.damping, self.search, self.by_activity = damping, search, by_activity
        on_gpu = next(traversal.model.parameters()).device.type == "cuda"
        self.round_columns: RoundColumns = GraphedColumns() if on_gpu else round_columns

    def round_group(self, part: dict[str, QuantLinear], names: list[str], seen: Recorder) -> None:
        """Those of one format together."""

        @cache
        def factor(size: int | None) -> tuple[Tensor, Tensor]:
            """Columns in the order of blocks of a size (None: the natural one), and the factor for it."""
            if size is None:
                columns = torch.arange(len(seen.hessian), device=seen.hessian.device)
                return columns, inverse_factor(seen.hessian, self.damping)
            order = activity_order(seen.hessian, size)
            return order, inverse_factor(seen.hessian[order][:, order], self.damping)

        by_format: dict[tuple[BlockFormat, str], list[str]] = {}
        for name in names:
            block_format = self.formats[name]
            # A scale of a whole tensor is not one of several.
            own_scale = block_format.scale.global_bits or self.assignment.amax_of_weight(name)
            alone = name if own_scale else ""
            by_format.setdefault((block_format, alone), []).append(name)
        for (block_format, _), together in by_format.items():
            rule = self.assignment.rule("weight", block_format)
            weights = [whole(part[name].weight) for name in together]
            target = torch.cat(weights).float()
            if seen.cross is not None:
                target = corrected_weight(target, factor(None)[1], seen.cross)
            stated = self.assignment.amax_of_weight(together[0])
            size = block_format.block_size or BLOCK_SIZE
            order, own_factor = factor(size if self.by_activity else None)
            rounded = torch.empty_like(target)
            rounded[:, order] = round_weight(
                target[:, order], own_factor, block_format, rule,
                by=self.round_columns, amax=stated, search=self.search,
            )  # fmt: skip
            sizes = [len(weight) for weight in weights]
            for name, weight, own, wanted in zip(
                together, weights, rounded.split(sizes), target.split(sizes), strict=True
            ):
                amax = fixed_amax(wanted, block_format, stated)
                self.keep(part, name, StoredWeight.of(own, weight, block_format, rule, amax))


def gptq(
    model: nn.Module,
    assignment: Assignment,
    batches: Iterable[Tensor],
    *,
    damping: float = 0.01,
    inputs: bool = True,
    correct_inputs: bool = False,
    scales: str = "rule",
    order: str = "activity",
    folder: str | Path | None = None,
    clock: Stopwatch | None = None,
) -> Assignment:
    """The assignment with weights rounded by GPTQ; formats and bits stay.

    Args:
        model: that the assignment was made for, without it applied; it is left as it was.
        batches: int64 token ids (batch, length), all of one shape, as for `search`.
        damping, inputs, correct_inputs, scales, order: see `GptqConfig`.
        folder: keeps the state of a stopped run (`gptq_state`), from which the same call goes
            on with the same numbers; it may be deleted afterwards.
        clock: of the call; the seconds of the stopped run that it goes on from are added.

    Returns:
        An assignment whose `weights` says how, with the scale rule `mse` for weights where scales are searched; its
        tensors are written by `save`.

    Raises:
        AssignmentError: it is rounded already, or for another model. ModelError: applied already,
        layers that share one weight, blocks that do not run one after the other. DataError: the
        batches. RunError: damping, a Hessian that cannot be used, a folder of another run, or searched scales
        of formats other than MX. FormatError: scales, order.
    """
    check_damping(damping)
    check_choice(scales, GPTQ_SCALES, "gptq.scales")
    check_choice(order, GPTQ_ORDERS, "gptq.order")
    search = scales == "search"
    if search:
        check_searched_scales(assignment.block_formats("weight").values())
        assignment = assignment.with_rule("weight", "mse")

    def make(traversal: Traversal, assignment: Assignment, states: States) -> _Gptq:
        return _Gptq(
            traversal, assignment, states,
            damping=damping, correct_inputs=correct_inputs, search=search, by_activity=order == "activity",
        )  # fmt: skip

    return round_on(
        model,
        assignment,
        batches,
        make,
        name=_Gptq.name,
        module=__name__,
        settings={
            "damping": damping,
            "inputs": inputs,
            "correct_inputs": correct_inputs,
            "scales": scales,
            "order": order,
        },
        inputs=inputs,
        folder=folder,
        clock=clock,
    )
