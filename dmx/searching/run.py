"""`search`: one function for every method; checks first, then searches."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dmx.applying.apply import is_applied
from dmx.assignment.assignment import Assignment, make_assignment
from dmx.assignment.budget import Budget
from dmx.assignment.facts import SearchFacts
from dmx.assignment.space import SearchSpace, build_space
from dmx.assignment.targets import SEARCH_TARGETS, split_groups
from dmx.data.batches import batches_sha256, list_batches
from dmx.errors import FormatError, ModelError
from dmx.files import sha256, write_text
from dmx.formats import BlockFormat
from dmx.models import check_searchable
from dmx.models.identity import model_fingerprint
from dmx.progress import Stopwatch
from dmx.searching.config import SearchConfig
from dmx.searching.differentiable import DifferentiableSearch
from dmx.searching.heuristics import Scan, heuristic_choice, soft_start
from dmx.searching.polish import Polish
from dmx.searching.result import SearchResult
from dmx.searching.transforming import asked_transform, transformed_layers
from dmx.transforms.stage import Transform, transformed


def search_space(model: nn.Module, config: SearchConfig) -> SearchSpace:
    """Units and candidates of a model under a config; a meta-device model will do.

    Raises:
        ModelError: quantized, PEFT, mostly outside nn.Linear, nothing to search, a pattern that
            matches nothing. FormatError: patterns that split a group which the target fuses.
        AssignmentError: search.transform_file is missing, damaged, or of another model.
    """
    if is_applied(model):
        raise ModelError("an assignment is applied to this model; call dmx.restore(model) first")
    check_searchable(model, allow_unsearched=config.allow_unsearched)
    space = build_space(
        model,
        config.format_family.formats,
        units=config.units,
        exclude=config.exclude,
        fixed=config.fixed,
        include_lm_head=config.include_lm_head,
        weighting=config.weighting,
        choices=config.operands,
    )
    if config.transform_file is not None:
        asked_transform(config, space)
    if config.target != "any" and SEARCH_TARGETS[config.target].needs_fused_units:
        _check_groups(space, config)
    return space


def _check_groups(space: SearchSpace, config: SearchConfig) -> None:
    """Raise FormatError where exclude or fixed take only some layers of a fused group."""
    formats = {layer: "searched" for unit in space.units for layer in unit.layers}
    formats |= {layer: block_format.name for layer, block_format in space.fixed.items()}
    if split := split_groups(formats, space.unquantized):
        raise FormatError(
            f"search.target={config.target} runs each fused group as one product, and search.exclude "
            f"or search.fixed take some of its layers only in {len(split)} groups, first {split[0]}. "
            "Name all layers of a group, or none."
        )


def search(
    model: nn.Module,
    batches: Iterable[Tensor],
    budget: Budget,
    config: SearchConfig,
    *,
    folder: str | Path | None = None,
    score_folder: str | Path | None = None,
) -> SearchResult:
    """Choose a format for every unit of a model so that the average bits stay within a budget.

    Args:
        model: a causal language model of transformers, or one called with `input_ids=` that
            returns an object with `.logits`; fp32, bf16 or fp16, on any device.
        batches: int64 token ids (batch, length), all of one shape; cycled, reshuffled by
            `config.seed` each pass. A generator is listed once.
        folder: makes the search resumable; a differentiable one leaves history.jsonl and
            offsets.npz there, a polish polish.jsonl.
        score_folder: where scans keep their score files; default `folder`/scores. Searches that
            share it share scans.

    Returns:
        The result; the model, its mode and its requires_grad are as they were, also after an
        exception.

    Raises:
        TypeError: budget or config is not of its class. BudgetError: unreachable. ModelError, FormatError, DataError: see their messages.
        RunError: the folder holds another search, or cannot be written.
    """
    if not isinstance(budget, Budget):
        raise TypeError(
            f"budget must be a dmx.Budget, got {budget!r}: dmx.Budget(5.0), or "
            'dmx.Budget(5.25, unit="bits_per_element")'
        )
    if not isinstance(config, SearchConfig):
        raise TypeError(f"config must be a dmx.SearchConfig, got {config!r}: dmx.SearchConfig()")
    _check_weights(model)
    space = search_space(model, config)
    space.check_budget(budget)
    listed = list_batches(batches, model)
    config.check_batches(len(listed))
    where = None if folder is None else Path(folder)
    clock = Stopwatch()
    device = next(model.parameters()).device
    learns = config.learns_rotation
    transform = Transform("hadamard_block") if learns else asked_transform(config, space)
    layers = transformed_layers(space)
    identity = model_fingerprint(model) | {"transform": transform.key()}
    # Whatever mode the caller is in: gradients are needed, and numbers must not depend on autocast.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        ExitStack() as stage,
    ):
        if where is not None:
            # An unwritable folder must show now, not after the first checkpoint's worth of steps.
            write_text(where / ".writable", "").unlink(missing_ok=True)
        if score_folder is None and where is not None:
            score_folder = where / "scores"
        stage.enter_context(transformed(model, transform, layers))
        scan = Scan(
            model, listed, space, config,
            fingerprint=identity | {"batches": batches_sha256(listed[: config.score_batches])},
            folder=None if score_folder is None else Path(score_folder),
        )  # fmt: skip
        if config.name == "differentiable":
            start = None
            if config.start != "constant":
                # The scan's model is transformed already.
                known = replace(config, name=config.start, transform="none", transform_file=None)
                found, wanted, _ = heuristic_choice(scan, space, budget, known)
                start = soft_start(space, config.format_family, found, wanted, config.start_spread)
            if learns:
                stage.close()  # rotations are learned on the model as it is
            run = DifferentiableSearch(
                model, listed, space, budget, config, folder=where, start=start,
                fingerprint=_fingerprint(identity, listed, budget, config),
            )  # fmt: skip
            run.clock = clock
            run.run()
            if run.rotations is not None:
                transform = run.rotations.transform()
                identity |= {"transform": transform.key()}
                stage.enter_context(transformed(model, transform, layers))
            choice, preference = run.projected_choice(), run.preference()
            history, raw, complaints = run.history, np.stack(run.raw_rows), run.warnings
            graph = "on" if run.uses_graph else "off"
        else:
            choice, preference, _ = heuristic_choice(scan, space, budget, config)
            history, raw, complaints, graph = [], None, [], "off"
        rounds: list[dict[str, Any]] = []
        if config.polish_rounds:
            polish = Polish(
                model, listed, space, budget, config, start=choice, folder=where, clock=clock,
                fingerprint=_fingerprint(identity, listed, budget, config, with_polish=True),
            )  # fmt: skip
            polish.run()
            choice, preference, rounds = polish.choice, polish.preference(), polish.rows
    assignment = make_assignment(
        space, choice, model,
        scale_rules=config.scale_rule, budget=budget, search=config.summary(),
    )  # fmt: skip
    return SearchResult(
        assignment=transform.attach(assignment, model),
        units=tuple(u.name for u in space.units),
        preference=preference,
        seconds=clock.seconds,
        history=history,
        polish=rounds,
        raw_offsets=raw,
        cuda_graph=graph,
        warnings=complaints,
    )  # fmt: skip


def _check_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"{name} is on the meta device: load the model's weights first")
        if parameter.dtype == torch.float64:
            raise ModelError(
                f"{name} is float64; formats are defined on float32, bfloat16 and float16. Convert "
                "the model first: model.float()"
            )


def uniform_assignment(
    model: nn.Module, block_format: BlockFormat, config: SearchConfig
) -> Assignment:
    """Every searched layer in one format, whatever the family of the config, with its transform."""
    space = search_space(model, replace(config, operands="joint"))
    alone = replace(space, formats=(block_format,))
    choice = np.zeros(len(space.units), dtype=np.int64)
    facts = SearchFacts(name="uniform", seed=config.seed)
    made = make_assignment(alone, choice, model, scale_rules=config.scale_rule, search=facts)
    return asked_transform(config, alone).attach(made, model)


def _fingerprint(
    identity: dict[str, Any],
    batches: list[Tensor],
    budget: Budget,
    config: SearchConfig,
    *,
    with_polish: bool = False,
) -> str:
    """Hash of everything that the numbers of a search depend on, but for the machine; without its
    polish, which may be added to a search that has ended."""
    settings = asdict(config)
    del settings["checkpoint_every"], settings["transform_file"]  # its content is in `identity`
    if not with_polish:
        del settings["polish_rounds"], settings["polish_batches"]
    body = {
        "config": settings,
        "budget": asdict(budget),
        "batches": batches_sha256(batches),
        **identity,
    }
    return sha256(json.dumps(body, sort_keys=True).encode())
