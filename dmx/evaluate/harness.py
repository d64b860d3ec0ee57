"""Zero-shot accuracy on multiple-choice tasks: prompts and metrics are lm-eval's, scoring is here.

    task files --lm-eval--> requests --tokens, once--> log likelihoods --lm-eval--> items --> value

A request is a context and a continuation; its log likelihood is the sum of log p over the tokens
of the continuation, in nats. The requests of all tasks are sorted by length and go through the
model in batches of about equally many tokens; logits are made for continuations only, and their
log-softmax is float32. lm-eval's own HFLM gives the same numbers with softmax_dtype="float32", a
few times slower: it reads every answer from the device by itself and renders every prompt anew.

With DMX_DATA set, the tasks are those of the folder `lm_eval_tasks` beside it, and from nowhere
else; without it they are lm-eval's and their data come from the hub. Every result says which.

Source: Language Model Evaluation Harness 0.4.13 (tasks, acc, acc_norm, stderr).
"""

import contextlib
import difflib
import functools
import importlib.util
import inspect
import json
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dmx.applying.layers import quantized_layers
from dmx.applying.quantizers import BlockQuantizer
from dmx.applying.stored import StoredWeight
from dmx.data import data_folder
from dmx.data.batches import check_fits_model
from dmx.errors import DataError, DmxError, ModelError, RunError
from dmx.files import sha256, write_json
from dmx.hub import datasets_offline, hub_error_kind, hub_is_reachable
from dmx.models import max_positions
from dmx.models.identity import model_fingerprint
from dmx.models.running import evaluating
from dmx.progress import progress

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
SCHEMA = "dmx.zero_shot/1"
GPU_TOKENS = 1 << 16
"""Tokens a batch, padding included; halved until a batch fits."""
CPU_TOKENS = 1 << 10
"""On a CPU more gains nothing; less padding does."""
CHUNK_ELEMENTS = 1 << 26
"""Logits in float32 at once; 256 MiB."""
_CODE = (
    "evaluate/harness.py",
    "formats.py",
    "applying/layers.py",
    "applying/quantizers.py",
    "applying/stored.py",
    "numerics/*.py",
    "kernels/*.*",
    "transforms/*.py",
)

Result = dict[str, Any]
"""metric, value, stderr (None for one item), count, items (a number an item, in the task's order),
source, sha256 (of the tokens asked and the answers), lm_eval (version)."""


class NonFiniteError(ModelError):
    """The model gives NaN or Inf: its answers are not answers."""


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


def paired_difference(
    items_a: Sequence[float], items_b: Sequence[float]
) -> tuple[float, float | None, int]:
    """Mean of a - b over items that both were asked, its standard error, and the number of items.

    The standard error is the sample standard deviation of the difference over sqrt(n): most of the
    scatter over items is common to both and cancels. None for a single item.
    """
    if len(items_a) != len(items_b) or not len(items_a):
        raise DataError(
            f"paired items must be as many on both sides and at least one, got {len(items_a)} and "
            f"{len(items_b)}: measure both with the same tasks and the same limit"
        )
    delta = np.asarray(items_a, dtype=np.float64) - np.asarray(items_b, dtype=np.float64)
    return float(delta.mean()), _standard_error(delta), len(delta)


def _standard_error(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


@dataclass(frozen=True)
class _Request:
    """One continuation; token ids."""

    context: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class _Task:
    """What lm-eval asks of one task."""

    name: str
    task: Any
    """lm-eval's; its process_results turns log likelihoods into metrics."""
    docs: list[dict[str, Any]]
    parts: list[slice]
    """Of the requests, one a doc."""
    requests: list[_Request]
    metric: str
    source: str
    sha256: str

    def result(self, answers: Sequence[tuple[float, bool]]) -> Result:
        """`answers`: (log likelihood, is the greedy choice) for each request."""
        items = [
            float(self.task.process_results(doc, list(answers[part]))[self.metric])
            for doc, part in zip(self.docs, self.parts, strict=True)
        ]
        values = np.array(items)
        return {
            "metric": self.metric, "value": float(values.mean()),
            "stderr": _standard_error(values), "count": len(items),
            "items": [int(x) if x.is_integer() else x for x in items],
            "source": self.source, "sha256": self.sha256, "lm_eval": _lm_eval_version(),
        }  # fmt: skip


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
        self.batch_size = None if batch_size == "auto" else int(batch_size)
        self.cache_folder = None if cache_folder is None else Path(cache_folder)
        self.quiet = quiet
        self._fitting_tokens: int | None = None
        with _quiet_lm_eval():
            self._tasks = [
                _read_task(name, task, source, tokenizer, limit)
                for name, (task, source) in _load_tasks(tasks).items()
            ]

    def evaluate(self, model: nn.Module, *, label: str = "") -> dict[str, Result]:
        """task -> result for one model; see `zero_shot`."""
        files = {t.name: self._cache_file(model, t) for t in self._tasks}
        found = {t.name: _read_cache(*files[t.name]) for t in self._tasks}
        missing = [t for t in self._tasks if found[t.name] is None]
        if missing:
            answers = self._answers(model, [r for t in missing for r in t.requests], label)
            start = 0
            with _quiet_lm_eval():
                for task in missing:
                    stop = start + len(task.requests)
                    found[task.name] = task.result(answers[start:stop])
                    start = stop
                    _write_cache(*files[task.name], found[task.name])
        return {name: result for name, result in found.items() if result is not None}

    # --- cache ---------------------------------------------------------------------------------

    def _cache_file(self, model: nn.Module, task: _Task) -> tuple[Path | None, dict[str, Any]]:
        """Where a result lies, and what it depends on; no path where that cannot be told."""
        formats = quantization(model)
        if self.cache_folder is None or formats is None:
            return None, {}
        key = {
            "model": model_fingerprint(model),
            "device": next(model.parameters()).device.type,
            "quantization": formats,
            "task": task.name,
            "metric": task.metric,
            "source": task.source,
            "requests": task.sha256,
            "code": _code_version(),
            "versions": {
                name: metadata.version(name) for name in ("lm_eval", "torch", "transformers")
            },
        }
        digest = sha256(json.dumps(key, sort_keys=True).encode())
        return self.cache_folder / f"{task.name}-{digest[:32]}.json", key

    # --- scoring -------------------------------------------------------------------------------

    def _answers(
        self, model: nn.Module, requests: list[_Request], label: str
    ) -> list[tuple[float, bool]]:
        """(log likelihood in nats, whether each token was the likeliest) of every request."""
        longest = _longest_input(model)
        check_fits_model(
            model, torch.tensor([i for r in requests for i in r.context + r.continuation]), 2
        )
        lengths = np.array([len(r.context) + len(r.continuation) - 1 for r in requests])
        cut = int((lengths > longest).sum())
        if cut:
            warnings.warn(
                f"zero-shot: {cut} of {len(requests)} requests are longer than the model's "
                f"{longest} positions; their first tokens are cut off",
                stacklevel=2,
            )
        lengths = np.minimum(lengths, longest)
        # Longest first: what does not fit shows at once. Equal lengths need no padding.
        order = np.argsort(-lengths, kind="stable")
        answers: list[tuple[float, bool]] = [(math.nan, False)] * len(requests)
        with evaluating(model), cached_weights(model):
            batches = list(self._batches(model, lengths, order))
            with progress(f"zero-shot {label}".strip(), len(batches), quiet=self.quiet) as advance:
                for rows in batches:
                    scored = self._fit(model, [requests[i] for i in rows], longest)
                    for i, answer in zip(rows, scored, strict=True):
                        answers[i] = answer
                    advance("")
        if wrong := sum(not math.isfinite(value) for value, _ in answers):
            raise NonFiniteError(
                f"{wrong} of {len(answers)} log likelihoods are not finite: the model gives NaN or "
                "Inf. Use bfloat16 or float32, or other formats."
            )
        return answers

    def _tokens_at_once(self, model: nn.Module) -> int:
        on_cpu = next(model.parameters()).device.type == "cpu"
        return self._fitting_tokens or (CPU_TOKENS if on_cpu else GPU_TOKENS)

    def _batches(
        self, model: nn.Module, lengths: np.ndarray, order: np.ndarray
    ) -> Iterator[list[int]]:
        tokens, start = self._tokens_at_once(model), 0
        while start < len(order):
            rows = self.batch_size or max(1, tokens // max(1, int(lengths[order[start]])))
            yield order[start : start + rows].tolist()
            start += rows

    def _fit(
        self, model: nn.Module, requests: list[_Request], longest: int
    ) -> list[tuple[float, bool]]:
        """Answers to one batch, in halves if the memory does not hold it; what fitted is kept in
        mind for the batches and models to come."""
        width = max(len(r.context) + len(r.continuation) for r in requests)
        too_many = (
            self._fitting_tokens is not None and len(requests) * width > 2 * self._fitting_tokens
        )
        if not (too_many and len(requests) > 1):
            try:
                return _score(model, requests, longest)
            except torch.OutOfMemoryError:
                if len(requests) == 1:
                    raise ModelError(
                        f"zero-shot: not even one request of {width} tokens fits into the memory "
                        "of the device beside the model. Free memory, or use run.device=cpu."
                    ) from None
            # Outside the handler, where the traceback no longer holds the tensors.
            self._fitting_tokens = 1 << max(0, (len(requests) * width // 2).bit_length() - 1)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        half = len(requests) // 2
        return [
            *self._fit(model, requests[:half], longest),
            *self._fit(model, requests[half:], longest),
        ]


def check_settings(tasks: Sequence[str], limit: int | None, batch_size: int | str) -> None:
    """Raise for settings that cannot be, before anything is loaded; also for a missing lm-eval."""
    _require_lm_eval()
    if isinstance(tasks, str) or not tasks or len(set(tasks)) != len(tasks):
        raise DataError(f"tasks={tasks!r} must be a list of different names, at least one")
    if limit is not None and limit < 1:
        raise DataError(f"limit={limit} must be at least 1 item a task, or null for all")
    if batch_size != "auto" and not (isinstance(batch_size, int) and batch_size >= 1):
        raise DataError(f"batch_size={batch_size!r} must be a positive integer or 'auto'")


@torch.inference_mode()
def _score(model: nn.Module, requests: list[_Request], longest: int) -> list[tuple[float, bool]]:
    """One forward pass. A causal model never sees the padding on the right, so no mask is needed."""
    device = next(model.parameters()).device
    # The last token predicts nothing that is asked for.
    inputs = [(r.context + r.continuation)[-(longest + 1) :][:-1] for r in requests]
    width = max(map(len, inputs))
    ids = torch.zeros(len(requests), width, dtype=torch.int64)
    for row, tokens in enumerate(inputs):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    first = [len(t) - len(r.continuation) for t, r in zip(inputs, requests, strict=True)]
    counts = [len(r.continuation) for r in requests]
    if min(first) < 0:
        raise DataError(
            f"zero-shot: a continuation of {max(counts)} tokens is longer than the model's {longest} "
            "positions. Use a model with more positions, or another task."
        )
    logits = _last_logits(model, ids.to(device), keep=width - min(first))
    offset = width - logits.shape[1]
    rows = torch.repeat_interleave(torch.arange(len(requests)), torch.tensor(counts)).to(device)
    columns = torch.cat([torch.arange(f, f + n) for f, n in zip(first, counts, strict=True)])
    columns = columns.to(device) - offset
    targets = torch.tensor([i for r in requests for i in r.continuation]).to(device)
    log_p, greedy = [], []
    step = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    for part in torch.arange(len(targets), device=device).split(step):
        chosen = logits[rows[part], columns[part]].float()
        log_p.append(-nn.functional.cross_entropy(chosen, targets[part], reduction="none"))
        greedy.append(chosen.argmax(-1) == targets[part])
    # Summed on the CPU in order: atomic additions on a GPU would round differently each time.
    starts = np.cumsum([0, *counts[:-1]])
    sums = np.add.reduceat(torch.cat(log_p).double().cpu().numpy(), starts)
    hits = np.logical_and.reduceat(torch.cat(greedy).cpu().numpy(), starts)
    return list(zip(sums.tolist(), hits.tolist(), strict=True))


def _last_logits(model: nn.Module, ids: Tensor, keep: int) -> Tensor:
    """(batch, >= keep, vocab): of the last `keep` positions where the model can leave out others."""
    options = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = keep
    logits: Tensor = model(input_ids=ids, use_cache=False, **options).logits
    return logits


def _longest_input(model: nn.Module) -> int:
    """Tokens; 2048, as in lm-eval, where the config states none."""
    config = getattr(model, "config", None)
    stated = max_positions(config) if hasattr(config, "get_text_config") else None
    return 2048 if stated is None else stated


# ---------------------------------------------------------------- what a result depends on


def quantization(model: nn.Module) -> dict[str, list[str | None]] | None:
    """layer -> [weight quantizer, input quantizer] of the assignment that is applied, and its input
    transform where there is one; {} without an assignment, None where a quantizer is not one of dmx
    alone (guarded by another package)."""
    found: dict[str, list[str | None]] = {}
    for name, layer in quantized_layers(model).items():
        texts: list[str | None] = []
        for quantizer in (layer.weight_quantizer, layer.input_quantizer):
            if quantizer is None:
                texts.append(None)
            elif type(quantizer) is BlockQuantizer:
                texts.append(f"{quantizer.block_format} {quantizer.scale_rule}")
            elif type(quantizer) is StoredWeight:
                texts.append(f"{quantizer.block_format} stored {quantizer.digest}")
            else:
                return None
        if layer.input_transform is not None:
            texts.append(layer.input_transform.digest)
        found[name] = texts
    return found


@contextlib.contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """Within it, quantized weights are computed once; layers that cached none before drop theirs."""
    layers = [layer for layer in quantized_layers(model).values() if not layer.cache_weights]
    for layer in layers:
        layer.cache_weights = True
    try:
        yield
    finally:
        for layer in layers:
            layer.cache_weights, layer._cached = False, None


@functools.cache
def _code_version() -> str:
    """Hash of the sources that decide an answer."""
    root = Path(__file__).resolve().parent.parent
    files = sorted(path for pattern in _CODE for path in root.glob(pattern) if path.is_file())
    return sha256(b"".join(path.read_bytes() for path in files))


def _read_cache(path: Path | None, key: dict[str, Any]) -> Result | None:
    """A kept result; None without one.

    Raises:
        RunError: the file is damaged; it is never taken for a result.
    """
    if path is None or not path.exists():
        return None
    way_out = "Delete it to measure again."
    try:
        body = json.loads(path.read_text())
        sound = (
            body["schema"] == SCHEMA
            and body["key"] == key
            and body["sha256"] == _checksum(body["result"])
        )
        result: Result = body["result"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"zero-shot cache file {path} is damaged ({error}). {way_out}") from error
    if not sound:
        raise RunError(
            f"zero-shot cache file {path} is damaged (its checksum or key differs). {way_out}"
        )
    return result


def _write_cache(path: Path | None, key: dict[str, Any], result: Result | None) -> None:
    if path is not None and result is not None:
        body = {"schema": SCHEMA, "key": key, "result": result, "sha256": _checksum(result)}
        write_json(path, body)


def _checksum(result: Result) -> str:
    return sha256(json.dumps(result, sort_keys=True).encode())


# ---------------------------------------------------------------- lm-eval


def _require_lm_eval() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise DmxError(
            "zero-shot tasks need the package lm-eval, which is not installed. "
            "Run: pip install 'lm-eval>=0.4.13' (or pip install -e '.[eval]')."
        )


def _lm_eval_version() -> str:
    return metadata.version("lm_eval")


@contextlib.contextmanager
def _quiet_lm_eval() -> Iterator[None]:
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


def _load_tasks(asked: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """name -> (lm-eval's task, a sentence on its source), in the order asked for.

    Raises:
        DataError: a task that is not there, not multiple choice, or not one task; data that cannot
            be had.
    """
    from lm_eval.tasks import TaskManager

    if not hasattr(TaskManager, "load"):
        raise DmxError(
            f"lm-eval {_lm_eval_version()} is too old. Run: pip install 'lm-eval>=0.4.13'."
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


def _read_task(name: str, task: Any, source: str, tokenizer: Any, limit: int | None) -> _Task:
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
    requests = _encode(tokenizer, pairs)
    digest = sha256(
        json.dumps(
            [[(r.context, r.continuation) for r in requests], docs], sort_keys=True, default=str
        ).encode()
    )
    metric = METRICS.get(name, next(iter(task.aggregation())))
    return _Task(name, task, docs, parts, requests, metric, source, digest)


def _encode(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[_Request]:
    """Tokens of (context, continuation), as lm-eval splits them.

    Spaces at the end of a context belong to the continuation; both are encoded as one text, which
    is cut after as many tokens as the context alone has. An empty context is the first token of a
    text: BOS, or EOS where there is none.
    """
    prefix = (
        tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    )
    moved = []
    for context, continuation in pairs:
        bare = context.rstrip()
        moved.append((bare, context[len(bare) :] + continuation))
    bare_texts = [continuation for context, continuation in moved if not context]
    texts = {text for c, t in moved if c for text in (c, c + t)}
    begin = tokenizer.decode([prefix]) if prefix is not None else None
    # A text that spells its BOS out must not get another one.
    begun = {text for text in texts if begin is not None and text.startswith(begin)}
    ids = _token_ids(tokenizer, sorted(texts - begun))
    ids |= _token_ids(tokenizer, sorted(begun), add_special_tokens=False)
    bare_ids = _token_ids(tokenizer, sorted(set(bare_texts)), add_special_tokens=False)
    requests = []
    for context, continuation in moved:
        if context:
            cut = len(ids[context])
            request = _Request(ids[context], ids[context + continuation][cut:])
        elif prefix is None:
            raise DataError("an empty context needs a tokenizer with a BOS or EOS token")
        elif bare_ids[continuation][:1] == [prefix]:
            request = _Request([prefix], bare_ids[continuation][1:])
        else:
            request = _Request([prefix], bare_ids[continuation])
        if not request.continuation or not request.context:
            raise DataError(
                f"zero-shot: {continuation!r} after {context[-40:]!r} gives no tokens of its own "
                "with this tokenizer"
            )
        requests.append(request)
    return requests


def _token_ids(tokenizer: Any, texts: list[str], **options: bool) -> dict[str, list[int]]:
    if not texts:
        return {}
    found = tokenizer(texts, verbose=False, **options)["input_ids"]
    return dict(zip(texts, found, strict=True))
