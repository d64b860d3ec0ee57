"""`search`: one function for every method; checks first, then searches."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from dmx.assignment import Assignment, make_assignment
from dmx.budget import Budget, SearchSpace, build_space
from dmx.errors import ModelError
from dmx.files import sha256, write_text
from dmx.formats import BlockFormat
from dmx.layers import is_applied
from dmx.models import architecture_sha256, check_searchable
from dmx.searching.batches import batches_sha256, list_batches
from dmx.searching.config import SearchConfig
from dmx.searching.differentiable import DifferentiableSearch
from dmx.searching.heuristics import heuristic_choice
from dmx.searching.result import SearchResult


def search_space(model: nn.Module, config: SearchConfig) -> SearchSpace:
    """Units and candidates of a model under a config; a meta-device model will do.

    Raises:
        ModelError: quantized, PEFT, mostly outside nn.Linear, nothing to search, a pattern that
            matches nothing.
    """
    if is_applied(model):
        raise ModelError("an assignment is applied to this model; call dmx.restore(model) first")
    check_searchable(model, allow_unsearched=config.allow_unsearched)
    return build_space(
        model,
        config.format_family.formats,
        units=config.units,
        exclude=config.exclude,
        fixed=config.fixed,
        include_lm_head=config.include_lm_head,
        weighting=config.weighting,
    )


def search(
    model: nn.Module,
    batches: Iterable[Tensor],
    budget: Budget,
    config: SearchConfig,
    *,
    folder: str | Path | None = None,
) -> SearchResult:
    """Choose a format for every unit of a model so that the average bits stay within a budget.

    Args:
        model: a causal language model of transformers, or one called with `input_ids=` that
            returns an object with `.logits`; fp32, bf16 or fp16, on any device.
        batches: int64 token ids (batch, length), all of one shape; cycled, reshuffled by
            `config.seed` each pass. A generator is listed once.
        folder: makes a differentiable search resumable and receives history.jsonl and offsets.npz.

    Returns:
        The result; the model, its mode and its requires_grad are as they were, also after an
        exception.

    Raises:
        BudgetError: unreachable budget. ModelError, FormatError, DataError: see their messages.
        RunError: the folder holds another search, or cannot be written.
    """
    space = search_space(model, config)
    space.check_budget(budget)
    listed = list_batches(batches, model)
    where = None if folder is None else Path(folder)
    started = time.perf_counter()
    if config.name == "differentiable":
        run = DifferentiableSearch(
            model, listed, space, budget, config,
            folder=where, fingerprint=_fingerprint(model, listed, budget, config),
        )  # fmt: skip
        if where is not None:
            # An unwritable folder must show now, not after the first checkpoint's worth of steps.
            write_text(where / ".writable", "").unlink(missing_ok=True)
        run.run()
        choice, preference = run.projected_choice(), run.preference()
        history, raw, complaints = run.history, np.stack(run.raw_rows), run.warnings
    else:
        choice, preference, _ = heuristic_choice(model, listed, space, budget, config)
        history, raw, complaints = [], None, []
    return SearchResult(
        assignment=make_assignment(
            space, choice, model,
            scale_rule=config.scale_rule, budget=budget, search=config.summary(),
        ),
        units=tuple(u.name for u in space.units),
        preference=preference,
        seconds=time.perf_counter() - started,
        history=history,
        raw_offsets=raw,
        warnings=complaints,
    )  # fmt: skip


def uniform_assignment(
    model: nn.Module, block_format: BlockFormat, config: SearchConfig
) -> Assignment:
    """Every searched layer in one format, whatever the family of the config."""
    space = search_space(model, config)
    alone = SearchSpace(**{**space.__dict__, "formats": (block_format,)})
    choice = np.zeros(len(space.units), dtype=np.int64)
    summary = {"name": "uniform", "family": None, "seed": config.seed}
    return make_assignment(alone, choice, model, scale_rule=config.scale_rule, search=summary)


def _fingerprint(
    model: nn.Module, batches: list[Tensor], budget: Budget, config: SearchConfig
) -> str:
    """Hash of everything that the numbers of a search depend on, but for the machine."""
    settings = asdict(config)
    del settings["checkpoint_every"]
    parameter = next(model.parameters())
    # Weights by a cheap sum each: enough to tell two checkpoints of one architecture apart.
    sums = [float(p.detach().float().sum()) for p in model.parameters()]
    model_config = getattr(model, "config", None)
    body = {
        "config": settings,
        "budget": asdict(budget),
        "batches": batches_sha256(batches),
        "architecture": architecture_sha256(model_config) if model_config is not None else None,
        "weights": sums,
        "dtype": str(parameter.dtype),
    }
    return sha256(json.dumps(body, sort_keys=True).encode())
