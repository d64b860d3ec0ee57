"""Discrete polish: makes a choice better by what its own quantized model loses and gains.

A round, at the present choice:

    measure   KL(full precision, quantized), token mean, of the model with one unit one step lower
              or higher, for every unit and both directions
    propose   the best choice within the budget of the additive model (the sum of these
              differences), with at most `size` units changed: exact, by `solve_knapsack`
    verify    the KL of the proposed choice itself; a better one is taken

Differences add up only near the choice at which they were measured, so `size` is a trust region: it
doubles while that finds better choices, or halves until none is better; where none is found, the next best
few changes of a handful of units are tried one after the other. A proposal costs little, one pass over
the batches against one for each unit that a measurement takes. The polish ends when no proposal is
better, twice in a row where rounds have batches of their own, or after `polish_rounds`.

Where there are batches enough, each round measures on others than the last, until all had their turn. What was
measured of a step before counts half with each new measurement: the differences of one choice are nearly
those of the next, their noise is not.

The best of many noisy measurements is partly the luckiest: on 512 tokens, proposals for 210 layers that
lowered the KL of those tokens by 6 % raised that of others by as much. So proposals are verified on
calibration batches that nothing was measured on, which are cheap to add, and luck is turned down.

Scans of the unquantized model (`heuristics`) measure each unit alone; here it is measured beside the
errors of all others, which is what counts at the end.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dmx.assignment.budget import Budget
from dmx.assignment.projection import project
from dmx.assignment.space import SearchSpace
from dmx.errors import BudgetError, RunError
from dmx.files import write_json, write_text
from dmx.formats import BlockFormat
from dmx.kernels.losses import Divergence
from dmx.models.running import model_logits, quick_attention
from dmx.progress import Stopwatch, progress
from dmx.searching.config import SearchConfig
from dmx.searching.disturbances import Change, Disturbances
from dmx.searching.heuristics import solve_knapsack
from dmx.searching.offsets import Bank, searching_model
from dmx.searching.processes import Processes

STATE_FILE = "polish_state.json"
LOG_FILE = "polish.jsonl"
DEFAULT_BATCHES = 4
"""`polish_batches: null` measures a round on so many at most: 16,384 tokens of the default calibration."""
JUDGES = 4
"""Batches that verify, at most, for each that measures."""
KEPT_LOGITS = {"cuda": 1 << 32, "cpu": 1 << 27}
"""Logits of the unquantized model on the batches that verify, by device type; more are run anew."""
MEMORY = 0.5
"""Weight of what was known of a step against a new measurement on other batches."""
PATIENCE = 2
"""Rounds in a row without a better choice that end the polish; 1 where all rounds measure on the same batches."""
FIRST_SHARE = 4
"""The first trust region is the units divided by this."""
HANDFUL = 4
"""Changed units of the last proposals: two raises, each paid for by a lowering, or so."""
LAST_PROPOSALS = 16
"""How many of them are tried."""
STEP_RATIO = 16.0
"""What the gain of a step is divided by for the step above it: two more mantissa bits, a quarter of
the error, a sixteenth of its square. Only for steps that no measurement reaches."""


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
        self.folder, self.fingerprint, self.clock = folder, fingerprint, clock
        self.device = next(model.parameters()).device
        self.processes = Processes(self.device)
        count = config.polish_batches or max(1, min(DEFAULT_BATCHES, len(batches) // 2))
        self.batches = [self.processes.own_rows(b) for b in batches]
        every = list(range(len(batches)))
        self.judging = every[count : (1 + JUDGES) * count] or every[:count]
        self.measuring = every[:count]
        """Of the first round; `measured_on` tells of the others."""
        self.pool = self.measuring + every[(1 + JUDGES) * count :]
        self.has_fresh = len(self.pool) >= 2 * count
        self.start = np.array(start, dtype=np.int64)
        self.choice = self.start.copy()
        self.size = max(2, len(space.units) // FIRST_SHARE)
        self.gain = np.zeros((len(space.units), len(space.formats) - 1))
        """(U, F-1) KL that each step saves, as measured so far."""
        self.weight = np.zeros_like(self.gain)
        """(U, F-1) of the measurements in `gain`; 0: none, `gain` is extrapolated."""
        self.fruitless = 0
        self.rows: list[dict[str, Any]] = []
        self._references: dict[int, Divergence] = {}

    @property
    def is_finished(self) -> bool:
        return self.fruitless >= (PATIENCE if self.has_fresh else 1)

    # --- measuring -----------------------------------------------------------------------------

    def formats(self, choice: np.ndarray) -> list[BlockFormat | None]:
        return [self.space.formats[int(i)] for i in choice]

    def _reference(self, index: int, bank: Bank) -> Divergence:
        """KL to the unquantized model on a batch; kept if it judges and all that do are small."""
        if index in self._references:
            return self._references[index]
        bank.set_full()
        logits = model_logits(self.model, self.batches[index].to(self.device))
        divergence = Divergence(logits)
        room = KEPT_LOGITS.get(self.device.type, 0)
        if index in self.judging and logits.numel() * len(self.judging) <= room:
            self._references[index] = divergence
        return divergence

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
            raise RunError(
                "search.polish_rounds: a KL is not finite: the quantized model gives NaN or Inf on "
                "the calibration data. Search in bfloat16 or float32, or look at the data."
            )
        found: np.ndarray = values
        return found

    def divergence(self, choice: np.ndarray, bank: Bank) -> float:
        """KL(full precision, quantized) of a choice on the judging batches, nats/token."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for index in self.judging:
            reference = self._reference(index, bank)
            bank.set_formats(self.formats(choice))
            total += reference.sum(model_logits(self.model, self.batches[index].to(self.device)))
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
        for index in measuring:
            reference, tokens = self._reference(index, bank), self.batches[index].to(self.device)
            sums[-1] += reference.sum(disturbances.start(tokens, self.formats(self.choice)))
            sums[:-1] += disturbances.kl_sums(changes, reference, lambda _: advance(note))
        kls = self._token_mean(sums, len(measuring))
        unit, changed = np.array(steps).T
        own = self.choice[unit]
        gain = np.full(self.gain.shape, np.nan)
        gain[unit, np.minimum(own, changed)] = (own - changed) * (kls[:-1] - kls[-1])
        return gain

    def _learn(self, measured: np.ndarray) -> None:
        """Take (U, F-1) measured gains into `gain`. Steps that were never measured go on from the
        nearest of those that were, by STEP_RATIO."""
        is_new = np.isfinite(measured)
        old = self.weight * (MEMORY if self.has_fresh else 0.0)
        known = np.where(self.weight > 0, self.gain, np.nan)
        gain = np.where(is_new, (measured + old * self.gain) / (1.0 + old), known)
        self.weight = np.where(is_new, 1.0 + old, self.weight)
        for s in range(1, gain.shape[1]):
            above = np.where(gain[:, s - 1] > 0, gain[:, s - 1] / STEP_RATIO, gain[:, s - 1])
            gain[:, s] = np.where(np.isnan(gain[:, s]), above, gain[:, s])
        for s in reversed(range(gain.shape[1] - 1)):
            below = np.where(gain[:, s + 1] > 0, gain[:, s + 1] * STEP_RATIO, gain[:, s + 1])
            gain[:, s] = np.where(np.isnan(gain[:, s]), below, gain[:, s])
        self.gain = gain

    def scores(self) -> np.ndarray:
        """(U, F) by how much the KL rises with each unit at each candidate, the others as chosen, by
        `gain`; inf where that is extrapolated."""

        def to_own(values: np.ndarray) -> np.ndarray:
            """(U, F) sums of (U, F-1) steps between each candidate and a unit's own; negative below."""
            sums = np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1)], axis=1)
            return sums - np.take_along_axis(sums, self.choice[:, None], axis=1)

        return np.where(to_own(self.weight == 0) == 0, -to_own(self.gain), np.inf)

    # --- choosing ------------------------------------------------------------------------------

    def preference(self) -> np.ndarray:
        """(U, F-1) KL saved per added bit, by `gain`."""
        bits = np.diff(self.space.candidate_bits(self.budget.unit))
        return self.gain / (self.space.weights[:, None] * bits[None])

    def _maximal(self, choice: np.ndarray) -> np.ndarray:
        return project(self.space, self.budget, choice, self.preference(), gain=self.gain)

    def _propose(
        self, scores: np.ndarray, size: int, excluded: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        """The best choice of the additive model near the present one; not yet `_maximal`."""
        return solve_knapsack(
            self.space, self.budget, scores, near=self.choice, most_changes=size, excluded=excluded
        )

    def _best_nearby(
        self, scores: np.ndarray, divergence: Callable[[np.ndarray], float], now: float
    ) -> tuple[np.ndarray, float, int]:
        """The best verified proposal and its KL, else the present choice; proposals tried."""
        best, best_kl, tried, has_failed = self.choice, now, 0, False
        size = self.size
        while size >= 2:
            candidate = self._maximal(self._propose(scores, size))
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
            for candidate in self._next_best(scores):
                tried += 1
                kl = divergence(candidate)
                if kl < now:
                    return candidate, kl, tried
        return best, best_kl, tried

    def _next_best(self, scores: np.ndarray) -> Iterator[np.ndarray]:
        """Choices near the present one, in the order of the additive model."""
        excluded, seen = [self.choice], {tuple(self.choice)}
        for _ in range(LAST_PROPOSALS):
            try:
                excluded.append(self._propose(scores, HANDFUL, excluded))
            except BudgetError:  # there is no other choice
                return
            candidate = self._maximal(excluded[-1])
            if tuple(candidate) not in seen:
                seen.add(tuple(candidate))
                yield candidate

    # --- rounds --------------------------------------------------------------------------------

    def _log(self, kl: float, moves: int, tried: int, since: float) -> None:
        self.rows.append(
            {
                "round": len(self.rows), "kl": kl, "moves": moves, "tried": tried,
                "bits": self.space.average(self.choice, self.budget.unit),
                "seconds": self.clock.seconds - since,
            }
        )  # fmt: skip

    def take_round(
        self, bank: Bank, disturbances: Disturbances, advance: Callable[[str], None]
    ) -> None:
        since, now = self.clock.seconds, self.rows[-1]["kl"]
        self._learn(self._measure(bank, disturbances, advance))
        best, kl, tried = self._best_nearby(self.scores(), lambda c: self.divergence(c, bank), now)
        self.fruitless = self.fruitless + 1 if best is self.choice else 0
        is_last = self.is_finished or len(self.rows) == self.config.polish_rounds
        if best is self.choice and is_last:
            # Room that the last measurement says to use, though no proposal of its own verified it.
            best = self._maximal(best)
            if not np.array_equal(best, self.choice):
                kl, tried = self.divergence(best, bank), tried + 1
        moves = int((best != self.choice).sum())
        self.choice = best
        self._log(kl, moves, tried, since)

    @torch.no_grad()
    def run(self) -> None:
        self.resume()
        asked = self.config.polish_rounds
        done = max(0, len(self.rows) - 1)  # the first row is of the start
        if self.is_finished or done >= asked:
            return
        directions = min(2, len(self.space.formats) - 1)
        work = len(self.measuring) * len(self.space.units) * directions  # of a round, at most
        family, rule = self.config.format_family, self.config.scale_rule
        with (
            searching_model(self.model, self.space, family, rule) as bank,
            quick_attention(self.model, self.batches[0]),
            progress(
                "polish", asked * work, done=done * work, quiet=not self.processes.is_main
            ) as advance,
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
        if self.folder is None or not self.processes.is_main:
            return
        # No times, so that a resumed polish leaves the same file byte for byte.
        lines = [{k: v for k, v in row.items() if k != "seconds"} for row in self.rows]
        text = "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in lines)
        write_text(self.folder / LOG_FILE, text)
        write_json(self.folder / STATE_FILE, {
            "fingerprint": self.fingerprint, "start": self.start.tolist(),
            "choice": self.choice.tolist(), "size": self.size,
            "gain": self.gain.tolist(), "weight": self.weight.tolist(), "fruitless": self.fruitless, "rows": self.rows,
            "seconds": self.clock.seconds,
        })  # fmt: skip

    def resume(self) -> None:
        """Go on from the folder's state, if there is one.

        Raises:
            RunError: it is damaged, or belongs to a polish of another search.
        """
        if self.folder is None or not (self.folder / STATE_FILE).exists():
            return
        path = self.folder / STATE_FILE
        try:
            state = json.loads(path.read_text())
            fits = state["fingerprint"] == self.fingerprint
            fits = fits and state["start"] == self.start.tolist()
            choice = np.array(state["choice"], dtype=np.int64)
            gain = np.array(state["gain"], dtype=np.float64)
            weight, fruitless = np.array(state["weight"], dtype=np.float64), int(state["fruitless"])
            rows, size = list(state["rows"]), int(state["size"])
            seconds = float(state["seconds"])
            if not (
                choice.shape == self.choice.shape and gain.shape == weight.shape == self.gain.shape
            ):
                raise ValueError(f"{choice.shape}, {gain.shape}, {weight.shape}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path} is damaged ({type(error).__name__}: {error}). Delete it to polish again."
            ) from error
        if not fits:
            raise RunError(
                f"{path} is of a polish with other settings, data, model or start. Choose another "
                "folder, or delete it to polish again."
            )
        self.choice, self.gain, self.rows, self.size = choice, gain, rows, size
        self.weight, self.fruitless = weight, fruitless
        self.clock.before = seconds
