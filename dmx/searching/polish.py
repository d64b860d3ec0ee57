"""Discrete polish: makes a choice better by what its own quantized model loses and gains.

A round, at the present choice:

    measure   KL(full precision, quantized), token mean, of the model with one unit one step lower
              or higher, for every unit and both directions
    propose   the best choice within the budget of the additive model (the sum of these
              differences), with at most `size` units changed: exact, by `dmx.searching.knapsack`
    verify    the KL of the proposed choice itself; a better one is taken

Differences add up only near the choice at which they were measured, so `size` is a trust region: it
doubles while that finds better choices, or halves until none is better; where none is found, the next best
few changes of a handful of units are tried one after the other. A proposal costs little, one pass over
the batches against one for each unit that a measurement takes. The polish ends when no proposal is
better, twice in a row where rounds have batches of their own, or after `polish.rounds`.

Where there are batches enough, each round measures on others than the last, until all had their turn; what is
remembered of the earlier ones is in `dmx.searching.gains`.

The best of many noisy measurements is partly the luckiest: on 512 tokens, proposals for 210 layers that
lowered the KL of those tokens by 6 % raised that of others by as much. So proposals are verified on
calibration batches that nothing was measured on, which are cheap to add, and luck is turned down.

Scans of the unquantized model (`dmx.searching.scan`) measure each unit alone; here it is measured beside the
errors of all others, which is what counts at the end.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dmx.assignment.budget import Budget
from dmx.assignment.space import SearchSpace
from dmx.files import sha256, write_text
from dmx.formats import Format
from dmx.kernels.losses import Divergence
from dmx.models.finite import not_finite
from dmx.models.running import model_logits, quick_attention
from dmx.processes import Processes
from dmx.progress import Stopwatch, progress
from dmx.searching.bank import Bank, searching_model
from dmx.searching.config import SearchConfig
from dmx.searching.disturbances import Change, Disturbances
from dmx.searching.gains import HANDFUL, Gains
from dmx.state import State, StateFile, code_version

STATE_FILE = "polish_state.safetensors"
LOG_FILE = "polish.jsonl"
DEFAULT_BATCHES = 4
"""`polish.batches: null` measures a round on so many at most: 16,384 tokens of the default calibration."""
JUDGES = 4
"""Batches that verify, at most, for each that measures."""
KEPT_LOGITS = {"cuda": 1 << 32, "cpu": 1 << 27}
"""Logits of the unquantized model on the batches that verify, by device type; more are run anew."""
PATIENCE = 2
"""Rounds in a row without a better choice that end the polish; 1 where all rounds measure on the same batches."""
FIRST_SHARE = 4
"""The first trust region is the units divided by this."""


class Polish:
    """State and rounds of one polish; `run` does all of it.

    Args:
        start: (U,) choice within the budget that the polish starts from.
        fingerprint: of everything that the numbers depend on.
        clock: counts the seconds of the whole search; a resumed polish sets it.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Tensor],
        space: SearchSpace,
        budget: Budget,
        config: SearchConfig,
        *,
        start: np.ndarray,
        folder: Path | None,
        fingerprint: str,
        clock: Stopwatch,
    ) -> None:
        self.model, self.space, self.budget, self.config = model, space, budget, config
        self.folder, self.clock = folder, clock
        self.device = next(model.parameters()).device
        self.processes = Processes(self.device)
        count = config.polish.batches or max(1, min(DEFAULT_BATCHES, len(batches) // 2))
        self.batches = [self.processes.own_rows(b) for b in batches]
        every = list(range(len(batches)))
        self.judging = every[count : (1 + JUDGES) * count] or every[:count]
        self.measuring = every[:count]
        """Of the first round; `measured_on` tells of the others."""
        self.pool = self.measuring + every[(1 + JUDGES) * count :]
        self.has_fresh = len(self.pool) >= 2 * count
        self.start = np.array(start, dtype=np.int64)
        self.choice = self.start.copy()
        own = sha256(f"{fingerprint} {self.start.tolist()}".encode())
        self.state_file = StateFile(
            None if folder is None else folder / STATE_FILE,
            own,
            code_version(__name__),
            "polish",
            "polish again",
        )
        self.size = max(2, len(space.units) // FIRST_SHARE)
        self.gains = Gains(space, budget, remembers=self.has_fresh)
        self.fruitless = 0
        self.rows: list[dict[str, Any]] = []
        self.micro = config.rows_at_a_time()
        self._references: dict[tuple[int, int], Divergence] = {}
        self.micro.forgets(self._references.clear)

    @property
    def is_finished(self) -> bool:
        """Whether rounds without a better choice have ended it."""
        return self.fruitless >= (PATIENCE if self.has_fresh else 1)

    # --- measuring -----------------------------------------------------------------------------

    def formats(self, choice: np.ndarray) -> list[Format | None]:
        """Format of each unit under a choice."""
        return [self.space.formats[int(i)] for i in choice]

    def _parts(self, index: int, bank: Bank) -> Iterator[tuple[Divergence, Tensor]]:
        """Of a batch, what runs at a time, each with the KL to the unquantized model on it; that is kept if the
        batch judges and all that do are small."""
        parts = self.micro.parts(self.batches[index])
        room = KEPT_LOGITS.get(self.device.type, 0) // len(parts)
        for number, part in enumerate(parts):
            tokens, kept = part.to(self.device), self._references.get((index, number))
            if kept is None:
                bank.set_full()
                logits = model_logits(self.model, tokens)
                kept = Divergence(logits)
                if index in self.judging and logits.numel() * len(self.judging) <= room:
                    self._references[index, number] = kept
            yield kept, tokens

    def measured_on(self, round_number: int) -> list[int]:
        """Batches of a round, from 0; of a pool that is too small for a second round, the same."""
        count = len(self.measuring)
        if not self.has_fresh:
            return self.measuring
        first = round_number * count
        return [self.pool[(first + i) % len(self.pool)] for i in range(count)]

    def _token_mean(self, sums: Tensor, n_batches: int) -> np.ndarray:
        values = self.processes.mean(sums / (n_batches * self.batches[0].numel())).cpu().numpy()
        if not np.isfinite(values).all():
            raise not_finite(
                self.model,
                self.batches,
                "search.polish.rounds: a KL",
                "on the calibration text, quantized",
            )
        means: np.ndarray = values
        return means

    def divergence(self, choice: np.ndarray, bank: Bank) -> float:
        """KL(full precision, quantized) of a choice on the judging batches, nats/token."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)

        def summed(index: int) -> Tensor:
            sums = torch.zeros(1, dtype=torch.float64, device=self.device)
            for reference, tokens in self._parts(index, bank):
                bank.set_formats(self.formats(choice))
                sums += reference.sum(model_logits(self.model, tokens))
            return sums

        for index in self.judging:
            total += self.micro.run(partial(summed, index), len(self.batches[index]))
        return float(self._token_mean(total, len(self.judging))[0])

    def _measure(
        self, bank: Bank, disturbances: Disturbances, advance: Callable[[str], None]
    ) -> np.ndarray:
        """(U, F-1) KL on this round's batches that each step next to a unit's own candidate saves,
        the others as chosen; nan for steps further away."""
        steps = [
            (u, int(c) + step)
            for u, c in enumerate(self.choice)
            for step in (-1, 1)
            if 0 <= c + step < len(self.space.formats)
        ]
        changes: list[Change] = [(u, self.space.formats[f]) for u, f in steps]
        sums = torch.zeros(len(steps) + 1, dtype=torch.float64, device=self.device)
        note = f"KL {self.rows[-1]['kl']:.4f}"
        measuring = self.measured_on(len(self.rows) - 1)

        def count(said: str | None, _: str) -> None:
            if said is not None:
                advance(said)

        def summed(index: int) -> Tensor:
            of_batch = torch.zeros_like(sums)
            n_parts = len(self.micro.parts(self.batches[index]))
            for number, (reference, tokens) in enumerate(self._parts(index, bank), start=1):
                of_batch[-1] += reference.sum(disturbances.start(tokens, self.formats(self.choice)))
                said = note if number == n_parts else None
                of_batch[:-1] += disturbances.kl_sums(
                    changes, reference, partial(count, said), rows=self.micro.rows
                )
            return of_batch

        for index in measuring:
            sums += self.micro.run(partial(summed, index), len(self.batches[index]))
        kls = self._token_mean(sums, len(measuring))
        unit, changed = np.array(steps).T
        own = self.choice[unit]
        gain = np.full(self.gains.gain.shape, np.nan)
        gain[unit, np.minimum(own, changed)] = (own - changed) * (kls[:-1] - kls[-1])
        return gain

    # --- choosing ------------------------------------------------------------------------------

    def _best_nearby(
        self, scores: np.ndarray, divergence: Callable[[np.ndarray], float], now: float
    ) -> tuple[np.ndarray, float, int]:
        """The best verified proposal and its KL, else the present choice; proposals tried."""
        best, best_kl, tried, has_failed = self.choice, now, 0, False
        size = self.size
        while size >= 2:
            candidate = self.gains.maximal(self.gains.propose(self.choice, scores, size))
            if np.array_equal(candidate, best):
                break  # the additive model sees nothing better, here or further out
            tried += 1
            kl = divergence(candidate)
            if kl < best_kl:
                best, best_kl, self.size = candidate, kl, size
            elif best is not self.choice:
                break
            else:
                has_failed = True
            changed = int((candidate != self.choice).sum())
            # Half of a region that was too large may still be too large to be the best.
            size = min(size, changed) // 2 if has_failed else min(2 * size, len(self.choice))
        if best is self.choice:
            self.size = HANDFUL
            for candidate in self.gains.next_best(self.choice, scores):
                tried += 1
                kl = divergence(candidate)
                if kl < now:
                    return candidate, kl, tried
        return best, best_kl, tried

    # --- rounds --------------------------------------------------------------------------------

    def _log(self, kl: float, moves: int, tried: int, since: float) -> None:
        self.rows.append(
            {
                "round": len(self.rows),
                "kl": kl,
                "moves": moves,
                "tried": tried,
                "bits": self.space.average(self.choice, self.budget.unit),
                "seconds": self.clock.seconds - since,
            }
        )

    def take_round(
        self, bank: Bank, disturbances: Disturbances, advance: Callable[[str], None]
    ) -> None:
        """Measure, propose, verify; take what is better."""
        since, now = self.clock.seconds, self.rows[-1]["kl"]
        self.gains.learn(self._measure(bank, disturbances, advance))
        scores = self.gains.scores(self.choice)
        best, kl, tried = self._best_nearby(scores, lambda c: self.divergence(c, bank), now)
        self.fruitless = self.fruitless + 1 if best is self.choice else 0
        is_last = self.is_finished or len(self.rows) == self.config.polish.count
        if best is self.choice and is_last:
            # Room that the last measurement says to use, though no proposal of its own verified it.
            best = self.gains.maximal(best)
            if not np.array_equal(best, self.choice):
                kl, tried = self.divergence(best, bank), tried + 1
        moves = int((best != self.choice).sum())
        self.choice = best
        self._log(kl, moves, tried, since)

    @torch.no_grad()
    def run(self) -> None:
        """All rounds that are left."""
        self.resume()
        asked = self.config.polish.count
        done = max(0, len(self.rows) - 1)  # the first row is of the start
        if self.is_finished or done >= asked:
            return
        directions = min(2, len(self.space.formats) - 1)
        work = len(self.measuring) * len(self.space.units) * directions  # of a round, at most
        family, rule = self.config.format_family, self.config.scale_rules.by_format()
        with (
            searching_model(self.model, self.space, family, rule) as bank,
            quick_attention(self.model, self.batches[0]),
            progress("polish", asked * work, done=done * work) as advance,
        ):
            disturbances = Disturbances(
                self.model, bank, self.space, self.batches[0].to(self.device)
            )
            if not self.rows:
                since = self.clock.seconds
                self._log(self.divergence(self.choice, bank), 0, 0, since)
                self.save()
            while not self.is_finished and len(self.rows) <= asked:
                self.take_round(bank, disturbances, advance)
                self.save()

    # --- state on disk -------------------------------------------------------------------------

    def save(self) -> None:
        """Write the state, and the rows so far for readers."""
        if self.folder is None or not self.processes.is_main:
            return
        # No times, so that a resumed polish leaves the same file byte for byte.
        lines = [{k: v for k, v in row.items() if k != "seconds"} for row in self.rows]
        text = "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in lines)
        write_text(self.folder / LOG_FILE, text)
        facts = {
            "size": self.size,
            "micro_batch": self.micro.rows,
            "fruitless": self.fruitless,
            "rows": self.rows,
            "seconds": self.clock.seconds,
        }
        arrays = {"choice": self.choice, "gain": self.gains.gain, "weight": self.gains.weight}
        self.state_file.save(State(facts, {k: torch.from_numpy(v) for k, v in arrays.items()}))

    def resume(self) -> None:
        """Go on from the folder's state, if there is one.

        Raises:
            RunError: it is damaged, or belongs to a polish of another search.
        """
        state = self.state_file.load()
        if state is None:
            return
        facts, arrays = state.facts, {k: v.numpy() for k, v in state.tensors.items()}
        self.choice, self.gains.gain, self.gains.weight = (
            arrays[name] for name in ("choice", "gain", "weight")
        )
        self.size, self.fruitless, self.rows = facts["size"], facts["fruitless"], facts["rows"]
        self.clock.before, self.micro.rows = facts["seconds"], facts["micro_batch"]
