"""Result pages are made from records alone, and begin with what they say."""

import dataclasses
import importlib.util
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from dmx.errors import DmxError
from experiments.reporting import record as records
from experiments.reporting import stored
from experiments.reporting.groups import group_recipes, group_rows
from experiments.reporting.pages.mor import fell_back, mor_page
from experiments.reporting.pages.overview import readme_table
from experiments.reporting.pages.quality import quality_pages
from experiments.reporting.plots.budgets import BudgetPoint, difference_figure, edges
from experiments.reporting.plots.pareto import pareto
from experiments.reporting.plots.training import validation_curves
from experiments.reporting.pooling import Presets, pooled
from experiments.reporting.record import Limit, Method, Record, Row, dimension
from experiments.reporting.tables import results_table
from experiments.reporting.training_logs import digits_log, fallback_digits, loss_curve
from experiments.reporting.verdicts import verdicts
from mor.state import OPERANDS

from ..experiments.helpers import (
    DMX,
    FULL,
    SEARCHED,
    answers,
    method,
    record,
    row,
    text,
    training_row,
    uniform,
)

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "docs" / "results" / "records"
ONE_RECORD = min(RECORDS.glob("peers_*.json"))
WAVE = 0.1 * np.sin(np.arange(50))
KL_PER_BIT, FISHER = method("kl_per_bit"), method("fisher")
TEST, VALIDATION = "wikitext2/test", "wikitext2/validation"

EXACT = {
    "objective": "kl",
    "descent.penalty": "exact",
    "descent.gradient_scale": "elements",
    "descent.lr": 3.0,
    "descent.momentum": 0.9,
    "descent.lr_schedule": "cosine",
    "descent.start": "constant",
}
PRESETS = Presets(exact=EXACT, polished={"polish.rounds": 12}, learned={"steps": 400}, joint={})
SETTINGS = {"family": "mxfp6_mxfp4", "score_batches": 8, "steps": 200, "polish.rounds": 0, **EXACT}


@pytest.fixture
def make_tables(monkeypatch):
    path = ROOT / "scripts" / "make_tables.py"
    spec = importlib.util.spec_from_file_location("make_tables", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(str(ROOT))
    spec.loader.exec_module(module)
    return module


def compared(*rows: Row, on: str = TEST, settings: dict | None = None, **fields: object) -> Record:
    """A record of experiments.compare on a text."""
    data = {"calibration": record().data["calibration"], "evaluation": text(on)}
    asked = {"search": SETTINGS | (settings or {})}
    return record(*rows, **{"data": data, "requested": asked} | fields)


def at_five_bits(shift: float = -0.05, scatter: float = 0.0, **more: object) -> Record:
    """bf16, two heuristics and dMX, whose loss is `shift` above the better of them."""
    noise = scatter * (-1.0) ** np.arange(50)
    return compared(
        row(FULL, 3.0 + WAVE, None, seed=None),
        row(KL_PER_BIT, 3.3 + WAVE),
        row(FISHER, 3.4 + WAVE),
        row(DMX, 3.3 + WAVE + shift + noise),
        **more,
    )


def page(*of: Record, name: str = "quality.md") -> str:
    return quality_pages(of, PRESETS).texts[name]


# --- the script ------------------------------------------------------------------------------------


def test_committed_pages_are_what_the_records_give(make_tables, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_tables.py", "--check"])
    assert make_tables.main() == 0, capsys.readouterr().out


def test_a_picture_is_drawn_where_it_is_written_and_looked_for_otherwise(make_tables, tmp_path):
    figure = quality_pages([at_five_bits()], PRESETS).pictures["quality.png"]
    path, page = tmp_path / "quality.png", tmp_path / "quality.md"
    made = {path: figure, page: "text"}
    drawn = make_tables.differing(made, check=False)
    assert drawn == make_tables.differing(made, check=True) and drawn[page] == b"text"
    assert drawn[path].startswith(b"\x89PNG") and len(drawn[path]) > 10_000
    path.write_bytes(b"of another version of matplotlib")
    assert set(make_tables.differing(made, check=True)) == {page}
    assert make_tables.differing(made, check=False) == drawn


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x", "{", "x.json is not a JSON object"),
        ("x", "[]", "x.json is not a JSON object"),
        ("x", '{"schema": "dmx.record/1"}', "schema is 'dmx.record/1', this version reads"),
        ("x", '{"schema": "dmx.record/2"}', "Record misses keys"),
        ("x", '{"schema": "mor.safety_net/1"}', "a record lacks what its page shows"),
        (
            "x",
            json.dumps(json.loads(ONE_RECORD.read_text()) | {"results": []}),
            "x.json has no rows",
        ),
    ],
)
def test_a_record_that_is_none_is_named_and_nothing_written(
    make_tables, tmp_path, monkeypatch, capsys, name, content, words
):
    results = tmp_path / "docs" / "results"
    monkeypatch.setattr(make_tables, "ROOT", tmp_path)
    monkeypatch.setattr(make_tables, "RESULTS", results)
    monkeypatch.setattr(make_tables, "RECORDS", results / "records")
    monkeypatch.setattr("sys.argv", ["make_tables.py"])
    (results / "records").mkdir(parents=True)
    (tmp_path / "README.md").write_text("nothing of tables")
    (results / "records" / f"{name}.json").write_text(content)
    assert make_tables.main() == 2
    assert words in capsys.readouterr().err
    assert not list(results.glob("*.md"))


@pytest.mark.parametrize(("part", "key"), [("actual", "cannot"), ("requested", "tokens")])
def test_the_damaged_one_of_the_records_of_other_tools_is_named(make_tables, part, key):
    peers = {path.stem: Record.load(path) for path in sorted(RECORDS.glob("peers_*.json"))[:3]}
    name, damaged = list(peers.items())[1]
    left = {k: v for k, v in getattr(damaged, part).items() if k != key}
    peers[name] = dataclasses.replace(damaged, **{part: left})
    message = rf"/records/{name}\.json: a record lacks what its page shows \(KeyError: '{key}'\)"
    with pytest.raises(DmxError, match=message):
        make_tables.peers_outputs(peers)


def test_a_readme_without_its_marks_loses_nothing(make_tables):
    start, end = (f"<!-- {text} -->" for text in ("t: made by scripts/make_tables.py", "end of t"))
    assert (
        make_tables.between(f"a\n{start}\nold\n{end}\nb", "t", "new")
        == f"a\n{start}\n\nnew\n\n{end}\nb"
    )
    with pytest.raises(DmxError, match="end of t"):
        make_tables.between(f"{start}\nold\nthe rest of the page", "t", "new")


def test_records_stay_small_and_name_no_machine_path():
    texts = [path.read_text() for path in RECORDS.glob("*.json")]
    assert max(map(len, texts)) < 100_000
    assert sum(map(len, texts)) < 8_000_000
    assert not any('"/' in content for content in texts)  # nothing begins as an absolute path


def test_every_page_begins_with_what_it_says(make_tables):
    index = (make_tables.RESULTS / "README.md").read_text()
    for path in sorted(make_tables.RESULTS.glob("*.md")):
        first = path.read_text().split("\n\n")[1]
        assert not first.startswith(("|", "-", "#", "!")), path.name
        assert path.name == "README.md" or f"({path.name})" in index


# --- quality ---------------------------------------------------------------------------------------


def test_methods_are_named_by_what_differs_from_the_presets():
    rotates = method(transform="learned")
    content = page(
        compared(row(KL_PER_BIT, 3.3), row(DMX, 3.2), on=VALIDATION),
        compared(
            row(KL_PER_BIT, 3.3, seed=1), row(DMX, 3.1), on=VALIDATION, settings={"descent.lr": 1.0}
        ),
        compared(row(rotates, 3.0), on=VALIDATION, settings={"steps": 200}),
        compared(
            row(method(polish=True), 3.0),
            on=VALIDATION,
            settings={"polish.rounds": 8, "seed": 7, "descent.cuda_graph": "on"},
        ),
        name="quality_ablation.md",
    )
    assert "| plain | kl_per_bit | ≤ 5 | 2 |" in content  # lr is nothing to a heuristic
    assert "| plain | dMX | ≤ 5 | 1 |" in content and "| plain | dMX lr=1 | ≤ 5 | 1 |" in content
    assert "| learned rotation | dMX steps=200 | ≤ 5 | 1 | 20.09 | no heuristic |" in content
    assert "| plain | dMX + polish polish.rounds=8 | ≤ 5 | 1 |" in content
    validation = compared(row(DMX, 3.2), on=VALIDATION)
    assert "No records of a test text yet." in page(validation)


def test_differences_count_as_lower_higher_or_the_same():
    def part(shift: float, scatter: float) -> str:
        found = page(at_five_bits(shift, scatter)).partition("## Against the best heuristic")[2]
        return found.partition("\n## ")[0]

    lower = part(-0.1, 0.1)
    assert (
        "| plain | dMX | **" in lower and "by more than one standard error in 1 of 1 cells" in lower
    )
    assert "in 0 of 1 cells (bold), higher in 1 (italic)." in part(0.1, 0.1)
    assert "in 0 of 1 cells (bold), higher in 0 (italic)." in part(0.001, 0.1)
    assert "| plain | dMX | same |" in part(0.0, 0.0) and "cells" not in part(0.0, 0.0)


def test_the_page_says_what_its_tables_show():
    first = page(at_five_bits(-0.1)).split("\n\n")[1]
    share = f"{100 * (math.exp(-0.1) - 1):+.1f}"
    assert f"dMX changes perplexity by {share} % at 5 element_bits." in first
    assert "Of 1 cells of all models" in first and "standard error in 1, higher in 0" in first
    rounded = compared(row(method(weights="gptq"), 3.1 + WAVE))
    said = f"dMX has {math.exp(3.1 + WAVE.mean()):.2f} with gptq and {math.exp(3.25 + WAVE.mean()):.2f} alone."
    assert said in page(at_five_bits(), rounded)
    facts = {"name": "gptq", "order": "natural"}
    natural = compared(row(method(weights="gptq"), 3.1 + WAVE, weights=facts))
    said = said.replace("with gptq", "with gptq in natural order")
    assert said in page(at_five_bits(), natural)


def test_differences_are_on_the_seeds_that_both_have():
    other = compared(row(DMX, 4.0 + WAVE, seed=1))
    content = page(at_five_bits(-0.1, 0.1), other)
    assert f"| plain | dMX | **{100 * (math.exp(-0.1) - 1):+.1f} ± " in content
    both = (math.exp(3.2 + WAVE.mean()) + math.exp(4.0 + WAVE.mean())) / 2
    assert f"| plain | {both:.2f} / {math.exp(3.3 + WAVE.mean()):.2f}† |" in content


@pytest.mark.parametrize("part", ["dtype", "windows", "text", "calibration"])
def test_records_that_are_not_measured_alike_are_refused(part):
    one, other = at_five_bits(), at_five_bits()
    data = dict(other.data)
    replace = dataclasses.replace
    if part == "dtype":
        other = replace(other, model=replace(other.model, dtype="float32"))
    elif part == "windows":
        data["evaluation"] = replace(data["evaluation"], windows=20)
    elif part == "text":
        data["evaluation"] = replace(data["evaluation"], sha256="0")
    else:
        data["calibration"] = replace(data["calibration"], batches=4)
    with pytest.raises(DmxError, match="not measured alike"):
        quality_pages([one, replace(other, data=data)], PRESETS)


def test_other_models_have_their_own_projections_and_units():
    counts = {"weight": {"c_attn": {"mxfp4": 1, "mxfp6_e2m3": 3}, "up": {"mxfp4": 2}}}
    budget = Limit(5.0, "bits_per_element")
    heuristic = row(KL_PER_BIT, 3.3 + WAVE, budget=budget, format_counts=counts)
    ours = row(DMX, 3.2 + WAVE, budget=budget, format_counts=counts)
    lost = row(FISHER, 3.2 + WAVE, budget=budget, perplexity=math.inf)
    pages = quality_pages([compared(heuristic, ours, lost)], PRESETS)
    content = "".join(pages.texts.values())
    assert "| setting | method | budget | up | c_attn |" in content
    assert "| plain | dMX | ≤ 5 bits_per_element | 0 | 75 |" in content
    assert "Budgets are in bits_per_element." in content
    assert "Several runs shared a card" not in content and "| inf" not in content
    (figure,) = pages.pictures.values()
    assert figure.axes[0].get_xlabel() == "budget, bits_per_element"


def test_the_picture_shows_the_best_dmx_and_how_sure_its_difference_is():
    worse = row(method(polish=True), 3.6 + WAVE)
    of = at_five_bits(-0.1, 0.1)
    rows = {r.label: r for r in of.rows}
    pages = quality_pages([dataclasses.replace(of, results=(*of.rows, worse))], PRESETS)
    left, right = pages.pictures["quality.png"].axes
    full, best, ours = (rows[label].perplexity for label in ("bf16", "kl_per_bit", "dMX"))
    drawn = [line.get_ydata()[0] for line in left.get_lines()]
    assert drawn == pytest.approx([100 * (x / full - 1) for x in (best, ours)])
    points, _, (bar,) = right.containers[0]
    gaps = np.subtract(rows["dMX"].window_nll, rows["kl_per_bit"].window_nll)
    assert points.get_ydata()[0] == pytest.approx(100 * (ours / best - 1))
    ((low, high),) = (segment[:, 1] for segment in bar.get_segments())
    assert (high - low) / 2 == pytest.approx(100 * gaps.std(ddof=1) / len(gaps) ** 0.5)


def test_one_difference_that_would_make_the_others_small_is_said_at_the_edge():
    limits, gains = (4.0, 4.5, 5.0, 5.5), {"a": (-2.0, -1.0, 0.5, 0.0), "b": (3.5, -1.0, 1.0, 0.0)}

    def right_of(gains):
        curves = [
            (name, [BudgetPoint(x, 100 + g, 100, 0.2) for x, g in zip(limits, of, strict=True)])
            for name, of in gains.items()
        ]
        return difference_figure(curves, None, "element_bits").axes[1]

    assert edges([(g, 0.2) for of in gains.values() for g in of]) == (-2.2, 1.2)
    (said,) = (text.get_text() for text in right_of(gains).texts)
    assert said == "+3.5 ± 0.2 %" and 1.2 < right_of(gains).get_ylim()[1] < 1.5
    within = right_of(gains | {"b": (2.0, -1.0, 1.0, 0.0)})
    assert not within.texts and within.get_ylim()[1] > 2.2
    assert edges([(3.5, 0.2), (-1.0, 0.2)]) == (-1.2, 3.7)  # of few, all


def test_fused_units_and_separate_choices_stand_apart():
    fused = compared(
        *(
            row(
                dataclasses.replace(r.method, units="fused"),
                np.array(r.window_nll) + math.log(1.02),
            )
            for r in at_five_bits().rows[1:]
        )
    )
    content = page(at_five_bits(), fused)
    _, _, table = content.partition("## Fused units against layer units")
    for name, nll in (("dMX", 3.25), ("kl_per_bit", 3.3)):
        own = math.exp(nll + WAVE.mean())
        cells = f"| {1.02 * own:.2f} (1) | {own:.2f} (1) | +2.00 ± 0.00 |"
        assert f"| fused units | {name} | ≤ 5 {cells}" in table
    assert "| plain | dMX |" in content.partition("## Fused")[0]
    for alone in (at_five_bits(), fused):
        assert "## Fused units" not in page(alone)
    counts = {"weight": {"q": {"mxfp4": 10, "mxfp6_e2m3": 20}}, "input": {"q": {"mxfp4": 30}}}
    apart = method(choices="separate")
    heuristic = row(method("kl_per_bit", choices="separate"), 3.3 + WAVE)
    methods = page(
        compared(row(apart, 3.2 + WAVE, format_counts=counts), heuristic), name="quality_methods.md"
    )
    assert "weights nearest, W+A, separate choices\n" in methods
    assert "| separate choices | dMX | ≤ 5, weights | 67 |" in methods
    assert "| separate choices | dMX | ≤ 5, inputs | 0 |" in methods


def test_experts_of_a_block_as_one_unit_stand_beside_each_as_its_own():
    def searched(experts, nll, bits, units="fused", **fields):
        known = {"expert_tokens": {"h.0.experts": (5, 300), "h.1.experts": (0, 90)}, **fields}
        of = [
            row(method(s, units=units), nll + d, element_bits=bits, **known)
            for s, d in (("fisher", 0), ("differentiable", 0.001))
        ]
        return compared(row(FULL, 3.0, None, seed=None), *of, settings={"experts": experts})

    block, each = searched("block", 3.2, 4.5), searched("each", 3.1, 4.9)
    page = quality_pages([block, each], PRESETS).texts["quality.md"]
    part = page.split("## Experts: someone/model")[1].split("\n## ")[0]
    assert "| one unit | fisher | ≤ 5 | 4 | 4.500 | 24.53 (1) | +22.1" in part
    assert "| each a unit | fisher | ≤ 5 | 6 | 4.900 | 22.20 (1) | +10.5" in part
    assert "| -9.52 ± 0.00 |" in part and "are 0.10 % apart at most" in part
    assert "choices reach 4.500 bits where those for each expert reach 4.900" in part
    assert "Experts without a token: 1." in part and "| h.0 | 5 | 152 | 300 | 1 |" in part
    assert "Units: one for gate/up, one for down. dMX" in part
    page = quality_pages([searched("each", 3.1, 4.9, units="layer")], PRESETS).texts["quality.md"]
    assert "| each a unit | fisher | ≤ 5 | 9 | 4.900" in page
    assert "one for down; of an expert whose layers choose by themselves one each for gate" in page
    dense = searched("each", 3.1, 4.9, expert_tokens=None)
    assert "Experts" not in quality_pages([dense], PRESETS).texts["quality.md"]


def test_tasks_are_compared_item_by_item_with_the_best_heuristic_and_bf16():
    asked = {
        "bf16": answers(arc=[1, 1, 1, 1], piqa=[1, 0, 1, 1]),
        "kl_per_bit": answers(arc=[1, 1, 1, 0], piqa=[1, 0, 0, 0]),
        "dMX": answers(arc=[1, 1, 0, 0], piqa=[1, 0, 1, 0]),
    }

    def tasks(tests: dict) -> str:
        of = at_five_bits()
        rows = [dataclasses.replace(r, zero_shot=tests.get(r.label)) for r in of.rows]
        made = quality_pages([dataclasses.replace(of, results=tuple(rows))], PRESETS)
        return made.texts.get("quality_tasks.md", "")

    content = tasks(asked)
    assert "| arc, acc | piqa, acc | mean |" in content
    assert "| – | bf16 | – | 1 | 100.0 | 75.0 | 87.5 |" in content
    dmx = "| plain | dMX | ≤ 5 | 1 |"
    assert (
        f"{dmx} 50.0 | 50.0 | 50.0 |" in content and "| plain | fisher | ≤ 5 | 1 |" not in content
    )
    # One of four items is exactly one standard error: not bold.
    assert f"{dmx} kl_per_bit | -25.0 ± 25.0 | +25.0 ± 25.0 | +0.0 ± 17.7 |" in content
    assert f"{dmx} bf16 | *-50.0 ± 28.9* | -25.0 ± 25.0 | *-37.5 ± 19.1* |" in content
    one = {"dMX": {"arc": asked["dMX"]["arc"]}}
    content = tasks(asked | one)
    assert (
        f"{dmx} 50.0 | – | – |" in content and f"{dmx} bf16 | *-50.0 ± 28.9* | – | – |" in content
    )
    # Where the best by perplexity was not asked, no other stands in.
    assert f"{dmx} fisher |" not in tasks(asked | {"kl_per_bit": None, "fisher": asked["bf16"]})
    assert tasks({}) == ""


def test_rows_that_records_measured_alike_count_once_with_their_tasks():
    plain = at_five_bits()
    rows = [dataclasses.replace(r, zero_shot=answers(arc=[1, 0])) for r in plain.rows]
    asked = dataclasses.replace(plain, results=tuple(rows))
    for of in ([plain, asked], [asked, plain], [plain, asked, plain]):
        groups = [group for known in pooled(of, PRESETS).values() for group in known]
        assert sorted(g.label for g in groups) == ["bf16", "dMX", "fisher", "kl_per_bit"]
        assert all(len(g.rows) == 1 and g.rows[0].zero_shot for g in groups)
    moved = tuple(dataclasses.replace(r, nll=r.nll + 1e-6) for r in plain.rows)
    other = dataclasses.replace(plain, results=moved)
    twice = pooled([plain, other], PRESETS).values()
    assert {len(g.rows) for known in twice for g in known} == {2}


def test_readme_has_one_table_of_at_most_eight_rows():
    flat = [row(uniform("mxfp4"), 4.6, None, element_bits=4.0), row(FULL, 3.0, None)]
    rounded = [
        row(method(weights="gptq", **more), nll + WAVE, weights={"name": "gptq", "order": order})
        for order, nll, more in (
            ("natural", 3.2, {}),
            ("activity", 3.1, {}),
            ("activity", 2.9, {"transform": "hadamard_block"}),
        )
    ]
    lines = readme_table([at_five_bits(), compared(*rounded)], PRESETS, compared(*flat))
    table = [line for line in lines if line.startswith("|")]
    assert table[0] == "|  | 4 bits | 5 bits | 16 bits |" and 3 <= len(table) <= 10
    assert f"| uniform mxfp4 | {math.exp(4.6):.2f} |  |  |" in table
    assert f"| dMX + gptq |  | {math.exp(3.1 + WAVE.mean()):.2f} |  |" in table
    rotated = "dMX + hadamard block + gptq"
    assert f"| {rotated} |  | {math.exp(2.9 + WAVE.mean()):.2f} |  |" in table
    assert "earlier reading" not in lines[-1]
    data = {"evaluation": dataclasses.replace(text(), sha256="0", tokens=7)}
    lines = readme_table([at_five_bits()], PRESETS, compared(*flat, data=data))
    assert "of an earlier reading of the text, 7 tokens instead of 102,400" in lines[-1]


# --- another dimension -----------------------------------------------------------------------------


@dataclass(frozen=True)
class WarmMethod(Method):
    """A method with one field more."""

    warmth: int = dimension(0, label=lambda degrees: f"warmth {degrees}", title=str)
    """degrees"""


def test_one_field_more_appears_in_label_table_legend_record_and_comparison(tmp_path, monkeypatch):
    def of(search: str, warmth: int) -> WarmMethod:
        return WarmMethod(search=search, warmth=warmth, **SEARCHED)

    rows = [
        row(of(search, warmth), nll + WAVE)
        for warmth, level in ((0, 0.0), (30, -0.5))
        for search, nll in (("kl_per_bit", 3.3 + level), ("differentiable", 3.25 + level))
    ]
    # Comparison: each against the heuristic of its own warmth.
    assert [v.against for v in verdicts(rows)] == ["kl_per_bit", "kl_per_bit + warmth 30"]
    groups = group_rows(rows)
    assert len(groups) == 4
    assert "dMX + warmth 30 (W+A)" in results_table(groups)
    legend = [t.get_text() for t in pareto(groups).axes[0].get_legend().get_texts()]
    assert "dMX + warmth 30 (W+A)" in legend and "dMX (W+A)" in legend
    # The record, there and back: only the type of a row's method is another.
    monkeypatch.setitem(vars(records), "Method", WarmMethod)
    monkeypatch.setattr(stored, "_hints", get_type_hints)  # which keeps a class's types
    made = compared(*rows)
    assert Record.load(made.save(tmp_path / "record.json")) == made
    assert (
        json.loads((tmp_path / "record.json").read_text())["results"][2]["method"]["warmth"] == 30
    )
    # Result pages: a table of its own, compared within it.
    pages = quality_pages([made], PRESETS)
    share = f"{100 * (math.exp(-0.05) - 1):+.2f}"
    assert re.search(rf"\| warmth 30 \| dMX \| \*\*{share} ± ", pages.texts["quality.md"])
    assert "weights nearest, W+A, 30\n" in pages.texts["quality_methods.md"]


# --- mor -------------------------------------------------------------------------------------------

OUTLIER = {"step": -1, "layer": "model.layers.0.mlp", "exponent": 17}


def trained(*rows: records.TrainingRow, outlier_step: int = -1, **train: object) -> Record:
    """A record of experiments.train_mor."""
    outlier = OUTLIER | {"step": outlier_step}
    settings = {"window": 1024, "lr": 1e-3, "batch_size": 32, "outlier": outlier} | train
    asked = {"train": settings, "architecture": {}, "mor": {r.recipe: None for r in rows}}
    return record(*rows, command="train_mor", requested=asked, data={"validation": text("valid")})


def runs(recipe: str, *losses: float | None) -> list[Record]:
    return [trained(training_row(recipe, nll, seed)) for seed, nll in enumerate(losses)]


BF16 = (5.60, 5.64, 5.68)


def test_loss_curves_are_compared_on_the_seeds_that_both_have():
    bf16 = [training_row("bf16", nll, seed) for seed, nll in enumerate(BF16)]
    _, bottom = validation_curves(group_recipes([*bf16, training_row("tensor", 5.7, 1)])).axes
    points, _, (bar,) = bottom.containers[0]
    assert points.get_ydata() == pytest.approx([0, 0, 100 * (5.7 / 5.64 - 1)])
    assert all(np.ptp(segment[:, 1]) == 0 for segment in bar.get_segments())  # one seed


def test_a_recipe_that_diverged_on_a_seed_is_missed():
    bf16 = runs("bf16", *BF16)
    content, _ = mor_page([*bf16, *runs("tensor", 5.6, None, 5.7), bf16[0]], [])
    assert "| – | – | – | missed, seed 1: loss is not finite |" in content
    assert "| bf16 | 0, 1, 2 |" in content  # the record that stands twice counts once


def test_training_page_pools_seeds_and_splits_settings():
    both = [*runs("bf16", *BF16), *runs("tensor", 5.61, 5.65, 5.69)]
    content, pictures = mor_page(both, [])
    assert "| tensor | 0, 1, 2 | 5.650 ± 0.040 | 5.640 | +0.18 |" in content
    assert list(pictures) == ["mor_loss.png"] and "Learning rates" not in content
    first = content.split("\n\n")[1]
    assert "1 of 1 recipes end within the tolerance" in first and "100 to 100 %" in first
    other = trained(training_row("bf16", 5.6), training_row("tensor", 6.6), lr=5e-4)
    content, _ = mor_page([*both, other], [])
    assert "### Learning rates and batch sizes" in content and "| 0.0005 | 32 | 300 |" in content
    assert "+17.86 %: missed, one seed" in content and "+0.18 %: met" in content


def test_a_recipe_is_compared_on_the_seeds_that_both_have():
    lone = trained(training_row("tensor", 5.7, 1))
    content, _ = mor_page([*runs("bf16", *BF16), lone], [])
    assert f"{100 * (5.7 / 5.64 - 1):+.2f}" in content


def test_outlier_run_names_what_fell_back():
    layers = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    quiet = [0.0] * len(OPERANDS)
    log = [
        {"step": s, "elements_bf16": [[1.0 if s >= 6 else 0.04, *quiet[1:]], quiet]}
        for s in range(10)
    ]
    digits = fallback_digits(layers, log)
    assert digits["shares"] == {layers[0]: {OPERANDS[0]: "1" * 6 + "9" * 4}}
    assert digits_log(digits)[9]["elements_bf16"][0][0] == 1.0
    assert fell_back(digits, 6) == {OPERANDS[0]: [layers[0]]}
    late = digits | {"step": [30 * s for s in digits["step"]]}
    row = training_row("tensor", fallback_digits=late)
    content, pictures = mor_page([trained(row, outlier_step=180)], [])
    assert (
        "times 2^17 before step 180" in content and list(pictures)[-1] == "mor_outlier_tensor.png"
    )
    name = OPERANDS[0].replace("_", " ")
    assert f"| tensor | 0 | 9.000 | 5.600 | – | {name}: {layers[0]} |" in content


def net_record(**fields: object) -> dict:
    report = {"fallback_rate": 0.01, "effective_element_bits": 5.2}
    hurt = {
        "layers": [3],
        "channels": 32,
        "full_precision": 21.0,
        "full_precision_with_outliers": 21.0,
        "clean": 28.0,
        "without": 49.0,
        "with": 28.2,
        "report": report,
        "fell_back": {"a": {}},
    }
    point = {"weight_element_bits": 5.0, "input_element_bits": 5.0, "fallback_rate": None}
    return {
        "schema": "mor.safety_net/1",
        "model": {"id": "m"},
        "assignment": "x",
        "search": "differentiable",
        "format": None,
        "margin": 1.25,
        "device": "d",
        "window": 8,
        "tokens": 64,
        "clean": {"full_precision": 21.0, "without": 28.0, "with": 28.14, "report": report},
        "outliers": hurt,
        "curve": [
            point
            | {
                "search": None,
                "format": "mxfp4",
                "threshold": 0.25,
                "fallback_rate": 0.5,
                "perplexity": 35.0,
                "element_bits": 15.0,
            },
            point
            | {
                "search": "kl_per_bit",
                "format": None,
                "threshold": None,
                "perplexity": 33.0,
                "element_bits": 4.5,
            },
        ],
    } | fields


def test_safety_net_page_says_what_the_net_costs_and_saves():
    content, pictures = mor_page([], [net_record()])
    first = content.split("\n\n")[1]
    assert (
        "by +0.50 % (1.00 % of the tensors fall back)" in first
        and "at 28.20, which is 49.00" in first
    )
    assert "| with the net | 28.20 | 1.007 |" in content
    assert "| mxfp4 with net, threshold 0.25 | 35.00 | 15.000 | 5.000 | 5.000 | 50.0 |" in content
    assert "35.00 at 15.0 effective bits, is above that of kl_per_bit at 4.5 bits, 33.00" in content
    labels = [t.get_text() for t in pictures["mor_safety.png"].axes[0].get_legend().get_texts()]
    assert labels == ["mxfp4 with net", "kl_per_bit", "dMX with net, clean text", "bf16 21.00"]
    assert mor_page([], [net_record(curve=None, outliers=None)])[1] == {}


def test_loss_curve_is_thin_and_keeps_the_last_step(tmp_path):
    for name, steps in (("train", 500), ("validation", 3)):
        rows = [{"step": s, "loss": None if s == 1 else float(s)} for s in range(steps)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    curve = loss_curve(tmp_path)
    assert len(curve["train"]["step"]) == len(curve["train"]["loss"]) == 200
    assert curve["train"]["step"][-1] == 499
    assert curve["validation"] == {"step": [0, 1, 2], "loss": [0.0, None, 2.0]}
