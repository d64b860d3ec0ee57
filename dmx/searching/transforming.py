"""Which transform a search config asks for."""

import numpy as np

from dmx.assignment.space import SearchSpace
from dmx.errors import AssignmentError
from dmx.models.linears import fused_group
from dmx.searching.config import PolishConfig, SearchConfig, SearchConfigError, SearchSettings
from dmx.transforms.stage import Transform, check_rotations, read_rotations

SELECTING_BATCHES = 2
"""Calibration batches, the first so many, on which inputs are selected."""


def transformed_layers(space: SearchSpace) -> list[str]:
    """The layers that a search quantizes, whose inputs a transform rotates."""
    return [*space.unit_of("weight"), *space.fixed]


def asked_transform(config: SearchSettings, space: SearchSpace) -> Transform:
    """The transform before any learning.

    Raises:
        SearchConfigError: it has to be learned or measured first. AssignmentError: search.rotation.file is
            damaged, or of another model.
    """
    if config.transform == "hadamard_full":
        return Transform("hadamard_full", residual_block=config.residual_block)
    if config.transform == "hadamard_selected":
        raise SearchConfigError(
            "search.transform=hadamard_selected: which inputs are rotated is measured on calibration batches, and "
            "there are none here. Search (dmx.search, also with name=uniform), evaluate an assignment of such a "
            "search, or use search.transform=hadamard_block."
        )
    if config.transform != "learned":
        return Transform(config.transform)
    if config.rotation.file is None:
        raise SearchConfigError(
            "search.transform=learned: this needs rotations that are learned already. Give "
            "search.rotation.file=path/to/transform.safetensors of a differentiable search, or use "
            "search.transform=hadamard_block, which they start from."
        )
    setting = f"search.rotation.file={config.rotation.file}"
    try:
        with open(config.rotation.file, "rb") as file:
            rotations = read_rotations(file.read(), setting)
    except OSError as error:
        raise AssignmentError(
            f"{setting}: cannot be read ({error.strerror}). Give the path of a transform.safetensors "
            "that a search with search.transform=learned wrote."
        ) from error
    check_rotations(rotations, transformed_layers(space))
    return Transform("learned", rotations=rotations)


def selecting_config(config: SearchConfig, batches: int) -> SearchConfig:
    """What is measured to select inputs: a unit for each input of layers, whatever the search's units are.

    Args:
        batches: how many there are.
    """
    return config.for_search(
        "kl",
        units="fused",
        choices="joint",
        transform="none",
        polish=PolishConfig(),
        score_batches=min(SELECTING_BATCHES, batches),
    )


def selected_transform(
    space: SearchSpace, measured: SearchSpace, plain: np.ndarray, rotated: np.ndarray
) -> Transform:
    """hadamard_selected, for all inputs but those that lose by a rotation.

    Args:
        space: of the search. measured: with a unit for each input of its layers.
        plain, rotated: (units of `measured`,) KL of each unit alone at the smallest format, nats/token.
    """
    inputs = {fused_group(layer) for layer in transformed_layers(space)}
    for unit, before, after in zip(measured.units, plain, rotated, strict=True):
        if not after < before:
            inputs.discard(fused_group(unit.layers[0]))
    return Transform("hadamard_selected", inputs=frozenset(inputs))
