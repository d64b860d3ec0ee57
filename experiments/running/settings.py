"""Settings that several commands share, and their checks. The dataclasses of the library are used as
they are; each command's own schema is beside its entry point."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dmx.data import DataPair
from dmx.errors import DmxError
from dmx.evaluate.zero_shot import TASKS, check_settings
from dmx.formats import BLOCK_FORMATS, SWITCH, check_choice
from dmx.models import ModelConfig
from dmx.models.streaming import MEMORIES
from dmx.processes import launched_sharded, started_together
from dmx.searching import SearchSettings
from dmx.weights.config import (
    GptqConfig,
    LocalHessianConfig,
    check_local_hessian,
    check_searched_scales,
)
from dmx.weights.learn_config import LearnConfig

from ..reporting.record import HEURISTICS, QUANTIZED

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
"""Of a clone beside `experiments`, of an installed package inside it."""
SAFETY = ("off", "calibrated")
UNIFORM = ("bf16", "uniform", *BLOCK_FORMATS)
"""Baselines of a comparison: uniform is every MX format, a name that one."""
BASELINES = (*UNIFORM, *HEURISTICS)
"""Of a search."""


class ConfigError(DmxError):
    """A setting that no single dataclass can refuse: wrong type, or at odds with another."""


def check_at_least(setting: str, value: int, low: int) -> None:
    """Raise ConfigError for a value below the smallest that makes sense."""
    if value < low:
        raise ConfigError(f"{setting}={value} must be at least {low}")


MOST_SEED = 2**62
"""Generators take 64 bits with a sign; seeds of a run are added to those of a setting."""


def check_seed(setting: str, value: int) -> None:
    """Raise ConfigError for a seed that no generator takes."""
    if not 0 <= value <= MOST_SEED:
        raise ConfigError(f"{setting}={value} must be 0 to {MOST_SEED}")


def check_each(setting: str, values: list[Any], allowed: tuple[Any, ...]) -> None:
    """Raise FormatError for the first of `values` that is not allowed."""
    for value in values:
        check_choice(value, allowed, setting)


def check_some(setting: str, values: list[Any], allowed: tuple[str, ...]) -> None:
    """As `check_each`; ConfigError where there is none."""
    if not values:
        ways = ", ".join(f"{setting}=[{value}]" for value in allowed)
        raise ConfigError(f"{setting} is empty: {ways} or several")
    check_each(setting, values, allowed)


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
        check_at_least("calibration.window", self.window, 2)
        check_at_least("calibration.batch_size", self.batch_size, 1)
        check_seed("calibration.seed", self.seed)
        if self.batches is not None:
            check_at_least("calibration.batches", self.batches, 1)


@dataclass(kw_only=True)
class TrainingConfig:
    """How the text of `data.training` becomes batches that weights learn from; used where `weights` says
    learned."""

    window: int | None = None
    """tokens a row; null = calibration.window"""
    batch_size: int | None = None
    """rows a batch; null = calibration.batch_size"""
    batches: int | None = None
    """Keep the first so many after the shuffle; null = all that the text gives."""
    seed: int | None = None
    """Order in which windows are drawn from the text; null = calibration.seed"""

    def __post_init__(self) -> None:
        for name, low in (("window", 2), ("batch_size", 1), ("batches", 1)):
            if (value := getattr(self, name)) is not None:
                check_at_least(f"training.{name}", value, low)
        if self.seed is not None:
            check_seed("training.seed", self.seed)

    def beside(self, calibration: CalibrationConfig) -> CalibrationConfig:
        """With what calibration says where nothing is said here."""
        stated = {k: v for k, v in vars(self).items() if v is not None}
        return dataclasses.replace(calibration, **{"batches": None} | stated)


@dataclass(kw_only=True)
class EvaluationConfig:
    """How results are measured."""

    window: int = 2048
    """tokens a window"""
    batch_size: int = 8
    """windows at once"""
    max_windows: int | None = None
    """Keep the first so many windows; null = the whole text."""
    quantized: list[str] = field(default_factory=lambda: ["W+A"])
    """W+A: weights and inputs quantized. W: weights only."""

    def __post_init__(self) -> None:
        check_at_least("evaluation.window", self.window, 2)
        check_at_least("evaluation.batch_size", self.batch_size, 1)
        if self.max_windows is not None:
            check_at_least("evaluation.max_windows", self.max_windows, 1)
        check_some("evaluation.quantized", self.quantized, QUANTIZED)

    @property
    def sees_inputs(self) -> bool:
        """Whether rows quantize inputs."""
        return "W+A" in self.quantized


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
    shard: str = "auto"
    """auto | on | off: weights sharded over the processes of the run (FSDP2), instead of whole in each. auto: where
    accelerate was told so, by --use_fsdp --fsdp_version 2."""
    threads: int | None = None
    """CPU threads of torch; null = its own choice."""
    memory: str = "all"
    """all | block: decoder blocks lie in CPU memory, and each is copied to the device to run there; for models larger
    than a card. Results are the same, and a run may go on with the other one."""

    def __post_init__(self) -> None:
        check_choice(self.shard, SWITCH, "run.shard")
        check_choice(self.memory, MEMORIES, "run.memory")
        if self.threads is not None:
            check_at_least("run.threads", self.threads, 1)

    def shards(self) -> bool:
        """Whether weights are sharded; ConfigError where setting and launcher differ."""
        launched = launched_sharded()
        if launched and self.shard == "off":
            raise ConfigError(
                "run.shard=off: accelerate was started with --use_fsdp. Use --multi_gpu, or run.shard=auto."
            )
        shards = launched or (self.shard == "on" and started_together() > 1)
        if shards:
            self.check_whole(f"run.shard={self.shard}, which splits weights over devices,")
        return shards

    @property
    def is_by_block(self) -> bool:
        """Whether models are held block by block."""
        return self.memory == "block"

    def check_whole(self, what: str) -> None:
        """Raise ConfigError where a model that is held block by block is given to what needs the whole one."""
        if self.is_by_block:
            raise ConfigError(
                f"run.memory=block: {what} needs the whole model on its device. Use run.memory=all, with run.device=cpu "
                "where no GPU holds it."
            )

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
        if device.index is not None and started_together() > 1:
            raise ConfigError(
                f"run.device={self.device} names one GPU for {started_together()} processes. Use run.device=cuda: each "
                "takes its own."
            )
        return device


def _changed(config: Any) -> list[str]:
    """Settings of a group that are not as they are by default, as they are written."""
    usual = vars(type(config)())
    return [f"{key}={value}" for key, value in vars(config).items() if value != usual[key]]


@dataclass(kw_only=True)
class SearchingRun:
    """What the commands that search have in common."""

    model: ModelConfig
    data: DataPair
    calibration: CalibrationConfig
    evaluation: EvaluationConfig
    gptq: GptqConfig
    local_hessian: LocalHessianConfig
    learn: LearnConfig
    training: TrainingConfig
    """Batches of `data.training`, for weights that learn, after a search or in it (search.name=joint)."""
    run: RunConfig
    search: SearchSettings
    """Of a comparison: of every search, each taking what it uses; its name is taken from `searches`."""

    def training_for(
        self, weights: Collection[str], searches: Collection[str]
    ) -> CalibrationConfig | None:
        """How the training text becomes batches, where one of these stages of the weights or of these
        searches learns from it."""
        learns = "learned" in weights or "joint" in searches
        return self.training.beside(self.calibration) if learns else None

    def check_memory(self, searches: Collection[str], weights: Collection[str]) -> None:
        """Raise where these searches or stages of the weights need the whole model on the device, and do not get it.

        Raises:
            SearchConfigError, RunError
        """
        if self.run.is_by_block:
            self.search.check_by_block(searches)
            if "learned" in weights:
                self.learn.check_by_block()

    def check_stages(self, weights: Collection[str]) -> None:
        """Raise where these stages of the weights cannot take a format that the search may choose, or where another one
        is set.

        Raises:
            RunError, ConfigError
        """
        if "learned" in weights:
            self.learn.check_formats(self.search.formats_of("weight"))
        if "local_hessian" in weights:
            check_local_hessian(self.search.formats_of("weight"))
        if "gptq" in weights and self.gptq.scales == "search":
            check_searched_scales(self.search.formats_of("weight"))
        for stage, config in (("gptq", self.gptq), ("local_hessian", self.local_hessian)):
            if stage not in weights and (changed := _changed(config)):
                raise ConfigError(
                    f"{stage}.{changed[0]} is for weights={stage}, and weights={','.join(weights)}. Leave it out, or set "
                    f"weights={stage}."
                )

    def unused(self, weights: Collection[str], searches: Collection[str]) -> list[str]:
        """Of settings that other stages of the weights would use, and these do not, in a sentence for each group. They are
        not refused, as an experiment may have set them for the stage that a command takes another for."""
        here = f"here weights={','.join(weights)}"
        said = []
        if "learned" not in weights and (changed := _changed(self.learn)):
            said.append(f"learn.{changed[0]} is not used: it is for weights=learned; {here}.")
        if self.training_for(weights, searches) is None and (changed := _changed(self.training)):
            said.append(
                f"training.{changed[0]} is not used: it is for weights=learned and search=joint; {here}."
            )
        return said

    def check_shared(self, processes: int, training: CalibrationConfig | None) -> None:
        """Raise ConfigError for batches whose rows so many processes cannot share evenly."""
        for name, used in (("calibration", self.calibration), ("training", training)):
            if used is not None and used.batch_size % processes:
                raise ConfigError(
                    f"{name}.batch_size={used.batch_size}: {processes} processes share the rows of each batch, and do not "
                    f"divide them. Set {name}.batch_size to a multiple of {processes}, or start another number of processes."
                )
