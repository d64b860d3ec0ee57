"""Exported folders in an engine: what is compared, and, where .venv-engine is, every folder that we export for vLLM."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from safetensors.torch import save_file

import dmx
from dmx.applying.quantizers import BlockQuantizer
from dmx.assignment.runtimes import INPUTS_IN_FP8
from dmx.errors import ModelError, RunError
from dmx.exporting.packing import encode_weight
from dmx.formats import FP8, MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, NVFP4
from experiments.reporting.pages import engines
from scripts.claiming import claimed
from scripts.serve_check import __main__ as serve_check
from scripts.serve_check import cases, compare, decoding, joining, worker
from scripts.serve_check.cases import CASES
from tests.exporting.conftest import mixed

ELEMENTS = {MXFP4: decoding.E2M1, MXFP6_E2M3: decoding.E2M3, MXFP6_E3M2: decoding.E3M2}
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


# ---------------------------------------------------------------- without an engine


@pytest.mark.parametrize("block_format", ELEMENTS, ids=str)
def test_packed_bytes_are_read_a_second_time_with_equal_values(block_format, generator):
    weight = torch.randn(64, 96, generator=generator) * torch.logspace(-3, 3, 64)[:, None]
    packed, scales = encode_weight(weight, block_format, "even")
    values = decoding.decoded(packed, decoding.e8m0(scales), ELEMENTS[block_format])
    assert torch.equal(values, dmx.fake_quant(weight, block_format, scale_rule="even"))
    assert not torch.equal(values, dmx.fake_quant(weight, block_format, scale_rule="floor"))


@pytest.mark.parametrize("block_format", ELEMENTS, ids=str)
def test_inputs_are_rounded_by_the_rule_even(block_format, generator):
    x = torch.randn(64, 64, generator=generator) * torch.logspace(-6, 6, 64)[:, None]
    x[0] = 0
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        expected = dmx.fake_quant(given, block_format, scale_rule="even")
        assert torch.equal(decoding.rounded_inputs(given, ELEMENTS[block_format]), expected)


def test_fp8_inputs_of_tokens_are_those_of_dmx(generator):
    x = torch.randn(64, 64, generator=generator) * torch.logspace(-6, 6, 64)[:, None]
    x[0] = 0
    for given in (x, x.bfloat16()):
        assert torch.equal(
            decoding.fp8_tokens(given), dmx.fake_quant(given, FP8, scale_rule="amax/448_float32")
        )


def operands(model, layers, change):
    """x and y of fused layers, as an engine would have them that does `change(name)` to inputs."""
    modules = dict(model.named_modules())
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in layers:
        parts = compare.parts_of(name, FUSED)
        x = torch.randn(16, modules[parts[0]].in_features, generator=generator)
        tensors[f"{name}.x"] = x
        rounded = change(name)(x)
        tensors[f"{name}.y"] = torch.cat(
            [F.linear(rounded, modules[p].weight_quantizer(modules[p].weight)) for p in parts], -1
        )
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """MXFP4, MXFP8 and FP8 in turn, with inputs."""
    from dmx.models import ModelConfig, TinyConfig, load_model

    model = load_model(ModelConfig(id="tiny_llama", dtype="bfloat16", tiny=TinyConfig())).model
    place = tmp_path_factory.mktemp("exported") / "model"
    assignment = mixed(model, (MXFP4, MXFP8_E4M3, FP8), "fused")
    dmx.export(model, assignment, place, target="compressed_tensors", inputs=True, verify=False)
    return place


LAYERS = [
    f"model.layers.0.{name}"
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj")
]


def test_what_an_engine_did_with_inputs_is_found(folder):
    loaded = compare.load_folder(folder, torch.float32, "cpu")
    done = {
        LAYERS[0]: lambda x: dmx.fake_quant(x, "mxfp4", scale_rule="even"),
        LAYERS[1]: lambda x: x,
        LAYERS[2]: compare.fp8_by_inverse,
    }
    rows = compare.compare_layers(loaded, operands(loaded.model, LAYERS, done.get), FUSED)
    assert [(r["formats"], r["inputs"], r["equal"]) for r in map(rows.get, LAYERS)] == [
        ("mxfp4", "mxfp4 even", True),
        ("mxfp8_e4m3", "left alone", True),
        ("fp8", "fp8 amax/448_float32", True),
    ]
    assert rows[LAYERS[0]]["asked_inputs"] == "mxfp4 floor"
    # No quotient lies on a midpoint: the product with the inverse is the same, and what the file asks is named.
    assert rows[LAYERS[2]]["asked_inputs"] == "fp8 amax/448_float32"
    assert rows[LAYERS[0]]["error_left_alone"] > 0.05
    # the model now runs as the engine did
    layer = loaded.model.get_submodule("model.layers.0.self_attn.k_proj")
    assert layer.input_quantizer.scale_rule == "even"


@pytest.mark.parametrize(
    ("asked", "inverse"),
    [
        (BlockQuantizer(NVFP4, "amax/6", amax=3.0), compare.NVFP4_INVERSE),
        (BlockQuantizer(FP8, "amax/448_float32", amax=2.1), compare.FP8_INVERSE),
        (BlockQuantizer(FP8, "amax/448_float32"), compare.FP8_INVERSE),
    ],
    ids=("nvfp4", "static", "token"),
)
def test_inputs_by_products_with_inverses_are_told_from_quotients(asked, inverse, generator):
    ways = compare.candidates(torch.nn.Linear(512, 8), asked)
    x = torch.randn(512, 512, generator=generator).bfloat16().float()  # quotients on midpoints
    ours, theirs = asked(x), ways[inverse](x)
    apart = (ours - theirs).abs() / ours.abs().clamp(min=1e-3)
    assert 0 < (apart > 1e-3).sum() < 0.01 * x.numel()  # there the next value is taken
    assert (apart[apart < 1e-3] < 1e-6).all()


def test_a_wrong_weight_or_order_of_fused_layers_is_beyond_every_tolerance(folder):
    loaded = compare.load_folder(folder, torch.float32, "cpu")
    tensors = operands(loaded.model, LAYERS, lambda name: lambda x: x)
    tensors[f"{LAYERS[0]}.y"] = tensors[f"{LAYERS[0]}.y"].roll(32, -1)
    tensors[f"{LAYERS[1]}.y"][:, 3] *= 1.5
    rows = compare.compare_layers(loaded, tensors, FUSED)
    assert all(rows[name]["error"] > 0.01 for name in LAYERS[:2]) and rows[LAYERS[2]]["equal"]


def test_noise_is_what_an_epsilon_makes(folder):
    model = compare.load_folder(folder, torch.float32, "cpu").model
    tokens = torch.arange(32).view(2, 16)
    ours = compare.log_probabilities(model, tokens)
    assert 0 < compare.noise(model, tokens, ours) < 1e-5
    assert torch.equal(compare.log_probabilities(model, tokens), ours)  # and nothing is left of it
    together = compare.log_probabilities(model, tokens, at_once=2)
    assert together.shape == (2, 15) and torch.allclose(together, ours, atol=1e-5)


class InPlace(torch.nn.Linear):
    """Rotates what it is given where it lies, as kernels of cards do."""

    def forward(self, x):
        return super().forward(x.neg_())


def test_operands_are_those_before_a_layer_wrote_over_its_input(generator):
    layer = InPlace(8, 4, bias=False)
    model = torch.nn.ModuleDict({"a": layer})
    operands_kept = worker.Operands(lambda model: {"a": model["a"]})
    operands_kept.watch(model)
    x = torch.randn(2, 8, generator=generator)
    given = x.clone()
    with torch.no_grad():
        y = layer(given)
        layer(torch.zeros(2, 8))  # the first call is kept
    operands_kept.release(model)
    layer(torch.ones(2, 8))
    assert torch.equal(operands_kept.kept["a.x"], x) and not torch.equal(given, x)
    assert torch.equal(operands_kept.kept["a.y"], y)


def test_rotated_inputs_may_differ_by_one_rounding_more():
    asked = {
        dtype: serve_check.parse(["x", "--python", "x", "--dtype", dtype]) for dtype in TOLERATED
    }
    found = {d: [serve_check.tolerance_of(a, r) for r in (False, True)] for d, a in asked.items()}
    assert found == {d: pytest.approx([base, base + more]) for d, (base, more) in TOLERATED.items()}
    own = serve_check.parse(["x", "--python", "x", "--tolerance", "0.5"])
    assert serve_check.tolerance_of(own, rotates=True) == 0.5


TOLERATED = {"bfloat16": (6e-3, 2**-8), "float16": (1e-3, 2**-11), "float32": (1e-5, 2**-24)}
"""dtype -> of a layer, and what a rounding to it adds."""


def test_groups_count_layers_and_name_the_worst():
    base = {
        "formats": "mxfp4",
        "scheme": "S",
        "kernel": "K",
        "inputs": "left alone",
        "asked_inputs": "left alone",
        "error_left_alone": 0.0,
    }
    rows = {
        "a": {**base, "error": 0.0, "equal": True, "ok": True},
        "b": {**base, "error": 0.2, "equal": False, "ok": False},
        "c": {**base, "formats": "fp8", "error": 0.1, "equal": False, "ok": True},
    }
    fp8, mxfp4 = compare.groups_of(rows)
    assert (mxfp4["layers"], mxfp4["equal"], mxfp4["within"], mxfp4["worst"]) == (2, 1, 1, "b")
    assert (fp8["layers"], fp8["within"]) == (1, 1)
    assert not serve_check.is_right({"groups": [fp8, mxfp4]})
    assert serve_check.is_right({"groups": [fp8]}) and not serve_check.is_right({"failed": "why"})


def test_the_effect_is_of_folders_of_the_baselines_model(tmp_path):
    folders = [tmp_path / name for name in ("bf16", "quantized", "tied", "broken")]
    for folder in folders:
        folder.mkdir()
        tied = folder.name == "tied"
        (folder / "config.json").write_text(
            json.dumps({"hidden_size": 8, "tie_word_embeddings": tied})
        )
    rows = [{"log_probabilities": [[-1.0, value]]} for value in (-2.0, -3.0, -4.0)] + [
        {"failed": "why"}
    ]
    serve_check.add_effects(rows, folders)
    assert [row["effect"] for row in rows] == [0.0, 0.5, None, None]
    assert all("log_probabilities" not in row for row in rows)


def test_without_an_engine_it_says_how_to_get_one(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve_check", str(folder), "--python", "nowhere/python"])
    assert serve_check.main() == 2
    assert re.search("nowhere/python does not exist: `make engine-env`", capsys.readouterr().err)


ASKED_WRONG = {
    "config.json: give folders": ["{place}/none"],
    "config.json is damaged": ["{place}/damaged"],
    "model.safetensors is damaged": ["{place}/cut"],
    "dmx_export.json is damaged": ["{place}/stated"],
    "none/x has no config.json": ["{folder}", "--baseline", "{place}/none/x"],
    "--rows 0 must be at least 1": ["{folder}", "--rows", "0"],
    "--window 1 must be at least 2": ["{folder}", "--window", "1"],
    "--new 1 must be at least 2": ["{folder}", "--speed", "--new", "1"],
    "--options 5 is no JSON object": ["{folder}", "--options", "5"],
    "--speed-options 5 is no JSON object": ["{folder}", "--speed-options", "5"],
    "--at-once 0 must be at least 1": ["{folder}", "--at-once", "0"],
    "--tolerance nan must be a number above 0": ["{folder}", "--tolerance", "nan"],
    "--tolerance 0 must be a number above 0": ["{folder}", "--tolerance", "0"],
    "--seconds inf must be a number above 0": ["{folder}", "--seconds", "inf"],
    "--text .*none cannot be read": ["{folder}", "--text", "{place}/none"],
    "--text needs a tokenizer": ["{folder}", "--text", "{folder}/README.md"],
    "is a folder: name a file": ["{folder}", "--json", "{place}"],
    "--add: to the rows of which record": ["{folder}", "--add"],
}


@pytest.mark.parametrize("said", ASKED_WRONG)
def test_what_cannot_be_run_is_refused_before_the_engine_starts(
    said, folder, tmp_path, monkeypatch, capsys
):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"vocab_size":')
    for name, file, content in (
        ("cut", "model.safetensors", "12345"),
        ("stated", "dmx_export.json", "[]"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 99}')
        (tmp_path / name / file).write_text(content)
    given = [a.format(folder=folder, place=tmp_path) for a in ASKED_WRONG[said]]
    monkeypatch.setattr(sys, "argv", ["serve_check", *given, "--python", sys.executable])
    monkeypatch.setattr(serve_check, "_run_worker", lambda *given: pytest.fail("it started"))
    assert serve_check.main() == 2
    assert re.search(said, capsys.readouterr().err)


def test_drawn_tokens_are_in_the_vocabulary_of_every_folder(tmp_path):
    for name, config in {"a": {"vocab_size": 99}, "b": {"text_config": {"vocab_size": 7}}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    asked = serve_check.parse([str(tmp_path / "a")])
    assert serve_check.tokens_of(asked, [tmp_path / "a", tmp_path / "b"]).max() == 6


def test_a_folder_that_cannot_be_compared_leaves_the_others(folder, tmp_path):
    """The engine read it, dmx does not."""
    out = tmp_path / "out"
    layers = {"model.layers.0.mixer": {}}
    report = {"dtype": "float32", "fused": FUSED, "layers": layers}
    (tmp_path / "out.json").write_text(json.dumps(report))
    tensors = {f"model.layers.0.mixer.{k}": torch.zeros(1, 32) for k in "xy"}
    save_file(tensors | {"log_probabilities": torch.zeros(1, 1)}, out)
    asked = serve_check.parse([str(folder)])
    row = serve_check.row_of(asked, folder, out, torch.zeros(1, 2, dtype=torch.int64))
    assert re.search("layer model.layers.0.mixer is .* cannot be compared", row["failed"])
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text('{"model_type": "none"}')
    row = serve_check.row_of(asked, tmp_path / "plain", out, torch.zeros(1, 2))
    assert re.search("plain was not exported by dmx, and transformers cannot", row["failed"])


def test_an_error_is_kept_with_the_lines_that_it_goes_on_in(tmp_path):
    said = "Traceback (most recent call last):\n  File x\n    y()\npydantic.E: 1 error\n  Value error, no float32\n"
    (tmp_path / "out.txt").write_text(said)
    failed = serve_check.report_of(tmp_path / "out")[1]
    assert failed == "pydantic.E: 1 error\n  Value error, no float32"
    (tmp_path / "out.txt").write_text("cannot run:\n  at z\nno libcuda")
    assert serve_check.report_of(tmp_path / "out")[1] == "cannot run:\nno libcuda"
    (tmp_path / "out.txt").write_text("")  # it ended while it wrote
    assert serve_check.report_of(tmp_path / "out")[1] == "the process died"


WORKER = """
import json, os, sys, time
(file,) = sys.argv[1:]
job = json.load(open(file))
name = os.path.basename(job["folder"])
if name == "dies":
    sys.exit("no libcuda")
if name == "hangs":
    time.sleep(600)
report = {"speed": job["speed"], "options": job["options"], "at": time.time()}
json.dump(report, open(job["out"] + ".json", "w"))
"""
"""Of an engine that does nothing."""


def test_on_a_card_folders_end_apart_and_speed_comes_last(tmp_path, monkeypatch, capsys):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setitem(serve_check.WORKERS, "vLLM", str(tmp_path / "worker.py"))
    monkeypatch.setattr(
        serve_check,
        "row_of",
        lambda asked, folder, out, tokens: (
            {"folder": folder.name, "groups": [], "speed": None, "speed_failed": None}
            if (report := serve_check.report_of(out))[1] is None
            else {"folder": folder.name, "failed": report[1]}
        ),
    )
    monkeypatch.setattr(serve_check, "say_layers", lambda row: None)
    folders = [tmp_path / name for name in ("first", "dies", "hangs", "last")]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text('{"vocab_size": 9}')
    given = ["--device", "cuda", "--python", sys.executable, "--at-once", "3", "--seconds", "4"]
    given += ["--speed", "--speed-options", '{"a": 1}', "--json", str(tmp_path / "record.json")]
    monkeypatch.setattr(sys, "argv", ["serve_check", *map(str, folders), *given])
    assert serve_check.main() == 1
    record = json.loads((tmp_path / "record.json").read_text())
    first, dies, hangs, last = record["rows"]
    assert re.search("cannot run the engine.*no libcuda", dies["failed"], re.DOTALL)
    assert hangs["failed"] == "cut off after --seconds 4"
    assert "failed" not in first and "failed" not in last
    for row in (first, last):  # the time is over when those of speed begin
        assert row["speed"] is None
        assert row["speed_failed"] == "not reached within --seconds 4"
    assert record["options"] == {"all": {}, "speed": {"a": 1}}
    assert "first:  no speed: not reached" in capsys.readouterr().out


def test_a_card_is_shared_by_all_but_speed(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setitem(serve_check.WORKERS, "vLLM", str(tmp_path / "worker.py"))
    folders = [tmp_path / name for name in ("a", "b")]
    given = ["--device", "cuda", "--python", sys.executable, "--at-once", "2", "--speed"]
    asked = serve_check.parse(
        [*map(str, folders), *given, "--options", '{"x": 1}', "--speed-options", '{"y": 2}']
    )
    with serve_check.jobs_in_files(asked, folders, torch.zeros(1, 2)) as jobs:
        done = list(serve_check.ran(asked, jobs))
        reports = [serve_check.report_of(job.out)[0] for job in done]
    assert [job.is_speed for job in done] == [False, False, True, True]
    assert {job.folder for job in done[:2]} == {job.folder for job in done[2:]} == set(folders)
    checked, timed = reports[:2], reports[2:]
    assert all(r["options"] == {"x": 1, "y": 2} and r["speed"]["new"] == 32 for r in timed)
    assert all(r["options"].keys() == {"x", *SHARING} and r["speed"] is None for r in checked)
    assert max(r["at"] for r in checked) <= min(r["at"] for r in timed)


SHARING = ("gpu_memory_utilization", "kv_cache_memory_bytes")


def test_effects_wait_for_the_baseline(tmp_path):
    for name in ("bf16", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    asked = serve_check.parse([str(tmp_path / "other"), "--baseline", str(tmp_path / "bf16")])
    rows = [{"log_probabilities": [[-1.0]]}, {"log_probabilities": [[-2.0]]}]
    folders = [tmp_path / "bf16", tmp_path / "other"]
    early = serve_check.rows_of(asked, rows[1:], folders[1:])
    whole = serve_check.rows_of(asked, rows, folders)
    assert [row["effect"] for row in early] == [None]
    assert [row["effect"] for row in whole] == [0.0, 1.0]


@pytest.fixture
def check_places(tmp_path, monkeypatch):
    """Runs the check, without an engine, of folders that are named; gives its exit code."""
    for name, hidden, value in (("a", 8, 0.0), ("b", 8, 0.0), ("wide", 9, 0.0), ("other", 8, 1.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"hidden_size": hidden, "vocab_size": 99})
        )
        weight = {"model.embed_tokens.weight": torch.full((300, 4), value)}
        save_file(weight, tmp_path / name / "model.safetensors")
    monkeypatch.setattr(serve_check, "ran", lambda asked, jobs: iter(jobs))
    monkeypatch.setattr(serve_check, "say", lambda row, is_speed: None)
    monkeypatch.setattr(serve_check, "engine_versions", lambda asked: {"vllm": "0.32.0"})

    def run(*names, **row):
        monkeypatch.setattr(
            serve_check,
            "row_of",
            lambda asked, folder, out, tokens: {"folder": folder.name, "groups": [], **row},
        )
        given = [str(tmp_path / n) if (tmp_path / n).is_dir() else n for n in names]
        given += ["--json", str(tmp_path / "record.json")]
        monkeypatch.setattr(sys, "argv", ["serve_check", *given])
        return serve_check.main()

    return run


def test_rows_join_the_record_of_the_same_check(check_places, tmp_path):
    assert check_places("a", "b", "--note", "two", mark=1) == 0
    assert check_places("wide", "b", "--add", failed="why") == 2  # nothing is written
    assert check_places("b", "--add", failed="why") == 1
    assert check_places("a", "--add", mark=2) == 0  # the failed row is not of this run
    record = json.loads((tmp_path / "record.json").read_text())
    assert [(r["folder"], r.get("mark"), r.get("failed")) for r in record["rows"]] == [
        ("a", 2, None),
        ("b", None, "why"),
    ]
    assert record["note"] == "two" and len(record["models"]) == 1
    assert check_places("wide") == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert [row["folder"] for row in record["rows"]] == ["wide"]


def test_rows_that_another_process_adds_meanwhile_are_kept(check_places, tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    assert check_places("a", mark=1) == 0

    def meanwhile(asked, jobs):
        record = json.loads(path.read_text())
        record["rows"].append({"folder": "c", "groups": []})
        path.write_text(json.dumps(record))
        return iter(jobs)

    def write_alone(path, record):
        with claimed(path.with_name(".record.json.lock")) as is_free:
            assert not is_free  # from reading to writing nobody else does either
        path.write_text(json.dumps(record))

    monkeypatch.setattr(serve_check, "ran", meanwhile)
    monkeypatch.setattr(joining, "write_json", write_alone)
    assert check_places("b", "--add", mark=2) == 0
    assert [r["folder"] for r in json.loads(path.read_text())["rows"]] == ["a", "c", "b"]


def test_a_folder_is_one_however_it_is_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    old = {"note": "", "rows": [{"folder": "x"}, {"folder": "y"}]}
    more = {"note": "", "rows": [{"folder": str(tmp_path / "x"), "mark": 1}, {"folder": "y/../y"}]}
    assert joining.joined(old, more)["rows"] == more["rows"]


def test_rows_of_another_engine_do_not_join(check_places, tmp_path, capsys):
    assert check_places("a", versions={"vllm": "0.26.0"}) == 0
    assert check_places("b", "--add") == 2
    said = "record.json has a of vllm 0.26.0, this run's engine is vllm 0.32.0; .* its 1 rows"
    assert re.search(said, capsys.readouterr().err)


def test_versions_are_those_that_a_worker_says(tmp_path):
    asked = serve_check.parse(["x", "--runtime", "transformers"])
    (tmp_path / "python").write_text('#!/bin/sh\necho greeting\nshift; shift; echo "[\\"$*\\"]"\n')
    (tmp_path / "python").chmod(0o755)
    asked.python = str(tmp_path / "python")
    assert serve_check.engine_versions(asked) == ["transformers torch"]
    asked.python = "/bin/false"
    with pytest.raises(RunError, match="--python /bin/false has no transformers that can be impor"):
        serve_check.engine_versions(asked)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["b", "--window", "8"], "has tokens = 1024, this run 32; .* its 1 rows are then gone"),
        (["b", "--tolerance", "0.5"], "has tolerance = 1e-05, this run 0.5"),
        (["b", "--runtime", "transformers"], "has runtime = 'vLLM', this run 'transformers'"),
        (["b", "--dtype", "bfloat16"], "has dtype = 'float32', this run 'bfloat16'"),
        (["wide"], "has no row of the model of one of the folders"),
        (["other"], "has no row of the model of one of the folders"),  # of other weights
    ],
)
def test_rows_of_another_check_do_not_join(given, said, check_places, tmp_path, capsys):
    assert check_places("a") == 0
    before = (tmp_path / "record.json").read_bytes()
    assert check_places(*given, "--add") == 2
    assert re.search(said, capsys.readouterr().err)
    assert (tmp_path / "record.json").read_bytes() == before


def test_rows_join_a_record_alone(check_places, tmp_path, capsys):
    assert check_places("a", "--add") == 2
    assert "record.json is no record of this check (FileNotFoundError" in capsys.readouterr().err
    (tmp_path / "record.json").write_text("[]")
    assert check_places("a", "--add") == 2
    assert "record.json is no record of this check (TypeError" in capsys.readouterr().err
    (tmp_path / "record.json").write_text('{"rows": []}')
    assert check_places("a", "--add") == 2
    assert "record.json is no record of this check (KeyError: 'models'" in capsys.readouterr().err
    assert check_places("a", versions=None) == 0
    assert check_places("a", "--add") == 2
    assert "record.json is no record of this check (TypeError" in capsys.readouterr().err


def test_outputs_of_zero_are_equal_and_what_is_not_finite_is_named():
    zero = torch.zeros(2, 3)
    assert compare.relative(zero, zero) == 0
    assert compare.relative(zero + 1, zero + 2) == 0.5
    rows = {"a": {"error": compare.relative(zero + 1, zero)}}
    with pytest.raises(ModelError, match="output of a is not finite, or zero in dmx alone"):
        compare.check_finite(rows)
    with pytest.raises(ModelError, match="log-probabilities of engine are not finite"):
        compare.check_finite({}, dmx=zero, engine=zero / 0)


def served(**fields):
    """A row of a record."""
    group = {
        "formats": "mxfp4",
        "scheme": "S",
        "kernel": "scripts.serve_check.Mxfp4",
        "inputs": "mxfp4 even",
        "asked_inputs": "mxfp4 floor",
        "layers": 4,
        "equal": 3,
        "within": 4,
        "worst": "a",
        "error": 2e-7,
        "least_error_left_alone": 0.11,
    }
    return {
        "folder": "ct4_wa",
        "groups": [group],
        "difference": 1e-6,
        "noise": 2e-6,
        "effect": 0.5,
        "perplexity": 9.0,
        "perplexity_dmx": 9.1,
        "speed": None,
        "weight_bytes": None,
        "device": "cpu",
        "dtype": "float32",
        "tolerance": 1e-5,
        "versions": {"vllm": "0.32.0"},
        **fields,
    }


def test_records_are_in_the_words_that_the_page_reads():
    # Said in both places: what reads records does not know what runs, nor is it imported to run.
    assert serve_check.SCHEMA == engines.SCHEMA
    assert f"{serve_check.__package__}." == engines.OURS
    assert compare.LEFT_ALONE == engines.LEFT_ALONE


def test_the_page_says_what_ran_and_whose_the_products_are():
    run = {
        "note": "a model",
        "device": "cpu",
        "processor": "x86_64",
        "tokens": 512,
        "text": None,
        "rows": [served(), {"folder": "other", "failed": "ValueError: no kernel"}],
    }
    page = engines.engines_page({"engines_cpu": run})
    assert (
        "On the CPU, of 2 folders, 1 of which do not load here: 4 of 4 linear layers give" in page
    )
    assert (
        "| ct4_wa | mxfp4 | 4 | S | scripts.serve_check.Mxfp4 | mxfp4 even | mxfp4 floor | 3 | 2e-07 | 0.11 |"
        in page
    )
    assert "other does not load: ValueError: no kernel" in page
    assert "inner products are ours" in page and "Tokens per second" not in page
    speed = {
        "prompt": 8,
        "prompts": 2,
        "new": 4,
        "prefill_tokens_per_second": 1234.4,
        "decode_tokens_per_second": 5670.0,
        "decode_seconds": [6 / 5600, 6 / 5670, 6 / 5800],  # of two times three tokens
    }
    row = served(
        device="NVIDIA H200",
        speed=speed,
        weight_bytes=2_000_000,
        peak_bytes={"process": 1, "card": 3_000_000},
    )
    card = run | {"device": "cuda", "rows": [row]}
    page = engines.engines_page({"engines_h200": card})
    assert "| ct4_wa | 1,234 |  | 5,670 |  | 5,600 to 5,800 |\n" in page
    assert "| ct4_wa | 2.0 |  | 3 |  |\n" in page and "inner products are ours" not in page
    full = row | {"folder": "whole", "target": "bf16", "weight_bytes": 8_000_000}
    full |= {"peak_bytes": {"process": 1, "card": 12_000_000}}
    full |= {
        "speed": speed | {"prefill_tokens_per_second": 2468.8, "decode_tokens_per_second": 4536}
    }
    rows = [row, full, row | {"folder": "untimed", "speed": None}]
    page = engines.engines_page({"engines_h200": card | {"rows": rows}})
    assert "| ct4_wa | 1,234 | 0.50 | 5,670 | 1.25 | 5,600 to 5,800 |\n" in page
    assert "| untimed | not timed |  | not timed |  |  |\n" in page
    assert "| whole | 8.0 | 1.00 | 12 | 1.00 |\n| untimed | 2.0 | 0.25 | 3 | 0.25 |\n" in page
    page = engines.engines_page({"engines_cpu": run, "engines_h200": card})
    assert "tolerance of a layer 1e-05.\n" in page and "beyond the tolerance" not in page
    assert page.startswith("# engines\n\nOn cards, of 1 folders: 4 of 4 linear layers give dmx's ")
    assert "3 of them bit for bit. On the CPU, of 2 folders" in page


def test_the_page_names_layers_beyond_the_tolerance_and_that_of_rotated_inputs():
    (group,) = served()["groups"]
    beyond = served(folder="rotated", tolerance=2e-5, groups=[group | {"within": 3}])
    run = {"note": "", "device": "cpu", "processor": "x86_64", "tokens": 512, "text": None}
    page = engines.engines_page({"engines_cpu": run | {"rows": [served(), beyond]}})
    assert "tolerance of a layer 1e-05 or, where inputs are rotated, 2e-05.\n" in page
    assert "- rotated, mxfp4: 1 of 4 layers beyond the tolerance of 2e-05, by most a.\n" in page


def test_one_table_has_the_model_by_runtime():
    stated = {"target": "compressed_tensors", "profile": "vllm", "formats": ["mxfp4", "fp8"]}
    stated |= {"transform": "hadamard_block"}
    run = {"note": "a model", "device": "cpu", "processor": "x86_64"}
    run |= {"tokens": 512, "window": 256, "text": "a.txt"}
    good = served(**stated, folder="ct4_wa")
    bad = stated | {"profile": "transformers", "formats": ["mxfp6_e2m3"], "folder": "other"}
    runs = {
        "engines_0_of_another": run | {"note": "another", "runtime": "vLLM", "rows": [good]},
        "engines_a": run
        | {"runtime": "vLLM", "rows": [good, bad | {"failed": "At x\nE: 1\n  no kernel"}]},
        "engines_b": run | {"runtime": "transformers", "note": "a model; no more", "rows": [good]},
        "engines_c": run | {"runtime": "vLLM", "tokens": 64, "rows": [served(**stated)]},
        "engines_card": run
        | {"device": "cuda", "runtime": "vLLM", "tokens": 2048, "window": 1024}
        | {"rows": [good | {"device": "NVIDIA H200", "versions": {"vllm": "0.26.0"}}]},
        "engines_d": run | {"runtime": "vLLM", "text": None, "rows": [served()]},
    }
    page = engines.engines_page(runs)
    table, _, rest = page.partition("## One model by runtime")[2].partition("\n## ")
    assert (
        "On a CPU: float32, 2 windows of 256 tokens of a.txt, vllm 0.32.0; prod" in table and rest
    )
    assert "On one NVIDIA H200: float32, 2 windows of 1024 tokens of a.txt, vllm 0.26.0. " in table
    assert table.startswith(
        "\n\nOn one NVIDIA H200, in 1 folders, 4 of 4 layers give dmx's output on the same input, 3 of them to the bit, and "
        "perplexities in the runtime and in dmx differ by at most 1.1 % in vLLM where inputs are quantized (a rounding that "
        "turns goes on through the layers). On a CPU, in 2 folders, 8 of 8 layers give dmx's output on the same input, 6 of "
        "them to the bit, and perplexities in "
        "the runtime and in dmx differ by at most 1.1 % in transformers, 1.1 % in vLLM where inputs are quantized (a "
        "rounding that turns goes on through the layers). Folders that do not load here, below the table: 1.\n"
    )
    cells = "| ct4_wa | compressed_tensors, profile vllm | mxfp4, fp8; inputs rotated | {} | {} | {} | mxfp4 even | 9.0000 | 9.1000 | 1.1 % | 4 of 4, 3 |"
    assert [line for line in table.splitlines() if "9.0000" in line] == [
        cells.format("transformers", "emulated", "emulated"),
        *(
            cells.format(
                engine,
                f"mxfp4: {INPUTS_IN_FP8}; fp8: native with inputs=true, else weights alone",
                "mxfp4: native, inputs quantized always; fp8: native with inputs=true, else weights alone",
            )
            for engine in ("vLLM", "vLLM, NVIDIA H200")
        ),
    ]
    assert "of mxfp6_e2m3; inputs rotated in vLLM: does not load here. `E: 1 no kernel`" in table


def test_the_table_keeps_texts_of_one_name_apart_by_their_tokens():
    run = {"note": "a model; b", "device": "cuda", "processor": "x86_64", "runtime": "vLLM"}
    run |= {"tokens": 512, "window": 256, "text": "a.txt", "tokens_sha256": "1"}
    stated = {"target": "bf16", "profile": None, "formats": [], "transform": "none"}
    row = served(**stated, device="NVIDIA H200")
    other = run | {"note": "a model; c", "tokens_sha256": "2"}
    other |= {"rows": [row | {"perplexity": 8.0, "perplexity_dmx": 8.0}]}
    alone = engines.engines_page({"engines_a": run | {"rows": [row]}})
    assert "text 2" not in alone and "different texts" not in alone
    page = engines.engines_page({"engines_a": run | {"rows": [row]}, "engines_b": other})
    assert "On one NVIDIA H200, in 1 folders, 4 of 4" in page and "at most 1.1 % in vLLM" in page
    assert "On one NVIDIA H200, text 2, in 1 folders, 4 of 4" in page
    assert "tokens of a.txt (b), vllm" in page and "tokens of a.txt (c), vllm" in page
    assert "Perplexities of different texts are not to be held against each other." in page
    assert "| vLLM, NVIDIA H200 |  |  | mxfp4 even | 9.0000 | 9.1000 | 1.1 % |" in page
    assert "| vLLM, NVIDIA H200, text 2 |  |  | mxfp4 even | 8.0000 | 8.0000 | 0 % |" in page


def test_the_table_says_apart_how_far_perplexities_are_with_inputs_left_alone():
    run = {"note": "a model", "device": "cpu", "processor": "x86_64"}
    run |= {"tokens": 512, "window": 256, "text": "a.txt"}
    stated = {"target": "bf16", "profile": None, "formats": [], "transform": "none"}
    (group,) = served()["groups"]
    alone = served(**stated, groups=[group | {"inputs": "left alone"}], perplexity_dmx=9.0009)
    page = engines.engines_page({"engines_a": run | {"runtime": "vLLM", "rows": [alone]}})
    assert "differ by at most 0.01 % in vLLM where inputs are left alone.\n" in page
    both = [alone, served(**stated)]
    page = engines.engines_page({"engines_a": run | {"runtime": "vLLM", "rows": both}})
    assert (
        "0.01 % in vLLM where inputs are left alone; by 1.1 % in vLLM where inputs are quantized"
        in page
    )


# ---------------------------------------------------------------- in the engine

PYTHON = Path(os.environ.get("DMX_ENGINE_PYTHON", serve_check.ENVIRONMENT))
needs_engine = pytest.mark.skipif(
    not PYTHON.is_file(), reason=f"needs an inference engine in {PYTHON}: make engine-env"
)


@pytest.fixture(scope="session")
def _engine_record(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "serve_check"


@pytest.fixture
def engine_rows(_engine_record):
    """folder -> its row; run once for all workers."""
    with FileLock(f"{_engine_record}.lock"):
        record = _engine_record / "record.json"
        if not record.is_file():
            _engine_record.mkdir()
            cases.write_tiny(place := _engine_record)
            asked = serve_check.parse(
                [
                    *(str(place / name) for name in CASES),
                    "--baseline",
                    str(place / "bf16"),
                    "--python",
                    str(PYTHON),
                    "--rows",
                    "2",
                    "--window",
                    "64",
                ]
            )
            record.write_text(json.dumps(serve_check.check(asked)))
    return {Path(row["folder"]).name: row for row in json.loads(record.read_text())["rows"]}


@needs_engine
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_linear_layer_of_the_engine_is_ours(name, engine_rows):
    row = engine_rows[name]
    assert "failed" not in row, row["failed"]
    assert serve_check.is_right(row), row["groups"]
    case = CASES[name]
    assert {g["formats"] for g in row["groups"]} == {str(f) for f in case.formats}
    assert sum(g["layers"] for g in row["groups"]) == 12
    if not case.inputs:  # nothing but sums in another order
        assert row["difference"] < 1e-4
        assert {g["inputs"] for g in row["groups"]} == {"left alone"}
    else:  # a rounding that turns in one layer goes on through the others
        assert row["difference"] < row["effect"]


@needs_engine
@pytest.mark.engine
@pytest.mark.slow
def test_the_engine_quantizes_inputs_by_its_own_rules(engine_rows):
    done = {
        (name, g["formats"]): g["inputs"].partition(",")[0]
        for name in ("ct48_wa", "fp8_wa", "mxfp4_fp8_w4a8", "quark46_wa")
        for g in engine_rows[name]["groups"]
    }
    assert done == {
        ("ct48_wa", "mxfp4"): "mxfp4 even",
        ("ct48_wa", "mxfp8_e4m3"): "left alone",  # whatever the file says
        ("fp8_wa", "fp8"): "fp8 amax/448_float32",
        ("mxfp4_fp8_w4a8", "mxfp4"): "fp8 amax/448_float32",
        ("mxfp4_fp8_w4a8", "fp8"): "fp8 amax/448_float32",
        ("quark46_wa", "mxfp4"): "mxfp4 even",
        ("quark46_wa", "mxfp6_e2m3"): "mxfp6_e2m3 even",
    }


@needs_engine
@pytest.mark.engine
@pytest.mark.slow
def test_quantization_shows_in_the_engine(engine_rows):
    """Without this, equal log-probabilities would say nothing."""
    assert engine_rows["bf16"]["effect"] == 0 and engine_rows["bf16"]["difference"] < 1e-4
    assert all(
        engine_rows[name]["effect"] > 0.1 for name in ("ct48_w", "ct4_w", "quark4668_w", "fp8_wa")
    )
