"""Searches without gradient steps: same inputs, same budget, same projection, same result.

    uniform      the largest uniform format that fits
    random       steps in a random order
    kl           the dMX paper's opponent: KL(reference, model) of the logits, token mean, with one
                 unit low and the rest unquantized; raise in the order of KL
    kl_per_bit   the same measurement for every candidate; raise by KL saved per added bit
    fisher       sum over tokens and outputs of (gradient of the summed cross entropy)^2 times
                 (output error)^2, for every candidate; exact knapsack
    weight_mse   squared error of the weights, for every candidate; exact knapsack

The reference is the unquantized model, and a unit's score quantizes its weights and inputs
together (weight_mse knows no inputs), or the one of them that a unit of separate operands is about.
With three candidates a step needs the one before it.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmx.assignment.budget import Budget
from dmx.assignment.projection import project
from dmx.assignment.space import SearchSpace
from dmx.errors import BudgetError
from dmx.formats import BlockFormat, Family
from dmx.kernels import ops
from dmx.kernels.losses import Divergence, cross_entropy
from dmx.models.linears import linear_layers
from dmx.models.running import model_logits, quick_attention
from dmx.progress import progress
from dmx.searching.config import SearchConfig
from dmx.searching.disturbances import Disturbances
from dmx.searching.offsets import Bank, SearchLinear, raw_thresholds, searching_model
from dmx.searching.scores import ScoreFile, code_version

PARTIAL_SUMS = 512
"""Partial sums of a score: programs of a kernel add to their own, in an order that stays."""


def uniform_choice(space: SearchSpace, budget: Budget) -> np.ndarray:
    """The largest candidate that, given to every unit, fits; (U,) int64."""
    space.check_budget(budget, warn=False)
    n = len(space.units)
    fitting = [
        i for i in range(len(space.formats)) if space.average([i] * n, budget.unit) <= budget.limit
    ]
    return np.full(n, fitting[-1], dtype=np.int64)


def random_preference(space: SearchSpace, seed: int) -> np.ndarray:
    """(U, F-1) uniform draws; a unit's later step never ranks above its earlier one."""
    draws = np.random.default_rng(seed).random((len(space.units), len(space.formats) - 1))
    return np.sort(draws, axis=1)[:, ::-1]


def solve_knapsack(
    space: SearchSpace,
    budget: Budget,
    scores: np.ndarray,
    *,
    near: np.ndarray | None = None,
    most_changes: int | None = None,
    excluded: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """The choice with the least sum of scores within the budget, exactly.

    Args:
        scores: (U, F) float64, score of each unit at each candidate; inf is never chosen.
        near, most_changes: only choices that differ from `near` (U,) in so many units at most.
        excluded: choices that may not come out.

    Returns:
        (U,) int64.

    Raises:
        BudgetError: no choice fits.
    """
    space.check_budget(budget, warn=False)
    n_units, n_formats = scores.shape
    bits = space.candidate_bits(budget.unit)
    cost = space.weights[:, None] * (bits - bits[0])[None]
    room = (
        budget.limit * space.total_weight
        - space.average([0] * n_units, budget.unit) * space.total_weight
    )
    # In units of the largest cost, so that the solver's absolute tolerance means something.
    unit_cost = cost.max() or 1.0
    one_each = np.kron(np.eye(n_units), np.ones(n_formats))
    # Scores span many decades; the solver's tolerances are absolute.
    allowed = np.isfinite(scores)
    saved = np.where(allowed, scores.min(1, keepdims=True) - scores, 0.0)
    constraints = [
        scipy.optimize.LinearConstraint(cost.ravel()[None] / unit_cost, -np.inf, room / unit_cost),
        scipy.optimize.LinearConstraint(one_each, 1, 1),
    ]
    agreement = [(near, n_units - (most_changes or 0), n_units)] if near is not None else []
    for choice, low, high in [*agreement, *((other, 0, n_units - 1) for other in excluded)]:
        same = np.eye(n_formats)[choice].ravel()[None]  # times the solution: units that agree
        constraints.append(scipy.optimize.LinearConstraint(same, low, high))
    result = scipy.optimize.milp(
        -(saved / (np.abs(saved).max() or 1.0)).ravel(),
        constraints=constraints,
        integrality=np.ones(scores.size),
        bounds=scipy.optimize.Bounds(0, allowed.ravel().astype(float)),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise BudgetError(
            f"budget.limit={budget.limit}: the solver found no choice ({result.message})"
        )
    return result.x.reshape(n_units, n_formats).argmax(1).astype(np.int64)


def soft_start(
    space: SearchSpace, family: Family, choice: np.ndarray, wanted: np.ndarray, spread: float
) -> np.ndarray:
    """(U,) raw offsets of a choice, nearer to a threshold the less sure it is.

    Units that took a step start above its threshold, by `spread` for the one that wants it most,
    the others below; in between by rank. A unit between two thresholds takes the mean of both. So a
    gradient decides soon about the units at the border, and late about the others.

    Args:
        choice: (U,). wanted: (U, F-1), how much each unit wants each step.
    """
    thresholds = np.array(raw_thresholds(family))
    raw = np.zeros((len(choice), len(thresholds)))
    for step, threshold in enumerate(thresholds):
        for side, sign in ((choice > step, 1), (choice <= step, -1)):
            units = np.flatnonzero(side)
            order = np.lexsort((space.name_rank[units], sign * wanted[units, step]))
            share = (np.arange(len(units)) + 1) / max(1, len(units))
            raw[units[order], step] = threshold + sign * spread * share
    below = np.clip(choice - 1, 0, len(thresholds) - 1)
    above = np.clip(choice, 0, len(thresholds) - 1)
    units = np.arange(len(choice))
    return np.clip((raw[units, below] + raw[units, above]) / 2, 0, 2)


# --- measuring ---------------------------------------------------------------------------------


class Scan:
    """Scores of every unit at candidate formats, from batches; kept in score files."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Tensor],
        space: SearchSpace,
        config: SearchConfig,
        *,
        fingerprint: dict[str, Any],
        folder: Path | None,
    ) -> None:
        self.model, self.space, self.config = model, space, config
        self.batches = list(batches)[: config.score_batches]
        self.fingerprint, self.folder = fingerprint, folder
        self.device = next(model.parameters()).device

    def _file(self, kind: str, block_format: BlockFormat) -> ScoreFile:
        key = {
            "kind": kind, "format": block_format.name, "scale_rule": self.config.scale_rule,
            "units": [[u.name, list(u.layers)] for u in self.space.units],
            "fixed": {k: str(v) for k, v in self.space.fixed.items()}, "code": code_version(),
            "score_batches": len(self.batches), **self.fingerprint,
        }  # fmt: skip
        if kind == "weight_mse":  # weights alone: any data gives the same scores
            del key["score_batches"], key["batches"]
        return ScoreFile(self.folder, key)

    def kl(self, candidates: Sequence[int]) -> np.ndarray:
        """(U, len(candidates)) KL of each unit alone at each candidate, nats/token."""
        return self._collect("kl", candidates, self._scan_kl)

    def fisher(self) -> np.ndarray:
        """(U, F); see the module's docstring."""
        return self._collect("fisher", range(len(self.space.formats)), self._scan_fisher)

    def weight_mse(self) -> np.ndarray:
        """(U, F) sum of squared weight errors."""
        return self._collect("weight_mse", range(len(self.space.formats)), self._scan_weights)

    def _collect(
        self,
        kind: str,
        candidates: Sequence[int],
        scan: Callable[[list[BlockFormat], list[ScoreFile]], None],
    ) -> np.ndarray:
        formats = [self.space.formats[c] for c in candidates]
        files = [self._file(kind, f) for f in formats]
        parts = self._parts(kind)
        self._memory: dict[str, tuple[np.ndarray, int]] = {}
        missing = [
            (f, file) for f, file in zip(formats, files, strict=True)
            if (found := file.load()) is None or found[1] < parts
        ]  # fmt: skip
        if missing:
            scan([f for f, _ in missing], [file for _, file in missing])
        columns = []
        for block_format, file in zip(formats, files, strict=True):
            found = self._memory.get(block_format.name) or file.load()
            assert found is not None and found[1] == parts
            columns.append(found[0])
        return np.stack(columns, axis=1)

    def _parts(self, kind: str) -> int:
        """How many parts a scan counts for its resumption."""
        return 1 if kind == "weight_mse" else len(self.batches)

    def _save(
        self, block_format: BlockFormat, file: ScoreFile, values: np.ndarray, done: int
    ) -> None:
        self._memory[block_format.name] = (values.copy(), done)
        file.save(values, done)

    # kl: parts are batches ---------------------------------------------------------------------

    @torch.no_grad()
    def _scan_kl(self, formats: list[BlockFormat], files: list[ScoreFile]) -> None:
        n_units, n_batches = len(self.space.units), len(self.batches)
        sums, done = _partial(files, n_units)
        changes = [(u, f) for u in range(n_units) for f in formats]
        with (
            searching_model(
                self.model, self.space, self.config.format_family, self.config.scale_rule
            ) as bank,
            progress("kl scan", n_batches * len(changes), done=done * len(changes)) as advance,
            quick_attention(self.model, self.batches[0]),
        ):
            disturbances = Disturbances(
                self.model, bank, self.space, self.batches[0].to(self.device)
            )
            for index in range(done, n_batches):
                tokens = self.batches[index].to(self.device)
                reference = disturbances.start(tokens, [None] * n_units, fixed=False)
                found = disturbances.kl_sums(changes, Divergence(reference), advance).cpu().numpy()
                sums += found.reshape(n_units, -1) / (tokens.numel() * n_batches)
                for column, (block_format, file) in enumerate(zip(formats, files, strict=True)):
                    self._save(block_format, file, sums[:, column], index + 1)

    # fisher: parts are batches -----------------------------------------------------------------

    def _scan_fisher(self, formats: list[BlockFormat], files: list[ScoreFile]) -> None:
        n_units = len(self.space.units)
        sums, done = _partial(files, n_units)
        with (
            searching_model(
                self.model, self.space, self.config.format_family, self.config.scale_rule
            ) as bank,
            progress("fisher scan", len(self.batches), done=done) as advance,
        ):
            for index in range(done, len(self.batches)):
                tokens = self.batches[index].to(self.device)
                totals = torch.zeros(
                    n_units, len(formats), PARTIAL_SUMS, dtype=torch.float32, device=self.device
                )
                self._fisher_pass(bank, tokens, formats, totals)
                sums += totals.double().sum(-1).cpu().numpy() / len(self.batches)
                for column, (block_format, file) in enumerate(zip(formats, files, strict=True)):
                    self._save(block_format, file, sums[:, column], index + 1)
                advance("")

    def _fisher_pass(
        self, bank: Bank, tokens: Tensor, formats: list[BlockFormat], totals: Tensor
    ) -> None:
        """One forward and backward of the unquantized model, which adds to totals (U, F, :)."""
        bank.set_full()
        handles = []

        def watch(layer: SearchLinear, inputs: tuple[Tensor], output: Tensor) -> None:
            x, _ = layer.operands(inputs[0].detach())
            if output.requires_grad:
                output.register_hook(
                    lambda grad: _add_fisher(
                        layer, x, grad, formats, self.config.scale_rule, totals
                    )
                )

        for module in self.model.modules():
            if isinstance(module, SearchLinear):
                handles.append(module.register_forward_hook(watch))
        try:
            embedding = self.model.get_input_embeddings()  # type: ignore[operator]
            with torch.enable_grad():
                # Gradients flow from the embeddings' output on; no weight needs one.
                starts = embedding.register_forward_hook(
                    lambda _m, _i, out: out.detach().requires_grad_()
                )
                handles.append(starts)
                logits = model_logits(self.model, tokens)
                n_predictions = tokens.shape[0] * (tokens.shape[1] - 1)
                (cross_entropy(logits, tokens) * n_predictions).backward()
        finally:
            for handle in handles:
                handle.remove()

    # weights: one part -------------------------------------------------------------------------

    @torch.no_grad()
    def _scan_weights(self, formats: list[BlockFormat], files: list[ScoreFile]) -> None:
        layers = linear_layers(self.model)
        for block_format, file in zip(formats, files, strict=True):
            sums = np.zeros(len(self.space.units))
            for u, unit in enumerate(self.space.units):
                weights = {id(layers[n].weight): layers[n].weight for n in unit.layers}
                for weight in weights.values():
                    error = (
                        ops.fake_quant(
                            weight.detach(), block_format, scale_rule=self.config.scale_rule
                        ).float()
                        - weight.float()
                    )
                    sums[u] += float(error.square().sum(dtype=torch.float64))
            self._save(block_format, file, sums, 1)


@torch.no_grad()
def _add_fisher(
    layer: SearchLinear,
    x: Tensor,
    grad: Tensor,
    formats: list[BlockFormat],
    scale_rule: Any,
    totals: Tensor,
) -> None:
    exact = F.linear(x, layer.weight)
    for unit in sorted({layer.weight_unit, layer.input_unit}):
        for column, block_format in enumerate(formats):
            quantized = F.linear(*(
                ops.fake_quant(t, block_format, scale_rule=scale_rule) if own == unit else t
                for t, own in ((x, layer.input_unit), (layer.weight, layer.weight_unit))
            ))  # fmt: skip
            ops.add_fisher(grad, exact, quantized, totals[unit, column])


def _partial(files: list[ScoreFile], n_units: int) -> tuple[np.ndarray, int]:
    """Sums (U, files) and the number of parts that all of the files hold; zeros when they differ."""
    found = [file.load() for file in files]
    done = {0 if f is None else f[1] for f in found}
    if len(done) != 1 or done == {0}:
        return np.zeros((n_units, len(files))), 0
    return np.stack([f[0] for f in found if f is not None], axis=1), done.pop()


# --- choosing ----------------------------------------------------------------------------------


def heuristic_choice(
    scan: Scan, space: SearchSpace, budget: Budget, config: SearchConfig
) -> tuple[np.ndarray, np.ndarray, float]:
    """Choice (U,), preference (U, F-1) and seconds of a search that takes no gradient steps."""
    start = time.perf_counter()
    n_units, n_formats = len(space.units), len(space.formats)
    lowest = np.zeros(n_units, dtype=np.int64)
    if config.name == "uniform":
        preference = np.zeros((n_units, n_formats - 1))
        return uniform_choice(space, budget), preference, time.perf_counter() - start
    gain = None
    if config.name == "random":
        preference = random_preference(space, config.seed)
    elif config.name == "kl":
        preference = scan.kl(range(n_formats - 1))
    else:
        scores = {"kl_per_bit": lambda: scan.kl(range(n_formats)), "fisher": scan.fisher,
                  "weight_mse": scan.weight_mse}[config.name]()  # fmt: skip
        gain = scores[:, :-1] - scores[:, 1:]
        added = space.weights[:, None] * np.diff(space.candidate_bits(budget.unit))[None]
        preference = gain / added
        if config.name != "kl_per_bit":
            lowest = solve_knapsack(space, budget, scores)
    choice = project(space, budget, lowest, preference, gain=gain)
    return choice, preference, time.perf_counter() - start
