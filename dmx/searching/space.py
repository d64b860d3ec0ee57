"""The space of a search: units and candidates of a model under a config, what its target holds of them, and ranges of inputs."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor, nn

from dmx.applying.apply import is_applied
from dmx.assignment.space import SearchSpace, build_space
from dmx.assignment.targets import split_groups
from dmx.errors import FormatError, ModelError
from dmx.formats import BF16
from dmx.models import check_searchable
from dmx.models.backbone import unread_layers
from dmx.models.experts import experts_path, linear_experts
from dmx.models.in_files import float32_layers
from dmx.models.linears import linear_layers
from dmx.models.memory import MicroBatch
from dmx.models.ranges import input_amax
from dmx.searching.config import SearchSettings
from dmx.searching.transforming import asked_transform


def search_space(
    model: nn.Module, config: SearchSettings, *, unreached: Collection[str] | None = None
) -> SearchSpace:
    """Units and candidates of a model under a config; a meta-device model will do.

    Args:
        unreached: layers that no calibration token runs; None: those outside the text backbone.

    Raises:
        ModelError: quantized, PEFT, mostly outside nn.Linear, nothing to search, a pattern that
            matches nothing. FormatError: patterns that split a group which the target fuses.
        AssignmentError: search.rotation.file is missing, damaged, or of another model.
    """
    if is_applied(model):
        raise ModelError("an assignment is applied to this model; call dmx.restore(model) first")
    with linear_experts(model, config.experts_form):
        return _search_space(model, config, unreached)


def _search_space(
    model: nn.Module, config: SearchSettings, unreached: Collection[str] | None
) -> SearchSpace:
    check_searchable(model, allow_unsearched=config.allow_unsearched)
    kept = {*float32_layers(model)} | {*(unread_layers(model) if unreached is None else unreached)}
    runtime = config.runtime
    if runtime is not None:
        kept |= {name for name in linear_layers(model) if runtime.builds_unquantized(name)}
    space = build_space(
        model,
        config.format_family.formats,
        units=config.units,
        experts=config.experts,
        joins_experts=runtime is not None and runtime.needs_fused_units,
        exclude=config.exclude,
        fixed=config.fixed,
        include_lm_head=config.include_lm_head,
        weighting=config.weighting,
        choices=config.choices,
        input_format=config.input_format,
        kept=kept,
    )
    if config.rotation.file is not None:
        asked_transform(config, space)
    _check_experts(space, config)
    if runtime is not None and runtime.needs_fused_units:
        _check_groups(space, config)
    return space


def seeing_inputs(
    model: nn.Module,
    space: SearchSpace,
    batches: Sequence[Tensor],
    micro: MicroBatch | None = None,
) -> SearchSpace:
    """The space with what inputs reach on the batches, where a candidate needs it.

    Args:
        model: with its transform.
        micro: rows that run at a time, None: whole batches.
    """
    if not space.needs_input_amax():
        return space
    layers = [*space.unit_of("weight"), *space.fixed]
    return replace(space, input_amax=input_amax(model, layers, batches, micro))


def _check_experts(space: SearchSpace, config: SearchSettings) -> None:
    """Raise FormatError for experts that no export for the target holds."""
    if config.runtime is None or config.runtime.takes_experts:
        return
    experts = [layer for unit in space.units for layer in unit.layers if experts_path(layer)]
    experts += [layer for layer, f in space.fixed.items() if f is not BF16 and experts_path(layer)]
    if experts:
        raise FormatError(
            f"search.target={config.target}: how its files hold quantized experts is not known here ({len(experts)} "
            f"layers, first {experts[0]}). Set search.exclude=['*.experts.*'], or search.target=vllm."
        )


def _check_groups(space: SearchSpace, config: SearchSettings) -> None:
    """Raise FormatError where exclude or fixed take only some layers of a fused group."""
    formats = {layer: "searched" for unit in space.units for layer in unit.layers}
    formats |= {layer: block_format.name for layer, block_format in space.fixed.items()}
    if split := split_groups(formats, space.unquantized):
        raise FormatError(
            f"search.target={config.target} runs each fused group as one product, and search.exclude "
            f"or search.fixed take some of its layers only in {len(split)} groups, first {split[0]}. "
            "Name all layers of a group, or none."
        )
