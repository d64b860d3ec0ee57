"""The head of docs/results/peers.md: at how many places our default is below the best other tool, in a line and as a table."""

from collections.abc import Sequence

from experiments.reporting.markdown import markdown
from experiments.reporting.pages.peers_against import (
    CLAIMS,
    NAMES,
    SIDES,
    Comparison,
    defaults_compared,
    verdict,
)
from experiments.reporting.pages.peers_results import results_of
from experiments.reporting.record import Record

HEAD = (
    "kind of answer",
    "quantized",
    "places",
    "of these on one seed",
    "ours lower at",
    "by at least",
)
MORE = {"formats": "", "weights": " and in less time"}
"""Beside CLAIMS."""


def with_table(page: str, records: Sequence[Record]) -> str:
    """The page with a short lead and a table in place of the sentence that counts the same; as it is where nothing is compared."""
    results = results_of(records)
    sentence, compared = verdict(results), defaults_compared(results)
    if not compared:
        return page
    assert page.count(f"{sentence} ") == 1
    return page.replace(f"{sentence} ", "\n".join([_lead(compared), "", *_table(compared), "", ""]))


def _lead(compared: Sequence[Comparison]) -> str:
    """Of each kind of answer, whatever is quantized."""
    said = []
    for gives, name in NAMES.items():
        if of := [c for c in compared if c.ours.gives == gives]:
            met = sum(c.is_met for c in of)
            lower = f"at least {CLAIMS[gives]:g} % lower{MORE[gives]}"
            said.append(f"{lower} at {met} of {len(of)} places with {name}")
    return (
        "Perplexity of our default beside that of the best other tool at the same place (candidates, budget, calibration "
        f"tokens, scale rule): {', '.join(said)}."
    )


def _table(compared: Sequence[Comparison]) -> list[str]:
    by: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in compared:
        by.setdefault((comparison.ours.gives, comparison.kind[0]), []).append(comparison)
    return markdown(
        HEAD,
        (
            [
                NAMES[gives],
                SIDES[quantized],
                len(of),
                sum(len(c.seeds) == 1 for c in of),
                sum(c.is_met for c in of),
                f"{CLAIMS[gives]:g} %{MORE[gives]}",
            ]
            for (gives, quantized), of in by.items()
        ),
    )
