"""One model by runtime, for docs/results/engines.md: which layouts and formats each loads, how it runs them on which card,
and perplexities by its products and by dmx's emulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dmx.assignment.runtimes import CARDS, NOT_LOADED, SOURCE, how_it_runs, joined
from dmx.assignment.targets import TARGETS

from ..markdown import markdown

Run = Mapping[str, Any]
"""A record: one runtime on one machine, a row a folder."""
Place = tuple[str, str]
"""A device, and "" or which of the texts that were scored there, from the second on."""
HEAD = (
    "folder",
    "layout",
    "formats",
    "runtime",
    *(f"on {card}" for card in CARDS),
    "inputs, here",
    "perplexity in the runtime",
    "in dmx",
    "apart",
    "layers alike, to the bit",
)
CPU = "cpu"
"""What records say of a device that is no card."""
LEFT_ALONE = "left alone"
"""What records say of inputs that are not quantized."""
_ROTATIONS = {
    "hadamard_block": "inputs rotated",
    "hadamard_selected": "some inputs rotated",
    "learned": "inputs rotated by matrices of the file",
}


def by_runtime(runs: Sequence[Run]) -> list[str]:
    """Lines of the section; none where no record is of real text.

    Args:
        runs: records of one model, on each device on the same tokens.
    """
    if not runs:
        return []
    texts = _texts(runs)
    rows = [(run, row) for run in runs for row in run["rows"]]
    rows.sort(
        key=lambda pair: (
            pair[1]["target"] or "",
            pair[1]["folder"],
            *_engine(pair[0], pair[1], texts),
        )
    )
    loaded = [(run, row) for run, row in rows if "failed" not in row]
    failed = [(run, row) for run, row in rows if "failed" in row]
    of_places: dict[Place, list[tuple[Run, Run]]] = {}
    for run, row in loaded:
        of_places.setdefault((row["device"], _text(run, texts)), []).append((run, row))
    of_places = {place: of_places[place] for place in sorted(of_places, key=_place_order)}
    several = any(text for _, text in of_places)
    apart = (
        " Perplexities of different texts are not to be held against each other." if several else ""
    )
    broken = f" Folders that do not load here, below the table: {len(failed)}." if failed else ""
    return [
        "## One model by runtime",
        "",
        " ".join(_finding(place, pairs) for place, pairs in of_places.items()) + broken,
        "",
        f"{_model_named(runs[0])}, to see that runtimes and dmx agree, not how good a format is; formats take turns. "
        f"{' '.join(_measured(place, pairs) for place, pairs in of_places.items())}{apart} What the columns say of Hopper and Blackwell "
        f"was read in the source of {SOURCE}. dmx treats inputs as the runtime does here. Layers alike: those whose output is "
        "within the tolerance (below) of dmx's on the same input, which is that of sums in another order and of rounding to the "
        "dtype (transformers decompresses to bfloat16, which rounds FP8's and NVFP4's products with a scale), and those "
        "equal to the bit.",
        "",
        *markdown(HEAD, (_cells(run, row, texts) for run, row in loaded)),
        "",
        *(f"- {_layout(row)} of {_formats(row)} in {run['runtime']}: does not load here. `{_why(row)}`" for run, row in failed),
    ]  # fmt: skip


def _texts(runs: Sequence[Run]) -> dict[tuple[Any, Any], str]:
    """Kind of device and tokens -> "" for the first tokens there, of the others which they are."""
    found: dict[tuple[Any, Any], str] = {}
    for run in runs:
        known = [key for key in found if key[0] == run["device"]]
        found.setdefault(_tokens(run), f"text {len(known) + 1}" if known else "")
    return found


def _tokens(run: Run) -> tuple[Any, Any]:
    """A text's name says little: one file joins the same lines otherwise than the next."""
    return run["device"], run.get("tokens_sha256")


def _text(run: Run, texts: Mapping[tuple[Any, Any], str]) -> str:
    return texts[_tokens(run)]


def _place_order(place: Place) -> tuple[bool, str, str]:
    """Cards first."""
    return place[0] == CPU, *place


def _measured(place: Place, loaded: Sequence[tuple[Run, Run]]) -> str:
    """Where, on which tokens and with which versions, of records of a place and their rows that load."""
    run, row = loaded[0]
    versions = {k: v for _, row in loaded for k, v in row["versions"].items()}
    stand_ins = "; products stand in for those of cards (below)" if place[0] == CPU else ""
    noted = str(run["note"]).partition(";")[2]
    of_text = f" ({noted.strip()})" if noted and place[0] != CPU else ""
    return (
        f"{_on_place(place)}: {row['dtype']}, {run['tokens'] // run['window']} windows of {run['window']} tokens of "
        f"{run['text']}{of_text}, {', '.join(f'{k} {v}' for k, v in sorted(versions.items()))}{stand_ins}."
    )


def _on_place(place: Place) -> str:
    device, text = place
    return ("On a CPU" if device == CPU else f"On one {device}") + (f", {text}" if text else "")


def _engine(run: Run, row: Run, texts: Mapping[tuple[Any, Any], str]) -> tuple[str, str, str]:
    """Runtime, the card it ran on or nothing, and which text where there are several."""
    device = row.get("device", CPU)
    return run["runtime"], "" if device == CPU else device, _text(run, texts)


def _finding(place: Place, loaded: Sequence[tuple[Run, Run]]) -> str:
    """How far runtimes and dmx agree, of records of a place and their rows that load."""
    within, layers, equal = _alike(group for _, row in loaded for group in row["groups"])
    alone: dict[str, float] = {}
    quantized: dict[str, float] = {}
    for run, row in loaded:
        kind = alone if all(g["inputs"] == LEFT_ALONE for g in row["groups"]) else quantized
        apart = _apart(row)
        kind[run["runtime"]] = max(apart, kind.get(run["runtime"], 0.0))
    said = [f"{_at_most(alone)} where inputs are left alone"] if alone else []
    if quantized:
        said.append(
            f"{_at_most(quantized)} where inputs are quantized (a rounding that turns goes on through the layers)"
        )
    return (
        f"{_on_place(place)}, in {len(loaded)} folders, {within} of {layers} layers give dmx's output on the same input, "
        f"{equal} of them to the bit, and perplexities in the runtime and in dmx differ by at most {'; by '.join(said)}."
    )


def _apart(row: Run) -> float:
    """Percent between perplexities."""
    return 100 * abs(float(row["perplexity"]) / float(row["perplexity_dmx"]) - 1)


def _at_most(percents: Mapping[str, float]) -> str:
    """Of runtimes, two digits, rounded up."""
    said = []
    for runtime, value in sorted(percents.items()):
        step = 10.0 ** (math.floor(math.log10(value)) - 1) if value else 1.0
        said.append(f"{math.ceil(value / step) * step:.2g} % in {runtime}")
    return ", ".join(said)


def of_one_model(runs: Iterable[Run]) -> list[Run]:
    """The records of real text of the model that has most rows of it, with text, number of tokens and window of the first
    of their device."""
    rows: dict[str, list[Run]] = {}
    for run in runs:
        if run["text"] is not None:
            rows.setdefault(_model_named(run), []).append(run)
    alike = max(rows.values(), key=lambda own: sum(len(run["rows"]) for run in own), default=[])
    tokens: dict[str, list[Any]] = {}
    kept = []
    for run in alike:
        own = [run[key] for key in ("text", "tokens", "window")]
        if tokens.setdefault(run["device"], own) == own:
            kept.append(run)
    return kept


def _model_named(run: Run) -> str:
    """What a note says up to its first semicolon."""
    return str(run["note"]).partition(";")[0]


def _cells(run: Run, row: Run, texts: Mapping[tuple[Any, Any], str]) -> list[Any]:
    groups = row["groups"]
    return [
        row["folder"],
        _layout(row),
        _formats(row),
        ", ".join(filter(None, _engine(run, row, texts))),
        *(_on(row, run["runtime"], card) for card in CARDS),
        _by_format(groups, "inputs"),
        f"{row['perplexity']:.4f}",
        f"{row['perplexity_dmx']:.4f}",
        f"{_apart(row):.2g} %",
        "{} of {}, {}".format(*_alike(groups)),
    ]


def _alike(groups: Iterable[Run]) -> list[int]:
    """Layers within the tolerance, of how many, and how many of them are equal to the bit."""
    groups = list(groups)
    return [sum(group[key] for group in groups) for key in ("within", "layers", "equal")]


def _layout(row: Run) -> str:
    """As `dmx.assignment.targets.TARGETS` calls it."""
    profile = row["profile"]
    return f"{row['target']}, profile {profile}" if profile else str(row["target"])


def _kinds(row: Run) -> list[str]:
    """Formats of layers, with those of inputs where the folder asks for others; older records have none."""
    return list(row.get("kinds", row["formats"]))


def _formats(row: Run) -> str:
    said = ", ".join(_kinds(row)) or "bf16"
    rotation = _ROTATIONS.get(row["transform"])
    return f"{said}; {rotation}" if rotation else said


def _on(row: Run, runtime: str, card: str) -> str:
    """How a card runs the formats, in one word where all run alike."""
    layout = _layout(row)
    if layout not in TARGETS:  # full precision
        return ""
    words = how_it_runs(layout, runtime, card, _kinds(row))
    return joined({f: "not read" if word == NOT_LOADED else word for f, word in words.items()})


def _by_format(groups: Sequence[Run], key: str) -> str:
    """What most layers of each format have; groups are of one format each where runtimes join equals alone."""
    most: dict[str, Run] = {}
    for group in groups:
        known = most.get(group["formats"])
        if known is None or group["layers"] > known["layers"]:
            most[group["formats"]] = group
    return joined({f: str(group[key]) for f, group in most.items()})


def _why(row: Run) -> str:
    """The error from its last line that is not indented, cut where it goes on."""
    lines = row["failed"].strip().splitlines()
    last = max(i for i, line in enumerate(lines) if not line.startswith(" "))
    line = " ".join(map(str.strip, lines[last:]))
    return line if len(line) < 200 else f"{line[:200]} ..."
