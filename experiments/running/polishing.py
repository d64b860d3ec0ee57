"""What `search.polish.rounds=auto` becomes, once it is known what the run has."""

import dataclasses

import torch
from omegaconf import OmegaConf

from dmx.searching.adaptive import FEWEST_BATCHES
from dmx.searching.config import PolishConfig, SearchSettings

from .settings import CONFIGS

POLISHED = CONFIGS / "search" / "polished.yaml"


def polished_rounds() -> int:
    """Of configs/search/polished.yaml."""
    return int(OmegaConf.load(POLISHED).polish.rounds)


def automatic_rounds(
    weights: str, batches: int, device: torch.device, *, is_whole: bool
) -> tuple[int, str]:
    """What auto becomes, and why.

    A polish fits the errors that it measures, those of weights rounded to nearest by the search's own scale rules; whatever
    changes them later, another rule too, took what it had gained.

    Args:
        weights: what they become.
        batches: of calibration.
    """
    if weights != "nearest":
        return 0, f"weights={weights} changes the errors that a polish would fit"
    if batches < FEWEST_BATCHES:
        return 0, f"{batches} calibration batches are too few (from {FEWEST_BATCHES} on)"
    if device.type != "cuda":
        return (
            0,
            "the model is not on a GPU, where a polish of 135 M parameters took one to three minutes",
        )
    if not is_whole:
        return 0, "the model is held block by block or sharded, where a polish takes long"
    return polished_rounds(), "weights stay nearest, and the model is on a GPU"


def with_rounds(settings: SearchSettings, rounds: int) -> SearchSettings:
    """The settings with a number for auto; others as they are."""
    if settings.polish.rounds != "auto":
        return settings
    batches = settings.polish.batches if rounds else None
    polish = PolishConfig(rounds=rounds, batches=batches)
    return dataclasses.replace(settings, polish=polish)
