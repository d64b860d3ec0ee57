"""Zero-shot fields of a row, for every entry point that measures one."""

import functools
import time
from pathlib import Path
from typing import Any

from torch import nn

from dmx.applying.apply import Safety, apply, restore
from dmx.assignment.assignment import Assignment
from dmx.evaluate.zero_shot import NonFiniteError, ZeroShot
from experiments.running.config import EvalConfig
from experiments.running.run import Run


@functools.lru_cache(maxsize=1)
def _harness(
    tokenizer: Any, tasks: tuple[str, ...], limit: int | None, batch_size: int | str, folder: Path
) -> ZeroShot:
    """One for all rows of a run: tasks are read and encoded once."""
    return ZeroShot(tokenizer, tasks, limit=limit, batch_size=batch_size, cache_folder=folder)


def measure_zero_shot(
    run: Run,
    model: nn.Module,
    tokenizer: Any,
    config: EvalConfig,
    assignment: Assignment | None,
    operands: str,
    *,
    label: str = "",
    safety: Safety | None = None,
) -> dict[str, Any]:
    """Fields of a row: `zero_shot` (task -> result, or null with its reason), `zero_shot_seconds`.

    Args:
        assignment: applied for the measurement; None = the model as it is.
        operands: W+A or W.
        safety: guards the quantizers at run time.
    """
    if not config.zero_shot:
        return {"zero_shot": None, "zero_shot_reason": "not asked for (eval=zero_shot)"}
    start = time.perf_counter()
    folder = Path(config.cache_folder) if config.cache_folder else run.path("zero_shot")
    harness = _harness(tokenizer, tuple(config.tasks), config.limit, config.batch_size, folder)
    if assignment is not None:
        apply(model, assignment, inputs=operands == "W+A", safety=safety, cache_weights=True)
    try:
        found: dict[str, Any] = {
            "zero_shot": harness.evaluate(model, label=label),
            "zero_shot_reason": None,
        }
    except NonFiniteError as error:
        found = {"zero_shot": None, "zero_shot_reason": str(error)}
    finally:
        if assignment is not None:
            restore(model)
    return found | {"zero_shot_seconds": time.perf_counter() - start}
