"""The model, and rows of our evaluator: one arithmetic for the choices and weights of all tools."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dmx.assignment.assignment import Assignment
from dmx.assignment.space import SearchSpace
from dmx.data import text_tokens, token_batches, windows_of
from dmx.errors import RunError
from dmx.files import write_json
from dmx.models import ModelConfig, load_model
from dmx.searching import SearchConfig, search_space
from experiments.reporting.record import ModelFacts, Row, TextFacts
from experiments.reporting.stored import read_json
from experiments.running.measuring import measure_losses, measure_tasks
from experiments.running.provenance import batches_facts, windows_facts
from experiments.running.rows import make_row, method_of
from experiments.running.settings import EvalConfig, EvaluationConfig

from ..claiming import claimed
from .answers import with_rules
from .protocol import TOKENS
from .texts import Texts


class Bench:
    """Loads once; every cell is measured on the same windows and tasks."""

    def __init__(
        self,
        config: ModelConfig,
        texts: Texts,
        evaluation: EvaluationConfig,
        tasks: EvalConfig,
        folder: Path,
        device: str,
    ) -> None:
        self.texts, self.evaluation, self.tasks, self.folder = texts, evaluation, tasks, folder
        loaded = load_model(config, device)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.facts = ModelFacts.from_dict(loaded.provenance, "model")
        tokens = texts.measured
        if evaluation.max_windows is not None:
            tokens = tokens[: evaluation.max_windows * text_tokens(tokens, evaluation.window)]
        self.tokens = tokens
        self._evaluation_facts = windows_facts(texts.evaluation, tokens, evaluation.window)

    @property
    def model_folder(self) -> Path:
        """The model as peers read it: safetensors and tokenizer, written once.

        Raises:
            RunError: the folder has another model, or what says which is damaged.
        """
        place = self.folder / "model"
        done, facts = place / "done.json", self.facts.to_dict()
        with claimed(self.folder / "claims" / "model", wait=True):
            if not done.exists():
                self.model.save_pretrained(place)
                self.tokenizer.save_pretrained(place)
                write_json(done, facts)
        if (there := read_json(done, "delete it, and the model is written again")) != facts:
            raise RunError(f"{place} has the model {there}, not {facts}: give another --out")
        return place

    def space(self, formats: Sequence[str], units: str) -> SearchSpace:
        """Units and candidates."""
        settings: Any = {"family": list(formats), "units": units}
        return search_space(self.model, SearchConfig(name="kl_per_bit", **settings))

    def rows(self, tokens: int, seed: int) -> list[Tensor]:
        """So many calibration tokens, whole rows, a row a batch; another seed draws other rows."""
        window = self.texts.token_window
        return token_batches(self.texts.tokens, window, 1, seed=seed, n_batches=tokens // window)

    def data(self, rows: Sequence[Tensor]) -> dict[str, TextFacts]:
        """Facts of both texts, for a record."""
        facts = batches_facts(self.texts.calibration, rows, self.texts.tokens.start)
        return {"calibration": facts, "evaluation": self._evaluation_facts}

    def write_tokens(self, folder: Path, rows: Sequence[Tensor], own_windows: int) -> None:
        """For a cell: the calibration rows, and the first windows of the evaluation text."""
        windows = windows_of(self.tokens, self.evaluation.window)[:own_windows]
        held = {"tokens": torch.cat(list(rows)).contiguous(), "evaluation": windows.contiguous()}
        save_file(held, str(folder / TOKENS))

    @contextlib.contextmanager
    def weights(self, finished: Mapping[str, Tensor] | None) -> Iterator[None]:
        """The model has these weights (layer -> weight) inside; None: its own."""
        kept: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for name, weight in (finished or {}).items():
                parameter = self.model.get_submodule(name).weight
                kept.append((parameter, parameter.data))
                parameter.data = weight.to(parameter.device, parameter.dtype)
            yield
        finally:
            for parameter, data in kept:
                parameter.data = data

    def row(
        self,
        assignment: Assignment | None,
        *,
        quantized: str,
        label: str | None,
        weight_rule: str = "floor",
        input_rule: str = "floor",
    ) -> Row:
        """One measurement; None = the model as it is."""
        stated = assignment
        if assignment is not None:
            stated = with_rules(assignment, weight_rule, input_rule)
        method = method_of(stated, quantized=quantized, origin=label)
        common: Any = {"inputs": quantized == "W+A", "label": method.label}
        losses = measure_losses(self.model, self.tokens, self.evaluation, stated, **common)
        place = self.folder / "zero_shot"
        tasks = measure_tasks(
            self.model, self.tokenizer, self.tasks, stated, folder=place, **common
        )
        return make_row(method, stated, losses, tasks=tasks)

    def own_windows(
        self, assignment: Assignment, rule: str, count: int, inputs: bool
    ) -> list[float]:
        """nats/token of the first windows, weights, and with `inputs` inputs, by one rule: what a peer's own model is
        compared with."""
        tokens = self.tokens[: count * text_tokens(self.tokens, self.evaluation.window)]
        stated = with_rules(assignment, rule, rule)
        losses = measure_losses(
            self.model, tokens, self.evaluation, stated, inputs=inputs, label="own windows"
        )
        return list(losses.by_window or ())
