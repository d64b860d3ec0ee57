"""Log likelihoods of continuations, in batches that fit into the memory.

A request's log likelihood is the sum of log p over the tokens of its continuation, in nats.
Requests are sorted by length and go through the model in batches of about equally many tokens;
logits are made for continuations only, and their log-softmax is float32.
"""

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dmx.applying.linear import quantized_layers
from dmx.data.batches import check_fits_model
from dmx.errors import DataError, ModelError
from dmx.evaluate.zero_shot.requests import Request
from dmx.models import max_positions
from dmx.models.running import evaluating
from dmx.models.sharding import is_sharded, refuse_pieces, without_gradients
from dmx.processes import Processes
from dmx.progress import progress

GPU_TOKENS = 1 << 16
"""Tokens a batch, padding included; halved until a batch fits."""
CPU_TOKENS = 1 << 10
"""On a CPU more gains nothing; less padding does."""
CHUNK_ELEMENTS = 1 << 26
"""Logits in float32 at once; 256 MiB."""


class NonFiniteError(ModelError):
    """The model gives NaN or Inf: its answers are not answers."""


class Scorer:
    """Log likelihoods of any number of models; what fitted into the memory is kept in mind.

    Attributes:
        batch_size: requests at once; None = as many tokens as fit.
        fitting_tokens: tokens a batch that fitted after one did not; None = none failed yet.
    """

    def __init__(self, batch_size: int | None, *, quiet: bool = False) -> None:
        self.batch_size, self.quiet = batch_size, quiet
        self.fitting_tokens: int | None = None

    def answers(
        self,
        model: nn.Module,
        requests: list[Request],
        label: str,
        processes: Processes | None = None,
    ) -> list[tuple[float, bool]]:
        """(log likelihood in nats, whether each token was the likeliest) of every request; the processes share them.

        Raises:
            ModelError: not finite (`NonFiniteError`), or not even one request fits.
        """
        processes = processes or Processes.alone()
        longest = longest_input(model)
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
        order: Sequence[int] = np.argsort(-lengths, kind="stable").tolist()
        order = processes.own_part(order)
        device = next(model.parameters()).device
        answers = torch.zeros(len(requests), 2, dtype=torch.float64)
        with without_gradients(model), evaluating(model), cached_weights(model):
            batches = list(self._batches(model, lengths, order))
            idle = 0
            # Passes are common, and what one adds to be there counts for nothing.
            if is_sharded(model):
                most = processes.largest(torch.tensor(len(batches), device=device))
                idle = int(most) - len(batches)
            with progress(f"zero-shot {label}".strip(), len(batches), quiet=self.quiet) as advance:
                for rows in batches:
                    scored = self._fit(model, [requests[i] for i in rows], longest)
                    answers[rows] = torch.tensor(scored, dtype=torch.float64)
                    advance("")
                for _ in range(idle):
                    self._fit(model, requests[:1], longest)
        values, hits = processes.total(answers.to(device)).cpu().unbind(1)
        if wrong := int((~values.isfinite()).sum()):
            raise NonFiniteError(
                f"{wrong} of {len(answers)} log likelihoods are not finite: the model gives NaN or "
                "Inf. Use bfloat16 or float32, or other formats."
            )
        return list(zip(values.tolist(), hits.bool().tolist(), strict=True))

    def _tokens_at_once(self, model: nn.Module) -> int:
        on_cpu = next(model.parameters()).device.type == "cpu"
        return self.fitting_tokens or (CPU_TOKENS if on_cpu else GPU_TOKENS)

    def _batches(
        self, model: nn.Module, lengths: np.ndarray, order: Sequence[int]
    ) -> Iterator[list[int]]:
        tokens, start = self._tokens_at_once(model), 0
        while start < len(order):
            rows = self.batch_size or max(1, tokens // max(1, int(lengths[order[start]])))
            yield list(order[start : start + rows])
            start += rows

    def _fit(
        self, model: nn.Module, requests: list[Request], longest: int
    ) -> list[tuple[float, bool]]:
        """Answers to one batch, in halves if the memory does not hold it; what fitted is kept in
        mind for the batches and models to come."""
        width = max(len(r.context) + len(r.continuation) for r in requests)
        too_many = (
            self.fitting_tokens is not None and len(requests) * width > 2 * self.fitting_tokens
        )
        if not (too_many and len(requests) > 1):
            try:
                return _score(model, requests, longest)
            except torch.OutOfMemoryError:
                setting = f"eval.batch_size={self.batch_size or 'auto'} in halves, as memory asks"
                refuse_pieces(model, {setting: True}, "a smaller eval.batch_size")
                if len(requests) == 1:
                    raise ModelError(
                        f"zero-shot: not even one request of {width} tokens fits into the memory "
                        "of the device beside the model. Free memory, or use run.device=cpu."
                    ) from None
            # Outside the handler, where the traceback no longer holds the tensors.
            self.fitting_tokens = 1 << max(0, (len(requests) * width // 2).bit_length() - 1)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        half = len(requests) // 2
        return [
            *self._fit(model, requests[:half], longest),
            *self._fit(model, requests[half:], longest),
        ]


def _score(model: nn.Module, requests: list[Request], longest: int) -> list[tuple[float, bool]]:
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


def longest_input(model: nn.Module) -> int:
    """Tokens; 2048, as in lm-eval, where the config states none."""
    config = getattr(model, "config", None)
    stated = max_positions(config) if hasattr(config, "get_text_config") else None
    return 2048 if stated is None else stated


@contextlib.contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """Within it, quantized weights are computed once; layers that cached none before drop theirs."""
    own = {} if is_sharded(model) else quantized_layers(model)
    layers = [layer for layer in own.values() if not layer.cache_weights]
    for layer in layers:
        layer.cache_weights = True
    try:
        yield
    finally:
        for layer in layers:
            layer.cache_weights, layer._cached = False, None
