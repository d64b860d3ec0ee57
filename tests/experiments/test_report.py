"""The report is complete, escapes what it shows, needs no network, and says why a number is
missing."""

import dataclasses
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dmx.assignment.runtimes import (
    BY_HUMMING,
    HOW_IT_RUNS,
    INPUTS_IN_FP8,
    W4A8,
    how_it_runs,
    inputs_otherwise,
    kind_of,
    kinds_of,
)
from dmx.assignment.targets import TARGETS, obstacles, split_groups
from dmx.errors import RunError
from dmx.formats import BLOCK_FORMATS
from experiments.reporting.accuracies import best_other, item_difference
from experiments.reporting.differences import (
    SIGNIFICANT,
    difference_to,
    reference_name,
    reference_of,
)
from experiments.reporting.groups import by_choices, group_rows
from experiments.reporting.maps import format_map
from experiments.reporting.plots.pareto import pareto
from experiments.reporting.projections import format_counts, locate
from experiments.reporting.record import Limit, ModelFacts, Record, Row, Verdict
from experiments.reporting.report import unit_format, write_report
from experiments.reporting.tables import terminal_table
from experiments.reporting.verdicts import verdicts, worse_than_uniform
from experiments.running.run import Run
from tests.quick import leave_pictures_undrawn

from .helpers import DMX, FULL, KL, answers, method, record, row, text, uniform

BLOCKS, STEPS, WINDOWS = 30, 150, 140
SHAPES = {
    "self_attn.q_proj": [576, 576],
    "self_attn.k_proj": [192, 576],
    "self_attn.v_proj": [192, 576],
    "self_attn.o_proj": [576, 576],
    "mlp.gate_proj": [1536, 576],
    "mlp.up_proj": [1536, 576],
    "mlp.down_proj": [576, 1536],
}
UNITS = (
    "self_attn.{q_proj,k_proj,v_proj}",
    "self_attn.o_proj",
    "mlp.{gate_proj,up_proj}",
    "mlp.down_proj",
)


def assignment(generator: np.random.Generator, share_high: float, search: str) -> dict[str, Any]:
    """A fused-unit assignment of 210 layers; high formats sit in late blocks and in down_proj more
    often."""
    formats, shapes = {}, {}
    for block in range(BLOCKS):
        for unit in UNITS:
            lean = 0.25 * (block > 22) + 0.2 * ("down" in unit) - 0.1 * ("q_proj" in unit)
            name = "mxfp6_e2m3" if generator.random() < share_high + lean else "mxfp4"
            parent, _, inner = unit.partition("{")
            for leaf in inner.rstrip("}").split(",") if inner else [""]:
                layer = f"model.layers.{block}.{parent}{leaf}"
                formats[layer], shapes[layer] = name, SHAPES[f"{parent}{leaf}"]
    return {
        "schema": "dmx.assignment/1",
        "formats": formats,
        "shapes": shapes,
        "unquantized": ["lm_head"],
        "units": "fused",
        "search": {"name": search, "family": "mxfp6_mxfp4", "seed": 0},
    }


def write_run(
    folder: Path, *, seeds: int = 1, budgets: tuple[float, ...] = (5.0,), others: bool = False
) -> Path:
    """A run folder as the entry points leave it, with numbers like those of SmolLM2-135M."""
    generator = np.random.default_rng(0)
    hard = generator.normal(0.0, 0.18, WINDOWS)  # how hard each window is: common to all rows

    def nlls(perplexity: float) -> np.ndarray:
        noise = generator.normal(0.0, 0.012, WINDOWS)
        return math.log(perplexity) + hard - hard.mean() + noise - noise.mean()

    results = [row(FULL, nlls(21.78), None, seed=None)]
    for name, bits, perplexity in (
        ("mxfp4", 4.0, 104.6),
        ("mxfp6_e2m3", 6.0, 23.56),
        ("mxfp8_e4m3", 8.0, 24.02),
    ):
        results.append(row(uniform(name), nlls(perplexity), None, element_bits=bits, seed=None))
    searches = {"kl": 30.27, "differentiable": 28.54}
    if others:
        searches = {"kl": 30.27, "kl_per_bit": 28.89, "fisher": 29.19, "differentiable": 28.34}
    for limit in budgets:
        for search, perplexity in searches.items():
            for seed in range(seeds):
                path = f"{search}-{limit:g}-{seed}/assignment.json"
                (folder / path).parent.mkdir(parents=True)
                share = (limit - 4.2) / 2
                (folder / path).write_text(json.dumps(assignment(generator, share, search)))
                wobble = 1 + 0.006 * generator.normal() * (seeds > 1)
                scale = math.exp(0.28 * (5.0 - limit)) * wobble
                is_dmx = search == "differentiable"
                results.append(
                    row(
                        method(search),
                        nlls(perplexity * scale),
                        limit,
                        assignment=path,
                        seed=seed,
                        element_bits=limit - 0.02 * generator.random(),
                        search_seconds=83.0 if is_dmx else 41.5,
                    )
                )
                if is_dmx and seed == 0:
                    write_trace((folder / path).parent, generator, limit)
    note = "dequantized from a 4-bit GGUF, so full precision here is a 4-bit lattice"
    settings = {
        "search": {"steps": STEPS, "family": "mxfp6_mxfp4", "lr": 1.0},
        "backend": "triton",
        "model": {"dtype": "bfloat16"},
        "budget": {"limit": 5.0, "unit": "element_bits"},
    }
    made = record(
        *results,
        requested=settings,
        actual=settings,
        data={"evaluation": text(windows=WINDOWS)},
        model=ModelFacts(
            "HuggingFaceTB/SmolLM2-135M-Instruct", "12" * 20, "bfloat16", "ab" * 32, note
        ),
    )
    made.save(folder / "record.json")
    return folder


def write_trace(folder: Path, generator: np.random.Generator, limit: float) -> None:
    formats = json.loads((folder / "assignment.json").read_text())["formats"]
    units = [f"model.layers.{block}.{unit}" for block in range(BLOCKS) for unit in UNITS]
    high = np.array([unit_format(unit, {"formats": formats}) != "mxfp4" for unit in units])
    goal = np.where(
        high, generator.uniform(1.05, 1.9, len(units)), generator.uniform(0.05, 0.95, len(units))
    )
    steps = np.arange(STEPS + 1)[:, None]
    wobble = 0.03 * np.cumsum(generator.normal(0, 0.25, (STEPS + 1, len(units))), axis=0)
    raw = (goal * (1 - np.exp(-steps / 35)) + wobble * (steps > 0)).clip(0, 2).astype(np.float32)
    np.savez(folder / "offsets.npz", raw=raw, units=np.array(units))
    lines = []
    for step in range(STEPS):
        late = max(0.0, (step - 90) / (STEPS - 1 - 90))
        hard = 4 + 2 * float((raw[step + 1] > 1).mean())
        soft = hard + 0.35 * (1 - late) * math.exp(-step / 90)
        loss = 3.38 + 0.5 * math.exp(-step / 20)
        held = step % 10 == 0 or step == STEPS - 1
        lines.append(
            json.dumps(
                {
                    "step": step,
                    "temperature": 0.4 * 50**late,
                    "lr": 1.0,
                    "loss": loss + generator.normal(0, 0.04),
                    "penalty": max(0.0, soft - limit) * 5,
                    "soft_bits": soft,
                    "hard_bits": hard,
                    "projected_bits": min(hard, limit - 0.01),
                    "grad_norm": 0.1,
                    "seconds": 0.55,
                    "soft_loss": loss if held else None,
                    "hard_loss": loss + 0.09 * (1 - late) if held else None,
                    "projected_loss": loss + 0.11 * (1 - late) + 0.01 if held else None,
                }
            )
        )
    (folder / "history.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(run_folder: Path) -> str:
    return write_report(run_folder).read_text(encoding="utf-8")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what a page says: `page` has all pictures drawn."""
    leave_pictures_undrawn(monkeypatch.setattr)


def read(run_folder: Path) -> Record:
    return Record.load(run_folder / "record.json")


def edited(run_folder: Path, change: Callable[[Record], Record]) -> Path:
    """The run folder with its record changed."""
    change(read(run_folder)).save(run_folder / "record.json")
    return run_folder


def test_report_needs_no_network_and_leaves_no_temporary_file(run_folder, page):
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "url(" not in page and "@import" not in page and "<script" not in page
    assert not list(run_folder.glob(".report-*"))
    assert page.count("data:image/") == 5


def test_headline_gives_difference_and_paired_error(run_folder, page):
    rows = read(run_folder).rows
    nll = {r.label: np.array(r.window_nll) for r in rows}
    delta = nll["dMX"] - nll["kl"]
    (verdict,) = verdicts(rows)
    assert verdict.beats is True and verdict.against == "kl"
    assert verdict.difference_nats == pytest.approx(delta.mean())
    assert verdict.stderr_nats == pytest.approx(delta.std(ddof=1) / math.sqrt(WINDOWS))
    headline = re.search("<h1>(.*?)</h1>", page)[1]
    assert headline == verdict.text
    assert headline.startswith("dMX (W+A) beats kl (W+A) at 5 element_bits: loss 0.0589 ± ")


def test_a_search_that_one_format_everywhere_beats_at_no_more_bits_is_named():
    six = dataclasses.replace(DMX, search="uniform", format="mxfp6_e2m3")
    cheaper = dataclasses.replace(six, format="mxfp4")
    rows = [
        row(DMX, 3.4, element_bits=6.0),
        row(six, 3.3, None, element_bits=6.0),
        row(cheaper, 3.5, None, element_bits=4.0),
    ]
    (text,) = worse_than_uniform(rows)
    assert rows[0].label in text and rows[1].label in text and "6.000" in text
    assert not worse_than_uniform([rows[0], rows[2]])  # fewer bits, and worse
    dearer = dataclasses.replace(rows[1], element_bits=6.1)
    alone = dataclasses.replace(six, quantized="W")  # inputs in full precision
    assert not worse_than_uniform([rows[0], dearer, row(alone, 3.0, None, element_bits=6.0)])


def test_difference_within_noise_is_not_called_a_win():
    noise = np.random.default_rng(1).normal(0, 0.1, 50)
    noise -= noise.mean()
    stderr = float(noise.std(ddof=1)) / math.sqrt(50)

    def verdict(shift: float) -> Verdict:
        (only,) = verdicts([row(KL, 3.4), row(DMX, 3.4 + noise + shift)])
        return only

    for share, beats, words in (
        (-0.9, False, "cannot be told apart"),
        (0.9, False, "cannot be told apart"),
        (-1.1, True, "beats"),
        (1.1, False, "does not beat"),
    ):
        claim = verdict(share * SIGNIFICANT * stderr)
        assert claim.beats is beats and words in claim.text, share
    noise[:] = 0
    assert "cannot be told apart at 5 element_bits: loss equal (paired" in verdict(0.0).text


def test_the_best_heuristic_that_was_run_is_the_opponent():
    wave = 0.01 * np.sin(np.arange(50))
    rows = [
        row(method("fisher"), 3.40),
        row(method("kl_per_bit"), 3.38 + wave),
        row(DMX, 3.36),
    ]
    (claim,) = verdicts(rows)
    said = "beats kl_per_bit (W+A), best of 2 heuristics that were run, at 5"
    assert claim.against == "kl_per_bit" and said in claim.text
    assert "best of 3 " in verdicts([*rows, row(KL, 3.5 + wave)])[0].text
    # within a standard error of the other, and still the lowest mean; another kind counts for nothing
    near = [row(KL, 3.37999 - wave), row(method("kl", weights="gptq"), 3.3)]
    assert verdicts([*rows, *near])[0].against == "kl"
    (alone,) = verdicts([row(KL, 3.5), *rows[2:]])
    assert alone.against == "kl" and "best of" not in alone.text
    assert verdicts(rows[2:]) == []
    # The strongest at dMX's own budget, whatever stands at others.
    far = [row(method(name), 3.3, 6.0) for name in ("kl", "fisher")]
    assert verdicts([*rows, *far])[0].against == "kl_per_bit"
    assert reference_name(group_rows(rows)) == "kl_per_bit"
    assert reference_name(group_rows([*rows, *far])) == "heuristic"


def test_a_seed_that_ran_twice_weighs_no_more_than_the_others():
    rows = [row(DMX, np.full(4, nll), seed=seed) for seed, nll in ((0, 1), (1, 2), (2, 3), (2, 5))]
    (group,) = group_rows(rows)
    nll = group.statistic("nll")
    assert nll.mean == pytest.approx(7 / 3) and nll.count == 3
    assert nll.spread == pytest.approx(np.std([1, 2, 4], ddof=1))
    assert group.window_nll() == pytest.approx(np.full(4, 7 / 3))


def test_only_methods_of_one_kind_are_compared():
    wave = 0.01 * np.sin(np.arange(50))
    rows = [
        row(KL, 3.5 + wave),
        row(method("kl", weights="gptq"), 3.3 + wave),
        row(DMX, 3.4),
        row(method(weights="gptq"), 3.35),
        row(method("kl", polish=True), 3.1 + wave),
    ]
    plain, rounded = verdicts(rows)
    assert plain.against == "kl" and plain.beats
    assert rounded.against == "kl + gptq" and not rounded.beats
    (alone,) = verdicts([r for r in rows if r.method.weights == "gptq"])
    assert alone.against == "kl + gptq"
    for field, value in (
        ("transform", "learned"),
        ("net", True),
        ("quantized", "W"),
        ("family", "mxfp8_mxfp4"),
        ("units", "fused"),
        ("choices", "separate"),
        ("scale_rules", "mse"),
    ):
        assert verdicts([row(KL, 3.5), row(method(**{field: value}), 3.3)]) == [], field


def test_scatter_over_seeds_counts_against_a_claim():
    def seeds(of: Any, levels: list[float]) -> list[Row]:
        wave = 0.001 * np.sin(np.arange(50) * len(of.label))
        return [row(of, level + wave, seed=i) for i, level in enumerate(levels)]

    kl = seeds(KL, [3.40, 3.40])
    assert verdicts(kl + seeds(DMX, [3.38, 3.38]))[0].beats is True
    assert verdicts(kl + seeds(DMX, [3.30, 3.46]))[0].beats is False


def test_every_section_is_there(page):
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == [
        "Results",
        "Perplexity and bits",
        "The search, step by step",
        "Formats by block and projection",
        "Where searches agree",
        "Who can load the result",
        "What was asked and what ran",
        "Environment",
    ]
    assert (
        page.count('title="model.layers.0.self_attn.q_proj: mxfp') == 2
    )  # one map for kl, one for dmx
    assert "4-bit lattice" in page and "of wikitext2/test" in page and "8.79 GiB" in page


def test_missing_metric_is_a_dash_with_its_reason(page):
    assert '<td class="num" title="nothing was searched">–</td>' in page


def test_all_text_is_escaped(tmp_path):
    evil = '<script>alert("x")</script>'

    def change(was: Record) -> Record:
        first = dataclasses.replace(was.rows[0], perplexity=None, reasons={"perplexity": evil})
        named = dataclasses.replace(was.rows[1], method=uniform(f"$x_ {evil}"))
        model = dataclasses.replace(was.model, id=evil, note=evil)
        return dataclasses.replace(
            was,
            warnings=(evil,),
            model=model,
            command=evil,
            requested={**was.requested, evil: evil},
            results=(first, named, *was.rows[2:]),
        )

    page = write_report(edited(write_run(tmp_path), change)).read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6


def test_setting_that_ran_otherwise_is_marked(tmp_path, page, undrawn):
    assert 'class="differs"' not in page and "All 7 checked settings ran as asked" in page

    def change(was: Record) -> Record:
        left_open = {"device": "auto", "threads": None, "folder": "x"}  # folder: not checked
        actual = {**was.actual, "backend": "reference", "run": {"device": "cuda", "threads": 4}}
        return dataclasses.replace(
            was, requested={**was.requested, "run": left_open}, actual=actual
        )

    page = write_report(edited(write_run(tmp_path), change)).read_text()
    assert "1 of 9 checked settings differ" in page and page.count('class="differs"') == 1
    assert re.search(
        r'<tr class="differs"><th scope="row">backend</th><td>triton</td><td>reference</td>', page
    )


def test_many_searches_budgets_and_seeds_become_one_line_each(tmp_path, undrawn):
    folder = write_run(tmp_path, seeds=3, budgets=(4.5, 5.0, 5.5), others=True)
    groups = group_rows(read(folder).rows)
    assert len(groups) == 4 + 4 * 3
    dmx = next(g for g in groups if g.method.is_dmx and g.budget.limit == 5.0)
    values = [r.perplexity for r in dmx.rows]
    assert dmx.statistic("perplexity").mean == pytest.approx(np.mean(values))
    assert dmx.statistic("perplexity").spread == pytest.approx(np.std(values, ddof=1))
    page = write_report(folder).read_text()
    assert len(re.findall("kl_per_bit .W.A., best of 3 heuristics that were run, ", page)) == 3
    assert page.count("<summary>dMX (W+A), ") == 3
    assert "strongest other search" not in page and "which are stronger" not in page


def test_differences_are_paired_within_a_budget(tmp_path):
    groups = group_rows(read(write_run(tmp_path, budgets=(4.5, 5.0))).rows)
    flat = difference_to(groups[1], groups)
    assert flat.mean is None and "several heuristic results" in flat.reason
    for group in groups:
        if group.method.is_dmx:
            title = f"kl (W+A), {group.budget.limit:g} element_bits"
            assert difference_to(group, groups).reference == title


def test_a_uniform_format_is_compared_with_the_only_reference_of_its_kind():
    rows = [row(uniform("mxfp4"), 4.0, None), row(KL, 3.4)]
    flat, kl = group_rows(rows)
    assert reference_of(flat, [flat, kl]) is kl
    other, _ = group_rows([row(uniform("mxfp4", transform="learned"), 4.0, None), rows[1]])
    assert reference_of(other, [other, kl]).startswith("no heuristic result at the same budget")


def test_rows_on_other_windows_are_not_subtracted():
    groups = group_rows([row(KL, np.full(140, 3.4)), row(DMX, np.full(139, 3.3))])
    difference = difference_to(groups[1], groups)
    assert difference.mean is None and difference.reason == "measured on 139 and 140 windows"


@pytest.fixture
def with_separate(tmp_path: Path) -> Path:
    """A run whose searches are there twice: joint, and a little better with separate choices."""
    folder = write_run(tmp_path, others=True)

    def apart(joint: Row) -> Row:
        path = f"apart-{joint.assignment}"
        body = json.loads((folder / joint.assignment).read_text())
        names = iter(["mxfp4", "mxfp8_e4m3"] * len(body["formats"]))
        body["input_formats"] = {layer: next(names) for layer in body["formats"]}
        (folder / path).parent.mkdir()
        (folder / path).write_text(json.dumps(body))
        nlls = tuple(nll - 0.02 for nll in joint.window_nll)
        return dataclasses.replace(
            joint,
            method=dataclasses.replace(joint.method, choices="separate"),
            assignment=path,
            window_nll=nlls,
            nll=float(np.mean(nlls)),
            perplexity=math.exp(float(np.mean(nlls))),
        )

    def change(was: Record) -> Record:
        searched = [apart(r) for r in was.rows if r.budget]
        return dataclasses.replace(was, results=(*was.rows, *searched))

    return edited(folder, change)


def test_separate_choices_stand_in_a_table_of_their_own_and_compare_among_themselves(
    with_separate, undrawn
):
    rows = read(with_separate).rows
    groups = group_rows(rows)
    joint, separate = by_choices(groups)
    assert len(separate) == 4 and all(g.method.is_searched and g.budget for g in separate)
    for side in (joint, separate):
        dmx = next(g for g in side if g.method.is_dmx)
        for name in ("kl", "kl_per_bit", "fisher"):
            assert reference_of(dmx, groups, name) in side
    assert len(verdicts(rows)) == 2
    page = write_report(with_separate).read_text()
    first, second = page.split("<h3>Separate choices</h3>")
    results = first[first.index("<h2>Results</h2>") :]
    assert "separate choices" not in results and "fisher" in results
    table = second[: second.index("</table>")]
    assert table.count("<tr") == 1 + 4 and table.count("separate choices") == 4
    assert table.count('class="best"') == 1 == results.count('class="best"')
    assert "weighted by multiply-accumulates" in second
    # Maps of both operands, and who can load: vLLM runs no input beside another weight.
    assert page.count("<strong>inputs</strong>") == page.count("<strong>weights</strong>") == 4
    assert re.search(r"does not run inputs in mxfp\w+ beside weights in mxfp\w+ \(", page)


def test_separate_choices_have_marks_of_their_own(with_separate):
    figure = pareto(group_rows(read(with_separate).rows))
    colours = {c.get_label(): c[0].get_color() for c in figure.axes[0].containers}
    assert len(colours) == 8 == len(set(colours.values()))


def test_long_names_above_the_axes_stay_within_the_picture():
    named = method(
        "imported", origin="weights that learned for sixty steps from all of the batches"
    )
    rows = [row(method("kl"), 3.0 + np.zeros(4), 5.0), row(named, 2.9 + np.zeros(4), 5.0)]
    figure = pareto(group_rows(rows))
    figure.canvas.draw()
    legend = figure.axes[0].get_legend()
    assert max(len(text.get_text()) for text in legend.get_texts()) > 50
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_uniform_formats_of_two_transforms_are_two_lines():
    rows = [
        row(uniform(name, transform=transform), math.log(value), None, element_bits=bits)
        for transform, factor in (("none", 2.0), ("hadamard_block", 1.0))
        for name, bits, value in (("mxfp4", 4.0, 50 * factor), ("mxfp6_e2m3", 6.0, 23.0))
    ]
    axes = pareto(group_rows(rows)).axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines["uniform"] == pytest.approx([100.0, 23.0])
    assert lines["uniform + hadamard block"] == pytest.approx([50.0, 23.0])
    assert pareto(group_rows(rows), zoom=True) is None


def test_format_counts_hold_inputs_where_they_differ():
    formats = {f"model.layers.{i}.mlp.up_proj": f for i, f in enumerate(("mxfp4", "mxfp6_e2m3"))}
    assert format_counts(formats) == {"weight": {"up": {"mxfp4": 1, "mxfp6_e2m3": 1}}}
    inputs = dict.fromkeys(formats, "mxfp4")
    assert format_counts(formats, inputs)["input"] == {"up": {"mxfp4": 2}}


def test_tasks_are_compared_item_by_item():
    bf16, flat, dmx, kl = group_rows(
        [
            row(FULL, limit=None, zero_shot=answers(x=[1, 1, 1, 0])),
            row(uniform("mxfp4"), limit=None, zero_shot=answers(x=[0, 0, 1, 0])),
            row(DMX, zero_shot=answers(x=[1, 0, 1, 0])),
            row(DMX, seed=1, zero_shot=answers(x=[1, 1, 1, 0])),
            row(KL, zero_shot={"x": dataclasses.replace(answers(x=[1, 0])["x"], sha256="1")}),
        ]
    )
    difference = item_difference(dmx, bf16, "x")  # seeds averaged: 1, 1/2, 1, 0
    assert (difference.mean, difference.windows) == (-0.125, 4)
    assert difference.stderr == pytest.approx(0.125)
    groups = [bf16, flat, dmx, kl]
    assert best_other(flat, groups, "x") is dmx and best_other(dmx, groups, "x") is kl
    assert item_difference(kl, bf16, "x").reason == "x: not the same items"
    assert "no items" in item_difference(kl, bf16, "y").reason


def test_terminal_table_shows_the_cells_of_the_report_in_eighty_columns(run_folder):
    record = read(run_folder)
    last = record.rows[-1]
    method = dataclasses.replace(last.method, weights="learned", stage="60 steps, lr 0.0001")
    learned = dataclasses.replace(last, method=method, weights={"seconds": 400.0})

    def shown(*rows, width=80):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(terminal_table(dataclasses.replace(record, results=rows)))
        return console.export_text()

    text = shown(*record.rows, learned)
    cells = ("≤ 5 ", " 28.54 ", " −0.0589 ± 0.0012 ", " 4.998 ", " 1 min 23 s ")
    assert any(all(cell in line for cell in cells) for line in text.splitlines())
    assert " 8 min 03 s " in text, "learning counts in the time of what learned"
    said = "same budget, settings and weights; – for that row itself, and where there is none"
    assert said in " ".join(text.split())
    assert "minus" not in shown(record.rows[0]), "where nothing is compared"
    unmeasured = dataclasses.replace(record.rows[0], perplexity=None, nll=None)
    heads = "perplexity", "element"
    assert all(head in shown(record.rows[0], unmeasured) for head in heads)
    assert [head in shown(unmeasured, unmeasured) for head in heads] == [False, True]
    # What all rows have alike is said once, below, so that no name fills more than two lines.
    lines = [line.rstrip() for line in text.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith(" dMX + learned "))
    assert lines[at + 1].split() == ["weights"] and not lines[at + 2]
    assert "(W+A)" not in "".join(lines[: at + 2])
    assert "weights and inputs quantized (W+A)" in text
    assert "learned weights: 60 steps, lr 0.0001" in text
    longer = dataclasses.replace(learned, method=dataclasses.replace(method, stage="90 steps"))
    inputs_too = dataclasses.replace(learned, method=dataclasses.replace(method, quantized="W"))
    text = "".join(shown(*record.rows, learned, longer, inputs_too, width=160).split())
    assert "dMX+learnedweights,90steps(W+A)" in text and "lr0.0001(W)" in text
    assert "inputsquantized" not in text and "learnedweights:" not in text


def test_the_terminal_says_once_that_the_strong_heuristics_were_not_run(tmp_path, capsys):
    run = object.__new__(Run)
    run.folder = tmp_path
    rows = [row(m, 3.4, limit, seed=s) for m in (KL, DMX) for limit in (4.5, 5.0) for s in (0, 1)]
    run.show(record(*rows))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("kl_per_bit and fisher, which are stronger, were not run here.") == 1
    run.show(record(*rows, *(row(method("fisher"), 3.4, limit) for limit in (4.5, 5.0))))
    assert "which are stronger" not in capsys.readouterr().out


def test_the_picture_of_offsets_says_which_lines_the_projection_moved(tmp_path, undrawn):
    folder = write_run(tmp_path)
    (offsets,) = folder.rglob("offsets.npz")
    with np.load(offsets) as kept:
        raw, units = kept["raw"], kept["units"]
    path = offsets.with_name("assignment.json")
    body = json.loads(path.read_text())
    high = np.array([unit_format(str(u), body) != "mxfp4" for u in units])
    raw[-1] = np.where(high, 1.5, 0.5)

    def caption(**search):
        np.savez(offsets, raw=raw, units=units)
        body["search"] = {"name": "differentiable", "family": "mxfp6_mxfp4"} | search
        path.write_text(json.dumps(body))
        return re.search(
            "<figcaption>(Raw offset.*?)</figcaption>", write_report(folder).read_text()
        )[1]

    assert caption().endswith("goes from one format to the next.")
    raw[-1, np.flatnonzero(high)[:3]] = 0.9
    below = " 3 lines end below the dashed line of their format: "
    assert caption().endswith(f"{below}the projection to the budget raised them.")
    raw[-1, np.flatnonzero(~high)[0]] = 1.1
    both = caption(kept="scores")
    assert f"{below}what chose after the descent raised them." in both
    assert both.endswith(
        " 1 line ends above the dashed line of its format: what chose after the descent lowered it."
    )


def test_terminal_table_has_bits_in_the_units_of_the_budgets():
    budget = Limit(5.25, "bits_per_element")
    one = dataclasses.replace(row(DMX), budget=budget, element_bits=4.998, bits_per_element=5.248)

    def shown(*rows):
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(terminal_table(record(*rows)))
        return console.export_text()

    assert "5.248" in (text := shown(one)) and "4.998" not in text
    other = dataclasses.replace(one, budget=Limit(5.0, "element_bits"))
    assert "5.248" in (text := shown(one, other, other)) and "4.998" in text


def test_targets_follow_formats_and_fused_groups():
    q, k = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"

    def loading(formats: dict[str, str]) -> set[str]:
        return {
            f"{n}/{x.name}"
            for n, t in TARGETS.items()
            for x in t.loaders
            if not obstacles(formats, t, x)
        }

    assert TARGETS["assignment.json"].formats == set(BLOCK_FORMATS)
    everything = {
        f"{n}/{x.name}" for n, t in TARGETS.items() for x in t.loaders if "mxfp4" in x.formats
    }
    assert loading({q: "fp8", k: "fp8"}) - everything == {
        f"modelopt_checkpoint/{name}" for name in ("vLLM", "SGLang", "TensorRT-LLM")
    }
    assert (
        loading({q: "mxfp4", k: "mxfp4"})
        == everything
        == loading({q: "mxfp4", k: "mxfp4", "lm_head": "bf16"})
    )
    assert split_groups({q: "mxfp4", k: "mxfp8_e4m3"}) == [
        "model.layers.0.self_attn.{q_proj,k_proj,v_proj}"
    ]
    # A layer in BF16 beside quantized ones splits its group as another format does.
    assert not split_groups({q: "mxfp4"}) and split_groups({q: "mxfp4"}, [k, "lm_head"])
    vllm = TARGETS["compressed_tensors, profile vllm"]
    assert not obstacles({q: "mxfp4"}, vllm, vllm.loaders[1], ["lm_head"])
    assert obstacles({q: "mxfp4"}, vllm, vllm.loaders[1], [k])
    assert loading({q: "mxfp4", k: "mxfp8_e4m3"}) == {
        "assignment.json/dmx",
        "compressed_tensors, profile transformers/transformers",
        "quark/transformers + amd-quark",
        "torchao/transformers",
    }
    assert "compressed_tensors, profile vllm/vLLM" not in loading(
        {q: "mxfp6_e2m3", k: "mxfp6_e2m3"}
    )
    assert "quark/vLLM" in loading({q: "mxfp6_e3m2", k: "mxfp6_e3m2"})
    assert loading({q: "mxfp8_e5m2"}) == {
        "assignment.json/dmx",
        "humming/vLLM",
        "torchao/transformers",
    }
    quark = TARGETS["quark"]
    (vllm,) = (x for x in quark.loaders if x.name == "vLLM")
    assert not obstacles({q: "mxfp4"}, quark, vllm, (), {q: "mxfp6_e2m3"})
    for weight, of_input in (("mxfp6_e2m3", "mxfp4"), ("mxfp4", "mxfp8_e4m3")):
        (why,) = obstacles({q: weight}, quark, vllm, (), {q: of_input})
        assert f"does not run inputs in {of_input} beside weights in {weight}" in why


def test_how_vllm_runs_them_is_said_by_card():
    assert how_it_runs("quark", "vLLM", "Blackwell", ["mxfp4", "mxfp6_e2m3", "bf16"]) == {
        "mxfp4": "native with inputs=true, else weights alone",
        "mxfp6_e2m3": BY_HUMMING,
    }
    ct = ("compressed_tensors, profile vllm", "vLLM")
    assert how_it_runs(*ct, "Blackwell", ["mxfp4", "nvfp4", "mxfp6_e2m3"]) == {
        "mxfp4": "native, inputs quantized always",
        "nvfp4": "native with inputs=true, else weights alone",
        "mxfp6_e2m3": "-",
    }
    pairs = [("mxfp8_e4m3", "bf16"), ("mxfp4", "fp8"), ("mxfp4", "mxfp4"), ("bf16", None)]
    assert kinds_of(pairs) == ["mxfp4", "mxfp4 with inputs in fp8", "mxfp8_e4m3"]
    assert "native, from 0.32" in how_it_runs(*ct, "Hopper", [W4A8])[W4A8]
    others = how_it_runs(ct[0], "transformers", "Hopper", [W4A8, "mxfp6_e2m3"])
    assert others == {W4A8: "emulated", "mxfp6_e2m3": "-"}
    assert inputs_otherwise(*ct, ["mxfp4", "mxfp8_e4m3", "fp8"]) == {
        "Hopper": {"in fp8": ["mxfp4"], "left alone": ["mxfp8_e4m3"]}
    }
    said = (Path(__file__).parents[2] / "docs" / "runtimes.md").read_text()
    assert BY_HUMMING in said and INPUTS_IN_FP8.partition(" (")[0] in said
    for target, loader in HOW_IT_RUNS:
        (known,) = (x for x in TARGETS[target].loaders if x.name == loader)
        beside = known.formats if known.beside is None else known.beside
        pairs = {kind_of(w, f) for w in beside for f in known.input_formats}
        assert set(HOW_IT_RUNS[target, loader]) == known.formats | pairs


def test_layers_outside_the_usual_projections_have_a_place():
    assert locate("model.layers.3.mlp.up_proj") == ("model.layers", 3, "up")
    assert locate("lm_head") == ("", None, "lm_head")
    formats = {
        f"model.layers.0.mlp.experts.{i}.up_proj": name
        for i, name in enumerate(["mxfp4", "mxfp8_e4m3"])
    }
    shown = format_map(formats | {"lm_head": "mxfp8_e4m3"})
    assert 'title="1 mxfp4, 1 mxfp8_e4m3"' in shown and "lm_head: mxfp8_e4m3" in shown


def test_unit_names_resolve_to_their_final_format():
    known = {"formats": {"a.q_proj": "mxfp4", "a.k_proj": "mxfp4", "b": "mxfp8_e4m3"}}
    assert unit_format("b", known) == "mxfp8_e4m3"
    assert (
        unit_format("a.{q_proj,k_proj}", known)
        == "mxfp4"
        == unit_format("a.q_proj+a.k_proj", known)
    )
    assert unit_format("nowhere", known) is None
    apart = known | {"input_formats": dict.fromkeys(known["formats"], "mxfp6_e2m3")}
    assert unit_format("a.{q_proj,k_proj}:weight", apart) == "mxfp4"
    assert unit_format("b:input", apart) == "mxfp6_e2m3"
    names = ("experts.gate_up_proj", "experts.down_proj")
    assert unit_format("experts", {"formats": dict.fromkeys(names, "mxfp4")}) == "mxfp4"
    split = {f"experts.{e}.{kind}_proj": "mxfp4" for e in range(2) for kind in ("gate", "up")}
    split |= {f"experts.{e}.down_proj": "mxfp8_e4m3" for e in range(2)}
    assert unit_format("experts.*.{gate_proj,up_proj}", {"formats": split}) == "mxfp4"
    assert unit_format("experts.*.down_proj", {"formats": split}) == "mxfp8_e4m3"
    assert unit_format("experts", {"formats": split}) is None  # two formats are no final one


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "record.json").unlink(),
            "record.json does not exist: a finished run leaves one",
        ),
        (
            lambda f: (f / "record.json").write_text('{"schema": "dmx.record/1"}'),
            "schema is 'dmx.record/1'",
        ),
        (lambda f: (f / "kl-5-0/assignment.json").unlink(), "result 'kl' in record.json names it"),
        (
            lambda f: (f / "differentiable-5-0/history.jsonl").write_text('{"step": 0}\n{"st'),
            "history.jsonl, line 2",
        ),
    ],
)
def test_damaged_folder_is_named(tmp_path, damage, message):
    damage(write_run(tmp_path))
    with pytest.raises(RunError, match=re.escape(message)):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_folder_without_history_or_searches_still_reports(tmp_path):
    def change(was: Record) -> Record:
        return dataclasses.replace(was, results=was.results[:3])

    page = write_report(edited(write_run(tmp_path), change)).read_text()
    assert "so there is no verdict" in page and "The search, step by step" not in page
