"""Result pages are made from records alone; a bar that is missed says so."""

import copy
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

from dmx.errors import DmxError
from experiments.reporting.maps import format_counts
from experiments.reporting.pages.mor import curves, fell_back, mor_page
from experiments.reporting.pages.quality import quality_page
from experiments.reporting.plots import pareto
from experiments.reporting.quality_tables import pooled
from experiments.reporting.report_training import digits_log, fallback_digits, loss_curve
from experiments.reporting.results import group_rows
from mor.state import OPERANDS

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "docs" / "results" / "records"


ABLATION = [
    f"quality_valid_{name}" for name in ("exact", "had", "heur", "learn", "none", "start")
]  # fmt: skip


def read(*names: str) -> list[dict]:
    return [json.loads((RECORDS / f"{name}.json").read_text()) for name in names]


def runs(recipe: str) -> list[dict]:
    return read(*(f"mor_{recipe}_{seed}" for seed in range(3)))


@pytest.fixture
def make_tables(monkeypatch):
    path = ROOT / "scripts" / "make_tables.py"
    spec = importlib.util.spec_from_file_location("make_tables", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(str(ROOT))
    spec.loader.exec_module(module)
    return module


def test_committed_pages_are_what_the_records_give(make_tables, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_tables.py", "--check"])
    assert make_tables.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x", "{", "x.json is damaged"),
        ("x", "[]", "x.json is no record"),
        ("x", '{"schema": "dmx.record/1"}', "x.json: a record lacks what its page shows"),
        ("quality_x", "{}", "quality_*.json: a record lacks"),
    ],
)
def test_a_record_that_is_none_is_named_and_nothing_written(
    make_tables, tmp_path, monkeypatch, capsys, name, text, words
):
    results = tmp_path / "docs" / "results"
    monkeypatch.setattr(make_tables, "ROOT", tmp_path)
    monkeypatch.setattr(make_tables, "RESULTS", results)
    monkeypatch.setattr(make_tables, "RECORDS", results / "records")
    monkeypatch.setattr("sys.argv", ["make_tables.py"])
    (results / "records").mkdir(parents=True)
    (tmp_path / "README.md").write_text("nothing of tables")
    (results / "records" / f"{name}.json").write_text(text)
    assert make_tables.main() == 2
    assert words in capsys.readouterr().err
    assert not list(results.glob("*.md"))


def test_a_readme_without_its_marks_loses_nothing(make_tables):
    text = f"{make_tables.START}\nold\nthe rest of the page"
    with pytest.raises(DmxError, match="end of results"):
        make_tables.between(text, make_tables.START, make_tables.END, "new")


def test_records_stay_small_and_name_no_machine_path():
    texts = [path.read_text() for path in RECORDS.glob("*.json")]
    assert sum(map(len, texts)) < 5_000_000  # answers to each item of the tasks, for paired errors
    assert not any('"/' in text for text in texts)  # no text in them begins as an absolute path


def on_test_text(records: list[dict], factor: float = 1.0) -> list[dict]:
    """The records as if measured on the test text, dMX's perplexity times a factor."""
    moved = copy.deepcopy(records)
    for record in moved:
        record["data"]["evaluation"]["name"] = "wikitext2/test"
        for row in record["results"]:
            if row["search"] == "differentiable":
                row["perplexity"] *= factor
    return moved


def test_methods_are_named_by_what_differs_from_the_exact_settings():
    text, figure = quality_page(read(*ABLATION))
    assert figure is not None
    for name in ("dMX", "dMX gradient_scale=none", "dMX start=kl_per_bit", "kl_per_bit", "fisher"):
        assert f"| none | {name} | ≤ 5 | 3 |" in text
    assert (
        "| learned | dMX rotation_lr=10 steps=200 | ≤ 5 | 3 | 26.41 ± 0.12 | no heuristic |" in text
    )
    assert "No records of a test text yet." in text


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "missed"), (0.9, "met")])
def test_bars_say_met_or_missed(factor, verdict):
    text, _ = quality_page(on_test_text(read(*ABLATION), factor))
    other = {"met": "missed", "missed": "met"}[verdict]
    assert re.search(rf"≥ 3 % below: -?[\d.]+, {verdict}", text)
    assert re.search(rf"≥ 2 % below: -?[\d.]+, {verdict}", text)
    assert f"≤ 25.9: {verdict}" in text and f"reach ≤ 25: {verdict}" in text
    assert not re.search(rf"% below: -?[\d.]+, {other}", text)
    # Learned rotations have no heuristic beside them: neither met nor missed.
    assert "| – | ≤ 25.9: " in text and "≥ 2 % below: no heuristic" in text


def test_differences_count_as_lower_higher_or_the_same():
    record = at_five_bits()
    rows = {row["label"]: row for row in record["results"]}
    best = rows["kl_per_bit"]["window_nll"]

    def text(shift: float, scatter: float) -> str:
        values = [x + shift + scatter * (-1) ** i for i, x in enumerate(best)]
        rows["dmx"] |= {"window_nll": values, "perplexity": rows["kl_per_bit"]["perplexity"]}
        found = quality_page([record])[0].partition("## Against the best heuristic")[2]
        return found.partition("\n## ")[0]

    lower = text(-0.1, 0.1)
    assert "| none | dMX | **" in lower and "by more than one standard error in 1 of 1" in lower
    assert "in 0 of 1 cells (bold), higher in 1 (italic)." in text(0.1, 0.1)
    assert "in 0 of 1 cells (bold), higher in 0 (italic)." in text(0.001, 0.1)
    assert "| none | dMX | same |" in text(0.0, 0.0) and "cells" not in text(0.0, 0.0)


def test_differences_are_on_the_seeds_that_both_have():
    records = read("quality_test_none_50_0", "quality_test_none_50_1")
    for record in records:
        record["results"] = [r for r in record["results"] if not r["rounding"]]
    first, second = ({r["label"]: r for r in record["results"]} for record in records)
    second["dmx"]["window_nll"] = [
        x + 1 for x in second["dmx"]["window_nll"]
    ]  # seed 1 does not count
    records[1]["results"] = [second["dmx"]]
    text, _ = quality_page(records)
    gain = 100 * (first["dmx"]["perplexity"] / first["kl_per_bit"]["perplexity"] - 1)
    assert f"| none | dMX | **{gain:+.1f} ± " in text
    assert f"| dMX | {(first['dmx']['perplexity'] + second['dmx']['perplexity']) / 2:.2f}" in text


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("model", "dtype", "float32"),
        ("evaluation", "windows", 20),
        ("evaluation", "sha256", "0"),
        ("calibration", "batches", 4),
    ],
)
def test_records_that_are_not_measured_alike_are_refused(place, key, value):
    records = read("quality_test_none_50_0", "quality_test_none_50_1")
    of = records[1] if place == "model" else records[1]["data"]
    of[place][key] = value
    with pytest.raises(DmxError, match="not measured alike"):
        quality_page(records)


def test_other_models_have_their_own_projections_and_units():
    record = at_five_bits()
    for row in record["results"]:
        if row["search"]:
            row["budget"]["unit"] = "bits_per_element"
            row["perplexity"] = float("inf") if row["label"] == "fisher" else row["perplexity"]
            row["format_counts"] = {
                "weight": {"c_attn": {"mxfp4": 1, "mxfp6_e2m3": 3}, "up": {"mxfp4": 2}}
            }
    record["model"]["id"] = "someone/gpt"
    text, figure = quality_page([record])
    assert "| transform | method | budget | up | c_attn |" in text
    assert "| none | dMX | ≤ 5 bits_per_element | 0 | 75 |" in text
    assert "Budgets are in bits_per_element." in text and "smollm2_135m_instruct_gguf" not in text
    assert "Several runs shared a card" not in text and "inf" not in text
    assert figure.axes[0].get_xlabel() == "budget, bits_per_element"


def test_the_picture_shows_the_best_dmx_and_how_sure_its_difference_is():
    record = at_five_bits()
    rows = {row["label"]: row for row in record["results"]}
    worse = rows["dmx"] | {
        "label": "dmx + polish",
        "perplexity": 30.0,
        "search": "differentiable+polish",
    }
    record["results"].append(worse)
    left, right = quality_page([record])[1].axes
    heuristic, dmx = (
        100 * (rows[k]["perplexity"] / rows["bf16"]["perplexity"] - 1)
        for k in ("kl_per_bit", "dmx")
    )
    assert [line.get_ydata()[0] for line in left.get_lines()] == pytest.approx([heuristic, dmx])
    points, _, (bar,) = right.containers[0]
    gain = 100 * (rows["dmx"]["perplexity"] / rows["kl_per_bit"]["perplexity"] - 1)
    gaps = np.subtract(rows["dmx"]["window_nll"], rows["kl_per_bit"]["window_nll"])
    error = 100 * gaps.std(ddof=1) / len(gaps) ** 0.5
    assert points.get_ydata()[0] == pytest.approx(gain)
    ((low, high),) = (segment[:, 1] for segment in bar.get_segments())
    assert (high - low) / 2 == pytest.approx(error)


def test_loss_curves_are_compared_on_the_seeds_that_both_have():
    bf16, tensor = runs("bf16"), read("mor_tensor_1")
    rows = [record["results"][0] for record in (*bf16, *tensor)]
    _, bottom = curves(group_rows(rows)).axes
    points, _, (bar,) = bottom.containers[0]
    ours, theirs = (r["loss_curve"]["validation"]["loss"] for r in (rows[3], rows[1]))
    assert points.get_ydata() == pytest.approx(
        [100 * (a / b - 1) for a, b in zip(ours, theirs, strict=True)]
    )
    assert all(np.ptp(segment[:, 1]) == 0 for segment in bar.get_segments())  # one seed


def test_bars_are_for_one_model_and_text_alone():
    records = on_test_text(read(*ABLATION))
    for record in records:
        record["model"]["id"] = "/a/machine/runs/llama/model"
    text, _ = quality_page(records)
    assert "## llama/model, wikitext2/test" in text and "/a/machine" not in text
    assert "missed" not in text and ": met" not in text


def test_format_counts_hold_inputs_where_they_differ():
    formats = {f"model.layers.{i}.mlp.up_proj": f for i, f in enumerate(("mxfp4", "mxfp6_e2m3"))}
    assert format_counts(formats) == {"weight": {"up": {"mxfp4": 1, "mxfp6_e2m3": 1}}}
    inputs = dict.fromkeys(formats, "mxfp4")
    assert format_counts(formats, inputs)["input"] == {"up": {"mxfp4": 2}}


def test_separate_operands_are_shown_apart():
    record = read("quality_valid_exact")[0]
    for row in record["results"]:
        row["choice_per"] = "operand"
    # Where a search gave both operands the same formats, a record has no inputs of its own.
    counts = record["results"][0]["format_counts"]
    counts["input"] = {name: {"mxfp4": 30} for name in counts["weight"]}
    text, _ = quality_page([record])
    assert "| none, separate operands | dMX | ≤ 5, weights | 77 |" in text
    high = [r["format_counts"]["weight"]["q"]["mxfp6_e2m3"] / 30 for r in record["results"][1:]]
    assert f"| none, separate operands | dMX | ≤ 5, inputs | {100 * sum(high) / 3:.0f} |" in text


def test_uniform_formats_of_two_transforms_are_two_lines():
    rows = [
        {
            "label": f"uniform {name}", "search": "uniform", "perplexity": value, "element_bits": bits,
            "transform": transform,
        }
        for transform, factor in ((None, 2.0), ({"name": "hadamard_block"}, 1.0))
        for name, bits, value in (("mxfp4", 4.0, 50 * factor), ("mxfp6_e2m3", 6.0, 23.0))
    ]  # fmt: skip
    axes = pareto(group_rows(rows)).axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines["uniform"] == [100.0, 23.0] and lines["uniform, hadamard_block"] == [50.0, 23.0]
    assert pareto(group_rows(rows), zoom=True) is None


def test_a_recipe_that_diverged_on_a_seed_is_missed():
    records = runs("bf16") + runs("tensor")
    records[4]["results"][0] |= {"nll": None, "perplexity": None}
    text, _ = mor_page(records + records[:1], [])
    assert "| – | – | – | missed, seed 1: loss is not finite |" in text
    assert "| bf16 | 0, 1, 2 |" in text  # the record that stands twice counts once


def test_training_page_pools_seeds_and_splits_settings():
    records = runs("bf16") + runs("tensor")
    text, pictures = mor_page(records, [])
    assert (
        "| tensor | 0, 1, 2 | 5.655 ± 0.031 | 5.641 | +0.25 |" in text
        and "mor_loss.png" in pictures
    )
    assert "Learning rates" not in text
    assert "| tensor | 100.00: met | 100.00: met | 92.42: missed |" in text
    other = copy.deepcopy(records)
    for record in other:
        record["requested"]["train"]["lr"] = 5e-4
        if record["results"][0]["label"] == "tensor":
            record["results"][0]["nll"] += 1
    text, _ = mor_page(records + other, [])
    assert "### Learning rates and batch sizes" in text and "| 0.0005 | 32 | 388 |" in text
    assert " %: missed" in text and " %: met" in text


def test_a_recipe_is_compared_on_the_seeds_that_both_have():
    bf16, tensor = runs("bf16"), read("mor_tensor_1")
    text, _ = mor_page([*bf16, *tensor], [])
    base, row = bf16[1]["results"][0], tensor[0]["results"][0]
    assert f"{100 * (row['nll'] / base['nll'] - 1):+.2f}" in text


def test_outlier_run_names_what_fell_back():
    layers = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    quiet = [0.0] * len(OPERANDS)
    log = [
        {"step": s, "elements_bf16": [[1.0 if s >= 6 else 0.04, *quiet[1:]], quiet]}
        for s in range(10)
    ]  # fmt: skip
    digits = fallback_digits(layers, log)
    assert digits["shares"] == {layers[0]: {OPERANDS[0]: "1" * 6 + "9" * 4}}
    assert digits_log(digits)[9]["elements_bf16"][0][0] == 1.0
    assert fell_back({"fallback_digits": digits}, 6) == {OPERANDS[0]: [layers[0]]}
    record = read("mor_tensor_0")[0]
    record["requested"]["train"]["outlier"]["step"] = 250
    record["results"][0]["fallback_digits"] = digits
    text, pictures = mor_page([record], [])
    assert "times 2^17 before step 250" in text and "mor_outlier_tensor.png" in pictures
    before = record["results"][0]["loss_curve"]["validation"]["loss"][1]
    assert f"| tensor | 0 | {before:.3f} |" in text


def test_safety_net_page_has_limits_and_a_curve():
    record = read("mor_safety_net")[0]
    text, _ = mor_page([], [record])
    assert "missed" not in text
    record["outliers"]["with"] = 2 * record["outliers"]["clean"]
    point = {"perplexity": 40.0, "element_bits": 5.0, "weight_element_bits": 5.0,
             "input_element_bits": 5.0}  # fmt: skip
    record["curve"] = [
        point | {"label": "net", "fallback_rate": 0.1}, point | {"label": "mxfp6", "element_bits": 6.0},
    ]  # fmt: skip
    text, pictures = mor_page([], [record])
    assert text.count("missed") == 1 and "mor_safety.png" in pictures


def test_loss_curve_is_thin_and_keeps_the_last_step(tmp_path):
    for name, steps in (("train", 500), ("validation", 3)):
        rows = [{"step": s, "loss": None if s == 1 else float(s)} for s in range(steps)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    curve = loss_curve(tmp_path)
    assert len(curve["train"]["step"]) == len(curve["train"]["loss"]) == 200
    assert curve["train"]["step"][-1] == 499
    assert curve["validation"] == {"step": [0, 1, 2], "loss": [0.0, None, 2.0]}


def at_five_bits(**changes: object) -> dict:
    """One seed on the test text: bf16, and kl_per_bit, fisher and dMX at 5 bits."""
    record, other = read("quality_test_none_50_0", "quality_test_pol_50_0")
    record["requested"]["search"] |= changes
    rows = [r for r in other["results"] if r["label"] == "bf16"]
    rows += [r for r in record["results"] if not r["rounding"]]
    record["results"] = [row | {"zero_shot": None} for row in rows]
    return record


def answer(row: dict, **items: list[int]) -> None:
    """The row has these items of each task right, 1, or wrong, 0."""
    row["zero_shot"] = {
        task: {"metric": "acc", "value": sum(found) / len(found), "stderr": 0.1,
               "count": len(found), "items": found, "sha256": task}
        for task, found in items.items()
    }  # fmt: skip


def test_tasks_are_compared_item_by_item_with_the_best_heuristic_and_bf16():
    record = at_five_bits()
    rows = {row["label"]: row for row in record["results"]}
    answer(rows["bf16"], arc=[1, 1, 1, 1], piqa=[1, 0, 1, 1])
    answer(rows["kl_per_bit"], arc=[1, 1, 1, 0], piqa=[1, 0, 0, 0])
    answer(rows["dmx"], arc=[1, 1, 0, 0], piqa=[1, 0, 1, 0])
    _, _, text = quality_page([record])[0].partition("## Zero-shot tasks")
    assert "| arc, acc | piqa, acc | mean |" in text
    assert "| – | bf16 | – | 1 | 100.0 | 75.0 | 87.5 |" in text
    dmx = "| none | dMX | ≤ 5 | 1 |"
    assert f"{dmx} 50.0 | 50.0 | 50.0 |" in text and "| none | fisher | ≤ 5 | 1 |" not in text
    # One of four items is exactly one standard error: not bold.
    assert f"{dmx} kl_per_bit | -25.0 ± 25.0 | +25.0 ± 25.0 | +0.0 ± 17.7 |" in text
    assert f"{dmx} bf16 | *-50.0 ± 28.9* | -25.0 ± 25.0 | *-37.5 ± 19.1* |" in text
    del rows["dmx"]["zero_shot"]["piqa"]
    text, _ = quality_page([record])
    assert f"{dmx} 50.0 | – | – |" in text and f"{dmx} bf16 | *-50.0 ± 28.9* | – | – |" in text
    answer(rows["fisher"], arc=[0, 0, 0, 0])
    # Where the best by perplexity was not asked, no other stands in.
    rows["kl_per_bit"]["zero_shot"] = None
    assert f"{dmx} fisher |" not in quality_page([record])[0]
    record["results"] = [rows["bf16"], rows["dmx"]]  # no heuristic, as with learned rotations
    assert f"{dmx} bf16 | *-50.0 ± 28.9* |" in quality_page([record])[0]
    for row in rows.values():
        row["zero_shot"] = None
    assert "Zero-shot tasks" not in quality_page([record])[0]


def test_fused_units_stand_apart_and_are_compared_with_layers():
    layer, fused = at_five_bits(), at_five_bits(units="fused")
    for row in fused["results"]:
        if row["search"]:
            row["perplexity"] *= 1.02
    text, _ = quality_page([layer, fused])
    _, _, table = text.partition("## Fused units against layer units")
    assert "| none, fused units | dMX | ≤ 5 | 28.60 (1) | 28.04 (1) | +2.00 ± 0.00 |" in table
    assert (
        "| none, fused units | kl_per_bit | ≤ 5 | 28.83 (1) | 28.26 (1) | +2.00 ± 0.00 |" in table
    )
    assert ", W+A, fused units: transform none" in text
    assert "bf16 21.64, bf16" not in text  # units mean nothing to bf16
    assert "| none | nearest | dMX | 28.04 (1) |" in text  # the glance is of layers
    for alone in (layer, fused):
        assert "## Fused units" not in quality_page([alone])[0]


def test_rows_that_records_measured_alike_count_once_with_their_tasks():
    plain, asked, other = at_five_bits(), at_five_bits(), at_five_bits()
    for row in asked["results"]:
        answer(row, arc=[1, 0])
    for records in ([plain, asked], [asked, plain], [plain, asked, plain]):
        groups = [group for found in pooled(records).values() for group in found]
        assert sorted(g.label for g in groups) == ["bf16", "dMX", "fisher", "kl_per_bit"]
        assert all(len(g.rows) == 1 and g.rows[0]["zero_shot"] for g in groups)
    for row in other["results"]:
        row["nll"] += 1e-6
    assert {len(g.rows) for found in pooled([plain, other]).values() for g in found} == {2}
