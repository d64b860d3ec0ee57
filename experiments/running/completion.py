"""What a shell evaluates as it starts: Hydra's script for completing arguments, without what a command imports."""

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3")
def main(_settings: DictConfig) -> None:
    """Only ever called with -sc install=<shell> or uninstall=<shell>, which Hydra answers itself."""
