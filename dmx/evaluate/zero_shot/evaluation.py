"""Zero-shot accuracy on multiple-choice tasks: prompts and metrics are lm-eval's, scoring is here.

    tasks --lm-eval--> requests --Scorer--> log likelihoods --lm-eval--> items --> value

lm-eval's own HFLM gives the same numbers with softmax_dtype="float32", a few times slower: it reads
every answer from the device by itself and renders every prompt anew.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dmx.errors import DataError
from dmx.evaluate.zero_shot.cache import result_cache, result_key
from dmx.evaluate.zero_shot.scoring import Scorer
from dmx.evaluate.zero_shot.tasks import (
    TASKS,
    Result,
    Task,
    load_tasks,
    quiet_lm_eval,
    read_task,
    require_lm_eval,
)
from dmx.processes import Processes


def zero_shot(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str] = TASKS,
    *,
    limit: int | None = None,
    batch_size: int | str = "auto",
    cache_folder: str | Path | None = None,
    label: str = "",
    quiet: bool = False,
) -> dict[str, Result]:
    """Zero-shot accuracy of a model as it is, or with the assignment that is applied to it.

    For several models with one tokenizer, `ZeroShot` reads and encodes the tasks only once.

    Args:
        model: a causal language model, on any device.
        tokenizer: the model's transformers tokenizer.
        tasks: names of lm-eval multiple-choice tasks; with DMX_DATA, of its task files.
        limit: the first so many items of each task; None = all.
        batch_size: requests at once; "auto" = the largest power of two of tokens that fits.
        cache_folder: keeps results under a hash of everything that they depend on.
        label: what the progress line calls the model.

    Returns:
        task -> result (see `Result`), in the order asked for; `hellaswag` is called
        `hellaswag_1k` where the local sample was used.

    Raises:
        DmxError: lm-eval is not installed. DataError: a task that is not there or is not multiple
        choice. ModelError: not finite, or not even one request fits. RunError: damaged cache file.
    """
    harness = ZeroShot(
        tokenizer,
        tasks,
        limit=limit,
        batch_size=batch_size,
        cache_folder=cache_folder,
        quiet=quiet,
    )
    return harness.evaluate(model, label=label)


class ZeroShot:
    """Tasks read and encoded once, asked of any number of models with one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        tasks: Sequence[str] = TASKS,
        *,
        limit: int | None = None,
        batch_size: int | str = "auto",
        cache_folder: str | Path | None = None,
        quiet: bool = False,
    ) -> None:
        """Arguments and errors: see `zero_shot`."""
        check_settings(tasks, limit, batch_size)
        self.scorer = Scorer(None if batch_size == "auto" else int(batch_size), quiet=quiet)
        self.cache = result_cache(cache_folder)
        with quiet_lm_eval():
            self.tasks = [
                read_task(name, task, source, tokenizer, limit)
                for name, (task, source) in load_tasks(tasks).items()
            ]

    def evaluate(
        self, model: nn.Module, *, label: str = "", processes: Processes | None = None
    ) -> dict[str, Result]:
        """task -> result for one model; see `zero_shot`.

        Args:
            processes: share the requests, and all get all results; None: this one alone.
        """
        processes = processes or Processes.alone()
        keys = {task.name: result_key(model, task) for task in self.tasks}
        results = processes.agree(
            lambda: {task.name: self._kept(task, keys[task.name]) for task in self.tasks}
        )
        missing = [task for task in self.tasks if results[task.name] is None]
        if missing:
            requests = [request for task in missing for request in task.requests]
            answers = self.scorer.answers(model, requests, label, processes)
            start = 0
            with quiet_lm_eval():
                for task in missing:
                    stop = start + len(task.requests)
                    result = task.result(answers[start:stop])
                    results[task.name], start = result, stop
                    if (key := keys[task.name]) is not None and processes.is_main:
                        self.cache.save(key, result, f"{task.name}-")
        return {name: result for name, result in results.items() if result is not None}

    def _kept(self, task: Task, key: dict[str, Any] | None) -> Result | None:
        return None if key is None else self.cache.load(key, f"{task.name}-")


def check_settings(tasks: Sequence[str], limit: int | None, batch_size: int | str) -> None:
    """Raise for settings that cannot be, before anything is loaded; also for a missing lm-eval."""
    require_lm_eval()
    if isinstance(tasks, str) or not tasks or len(set(tasks)) != len(tasks):
        raise DataError(f"tasks={tasks!r} must be a list of different names, at least one")
    if limit is not None and limit < 1:
        raise DataError(f"limit={limit} must be at least 1 item a task, or null for all")
    if batch_size != "auto" and not (isinstance(batch_size, int) and batch_size >= 1):
        raise DataError(f"batch_size={batch_size!r} must be a positive integer or 'auto'")
