"""Which tasks: lm-eval's own, or those of the folder beside DMX_DATA; their items and their metric.

    task files --lm-eval--> requests --tokens, once--> log likelihoods --lm-eval--> items --> value

With DMX_DATA set, the tasks are those of the folder `lm_eval_tasks` beside it, and from nowhere
else; without it they are lm-eval's and their data come from the hub. Every result says which.

Source: Language Model Evaluation Harness 0.4.13 (tasks, acc, acc_norm, stderr).
"""

import contextlib
import difflib
import functools
import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from dmx.data import data_folder
from dmx.errors import DataError, DmxError
from dmx.evaluate.statistics import standard_error
from dmx.evaluate.zero_shot.requests import Request, encode_pairs
from dmx.files import sha256
from dmx.hub import datasets_offline, hub_error_kind, hub_is_reachable

TASKS = ("arc_easy", "arc_challenge", "hellaswag", "winogrande")
METRICS = {
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    "hellaswag_1k": "acc_norm",
    "winogrande": "acc",
}
"""acc: the likeliest continuation is right. acc_norm: likeliest by character. Other tasks: the
metric that their file names first."""
LOCAL_NAMES = {"hellaswag": "hellaswag_1k"}
"""The local copy is a sample and keeps a name of its own in every result."""

Result = dict[str, Any]
"""metric, value, stderr (None for one item), count, items (a number an item, in the task's order),
source, sha256 (of the tokens asked and the answers), lm_eval (version)."""


def require_lm_eval() -> None:
    """Raise DmxError unless lm-eval is installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise DmxError(
            "zero-shot tasks need the package lm-eval, which is not installed. "
            "Run: pip install 'lm-eval>=0.4.13' (or pip install -e '.[eval]')."
        )


def lm_eval_version() -> str:
    """For example 0.4.13."""
    return metadata.version("lm_eval")


@contextlib.contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """No log lines and bars of lm-eval and datasets; its templates compiled once, not once an item
    (most of its time on ARC)."""
    import datasets
    from lm_eval import utils
    from lm_eval.api import task as task_module

    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, not datasets.are_progress_bars_disabled()
    tqdm = task_module.tqdm
    logger.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    task_module.tqdm = lambda docs, **_: docs
    utils.env.from_string = functools.cache(utils.env.from_string)
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
        task_module.tqdm = tqdm
        del utils.env.from_string  # the method of its class shows again


@dataclass(frozen=True)
class Task:
    """What lm-eval asks of one task."""

    name: str
    task: Any
    """lm-eval's; its process_results turns log likelihoods into metrics."""
    docs: list[dict[str, Any]]
    parts: list[slice]
    """Of the requests, one a doc."""
    requests: list[Request]
    metric: str
    source: str
    sha256: str

    def result(self, answers: Sequence[tuple[float, bool]]) -> Result:
        """`answers`: (log likelihood in nats, is the greedy choice) for each request."""
        items = [
            float(self.task.process_results(doc, list(answers[part]))[self.metric])
            for doc, part in zip(self.docs, self.parts, strict=True)
        ]
        values = np.array(items)
        return {
            "metric": self.metric,
            "value": float(values.mean()),
            "stderr": standard_error(values),
            "count": len(items),
            "items": [int(x) if x.is_integer() else x for x in items],
            "source": self.source,
            "sha256": self.sha256,
            "lm_eval": lm_eval_version(),
        }


def load_tasks(asked: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """name -> (lm-eval's task, a sentence on its source), in the order asked for.

    Raises:
        DataError: a task that is not there, not multiple choice, or not one task; data that cannot
            be had.
    """
    from lm_eval.tasks import TaskManager

    if not hasattr(TaskManager, "load"):
        raise DmxError(
            f"lm-eval {lm_eval_version()} is too old. Run: pip install 'lm-eval>=0.4.13'."
        )
    data = data_folder()
    if data is None:
        manager, names = TaskManager(), list(asked)
    else:
        manager = TaskManager(include_path=str(_task_folder(data)), include_defaults=False)
        names = list(dict.fromkeys(LOCAL_NAMES.get(name, name) for name in asked))
    known = sorted(manager.all_tasks)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3) if data is None else known
            where = "lm-eval" if data is None else f"{_task_folder(data)} (DMX_DATA is set)"
            raise DataError(
                f"zero-shot task {name!r} is not in {where}. "
                + (f"There: {', '.join(close)}. " if close else "")
                + ("" if data is None else "Or unset DMX_DATA to use lm-eval's tasks and the hub.")
            )
    loaded = _load_data(manager, names, data)
    if set(loaded) != set(names):
        raise DataError(
            f"zero-shot tasks {', '.join(names)} were asked for and lm-eval returned "
            f"{', '.join(loaded)}: name single tasks, not groups or tags."
        )
    for name, task in loaded.items():
        if task.OUTPUT_TYPE not in ("multiple_choice", "loglikelihood"):
            raise DataError(
                f"zero-shot task {name!r} is of type {task.OUTPUT_TYPE}; only multiple choice is "
                "measured here (for perplexity see dmx.perplexity)."
            )
    return {name: (loaded[name], _source(name, loaded[name], data)) for name in names}


def _task_folder(data: Path) -> Path:
    """`lm_eval_tasks` beside the folder that DMX_DATA names."""
    folder = data.parent / "lm_eval_tasks"
    if not folder.is_dir():
        folder = data.resolve().parent / "lm_eval_tasks"
    if not folder.is_dir():
        raise DataError(
            f"DMX_DATA={data} is set, so zero-shot tasks are read from the folder lm_eval_tasks "
            f"beside it, and {folder} does not exist. Put the task files there, or unset DMX_DATA "
            "to use lm-eval's tasks and the hub."
        )
    # The task files find their data by their own place, as ../data.
    beside = folder.resolve().parent / "data"
    if not (beside.is_dir() and beside.samefile(data)):
        raise DataError(
            f"the task files in {folder} read {beside}, and DMX_DATA names {data}. Put the data in "
            "a folder called data beside lm_eval_tasks and point DMX_DATA at it."
        )
    return folder


def _load_data(manager: Any, names: list[str], data: Path | None) -> dict[str, Any]:
    reachable = data is not None or hub_is_reachable()
    try:
        with datasets_offline(not reachable):
            return dict(manager.load(names)["tasks"])
    except Exception as error:
        if data is not None:
            raise DataError(
                f"zero-shot tasks {', '.join(names)}: {_task_folder(data)} cannot be used "
                f"({type(error).__name__}: {error}). Restore its files and those of {data}."
            ) from error
        kind = "offline" if not reachable else hub_error_kind(error)
        what = (
            "their data are not in the local cache and the Hugging Face hub is out of reach"
            if kind == "offline"
            else f"the hub did not serve their data ({kind}: {error})"
        )
        raise DataError(
            f"zero-shot tasks {', '.join(names)}: {what}. Connect to the network, or point "
            "DMX_DATA at a folder with local copies that has lm_eval_tasks beside it."
        ) from error


def _source(name: str, task: Any, data: Path | None) -> str:
    if data is not None:
        digest = sha256((_task_folder(data) / f"{name}.yaml").read_bytes())[:12]
        return f"DMX_DATA: lm_eval_tasks/{name}.yaml {digest}"
    parts = (task.config.dataset_path, task.config.dataset_name, task.config.test_split)
    return "hub: " + " ".join(str(part) for part in parts if part)


def read_task(name: str, task: Any, source: str, tokenizer: Any, limit: int | None) -> Task:
    """The items of a task, its requests in tokens, and a hash of both.

    Args:
        task: lm-eval's. limit: the first so many items; None = all.
    """
    task.build_all_requests(limit=limit)
    by_doc: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_doc.setdefault(instance.doc_id, []).append(instance)
    docs: list[dict[str, Any]] = []
    pairs: list[tuple[str, str]] = []
    parts: list[slice] = []
    for instances in by_doc.values():
        instances.sort(key=lambda instance: instance.idx)
        docs.append(instances[0].doc)
        parts.append(slice(len(pairs), len(pairs) + len(instances)))
        pairs += [instance.args[:2] for instance in instances]
    requests = encode_pairs(tokenizer, pairs)
    digest = sha256(
        json.dumps(
            [[(r.context, r.continuation) for r in requests], docs], sort_keys=True, default=str
        ).encode()
    )
    metric = METRICS.get(name, next(iter(task.aggregation())))
    return Task(name, task, docs, parts, requests, metric, source, digest)
