"""Which rows a search and a comparison measure, in what order, and with which settings."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dmx.assignment.budget import Budget
from dmx.formats import BLOCK_FORMATS, MX_FORMATS, BitUnit, BlockFormat, check_choice
from dmx.models import ModelConfig, meta_model
from dmx.searching import SearchConfig, search_space
from dmx.searching.config import SCANS, SEARCHES, PolishConfig, RotationConfig, SearchSettings

from ..reporting.record import HEURISTICS
from .bench import Bench, check_windows
from .polishing import automatic_rounds, polished_rounds, with_rounds
from .settings import CalibrationConfig, ConfigError, EvaluationConfig, check_at_least

_POLISH = "+polish"
_SETTINGS_OF = {
    "dmx": "searches=[differentiable]",
    "exact": "search=exact searches=[differentiable]",
    "cosine": "search=cosine searches=[differentiable]",
    "learned": "search=learned searches=[differentiable]",
    "polished": "search=polished searches=[differentiable+polish]",
}
"""What is often written into `searches` -> what is meant."""


@dataclass(frozen=True)
class Asked:
    """One of the `searches` of a comparison: `kl_per_bit`, `differentiable+polish`."""

    text: str
    """As it was written; names the folder of its files."""
    search: str
    polish: bool

    @classmethod
    def of(cls, text: str) -> "Asked":
        """Raises ConfigError or FormatError for what is no search."""
        if setting := _SETTINGS_OF.get(text):
            raise ConfigError(f"searches={text!r} names settings, not a search: {setting}")
        search = text.removesuffix(_POLISH)
        check_choice(search, SEARCHES, "searches")
        return cls(text, search, text != search)

    @classmethod
    def all(cls, texts: Sequence[str]) -> "tuple[Asked, ...]":
        """Of each text; raises as `of`."""
        return tuple(map(cls.of, texts))

    @property
    def learns(self) -> bool:
        """It is the search that can learn rotations."""
        return self.search == "differentiable"


@dataclass(frozen=True)
class Comparison:
    """Searches x budgets x seeds, with one set of settings."""

    searches: tuple[Asked, ...]
    settings: SearchSettings
    """Of every search, each taking what it uses; its name and polish are taken from `searches`."""
    budgets: Sequence[float]
    unit: BitUnit
    seeds: int

    @property
    def names(self) -> list[str]:
        """Of the searches, polished or not."""
        return [asked.search for asked in self.searches]

    def check(self, calibration_batches: int | None, *, needs_all: bool) -> None:
        """Refuse what cannot be polished, learned rotations that nobody learns, and a polish that no
        search is asked for; raises the errors of these settings.

        Args:
            needs_all: budgets and searches must not be empty.
        """
        check_at_least("seeds", self.seeds, 1)
        if needs_all and not (self.budgets and self.searches):
            raise ConfigError(
                "budgets and searches must not be empty: budgets=[4.5,5] searches=[kl,fisher]"
            )
        learned = None if self.learner is None else self.learner.text
        for asked in self.searches:
            settings = self.of(asked, self.settings.seed, learned)
            if calibration_batches is not None:
                settings.check_batches(calibration_batches)
        polished = [asked.text for asked in self.searches if asked.polish]
        if bool(polished) != bool(self.settings.polish.rounds):
            raise ConfigError(
                f"search.polish.rounds={self.settings.polish.rounds}, and searches to polish: "
                f"{', '.join(polished) or 'none'}. Here a search is polished if its name says so: "
                "searches=[kl_per_bit,differentiable+polish] search.polish.rounds=12"
            )
        unused = self.settings.unused(asked.search for asked in self.searches)
        if needs_all and unused:
            texts = ",".join(asked.text for asked in self.searches)
            raise ConfigError(
                f"{unused[0]}: none of searches=[{texts}] uses it. Leave it out, or add a search that "
                "does."
            )

    def check_shapes(
        self,
        model: ModelConfig,
        calibration: CalibrationConfig,
        evaluation: EvaluationConfig | None,
        training: CalibrationConfig | None,
    ) -> None:
        """Refuse windows and budgets that do not fit the model, before its weights load; raises the
        errors of the library."""
        meta = meta_model(model)
        check_windows(meta, calibration, evaluation, training)
        space = search_space(meta, self.settings)
        for limit in self.budgets:
            space.check_budget(Budget(limit, self.unit), warn=False)

    @property
    def learner(self) -> Asked | None:
        """The first search that learns rotations: those that cannot take its."""
        if self.settings.transform != "learned" or self.settings.rotation.file is not None:
            return None
        return next((asked for asked in self.searches if asked.learns), None)

    def of(self, asked: Asked, seed: int, learned: str | None = None) -> SearchConfig:
        """What one of the searches is asked to do.

        Args:
            learned: path of the rotations of `learner`, for the searches that learn none.
        """
        takes = learned is not None and not asked.learns
        return self.settings.for_search(
            asked.search,
            seed=seed,
            polish=self.settings.polish if asked.polish else PolishConfig(),
            rotation=RotationConfig(file=learned) if takes else self.settings.rotation,
        )

    def measure(self, bench: Bench, baselines: Sequence[str]) -> None:
        """The rows of all, bf16 and uniform formats first where asked."""
        if "bf16" in baselines:
            bench.unquantized()
        uniform = uniform_settings(self.settings)
        for block_format in uniform_formats(baselines):
            bench.uniform(block_format, uniform)
        # The search that learns rotations first: at each budget and seed the others take its.
        learner = self.learner
        searches = sorted(self.searches, key=lambda asked: asked != learner)
        # Seeds outermost: a run that is stopped early then still compares all methods on one seed.
        for offset, limit, asked in itertools.product(range(self.seeds), self.budgets, searches):
            seed = self.settings.seed + offset
            place = f"{limit:g}-seed{seed}"
            learned = None
            if learner is not None:
                learned = str(bench.run.path(f"{learner.text}-{place}/transform.safetensors"))
            bench.searched(
                self.of(asked, seed, learned), Budget(limit, self.unit),
                name="assignment", folder=f"{asked.text}-{place}",
            )  # fmt: skip


BASELINE_WEIGHTS = ("same", "nearest")


@dataclass(frozen=True)
class SearchPlan:
    """One search and what stands beside it."""

    search: SearchSettings
    """Of the search; `score_batches` also of the baselines that scan."""
    budget: Budget
    baselines: Sequence[str]
    """bf16, uniform (every MX format) or names of MX formats, heuristics."""
    weights: str
    """nearest | mse | local_hessian | gptq | learned"""
    baseline_weights: str
    """Of `BASELINE_WEIGHTS`: whether heuristics get `weights`, too."""
    quantized: Sequence[str]
    """Of each assignment: W+A, W."""

    @property
    def stages(self) -> list[str]:
        """What the weights of the search's assignment are, one row each."""
        return list(dict.fromkeys(("nearest", self.weights)))

    @property
    def opponent_stages(self) -> list[str]:
        """What those of the heuristics' are."""
        return ["nearest"] if self.baseline_weights == "nearest" else self.stages

    @property
    def measured_alone(self) -> list[str]:
        """Rows without a search."""
        full = ["bf16"] if "bf16" in self.baselines else []
        return [*full, *(f.name for f in uniform_formats(self.baselines))]

    @property
    def opponents(self) -> list[str]:
        """Heuristics beside the search."""
        return [n for n in HEURISTICS if n in self.baselines and n != self.search.name]

    def check(self, calibration_batches: int | None) -> None:
        """Refuse what the search does not use, and what does not go together; raises the errors of these
        settings."""
        scans = set(SCANS) & set(self.opponents)
        self.search.check_used(also=["score_batches"] if scans else [])
        asked = [with_rounds(self.search, polished_rounds()).for_search(self.search.name)]
        asked += [self.opponent(name, "") for name in self.opponents]
        for settings in asked:
            if calibration_batches is not None:
                settings.check_batches(calibration_batches)

    def settled(self, bench: Bench) -> tuple["SearchPlan", dict[str, Any]]:
        """With a number where search.polish.rounds=auto, and facts of it for the record."""
        if self.search.polish.rounds != "auto":
            return self, {}
        batches, run = len(bench.batches(self.search.seed)), bench.run
        is_whole = run.memory != "block" and not run.shards
        rounds, because = automatic_rounds(self.weights, batches, run.device, is_whole=is_whole)
        run.say(f"search.polish.rounds=auto is {rounds}: {because}")
        facts = {"polish": {"rounds": rounds, "because": because}}
        return replace(self, search=with_rounds(self.search, rounds)), facts

    def opponent(self, name: str, learned: str | None) -> SearchConfig:
        """What another search, `uniform` too, is asked to do beside this one: the same, unpolished.

        Args:
            learned: path of the rotations that this one learned.
        """
        learns = self.search.learns_rotation
        rotation = RotationConfig(file=learned) if learns else self.search.rotation
        return self.search.for_search(name, polish=PolishConfig(), rotation=rotation)

    def measure(self, bench: Bench) -> None:
        """The rows; the search is the last one, unless the others have the rotations that it learns."""
        if "bf16" in self.baselines:
            bench.unquantized()
        own, learned = self.search.for_search(self.search.name), None
        if own.learns_rotation:
            bench.searched(own, self.budget, name="assignment")
            learned = str(bench.run.path("transform.safetensors"))
        flat = (
            uniform_settings(self.search) if learned is None else self.opponent("uniform", learned)
        )
        for block_format in uniform_formats(self.baselines):
            bench.uniform(block_format, flat)
        for name in self.opponents:
            settings = self.opponent(name, learned)
            bench.searched(settings, self.budget, name=name, weights=self.opponent_stages)
        if not own.learns_rotation:
            bench.searched(own, self.budget, name="assignment")


def uniform_settings(settings: SearchSettings) -> SearchConfig:
    """Of uniform rows. Where each search learns rotations anew, they have what these start from, and where
    inputs are selected for a search's formats, all are rotated."""
    learns = settings.transform == "learned" and settings.rotation.file is None
    if learns or settings.transform == "hadamard_selected":
        start = {"transform": "hadamard_block", "rotation": RotationConfig()}
        return settings.for_search("uniform", **start)
    return settings.for_search("uniform")


def uniform_formats(baselines: Sequence[str]) -> list[BlockFormat]:
    """Formats that are measured everywhere alike: every MX format for `uniform`, and those that are named."""
    every = MX_FORMATS if "uniform" in baselines else ()
    return [f for f in BLOCK_FORMATS.values() if f in every or f.name in baselines]
