"""Our own searches, in a process of their own like every peer's: time and memory are then measured alike."""

from typing import Any

from dmx.assignment.budget import Budget
from dmx.searching import SearchConfig, search
from dmx.searching.config import DescentConfig

from .common import Cell, main

EXACT: dict[str, Any] = {
    "penalty": "exact",
    "gradient_scale": "elements",
    "lr": 3.0,
    "momentum": 0.9,
    "lr_schedule": "cosine",
}
"""Of configs/search/exact.yaml (a test compares)."""
STEPS = {"dmx_40": 40, "dmx_80": 80}


def config_of(cell: Cell) -> SearchConfig:
    """The search that the method names: kl_per_bit, fisher, or the exact descent with so many steps."""
    asked = cell.request
    units = "fused" if any(len(unit) > 1 for unit in asked.units) else "layer"
    shared: dict[str, Any] = {"family": list(asked.formats), "units": units, "seed": asked.seed}
    if asked.method in STEPS:
        descent = DescentConfig(**EXACT)
        steps = STEPS[asked.method]
        return SearchConfig(
            name="differentiable", steps=steps, objective="kl", descent=descent, **shared
        )
    return SearchConfig(name=asked.method, **shared)


def run(cell: Cell) -> None:
    """Answers with formats."""
    model = cell.model()
    config, budget = config_of(cell), Budget(cell.request.limit)
    batches = [row[None].cpu() for row in cell.tokens]
    result = cell.timed(lambda: search(model, batches, budget, config))
    assignment = result.assignment
    cell.answer(
        dict(assignment.formats),
        ("dmx",),
        peak=cell.peak(),
        said_bits=assignment.bits["element_bits"],
    )


if __name__ == "__main__":
    main(run)
