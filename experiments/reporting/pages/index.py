"""docs/results/README.md: the result pages, and what each of them says."""

from __future__ import annotations

from collections.abc import Mapping

_BY_HAND = {
    "bench.md": (
        "Speed of the arithmetic, of its kernels and of searches, beside peers: made by `python -m scripts.benchmarks`."
    ),
}
"""Pages that other scripts write."""


def index_page(pages: Mapping[str, str]) -> str:
    """A line a page, with its first paragraph.

    Args:
        pages: file name -> markdown; a title, and then what the page says.
    """
    said = {name: _first_paragraph(text) for name, text in pages.items()} | _BY_HAND
    lines = [
        "# Results",
        "",
        "Made from the records in [records](records) by `python scripts/make_tables.py`; a test holds them equal.",
        "",
        *(f"- [{name.removesuffix('.md')}]({name}): {said[name]}" for name in sorted(said)),
    ]
    return "\n".join(lines) + "\n"


def _first_paragraph(text: str) -> str:
    """The lines between the title and the next empty line."""
    _, _, rest = text.partition("\n\n")
    return " ".join(rest.partition("\n\n")[0].split("\n"))
