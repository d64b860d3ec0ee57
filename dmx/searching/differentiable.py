"""The dMX search: gradient descent on one offset per unit, annealed until the choice is discrete.

A step: offsets from raw offsets at this step's temperature; forward and backward through the
continuously quantized model; penalty on the soft average bits; SGD on the raw offsets; clamp to
[0, 2]. After the last step the raw offsets are made hard and projected onto the budget.

With a folder, the state is written every `checkpoint_every` steps and a search that died goes on
from there to the same numbers: the order of the batches is a function of the step alone.

Source: dMX, arXiv 2606.04115, with the top-aligned continuous quantizer of
`dmx.numerics.continuous`.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dmx.assignment.budget import Budget
from dmx.assignment.projection import project
from dmx.assignment.space import SearchSpace
from dmx.data.batches import batch_order
from dmx.errors import ModelError
from dmx.files import write_atomic, write_text
from dmx.kernels.ops import actual_backend
from dmx.models.checkpointing import checkpointing
from dmx.models.experts import has_linear_experts
from dmx.models.finite import first_not_finite, not_finite
from dmx.models.graph import StepGraphs
from dmx.models.reference import KeptReferences, Output, WholeLogits, output_of, within_memory
from dmx.models.running import is_purely_causal, maskless_attention, model_logits
from dmx.models.sharding import is_sharded
from dmx.models.streaming import stream_of
from dmx.processes import Processes
from dmx.progress import Stopwatch, progress
from dmx.searching import schedule
from dmx.searching.bank import Bank, searching_model
from dmx.searching.config import SearchConfig, SearchConfigError
from dmx.searching.descent import along_budget, element_scale, shift_to_average
from dmx.searching.joint import JointWeights
from dmx.searching.objective import budget_penalty, task_loss
from dmx.searching.offsets import added_bits, anneal, harden, preference
from dmx.searching.transforming import transformed_layers
from dmx.state import State, StateFile, code_version
from dmx.transforms.learning import LearnedRotations

STATE_FILE = "search_state.safetensors"
LOSSES = ("soft_loss", "hard_loss", "projected_loss")
"""Of a row of the history; null in steps that do not measure them."""
MOST_LEFT = 0.5
"""Share of the choice that the projection may make without a warning: of the bits above the cheapest choice that it hands out,
or of those below the dearest that it takes back. Beyond, most of the choice is by the order of the offsets, which the descent
never weighed at the budget. In the demo 0.27 are left to it, with perplexity 17.91; penalty=exact has 18.01 (one seed)."""
_T = TypeVar("_T")


class DifferentiableSearch:
    """State and steps of one search; `run` does all of it.

    Args:
        start: (U,) float32 first raw offsets; None: `descent.raw_start`.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Tensor],
        space: SearchSpace,
        budget: Budget,
        config: SearchConfig,
        *,
        folder: Path | None,
        fingerprint: str,
        start: np.ndarray | None = None,
    ) -> None:
        self.model, self.batches, self.space = model, batches, space
        self.budget, self.config, self.family = budget, config, config.format_family
        self.folder = folder
        self.state_file = StateFile(
            None if folder is None else folder / STATE_FILE,
            fingerprint,
            code_version(__name__),
            "search",
            "search again from the start",
        )
        self.device = next(model.parameters()).device
        self.processes = Processes(self.device)
        self.micro = config.rows_at_a_time()
        weights = torch.as_tensor(space.weights / space.total_weight, dtype=torch.float32)
        self.weights = weights.to(self.device)
        steps = torch.as_tensor(space.added_bits(budget.unit), dtype=torch.float32)
        self.steps_of_bits = steps.to(self.device)
        """(U, F-1) bits that each step of a unit adds"""
        self.cheapest = space.average([0] * len(space.units), budget.unit)
        descent = config.descent
        if start is None:
            start = np.full(len(space.units), descent.raw_start, dtype=np.float32)
        first = torch.from_numpy(start).to(self.device)
        if descent.penalty == "exact":
            first = self._at_target(first, 0)
        self.raw = first.requires_grad_()
        self.optimizer = torch.optim.SGD(
            [self.raw], lr=descent.lr, momentum=descent.momentum, nesterov=descent.nesterov
        )
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self.raw_rows = [self.raw.detach().cpu().numpy().copy()]  # the last one is that of now
        self.warnings: list[str] = []
        self._complained: set[str] = set()
        self.clock = Stopwatch()
        self.rotations: LearnedRotations | None = None
        if config.learns_rotation:
            self.rotations = LearnedRotations(
                transformed_layers(space),
                momentum=config.rotation.momentum,
                device=self.device,
                dtype=next(model.parameters()).dtype,
            )
        self.joint: JointWeights | None = None
        if config.name == "joint":
            layers = space.unit_of("weight")
            self.joint = JointWeights(model, layers, config.joint, config.steps, config.seed)
        self.uses_graph = self._decide_on_graph()
        self._graphed = StepGraphs(self.uses_graph)
        self.references = KeptReferences(descent.keep_reference, len(batches))
        """Of the unquantized model, by batch, where the objective needs it."""
        self.output: Output = WholeLogits(model)
        """In which form."""
        self.micro.forgets(self._graphed.forget, self.references.forget)

    # --- measuring -----------------------------------------------------------------------------

    def soft_average(self, offsets: Tensor) -> Tensor:
        """(..., U) -> (...); average bits of real-valued offsets, in the budget's unit; exact at the
        stops."""
        added = added_bits(offsets, self.steps_of_bits)
        return self.cheapest + (self.weights * added).sum(-1)

    def _at_target(self, raw: Tensor, step: int) -> Tensor:
        """Raw offsets shifted so that the soft average of that step is the budget."""
        temperature = schedule.temperature(self.config, step)

        def average_of(rows: Tensor) -> Tensor:
            return self.soft_average(anneal(rows, temperature, self.family))

        return shift_to_average(raw, average_of, self.budget.limit)

    def hard_choice(self) -> np.ndarray:
        """(U,) the choice that the raw offsets now stand for, whatever the budget."""
        return harden(self._last_raw(), self.family)

    def preference(self) -> np.ndarray:
        """(U, F-1) how far the raw offsets lie above each threshold; ties go by their mean so far."""
        so_far = np.stack(self.raw_rows).mean(0, dtype=np.float64)
        return preference(self._last_raw(), self.family, ties=so_far)

    def _last_raw(self) -> np.ndarray:
        return self.raw_rows[-1].astype(np.float64)

    def projected_choice(self) -> np.ndarray:
        """(U,) the hard choice, brought within the budget."""
        return project(self.space, self.budget, self.hard_choice(), self.preference())

    # --- the unquantized model -----------------------------------------------------------------

    @property
    def keeps_references(self) -> bool:
        """Whether steps take from memory what the unquantized model gave."""
        return self.references.keeps is True

    def _decide_on_references(self, bank: Bank) -> None:
        """Before the first step, which is captured with or without them."""
        left = self.config.steps - self.step
        if self.config.objective != "kl" or not self.references.may_keep(left):
            return
        bank.set_full()
        tokens = self.processes.own_rows(self.batches[0]).to(self.device)
        self.output = output_of(self.model, tokens, set(transformed_layers(self.space)))
        size = len(tokens) * self.output.keep(tokens[:1]).nbytes
        together = self.processes if is_sharded(self.model) else None
        self.references.decide(size, left, self.device, together)

    def _full_pass(self, bank: Bank, tokens: Tensor) -> tuple[Tensor]:
        """What is kept of a batch; no synchronization."""
        bank.set_full()
        parts = [self.output.keep(part) for part in self.micro.parts(tokens)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts),)

    def _kept_of(self, bank: Bank, index: int, tokens: Tensor) -> tuple[Tensor, ...]:
        """What is kept of this process's rows of a batch; nothing where nothing is."""
        if not self.keeps_references:
            return ()

        def make() -> Tensor:
            (made,) = self._graphed("reference", partial(self._full_pass, bank), tokens)
            return made

        return (self.references.of(index, make, is_overwritten=self.uses_graph),)

    def _parts(self, tokens: Tensor, kept: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Rows that run at a time, with what is kept of them."""
        return zip(*map(self.micro.parts, (tokens, *kept)), strict=True)

    def _reference(self, bank: Bank, tokens: Tensor, kept: tuple[Tensor, ...]) -> Tensor | None:
        """Logits of the unquantized model, where the objective needs them."""
        if self.config.objective != "kl":
            return None
        if kept:
            return self.output.logits(*kept)
        bank.set_full()
        with torch.no_grad():
            return model_logits(self.model, tokens)

    # --- losses --------------------------------------------------------------------------------

    def _measure(
        self, bank: Bank, temperature: float, hard: np.ndarray, projected: np.ndarray
    ) -> dict[str, float]:
        """Task loss of the soft, the hard and the projected model on the first batch."""
        tokens = self.processes.own_rows(self.batches[0]).to(self.device)

        @torch.no_grad()
        def measured() -> Tensor:
            losses = torch.zeros(len(LOSSES), device=self.device)
            for part, *of_part in self._parts(tokens, self._kept_of(bank, 0, tokens)):
                reference = self._reference(bank, part, tuple(of_part))
                for index, choice in enumerate((None, hard, projected)):
                    if choice is None:
                        bank.set_soft(anneal(self.raw.detach(), temperature, self.family))
                    else:
                        bank.set_formats([self.space.formats[i] for i in choice])
                    loss = self._task_loss(part, reference)
                    losses[index] += loss * (len(part) / len(tokens))
            return losses

        losses = self.processes.mean(self._within_memory(measured, len(tokens)))
        return dict(zip(LOSSES, losses.tolist(), strict=True))

    def _task_loss(self, tokens: Tensor, reference: Tensor | None) -> Tensor:
        """0-d float32, of the model as the bank has set it."""
        logits = model_logits(self.model, tokens)
        return task_loss(self.config.objective, logits, tokens, reference)

    # --- one step ------------------------------------------------------------------------------

    def _gradient(
        self, bank: Bank, tokens: Tensor, temperature: Tensor, *kept: Tensor
    ) -> tuple[Tensor, ...]:
        """This process's [loss, penalty, soft average], gradient (U,), and gradient of the rotations
        where they are learned; no synchronization.

        Args:
            tokens: (batch, length) on the device. temperature: 0-d float32 on the device.
            kept: of these rows, as `_kept_of`.
        """
        if self.joint is not None:
            self.joint.gradient.zero_()
        of_parts = [
            self._gradient_of(bank, part, temperature, len(part) / len(tokens), tuple(of_part))
            for part, *of_part in self._parts(tokens, kept)
        ]
        if len(of_parts) == 1:
            return of_parts[0]
        return tuple(torch.stack(values).sum(0) for values in zip(*of_parts, strict=True))

    def _gradient_of(
        self,
        bank: Bank,
        tokens: Tensor,
        temperature: Tensor,
        share: float,
        kept: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """What `_gradient` gives, of rows that are this share of the batch, and the same share of the penalty."""
        reference = self._reference(bank, tokens, kept)
        offsets = anneal(self.raw, temperature, self.family)
        bank.set_soft(offsets)
        loss = self._task_loss(tokens, reference)
        average = self.soft_average(offsets)
        penalty = budget_penalty(self.config.descent, average, self.budget.limit)
        learned = [] if self.rotations is None else [self.rotations.matrices]
        parts = torch.stack([loss, penalty, average]) * share
        gradients = torch.autograd.grad(parts[0] + parts[1], [self.raw, *learned])
        return parts.detach(), *gradients

    def _step(self, bank: Bank) -> Callable[[int, Tensor, Tensor], tuple[Tensor, ...]]:
        """`_gradient` of a batch by its index, rows and temperature; in a CUDA graph where the config asks for it,
        captured anew where fewer rows run at a time than before."""

        def step(index: int, tokens: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
            kept = self._kept_of(bank, index, tokens)
            gradient = partial(self._gradient, bank)
            return self._graphed("gradient", gradient, tokens, temperature, *kept)

        def fitting(index: int, tokens: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
            return self._within_memory(partial(step, index, tokens, temperature), len(tokens))

        return fitting

    def _within_memory(self, use: Callable[[], _T], rows: int) -> _T:
        return within_memory(use, rows, self.model, self.micro, self.references, self._graphed)

    def _decide_on_graph(self) -> bool:
        asked = self.config.descent.cuda_graph
        obstacle = ""
        if self.device.type != "cuda":
            obstacle = f"the model is on {self.device.type}"
        elif stream_of(self.model) is not None:
            obstacle = "the model is held block by block"
        elif self._reads_on_host() and actual_backend(self.device) == "reference":
            obstacle = "the reference of the straight line, nvfp4 and fp8 reads on the host"
        elif not is_purely_causal(self.model, self.batches[0].shape[1]):
            obstacle = "the model's attention is not purely causal sdpa"
        elif is_sharded(self.model):
            obstacle = "the weights are sharded over processes"
        elif has_linear_experts(self.model):
            obstacle = "which rows experts are given changes from batch to batch"
        if asked == "on" and obstacle:
            raise SearchConfigError(
                f"search.descent.cuda_graph=on: {obstacle}. Use search.descent.cuda_graph=off."
            )
        return asked != "off" and not obstacle

    def _reads_on_host(self) -> bool:
        """Whether the reference would: of the straight line its formats, of nvfp4 the range of inputs."""
        return "line" in self.config.paths.values() or self.space.needs_input_amax()

    def _complain(self, what: str, names: list[str], is_bad: np.ndarray) -> None:
        """Says which gradients were not finite and taken as zero, once for each."""
        for index in is_bad.nonzero()[0]:
            name = f"{what} of {names[index]}"
            if name not in self._complained:
                self._complained.add(name)
                self._warn(
                    f"step {self.step}: the gradient of the {name} is not finite; it is taken as "
                    "zero. Look for Inf or NaN in this layer's inputs or weights."
                )

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        warnings.warn(message, stacklevel=3)

    def _direction(self, gradient: Tensor, temperature: float) -> Tensor:
        """(U,) what the optimizer takes for the gradient; see `dmx.searching.descent`."""
        descent, scale = self.config.descent, torch.ones_like(gradient)
        if descent.gradient_scale == "elements":
            scale = element_scale(self.weights)
        if descent.penalty != "exact":
            return scale * gradient
        average = self.soft_average(anneal(self.raw, temperature, self.family))
        (pull,) = torch.autograd.grad(average, [self.raw])
        return along_budget(gradient, pull, scale)

    def take_step(
        self, bank: Bank, stepper: Callable[..., Any], batch_index: int
    ) -> dict[str, Any]:
        """One step on a batch; its row of the history."""
        config = self.config
        temperature = schedule.temperature(config, self.step)
        lr = schedule.learning_rate(config, self.step)
        batch = self.batches[batch_index]
        tokens = self.processes.own_rows(batch).to(self.device)
        results = stepper(batch_index, tokens, torch.full((), temperature, device=self.device))
        parts, gradient, *by_rotation = (self.processes.mean(value) for value in results)
        bad = ~gradient.isfinite()
        norm = gradient.norm()
        self._move(self._direction(gradient.masked_fill(bad, 0.0), temperature), lr)
        bad_rotations = torch.zeros(0, device=self.device)
        if self.rotations is not None:
            rate = schedule.rotation_rate(config, self.step)
            bad_rotations = self.rotations.step(by_rotation[0], rate)
        by_weights = torch.zeros((), device=self.device)
        if self.joint is not None:
            by_weights = self.joint.update(self.step, self.processes)
        # Everything that the host needs comes over at once: one wait for the device a step.
        fetched = torch.cat(
            [self.raw.detach(), bad.float(), parts, norm[None], by_weights[None], bad_rotations]
        )
        ends = np.cumsum([len(self.raw), len(self.raw), len(parts) + 1, 1])
        raw, is_bad, numbers, weights_norm, is_bad_rotation = np.split(fetched.cpu().numpy(), ends)
        if not np.isfinite(numbers[0]):
            raise self._not_finite(bank, batch, temperature)
        if self.joint is not None:
            self.joint.check_finite(float(weights_norm[0]), self.step)
        self.raw_rows.append(raw.copy())
        self._complain("offset", [u.name for u in self.space.units], is_bad)
        if self.rotations is not None:
            self._complain("rotation", self.rotations.inputs, is_bad_rotation)
        row = {"step": self.step, "temperature": temperature, "lr": lr}
        row |= self._describe(bank, temperature, *numbers.tolist())
        self.history.append(row)
        self.step += 1
        return row

    def _not_finite(self, bank: Bank, batch: Tensor, temperature: float) -> ModelError:
        """The error of a step whose loss is not finite, in any process."""
        bank.set_full()
        when, parts = "on the calibration text", batch.chunk(self.processes.size)
        if first_not_finite(self.model, parts) is None:
            bank.set_soft(anneal(self.raw.detach(), temperature, self.family))
            when += ", quantized"
        return not_finite(self.model, parts, f"the loss of step {self.step}", when)

    def _move(self, direction: Tensor, lr: float) -> None:
        """Step of the optimizer, clamp, and the shift onto the budget where it is exact."""
        self.raw.grad = direction
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        with torch.no_grad():
            self.raw.clamp_(0.0, 2.0)
            if self.config.descent.penalty == "exact":
                after = min(self.step + 1, self.config.steps - 1)
                self.raw.copy_(self._at_target(self.raw, after))

    def _describe(
        self,
        bank: Bank,
        temperature: float,
        loss: float,
        penalty: float,
        soft_bits: float,
        norm: float,
    ) -> dict[str, Any]:
        """Of the row of a step, what it led to; null where a number is not finite."""
        hard, projected = self.hard_choice(), self.projected_choice()
        row: dict[str, Any] = {
            "loss": loss,
            "penalty": penalty,
            "soft_bits": soft_bits,
            "hard_bits": self.space.average(hard, self.budget.unit),
            "projected_bits": self.space.average(projected, self.budget.unit),
            **dict.fromkeys(LOSSES),
            "grad_norm": norm,
        }
        is_last = self.step == self.config.steps - 1
        if is_last or self.step % self.config.descent.evaluate_every == 0:
            row |= self._measure(bank, temperature, hard, projected)
        for key in ("loss", "penalty", *LOSSES, "grad_norm"):
            if row[key] is not None and not np.isfinite(row[key]):
                row[key] = None
        return row

    # --- state on disk -------------------------------------------------------------------------

    def save(self) -> None:
        """Write the state and the history so far."""
        if self.folder is None:
            return
        learned: dict[str, Tensor] = {}
        if self.joint is not None and self.step < self.config.steps:  # of no use after the choice
            learned = self.joint.state()
        if not self.processes.is_main:
            return
        tensors = {"raw": self.raw, "raw_rows": torch.from_numpy(np.stack(self.raw_rows))}
        momentum = self.optimizer.state[self.raw].get("momentum_buffer")
        if momentum is not None:
            tensors["momentum"] = momentum
        if self.rotations is not None:
            tensors |= self.rotations.state()
        tensors |= learned
        facts = {
            "step": self.step,
            "micro_batch": self.micro.rows,
            "history": self.history,
            "warnings": self.warnings,
            "complained": sorted(self._complained),
            "seconds": self.clock.seconds,
        }
        self.state_file.save(State(facts, tensors))
        self.write_history()

    def write_history(self) -> None:
        """history.jsonl, a row a step, and offsets.npz."""
        assert self.folder is not None
        lines = (json.dumps(row, allow_nan=False) for row in self.history)
        write_text(self.folder / "history.jsonl", "".join(f"{line}\n" for line in lines))
        names = np.array([u.name for u in self.space.units])
        rows = np.stack(self.raw_rows)
        write_atomic(
            self.folder / "offsets.npz", lambda f: np.savez_compressed(f, raw=rows, units=names)
        )

    def resume(self) -> None:
        """Go on from the folder's state, if there is one.

        Raises:
            RunError: it is damaged, or of a search with other settings, data or model.
        """
        state = self.state_file.load()
        if state is None:
            return
        facts, tensors = state.facts, state.tensors
        self.step, self.history, self.warnings = facts["step"], facts["history"], facts["warnings"]
        self._complained = set(facts["complained"])
        self.clock.before, self.micro.rows = facts["seconds"], facts["micro_batch"]
        with torch.no_grad():
            self.raw.copy_(tensors["raw"])
        self.raw_rows = list(tensors["raw_rows"].numpy())
        if "momentum" in tensors:
            self.optimizer.state[self.raw]["momentum_buffer"] = tensors["momentum"].to(self.device)
        if self.rotations is not None:
            self.rotations.load(tensors)
        if self.joint is not None and self.step < self.config.steps:
            self.joint.load(tensors, self.step)

    # --- all of it -----------------------------------------------------------------------------

    def run(self) -> None:
        """All steps that are left."""
        self.resume()
        config = self.config
        with (
            searching_model(
                self.model,
                self.space,
                self.family,
                config.scale_rules.by_format(),
                self.rotations,
                path=config.descent.path,
            ) as bank,
            checkpointing(self.model, config.descent.gradient_checkpointing, "search.descent"),
            maskless_attention(self.model) if self.uses_graph else nullcontext(),
            progress("search", config.steps, done=self.step) as advance,
        ):
            if self.joint is not None:
                self.joint.attach(self.model)
            order = batch_order(len(self.batches), config.seed, self.step)
            self._decide_on_references(bank)
            stepper = self._step(bank)
            while self.step < config.steps:
                row = self.take_step(bank, stepper, next(order))
                shown = "not finite" if row["loss"] is None else f"{row['loss']:.3f}"
                # Of the hard choice, and of it within the budget.
                own, fitted = row["hard_bits"], row["projected_bits"]
                advance(f"loss {shown}  bits {own:.3f}, fitted {fitted:.3f}")
                if self.step % config.descent.checkpoint_every == 0:
                    self.save()
        self.save()
        self._warn_of_idle_parts()

    def _warn_of_idle_parts(self) -> None:
        """Says what was there to shape the choice and did not."""
        config, limit, last = self.config, self.budget.limit, self.history[-1]
        dearest = self.space.bounds(self.budget.unit)[1]
        own, chosen = last["hard_bits"], last["projected_bits"]
        is_below = own < chosen
        room = chosen - self.cheapest if is_below else dearest - chosen
        left = abs(chosen - own) / room if room > 0 else 0.0
        # A dearest choice that fits is every search's, and `exact` descends at the budget.
        if limit < dearest and config.descent.penalty != "exact" and left > MOST_LEFT:
            moved = (
                "above the cheapest formats were handed out"
                if is_below
                else "below the dearest formats were taken back"
            )
            self._warn(
                f"after {config.steps} steps the descent's own choice has {own:.3f} of budget.limit={limit:g}: {left:.0%} "
                f"of the bits {moved} afterwards, in the order of the offsets. The budget holds and is used up, but the "
                "descent did not weigh layers against each other at it, and another search may find a better choice. Use "
                "search.descent.penalty=exact, which descends at the budget, or more search.steps."
            )
        if np.array_equal(self.raw_rows[-1], self.raw_rows[0]):
            unit = self.space.units[0].name
            self._warn(
                f"no offset moved in {config.steps} steps ({unit} and {len(self.space.units) - 1} "
                "more): the gradients are zero or the learning rate is. Raise search.descent.lr, or "
                "start elsewhere (search.descent.raw_start)."
            )
