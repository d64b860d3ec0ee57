"""What a search step costs by shape, tokens and cards: a model of few terms, fitted to records of scripts/benchmarks/growth.py.

On one card, with c >= 0 by least squares of relative errors (E elements of the quantized layers, L layers, H hidden, I
intermediate, V vocabulary, T tokens that the card runs in a step, S tokens a row):

    seconds = c1 + c2 L + c3 T (8 E + 6 V H) + c4 E + c5 L T (6 H + I) + c6 L H T S + c7 T V
    MiB     = weights + c1 + c2 H I + c3 L T H + c4 L T I + c5 T V

A step with objective=kl has four products of each quantized weight (unquantized forward, forward, and two backward) and
three of the head, two FLOPs a product each; of the inputs every linear layer quantizes its own.

On n cards with whole weights each has its rows, and all meet once a step: c. With sharded weights there is no CUDA graph, so that
a step takes what the host needs to launch its layers, at the least, and every pass gathers the others' weights:

    seconds = max(seconds of its rows, c L) + 3 passes * 2 (E + embeddings and head) (1 - 1/n) / rate
    MiB     = weights / n + embeddings and head + c blocks + the terms of activations above
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from dmx.errors import RunError

from .stored import Stored

SCHEMA = "dmx.growth/1"
MIB = 1 << 20
WEIGHT_BYTES = 2
PASSES = 3
"""Over all weights in a step with objective=kl: unquantized forward, forward, backward."""
LAUNCHES = 200
"""Values that are tried for the launch of a layer."""
Terms = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Facts(Stored):
    """What a step's time and memory depend on; `Shape.facts` of scripts/benchmarks/shapes.py."""

    model: str
    quantized: int
    """Elements of the linear layers in decoder blocks."""
    outer: int
    """Elements of embeddings and head."""
    layers: int
    hidden: int
    intermediate: int
    vocab: int

    @property
    def parameters(self) -> int:
        return self.quantized + self.outer


@dataclass(frozen=True, kw_only=True)
class Measured(Facts):
    """A row of a record. Null where the memory did not suffice, or what was not measured."""

    way: str
    """alone | whole | sharded"""
    weights_mib: float
    rows: int
    """Of the batch that all cards share."""
    length: int
    settings: Mapping[str, Any]
    search_seconds: float | None
    search_mib: float | None
    graph: bool | None
    keeps_reference: bool | None = None
    """Null in older records: no."""
    plain_seconds: float | None = None
    plain_mib: float | None = None
    total_seconds: float | None = None

    @property
    def is_fitted(self) -> bool:
        """Whether the one-card model describes it."""
        return self.way == "alone" and self.graph is True and not self.keeps_reference


@dataclass(frozen=True, kw_only=True)
class Growth(Stored):
    """A record of scripts/benchmarks/growth.py."""

    schema: str
    machine: Mapping[str, Any]
    card_mib: float
    processes: int
    asked: tuple[Facts, ...]
    """What is to be predicted."""
    rows: tuple[Measured, ...]
    seconds: float
    steps: int | None = None
    """Of a search, whose median is a row's seconds; None: the record is older and does not say."""


@dataclass(frozen=True)
class Step:
    """What one card does in a step."""

    shape: Facts
    tokens: int
    length: int

    def seconds_terms(self) -> Terms:
        s, tokens = self.shape, self.tokens
        return {
            "step": 1.0,
            "layer": s.layers,
            "product": tokens * (8.0 * s.quantized + 6.0 * s.vocab * s.hidden),
            "weight": s.quantized,
            "input": s.layers * tokens * (6.0 * s.hidden + s.intermediate),
            "attention": float(s.layers) * s.hidden * tokens * self.length,
            "logit": float(tokens) * s.vocab,
        }

    def mib_terms(self) -> Terms:
        """Without the weights."""
        s, tokens = self.shape, self.tokens
        return {
            "step": 1.0,
            "largest weight": s.hidden * s.intermediate / MIB,
            "hidden": float(s.layers) * tokens * s.hidden / MIB,
            "intermediate": float(s.layers) * tokens * s.intermediate / MIB,
            "logit": float(tokens) * s.vocab / MIB,
        }


def own_step(row: Measured, cards: int) -> Step:
    """What each of so many cards does of a measured row."""
    return Step(row, row.rows * row.length // cards, row.length)


@dataclass(frozen=True)
class Fit:
    """What one of each term costs."""

    costs: Terms

    def of(self, terms: Terms) -> float:
        return sum(self.costs[name] * count for name, count in terms.items())


def fitted(terms: Sequence[Terms], values: Sequence[float], sizes: Sequence[float]) -> Fit:
    """Costs >= 0 with the least sum of ((costs * terms - value) / size)**2.

    Raises:
        RunError: there are fewer values than terms.
    """
    if not terms or len(terms) < len(terms[0]):
        raise RunError(
            f"a fit of {len(terms[0]) if terms else 'some'} terms to {len(terms)} measurements: measure more shapes or batches "
            "(python -m scripts.benchmarks.growth for more --seconds), or delete the record."
        )
    names, size = list(terms[0]), np.array(sizes)
    matrix = np.array([[row[name] for name in names] for row in terms]) / size[:, None]
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0] = 1.0
    costs = nnls(matrix / lengths, np.array(values) / size)[0] / lengths
    return Fit(dict(zip(names, costs.tolist(), strict=True)))


@dataclass(frozen=True)
class OneCard:
    """Both fits."""

    seconds: Fit
    mib: Fit

    def cost(self, step: Step, weights_mib: float) -> tuple[float, float]:
        """Seconds and MiB."""
        return (
            self.seconds.of(step.seconds_terms()),
            weights_mib + self.mib.of(step.mib_terms()),
        )


def seconds_and_mib(rows: Sequence[Measured]) -> tuple[list[float], list[float]]:
    """Of a step, one each a row.

    Raises:
        RunError: a row lacks one, or it is not above zero.
    """
    seconds = [float(row.search_seconds or 0.0) for row in rows]
    mib = [float(row.search_mib or 0.0) for row in rows]
    for row, *values in zip(rows, seconds, mib, strict=True):
        if min(values) <= 0:
            raise RunError(
                f"the row of {row.model}, {row.way}, {row.rows} x {row.length} has search_seconds={row.search_seconds} and "
                f"search_mib={row.search_mib}, which must be above zero: take the row out of its record, or measure it again "
                "(python -m scripts.benchmarks.growth)."
            )
    return seconds, mib


def fit_one_card(rows: Sequence[Measured]) -> OneCard:
    """To the rows that have both times and memory."""
    steps = [own_step(row, 1) for row in rows]
    seconds, mib = seconds_and_mib(rows)
    weights = [row.weights_mib for row in rows]
    beyond = [m - w for m, w in zip(mib, weights, strict=True)]
    return OneCard(
        fitted([s.seconds_terms() for s in steps], seconds, seconds),
        fitted([s.mib_terms() for s in steps], beyond, mib),
    )


def whole_mib(shape: Facts) -> float:
    """Of the weights."""
    return WEIGHT_BYTES * shape.parameters / MIB


def block_mib(shape: Facts) -> float:
    """Of a decoder block's weights."""
    return WEIGHT_BYTES * shape.quantized / shape.layers / MIB


def gathered_bytes(shape: Facts, cards: int) -> float:
    """That come over to each card in a step."""
    return PASSES * WEIGHT_BYTES * shape.parameters * (1 - 1 / cards)


@dataclass(frozen=True)
class SeveralCards:
    """What is added on several cards."""

    one: OneCard
    meeting: float
    """Seconds a step, whole weights."""
    launch: float
    """Seconds a layer of a step without a graph, sharded weights."""
    rate: float
    """Bytes a second that come over to a card; inf: copies are hidden."""
    blocks: float
    """Whole at once, sharded weights."""

    def cost(
        self, shape: Facts, tokens: int, length: int, cards: int, way: str, rate: float
    ) -> tuple[float, float]:
        """Seconds and MiB of a card.

        Args:
            tokens: of each card. rate: at which weights come over.
        """
        seconds, mib = self.one.cost(Step(shape, tokens, length), whole_mib(shape))
        if way == "alone":
            return seconds, mib
        if way == "whole":
            return seconds + self.meeting, mib
        pieces = whole_mib(shape) / cards + WEIGHT_BYTES * shape.outer / MIB
        return (
            max(seconds, self.launch * shape.layers) + gathered_bytes(shape, cards) / rate,
            mib - whole_mib(shape) + pieces + self.blocks * block_mib(shape),
        )


def fit_several(one: OneCard, rows: Sequence[Measured], cards: int) -> SeveralCards:
    """To rows of so many cards.

    Raises:
        RunError: one of both ways is missing, or a row's seconds or MiB.
    """
    by_way = {way: [r for r in rows if r.way == way] for way in ("whole", "sharded")}
    for way, found in by_way.items():
        if len(found) < 2:
            raise RunError(
                f"{len(found)} rows with {way} weights on {cards} cards, at least 2 are needed: run "
                f"torchrun --nproc_per_node {cards} -m scripts.benchmarks.growth for longer (--seconds)."
            )
    whole, sharded = by_way["whole"], by_way["sharded"]
    seconds, _ = seconds_and_mib(whole)
    own = [one.cost(own_step(r, cards), 0.0)[0] for r in whole]
    meetings = [s - o for s, o in zip(seconds, own, strict=True)]
    meeting = fitted([{"step": 1.0}] * len(whole), meetings, seconds).costs["step"]
    launch, rate = _launch_and_rate(one, sharded, cards)
    _, mib = seconds_and_mib(sharded)
    beyond = []
    for row, peak in zip(sharded, mib, strict=True):
        pieces = row.weights_mib + WEIGHT_BYTES * row.outer / MIB
        beyond.append(peak - one.cost(own_step(row, cards), pieces)[1])
    blocks = fitted([{"block": block_mib(r)} for r in sharded], beyond, mib).costs["block"]
    return SeveralCards(one, meeting, launch, rate, blocks)


def _launch_and_rate(one: OneCard, rows: Sequence[Measured], cards: int) -> tuple[float, float]:
    """Of sharded weights: the launch of a layer by trying, and the rate that fits best beside it."""
    seconds = np.array(seconds_and_mib(rows)[0])
    layers = np.array([row.layers for row in rows])
    own = np.array([one.cost(own_step(row, cards), 0.0)[0] for row in rows])
    bytes_over = np.array([gathered_bytes(row, cards) for row in rows]) / seconds
    best = (np.inf, 0.0, 0.0)
    for launch in np.linspace(0.0, (seconds / layers).max(), LAUNCHES):
        left = (seconds - np.maximum(own, launch * layers)) / seconds
        a_byte = max(0.0, float(left @ bytes_over / (bytes_over @ bytes_over)))
        error = float(((left - a_byte * bytes_over) ** 2).sum())
        best = min(best, (error, float(launch), a_byte))
    return best[1], 1 / best[2] if best[2] > 0 else float("inf")
