"""Weights that learn block by block, for models whose masters and moments do not fit at once.

Each decoder block in its order learns to give what the full-precision block gives:

    minimize   mean over tokens of |y - y_full|^2 / |y_full|^2

The block reads what the quantized blocks before it give, its target is that of the full-precision model on its own
inputs: so a block also makes good what those before it lost, as in BRECQ and OmniQuant. Each token's error is
relative to its own power, as the norms of the blocks after it see it; a few tokens of enormous activations would
be all that counts otherwise.

Masters, moments and gradients exist for one block at a time. What the blocks read and shall give is kept for all
batches, on a CPU where a GPU has no room.

Sources: BRECQ, arXiv 2102.05426; OmniQuant, arXiv 2308.13137.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmx.assignment.assignment import Assignment
from dmx.data.batches import batch_order
from dmx.errors import ModelError, RunError
from dmx.kernels.losses import kl_loss
from dmx.models.memory import room_to_keep
from dmx.models.replay import PrefixReplay
from dmx.processes import Processes
from dmx.progress import Stopwatch, progress
from dmx.state import State, StateFile, code_version
from dmx.transforms.block import BlockRotation
from dmx.weights.learn_config import LearnConfig
from dmx.weights.learned_layers import Bank, Masters, learning_model
from dmx.weights.learned_optimizer import STATES, AdamW, warm_cosine
from dmx.weights.learned_rounding import RoundingOffsets, sign_rate
from dmx.weights.traversal import Traversal

STATE_FOLDER = "learning_state"


def block_loss(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean over tokens of the squared error relative to the target's power; 0-d float32.

    Args:
        found, wanted: (rows, length, width) of any floating dtype.
    """
    wanted = wanted.float()
    power = wanted.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return ((found.float() - wanted).square().sum(-1) / power).mean()


@dataclass
class BlockStates:
    """What a stopped run goes on from: a file for each block that learned."""

    folder: Path | None
    fingerprint: str
    settings: Mapping[str, Any]
    """As of `StateFile`."""

    def of(self, block: int) -> StateFile:
        return StateFile(
            None if self.folder is None else self.folder / f"{block:04d}.safetensors",
            self.fingerprint,
            code_version(__name__),
            "learning run",
            "learn again from the start",
            self.settings,
        )


@dataclass
class BlockLearning:
    """One run over the blocks of a model.

    Attributes:
        kept: layer -> (out, in) what it learned, on the CPU: masters, or their quantized values where nothing
            learns from them afterwards.
        kl_before, kl_after: KL on `measured` of weights rounded by the assignment's rules, and of what learned.
    """

    model: nn.Module
    weights: Mapping[str, Tensor]
    """layer -> (out, in) weight that it starts from."""
    assignment: Assignment
    rotations: Mapping[str, BlockRotation | None]
    config: LearnConfig
    states: BlockStates
    learned: Sequence[Tensor]
    measured: Sequence[Tensor]
    rules: Assignment
    """Whose scale rules offsets of rounding start from; `assignment` says those of what is stored."""
    clock: Stopwatch
    kept: dict[str, Tensor] = field(default_factory=dict)
    kl_before: float = 0.0
    kl_after: float = 0.0

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.processes = Processes(self.device)
        used = list(self.learned[: self.config.block_steps])
        self.n_used = len(used)
        self.steps_after = self.config.steps_for(len(self.learned))
        own = [self.processes.own_rows(batch) for batch in [*used, *self.measured]]
        self.traversal = Traversal(self.model, own)
        replay = PrefixReplay(self.model)
        self.parts: dict[int, list[str]] = {}
        for name in self.weights:
            self.parts.setdefault(replay.block_of(name), []).append(name)
        if not set(self.parts) - {-1}:
            raise ModelError(
                f"learn.block_steps={self.config.block_steps}: {type(self.model).__name__} has no decoder "
                "blocks with layers that the assignment quantizes. Use learn.block_steps=0."
            )

    # --- activations ---------------------------------------------------------------------------

    def _place(self) -> torch.device:
        """Where the activations of all batches are kept."""
        if self.device.type != "cuda":
            return self.device
        tokens = sum(batch.numel() for batch in self.traversal.batches)
        first = next(iter(self.weights.values()))
        width = getattr(self.model.config, "hidden_size", first.shape[1])
        size = 2 * tokens * width * first.element_size()
        return self.device if size <= room_to_keep(self.device) else torch.device("cpu")

    @torch.no_grad()
    def _through(self, block: int, hidden: Sequence[Tensor], bank: Bank | None) -> list[Tensor]:
        """What a block gives for each input, where that is kept."""
        found = []
        for x in hidden:
            if bank is not None:
                bank.forget()
            (run,) = self.traversal.block_runs(block, [x.to(self.device)])
            found.append(run().to(x.device))
        return found

    # --- learning ------------------------------------------------------------------------------

    def run(self) -> None:
        """All blocks; `kept` and both KL are set after."""
        place = self._place()
        with torch.no_grad():
            full = self.traversal.first_inputs(lambda x: x.to(place))
        found, rounded = list(full), full[self.n_used :]
        with self._progress() as advance:
            for block in range(len(self.traversal.blocks)):
                if block not in self.parts:
                    full, found, rounded = (
                        self._through(block, hidden, None) for hidden in (full, found, rounded)
                    )
                    continue
                full, found, rounded = self._part(block, full, found, rounded, advance)
        self.kl_before = self._measure(full[self.n_used :], rounded)
        self.kl_after = self._measure(full[self.n_used :], found[self.n_used :])

    def _progress(self) -> AbstractContextManager[Callable[[str], None]]:
        """Counts steps of the blocks that learn; those of blocks that a stopped run has done are not its pace."""
        blocks, steps = self.parts.keys() - {-1}, self.config.block_steps
        paths = (self.states.of(block).path for block in blocks)
        done = sum(path is not None and path.exists() for path in paths)
        name = "learn blocks, 1 of 2" if self.steps_after else "learn blocks"
        # A step end to end goes through all blocks.
        after = self.steps_after * len(self.traversal.blocks)
        return progress(name, len(blocks) * steps, done=done * steps, after=after)

    def _part(
        self,
        block: int,
        full: list[Tensor],
        found: list[Tensor],
        rounded: list[Tensor],
        advance: Callable[[str], None],
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """One block learns; what it gives in full precision, after learning, and rounded."""
        names, file = self.parts[block], self.states.of(block)
        masters = self._what_learns({n: self.weights[n].to(self.device) for n in names})
        inputs = self.config.inputs
        with learning_model(
            self.model, masters, self.assignment, self.rotations, inputs=inputs
        ) as bank:
            wanted = self._through(block, full, bank)
            bank.is_full = False
            masters.quantize()
            rounded = self._through(block, rounded, bank)
            state = file.load()
            if state is None:
                self._learn(block, masters, bank, found, wanted, advance)
                masters.quantize()
            else:
                try:
                    masters.take(state.tensors["weights"])
                    self.clock.before = state.facts["seconds"]
                except (KeyError, RuntimeError) as error:
                    raise file.damaged(error) from error
            kept = masters.values if self.steps_after else masters.seen
            if state is None and self.processes.is_main:
                facts = {"block": block, "seconds": self.clock.seconds}
                file.save(State(facts, {"weights": kept}))
            found = self._through(block, found, bank)
            bank.forget()
        for name in names:
            self.kept[name] = masters.view_of(kept, name).to("cpu", copy=True)
        return wanted, found, rounded

    def _what_learns(self, weights: Mapping[str, Tensor]) -> Masters:
        if self.config.train == "rounding":
            return RoundingOffsets(weights, self.rules)
        return Masters(weights, self.assignment, self.config.masters_dtype)

    def _update_of(self, masters: Masters) -> Callable[[int], Tensor]:
        """Takes a step along the gradient in `masters`; gives its norm."""
        config = self.config
        if isinstance(masters, RoundingOffsets):

            def by_signs(step: int) -> Tensor:
                self.processes.average(masters.gradient)
                masters.move(sign_rate(step, config.block_steps))
                return torch.linalg.vector_norm(masters.gradient, dtype=torch.float32)

            return by_signs
        optimizer = AdamW(masters.values, STATES[config.optimizer_state], config.seed)
        warmup = min(config.warmup, config.block_steps // 10)

        def by_adamw(step: int) -> Tensor:
            rate = warm_cosine(step, config.block_steps, config.lr, warmup)
            return optimizer.step_clipped(masters.gradient, rate, config.max_norm, self.processes)

        return by_adamw

    def _learn(
        self,
        block: int,
        masters: Masters,
        bank: Bank,
        found: Sequence[Tensor],
        wanted: Sequence[Tensor],
        advance: Callable[[str], None],
    ) -> None:
        config = self.config
        update = self._update_of(masters)
        order = islice(batch_order(self.n_used, config.seed), config.block_steps)
        losses = torch.zeros(config.block_steps, device=self.device)
        note = ""
        for step, index in enumerate(order):
            masters.quantize()
            masters.gradient.zero_()
            bank.forget()
            (run,) = self.traversal.block_runs(block, [found[index].to(self.device)])
            loss = block_loss(run(), wanted[index].to(self.device))
            loss.backward()
            norm = update(step)
            losses[step] = loss.detach() + 0 * norm  # not finite where either is not
            if step % 10 == 9:
                note = f"block {block}, error {float(losses[step]):.2e}"
            advance(note)
        bad = (~losses.isfinite()).nonzero().flatten().tolist()
        if bad:
            look = ". Look"
            if "lr" not in config.idle:
                look = f" (learn.lr={config.lr:g}). Lower learn.lr or raise learn.warmup; where it is step 0, look"
            raise RunError(
                f"learning block {block}: the loss or gradient of step {bad[0]} is not finite{look} for Inf or "
                "NaN in the model, and use bfloat16 or float32 instead of float16. Nothing was written of "
                "this block."
            )

    # --- what follows the blocks ---------------------------------------------------------------

    @torch.no_grad()
    def _measure(self, full: Sequence[Tensor], found: Sequence[Tensor]) -> float:
        """KL of what the rest of the model, quantized, gives for `found`; nats/token."""
        replay, last = PrefixReplay(self.model), len(self.traversal.blocks) - 1
        rest = {name: self.weights[name] for name in self.parts.get(-1, [])}
        batches = self.traversal.batches[self.n_used :]

        def logits(tokens: Tensor, hidden: Tensor) -> Tensor:
            return replay.logits_after(tokens, last, [hidden.to(self.device)])

        def total(bank: Bank | None) -> Tensor:
            found_of = zip(batches, full, found, strict=True)
            # A row at a time: logits are large.
            rows = [
                row
                for parts in found_of
                for row in zip(*(part.split(1) for part in parts), strict=True)
            ]
            losses = []
            for tokens, x, y in rows:
                if bank is not None:
                    bank.is_full = True
                reference = logits(tokens, x)
                if bank is not None:
                    bank.is_full = False
                    bank.forget()
                losses.append(kl_loss(logits(tokens, y), reference))
            return torch.stack(losses).mean()

        if not rest:
            return float(self.processes.mean(total(None)))
        masters = Masters(rest, self.assignment, self.config.masters_dtype)
        masters.quantize()
        with learning_model(
            self.model, masters, self.assignment, self.rotations, inputs=self.config.inputs
        ) as bank:
            return float(self.processes.mean(total(bank)))
