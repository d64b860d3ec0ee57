"""Parts of the result pages in docs/results."""

from collections.abc import Iterable, Sequence
from typing import Any


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a table."""
    return [
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]


def met(is_met: bool) -> str:
    """The word of a verdict."""
    return "met" if is_met else "missed"
