"""Which rows a search and a comparison measure, in what order, and with which settings."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dmx.assignment.budget import Budget
from dmx.formats import MX_FORMATS, BitUnit, BlockFormat, check_choice
from dmx.models import ModelConfig, meta_model
from dmx.searching import SearchConfig, search_space
from dmx.searching.config import SEARCHES

from ..reporting.record import HEURISTICS
from .bench import Bench, check_windows
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
    settings: SearchConfig
    """Of every search; its name and polish are taken from `searches`."""
    budgets: Sequence[float]
    unit: BitUnit
    seeds: int

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
        if bool(polished) != bool(self.settings.polish_rounds):
            raise ConfigError(
                f"search.polish_rounds={self.settings.polish_rounds}, and searches to polish: "
                f"{', '.join(polished) or 'none'}. Here a search is polished if its name says so: "
                "searches=[kl_per_bit,differentiable+polish] search.polish_rounds=12"
            )

    def check_shapes(
        self,
        model: ModelConfig,
        *windows: CalibrationConfig | EvaluationConfig | None,
    ) -> None:
        """Refuse windows and budgets that do not fit the model, before its weights load; raises the
        errors of the library."""
        meta = meta_model(model)
        check_windows(meta, *windows)
        space = search_space(meta, self.settings)
        for limit in self.budgets:
            space.check_budget(Budget(limit, self.unit), warn=False)

    @property
    def learner(self) -> Asked | None:
        """The first search that learns rotations: those that cannot take its."""
        if self.settings.transform != "learned" or self.settings.transform_file is not None:
            return None
        return next((asked for asked in self.searches if asked.learns), None)

    def of(self, asked: Asked, seed: int, learned: str | None = None) -> SearchConfig:
        """What one of the searches is asked to do.

        Args:
            learned: path of the rotations of `learner`, for the searches that learn none.
        """
        file = self.settings.transform_file
        return dataclasses.replace(
            self.settings,
            name=asked.search,
            seed=seed,
            polish_rounds=self.settings.polish_rounds if asked.polish else 0,
            transform_file=file if asked.learns else file or learned,
        )

    def measure(self, bench: Bench, baselines: Sequence[str]) -> None:
        """The rows of all, bf16 and uniform formats first where asked."""
        uniform = self.settings
        if uniform.learns_rotation:  # by each search anew; uniform rows have what they start from
            uniform = dataclasses.replace(uniform, transform="hadamard_block")
        if "bf16" in baselines:
            bench.unquantized()
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


@dataclass(frozen=True)
class SearchPlan:
    """One search and what stands beside it."""

    search: SearchConfig
    budget: Budget
    baselines: Sequence[str]
    """bf16, uniform (every MX format) or names of MX formats, heuristics."""
    weights: str
    """nearest | gptq | learned"""
    quantized: Sequence[str]
    """Of each assignment: W+A, W."""

    @property
    def measured_alone(self) -> list[str]:
        """Rows without a search."""
        full = ["bf16"] if "bf16" in self.baselines else []
        return [*full, *(f.name for f in uniform_formats(self.baselines))]

    @property
    def opponents(self) -> list[str]:
        """Heuristics beside the search."""
        return [n for n in HEURISTICS if n in self.baselines and n != self.search.name]

    def measure(self, bench: Bench) -> None:
        """The rows; the search is the last one, unless the others have the rotations that it learns."""
        if "bf16" in self.baselines:
            bench.unquantized()
        shared = self.search
        if self.search.learns_rotation:
            bench.searched(self.search, self.budget, name="assignment")
            learned = bench.run.path("transform.safetensors")
            shared = dataclasses.replace(self.search, transform_file=str(learned))
        for block_format in uniform_formats(self.baselines):
            bench.uniform(block_format, shared)
        for name in self.opponents:
            opponent = dataclasses.replace(shared, name=name, polish_rounds=0)
            bench.searched(opponent, self.budget, name=name)
        if not self.search.learns_rotation:
            bench.searched(self.search, self.budget, name="assignment")


def uniform_formats(baselines: Sequence[str]) -> list[BlockFormat]:
    """Formats that are measured everywhere alike: every MX format, or those that are named."""
    return [f for f in MX_FORMATS if {"uniform", f.name} & set(baselines)]
