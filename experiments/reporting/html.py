"""HTML that escapes by default, and the shell that every report page has."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plots.canvas import figure_uri

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLESHEET = Path(__file__).with_name("report.css")
_VOID = ("img", "br", "meta")


class Html(str):
    """Text that is markup already; every other string is escaped by `el`."""


Child = str | None | Iterable[Any]


def el(tag: str, /, *children: Child, **attributes: str | None) -> Html:
    """An HTML element. `cls` is the class, `_` in names becomes `-`, attributes of None are left
    out."""
    given = "".join(
        f' {"class" if key == "cls" else key.replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(_flatten_markup(children))
    return Html(f"<{tag}{given}>" if tag in _VOID else f"<{tag}{given}>{inner}</{tag}>")


def _flatten_markup(children: Iterable[Child]) -> Iterator[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            yield child if isinstance(child, Html) else html.escape(child)
        else:
            yield from _flatten_markup(child)


def scroll_table(head: Html, body: Iterable[Html], cls: str | None = None) -> Html:
    """A table that scrolls sideways where the window is narrow."""
    return el("div", el("table", el("thead", head), el("tbody", body), cls=cls), cls="scroll")


def pairs_table(pairs: Iterable[tuple[str, str]]) -> Html:
    """Names and what they are, one below the other."""
    rows = (el("tr", el("th", name, scope="row"), el("td", text)) for name, text in pairs)
    return el("div", el("table", el("tbody", rows), cls="pairs"), cls="scroll")


def picture(figure: Figure, caption: str, kind: str = "svg") -> Html:
    """A figure with its caption; kind svg or png."""
    image = el("img", src=figure_uri(figure, kind), alt=caption)
    return el("figure", el("div", image, cls="panel"), el("figcaption", caption))


def section(title: str, body: Any) -> Html | None:
    """A section; None without a body."""
    return el("section", el("h2", title), body) if body else None


def page(
    title: str,
    eyebrow: str,
    warnings: Sequence[Any],
    head: Html,
    sections: Sequence[Html | None],
    style: str = "",
) -> str:
    """A whole page: eyebrow line, warnings where there are any, headline, sections.

    Args:
        style: rules besides those of every report.
    """
    noted = el("aside", el("strong", "Warnings"), el("ul", (el("li", str(w)) for w in warnings)))
    body = el(
        "main",
        el("p", eyebrow, cls="eyebrow"),
        noted if warnings else None,
        el("header", head),
        sections,
    )
    meta = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", title),
        el("style", Html(_STYLESHEET.read_text(encoding="utf-8") + style)),
    )
    return "<!doctype html>\n" + el("html", meta, el("body", body), lang="en") + "\n"
