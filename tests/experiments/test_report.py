"""The report is complete, escapes what it shows, needs no network, and says why a number is
missing."""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.reporting.results import (
    SIGNIFICANT,
    by_operands,
    difference_to,
    group_rows,
    reference_name,
    reference_of,
    verdicts,
)
from rich.console import Console

from dmx.assignment.targets import TARGETS, obstacles, split_groups
from dmx.errors import RunError
from dmx.formats import MX_FORMATS
from experiments.reporting.maps import format_map, locate
from experiments.reporting.plots import pareto
from experiments.reporting.report import unit_format, write_report
from experiments.reporting.tables import difference_text, terminal_table

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


def row(
    label: str, search: str | None, nlls: np.ndarray, bits: float | None, **more: Any
) -> dict[str, Any]:
    nll = float(nlls.mean())
    base = {
        "label": label,
        "search": search,
        "assignment": None,
        "element_bits": bits,
        "bits_per_element": bits + 0.25 if bits and bits < 16 else bits,
        "whole_model_bits_per_element": 0.79 * bits + 3.36 if bits else None,
        "perplexity": math.exp(nll),
        "nll": nll,
        "tokens": WINDOWS * 2047,
        "windows": WINDOWS,
        "window_nll": nlls.tolist(),
        "search_seconds": None,
        "search_seconds_reason": "nothing was searched",
        "eval_seconds": 12.4,
        "budget": None,
        "zero_shot": None,
        "zero_shot_reason": "eval.zero_shot is off",
    }
    return base | more


def write_run(
    folder: Path, *, seeds: int = 1, budgets: tuple[float, ...] = (5.0,), others: bool = False
) -> Path:
    """A run folder as the entry points leave it, with numbers like those of SmolLM2-135M."""
    generator = np.random.default_rng(0)
    text = generator.normal(0.0, 0.18, WINDOWS)  # how hard each window is: common to all rows

    def nlls(perplexity: float) -> np.ndarray:
        noise = generator.normal(0.0, 0.012, WINDOWS)
        return math.log(perplexity) + text - text.mean() + noise - noise.mean()

    results = [
        row("bf16", None, nlls(21.78), 16.0),
        row("uniform mxfp4", "uniform", nlls(104.6), 4.0),
        row("uniform mxfp6_e2m3", "uniform", nlls(23.56), 6.0),
        row("uniform mxfp8_e4m3", "uniform", nlls(24.02), 8.0),
    ]
    searches = {"kl": 30.27, "differentiable": 28.54}
    if others:
        searches = {"kl": 30.27, "kl_per_bit": 28.89, "fisher": 29.19, "differentiable": 28.34}
    for limit in budgets:
        for search, perplexity in searches.items():
            for seed in range(seeds):
                label = "dmx" if search == "differentiable" else search
                path = f"{label}-{limit:g}-{seed}/assignment.json"
                (folder / path).parent.mkdir(parents=True)
                share = (limit - 4.2) / 2
                (folder / path).write_text(json.dumps(assignment(generator, share, search)))
                scale = math.exp(0.28 * (5.0 - limit)) * (
                    1 + 0.006 * generator.normal() * (seeds > 1)
                )
                results.append(
                    row(
                        label,
                        search,
                        nlls(perplexity * scale),
                        limit - 0.02 * generator.random(),
                        assignment=path,
                        search_seconds=83.0 if label == "dmx" else 41.5,
                        seed=seed,
                        budget={"limit": limit, "unit": "element_bits"},
                    )
                )
                if label == "dmx" and seed == 0:
                    write_trace((folder / path).parent, generator, limit)
    record = {
        "schema": "dmx.record/1",
        "command": "python -m experiments.search model=smollm2_135m budget=bits_5p0",
        "started": "2026-02-03T10:00:00+00:00",
        "finished": "2026-02-03T10:04:31+00:00",
        "wall_seconds": 271.3,
        "versions": {
            "python": "3.11.9",
            "torch": "2.13.0",
            "transformers": "5.1.0",
            "dmx": "0.1.0",
        },
        "device": {"name": "NVIDIA H100 80GB HBM3", "type": "cuda", "threads": 16},
        "peak_memory_bytes": 9_437_184_000,
        "seed": 0,
        "model": {
            "id": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "revision": "12" * 20,
            "architecture_sha256": "ab" * 32,
            "dtype": "bfloat16",
            "note": "dequantized from a 4-bit GGUF, so full precision here is a 4-bit lattice",
        },
        "data": {
            "calibration": {
                "name": "fineweb-300 + c4-584",
                "sha256": "cd" * 32,
                "tokens": 614400,
                "batches": 150,
                "batch_shape": [4, 1024],
            },
            "evaluation": {
                "name": "wiki.test",
                "sha256": "ef" * 32,
                "tokens": 303415,
                "windows": WINDOWS,
                "window": 2048,
            },
        },
        "requested": {
            "search": {"steps": STEPS, "family": "mxfp6_mxfp4", "lr": 1.0},
            "backend": "triton",
            "model": {"dtype": "bfloat16"},
            "budget": {"limit": 5.0, "unit": "element_bits"},
        },
        "actual": {
            "search": {"steps": STEPS, "family": "mxfp6_mxfp4", "lr": 1.0},
            "backend": "triton",
            "model": {"dtype": "bfloat16"},
            "budget": {"limit": 5.0, "unit": "element_bits"},
        },
        "results": results,
        "verdict": None,
        "warnings": [],
    }
    (folder / "record.json").write_text(json.dumps(record))
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


def edited(run_folder: Path, change: Any) -> Path:
    """The run folder with `change(record)` applied to its record."""
    record = json.loads((run_folder / "record.json").read_text())
    change(record)
    (run_folder / "record.json").write_text(json.dumps(record))
    return run_folder


def test_report_needs_no_network_and_leaves_no_temporary_file(run_folder, page):
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "url(" not in page and "@import" not in page and "<script" not in page
    assert not list(run_folder.glob(".report-*"))
    assert page.count("data:image/") == 5


def test_headline_gives_difference_and_paired_error(run_folder, page):
    results = json.loads((run_folder / "record.json").read_text())["results"]
    nll = {r["label"]: np.array(r["window_nll"]) for r in results}
    delta = nll["dmx"] - nll["kl"]
    (verdict,) = verdicts(results)
    assert verdict["beats"] is True
    assert verdict["difference_nats"] == pytest.approx(delta.mean())
    assert verdict["stderr_nats"] == pytest.approx(delta.std(ddof=1) / math.sqrt(WINDOWS))
    headline = re.search("<h1>(.*?)</h1>", page)[1]
    assert headline == verdict["text"]
    assert headline.startswith("dMX beats kl at 5 element_bits: loss 0.0589 ± ")


def test_difference_within_noise_is_not_called_a_win():
    noise = np.random.default_rng(1).normal(0, 0.1, 50)
    noise -= noise.mean()
    stderr = float(noise.std(ddof=1)) / math.sqrt(50)
    budget = {"budget": {"limit": 5.0, "unit": "element_bits"}}

    def verdict(shift: float) -> dict[str, Any]:
        rows = [
            row("kl", "kl", np.full(50, 3.4), 5.0, **budget),
            row("dmx", "differentiable", 3.4 + noise + shift, 5.0, **budget),
        ]
        (found,) = verdicts(rows)
        return found

    for share, beats, words in (
        (-0.9, False, "cannot be told apart"), (0.9, False, "cannot be told apart"),
        (-1.1, True, "beats"), (1.1, False, "does not beat"),
    ):  # fmt: skip
        found = verdict(share * SIGNIFICANT * stderr)
        assert found["beats"] is beats and words in found["text"], share
    noise[:] = 0
    assert "cannot be told apart at 5 element_bits: loss equal (paired" in verdict(0.0)["text"]


def test_without_kl_the_strongest_heuristic_stands_in():
    budget = {"budget": {"limit": 5.0, "unit": "element_bits"}}
    wave = 0.01 * np.sin(np.arange(50))
    rows = [
        row("fisher", "fisher", np.full(50, 3.40), 5.0, **budget),
        row("kl_per_bit", "kl_per_bit", np.full(50, 3.38) + wave, 5.0, **budget),
        row("dmx", "differentiable", np.full(50, 3.36), 5.0, **budget),
    ]
    (found,) = verdicts(rows)
    assert found["against"] == "kl_per_bit" and "beats kl_per_bit" in found["text"]
    kl = row("kl", "kl", np.full(50, 3.5) + wave, 5.0, **budget)
    assert verdicts([*rows, kl])[0]["against"] == "kl"
    assert verdicts(rows[2:]) == []
    # The strongest at dMX's own budget, whatever stands at others.
    other = {"budget": {"limit": 6.0, "unit": "element_bits"}}
    far = [row(name, name, np.full(50, 3.3), 6.0, **other) for name in ("kl", "fisher")]
    assert verdicts([*rows, *far])[0]["against"] == "kl_per_bit"
    assert reference_name(group_rows(rows)) == "kl_per_bit"
    assert reference_name(group_rows([*rows, *far])) == "reference"


def test_a_seed_that_ran_twice_weighs_no_more_than_the_others():
    rows = [row("dmx", "differentiable", np.full(4, level), 5.0, seed=seed)
            for seed, level in ((0, 1.0), (1, 2.0), (2, 3.0), (2, 5.0))]  # fmt: skip
    (group,) = group_rows(rows)
    found = group.statistic("nll")
    assert found.mean == pytest.approx(7 / 3) and found.count == 3
    assert found.spread == pytest.approx(np.std([1, 2, 4], ddof=1))
    assert group.window_nll() == pytest.approx(np.full(4, 7 / 3))


def test_what_was_rounded_is_compared_with_what_was_rounded():
    budget = {"budget": {"limit": 5.0, "unit": "element_bits"}}
    wave = 0.01 * np.sin(np.arange(50))
    rows = [
        row(label, search, np.full(50, level) + wave * (search[0] == "k"), 5.0, **budget)
        for label, search, level in (
            ("kl", "kl", 3.5), ("kl + gptq", "kl+gptq", 3.3),
            ("dmx", "differentiable", 3.4), ("dmx + gptq", "differentiable+gptq", 3.35),
        )
    ]  # fmt: skip
    plain, rounded = verdicts(rows)
    assert plain["against"] == "kl" and plain["beats"]
    assert rounded["against"] == "kl + gptq" and not rounded["beats"]
    (alone,) = verdicts([r for r in rows if "gptq" in r["label"]])
    assert alone["against"] == "kl + gptq"


def test_scatter_over_seeds_counts_against_a_claim():
    def seeds(label: str, search: str, levels: list[float]) -> list[dict[str, Any]]:
        budget = {"limit": 5.0, "unit": "element_bits"}
        wave = 0.001 * np.sin(np.arange(WINDOWS) * len(label))
        return [
            row(label, search, level + wave, 5.0, budget=budget, seed=i)
            for i, level in enumerate(levels)
        ]

    kl = seeds("kl", "kl", [3.40, 3.40])
    assert verdicts(kl + seeds("dmx", "differentiable", [3.38, 3.38]))[0]["beats"] is True
    assert verdicts(kl + seeds("dmx", "differentiable", [3.30, 3.46]))[0]["beats"] is False


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
    assert "4-bit lattice" in page and "ef" * 32 in page and "8.79 GiB" in page


def test_missing_metric_is_a_dash_with_its_reason(page):
    assert '<td class="num" title="nothing was searched">–</td>' in page


def test_all_text_is_escaped(tmp_path):
    evil = '<script>alert("x")</script>'

    def change(record):
        record["warnings"] = [evil]
        record["model"]["id"] = record["model"]["note"] = record["command"] = evil
        record["requested"][evil] = evil
        record["results"][0]["perplexity"], record["results"][0]["perplexity_reason"] = None, evil
        record["results"][1]["label"] = f"uniform $x_ {evil}"

    page = write_report(edited(write_run(tmp_path), change)).read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6


def test_setting_that_ran_otherwise_is_marked(tmp_path, page):
    assert 'class="differs"' not in page and "All 7 checked settings ran as asked" in page

    def change(record):
        record["actual"]["backend"] = "reference"
        record["requested"]["run"] = {"device": "auto", "threads": None, "folder": "x"}
        record["actual"]["run"] = {"device": "cuda", "threads": 4}  # left open; folder not checked

    page = write_report(edited(write_run(tmp_path), change)).read_text()
    assert "1 of 9 checked settings differ" in page and page.count('class="differs"') == 1
    assert re.search(
        r'<tr class="differs"><th scope="row">backend</th><td>triton</td><td>reference</td>', page
    )


def test_many_searches_budgets_and_seeds_become_one_line_each(tmp_path):
    folder = write_run(tmp_path, seeds=3, budgets=(4.5, 5.0, 5.5), others=True)
    record = json.loads((folder / "record.json").read_text())
    groups = group_rows(record["results"])
    assert len(groups) == 4 + 4 * 3
    dmx = next(g for g in groups if g.label == "dmx" and g.budget == (5.0, "element_bits"))
    values = [r["perplexity"] for r in dmx.rows]
    assert dmx.statistic("perplexity").mean == pytest.approx(np.mean(values))
    assert dmx.statistic("perplexity").spread == pytest.approx(np.std(values, ddof=1))
    page = write_report(folder).read_text()
    assert len(re.findall("beats kl at|does not beat kl at|told apart at", page)) == 3
    assert page.count("<summary>dmx, ") == 3 and "the strongest other search" in page


def test_differences_are_paired_within_a_budget(tmp_path):
    record = json.loads((write_run(tmp_path, budgets=(4.5, 5.0)) / "record.json").read_text())
    groups = group_rows(record["results"])
    uniform = difference_to(groups[1], groups)
    assert uniform.mean is None and "several kl results" in uniform.reason
    assert difference_text(uniform) == "–"
    for group in groups:
        if group.label == "dmx":
            assert difference_to(group, groups).reference == f"kl, {group.budget[0]:g} element_bits"


def test_rows_on_other_windows_are_not_subtracted(tmp_path):
    record = json.loads((write_run(tmp_path) / "record.json").read_text())
    record["results"][-1]["window_nll"].pop()
    difference = difference_to(group_rows(record["results"])[-1], group_rows(record["results"]))
    assert difference.mean is None and difference.reason == "measured on 139 and 140 windows"


@pytest.fixture
def with_separate(tmp_path: Path) -> Path:
    """A run whose searches are there twice: joint, and a little better with separate operands."""
    folder = write_run(tmp_path, others=True)

    def change(record):
        for found in [r for r in record["results"] if r["budget"]]:
            path = f"apart-{found['assignment']}"
            body = json.loads((folder / found["assignment"]).read_text())
            names = iter(["mxfp4", "mxfp8_e4m3"] * len(body["formats"]))
            body["input_formats"] = {layer: next(names) for layer in body["formats"]}
            (folder / path).parent.mkdir()
            (folder / path).write_text(json.dumps(body))
            nlls = [nll - 0.02 for nll in found["window_nll"]]
            record["results"].append(found | {
                "label": f"{found['label']}, separate operands", "choice_per": "operand",
                "assignment": path, "window_nll": nlls, "nll": float(np.mean(nlls)),
                "perplexity": math.exp(float(np.mean(nlls))),
            })  # fmt: skip

    return edited(folder, change)


def test_separate_operands_stand_in_a_table_of_their_own_and_compare_among_themselves(
    with_separate,
):
    record = json.loads((with_separate / "record.json").read_text())
    groups = group_rows(record["results"])
    joint, separate = by_operands(groups)
    assert len(separate) == 4 and all(g.search and g.budget for g in separate)
    for side in (joint, separate):
        dmx = next(g for g in side if g.search == "differentiable")
        for name in ("kl", "kl_per_bit", "fisher"):
            reference = reference_of(dmx, groups, name)
            assert reference.is_separate == dmx.is_separate and reference in side
    assert len(verdicts(record["results"])) == 2
    page = write_report(with_separate).read_text()
    first, second = page.split("<h3>Separate operands</h3>")
    results = first[first.index("<h2>Results</h2>") :]
    assert "separate operands" not in results and "fisher" in results
    table = second[: second.index("</table>")]
    assert table.count("<tr") == 1 + 4 and table.count("separate operands") == 4
    assert table.count('class="best"') == 1 == results.count('class="best"')
    assert "weighted by multiply-accumulates" in second
    # Maps of both operands, and who can load: vLLM runs no input beside another weight.
    assert page.count("<strong>inputs</strong>") == page.count("<strong>weights</strong>") == 4
    assert "does not run inputs in mxfp4, mxfp8_e4m3 beside weights in another format" in page


def test_separate_operands_have_marks_of_their_own(with_separate):
    groups = group_rows(json.loads((with_separate / "record.json").read_text())["results"])
    figure = pareto(groups)
    shown = {c.get_label(): c[0].get_color() for c in figure.axes[0].containers}
    assert len(shown) == 8 == len(set(shown.values()))


def test_terminal_table_shows_the_cells_of_the_report(run_folder):
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(terminal_table(json.loads((run_folder / "record.json").read_text())))
    text = console.export_text()
    assert "28.54" in text and "≤ 5" in text and "1 min 23 s" in text and "−0.0589 ± 0.0012" in text


def test_targets_follow_formats_and_fused_groups():
    q, k = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"

    def loading(formats: dict[str, str]) -> set[str]:
        return {
            f"{n}/{x.name}"
            for n, t in TARGETS.items()
            for x in t.loaders
            if not obstacles(formats, t, x)
        }

    assert TARGETS["assignment.json"].formats == {f.name for f in MX_FORMATS}
    everything = {f"{n}/{x.name}" for n, t in TARGETS.items() for x in t.loaders}
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
    assert loading({q: "mxfp8_e5m2"}) == {"assignment.json/dmx", "torchao/transformers"}


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
    found = {"formats": {"a.q_proj": "mxfp4", "a.k_proj": "mxfp4", "b": "mxfp8_e4m3"}}
    assert unit_format("b", found) == "mxfp8_e4m3"
    assert (
        unit_format("a.{q_proj,k_proj}", found)
        == "mxfp4"
        == unit_format("a.q_proj+a.k_proj", found)
    )
    assert unit_format("nowhere", found) is None
    apart = found | {"input_formats": dict.fromkeys(found["formats"], "mxfp6_e2m3")}
    assert unit_format("a.{q_proj,k_proj}:weight", apart) == "mxfp4"
    assert unit_format("b:input", apart) == "mxfp6_e2m3"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "record.json").unlink(),
            "record.json does not exist: a finished run leaves one",
        ),
        (
            lambda f: edited(f, lambda r: r.update(schema="dmx.record/9")),
            "schema is 'dmx.record/9'",
        ),
        (lambda f: (f / "kl-5-0/assignment.json").unlink(), "result 'kl' in record.json names it"),
        (
            lambda f: (f / "dmx-5-0/history.jsonl").write_text('{"step": 0}\n{"st'),
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
    def change(record):
        record["results"] = record["results"][:3]

    page = write_report(edited(write_run(tmp_path), change)).read_text()
    assert "so there is no verdict" in page and "The search, step by step" not in page
