"""What `assignments` and `assignment` on a command line can name.

path/to/assignment.json         of a search; also a folder that holds one
exported folder                 of `experiments.export`, or of another tool: weights and formats
another tool's config           formats by name, for the weights of `model`: compressed-tensors,
                                Quark, ModelOpt (quantized_layers), auto-round (layer_config)
mxfp4, mxfp6_e2m3, ..., bf16    one format everywhere
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from dmx.applying.calibrate import needs_calibration
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, FormatError
from dmx.exporting import assignment_of_files, is_exported, read_assignment
from dmx.files import read_json
from dmx.formats import BF16, BlockFormat, Format, get_block_format, get_format
from dmx.models import ModelConfig
from dmx.searching import SearchConfig, uniform_assignment

from .bench import Bench
from .settings import ConfigError, RunConfig

_CONFIGS = ("assignment.json", "hf_quant_config.json", "config.json")


@dataclass(frozen=True)
class Source:
    """A name, read as far as it goes without a model."""

    name: str
    uniform: Format | None = None
    given: Assignment | Mapping[str, Any] | None = None
    """An assignment, or the body of another tool's config."""
    files: Path | None = None
    """An exported folder, whose weights are to be used."""

    def needs_calibration(self, assignment: Assignment | None) -> bool:
        """Whether inputs have a global scale that calibration fixes: of its one format, or of its assignment."""
        if assignment is not None:
            return needs_calibration(assignment)
        return isinstance(self.uniform, BlockFormat) and self.uniform.needs_input_amax

    def on(self, model: nn.Module) -> Assignment:
        """The assignment for a model, which may be on meta.

        Raises:
            AssignmentError, FormatError: it is for another model, or has formats that this project does not have.
        """
        if self.uniform is not None:
            block_format = get_block_format(self.uniform)
            return uniform_assignment(model, block_format, SearchConfig(name="uniform"))
        if isinstance(self.given, Assignment):
            self.given.check(model)
            return self.given
        assert self.given is not None
        try:
            return read_assignment(self.given, model)
        except (AssignmentError, FormatError) as error:
            raise type(error)(f"{self.name}: {error}") from error

    def origin(self, assignment: Assignment) -> str | None:
        """What labels call its rows instead of the search; None where the assignment names one."""
        if self.files is not None:
            return f"files {self.files.resolve().name}"
        if tool := assignment.search.tool:
            return f"{tool} config"
        return None if assignment.search.name else Path(self.name).stem


def read_source(name: str, setting: str) -> Source:
    """What `name` stands for; files are read, weights are not.

    Args:
        setting: where the name was given, for messages.

    Raises:
        AssignmentError: a file is missing or damaged. FormatError: not the name of a format.
    """
    path = Path(name)
    if not (name.endswith(".json") or "/" in name or path.exists()):
        return Source(name, uniform=get_format(name, setting=setting))
    files = None
    if path.is_dir():
        files = path if is_exported(path) else None
        configs = [path / name for name in _CONFIGS if (path / name).is_file()]
        if not configs:
            raise AssignmentError(
                f"{setting}={name}: the folder holds none of {', '.join(_CONFIGS)}. Give an exported "
                "folder, an assignment.json, or another tool's config."
            )
        path = configs[0]
    body = _json_object(path)
    if body is None or "schema" in body:  # ours, or so damaged that ours says it best
        given = Assignment.load(path) if files is None else assignment_of_files(files)
        for kind in given.artifacts:
            given.artifact(kind)
        return Source(name, given=given, files=files)
    return Source(name, given=body, files=files)


def _json_object(path: Path) -> dict[str, Any] | None:
    try:
        body = read_json(path)
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def check_files(sources: Iterable[Source], model: ModelConfig, run: RunConfig) -> None:
    """Raise ConfigError for exported files beside a model that is not in bf16 and whole, as they are."""
    files = next((source.name for source in sources if source.files is not None), None)
    if files is None:
        return
    run.check_whole(f"the exported folder {files}")
    if model.dtype != "bfloat16":
        raise ConfigError(
            f"model.dtype={model.dtype}: the files of {files} are read in bfloat16, and rows must be "
            "of one dtype. Set model.dtype=bfloat16."
        )


def measure_source(
    bench: Bench, source: Source, assignment: Assignment | None, uniform: SearchConfig, path: str
) -> None:
    """The rows of a source.

    Args:
        assignment: the source's own; None where it names one format for all layers.
        uniform: settings of such a source: its transform.
        path: keeps the assignment in the run's folder.
    """
    if source.uniform is BF16:
        bench.unquantized()
    elif source.uniform is not None:
        bench.uniform(get_block_format(source.uniform), uniform)
    else:
        assert assignment is not None
        with bench.weights_of(source.files) as input_amax:
            stated = replace(assignment, input_amax=assignment.input_amax or input_amax)
            bench.rows(path, lambda: (bench.calibrated(stated), {}), origin=source.origin(stated))
