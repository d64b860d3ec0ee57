"""Weights that are rounded on calibration data, part by part: the walk of every stage that looks at inputs.

Decoder blocks are rounded in their order, each on inputs that come from the rounded blocks before it; inside a
block, layers in the order in which they run. Layers with one input (q/k/v, gate/up) share one Hessian X^T X. The
inputs are quantized as the assignment says. Several processes share the rows of each batch, and so the work of the
Hessians; each rounds all weights.

What is done with a Hessian is the stage's: `dmx.weights.gptq`, `dmx.weights.local_hessian`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dmx.applying.apply import apply, restore
from dmx.applying.linear import QuantLinear, quantized_layers
from dmx.applying.splitting import joined_weights, split_assignment
from dmx.applying.stored import StoredWeight, from_tensors, stored_weights, to_bytes, to_tensors
from dmx.assignment.assignment import Assignment
from dmx.data.batches import batches_sha256, list_batches
from dmx.errors import AssignmentError, ModelError
from dmx.models.finite import check_finite_weights
from dmx.models.linears import plain_model
from dmx.models.running import evaluating
from dmx.models.searchable import check_differentiable
from dmx.models.sharding import is_sharded
from dmx.processes import Processes
from dmx.progress import Stopwatch, progress
from dmx.state import State, StateFile, code_version
from dmx.weights.identity import weights_fingerprint
from dmx.weights.recorder import Recorder, Stage, record, stages_of
from dmx.weights.traversal import Traversal


class States:
    """What a stopped run goes on from: a file for each part of the model that is rounded.

    Args:
        module: that rounds; another version of its code begins anew.
        clock: of the run; `load` adds the seconds of a stopped one.
        settings: of the stage.
    """

    def __init__(
        self,
        folder: Path | None,
        fingerprint: str,
        assignment: Assignment,
        name: str,
        module: str,
        clock: Stopwatch,
        settings: Mapping[str, Any],
    ) -> None:
        self.folder, self.fingerprint, self.assignment = folder, fingerprint, assignment
        self.name, self.module, self.clock = name, module, clock
        self.settings = {f"{name}.{setting}": value for setting, value in settings.items()}

    def _file(self, part: int) -> StateFile:
        return StateFile(
            None if self.folder is None else self.folder / f"{part:04d}.safetensors",
            self.fingerprint,
            code=code_version(self.module),
            what=f"{self.name} run",
            way_out="round again",
            settings=self.settings,
        )

    def save(self, part: int, weights: dict[str, StoredWeight]) -> None:
        self._file(part).save(State({"seconds": self.clock.seconds}, to_tensors(weights)))

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
            self.clock.before = state.facts["seconds"]
            return from_tensors(state.tensors, formats, self.assignment.shapes)
        except (AssignmentError, KeyError) as error:
            raise file.damaged(error) from error


class Rounding(ABC):
    """One run over a model to which the assignment is applied."""

    name: ClassVar[str]
    """Of the stage, as `weights` says it."""

    def __init__(
        self,
        traversal: Traversal,
        assignment: Assignment,
        states: States,
        *,
        with_cross: bool = False,
    ) -> None:
        self.traversal, self.assignment, self.states = traversal, assignment, states
        self.formats = assignment.block_formats("weight")
        self.with_cross = with_cross
        self.processes = Processes(next(traversal.model.parameters()).device)
        self.is_sharded = is_sharded(traversal.model)
        self.done: dict[str, StoredWeight] = {}

    @abstractmethod
    def round_group(self, part: dict[str, QuantLinear], names: list[str], seen: Recorder) -> None:
        """Round layers that see the same values, and `keep` each."""

    def keep(self, part: dict[str, QuantLinear], name: str, stored: StoredWeight) -> None:
        """This is the weight of a layer from now on."""
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
            for names, seen in record(part, stage, then, runs, with_cross=self.with_cross):
                seen.share(self.processes)
                self.round_group(part, names, seen)
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
        with progress(self.name, total, done=sum(map(len, parts[:saved]))) as advance:
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
                self.keep(part, name, stored)
        return len(self.traversal.parts)


def round_on(
    model: nn.Module,
    assignment: Assignment,
    batches: Iterable[Tensor],
    make: Callable[[Traversal, Assignment, States], Rounding],
    *,
    name: str,
    module: str,
    settings: Mapping[str, Any],
    inputs: bool,
    folder: str | Path | None,
    clock: Stopwatch | None,
) -> Assignment:
    """The assignment with the weights that a stage rounds; formats and bits stay.

    Args:
        make: a run of the stage.
        name, module: of the stage, and the module that holds it.
        settings: what the assignment says of it, beside its name and the batches.
        inputs: quantize inputs meanwhile.
        folder: keeps the state of a stopped run, in `<name>_state`.
        clock: of the call; the seconds of the stopped run that it goes on from are added.
    """
    model = plain_model(model)
    check_differentiable(model)
    check_finite_weights(model)
    if assignment.weights is not None:
        raise AssignmentError(
            f"the assignment is rounded already ({assignment.weights.get('name')}). Give the one "
            "that the search left."
        )
    listed = list_batches(batches, model)
    if assignment.experts:  # each expert has inputs of its own
        rounded = round_on(
            model, split_assignment(assignment), listed, make, name=name, module=module,
            settings=settings, inputs=inputs, folder=folder, clock=clock,
        )  # fmt: skip
        weights = joined_weights(model, assignment, stored_weights(rounded))
        assert rounded.weights is not None
        facts = {k: v for k, v in rounded.weights.items() if k not in ("file", "sha256")}
        fingerprint = weights_fingerprint(model, assignment, facts)
        return assignment.with_artifact("weights", to_bytes(weights, fingerprint), facts)
    digest = batches_sha256(listed)
    facts = {
        "name": name,
        **settings,
        "tokens": sum(b.numel() for b in listed),
        "batches": len(listed),
        "batches_sha256": digest,
    }
    device = next(model.parameters()).device
    processes = Processes(device)
    processes.check_same_batches(digest)
    fingerprint = weights_fingerprint(model, assignment, facts)
    place = None if folder is None else Path(folder) / f"{name}_state"
    states = States(place, fingerprint, assignment, name, module, clock or Stopwatch(), settings)
    # Whatever mode the caller is in, as for `search`.
    with evaluating(model), torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        apply(model, assignment, inputs=inputs, cache_weights=True)
        try:
            _check_no_shared_weights(model, name)
            traversal = Traversal(model, [processes.own_rows(batch) for batch in listed])
            rounded_weights = make(traversal, assignment, states).run()
        finally:
            restore(model)
    in_order = {
        layer: rounded_weights[layer] for layer in assignment.formats if layer in rounded_weights
    }
    return assignment.with_artifact("weights", to_bytes(in_order, fingerprint), facts)


def _check_no_shared_weights(model: nn.Module, stage: str) -> None:
    owners: dict[int, str] = {}
    for name, layer in quantized_layers(model).items():
        owner = owners.setdefault(id(layer.weight), name)
        if owner != name and layer.weight_quantizer is not None:
            raise ModelError(
                f"{owner} and {name} share one weight, which {stage} would round twice. Leave them in "
                "BF16 (search.exclude), or use weights=nearest."
            )
