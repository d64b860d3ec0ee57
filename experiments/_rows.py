"""A loaded model, its texts, and the rows that are measured on it; shared by search and compare."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmx.assignment import Assignment
from dmx.budget import Budget
from dmx.data import DataPair, check_window, encode, load_text, token_batches
from dmx.evaluate.perplexity import cut_windows
from dmx.formats import BlockFormat
from dmx.models import ModelConfig, load_model, max_positions
from dmx.searching import SearchConfig, search, uniform_assignment
from experiments._config import CalibrationConfig, EvaluationConfig
from experiments._run import Run, tokens_sha256

LABELS = {"differentiable": "dmx"}
"""Search name -> what tables call its rows; others keep their name."""


def check_windows(
    meta: Any, calibration: CalibrationConfig, evaluation: EvaluationConfig
) -> None:
    """Raise DataError for windows beyond the positions of a model, which may be a meta one."""
    for window in (calibration.window, evaluation.window):
        check_window(window, max_positions(meta.config))


class Bench:
    """Loads once; every row of a run uses the same evaluation windows, and every search with one
    seed the same calibration batches."""

    def __init__(
        self,
        run: Run,
        model: ModelConfig,
        data: DataPair,
        calibration: CalibrationConfig,
        evaluation: EvaluationConfig,
    ) -> None:
        self.run, self.calibration, self.evaluation = run, calibration, evaluation
        texts = load_text(data.calibration), load_text(data.evaluation)
        loaded = load_model(model, run.device)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self._calibration_tokens = encode(self.tokenizer, texts[0])
        tokens = encode(self.tokenizer, texts[1])
        if evaluation.max_windows is not None:
            tokens = tokens[: evaluation.max_windows * evaluation.window]
        cut_windows(self.model, tokens, evaluation.window)  # refuse before a search, not after it
        self.tokens = tokens
        first = self.batches(0)
        run.facts = {
            "model": loaded.provenance,
            "data": {
                "calibration": {
                    "name": texts[0].name, "source": texts[0].source, "sha256": texts[0].sha256,
                    "tokens": sum(b.numel() for b in first), "batches": len(first),
                    "batch_shape": list(first[0].shape),
                },
                "evaluation": {
                    "name": texts[1].name, "source": texts[1].source,
                    "sha256": tokens_sha256(tokens), "tokens": len(tokens),
                    "windows": len(tokens) // evaluation.window, "window": evaluation.window,
                },
            },
        }  # fmt: skip
        run.actual |= {"device": str(run.device), "dtype": loaded.provenance["dtype"]}

    def batches(self, seed: int) -> list[Tensor]:
        """Calibration batches of one seed: another seed draws other windows in another order."""
        c = self.calibration
        return token_batches(
            self._calibration_tokens,
            c.window,
            c.batch_size,
            seed=c.seed + seed,
            n_batches=c.batches,
        )

    def unquantized(self) -> dict[str, Any]:
        """The bf16 row."""
        return self._row("bf16", "bf16", "W+A", None, None)

    def uniform(self, block_format: BlockFormat, config: SearchConfig) -> None:
        """Rows of one format everywhere."""

        def make() -> tuple[Assignment, dict[str, Any]]:
            return uniform_assignment(self.model, block_format, config), {}

        self._rows(f"uniform {block_format}", f"uniform-{block_format}", "", make)

    def searched(
        self, config: SearchConfig, budget: Budget, *, name: str, folder: str = ""
    ) -> None:
        """Rows of one search. Its files: `name`.json and, if it takes steps, its history, in
        `folder` of the run's folder."""

        def make() -> tuple[Assignment, dict[str, Any]]:
            cuda = self.run.device.type == "cuda"
            if cuda:
                torch.cuda.reset_peak_memory_stats(self.run.device)
            start = time.perf_counter()
            result = search(
                self.model, self.batches(config.seed), budget, config,
                folder=self.run.path(folder) if config.name == "differentiable" else None,
                score_folder=self.run.path("scores"),
            )  # fmt: skip
            facts: dict[str, Any] = {"seconds": time.perf_counter() - start}
            if cuda:
                facts["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.run.device)
            return result.assignment, facts

        label = LABELS.get(config.name, config.name)
        self._rows(label, name, folder, make)

    # -------------------------------------------------------------------------------------------

    def _rows(
        self,
        label: str,
        name: str,
        folder: str,
        make: Callable[[], tuple[Assignment, dict[str, Any]]],
    ) -> None:
        path = f"{folder}/{name}.json" if folder else f"{name}.json"
        key = path.removesuffix(".json").replace("/", "-")
        for operands in self.evaluation.operands:
            self._row(label, key, operands, path, make)

    def _row(
        self, label: str, key: str, operands: str, path: str | None,
        make: Callable[[], tuple[Assignment, dict[str, Any]]] | None,
    ) -> dict[str, Any]:  # fmt: skip
        def measured() -> dict[str, Any]:
            if path is None or make is None:
                return self.run.measure(
                    self.model, self.tokens, self.evaluation,
                    label=label, operands=operands, assignment=None,
                )  # fmt: skip
            assignment = self._saved(path, make)
            found = assignment.search
            row = self.run.measure(
                self.model, self.tokens, self.evaluation, label=label, operands=operands,
                assignment=assignment, path=path, search=found["name"],
                search_seconds=found.get("seconds"), seed=found.get("seed"),
            )  # fmt: skip
            row["search_peak_memory_bytes"] = found.get("peak_memory_bytes")
            return row

        return self.run.row(f"{key}-{operands}", measured)

    def _saved(
        self, path: str, make: Callable[[], tuple[Assignment, dict[str, Any]]]
    ) -> Assignment:
        """The assignment of a file of this run, searched for if it is not there yet."""
        target = self.run.path(path)
        if not target.exists():
            assignment, facts = make()
            dataclasses.replace(assignment, search={**assignment.search, **facts}).save(target)
        return Assignment.load(target)
