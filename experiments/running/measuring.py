"""What a row measures: losses on a text, and accuracy on zero-shot tasks."""

import functools
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dmx.applying.apply import Safety, applied
from dmx.assignment.assignment import Assignment
from dmx.evaluate.perplexity import cut_windows, window_losses
from dmx.evaluate.zero_shot import NonFiniteError, ZeroShot
from dmx.models.finite import not_finite
from dmx.processes import Processes

from ..reporting.record import TaskResult
from .rows import Losses, Tasks
from .settings import EvalConfig, EvaluationConfig


def measure_losses(
    model: nn.Module,
    tokens: Tensor | None,
    config: EvaluationConfig,
    assignment: Assignment | None,
    *,
    inputs: bool,
    label: str,
    processes: Processes | None = None,
    safety: Safety | None = None,
) -> Losses:
    """Losses of a model under an assignment.

    Args:
        tokens: 1-d int64, all of which are measured; None = not asked for.
        assignment: applied for the measurement; None = the model as it is.
        inputs: quantize inputs, too.
        label: named while it goes on.
        processes: that share the work; None: this one alone.
        safety: guards the quantizers at run time.

    Raises:
        ModelError: the model as it is has a loss that is not finite. Of a quantized one that is a result.
    """
    start = time.perf_counter()
    if tokens is None:
        return Losses.none("not asked for", time.perf_counter() - start)
    with applied(model, assignment, inputs=inputs, safety=safety, cache_weights=True):
        losses = window_losses(
            model,
            tokens,
            window=config.window,
            batch_size=config.batch_size,
            label=label,
            processes=processes,
        )
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    if assignment is None and bad:
        row = cut_windows(model, tokens, config.window)[bad[0]][None]
        what = f"the loss of window {bad[0]} of the evaluation text"
        raise not_finite(model, [row], what, "in the model as it is")
    return Losses.of(losses, config.window, time.perf_counter() - start)


@functools.lru_cache(maxsize=1)
def _harness(
    tokenizer: Any, tasks: tuple[str, ...], limit: int | None, batch_size: int | str, folder: Path
) -> ZeroShot:
    """One for all rows of a run: tasks are read and encoded once."""
    return ZeroShot(tokenizer, tasks, limit=limit, batch_size=batch_size, cache_folder=folder)


def measure_tasks(
    model: nn.Module,
    tokenizer: Any,
    config: EvalConfig,
    assignment: Assignment | None,
    *,
    inputs: bool,
    label: str,
    folder: Path,
    processes: Processes | None = None,
    safety: Safety | None = None,
) -> Tasks:
    """Accuracy of a model under an assignment, on the tasks of `config`; arguments as
    `measure_losses`.

    Args:
        folder: of results that are kept, where `config` names none.
    """
    if not config.zero_shot:
        return Tasks()
    start = time.perf_counter()
    if config.cache_folder:
        folder = Path(config.cache_folder)
    harness = _harness(tokenizer, tuple(config.tasks), config.limit, config.batch_size, folder)
    try:
        with applied(model, assignment, inputs=inputs, safety=safety, cache_weights=True):
            measured = harness.evaluate(model, label=label, processes=processes)
    except NonFiniteError as error:
        return Tasks(None, time.perf_counter() - start, str(error))
    results = {name: TaskResult.from_dict(result, name) for name, result in measured.items()}
    return Tasks(results, time.perf_counter() - start)
