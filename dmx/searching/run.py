"""`search`: one function for every method; checks first, then searches."""

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dmx.applying.apply import is_applied
from dmx.applying.calibrate import calibrated_layers, with_ranges
from dmx.applying.sharing import share_scales, state_scales_of_experts
from dmx.assignment.assignment import Assignment, make_assignment
from dmx.assignment.budget import Budget
from dmx.assignment.facts import KEPT_OF, Kept, SearchFacts
from dmx.assignment.space import SearchSpace
from dmx.data.batches import batches_sha256, list_batches
from dmx.errors import ModelError
from dmx.files import check_writable, sha256
from dmx.formats import BlockFormat
from dmx.kernels.losses import cross_entropy
from dmx.models.backbone import text_config, unread_layers
from dmx.models.experts import linear_experts
from dmx.models.finite import check_finite_weights, not_finite
from dmx.models.identity import model_fingerprint
from dmx.models.linears import FUSED_GROUPS, plain_model
from dmx.models.running import evaluating, model_logits
from dmx.models.searchable import check_differentiable
from dmx.models.sharding import refuse_pieces
from dmx.models.streaming import stream_of
from dmx.processes import Processes, own_rank
from dmx.progress import Stopwatch
from dmx.searching.adaptive import (
    FEWEST_BATCHES,
    Jury,
    adaptive_steps,
    held_kls,
    split_batches,
    start_from,
)
from dmx.searching.config import SCANS, SearchConfig, SearchSettings
from dmx.searching.differentiable import DifferentiableSearch
from dmx.searching.heuristics import heuristic_choice
from dmx.searching.polish import Polish
from dmx.searching.result import SearchResult
from dmx.searching.scan import Scan
from dmx.searching.scores import ScoreTimes
from dmx.searching.space import search_space, seeing_inputs
from dmx.searching.transforming import (
    asked_transform,
    selected_transform,
    selecting_config,
    transformed_layers,
)
from dmx.searching.unreached import (
    Unreached,
    unreached_alone,
    warn_of_rare_experts,
    warn_of_unreached,
)
from dmx.transforms.stage import Transform, transformed


def search(
    model: nn.Module,
    batches: Iterable[Tensor],
    budget: Budget,
    config: SearchConfig,
    *,
    folder: str | Path | None = None,
    score_folder: str | Path | None = None,
) -> SearchResult:
    """Choose a format for every unit of a model so that the average bits stay within a budget.

    Args:
        model: a causal language model of transformers, or one called with `input_ids=` that
            returns an object with `.logits`; fp32, bf16 or fp16, on any device.
        batches: int64 token ids (batch, length), all of one shape; cycled, reshuffled by
            `config.seed` each pass. A generator is listed once.
        folder: makes the search resumable; a differentiable one leaves history.jsonl and
            offsets.npz there, a polish polish.jsonl.
        score_folder: where scans keep their score files; default `folder`/scores. Searches that
            share it share scans.

    Returns:
        The result; the model, its mode and its requires_grad are as they were, also after an
        exception.

    Raises:
        TypeError: budget or config is not of its class. BudgetError: unreachable. ModelError, FormatError, DataError: see
            their messages; a weight or a loss that is not finite is a ModelError that names where.
        RunError: the folder holds another search, or cannot be written.
    """
    _check_types(budget, config)
    model = plain_model(model)
    if is_applied(model):
        raise ModelError("an assignment is applied to this model; call dmx.restore(model) first")
    if stream_of(model) is not None:
        config.check_by_block([config.name])
    _check_weights(model)
    _check_pieces(model, config)
    with linear_experts(model, config.experts_form):
        return _search(model, batches, budget, config, folder, score_folder)


def _search(
    model: nn.Module,
    batches: Iterable[Tensor],
    budget: Budget,
    config: SearchConfig,
    folder: str | Path | None,
    score_folder: str | Path | None,
) -> SearchResult:
    """`search` of a model whose experts are linear layers."""
    space = search_space(model, config)
    space.check_budget(budget)
    _warn_of_architecture(model, config)
    _warn_of_input_rules(config)
    listed = list_batches(batches, model)
    device = next(model.parameters()).device
    hashed = batches_sha256(listed)
    Processes(device).check_same_batches(hashed)
    config.check_batches(len(listed))
    check_finite_weights(model)
    where = None if folder is None else Path(folder)
    if where is not None and own_rank() == 0:
        check_writable(where)
    found = Unreached(model, listed, hashed, where, config.rows_at_a_time())
    warn_of_rare_experts(found.expert_tokens, config)
    unreached = unreached_alone(found.layers, model, config)
    if unreached or unread_layers(model):
        space = search_space(model, config, unreached=unreached)
        warn_of_unreached(unreached, space, config)
        space.check_budget(budget)
    if score_folder is None and where is not None:
        score_folder = where / "scores"
    scores = None if score_folder is None else Path(score_folder)
    job = _Job(model, listed, hashed, space, budget, config, where, scores, unreached)
    # Whatever mode the caller is in: gradients are needed, and numbers must not depend on autocast.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        if not (config.descends or config.name in SCANS or config.polish.count):
            # The others run the model themselves, and look at what it gives.
            _check_outputs(model, listed[0][:1])
        outcome = job.run()
    found.keep()
    assignment = make_assignment(
        job.space,
        outcome.choice,
        model,
        scale_rules=config.scale_rules.by_format(),
        budget=budget,
        search=config.summary(outcome.kept, outcome.kept_because, descended=bool(outcome.history)),
    )
    assignment = outcome.transform.attach(assignment, model)
    assignment = replace(assignment, expert_tokens=found.expert_tokens or None)
    if (loader := config.runtime) is not None and loader.shares_scales:
        assignment = share_scales(model, assignment, per_tensor=loader.per_tensor)
        if loader.per_tensor:
            layers = calibrated_layers(assignment, static=True)
            assignment = with_ranges(model, assignment, layers, listed, config.rows_at_a_time())
    assignment = state_scales_of_experts(model, assignment)
    return SearchResult(
        assignment=assignment,
        units=tuple(u.name for u in space.units),
        preference=outcome.preference,
        seconds=job.clock.seconds,
        score_seconds=job.score_times.seconds,
        history=outcome.history,
        polish=outcome.rounds,
        raw_offsets=outcome.raw_offsets,
        cuda_graph=outcome.cuda_graph,
        warnings=outcome.warnings,
    )


@dataclass(frozen=True)
class _Outcome:
    """What the stages of a search hand on."""

    transform: Transform
    choice: np.ndarray
    preference: np.ndarray
    history: list[dict[str, Any]] = field(default_factory=list)
    raw_offsets: np.ndarray | None = None
    warnings: list[str] = field(default_factory=list)
    cuda_graph: str = "off"
    rounds: list[dict[str, Any]] = field(default_factory=list)
    kept: Kept | None = None
    kept_because: str | None = None
    """Both of an adaptive search."""


class _Job:
    """The stages of one search, on a model that is transformed as they say."""

    def __init__(
        self,
        model: nn.Module,
        batches: list[Tensor],
        hashed: str,
        space: SearchSpace,
        budget: Budget,
        config: SearchConfig,
        folder: Path | None,
        score_folder: Path | None,
        unreached: Sequence[str],
    ) -> None:
        """hashed: `batches_sha256` of the batches."""
        self.model, self.batches, self.hashed, self.space = model, batches, hashed, space
        self.unreached = unreached
        self.budget, self.config = budget, config
        self.folder, self.score_folder = folder, score_folder
        self.clock = Stopwatch()
        self.score_times = ScoreTimes(self.clock)
        self.identity = model_fingerprint(model)
        """Of the untransformed model."""

    def run(self) -> _Outcome:
        """All stages; rotations are learned on the model as it is."""
        model, layers = self.model, transformed_layers(self.space)
        if self.config.learns_rotation:
            outcome = self.descend(Transform("hadamard_block"))  # what they start from
            with transformed(model, outcome.transform, layers):
                return self.polish(outcome)
        transform = self.transform()
        with transformed(model, transform, layers):
            self.space = self.seeing_inputs(self.space)
            if self.config.name == "adaptive":
                return self.polish(self.adapt(transform))
            descends = self.config.descends
            return self.polish(self.descend(transform) if descends else self.rank(transform))

    def seeing_inputs(self, space: SearchSpace) -> SearchSpace:
        """Of the model with its transform."""
        return seeing_inputs(self.model, space, self.batches, self.config.rows_at_a_time())

    def transform(self) -> Transform:
        """The one that is asked for; inputs are selected here."""
        if self.config.transform != "hadamard_selected":
            return asked_transform(self.config, self.space)
        config = selecting_config(self.config, len(self.batches))
        space = search_space(self.model, config, unreached=self.unreached)
        measured = []
        for transform in (Transform(), Transform("hadamard_block")):
            with transformed(self.model, transform, transformed_layers(space)):
                seen = self.seeing_inputs(space)
                measured.append(self.scan(transform, config, seen).kl([0])[:, 0])
        return selected_transform(self.space, space, *measured)

    def scan(self, transform: Transform, config: SearchConfig, space: SearchSpace) -> Scan:
        """Of a model that is transformed so."""
        used = batches_sha256(self.batches[: config.score_batches])
        return Scan(
            self.model,
            self.batches,
            space,
            config,
            fingerprint=self.identity | {"transform": transform.key(), "batches": used},
            folder=self.score_folder,
            times=self.score_times,
        )

    def adapt(self, transform: Transform) -> _Outcome:
        """By scores, then by gradient from there where there is text enough, and what is best on other text."""
        config = self.config
        found: dict[Kept, _Outcome] = {
            "scores": self.rank(transform, config.for_search("kl_per_bit"))
        }
        learned, held = split_batches(self.batches)
        if not held:
            few = f"{len(self.batches)} batches are too few to judge another choice on (from {FEWEST_BATCHES} on)"
            return self.scores_kept(found["scores"], "scores", few)
        found["fisher"] = self.rank(transform, config.for_search("fisher"))
        jury = Jury(partial(held_kls, self.model, self.space, config, held))
        better = jury.best({whose: outcome.choice for whose, outcome in found.items()})
        scored = found[better]
        start = start_from(scored.preference, self.space, self.budget, scored.choice)
        steps = adaptive_steps(config, len(self.batches))
        descended = self.descend(transform, learned, replace(config, steps=steps), start)
        found["descent"] = descended
        kept = jury.best({whose: outcome.choice for whose, outcome in found.items()})
        why = (
            f"KL on {len(held)} batches held out minus that of kl_per_bit, nats/token: {jury} "
            f"(from {KEPT_OF[better]})"
        )
        taken = found[kept]
        history = replace(descended, choice=taken.choice, preference=taken.preference)
        if np.array_equal(descended.choice, taken.choice):
            return replace(history, kept=kept, kept_because=why)
        return self.scores_kept(history, kept, why)

    def scores_kept(self, outcome: _Outcome, kept: Kept, why: str) -> _Outcome:
        """The outcome, and a warning that says why no descent chose it."""
        text = f"search.name=adaptive: {why}; the choice is that of the scores ({KEPT_OF[kept]})."
        warnings.warn(text, stacklevel=5)
        said = [*outcome.warnings, text]
        return replace(outcome, kept=kept, kept_because=why, warnings=said)

    def descend(
        self,
        transform: Transform,
        batches: list[Tensor] | None = None,
        config: SearchConfig | None = None,
        start: np.ndarray | None = None,
    ) -> _Outcome:
        """By gradient.

        Args:
            batches, config: None: all, and as it is asked for.
            start: see `DifferentiableSearch`.
        """
        descent = DifferentiableSearch(
            self.model,
            batches or self.batches,
            self.space,
            self.budget,
            config or self.config,
            folder=self.folder,
            fingerprint=self._fingerprint(transform),
            start=start,
        )
        descent.clock = self.clock
        descent.run()
        learned = descent.rotations
        return _Outcome(
            transform if learned is None else learned.transform(),
            descent.projected_choice(),
            descent.preference(),
            history=descent.history,
            raw_offsets=np.stack(descent.raw_rows),
            warnings=list(descent.warnings),
            cuda_graph="on" if descent.uses_graph else "off",
        )

    def rank(self, transform: Transform, config: SearchConfig | None = None) -> _Outcome:
        """By what was measured of each unit, or by nothing.

        Args:
            config: None: as it is asked for.
        """
        config = config or self.config
        scan = self.scan(transform, config, self.space)
        choice, preference = heuristic_choice(scan, self.space, self.budget, config)
        return _Outcome(transform, choice, preference)

    def polish(self, outcome: _Outcome) -> _Outcome:
        """The outcome, made better where the config asks for it."""
        if not self.config.polish.count:
            return outcome
        polish = Polish(
            self.model,
            self.batches,
            self.space,
            self.budget,
            self.config,
            start=outcome.choice,
            folder=self.folder,
            fingerprint=self._fingerprint(outcome.transform, with_polish=True),
            clock=self.clock,
        )
        polish.run()
        preference = polish.gains.preference()
        return replace(outcome, choice=polish.choice, preference=preference, rounds=polish.rows)

    def _fingerprint(self, transform: Transform, *, with_polish: bool = False) -> str:
        """Hash of everything that the numbers of a stage depend on, but for code and machine; without
        its polish, which may be added to a search that has ended."""
        settings = asdict(self.config)
        del settings["descent"]["checkpoint_every"], settings["oom"]
        del settings["descent"]["keep_reference"]  # changes no number
        settings["descent"]["path"] = self.config.paths  # what auto stands for
        del settings["rotation"]["file"]  # its content is in the transform's key
        if not with_polish:
            del settings["polish"]
        body = {
            "config": settings,
            "budget": asdict(self.budget),
            "batches": self.hashed,
            **self.identity,
            "transform": transform.key(),
        }
        return sha256(json.dumps(body, sort_keys=True).encode())


def _check_types(budget: object, config: object) -> None:
    if not isinstance(budget, Budget):
        raise TypeError(
            f"budget must be a dmx.Budget, got {budget!r}: dmx.Budget(5.0), or "
            'dmx.Budget(5.25, unit="bits_per_element")'
        )
    if not isinstance(config, SearchConfig):
        raise TypeError(f"config must be a dmx.SearchConfig, got {config!r}: dmx.SearchConfig()")


def _warn_of_architecture(model: nn.Module, config: SearchSettings) -> None:
    """Where it is not known which layers the target's runtime merges, or known that it reads no files of ours."""
    loader = config.runtime
    if loader is None or loader.architectures is None:
        return
    own = getattr(text_config(model), "model_type", type(model).__name__)
    if own not in loader.architectures:
        warnings.warn(
            f"search.target={config.target}: which layers of {own!r} {loader.name} merges is not known here; "
            f"taken are those that it merges elsewhere: {', '.join('/'.join(g) for g in FUSED_GROUPS)}.",
            stacklevel=3,
        )
    if own in loader.renamed:
        warnings.warn(
            f"search.target={config.target}: {loader.name} reads the experts of {own!r} under other names than exports "
            "for it hold, and cannot load them. search.target=vllm is for files that it loads.",
            stacklevel=3,
        )


def _warn_of_input_rules(config: SearchSettings) -> None:
    """Where inputs are measured by other rules than the target's runtime has."""
    foreign, runtime = config.foreign_input_rules(), config.runtime
    if not foreign or runtime is None:
        return
    asked = ", ".join(f"{name} {rule}" for name, rule in foreign.items())
    own = ", ".join(f"{name} {' or '.join(runtime.input_rules[name])}" for name in foreign)
    warnings.warn(
        f"search.scale_rules.input: inputs are scaled by {asked}, as asked; {runtime.name} of "
        f"search.target={config.target} scales them by {own}, so that what runs there is not what is measured here. "
        "search.scale_rules.input=auto takes its rules.",
        stacklevel=3,
    )


def _check_weights(model: nn.Module) -> None:
    check_differentiable(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"{name} is on the meta device: load the model's weights first")
        if parameter.dtype == torch.float64:
            raise ModelError(
                f"{name} is float64; formats are defined on float32, bfloat16 and float16. Convert "
                "the model first: model.float()"
            )


def _check_pieces(model: nn.Module, config: SearchConfig) -> None:
    """Refuse what a sharded model cannot do before the search spends anything."""
    full = {"search.transform=hadamard_full": config.transform == "hadamard_full"}
    refuse_pieces(model, full, "search.transform=hadamard_block")
    halves = {"search.oom=halve": config.oom == "halve"}
    refuse_pieces(model, halves, "search.oom=stop with a lower search.micro_batch")


@torch.no_grad()
def _check_outputs(model: nn.Module, row: Tensor) -> None:
    """Raise ModelError where the loss of the unquantized model on a row (1, length) is not finite."""
    with evaluating(model):
        tokens = row.to(next(model.parameters()).device)
        loss = cross_entropy(model_logits(model, tokens), tokens)
    if not bool(loss.isfinite()):
        raise not_finite(
            model, [row], "the loss of the unquantized model", "on the calibration text"
        )


def uniform_assignment(
    model: nn.Module, block_format: BlockFormat, config: SearchSettings
) -> Assignment:
    """Every searched layer in one format, whatever the family of the config, with its transform."""
    with linear_experts(model, config.experts_form):
        space = search_space(model, replace(config, choices="joint"))
        alone = replace(space, formats=(block_format,))
        choice = np.zeros(len(space.units), dtype=np.int64)
        facts = SearchFacts(name="uniform", seed=config.seed)
        made = make_assignment(
            alone, choice, model, scale_rules=config.scale_rules.by_format(), search=facts
        )
        made = asked_transform(config, alone).attach(made, model)
        if any(p.is_meta for p in model.parameters()):
            return made
        return state_scales_of_experts(model, made)
