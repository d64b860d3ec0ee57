"""python -m experiments.export and .evaluate: what they leave of files, and refusals in one line."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

import dmx
from dmx.assignment.assignment import Assignment
from dmx.formats import MX_FORMATS, NVFP4
from experiments import evaluate, export
from experiments.reporting.record import Record
from experiments.running import exports
from experiments.running.composing import build_root
from experiments.running.settings import CONFIGS
from tests.exporting.conftest import HELD, VLLM, mixed, needs

L0 = "model.layers.0"


@pytest.fixture
def run(run, tmp_path):
    """As everywhere, on a tiny random model; standard output on one line."""
    base = [
        "model=tiny_random",
        "data=synthetic",
        "data.evaluation.max_characters=20000",
        "run.device=cpu",
        f"run.folder={tmp_path / 'run'}",
    ]

    def command(module, *arguments):
        code, out, err = run(module, *base, *arguments)
        return code, " ".join(out.split()), err

    return command


def record(folder):
    return json.loads((folder / "record.json").read_text())


# ---------------------------------------------------------------- export


@needs("compressed-tensors")
def test_an_export_of_learned_weights_loads_bit_for_bit(run, make_tiny, tmp_path, loaded_apart):
    model = make_tiny("llama").model
    batches = list(torch.randint(0, 257, (3, 2, 32), generator=torch.Generator().manual_seed(1)))
    config = dmx.LearnConfig(steps=6, warmup=1, lr=1e-3)
    done = dmx.learn_weights(model, mixed(model, VLLM), batches, config)
    path = done.save(tmp_path / "a.json")
    settings = f"assignment={path}", "target=compressed_tensors", "windows=2", "window=48"
    code, out, err = run(export, *settings)
    assert code == 0 and "logits of 96 tokens equal" in out, err
    assert record(tmp_path / "run")["export"]["verification"]["equal"]
    memory, files = Record.load(tmp_path / "run" / "record.json").rows
    assert memory.perplexity == files.perplexity and memory.weights["name"] == "learned"
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "Weights learned under these formats on 192 tokens, each seen 2 times" in card


@needs("compressed-tensors")
def test_an_export_leaves_its_files_and_a_record(run, make_tiny, tmp_path, loaded_apart):
    path = mixed(make_tiny("llama").model, VLLM).save(tmp_path / "a.json")
    settings = f"assignment={path}", "target=compressed_tensors", "windows=2", "window=48"
    code, out, _ = run(export, *settings)
    folder = tmp_path / "run"
    assert code == 0 and "logits of 96 tokens equal" in out and str(folder / "model") in out
    assert Assignment.load(folder / "model" / "assignment.json") == Assignment.load(path)
    assert dmx.load_exported(folder / "model").tokenizer is not None
    found = record(folder)
    assert found["command"] == "export" and found["data"]["evaluation"]["tokens"] == 96
    facts = found["export"]
    assert facts["verification"]["equal"] and facts["verification"]["kl"] == 0.0
    assert "compressed-tensors" in facts["verification"]["versions"]
    assert facts["bytes"]["quantized_bytes"] == facts["bytes"]["bits_per_element_bytes"]
    memory, files = Record.load(folder / "record.json").rows
    assert memory.perplexity == files.perplexity and files.method.quantized == "W"
    assert [memory.label, files.label] == ["fake-quantized", "exported files"]
    for name in ("target", "inputs", "verify"):
        assert found["actual"][name] == found["requested"][name]
    assert found["actual"]["profile"] == "transformers"  # none was asked: the strictest
    page = (folder / "report.html").read_text()
    assert "equal the fake-quantized model" in page and "Exported files" in page

    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    code, _, err = run(export, *settings)  # finished: it is shown, not made again
    assert code == 0 and "finished; showing it again" in err
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    (folder / "record.json").unlink()  # died before its record: the files are made anew
    assert run(export, *settings)[0] == 0
    assert Record.load(folder / "record.json").rows[1].perplexity == files.perplexity


def test_a_uniform_format_by_name_into_a_folder(run, tmp_path):
    folder = tmp_path / "out"
    settings = "assignment=mxfp6_e3m2", "target=quark", "verify=false", f"folder={folder}"
    code, out, _ = run(export, *settings)
    assert code == 0 and "not loaded again" in out and out.endswith(str(folder))
    assert set(dmx.load_exported(folder).assignment.formats.values()) == {"mxfp6_e3m2"}
    assert record(tmp_path / "run")["results"][1]["perplexity"] is None
    assert not (tmp_path / "run" / "model").exists()
    code, _, err = run(export, *settings, f"run.folder={tmp_path / 'other'}")
    assert code == 2 and f"folder={folder} exists. Choose another folder" in err
    assert not (tmp_path / "other").exists()


def test_names_for_another_tool_leave_a_record(run, tmp_path):
    code, out, _ = run(export, "assignment=mxfp8_e5m2", "target=modelopt")
    assert code == 0 and "Names for modelopt." in out
    assert (tmp_path / "run" / "model" / "quant_cfg.json").is_file()
    assert record(tmp_path / "run")["export"]["bytes"] is None


def test_static_scales_of_inputs_are_measured_by_the_command(run, tmp_path):
    settings = "assignment=fp8", "target=modelopt_checkpoint", "inputs=true", "verify=false"
    code, _, err = run(export, *settings)
    assert code == 2 and "static_inputs=true of dmx export" in err
    cut = "calibration.window=32", "calibration.batches=2"
    code, _, err = run(export, *settings, "static_inputs=true", *cut)
    assert code == 0, err
    folder = tmp_path / "run"
    assignment = Assignment.load(folder / "assignment.json")
    assert set(assignment.input_amax) == set(assignment.formats)
    tensors = load_file(folder / "model" / "model.safetensors")
    for layer, amax in assignment.input_amax.items():
        assert tensors[f"{layer}.input_scale"].item() == pytest.approx(amax / 448, rel=1e-6)
    found = record(folder)
    assert found["data"]["calibration"]["batches"] == 2
    assert found["actual"]["static_inputs"] is found["requested"]["static_inputs"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["static_inputs=true"], "static_inputs=true with inputs=false"),
        (["inputs=true", "static_inputs=true"], "no layer has its input in fp8 or nvfp4"),
        (
            ["assignment=fp8", "target=quark", "inputs=true", "static_inputs=true"],
            "target=quark does not hold fp8",
        ),
        (["assignment=mxfp8_e5m2"], "FormatError: target=compressed_tensors"),
        (["assignment=missing.json"], "AssignmentError: assignment=missing.json: cannot be read"),
        (["assignment=mxfp5"], "FormatError: assignment='mxfp5'"),
        (["assignment=bf16"], "assignment=bf16 gives no formats"),
        (["target=gguf"], "FormatError: target='gguf' is not allowed"),
        (["profile=vlm"], "FormatError: profile='vlm' is not allowed"),
        (["target=quark", "profile=vllm"], "has no profiles"),
        (["target=torchao"], "needs inputs=true"),
        (["target=modelopt", "inputs=true"], "target=modelopt writes names alone"),
        (["windows=-1"], "ConfigError: windows=-1 must be at least 0"),
        (["windows=1", "window=1"], "ConfigError: window=1 must be at least 2"),
        (["windows=1", "window=3000"], "window=3000 is longer than the model's 2048 positions"),
        (["windows=1", "verify=false"], "ConfigError: windows=1 needs verify=true"),
        (["max_shard_gigabytes=0"], "ConfigError: max_shard_gigabytes=0 must be"),
        (["model.tiny.intermediate_size=80"], "in_features=80, no multiple of 32"),
        (["model.tiny.hidden_size=128"], "another model: model.layers.0.self_attn.q_proj is"),
    ],
)
def test_refusals_are_one_line_before_weights_are_loaded(
    arguments, words, run, tmp_path, monkeypatch, make_tiny
):
    def load(*_):
        raise AssertionError("loaded")

    monkeypatch.setattr(exports, "load_model", load)
    path = mixed(make_tiny("llama").model, VLLM, "fused").save(tmp_path / "a.json")
    if "intermediate_size" in arguments[0]:
        body = json.loads(path.read_text())
        body["shapes"] |= {f"model.layers.{i}.mlp.down_proj": [64, 80] for i in (0, 1)}
        body["shapes"] |= {
            f"model.layers.{i}.mlp.{n}_proj": [80, 64] for i in (0, 1) for n in ("up", "gate")
        }
        body["search"]["weighting"] = "layers"
        path.write_text(json.dumps(body))
    code, _, err = run(export, f"assignment={path}", *arguments)
    assert code == 2 and words in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_text_that_is_too_short(run):
    code, _, err = run(export, "windows=9000", "window=1000")
    assert code == 2 and "need 9000000 tokens" in err and "Traceback" not in err


def test_the_old_spelling_is_an_error(run):
    code, _, err = run(export, "export.target=quark")
    assert code == 2 and "setting='export' is not allowed" in err


def test_the_config_composes_with_its_defaults():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        built = build_root(export.ExportRun, compose("export", ["model=smollm2_135m"]))
    assert (built.target, built.profile, built.inputs) == ("compressed_tensors", None, False)
    assert built.folder is None and built.verify and built.windows == 0


# ---------------------------------------------------------------- evaluate


@pytest.fixture
def measure(run, tmp_path):
    def measured(*names, quantized="W,W+A", **settings):
        code, _, err = run(
            evaluate,
            f"assignments=[{','.join(map(str, names))}]",
            "model.dtype=bfloat16",
            "evaluation.window=64",
            "evaluation.max_windows=4",
            f"evaluation.quantized=[{quantized}]",
            *(f"{k}={v}" for k, v in settings.items()),
        )
        return Record.load(tmp_path / "run" / "record.json").rows if code == 0 else err

    return measured


@pytest.mark.parametrize("target", HELD)
def test_perplexity_of_the_files_is_that_of_the_assignment_to_the_last_digit(
    target, measure, make_tiny, tmp_path
):
    model = make_tiny("llama", dtype="bfloat16").model
    path = mixed(model, HELD[target]).save(tmp_path / "a.json")
    folder = tmp_path / "exported"
    dmx.export(model, path, folder, target=target, inputs=target == "torchao", verify=False)
    rows = measure("bf16", path, folder)
    assert [(r.label, r.method.quantized) for r in rows[1:]] == [
        ("a", "W"),
        ("a", "W+A"),
        ("files exported", "W"),
        ("files exported", "W+A"),
    ]
    assert rows[1].window_nll == rows[3].window_nll
    assert rows[2].window_nll == rows[4].window_nll != rows[1].window_nll
    assert rows[0].perplexity != rows[1].perplexity


def test_what_is_measured_is_in_the_files(measure, make_tiny, tmp_path):
    """Other weights under the same assignment: the files of a foreign folder count, not ours."""
    other = make_tiny("llama", dtype="bfloat16", seed=1).model
    path = mixed(other, VLLM).save(tmp_path / "a.json")
    dmx.export(other, path, tmp_path / "files", target="quark", verify=False)
    for name in ("assignment.json", "dmx_export.json"):
        (tmp_path / "files" / name).unlink()  # as another tool leaves it
    ours, files = measure(path, tmp_path / "files", quantized="W")
    assert files.element_bits == ours.element_bits
    assert files.perplexity != ours.perplexity
    assert files.label == "files files"


def test_another_tools_config_is_measured_by_name(measure, make_tiny, tmp_path):
    model = make_tiny("llama", dtype="bfloat16").model
    assignment = mixed(model, MX_FORMATS)
    path = assignment.save(tmp_path / "a.json")
    dmx.export(model, assignment, tmp_path / "recipe", target="auto_round")
    config = tmp_path / "layers.json"
    config.write_text((tmp_path / "recipe" / "layer_config.json").read_text())
    ours, theirs = measure(path, config, quantized="W+A")
    assert theirs.label == "auto-round config"
    assert theirs.perplexity == ours.perplexity
    assert theirs.bits_per_element == ours.bits_per_element


def test_another_tools_config_is_exported_as_ours(run, make_tiny, tmp_path):
    model = make_tiny("llama").model
    assignment = mixed(model, VLLM)
    dmx.export(model, assignment, tmp_path / "recipe", target="auto_round")
    config = tmp_path / "layers.json"
    config.write_text((tmp_path / "recipe" / "layer_config.json").read_text())
    assert run(export, f"assignment={config}", "target=quark", "verify=false")[0] == 0
    back = dmx.load_exported(tmp_path / "run" / "model").assignment
    assert dict(back.formats) == dict(assignment.formats)


def test_configs_that_cannot_be_measured_are_refused(measure, tmp_path):
    config = tmp_path / "c.json"
    for body, words in (
        ({"quantized_layers": {f"{L0}.mlp.up_proj": {"quant_algo": "INT8"}}}, "is no format"),
        ({"quant_method": "gptq", "bits": 4}, "this is no config that is read here"),
        ({"config_groups": {"a": {"targets": ["other"], "weights": {}}}}, "quantizes none of"),
        ({"config_groups": 1}, "is damaged or of a version"),
    ):
        config.write_text(json.dumps(body))
        err = measure(config)
        assert f"{config}: " in err and words in err and "Traceback" not in err
    (tmp_path / "empty").mkdir()
    assert "the folder holds none of" in measure(tmp_path / "empty")
    assert not (tmp_path / "run").exists()


def test_inputs_of_another_tools_nvfp4_config_are_calibrated(measure, tmp_path):
    config = tmp_path / "hf_quant_config.json"
    config.write_text(
        json.dumps({"quantized_layers": {f"{L0}.mlp.up_proj": {"quant_algo": "NVFP4"}}})
    )
    few = {"calibration.batches": 2, "calibration.window": 64}
    (row,) = measure(config, quantized="W+A", **few)
    made = dmx.Assignment.load(tmp_path / "run" / row.assignment)
    assert made.formats == {f"{L0}.mlp.up_proj": "nvfp4"}
    assert made.input_amax[f"{L0}.mlp.up_proj"] > 0
    shutil.rmtree(tmp_path / "run")
    # Weights alone: there is nothing to measure, so batches that no text fills are not asked for.
    (row,) = measure(config, quantized="W", **{"calibration.window": 1_000_000})
    assert dmx.Assignment.load(tmp_path / "run" / row.assignment).input_amax is None


def test_inputs_of_nvfp4_files_without_an_assignment_have_the_range_that_the_files_state(
    measure, model, tmp_path
):
    made = mixed(model, (NVFP4,), "fused")
    stated = replace(made, input_amax=dict.fromkeys(made.formats, 3.0))
    folder = tmp_path / "out"
    dmx.export(model, stated, folder, target="compressed_tensors", inputs=True, verify=False)
    (folder / "assignment.json").unlink()
    (row,) = measure(folder, quantized="W+A")
    back = dmx.Assignment.load(tmp_path / "run" / row.assignment)
    assert back.input_amax == pytest.approx(stated.input_amax)


def test_files_are_measured_beside_a_bf16_model_alone(measure, make_tiny, tmp_path):
    model = make_tiny("llama").model
    dmx.export(model, mixed(model, VLLM), tmp_path / "out", target="quark", verify=False)
    err = measure(tmp_path / "out", **{"model.dtype": "float32"})
    assert "Set model.dtype=bfloat16" in err and "Traceback" not in err
