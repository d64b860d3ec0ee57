"""A loaded model and its texts; every row of a run is measured on them."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import mor
from dmx.applying.apply import restore
from dmx.applying.calibrate import calibrate_inputs, needs_calibration
from dmx.assignment.assignment import Assignment
from dmx.assignment.budget import Budget
from dmx.assignment.facts import KEPT_OF
from dmx.data import (
    DataPair,
    check_overlap,
    check_window,
    encode,
    load_text,
    text_tokens,
    token_batches,
)
from dmx.errors import DataError, setting_text
from dmx.evaluate.perplexity import cut_windows
from dmx.exporting import load_exported
from dmx.formats import BlockFormat
from dmx.models import ModelConfig, load_model, max_positions
from dmx.models.streaming import in_bytes, stream_of
from dmx.progress import Stopwatch
from dmx.searching import SearchConfig, SearchSettings, search, uniform_assignment
from dmx.weights.config import GptqConfig, LocalHessianConfig
from dmx.weights.gptq import gptq
from dmx.weights.learn_config import LearnConfig, batches_text
from dmx.weights.learned import learn_weights
from dmx.weights.local_hessian import local_hessian

from ..reporting.record import ModelFacts, Row
from .measuring import measure_losses, measure_tasks
from .provenance import batches_facts, gpu_peak, reset_gpu_peak, windows_facts
from .rows import make_row, method_of
from .run import Run
from .settings import CalibrationConfig, EvalConfig, EvaluationConfig, SearchingRun

Make = Callable[[], tuple[Assignment, dict[str, Any]]]
"""Gives an assignment and facts of its search (seconds, steps, cuda_graph, peak_memory_bytes)."""

EVALUATION = "evaluation of "
"""What names of stages begin with that measure a row."""


def check_windows(
    meta: Any,
    calibration: CalibrationConfig | None,
    evaluation: EvaluationConfig | None = None,
    training: CalibrationConfig | None = None,
) -> None:
    """Raise DataError for windows beyond the positions of a model, which may be a meta one; None for what is not used."""
    given = {"calibration": calibration, "evaluation": evaluation, "training": training}
    for name, config in given.items():
        if config is not None:
            check_window(config.window, max_positions(meta.config), f"{name}.window")


def drawn_batches(tokens: Tensor, name: str, config: CalibrationConfig, seed: int) -> list[Tensor]:
    """Batches of a text; another seed draws other windows in another order.

    Args:
        name: of the text and its settings, calibration or training.
    """
    try:
        return token_batches(
            tokens,
            config.window,
            config.batch_size,
            seed=config.seed + seed,
            n_batches=config.batches,
        )
    except DataError as error:
        asked = ("window", "batch_size", "batches")
        said = " ".join(f"{name}.{key}={setting_text(getattr(config, key))}" for key in asked)
        raise DataError(f"data.{name} with {said}: {error}") from error


def _say_input_rules(run: Run, settings: SearchSettings) -> None:
    """By which rules inputs are scaled, and whose they are; the record has what auto stands for."""
    ran = settings.scale_rules.input
    if not isinstance(ran, str):
        ran = ", ".join(f"{name} {rule}" for name, rule in ran.items())
    run.actual["search"] = {"scale_rules": {"input": ran}}
    rules, runtime = settings.input_rules(), settings.runtime
    if runtime is None or not rules:
        return
    foreign = settings.foreign_input_rules()

    def whose(name: str) -> str:
        if name not in runtime.input_rules:
            return "its own is not known"
        return "as asked" if name in foreign else f"of {runtime.name}"

    said = ", ".join(f"{name} {rule} ({whose(name)})" for name, rule in rules.items())
    run.say(f"scale rules of inputs, search.target={settings.target}: {said}")


class Bench:
    """Loads once; every row of a run uses the same evaluation windows, and every search with one
    seed the same calibration batches. Every searched assignment has a row for each of `weights`.
    With `safety="calibrated"` every quantized row is followed by one with mor's safety net around it.
    """

    def __init__(
        self,
        run: Run,
        model: ModelConfig,
        data: DataPair,
        evaluation: EvaluationConfig,
        *,
        calibration: CalibrationConfig | None,
        measured: EvalConfig | None = None,
        safety: str = "off",
        weights: Sequence[str] = ("nearest",),
        gptq: GptqConfig | None = None,
        local_hessian: LocalHessianConfig | None = None,
        learn: LearnConfig | None = None,
        training: CalibrationConfig | None = None,
    ) -> None:
        self.run, self.calibration, self.evaluation = run, calibration, evaluation
        self.stage: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
        """Around each stage that takes time; the names are those of `expected_stages`."""
        self._changed_files: dict[tuple[str, int, float, str], list[str]] = {}
        """Stage of the weights, seed, budget -> files of what it made, in this start or an earlier one."""
        if safety != "off":
            run.alone(f"safety={safety}, which counts what it sees,")
        self._model_config = model
        self.measured, self.safety = measured or EvalConfig(), safety
        self.weights, self.gptq, self.learn = weights, gptq or GptqConfig(), learn or LearnConfig()
        self.local_hessian = local_hessian or LocalHessianConfig()
        self.training = training
        # Texts first: a missing file must show before a model is loaded.
        text = load_text(data.evaluation) if self.measured.perplexity else None
        calibration_text = load_text(data.calibration) if calibration is not None else None
        training_text = None
        if self.training is not None:
            training_text = load_text(data.training) if data.training else calibration_text
        loaded = load_model(
            model, run.device, run.processes if run.shards else None, memory=run.memory
        )
        if run.shards:
            run.say(
                f"weights are sharded over {run.processes.size} processes (FSDP2); no CUDA graphs"
            )
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        run.model = ModelFacts.from_dict(loaded.provenance, "model")
        if calibration_text is not None:
            self._calibration_tokens = encode(self.tokenizer, calibration_text, data.bos)
            run.data["calibration"] = batches_facts(
                calibration_text, self.batches(0), self._calibration_tokens.start
            )
        if training_text is not None:
            is_own = training_text is not calibration_text
            self._training_tokens = (
                encode(self.tokenizer, training_text, data.bos)
                if is_own
                else self._calibration_tokens
            )
            first = self.training_batches(0)
            split = self.learn.split(first)  # too few are refused before a search, not after it
            if "learned" in self.weights:
                self.learn.warn_of_little_text(*split)
                self._say_steps(len(split[0]))
            shared = None
            if text is not None:
                shared = dataclasses.asdict(check_overlap(text, training_text))
            run.data["training"] = batches_facts(
                training_text, first, self._training_tokens.start, shared
            )
        self.tokens: Tensor | None = None
        if text is not None:
            tokens = encode(self.tokenizer, text, data.bos)
            if evaluation.max_windows is not None:
                tokens = tokens[: evaluation.max_windows * text_tokens(tokens, evaluation.window)]
            # Refuse a text that does not fit before a search, not after it.
            cut_windows(self.model, tokens, evaluation.window)
            self.tokens = tokens
            run.data["evaluation"] = windows_facts(text, tokens, evaluation.window)
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        where = {"device": str(run.device), "memory": run.memory}
        where |= {"shard": "on"} if run.shards else {}
        run.actual |= {"run": where, "model": {"dtype": dtype}}
        self._stream = stream_of(self.model)
        if self._stream is not None:
            run.say(self._stream.describe())

    @classmethod
    def of(
        cls,
        run: Run,
        config: SearchingRun,
        weights: Sequence[str],
        searches: Sequence[str],
        **options: Any,
    ) -> "Bench":
        """For a command that runs these searches; options as `measured` and `safety` of the class.

        Raises:
            ConfigError: batches that the processes of the run cannot share.
        """
        training = config.training_for(weights, searches)
        config.check_shared(run.processes.size, training)
        _say_input_rules(run, config.search)
        for text in config.unused(weights, searches):
            run.note(text)
        return cls(
            run,
            config.model,
            config.data,
            config.evaluation,
            calibration=config.calibration,
            weights=weights,
            gptq=config.gptq,
            local_hessian=config.local_hessian,
            learn=config.learn,
            training=training,
            **options,
        )

    def _say_steps(self, learned: int) -> None:
        """What learn.steps=null becomes with so many batches to learn from, for the record, too."""
        if self.learn.steps is None and (steps := self.learn.steps_for(learned)):
            passes = f"{steps / learned:.3g} passes over {batches_text(learned)}"
            self.run.say(f"learn.steps=null is {steps}: {passes}")
            self.run.actual["learn"] = {"steps": steps}

    def _say_learned(self, what: str, facts: Mapping[str, Any]) -> None:
        """KL before and after, of batches held back: of those learned from it shows nothing of other text."""
        if held := facts["held_batches"]:
            self.run.say(
                f"{what}: KL {facts['kl_before']:.4f} before, {facts['kl_after']:.4f} after "
                f"(nats/token; batches held back: {held})"
            )

    def batches(self, seed: int) -> list[Tensor]:
        """Calibration batches of one seed: another seed draws other windows in another order."""
        assert self.calibration is not None
        return drawn_batches(self._calibration_tokens, "calibration", self.calibration, seed)

    def training_batches(self, seed: int) -> list[Tensor]:
        """Batches that weights learn from, likewise."""
        assert self.training is not None
        return drawn_batches(self._training_tokens, "training", self.training, seed)

    def learned_batches(self, seed: int) -> list[Tensor]:
        """Those that are not held back to measure on."""
        return self.learn.split(self.training_batches(seed))[0]

    @contextmanager
    def weights_of(self, folder: Path | None) -> Iterator[Mapping[str, float] | None]:
        """Rows are measured on the weights of an exported folder meanwhile, as its bytes give
        them; None changes nothing. Gives the `input_amax` that its files state."""
        if folder is None:
            yield None
            return
        self.run.unsharded("measuring an exported folder (assignments=[path/to/folder])")
        own = self.model
        attention = self._model_config.attn_implementation
        files = load_exported(folder, device=self.run.device, attn_implementation=attention)
        self.model = restore(files.model)
        try:
            yield files.assignment.input_amax
        finally:
            self.model = own

    # --- what a row can be ---------------------------------------------------------------------

    def unquantized(self) -> None:
        """The row of the model as it is."""

        def measured() -> Row:
            with self.stage(f"{EVALUATION}bf16"):
                return self._measured(None, "W+A", None, None)

        self.run.row("bf16", measured)

    def uniform(self, block_format: BlockFormat, config: SearchConfig) -> None:
        """Rows of one format everywhere."""
        path = f"uniform-{block_format}.json"
        made = partial(self._uniform, block_format, config)
        self.rows(path, lambda: (made(), {}), called=block_format.name, guarded=False)

    def _uniform(self, block_format: BlockFormat, config: SearchConfig) -> Assignment:
        return self.calibrated(uniform_assignment(self.model, block_format, config))

    def calibrated(self, assignment: Assignment) -> Assignment:
        """With the ranges of inputs that its formats need and it does not state, where rows quantize inputs."""
        if not (self.evaluation.sees_inputs and needs_calibration(assignment)):
            return assignment
        return calibrate_inputs(self.model, assignment, self.batches(0))

    def searched(
        self,
        config: SearchConfig,
        budget: Budget,
        *,
        name: str,
        folder: str = "",
        weights: Sequence[str] | None = None,
    ) -> None:
        """Rows of one search. Its files: `name`.json and, if it takes steps or is polished, its
        history, in `folder` of the run's folder.

        Args:
            weights: what its weights are in each row; None: as the bench has it.
        """

        stem = f"{folder}/{name}" if folder else name
        search = config.name
        found = partial(self._staged, search, partial(self._found, config, budget, folder))
        for stage in self.weights if weights is None else weights:
            if stage == "nearest":
                self.rows(f"{stem}.json", found, called=search)
            else:
                key = (stage, config.seed, budget.limit, budget.unit)
                others = self._changed_files.setdefault(key, [])
                change = partial(self._changed, stage, stem, found, config.seed, others)
                changed = partial(self._staged, f"weights of {search}", change)
                path = f"{stem}.{stage}.json"
                self.rows(path, changed, called=f"{search}, {stage}")
                others.append(path)

    def _staged(self, name: str, make: Make) -> tuple[Assignment, dict[str, Any]]:
        with self.stage(name):
            return make()

    def _found(
        self, config: SearchConfig, budget: Budget, folder: str
    ) -> tuple[Assignment, dict[str, Any]]:
        """What a search finds, and facts of it."""
        reset_gpu_peak(self.run.device)
        leaves_files = config.descends or config.polish.count > 0
        joint = config.name == "joint"
        batches = self.learned_batches(config.seed) if joint else self.batches(config.seed)
        if self._stream is not None and config.descends:
            passes, fewer = 2, ""
            if config.objective == "kl":
                passes, fewer = 3, ", 2 where the reference is kept"
            self.run.say(
                f"a step copies {in_bytes(passes * self._stream.pass_bytes)} ({passes} passes{fewer})"
            )
        before = self._moved()
        result = search(
            self.model, batches, budget, config,
            folder=self.run.path(folder) if leaves_files else None,
            score_folder=self.run.path("scores"),
        )  # fmt: skip
        self._say_copied(config.name, len(result.history), result.seconds, before)
        facts: dict[str, Any] = {"seconds": result.seconds, "score_seconds": result.score_seconds}
        known = result.assignment.search
        because = known.kept_because
        if because and not any(because in warning for warning in result.warnings):
            assert known.kept is not None
            self.run.say(
                f"search.name=adaptive: {because}; the choice is that of {KEPT_OF[known.kept]}"
            )
        if result.polish:
            facts["kl"] = result.polish[-1]["kl"]
        if config.descends:
            facts |= {"steps": len(result.history), "cuda_graph": result.cuda_graph}
        return result.assignment, facts | gpu_peak(self.run.device)

    def _changed(
        self, stage: str, stem: str, found: Make, seed: int, others: Sequence[str]
    ) -> tuple[Assignment, dict[str, Any]]:
        """What a search found with the scales of its weights by least squared error, of weights or of what layers
        give, with its weights rounded by GPTQ, or learned; once for searches that chose alike. What a stopped stage goes
        on from is kept in a folder meanwhile.

        Args:
            others: files of what the stage made of what other searches found for the same budget and seed.
        """
        nearest, folder = self._saved(f"{stem}.json", found), self.run.path(f"{stem}.{stage}")
        if stage == "mse":
            mse = nearest.with_rule("weight", "mse")
            return dataclasses.replace(mse, weights={"name": "mse"}), {}
        for path in others:
            if not self.run.processes.agree(self.run.path(path).exists):
                continue  # deleted since its row was measured
            made = Assignment.load(self.run.path(path))
            if dataclasses.replace(made, weights=None, search=nearest.search) == nearest:
                self.run.say(f"{stem}, {stage}: chose as {path} did, whose weights are taken")
                return dataclasses.replace(made, search=nearest.search), {}
        clock, before = Stopwatch(), self._moved()
        reset_gpu_peak(self.run.device)
        if stage == "gptq":
            done = gptq(
                self.model, nearest, self.batches(seed)[: self.gptq.batches],
                damping=self.gptq.damping, inputs=self.gptq.inputs,
                correct_inputs=self.gptq.correct_inputs, scales=self.gptq.scales,
                order=self.gptq.order, folder=folder, clock=clock,
            )  # fmt: skip
        elif stage == "local_hessian":
            done = local_hessian(
                self.model, nearest, self.batches(seed)[: self.local_hessian.batches],
                inputs=self.local_hessian.inputs, folder=folder, clock=clock,
            )  # fmt: skip
        else:
            config = dataclasses.replace(self.learn, seed=self.learn.seed + seed)
            batches = self.training_batches(seed)
            done = learn_weights(self.model, nearest, batches, config, folder=folder, clock=clock)
            self._say_learned(f"{stem}, {stage}", done.weights or {})
        self._say_copied(stage, 0, clock.seconds - clock.before, before)
        facts = {**(done.weights or {}), "seconds": clock.seconds, **gpu_peak(self.run.device)}
        return dataclasses.replace(done, weights=facts), {}

    def _moved(self) -> int:
        """Bytes copied to the device so far, of a model that is held block by block."""
        return 0 if self._stream is None else self._stream.moved_bytes

    def _say_copied(self, what: str, steps: int, seconds: float, before: int) -> None:
        """What copying came to beside the time that something took; nothing of a model that is whole."""
        if self._stream is not None and seconds > 0:
            copied = self._moved() - before
            each = f", {seconds / steps:.2f} s a step" if steps else ""
            rate = in_bytes(int(copied / seconds))
            self.run.say(f"{what}: {seconds:.1f} s{each}, {in_bytes(copied)} copied, {rate}/s")

    def rows(
        self,
        path: str,
        make: Make,
        *,
        called: str | None = None,
        origin: str | None = None,
        guarded: bool = True,
    ) -> None:
        """Rows of one assignment, which is kept under `path` of the run's folder: one for each
        of `evaluation.quantized`, and one more with the safety net where it is on.

        Args:
            called: what the stage of measuring it is called; None: as its file.
            origin: what labels call the assignment instead of its search.
            guarded: whether the safety net can be around it.
        """
        key = path.removesuffix(".json").replace("/", "-")
        for quantized in self.evaluation.quantized:
            for net in (False, True) if self.safety != "off" and guarded else (False,):

                def measured(quantized: str = quantized, net: bool = net) -> Row:
                    assignment = self._saved(path, make)
                    guard = self._net(assignment, path) if net else None
                    with self.stage(f"{EVALUATION}{called or key}"):
                        return self._measured(assignment, quantized, path, guard, origin)

                self.run.row(f"{key}-{quantized}{'-net' if net else ''}", measured)

    # -------------------------------------------------------------------------------------------

    def _measured(
        self, assignment: Assignment | None, quantized: str, path: str | None,
        net: mor.SafetyNet | None, origin: str | None = None,
    ) -> Row:  # fmt: skip
        method = method_of(assignment, quantized=quantized, net=net is not None, origin=origin)
        common: Any = {"inputs": quantized == "W+A", "label": method.label, "safety": net}
        common["processes"] = self.run.processes
        losses = measure_losses(self.model, self.tokens, self.evaluation, assignment, **common)
        report = None if net is None else net.report()
        folder = self.run.path("zero_shot")
        tasks = measure_tasks(
            self.model, self.tokenizer, self.measured, assignment, folder=folder, **common
        )
        return make_row(method, assignment, losses, path=path, tasks=tasks, safety=report)

    def _net(self, assignment: Assignment, path: str) -> mor.SafetyNet:
        """The net calibrated for an assignment, kept beside it; its counters start at zero."""
        target = self.run.path(path.removesuffix(".json") + ".safety.json")
        if target.exists():
            return mor.SafetyNet.load(target)
        net = mor.SafetyNet.calibrate(self.model, assignment, self.batches(0))
        net.save(target)
        return net

    def _saved(self, path: str, make: Make) -> Assignment:
        """The assignment of a file of this run, searched for if it is not there yet."""
        target, agree = self.run.path(path), self.run.processes.agree
        if not agree(target.exists):
            assignment, facts = make()
            if facts:
                known = dataclasses.replace(assignment.search, **facts)
                assignment = dataclasses.replace(assignment, search=known)
            found = assignment
            agree(lambda: str(found.save(target)))
            if found.weights is not None:  # saved, so what it would be resumed from can go
                agree(lambda: shutil.rmtree(target.with_suffix(""), ignore_errors=True))
        return Assignment.load(target)
