"""Numbers of a command line that may not be lower than they make sense."""

import argparse
from collections.abc import Mapping

from dmx.errors import RunError


def check_least(asked: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Raise RunError for an argument, or one of a list, that is below its least; None was not given."""
    for name, low in least.items():
        given = getattr(asked, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < low:
                raise RunError(f"--{name.replace('_', '-')} {value} must be at least {low}")
