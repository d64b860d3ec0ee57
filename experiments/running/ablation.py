"""What lowering and raising each unit of an assignment does to the loss: a table and ablation.json."""

from rich.console import Console
from rich.table import Table

from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError
from dmx.files import write_json
from dmx.models.experts import linear_experts
from dmx.searching import SearchSettings, search_space, seeing_inputs
from dmx.searching.ablation import unit_ablation
from dmx.transforms.stage import Transform, transformed

from .bench import Bench


def print_ablation(
    bench: Bench, search: SearchSettings, assignment: Assignment, source: str
) -> None:
    """Measure and show.

    Args:
        search: how the assignment was searched: its family, units and choices.
        source: where the assignment came from, for messages.

    Raises:
        AssignmentError: it does not fit these settings.
    """
    bench.run.alone(f"ablate={source}")
    space = search_space(bench.model, search)
    names = [f.name for f in space.formats]
    try:
        choice = space.choice_of(assignment.formats, assignment.input_formats)
    except (KeyError, ValueError) as error:
        raise AssignmentError(
            f"ablate={source}: {error} does not fit search.family={search.family} "
            f"({', '.join(names)}) with search.units={search.units}, "
            f"search.input_format={search.input_format or 'null'} and search.choices={search.choices}. "
            "Set them as they were when it was searched."
        ) from error
    batches = bench.batches(0)[: search.score_batches]
    with (
        linear_experts(bench.model, search.experts_form),
        transformed(bench.model, Transform.of(assignment), assignment.transformed),
    ):
        space = seeing_inputs(bench.model, space, batches)
        rows = unit_ablation(bench.model, batches, space, choice, search)
    write_json(bench.run.path("ablation.json"), rows)
    table = Table(
        "unit", "format", "lowered: loss rises by", "raised: loss falls by", title="nats/token"
    )
    for row in sorted(rows, key=lambda r: -(r["loss_if_lowered"] or 0.0)):
        cells = [
            f"{row[k]:+.5f}" if row[k] is not None else "–"
            for k in ("loss_if_lowered", "gain_if_raised")
        ]
        table.add_row(row["unit"], row["format"], *cells)
    Console().print(table)
