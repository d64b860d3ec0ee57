"""Which transform a search config asks for."""

from dmx.assignment.space import SearchSpace
from dmx.errors import AssignmentError
from dmx.searching.config import SearchConfigError, SearchSettings
from dmx.transforms.stage import Transform, check_rotations, read_rotations


def transformed_layers(space: SearchSpace) -> list[str]:
    """The layers that a search quantizes, whose inputs a transform rotates."""
    return [*space.unit_of("weight"), *space.fixed]


def asked_transform(config: SearchSettings, space: SearchSpace) -> Transform:
    """The transform before any learning.

    Raises:
        SearchConfigError: it has to be learned first. AssignmentError: search.rotation.file is
            damaged, or of another model.
    """
    if config.transform == "hadamard_full":
        return Transform("hadamard_full", residual_block=config.residual_block)
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
