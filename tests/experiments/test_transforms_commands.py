"""Transforms on the command line, in exports, over processes and in a CUDA graph."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dmx
from dmx.assignment.assignment import Assignment
from dmx.errors import FormatError
from dmx.formats import get_block_format
from dmx.searching import uniform_assignment
from experiments import compare, evaluate, search
from experiments.reporting.record import Record
from tests.forked import Forked, places
from tests.settings import search_config

ROOT = Path(__file__).resolve().parents[2]
TOKENS = torch.arange(2 * 48).reshape(2, 48) * 7 % 256
TINY = [
    "model=tiny_random",
    "data=synthetic",
    "data.calibration.max_characters=20000",
    "data.evaluation.max_characters=20000",
    "run.device=cpu",
    "evaluation.window=64",
    "evaluation.batch_size=4",
    "evaluation.max_windows=4",
]
CALIBRATION = ["calibration.window=32", "calibration.batch_size=2", "calibration.batches=3"]


def results(folder):
    return Record.load(folder / "record.json").rows


def uniform(model, name, block_format="mxfp4"):
    config = search_config(name="uniform", transform=name)
    return uniform_assignment(model, get_block_format(block_format), config)


# ---------------------------------------------------------------- commands


def test_all_rows_of_a_search_that_learns_rotations_have_them(run, tmp_path):
    arguments = [
        *TINY,
        *CALIBRATION,
        "search=differentiable",
        "search.transform=learned",
        "search.steps=4",
        f"run.folder={tmp_path}/run",
    ]
    code, _, err = run(search, *arguments)
    assert code == 0, err
    rows = {row.label: row for row in results(tmp_path / "run")}
    assert {
        "bf16",
        "dMX + learned rotation",
        "kl_per_bit + learned rotation",
        "uniform mxfp4 + learned rotation",
    } <= set(rows)
    digests = {row.transform["sha256"] for row in rows.values() if row.transform}
    assert len(digests) == 1 and rows["bf16"].transform is None
    verdict = Record.load(tmp_path / "run" / "record.json").verdict
    assert verdict.against == "kl_per_bit + learned rotation"
    # Of another folder, with its file, the same number.
    copied = Assignment.load(tmp_path / "run" / "assignment.json").save(tmp_path / "x" / "a.json")
    code, _, err = run(evaluate, *TINY, f"assignments=[{copied}]", f"run.folder={tmp_path}/again")
    assert code == 0, err
    assert results(tmp_path / "again")[0].nll == rows["dMX + learned rotation"].nll


def test_a_comparison_takes_the_rotations_that_its_search_learned(run, tmp_path):
    arguments = [
        *TINY,
        *CALIBRATION,
        "search=learned",
        "search.steps=4",
        "search.units=layer",
        "searches=[kl_per_bit,fisher,differentiable]",
        "budgets=[5.0,5.5]",
        "baselines=[]",
    ]
    code, _, err = run(compare, *arguments, f"run.folder={tmp_path}/run")
    assert code == 0, err
    digests = {}
    for row in results(tmp_path / "run"):
        digests.setdefault(row.budget.limit, []).append(row.transform["sha256"])
    assert [len(found) for found in digests.values()] == [3, 3]
    assert all(len(set(found)) == 1 for found in digests.values())
    assert len({found[0] for found in digests.values()}) == 2, "each budget learns its own"
    code, _, err = run(compare, *arguments, "searches=[fisher]", f"run.folder={tmp_path}/none")
    assert code == 2 and "only the differentiable search learns" in err


@pytest.mark.parametrize("name", ["hadamard_block", "hadamard_full"])
def test_evaluate_and_compare_measure_uniform_formats_with_a_transform(run, tmp_path, name):
    code, _, err = run(
        evaluate, *TINY, "assignments=[bf16,mxfp4]", f"transform={name}", f"run.folder={tmp_path}/e"
    )
    assert code == 0, err
    code, _, err = run(
        compare,
        *TINY,
        *CALIBRATION,
        "budgets=[5.0]",
        "searches=[weight_mse]",
        f"search.transform={name}",
        f"run.folder={tmp_path}/c",
    )
    assert code == 0, err
    code, _, err = run(evaluate, *TINY, "assignments=[mxfp4]", f"run.folder={tmp_path}/plain")
    assert code == 0, err
    shown = f"uniform mxfp4 + {name.replace('_', ' ')}"
    first, second = (next(row for row in results(tmp_path / n) if row.label == shown) for n in "ec")
    assert first.nll == second.nll != results(tmp_path / "plain")[0].nll


def test_searches_of_a_comparison_select_the_same_inputs(run, tmp_path):
    code, _, err = run(
        compare,
        *TINY,
        *CALIBRATION,
        "budgets=[5.0]",
        "searches=[kl_per_bit,differentiable]",
        "search.steps=2",
        "search.transform=hadamard_selected",
        "baselines=[uniform]",
        f"run.folder={tmp_path}/run",
    )
    assert code == 0, err
    rows = {row.label: row for row in results(tmp_path / "run")}
    chosen = [rows[f"{name} + hadamard selected"].transform for name in ("dMX", "kl_per_bit")]
    assert chosen[0] == chosen[1] and chosen[0]["inputs"]
    assert "uniform mxfp4 + hadamard block" in rows


def test_an_ablation_measures_the_transformed_model(run, tmp_path):
    for name in ("none", "hadamard_block"):
        code, _, err = run(
            compare,
            *TINY,
            *CALIBRATION,
            "budgets=[5.0]",
            "searches=[uniform]",
            "baselines=[]",
            f"search.transform={name}",
            f"run.folder={tmp_path}/{name}",
        )
        assert code == 0, err
    rows = []
    for name in ("none", "hadamard_block"):
        path = next((tmp_path / name).rglob("assignment.json"))
        code, _, err = run(
            compare, *TINY, *CALIBRATION, f"ablate={path}", f"run.folder={tmp_path}/a-{name}"
        )
        assert code == 0, err
        rows.append(json.loads((tmp_path / f"a-{name}" / "ablation.json").read_text()))
    assert [r["unit"] for r in rows[0]] == [r["unit"] for r in rows[1]] and rows[0] != rows[1]


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        (evaluate, ["transform=learned"], "transform=learned with transform_file=None"),
        (evaluate, ["transform=hadamard_selected"], "transform='hadamard_selected'"),
        (evaluate, ["transform=turn"], "none, hadamard_block, hadamard_full, learned"),
        (evaluate, ["transform=learned", "transform_file=gone.safetensors"], "cannot be read"),
        (
            search,
            ["search.transform=learned"],
            "search.name=adaptive: only the differentiable search",
        ),
        (search, ["search.transform=learned", "search=kl"], "only the differentiable search"),
        (search, ["search.transform=hadamard_block", "search.target=transformers"], "at run time"),
    ],
)
def test_what_makes_no_sense_is_refused_before_weights_load(
    run, tmp_path, monkeypatch, command, arguments, says
):
    monkeypatch.setattr(
        "experiments.running.bench.load_model", lambda *_: pytest.fail("weights loaded")
    )
    code, _, err = run(command, *TINY, *arguments, f"run.folder={tmp_path}/run")
    assert code == 2 and says in err


# ---------------------------------------------------------------- exports


def test_folded_rotations_are_exported_and_give_the_same_logits(make_tiny, tmp_path):
    model = make_tiny("smollm2", dtype="bfloat16").model
    assignment = uniform(model, "hadamard_full", "mxfp6_e2m3")
    dmx.apply(model, assignment, inputs=False)
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits
    dmx.restore(model)
    before = {n: p.clone() for n, p in model.named_parameters()}
    dmx.export(model, assignment, tmp_path / "out", target="quark", verify=False)
    assert model.config.tie_word_embeddings
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    facts = json.loads((tmp_path / "out" / "dmx_export.json").read_text())
    assert config["tie_word_embeddings"] is False and facts["transform"] == "hadamard_full"
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(
        load_file(tmp_path / "out" / "model.safetensors")
    )
    loaded = dmx.load_exported(tmp_path / "out").model
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=TOKENS).logits, expected)


@pytest.mark.parametrize("target", ["quark", "torchao", "llm_compressor"])
def test_what_rotates_at_run_time_is_refused_where_the_runtime_does_not(
    make_tiny, tmp_path, target
):
    model = make_tiny("llama").model
    assignment = uniform(model, "hadamard_block")
    with pytest.raises(FormatError, match=r"14 layers, first model\.layers\.0.*search\.transform="):
        dmx.export(model, assignment, tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_the_target_assignment_takes_the_file_along(make_tiny, tmp_path):
    model = make_tiny("llama").model
    config = search_config(steps=2, transform="learned")
    found = dmx.search(model, [TOKENS], dmx.Budget(5.0), config).assignment
    dmx.export(model, found, tmp_path / "out", target="assignment")
    again = Assignment.load(tmp_path / "out" / "assignment.json")
    assert again == found and again.content("transform") == found.content("transform")
    dmx.apply(model, again)


# ---------------------------------------------------------------- processes and GPUs

SCRIPT = """
import sys, torch, dmx
from dmx.searching.config import DescentConfig, RotationConfig
from dmx.models import ModelConfig, TinyConfig, load_model
torch.set_num_threads(1)
model = load_model(ModelConfig(id="tiny", dtype="float32", tiny=TinyConfig())).model
generator = torch.Generator().manual_seed(0)
batches = [torch.randint(0, 288, (4, 32), generator=generator) for _ in range(3)]
config = dmx.SearchConfig(
    steps=6, transform="learned", objective="kl", descent=DescentConfig(raw_start=1.0),
    rotation=RotationConfig(lr=3.0),
)
found = dmx.search(model, batches, dmx.Budget(5.0), config)
import os
rank = os.environ.get("RANK", "one")
with open(f"{sys.argv[1]}/{rank}.safetensors", "wb") as file:
    file.write(found.assignment.content("transform"))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def test_two_processes_learn_the_rotations_of_one(tmp_path):
    started = [Forked("-c", SCRIPT, tmp_path, environment=place) for place in (*places(2), {})]
    for process in started:
        assert process.wait(180) == 0, process.outputs()[1][-2000:]
    one, *two = (load_file(tmp_path / f"{n}.safetensors") for n in ("one", "0", "1"))
    for name, matrix in one.items():
        assert torch.equal(two[0][name], two[1][name])
        torch.testing.assert_close(two[0][name], matrix, rtol=0, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"transform": "learned"},
        {"family": ["nvfp4", "fp8", "bf16"]},
        {"family": ["mxfp4", "mxfp6_e3m2", "fp8"]},
    ],
    ids=str,
)
def test_a_cuda_graph_learns_what_single_kernels_do(options, make_tiny):
    model = make_tiny("llama", train_steps=100, dtype="bfloat16").model.cuda()
    settings = {
        "steps": 12,
        "raw_start": 1.0,
        "objective": "kl",
        "lr": 3.0,
        "momentum": 0.9,
        "evaluate_every": 11,
    } | options
    batches = [TOKENS.repeat(2, 2), TOKENS.flip(1).repeat(2, 2)]
    found = [
        dmx.search(model, batches, dmx.Budget(5.0), search_config(**settings, cuda_graph=graph))
        for graph in ("on", "off")
    ]
    assert [f.cuda_graph for f in found] == ["on", "off"]
    assert np.allclose(found[0].raw_offsets, found[1].raw_offsets, atol=0.05)
    assert found[0].history[-1]["loss"] == pytest.approx(found[1].history[-1]["loss"], rel=0.1)
    dmx.apply(model, found[0].assignment)
    assert torch.isfinite(model(input_ids=TOKENS.cuda()).logits).all()
