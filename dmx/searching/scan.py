"""What each unit costs at each candidate format, measured on calibration batches.

    kl           KL(reference, model) of the logits, token mean, of the model with this unit alone quantized
    fisher       sum over tokens and outputs of (gradient of the summed cross entropy)^2 times
                 (output error)^2
    aumann_shapley   what a unit adds to KL(reference, model), token mean, while all units together go along the
                 straight line from each candidate to the dearest one
    weight_mse   squared error of the weights, on no batch

The reference is the unquantized model, and a unit's score quantizes its weights and inputs together, or the one
of them that a unit of separate choices is about. Scores are kept in score files, a file for each format. Several
processes share the rows of each batch; what they saw is added up in the order of their ranks.

*Aumann-Shapley.* With all units at the offset b of the straight line (dmx.numerics.line), a unit's share of what one
step from format k to k+1 saves is

    gain of u = - integral over b from stop k to stop k+1 of  d KL / d offset of u

by Gauss-Legendre quadrature, and its score at a format the sum of the gains from there to the dearest. A gradient at
one point b gives the terms of all units at once, so a batch costs NODES passes forward and backward a step. The
other scores measure a unit beside unquantized ones; here each is measured beside the errors of all others, so that
errors that add up count and those that cancel do not. The gains of all units add up to what the KL of the whole model
falls by ("efficiency"), but for the quadrature, and for what gradients do not see that pass straight through the
rounding of inputs: some percent.

Source: Aumann and Shapley, Values of Non-Atomic Games (1974); for formats of layers from full precision on, with a
saturating total beside it, arXiv 2607.12266. Here the path has the candidates as its ends: differences between
them are all that a choice depends on.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dmx.assignment.rules import rule_of
from dmx.assignment.space import SearchSpace, Unit
from dmx.errors import ModelError
from dmx.formats import OPERANDS, BlockFormat, Format
from dmx.kernels import ops
from dmx.kernels.losses import Divergence, cross_entropy, kl_loss
from dmx.models.checkpointing import checkpointing
from dmx.models.finite import first_not_finite, not_finite
from dmx.models.linears import linear_layers
from dmx.models.running import model_logits, quick_attention
from dmx.models.sharding import whole
from dmx.models.streaming import brought
from dmx.processes import Processes
from dmx.progress import Stopwatch, progress
from dmx.searching.bank import Bank, searching_model
from dmx.searching.config import SearchConfig
from dmx.searching.disturbances import Change, Disturbances
from dmx.searching.output_errors import OutputErrors
from dmx.searching.scores import ScoreFile, Scores, ScoreTimes
from dmx.state import code_version

PARTIAL_SUMS = 512
"""Partial sums of a score: programs of a kernel add to their own, in an order that stays."""
NODES = 4
"""Points of the quadrature along each step of the path."""


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
        times: ScoreTimes | None = None,
    ) -> None:
        """times: of the search; None: nobody asks."""
        self.model, self.space, self.config = model, space, config
        self.times = times or ScoreTimes(Stopwatch())
        self.rules = config.scale_rules.by_format()
        self.batches = list(batches)[: config.score_batches]
        self.fingerprint, self.folder = fingerprint, folder
        self.device = next(model.parameters()).device
        self.processes = Processes(self.device)
        self.micro = config.rows_at_a_time()

    def _file(self, kind: str, block_format: Format) -> ScoreFile:
        key: dict[str, Any] = {
            "kind": kind,
            "format": block_format.name,
            "units": [[u.name, list(u.layers)] for u in self.space.units],
            "fixed": {k: str(v) for k, v in self.space.fixed.items()},
            "code": code_version(__name__),
            "score_batches": len(self.batches),
            "micro_batch": self.config.micro_batch,
            **self.fingerprint,
        }
        if isinstance(block_format, BlockFormat):
            key["scale_rules"] = {o: rule_of(self.rules, o, block_format) for o in OPERANDS}
        if self.space.input_amax is not None:  # of more batches than those that are scored
            key["input_amax"] = dict(self.space.input_amax)
        if kind == "aumann_shapley":  # of all units at once, on the way to the other formats
            key["scale_rules"] = {
                o: {
                    f.name: rule_of(self.rules, o, f)
                    for f in (*self.config.formats_of(o), *self.space.fixed.values())
                    if isinstance(f, BlockFormat)
                }
                for o in OPERANDS
            }
            key["path"] = [f.name for f in self.space.formats]
            key["input_format"] = str(self.space.input_format)
        if kind == "weight_mse":  # weights alone: any data gives the same scores
            del key["score_batches"], key["batches"], key["micro_batch"]
            key.pop("input_amax", None)
            if "scale_rules" in key:
                del key["scale_rules"]["input"]
        return ScoreFile(self.folder, key)

    def kl(self, candidates: Sequence[int]) -> np.ndarray:
        """(U, len(candidates)) KL of each unit alone at each candidate, nats/token."""
        return self._collect("kl", candidates, self._scan_kl)

    def fisher(self) -> np.ndarray:
        """(U, F); see the module's docstring."""
        return self._collect("fisher", range(len(self.space.formats)), self._scan_fisher)

    def aumann_shapley(self) -> np.ndarray:
        """(U, F), 0 at the dearest format; see the module's docstring."""
        return self._collect("aumann_shapley", range(len(self.space.formats)), self._scan_path)

    def weight_mse(self) -> np.ndarray:
        """(U, F) sum of squared weight errors."""
        return self._collect("weight_mse", range(len(self.space.formats)), self._scan_weights)

    def _collect(
        self,
        kind: str,
        candidates: Sequence[int],
        scan: Callable[[list[Format], list[ScoreFile]], None],
    ) -> np.ndarray:
        formats = [self.space.formats[c] for c in candidates]
        files = [self._file(kind, f) for f in formats]
        kept = self.processes.agree(lambda: [file.load() for file in files])
        self._known: dict[str, Scores] = {
            f.name: scores for f, scores in zip(formats, kept, strict=True) if scores is not None
        }
        parts = self._parts(kind)
        missing = [
            (f, file)
            for f, file in zip(formats, files, strict=True)
            if f.name not in self._known or self._known[f.name].done < parts
        ]
        for file, scores in zip(files, kept, strict=True):
            if scores is not None and scores.done == parts:
                self.times.take_over(file, scores.seconds)
        self._lap = Stopwatch()
        if missing:
            scan([f for f, _ in missing], [file for _, file in missing])
        assert all(self._known[f.name].done == parts for f in formats)
        return np.stack([self._known[f.name].values for f in formats], axis=1)

    def _parts(self, kind: str) -> int:
        """How many parts a scan counts for its resumption."""
        return 1 if kind == "weight_mse" else len(self.batches)

    def _save_all(
        self, formats: list[Format], files: list[ScoreFile], sums: np.ndarray, done: int
    ) -> None:
        """Keep what was scanned together, sums (U, formats) after `done` parts; its time is shared equally."""
        share, self._lap = self._lap.seconds / len(formats), Stopwatch()
        for column, (block_format, file) in enumerate(zip(formats, files, strict=True)):
            earlier = self._known.get(block_format.name)
            seconds = share + (earlier.seconds if earlier else 0.0)
            self._save(block_format, file, Scores(sums[:, column].copy(), done, seconds))

    def _save(self, block_format: Format, file: ScoreFile, scores: Scores) -> None:
        bad = np.flatnonzero(~np.isfinite(scores.values))
        if len(bad):
            raise self._not_finite(block_format, self.space.units[bad[0]])
        self._known[block_format.name] = scores
        self.times.spend(file, scores.seconds)
        if self.processes.is_main:
            file.save(scores)

    def _partial(self, formats: list[Format], files: list[ScoreFile]) -> tuple[np.ndarray, int]:
        """Sums (U, formats) and the number of parts that all of them hold; zeros when they differ."""
        kept = [self._known.get(f.name) for f in formats]
        done = {0 if scores is None else scores.done for scores in kept}
        if len(done) != 1 or done == {0}:
            for f in formats:
                self._known.pop(f.name, None)  # lost, and so is their time
            return np.zeros((len(self.space.units), len(formats))), 0
        known = [self._known[f.name] for f in formats]
        for file, scores in zip(files, known, strict=True):
            self.times.take_over(file, scores.seconds)
        return np.stack([scores.values for scores in known], axis=1), done.pop()

    def _not_finite(self, block_format: Format, unit: Unit) -> ModelError:
        """The error of a score that is not finite."""
        what = f"the score of {unit.name} at {block_format}"
        when = "on the calibration text"
        with searching_model(self.model, self.space, self.config.format_family, self.rules) as bank:
            if first_not_finite(self.model, self.batches) is None:
                changed = [block_format if u is unit else None for u in self.space.units]
                bank.set_formats(changed, fixed=False)
                when += f", with {unit.name} alone at {block_format}"
            return not_finite(self.model, self.batches, what, when)

    # kl: parts are batches ---------------------------------------------------------------------

    @torch.no_grad()
    def _scan_kl(self, formats: list[Format], files: list[ScoreFile]) -> None:
        n_units, n_batches = len(self.space.units), len(self.batches)
        sums, done = self._partial(formats, files)
        changes = [(u, f) for u in range(n_units) for f in formats]
        with (
            searching_model(self.model, self.space, self.config.format_family, self.rules) as bank,
            progress("kl scan", n_batches * len(changes), done=done * len(changes)) as advance,
            quick_attention(self.model, self.batches[0]),
        ):
            disturbances = Disturbances(
                self.model, bank, self.space, self.batches[0].to(self.device)
            )
            for index in range(done, n_batches):
                batch = self.batches[index]
                tokens = self.processes.own_rows(batch).to(self.device)
                own = self._kl_sums(disturbances, tokens, changes, advance)
                kls = self.processes.total(own).cpu().numpy()
                sums += kls.reshape(n_units, -1) / (batch.numel() * n_batches)
                self._save_all(formats, files, sums, index + 1)

    def _kl_sums(
        self,
        disturbances: Disturbances,
        tokens: Tensor,
        changes: Sequence[Change],
        advance: Callable[[str], None],
    ) -> Tensor:
        """(len(changes),) float64: KL of each change of the unquantized model, summed over these rows."""
        unchanged: list[Format | None] = [None] * len(self.space.units)

        def summed() -> Tensor:
            sums = torch.zeros(len(changes), dtype=torch.float64, device=tokens.device)
            *others, last = self.micro.parts(tokens)
            for part in (*others, last):
                reference = Divergence(disturbances.start(part, unchanged, fixed=False))
                said = advance if part is last else lambda _: None
                sums += disturbances.kl_sums(changes, reference, said, rows=self.micro.rows)
            return sums

        return self.micro.run(summed, len(tokens))

    # fisher: parts are batches -----------------------------------------------------------------

    def _scan_fisher(self, formats: list[Format], files: list[ScoreFile]) -> None:
        sums, done = self._partial(formats, files)
        with (
            searching_model(self.model, self.space, self.config.format_family, self.rules) as bank,
            checkpointing(self.model, False, "search"),
            progress("fisher scan", len(self.batches), done=done) as advance,
        ):
            for index in range(done, len(self.batches)):
                tokens = self.processes.own_rows(self.batches[index]).to(self.device)
                scores = self.processes.total(self._fisher_sums(bank, tokens, formats))
                sums += scores.cpu().numpy() / len(self.batches)
                self._save_all(formats, files, sums, index + 1)
                advance("")

    def _fisher_sums(self, bank: Bank, tokens: Tensor, formats: list[Format]) -> Tensor:
        """(U, len(formats)) float64, of these rows."""
        shape = (len(self.space.units), len(formats), PARTIAL_SUMS)

        def totals() -> Tensor:
            sums = torch.zeros(shape, dtype=torch.float32, device=self.device)
            for part in self.micro.parts(tokens):
                self._fisher_pass(bank, part, formats, sums)
            return sums

        return self.micro.run(totals, len(tokens)).double().sum(-1)

    def _fisher_pass(
        self, bank: Bank, tokens: Tensor, formats: list[Format], totals: Tensor
    ) -> None:
        """One forward and backward of the unquantized model, which adds to totals (U, F, :)."""
        bank.set_full()
        errors = OutputErrors(self.model, formats, totals)
        handles = errors.watch()
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
            errors.check_all_met()
        finally:
            for handle in handles:
                handle.remove()

    # aumann_shapley: parts are batches ---------------------------------------------------------

    def _scan_path(self, formats: list[Format], files: list[ScoreFile]) -> None:
        sums, done = self._partial(formats, files)
        n_batches, family = len(self.batches), self.config.format_family
        with (
            searching_model(self.model, self.space, family, self.rules, path="line") as bank,
            checkpointing(self.model, False, "search"),
            progress("path scan", n_batches, done=done) as advance,
        ):
            for index in range(done, n_batches):
                batch = self.batches[index]
                tokens = self.processes.own_rows(batch).to(self.device)
                gains = self.processes.total(self._path_sums(bank, tokens)).cpu().numpy()
                from_each = gains[:, ::-1].cumsum(1)[:, ::-1] / (batch.numel() * n_batches)
                sums += np.pad(from_each, ((0, 0), (0, 1)))
                self._save_all(formats, files, sums, index + 1)
                advance("")

    def _path_sums(self, bank: Bank, tokens: Tensor) -> Tensor:
        """(U, F-1) float64: gain of each unit in each step, summed over these rows."""
        stops = self.config.format_family.stops
        points, weights = np.polynomial.legendre.leggauss(NODES)

        def totals() -> Tensor:
            shape = (len(self.space.units), len(stops) - 1)
            gains = torch.zeros(shape, dtype=torch.float64, device=self.device)
            for part in self.micro.parts(tokens):
                bank.set_full()
                with torch.no_grad():
                    reference = model_logits(self.model, part)
                for step, (low, high) in enumerate(pairwise(stops)):
                    half = (high - low) / 2
                    for point, weight in zip(points, weights, strict=True):
                        at = float(low + half * (1 + point))
                        slope = self._slope(bank, part, reference, at)
                        gains[:, step] -= float(half * weight) * slope
            return gains

        return self.micro.run(totals, len(tokens))

    def _slope(self, bank: Bank, tokens: Tensor, reference: Tensor, offset: float) -> Tensor:
        """(U,) float64: the KL summed over these rows, by each unit's offset, with all units at one offset."""
        n_units = len(self.space.units)
        offsets = torch.full((n_units,), offset, device=self.device, requires_grad=True)
        bank.set_soft(offsets)
        loss = kl_loss(model_logits(self.model, tokens), reference) * tokens.numel()
        (slope,) = torch.autograd.grad(loss, [offsets])
        return slope.double()

    # weights: one part -------------------------------------------------------------------------

    @torch.no_grad()
    def _scan_weights(self, formats: list[Format], files: list[ScoreFile]) -> None:
        layers = linear_layers(self.model)
        for block_format, file in zip(formats, files, strict=True):
            sums = np.zeros(len(self.space.units))
            if not isinstance(block_format, BlockFormat):  # bf16 loses nothing
                self._save_all([block_format], [file], sums[:, None], 1)
                continue
            rule = rule_of(self.rules, "weight", block_format)
            index = {unit.name: u for u, unit in enumerate(self.space.units)}
            weights = [
                (unit.name, weight)
                for unit in self.space.units
                for weight in {id(w): w for w in (layers[n].weight for n in unit.layers)}.values()
            ]
            for name, held in brought(self.model, weights):
                weight = whole(held)
                quantized = ops.fake_quant(weight, block_format, scale_rule=rule)
                error = quantized.float() - weight.float()
                sums[index[name]] += float(error.square().sum(dtype=torch.float64))
            self._save_all([block_format], [file], sums[:, None], 1)
