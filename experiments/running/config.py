"""Root configurations of the entry points: composed by Hydra, built into dataclasses, validated.

Every dataclass of the library is registered with its defaults, so each field can be set on the
command line and an unknown one is an error. Types and ranges are checked when the dataclasses are
built, before anything is loaded.
"""

import dataclasses
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from dmx.assignment.budget import Budget
from dmx.data import DataConfig, DataPair
from dmx.errors import DmxError
from dmx.evaluate.zero_shot import TASKS, check_settings
from dmx.formats import MX_FORMATS, BitUnit, BlockFormat, check_choice
from dmx.models import ModelConfig
from dmx.searching import SearchConfig
from dmx.searching.config import SEARCHES
from dmx.transforms.stage import TRANSFORMS
from dmx.weights.config import WEIGHTS, GptqConfig
from experiments.reporting.results import HEURISTICS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
OPERANDS = ("W+A", "W")
SAFETY = ("off", "calibrated")
BASELINES = ("bf16", "uniform", *HEURISTICS, *map(str, MX_FORMATS))
"""Of a search; the first two of a comparison. uniform is every MX format, a name that one."""
POLISH = "+polish"


_SETTINGS_OF = {
    "dmx": "searches=[differentiable]",
    "exact": "search=exact searches=[differentiable]",
    "cosine": "search=cosine searches=[differentiable]",
    "learned": "search=learned searches=[differentiable]",
    "polished": "search=polished searches=[differentiable+polish]",
}
"""What is often written into `searches` -> what is meant."""


class ConfigError(DmxError):
    """A setting that no single dataclass can refuse: wrong type, or at odds with another."""


@dataclass(kw_only=True)
class CalibrationConfig:
    """How calibration text becomes batches; every search of a run sees the same ones."""

    window: int = 1024
    """tokens a row"""
    batch_size: int = 4
    """rows a batch"""
    batches: int | None = None
    """Keep the first so many after the shuffle; null = all that the text gives."""
    seed: int = 0
    """Order in which windows are drawn from the text."""

    def __post_init__(self) -> None:
        _at_least("calibration.window", self.window, 2)
        _at_least("calibration.batch_size", self.batch_size, 1)
        if self.batches is not None:
            _at_least("calibration.batches", self.batches, 1)


@dataclass(kw_only=True)
class EvaluationConfig:
    """How results are measured."""

    window: int = 2048
    """tokens a window"""
    batch_size: int = 8
    """windows at once"""
    max_windows: int | None = None
    """Keep the first so many windows; null = the whole text."""
    operands: list[str] = field(default_factory=lambda: ["W+A"])
    """W+A: weights and inputs quantized. W: weights only."""

    def __post_init__(self) -> None:
        _at_least("evaluation.window", self.window, 2)
        _at_least("evaluation.batch_size", self.batch_size, 1)
        if self.max_windows is not None:
            _at_least("evaluation.max_windows", self.max_windows, 1)
        for name in self.operands:
            check_choice(name, OPERANDS, "evaluation.operands")


@dataclass(kw_only=True)
class EvalConfig:
    """What is measured on every row."""

    perplexity: bool = True
    """On the evaluation text."""
    zero_shot: bool = False
    """Accuracy on `tasks`, through lm-eval."""
    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    """lm-eval's names of multiple-choice tasks."""
    limit: int | None = None
    """Keep the first so many items of each task; null = all."""
    batch_size: int | str = "auto"
    """Requests at once; auto = as many as fit."""
    cache_folder: str | None = None
    """Where results are kept under a hash of what they depend on; null = zero_shot in the run
    folder. Runs that share a folder share results."""

    def __post_init__(self) -> None:
        if not (self.perplexity or self.zero_shot):
            raise ConfigError(
                "eval.perplexity=false and eval.zero_shot=false measure nothing; set one of them"
            )
        if self.zero_shot:
            check_settings(self.tasks, self.limit, self.batch_size)


@dataclass(kw_only=True)
class RunConfig:
    """Where and on what a run runs."""

    folder: str = ""
    """Receives everything; a run that died goes on in the same folder."""
    device: str = "auto"
    """auto | cpu | cuda | cuda:N. auto takes a GPU if there is one, and the record says which."""
    threads: int | None = None
    """CPU threads of torch; null = its own choice."""

    def __post_init__(self) -> None:
        if self.threads is not None:
            _at_least("run.threads", self.threads, 1)

    def torch_device(self) -> torch.device:
        """The device; ConfigError if the asked one is not there."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            what = str(error).partition("\n")[0]
            raise ConfigError(
                f"run.device={self.device!r}: {what}. Use auto, cpu or cuda."
            ) from error
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"run.device={self.device!r} is not supported. Use auto, cpu or cuda."
            )
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"run.device={self.device}: no CUDA device here. Use run.device=cpu.")
        return device


@dataclass(kw_only=True)
class SearchRun:
    """python -m experiments.search"""

    model: ModelConfig
    data: DataPair
    calibration: CalibrationConfig
    evaluation: EvaluationConfig
    budget: Budget
    search: SearchConfig
    baselines: list[str]
    """Rows beside the search: bf16, uniform (every MX format) or names of MX formats, kl and other
    heuristics."""
    pace: bool
    """Time a plain training step first, say how long the run will take here, and count its work in
    such steps."""
    rounding: str
    """nearest | gptq: every searched assignment is measured a second time, with rounded weights."""
    gptq: GptqConfig
    run: RunConfig

    def __post_init__(self) -> None:
        check_choice(self.rounding, WEIGHTS, "rounding")
        for name in self.baselines:
            check_choice(name, BASELINES, "baselines")
        if self.calibration.batches is not None:
            self.search.check_batches(self.calibration.batches)

    @property
    def uniform(self) -> list[BlockFormat]:
        """Formats that are measured everywhere alike."""
        return [f for f in MX_FORMATS if {"uniform", f.name} & set(self.baselines)]

    @property
    def measured_alone(self) -> list[str]:
        """Rows without a search."""
        return [*(["bf16"] if "bf16" in self.baselines else []), *(f.name for f in self.uniform)]

    @property
    def opponents(self) -> list[str]:
        """Heuristics beside the search."""
        return [n for n in HEURISTICS if n in self.baselines and n != self.search.name]


@dataclass(kw_only=True)
class CompareRun:
    """python -m experiments.compare"""

    model: ModelConfig
    data: DataPair
    calibration: CalibrationConfig
    evaluation: EvaluationConfig
    search: SearchConfig
    """Settings of every search; its name is taken from `searches`."""
    budgets: list[float]
    """Limits, in `unit`."""
    unit: BitUnit
    searches: list[str]
    """Names of searches; `name+polish` polishes its result for search.polish_rounds."""
    seeds: int
    """Calibration samples 0 .. seeds-1, each with every search and budget."""
    baselines: list[str]
    """bf16, uniform (every MX format)."""
    collect: str | None
    """Folder whose runs are joined into one report, instead of searching."""
    ablate: str | None
    """Path of an assignment.json whose units are lowered and raised one by one, instead."""
    eval: EvalConfig
    safety: str
    """off | calibrated: mor's safety net around every searched assignment, as a row of its own."""
    rounding: list[str]
    """nearest, gptq: how the weights of every searched assignment are rounded, each a row."""
    gptq: GptqConfig
    run: RunConfig

    def __post_init__(self) -> None:
        _at_least("seeds", self.seeds, 1)
        check_choice(self.safety, SAFETY, "safety")
        if not self.rounding:
            raise ConfigError("rounding is empty: rounding=[nearest], [gptq] or [nearest,gptq]")
        for name in self.rounding:
            check_choice(name, WEIGHTS, "rounding")
        for name in self.searches:
            if setting := _SETTINGS_OF.get(name):
                raise ConfigError(f"searches={name!r} names settings, not a search: {setting}")
            check_choice(name.removesuffix(POLISH), SEARCHES, "searches")
            # Refuses what cannot be polished, and learned rotations that nobody learns.
            settings = self.settings(name, self.search.seed, self.learner)
            if self.calibration.batches is not None:
                settings.check_batches(self.calibration.batches)
        polished = [name for name in self.searches if name.endswith(POLISH)]
        if bool(polished) != bool(self.search.polish_rounds):
            raise ConfigError(
                f"search.polish_rounds={self.search.polish_rounds}, and searches to polish: "
                f"{', '.join(polished) or 'none'}. Here a search is polished if its name says so: "
                "searches=[kl_per_bit,differentiable+polish] search.polish_rounds=12"
            )
        for name in self.baselines:
            check_choice(name, BASELINES[:2], "baselines")
        if not (self.collect or self.ablate) and not (self.budgets and self.searches):
            raise ConfigError(
                "budgets and searches must not be empty: budgets=[4.5,5] searches=[kl,fisher]"
            )

    @property
    def learner(self) -> str | None:
        """Of `searches` the first that learns rotations: those that cannot take its."""
        if self.search.transform != "learned" or self.search.transform_file is not None:
            return None
        learning = (n for n in self.searches if n.removesuffix(POLISH) == "differentiable")
        return next(learning, None)

    def settings(self, name: str, seed: int, learned: str | None = None) -> SearchConfig:
        """What one of `searches` is asked to do.

        Args:
            learned: path of the rotations of `learner`, for the searches that learn none.
        """
        rounds = self.search.polish_rounds if name.endswith(POLISH) else 0
        kind, file = name.removesuffix(POLISH), self.search.transform_file
        return dataclasses.replace(
            self.search, name=kind, seed=seed, polish_rounds=rounds,
            transform_file=file if kind == "differentiable" else file or learned,
        )  # fmt: skip


@dataclass(kw_only=True)
class EvaluateRun:
    """python -m experiments.evaluate"""

    model: ModelConfig
    data: DataPair
    calibration: CalibrationConfig
    """Only for the safety net."""
    evaluation: EvaluationConfig
    eval: EvalConfig
    assignments: list[str]
    """Paths of assignment.json files, of exported folders, of other tools' configs; or names of MX
    formats for uniform ones; or bf16."""
    transform: str
    """none | hadamard_block | hadamard_full | learned, of uniform formats; an assignment.json has its
    own."""
    transform_file: str | None
    """transform=learned: path of a transform.safetensors."""
    safety: str
    """off | calibrated: mor's safety net around every given assignment, as a row of its own."""
    run: RunConfig

    def __post_init__(self) -> None:
        check_choice(self.transform, TRANSFORMS, "transform")
        if (self.transform == "learned") != (self.transform_file is not None):
            raise ConfigError(
                f"transform={self.transform} with transform_file={self.transform_file}: learned "
                "rotations need the file that a search wrote, others take none. Set "
                "transform=learned transform_file=path/to/transform.safetensors"
            )
        check_choice(self.safety, SAFETY, "safety")
        if not self.assignments:
            names = ", ".join(map(str, MX_FORMATS))
            raise ConfigError(
                "assignments is empty: give paths of assignment.json files, bf16, or uniform "
                f"formats ({names}): assignments=[bf16,path/to/assignment.json]"
            )


def _at_least(setting: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{setting}={value} must be at least {low}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value fits a type hint made of scalars, lists, dicts, Literals and None."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(v, get_args(hint)[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, get_args(hint)[1]) for v in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


_OWN_NAMES = {
    "model": "model.id=<hub name or folder>",
    "budget": "budget.limit=<bits>",
    "data": "data=files data.calibration.files=[...] data.evaluation.files=[...]",
}
"""Groups whose files are examples -> how to give one's own."""


def check_overrides(arguments: Sequence[str], command: str) -> None:
    """Refuse, in a sentence, what Hydra answers with pages: files of configs/ that do not exist, and one
    budget for a comparison.

    Raises:
        ConfigError, FormatError
    """
    elsewhere = ("--config", "-cd", "-cp", "-cn", "hydra.searchpath")
    if any(a.lstrip("+").startswith(elsewhere) for a in arguments):
        return  # other files than ours
    for argument in arguments:
        group, has_value, value = argument.partition("=")
        if command == "compare" and group.split(".")[0] == "budget":
            raise ConfigError(f"{argument}: experiments.compare takes several: budgets=[4.5,5]")
        if not has_value or not (CONFIGS / group).is_dir() or set("($") & set(value):
            continue
        known = tuple(sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")))
        for name in value.strip("[]'\"").split(","):
            name = name.strip(" '\"").removeprefix("./").removesuffix(".yaml")
            if name in ("", "null", *known):
                continue
            if group in _OWN_NAMES:
                raise ConfigError(
                    f"{group}={name} is no file of configs/{group}. For your own: {_OWN_NAMES[group]}. "
                    f"Files: {', '.join(known)}."
                )
            check_choice(name, known, group)


_T = TypeVar("_T")


def build(cls: type[_T], node: dict[str, Any], setting: str = "") -> _T:
    """A dataclass from composed values; nested ones too.

    Raises:
        ConfigError: an unknown key or a value of the wrong type; says which and what is allowed.
    """
    hints = get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in node.items():
        path = f"{setting}.{key}" if setting else key
        check_choice(key, tuple(names), f"{setting or 'config'} key")
        hint = hints[key]
        nested = next((o for o in (hint, *get_args(hint)) if dataclasses.is_dataclass(o)), None)
        if nested is not None and isinstance(value, dict):
            values[key] = build(nested, value, path)  # type: ignore[arg-type]
        elif _fits(value, hint):
            values[key] = value
        elif get_origin(hint) is Literal:
            check_choice(value, get_args(hint), path)
        else:
            shown = getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint)
            way_out = (
                f": {path}=[{value}]" if get_origin(hint) is list and _fits([value], hint) else ""
            )
            raise ConfigError(f"{path}={value!r} has the wrong type: expected {shown}{way_out}")
    missing = [
        f.name
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{setting or 'config'}: {', '.join(missing)} not set")
    return cls(**values)


def build_root(cls: type[_T], cfg: DictConfig) -> _T:
    node = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(node, dict)
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return build(cls, {str(k): v for k, v in node.items() if k in known})


def _defaults(cls: type) -> dict[str, Any]:
    """Field -> default; fields without one must come from the group's file or the command line."""
    node: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.default is not dataclasses.MISSING:
            node[f.name] = f.default
        elif f.default_factory is not dataclasses.MISSING:
            node[f.name] = f.default_factory()
    return node


def register() -> None:
    """The fields of every group with their defaults, as the first entry of each root config."""
    schema = {
        "model": _defaults(ModelConfig),
        "data": {"calibration": _defaults(DataConfig), "evaluation": _defaults(DataConfig)},
        "calibration": _defaults(CalibrationConfig),
        "evaluation": _defaults(EvaluationConfig),
        "run": _defaults(RunConfig),
    }
    rounded = {"gptq": _defaults(GptqConfig)}
    search = rounded | {"search": _defaults(SearchConfig), "budget": _defaults(Budget)}
    store = ConfigStore.instance()
    measured = {"eval": _defaults(EvalConfig)}
    store.store(name="_evaluate", node=schema | measured, package="_global_")
    store.store(name="_search", node=schema | search, package="_global_")
    compare = rounded | {"search": _defaults(SearchConfig)}
    store.store(name="_compare", node=schema | measured | compare, package="_global_")
