"""What a search returns."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dmx.assignment.assignment import Assignment


@dataclass(frozen=True)
class SearchResult:
    """An assignment and how it came about."""

    assignment: Assignment
    units: tuple[str, ...]
    preference: np.ndarray
    """(U, F-1) float64: how much each unit wanted each step up; what the projection followed. After
    a polish: KL saved per added bit."""
    seconds: float
    """Wall time of the search; of a resumed one up to its last checkpoint before, and from its
    resumption on. Scores that were kept count as long as their scan took."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """A row a step; empty for searches without steps."""
    polish: list[dict[str, Any]] = field(default_factory=list)
    """A row a round, the first of the start: round, kl (on the judging batches, nats/token), bits, moves (units changed),
    tried (proposals), seconds; empty without a polish."""
    raw_offsets: np.ndarray | None = None
    """(steps + 1, U) float32, the first row before the first step."""
    cuda_graph: str = "off"
    """on | off: whether the steps ran as a CUDA graph."""
    warnings: list[str] = field(default_factory=list)
    score_seconds: float | None = None
    """Of `seconds`, those of score scans, whoever made them; None: it needed none."""
