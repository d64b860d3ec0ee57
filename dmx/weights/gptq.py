"""GPTQ after the search: weights rounded so that their errors cancel in what a layer gives.

Nearest rounding makes each weight's own error small. GPTQ makes the error of the layer's output
small, `||X W^T - X Q^T||^2`, with X the inputs that the product sees on calibration data
(`dmx.weights.columns` holds the mathematics of one weight).

Quantizing the inputs X' to X loses something, too, which rounding to the original weights cannot
mend. `correct_inputs` rounds to weights that do, as far as a linear map can: those of the least
squares fit of X' W^T by X,

    W + W C^T H^-1,   C = X^T (X' - X)

Decoder blocks are rounded in their order, each on inputs that come from the rounded blocks before
it; inside a block, layers in the order in which they run. Layers with one input (q/k/v, gate/up)
share one Hessian. The inputs are quantized as the assignment says. Several processes share the rows of each batch, and
so the work of the Hessians; each rounds all weights.

Source: GPTQ, arXiv 2210.17323; the correction for inputs is ours.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn

from dmx.applying.apply import apply, restore
from dmx.applying.linear import QuantLinear, quantized_layers
from dmx.applying.splitting import joined_weights, split_assignment
from dmx.applying.stored import StoredWeight, from_tensors, stored_weights, to_bytes, to_tensors
from dmx.assignment.assignment import Assignment
from dmx.data.batches import batches_sha256, list_batches
from dmx.errors import AssignmentError, ModelError
from dmx.formats import BlockFormat
from dmx.models.finite import check_finite_weights
from dmx.models.linears import plain_model
from dmx.models.running import evaluating
from dmx.models.searchable import check_differentiable
from dmx.models.sharding import is_sharded, whole
from dmx.processes import Processes
from dmx.progress import progress
from dmx.state import State, StateFile, code_version
from dmx.weights.columns import (
    GraphedColumns,
    RoundColumns,
    corrected_weight,
    fixed_amax,
    inverse_factor,
    round_columns,
    round_weight,
)
from dmx.weights.config import check_damping
from dmx.weights.identity import weights_fingerprint
from dmx.weights.recorder import Recorder, Stage, record, stages_of
from dmx.weights.traversal import Traversal

STATE_FOLDER = "gptq_state"


class _States:
    """What a stopped run goes on from: a file for each part of the model that is rounded."""

    def __init__(self, folder: Path | None, fingerprint: str, assignment: Assignment) -> None:
        self.folder, self.fingerprint, self.assignment = folder, fingerprint, assignment

    def _file(self, part: int) -> StateFile:
        return StateFile(
            None if self.folder is None else self.folder / f"{part:04d}.safetensors",
            self.fingerprint,
            code=code_version(__name__),
            what="gptq run",
            way_out="round again",
        )

    def save(self, part: int, weights: dict[str, StoredWeight]) -> None:
        self._file(part).save(State(tensors=to_tensors(weights)))

    def load(self, part: int, names: Iterable[str]) -> dict[str, StoredWeight] | None:
        """Weights of a part; None where it was not rounded.

        Raises:
            RunError: the file is damaged, or of another run.
        """
        file = self._file(part)
        state = file.load()
        if state is None:
            return None
        formats = {name: self.assignment.formats[name] for name in names}
        try:
            return from_tensors(state.tensors, formats, self.assignment.shapes)
        except AssignmentError as error:
            raise file.damaged(error) from error


class _Rounding:
    """One run of GPTQ over a model to which the assignment is applied."""

    def __init__(
        self,
        traversal: Traversal,
        assignment: Assignment,
        damping: float,
        correct_inputs: bool,
        states: _States,
    ) -> None:
        self.traversal, self.assignment, self.states = traversal, assignment, states
        self.formats = assignment.block_formats("weight")
        self.damping, self.correct_inputs = damping, correct_inputs
        device = next(traversal.model.parameters()).device
        self.processes = Processes(device)
        self.is_sharded = is_sharded(traversal.model)
        self.round_columns: RoundColumns = (
            GraphedColumns() if device.type == "cuda" else round_columns
        )
        self.done: dict[str, StoredWeight] = {}

    def _round(self, part: dict[str, QuantLinear], names: list[str], seen: Recorder) -> None:
        """Round the layers of one group; those of one format together."""
        factor = inverse_factor(seen.hessian, self.damping)
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
                target = corrected_weight(target, factor, seen.cross)
            stated = self.assignment.amax_of_weight(together[0])
            rounded = round_weight(
                target, factor, block_format, rule, by=self.round_columns, amax=stated
            )
            sizes = [len(weight) for weight in weights]
            for name, weight, own, wanted in zip(
                together, weights, rounded.split(sizes), target.split(sizes), strict=True
            ):
                amax = fixed_amax(wanted, block_format, stated)
                stored = StoredWeight.of(own, weight, block_format, rule, amax)
                self._set(part, name, stored)

    def _set(self, part: dict[str, QuantLinear], name: str, stored: StoredWeight) -> None:
        self.done[name] = stored
        part[name].weight_quantizer, part[name]._cached = stored, None

    def _round_part(
        self,
        part: dict[str, QuantLinear],
        runs: Sequence[Callable[[], object]],
        advance: Callable[[str], None],
        *,
        one_by_one: bool,
    ) -> None:
        at_once = [Stage(list(part), shares_input=False)]
        # The rows of another process may run other experts first.
        stages = self._stages(part, runs[0]) if one_by_one else at_once
        for stage, then in zip_longest(stages, stages[1:]):
            if self.is_sharded:  # gathered weights are let go of at the end of a pass
                then = None
            for names, seen in record(part, stage, then, runs, with_cross=self.correct_inputs):
                seen.share(self.processes)
                self._round(part, names, seen)
            for name in stage.names:
                advance(name)

    def _stages(self, part: dict[str, QuantLinear], run: Callable[[], object]) -> list[Stage]:
        """As the main process sees them."""
        if self.is_sharded:  # passes are common
            seen = stages_of(part, run)
            return self.processes.agree(lambda: seen)
        return self.processes.agree(lambda: stages_of(part, run))

    @torch.no_grad()
    def run(self) -> dict[str, StoredWeight]:
        """layer -> its rounded weight."""
        blocks, parts = self.traversal.blocks, self.traversal.parts
        saved, total = self._resume(), sum(map(len, parts))
        with progress("gptq", total, done=sum(map(len, parts[:saved]))) as advance:
            if saved == len(parts) or total == len(self.done):
                return self.done
            keep = self.traversal.keep
            hidden = self.traversal.first_inputs(keep) if blocks else []
            for k, part in enumerate(parts[:-1]):
                runs = self.traversal.block_runs(k, hidden)
                if k >= saved:
                    if part:
                        self.traversal.bring(k)
                        self._round_part(part, runs, advance, one_by_one=True)
                    self._save(k)
                hidden = [keep(run()) for run in runs]
                for layer in part.values():
                    layer._cached = None  # one block of quantized weights at a time
            if parts[-1]:
                runs = self.traversal.rest_runs(hidden)
                self._round_part(parts[-1], runs, advance, one_by_one=False)
            self._save(len(parts) - 1)
        return self.done

    def _save(self, part: int) -> None:
        if self.processes.is_main:
            self.states.save(part, {name: self.done[name] for name in self.traversal.parts[part]})

    def _resume(self) -> int:
        """Take the parts that an earlier start rounded; returns how many."""
        for k, part in enumerate(self.traversal.parts):
            weights = self.states.load(k, part)
            if weights is None:
                return k
            for name, stored in weights.items():
                self._set(part, name, stored)
        return len(self.traversal.parts)


def gptq(
    model: nn.Module,
    assignment: Assignment,
    batches: Iterable[Tensor],
    *,
    damping: float = 0.01,
    inputs: bool = True,
    correct_inputs: bool = False,
    folder: str | Path | None = None,
) -> Assignment:
    """The assignment with weights rounded by GPTQ; formats and bits stay.

    Args:
        model: that the assignment was made for, without it applied; it is left as it was.
        batches: int64 token ids (batch, length), all of one shape, as for `search`.
        damping, inputs, correct_inputs: see `GptqConfig`.
        folder: keeps the state of a stopped run (`gptq_state`), from which the same call goes
            on with the same numbers; it may be deleted afterwards.

    Returns:
        An assignment whose `weights` says how; its tensors are written by `save`.

    Raises:
        AssignmentError: it is rounded already, or for another model. ModelError: applied already,
        layers that share one weight, blocks that do not run one after the other. DataError: the
        batches. RunError: damping, a Hessian that cannot be used, or a folder of another run.
    """
    model = plain_model(model)
    check_differentiable(model)
    check_finite_weights(model)
    check_damping(damping)
    if assignment.weights is not None:
        raise AssignmentError(
            f"the assignment is rounded already ({assignment.weights.get('name')}). Give the one "
            "that the search left."
        )
    listed = list_batches(batches, model)
    if assignment.experts:  # each expert has inputs of its own
        return _expert_by_expert(model, assignment, listed, damping, inputs, correct_inputs, folder)
    digest = batches_sha256(listed)
    facts = {
        "name": "gptq",
        "damping": damping,
        "inputs": inputs,
        "correct_inputs": correct_inputs,
        "tokens": sum(b.numel() for b in listed),
        "batches": len(listed),
        "batches_sha256": digest,
    }
    device = next(model.parameters()).device
    processes = Processes(device)
    processes.check_same_batches(digest)
    fingerprint = weights_fingerprint(model, assignment, facts)
    state = _States(
        None if folder is None else Path(folder) / STATE_FOLDER, fingerprint, assignment
    )
    # Whatever mode the caller is in, as for `search`.
    with evaluating(model), torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        apply(model, assignment, inputs=inputs, cache_weights=True)
        try:
            _check_no_shared_weights(model)
            traversal = Traversal(model, [processes.own_rows(batch) for batch in listed])
            rounded = _Rounding(traversal, assignment, damping, correct_inputs, state).run()
        finally:
            restore(model)
    in_order = {name: rounded[name] for name in assignment.formats if name in rounded}
    return assignment.with_artifact("weights", to_bytes(in_order, fingerprint), facts)


def _expert_by_expert(
    model: nn.Module,
    assignment: Assignment,
    batches: list[Tensor],
    damping: float,
    inputs: bool,
    correct_inputs: bool,
    folder: str | Path | None,
) -> Assignment:
    """`gptq` of an assignment that names experts as one: their weights are rounded one by one and joined."""
    rounded = gptq(
        model,
        split_assignment(assignment),
        batches,
        damping=damping,
        inputs=inputs,
        correct_inputs=correct_inputs,
        folder=folder,
    )
    weights = joined_weights(model, assignment, stored_weights(rounded))
    assert rounded.weights is not None
    facts = {k: v for k, v in rounded.weights.items() if k not in ("file", "sha256")}
    fingerprint = weights_fingerprint(model, assignment, facts)
    return assignment.with_artifact("weights", to_bytes(weights, fingerprint), facts)


def _check_no_shared_weights(model: nn.Module) -> None:
    owners: dict[int, str] = {}
    for name, layer in quantized_layers(model).items():
        owner = owners.setdefault(id(layer.weight), name)
        if owner != name and layer.weight_quantizer is not None:
            raise ModelError(
                f"{owner} and {name} share one weight, which gptq would round twice. Leave them in "
                "BF16 (search.exclude), or use weights=nearest."
            )
