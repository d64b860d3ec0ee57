"""Weights that learn under their formats: quantization-aware distillation of a model into itself.

Rounding, however clever, keeps the weights that the model was trained with. Here all linear weights of an
assignment move, with the formats and scale rules that they will have and inputs quantized as they will be:

    minimize   KL(full precision, quantized), token mean, on the same tokens

over float32 masters, whose quantized values the products see; gradients pass the quantizer straight through,
also where a weight lies beyond the largest value of its block. AdamW without decay, a short warm-up, half a
cosine to 0, the norm of the gradient clipped. The full-precision model is the same model before learning; its
weights stay where they are, so that nothing but masters, moments, gradients and quantized weights is added.
Norms, embeddings, and a head outside the assignment stay as they are.

At the end the masters are quantized once and stored as GPTQ's are: values of the format, which quantizing
again does not change.

Sources: straight-through gradients, arXiv 1308.3432; LLM-QAT, arXiv 2305.17888, for distillation from the model
itself.
"""

import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmx.applying.apply import is_applied
from dmx.applying.stored import StoredWeight, sample_of, to_bytes
from dmx.assignment.assignment import Assignment
from dmx.data.batches import batch_order, batches_sha256, list_batches
from dmx.errors import AssignmentError, ModelError, RunError
from dmx.files import check_writable
from dmx.models import check_searchable
from dmx.models.checkpointing import checkpointing
from dmx.models.experts import has_linear_experts
from dmx.models.finite import check_finite_weights
from dmx.models.graph import StepGraphs
from dmx.models.linears import linear_layers, plain_model
from dmx.models.memory import MicroBatch
from dmx.models.reference import KeptReferences, within_memory
from dmx.models.running import evaluating, is_purely_causal, maskless_attention
from dmx.models.searchable import check_differentiable
from dmx.models.sharding import is_sharded, refuse_pieces
from dmx.models.streaming import rest, stream_of
from dmx.numerics.mx import INPUT_DTYPES
from dmx.processes import Processes, own_rank
from dmx.progress import Stopwatch, progress
from dmx.state import State, StateFile, code_version
from dmx.transforms.block import BlockRotation
from dmx.transforms.stage import RUN_TIME_TRANSFORMS, Transform
from dmx.weights.identity import weights_fingerprint
from dmx.weights.learn_config import LEARNED_NAMES, LearnConfig, not_better_text
from dmx.weights.learned_blocks import STATE_FOLDER as BLOCKS
from dmx.weights.learned_blocks import BlockLearning, BlockStates
from dmx.weights.learned_layers import Bank, Masters, learning_model, starting_weights
from dmx.weights.learned_loss import objective_of
from dmx.weights.learned_optimizer import STATES, AdamW
from dmx.weights.learned_scales import LearnedScales, with_block_scales

STATE_FILE = "learning_state.safetensors"
LOOK_EVERY = 10
"""Steps between looks at the losses on a GPU, each of which waits for the device."""


def measured_batches(learned: Sequence[Tensor], held: Sequence[Tensor]) -> Sequence[Tensor]:
    """Batches that the KL before and after is measured on: those held, else the first ones."""
    return held or learned[:4]


@dataclass
class _Interrupts:
    """Whether Ctrl-C was asked for since; see `_deferred_interrupts`."""

    asked: bool = False


@contextmanager
def _deferred_interrupts() -> Iterator[_Interrupts]:
    """The first Ctrl-C inside is only noted, so that a step is done whole; a second one interrupts."""
    interrupts = _Interrupts()
    is_ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not is_ours or before is not signal.default_int_handler:
        yield interrupts
        return

    def note(number: int, frame: Any) -> None:
        interrupts.asked = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class _Learning:
    """Steps of one run, on a model whose layers are under `bank`."""

    model: nn.Module
    bank: Bank
    masters: Masters | LearnedScales
    batches: Sequence[Tensor]
    held: Sequence[Tensor]
    config: LearnConfig
    file: StateFile
    is_causal: bool
    """Whether attention is purely causal sdpa."""
    clock: Stopwatch
    step: int = 0
    kl_before: float | None = None

    def __post_init__(self) -> None:
        config = self.config
        self.steps = config.steps_for(len(self.batches))
        self.device = self.masters.values.device
        self.processes = Processes(self.device)
        self.micro = MicroBatch(config.micro_batch, config.oom, "learn")
        self.optimizer = AdamW(self.masters.values, STATES[config.optimizer_state], config.seed)
        self.history = torch.zeros(self.steps, 2, device=self.device)
        self.uses_graph = self._decide_on_graph()
        first = self._own(self.batches[0])
        self.objective = objective_of(self.model, first, set(self.masters.places))
        self.references = KeptReferences(config.keep_reference, len(self.batches))
        self._graphed = StepGraphs(self.uses_graph)
        self.micro.forgets(self._graphed.forget, self.references.forget)

    # --- what a step needs ---------------------------------------------------------------------

    def _own(self, batch: Tensor) -> Tensor:
        return self.processes.own_rows(batch).to(self.device)

    def _decide_on_graph(self) -> bool:
        asked, obstacle = self.config.cuda_graph, ""
        if asked == "auto" and self.config.gradient_checkpointing:
            return False
        if self.device.type != "cuda":
            obstacle = f"the model is on {self.device.type}"
        elif not self.is_causal:
            obstacle = "the model's attention is not purely causal sdpa"
        elif is_sharded(self.model):
            obstacle = "the weights are sharded over processes"
        elif has_linear_experts(self.model):
            obstacle = "which rows experts are given changes from batch to batch"
        if asked == "on" and obstacle:
            raise RunError(f"learn.cuda_graph=on: {obstacle}. Use learn.cuda_graph=off.")
        return asked != "off" and not obstacle

    def _reference(self, tokens: Tensor) -> tuple[Tensor]:
        """What the loss needs of the full-precision model."""
        self.bank.is_full = True
        parts = [self.objective.reference(part) for part in self.micro.parts(tokens)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts),)

    def _gradient(self, tokens: Tensor, reference: Tensor) -> tuple[Tensor]:
        """Loss of a batch, 0-d float32; its gradient lies in `masters`. No synchronization."""
        self.bank.is_full = False
        self.masters.quantize()
        self.masters.gradient.zero_()
        total = torch.zeros((), device=self.device)
        parts = zip(self.micro.parts(tokens), self.micro.parts(reference), strict=True)
        for part, wanted in parts:
            self.bank.forget()
            loss = self.objective.loss(part, wanted) * (len(part) / len(tokens))
            loss.backward()
            total += loss.detach()
        self.bank.forget()
        return (total,)

    def _loss_of(self, index: int) -> Tensor:
        """Loss of a batch, 0-d float32; its gradient lies in `masters`."""
        tokens, kept = self._own(self.batches[index]), self.references

        def make() -> Tensor:
            (reference,) = self._graphed("reference", self._reference, tokens)
            if kept.keeps is None:
                left = self.steps - self.step
                together = self.processes if self.masters.rows else None
                kept.decide(reference.nbytes, left, self.device, together)
            return reference

        def run() -> Tensor:
            reference = kept.of(index, make, is_overwritten=self.uses_graph)
            (loss,) = self._graphed("gradient", self._gradient, tokens, reference)
            return loss

        return self._within_memory(run, len(tokens))

    def _within_memory(self, use: Callable[[], Tensor], rows: int) -> Tensor:
        return within_memory(use, rows, self.model, self.micro, self.references, self._graphed)

    def measure(self, batches: Sequence[Tensor]) -> float:
        """KL of the quantized model as it now is, nats/token."""
        self.masters.quantize()
        total = torch.zeros((), device=self.device)

        def measured(tokens: Tensor) -> Tensor:
            loss = torch.zeros((), device=self.device)
            for part in self.micro.parts(tokens):
                (reference,) = self._reference(part)
                self.bank.is_full = False
                self.bank.forget()
                loss += self.objective.loss(part, reference) * (len(part) / len(tokens))
            return loss

        with torch.no_grad():
            for batch in batches:
                tokens = self._own(batch)
                total += self._within_memory(partial(measured, tokens), len(tokens))
        self.bank.forget()
        return float(self.processes.mean(total / len(batches)))

    def _update(self, loss: Tensor) -> None:
        """One step of the optimizer along the gradient in `masters`."""
        if self.processes.size > 1:
            loss = self.processes.mean(loss)
        norm = self.optimizer.step_clipped(
            self.masters.descent(),
            self.config.rate(self.step, self.steps),
            self.config.max_norm,
            self.processes,
            in_pieces=bool(self.masters.rows),
        )
        self.history[self.step] = torch.stack([loss, norm])
        self.step += 1

    # --- state on disk -------------------------------------------------------------------------

    def save(self) -> None:
        """Leave a checkpoint, after a look at the losses so far."""
        self.check_finite()
        state = {"masters": self.masters.values} | self.optimizer.state()
        kept = {name: self.masters.to_file(tensor) for name, tensor in state.items()}
        if self.processes.is_main:
            facts = {
                "step": self.step,
                "micro_batch": self.micro.rows,
                "kl_before": self.kl_before,
                "seconds": self.clock.seconds,
            }
            self.file.save(State(facts, kept | {"history": self.history}))

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one; raises as `StateFile.load`."""
        state = self.file.load()
        if state is None:
            return
        try:
            kept = dict(state.tensors)
            self.history.copy_(kept.pop("history"))
            tensors = {name: self.masters.from_file(tensor) for name, tensor in kept.items()}
            self.masters.values.copy_(tensors["masters"])
            self.step = int(state.facts["step"])
            self.optimizer.load(tensors, self.step)
            self.kl_before = state.facts["kl_before"]
            self.micro.rows = state.facts["micro_batch"]
            self.clock.before = state.facts["seconds"]
        except (KeyError, RuntimeError, TypeError) as error:
            raise self.file.damaged(error) from error

    def check_finite(self) -> None:
        """Raise RunError where a loss or a gradient so far was not finite."""
        rows = self.history[: self.step].cpu()
        bad = (~rows.isfinite()).any(1).nonzero().flatten().tolist()
        if bad:
            what = "gradient" if math.isfinite(rows[bad[0], 0]) else "loss"
            raise RunError(
                f"learning the {self.config.train}: the {what} of step {bad[0]} is not finite "
                f"({self.config.rate_setting}={self.config.peak_rate:g}). Lower {self.config.rate_setting} or raise learn.warmup; where it is step 0, look "
                "for Inf or NaN in the model, and use bfloat16 or float32 instead of float16. Nothing "
                "was written of this."
            )

    # --- all of it -----------------------------------------------------------------------------

    def run(self) -> None:
        """All steps that are left; `masters.seen` is up to date after."""
        config = self.config
        self.resume()
        measured = measured_batches(self.batches, self.held)
        if self.kl_before is None:
            self.kl_before = self.measure(measured)
        look_every = 1 if self.device.type == "cpu" else LOOK_EVERY
        name = "learn end to end, 2 of 2" if config.block_steps else "learn"
        with (
            progress(name, self.steps, done=self.step) as advance,
            _deferred_interrupts() as interrupts,
        ):
            if self.step < self.steps:
                self._learn(advance, look_every, interrupts)
        self.check_finite()
        self.kl_after = self.measure(measured)

    def _learn(
        self, advance: Callable[[str], None], look_every: int, interrupts: _Interrupts
    ) -> None:
        config, note = self.config, ""
        for index in batch_order(len(self.batches), config.seed, self.step):
            self._update(self._loss_of(index))
            is_last = self.step == self.steps
            stops = self._stops(interrupts)
            if self.step % look_every == 0 or is_last or stops:
                self.check_finite()
                note = f"KL {float(self.history[self.step - 1, 0]):.4f}"
            advance(note)
            if self.step % config.checkpoint_every == 0 or is_last or stops:
                self.save()
            if stops:
                raise KeyboardInterrupt
            if is_last:
                break

    def _stops(self, interrupts: _Interrupts) -> bool:
        """Whether Ctrl-C ends it here; of rows that lie with several processes all save together."""
        if not self.masters.rows:
            return interrupts.asked
        asked = torch.tensor(int(interrupts.asked), device=self.device)
        return bool(self.processes.largest(asked))


def learn_weights(
    model: nn.Module,
    assignment: Assignment,
    batches: Iterable[Tensor],
    config: LearnConfig | None = None,
    *,
    folder: str | Path | None = None,
    clock: Stopwatch | None = None,
) -> Assignment:
    """The assignment with weights that learned under its formats; formats and bits stay.

    Args:
        model: that the assignment was made for, without it applied; it is left as it was, also after an
            exception.
        batches: int64 token ids (batch, length), all of one shape, as for `search`; cycled, reshuffled by
            `config.seed` each pass. A generator is listed once.
        config: default `LearnConfig()`.
        folder: keeps a checkpoint (`learning_state.safetensors`), from which the same call goes on with the
            same numbers; it may be deleted afterwards.
        clock: of the call; the seconds of the stopped run that it goes on from are added.

    Returns:
        An assignment whose `weights` says how; its tensors are written by `save`.

    Raises:
        AssignmentError: its weights were made already, or it is for another model, or quantizes nothing.
        ModelError: applied already, layers that share one weight. DataError: the batches. RunError: a loss
        that is not finite, a setting that cannot be met here, or a folder of another run.
    """
    config, clock = LearnConfig() if config is None else config, clock or Stopwatch()
    if not isinstance(config, LearnConfig):
        raise TypeError(f"config must be a dmx.LearnConfig, got {config!r}: dmx.LearnConfig()")
    model = plain_model(model)
    if stream_of(model) is not None:
        config.check_by_block()
    check_differentiable(model)
    _check(model, assignment)
    _check_pieces(model, config)
    rules = assignment
    if config.train != "weights":
        assignment = with_block_scales(assignment, config.train)
    listed = list_batches(batches, model)
    learned, held = config.split(listed)
    config.warn_of_little_text(learned, held)
    facts = _facts(config, learned, held, rules) | {"batches_sha256": batches_sha256(listed)}
    device = next(model.parameters()).device
    Processes(device).check_same_batches(facts["batches_sha256"])
    numbers = {"micro_batch": config.micro_batch}
    fingerprint = weights_fingerprint(model, assignment, facts | numbers)
    settings = _settings(config)
    file = _state_file(None if folder is None else Path(folder) / STATE_FILE, fingerprint, settings)
    # Whatever mode the caller is in, as for `search`.
    with (
        evaluating(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        ExitStack() as stage,
    ):
        weights, rotations = _prepare(model, assignment, stage)
        result: Callable[[str], Tensor] | None = None
        samples = {name: sample_of(weight) for name, weight in weights.items()}
        is_causal = is_purely_causal(model, listed[0].shape[1])  # under its own attention's name
        if device.type == "cuda" and is_causal:
            stage.enter_context(maskless_attention(model))
        blocks = None
        if config.block_steps:
            place = None if folder is None else Path(folder) / BLOCKS
            states = BlockStates(place, fingerprint, settings)
            measured = measured_batches(learned, held)
            blocks = BlockLearning(
                model,
                weights,
                assignment,
                rotations,
                config,
                states,
                learned,
                measured,
                rules,
                clock,
            )
            blocks.run()
            facts |= {"kl_before": blocks.kl_before, "kl_blocks": blocks.kl_after}
        if config.steps_for(len(learned)):
            masters = _what_learns(
                config, weights, assignment, {} if blocks is None else blocks.kept
            )
            weights = {}  # what a transform made goes with the last name for it
            bank = stage.enter_context(
                learning_model(model, masters, assignment, rotations, inputs=config.inputs)
            )
            stage.enter_context(checkpointing(model, config.gradient_checkpointing, "learn"))
            run = _Learning(model, bank, masters, learned, held, config, file, is_causal, clock)
            run.kl_before = facts.get("kl_before")
            run.run()
            facts |= {"kl_before": run.kl_before, "kl_after": run.kl_after}
            result = masters.result
            facts["cuda_graph"] = "on" if run.uses_graph else "off"
            if run.micro.rows != config.micro_batch:
                facts["micro_batch"] = run.micro.rows
        elif blocks is not None:
            weights |= blocks.kept
            facts |= {"kl_after": blocks.kl_after, "cuda_graph": "off"}
        if text := not_better_text(facts):
            warnings.warn(text, stacklevel=1)  # a place in this package, whose warnings a run keeps
        stored = _store(result or weights.__getitem__, samples, assignment, device)
    return assignment.with_artifact("weights", to_bytes(stored, fingerprint), facts)


def _state_file(path: Path | None, fingerprint: str, settings: Mapping[str, Any]) -> StateFile:
    """Of the steps end to end, in a folder that can be written."""
    if path is not None and own_rank() == 0:
        check_writable(path.parent)
    return StateFile(
        path,
        fingerprint,
        code_version(__name__),
        "learning run",
        "learn again from the start",
        settings,
    )


def _what_learns(
    config: LearnConfig,
    weights: Mapping[str, Tensor],
    assignment: Assignment,
    kept: Mapping[str, Tensor],
) -> Masters | LearnedScales:
    """From the weights as they are, or where learning block by block left them (`kept`)."""
    if config.train == "scales":
        return LearnedScales(weights, assignment)
    masters = Masters(weights, assignment, config.masters_dtype)
    for name, master in kept.items():
        masters.master(name).copy_(master)
    return masters


def _facts(
    config: LearnConfig, learned: Sequence[Tensor], held: Sequence[Tensor], rules: Assignment
) -> dict[str, Any]:
    """What the assignment says of its weights before they learn: all that their numbers depend on.

    Args:
        rules: whose scale rules offsets of rounding start from.
    """
    steps = config.steps_for(len(learned))
    facts: dict[str, Any] = {
        "name": LEARNED_NAMES[config.train],
        "steps": steps,
        "lr": config.peak_rate,
        "warmup": config.warmup,
        "max_norm": config.max_norm,
        "seed": config.seed,
        "inputs": config.inputs,
        "masters": config.masters,
        "optimizer_state": config.optimizer_state,
        "batches": len(learned),
        "held_batches": len(held),
        "tokens": (steps + config.block_steps) * learned[0].numel(),
    }
    facts |= {"block_steps": config.block_steps} if config.block_steps else {}
    if config.train != "rounding":
        return facts
    formats = sorted({f.name: f for f in rules.block_formats("weight").values()}.items())
    start = {name: rules.rule("weight", block_format) for name, block_format in formats}
    return {k: v for k, v in facts.items() if k not in config.idle} | {"start_rules": start}


_HOW_IT_RUNS = (
    "oom",
    "keep_reference",
    "gradient_checkpointing",
    "cuda_graph",
    "checkpoint_every",
)
"""Settings that a stopped run may go on with others of."""


def _settings(config: LearnConfig) -> dict[str, Any]:
    """As they were given, for `StateFile`: other data may make another number of null."""
    names = {f.name for f in fields(config)} - {*_HOW_IT_RUNS, *config.idle}
    return {f"learn.{name}": getattr(config, name) for name in sorted(names)}


def _check(model: nn.Module, assignment: Assignment) -> None:
    if assignment.weights is not None:
        raise AssignmentError(
            f"the assignment's weights were made already ({assignment.weights.get('name')}). Give the "
            "one that the search left."
        )
    if alone := [n for n in assignment.transformed if n not in assignment.quantized]:
        raise AssignmentError(
            f"weights=learned: {len(alone)} layers have a quantized input and a weight in bf16, first "
            f"{alone[0]}, which do not learn. Use search.choices=joint, or weights=gptq or nearest."
        )
    if not assignment.quantized:
        raise AssignmentError("the assignment quantizes no layer: there is nothing to learn")
    if is_applied(model):
        raise ModelError(
            "an assignment is already applied to this model; call dmx.restore(model) first"
        )
    check_searchable(model, allow_unsearched=True)
    check_finite_weights(model)
    assignment.check(model)
    with assignment.linear_experts(model):
        linears = linear_layers(model)
    for name in assignment.quantized:
        if (dtype := linears[name].weight.dtype) not in INPUT_DTYPES:
            raise ModelError(
                f"{name} is {str(dtype).removeprefix('torch.')}; formats are defined on float32, "
                "bfloat16 and float16. Convert the model first: model.float()"
            )


def _check_pieces(model: nn.Module, config: LearnConfig) -> None:
    """Refuse what a sharded model cannot do."""
    for setting, found, needed in (
        ("learn.train", config.train, "weights"),
        ("learn.block_steps", config.block_steps, 0),
        ("learn.masters", config.masters, "float32"),
        ("learn.optimizer_state", config.optimizer_state, "float32"),
        ("learn.oom", config.oom, "stop"),
    ):
        refuse_pieces(model, {f"{setting}={found}": found != needed}, f"{setting}={needed}")


def _prepare(
    model: nn.Module, assignment: Assignment, stage: ExitStack
) -> tuple[dict[str, Tensor], dict[str, BlockRotation | None]]:
    """The transformed weights of the layers that learn, and the rotation of every layer's input.

    A rotation of blocks is taken out again, so that the full-precision model is the original one; one that is
    folded into all of the model stays in `stage`, and so do linear layers in the place of experts.
    """
    stage.enter_context(assignment.linear_experts(model))
    rest(model)
    transform = Transform.of(assignment)
    undo = transform.install(model, assignment.transformed)
    try:
        layers = starting_weights(linear_layers(model), assignment)
        # What is rotated in its place is rotated back in it, too.
        in_place = transform.name in RUN_TIME_TRANSFORMS and is_sharded(model)
        weights = {
            name: layer.weight.detach().clone() if in_place else layer.weight.detach()
            for name, layer in layers.items()
        }
        rotations = {
            name: getattr(layer, "input_transform", None) for name, layer in layers.items()
        }
    except BaseException:
        undo()
        raise
    if transform.name in RUN_TIME_TRANSFORMS:
        undo()
    else:
        stage.callback(undo)
    return weights, rotations


def _store(
    result: Callable[[str], Tensor],
    samples: dict[str, Tensor],
    assignment: Assignment,
    device: torch.device,
) -> dict[str, StoredWeight]:
    """layer -> its learned weight as the format holds it, in the assignment's order."""
    stored = {}
    for name, block_format in assignment.block_formats("weight").items():
        rule = assignment.rule("weight", block_format)
        wide = result(name).to(device, torch.float32)
        amax = assignment.amax_of_weight(name)
        stored[name] = StoredWeight.of(wide, wide, block_format, rule, amax)
        stored[name].sample = samples[name]
        stored[name].rest()
    return stored
