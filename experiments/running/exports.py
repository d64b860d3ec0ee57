"""An export: what is refused before it, the files, and what its record says of them."""

import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from dmx.applying.calibrate import calibrate_inputs, calibrated_layers
from dmx.assignment.assignment import Assignment
from dmx.data import Text, Tokens, encode, text_tokens, windows_of
from dmx.data.tokens import check_window
from dmx.exporting import Exported, Plan, check_model, check_new, make_plan, write_plan
from dmx.formats import BF16
from dmx.models import LoadedModel, ModelConfig, load_model, max_positions, meta_model

from ..reporting.record import ExportFacts, ModelFacts, Row, Verdict
from .bench import check_windows, drawn_batches
from .provenance import batches_facts, windows_facts
from .rows import Losses, make_row, method_of
from .run import Run
from .settings import CalibrationConfig, ConfigError
from .sources import read_source


@dataclass(frozen=True)
class Export:
    """What is to be written for whom, and how it is proven."""

    target: str
    profile: str | None
    inputs: bool
    verify: bool
    max_shard_gigabytes: float
    windows: int
    window: int
    calibration: CalibrationConfig | None = None
    """How text becomes batches that static scales of inputs are measured on; None: none are."""

    def __post_init__(self) -> None:
        if self.calibration is not None and not self.inputs:
            raise ConfigError(
                f"static_inputs=true with inputs=false: the files of target={self.target} would hold scales of "
                "inputs that nothing quantizes. Set inputs=true, or leave static_inputs out."
            )

    @property
    def _target(self) -> dict[str, Any]:
        """Arguments of the library."""
        names = ("target", "profile", "inputs", "verify")
        return {name: getattr(self, name) for name in names}

    def check(
        self, model: ModelConfig, assignment: str, folder: str | None, run_folder: str
    ) -> Plan:
        """Refuse what cannot be exported before weights load.

        Raises:
            ConfigError: the assignment gives no formats. DmxError: as the library says.
        """
        source = read_source(assignment, "assignment")
        if source.uniform is BF16 or source.files is not None:
            raise ConfigError(
                f"assignment={assignment} gives no formats to quantize this model to. Give an "
                "assignment.json or a block format, such as mxfp4 or nvfp4."
            )
        if folder and not Path(run_folder, "record.json").exists():
            check_new(Path(folder))
        given = source.given if isinstance(source.given, Assignment) else None
        plan = None if given is None else make_plan(self._as_measured(given), **self._target)
        meta = meta_model(model)
        plan = plan or make_plan(self._as_measured(source.on(meta)), **self._target)
        check_windows(meta, self.calibration)
        if self.windows:
            check_window(self.window, max_positions(meta.config))
        check_model(plan, meta, Path(folder or run_folder))
        return plan

    def _as_measured(self, assignment: Assignment) -> Assignment:
        """With ranges of inputs that stand for those to be measured; ConfigError where there are none to measure."""
        if self.calibration is None:
            return assignment
        layers = calibrated_layers(assignment, static=True)
        if not layers:
            used = {f.name for f in assignment.block_formats("input").values()}
            raise ConfigError(
                f"static_inputs=true: no layer has its input in fp8 or nvfp4, and blocks of other formats have scales "
                f"of their own (inputs in {', '.join(sorted(used)) or 'bf16'}). Leave static_inputs out."
            )
        return replace(assignment, input_amax=dict.fromkeys(layers, 1.0))

    def _measured(self, run: Run, plan: Plan, loaded: LoadedModel, text: Text, bos: str) -> Plan:
        """The plan with the ranges that inputs have on a text."""
        assert self.calibration is not None
        tokens = encode(loaded.tokenizer, text, bos)
        batches = drawn_batches(tokens, "calibration", self.calibration, 0)
        run.data["calibration"] = batches_facts(text, batches, tokens.start)
        measured = calibrate_inputs(loaded.model, plan.assignment, batches, static=True)
        return make_plan(measured, **self._target)

    def write(
        self,
        run: Run,
        model: ModelConfig,
        plan: Plan,
        text: Text | None,
        folder: str | None,
        bos: str = "auto",
        *,
        measured_on: Text | None = None,
    ) -> Exported:
        """The files, and all that the run's record says but its verdict.

        Args:
            text: the evaluation text, whose first windows are compared; None = tokens of no text.
            folder: receives the files; None = `model` in the run's folder.
            bos: what its windows start with, as `dmx.data.encode` wants it.
            measured_on: text that static scales of inputs are measured on; None: there are none.
        """
        target = Path(folder) if folder else run.path("model")
        if not folder:
            shutil.rmtree(target, ignore_errors=True)  # of a start that died before its record
        loaded = load_model(model, run.device)
        if measured_on is not None:
            plan = self._measured(run, plan, loaded, measured_on, bos)
        tokens = None
        if text is not None:
            tokens = self._used(encode(loaded.tokenizer, text, bos))
        windows = None if tokens is None else windows_of(tokens, self.window)
        shard = int(self.max_shard_gigabytes * 1e9)
        done = write_plan(
            plan, loaded.model, target, tokenizer=loaded.tokenizer, tokens=windows, max_shard_bytes=shard,
            left_out=loaded.left_out,
        )  # fmt: skip
        assignment = plan.assignment
        # After the export, so that one that fails leaves a folder which a corrected command may use.
        assignment.save(run.path("assignment.json"))
        run.model = ModelFacts.from_dict(loaded.provenance, "model")
        run.export = export_facts(done, assignment)
        if text is not None and tokens is not None:
            run.data["evaluation"] = windows_facts(text, tokens, self.window)
        run.actual = actual_settings(done, loaded.model)
        run.actual["static_inputs"] = measured_on is not None
        run.rows += export_rows(done, assignment, self.windows)
        return done

    def _used(self, stream: Tokens) -> Tokens:
        """Those of the text's first windows."""
        count = self.windows * text_tokens(stream, self.window)
        if len(stream) < count:
            raise ConfigError(
                f"windows={self.windows} of window={self.window} need {count} tokens, the "
                f"evaluation text has {len(stream)}. Lower one of them."
            )
        used: Tokens = stream[:count]
        return used


def export_facts(done: Exported, assignment: Assignment) -> ExportFacts:
    """Of the record."""
    return ExportFacts(
        target=done.target,
        profile=done.profile,
        inputs=done.inputs,
        formats=dict(Counter(assignment.formats.values())),
        input_rule=done.input_rule,
        bytes=done.bytes or None,
        verification=None if done.verification is None else done.verification.to_dict(),
    )


def actual_settings(done: Exported, model: nn.Module) -> dict[str, Any]:
    """What ran, under the names of the settings."""
    parameter = next(model.parameters())
    actual: dict[str, Any] = {
        "target": done.target, "inputs": done.inputs, "profile": done.profile,
        "run": {"device": str(parameter.device)},
        "model": {"dtype": str(parameter.dtype).removeprefix("torch.")},
    }  # fmt: skip
    if done.bytes:  # names alone are not loaded
        actual["verify"] = done.verification is not None
    return actual


def export_rows(done: Exported, assignment: Assignment, windows: int) -> list[Row]:
    """Rows of the model in memory and of the files, as the fresh process measured them.

    Args:
        windows: of the evaluation text that were compared; 0 = tokens of no text, whose perplexity
            means nothing.
    """
    checked = done.verification
    rows = []
    for origin in ("fake-quantized", "exported files"):
        losses = Losses.none("no text was compared: windows=0")
        if windows and checked is not None:
            loss = checked.reference_loss if origin == "fake-quantized" else checked.loss
            losses = Losses(loss, checked.tokens - windows, windows, None)
        quantized = "W+A" if done.inputs else "W"
        method = method_of(assignment, quantized=quantized, origin=origin)
        rows.append(make_row(method, assignment, losses, path="assignment.json"))
    return rows


def export_verdict(done: Exported) -> Verdict:
    """What loading the files again showed."""
    name = f"{done.target}{f', profile {done.profile}' if done.profile else ''}"
    checked = done.verification
    if checked is None:
        text = f"Written for {name}; not loaded again." if done.bytes else f"Names for {name}."
        return Verdict(text=text)
    loaded = f"Written for {name}, loaded by {checked.loader} in a fresh process:"
    if checked.equal:
        return Verdict(
            text=f"{loaded} logits of {checked.tokens} tokens equal the fake-quantized model's bit "
            "for bit."
        )
    return Verdict(
        text=f"{loaded} with inputs quantized by its rule, logits of {checked.tokens} tokens differ by "
        f"up to {checked.max_difference:.4g}, KL {checked.kl:.3e} nats/token."
    )
