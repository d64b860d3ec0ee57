"""What an export refuses, in words that say the way out; and that a search's target keeps its word."""

import dataclasses
import json
import shutil
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dmx
from dmx.assignment.assignment import make_assignment
from dmx.assignment.budget import Budget
from dmx.assignment.projection import project
from dmx.assignment.targets import SEARCH_TARGETS, TARGETS, obstacles
from dmx.errors import AssignmentError, DmxError, FormatError, ModelError, RunError
from dmx.exporting import make_plan, writing
from dmx.exporting.plan import check_holds, target_key
from dmx.exporting.recipes import recipe_text
from dmx.exporting.tensors import plan_tensors
from dmx.formats import FAMILIES, FP8, MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3
from dmx.models import ModelConfig, TinyConfig, meta_model
from dmx.searching import SearchConfig, search_space
from tests.exporting.conftest import VLLM, mixed, unequal
from tests.forked import Forked

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def case(make_tiny, tmp_path):
    model = make_tiny("llama").model
    options = {"target": "quark", "verify": False}

    def export(assignment=None, folder=tmp_path / "out", **changed):
        return dmx.export(model, assignment or mixed(model, VLLM), folder, **options | changed)

    return model, export


def test_a_format_that_the_target_cannot_hold(case):
    model, export = case
    with pytest.raises(FormatError) as error:
        export(mixed(model, (MXFP4, MXFP6_E3M2)), target="compressed_tensors", profile="vllm")
    for words in (
        "profile=vllm does not hold mxfp6_e3m2",
        "7 layers",
        "model.layers.0.self_attn.k_proj",
        "quark; torchao",
        "search.target",
    ):
        assert words in str(error.value)


def test_a_folder_that_exists_is_not_touched(case, tmp_path):
    _, export = case
    (tmp_path / "out").mkdir()
    with pytest.raises(RunError, match=r"folder=.*out exists"):
        export()
    assert not list((tmp_path / "out").iterdir())


def test_an_assignment_of_another_model(case, make_tiny):
    _, export = case
    other = mixed(make_tiny("llama", hidden_size=128).model, VLLM)
    with pytest.raises(AssignmentError, match="for another model"):
        export(other)


def test_too_little_disk(case, tmp_path, monkeypatch):
    _, export = case
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1000))
    with pytest.raises(RunError, match=r"0\.00 GB free, the export needs 0\.07 GB"):
        export()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing(case, tmp_path, monkeypatch):
    _, export = case

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dmx.exporting.exporter.write_tensors", full)
    with pytest.raises(RunError, match="No space left on device"):
        export()
    assert not list(tmp_path.iterdir())


_STARTS_AND_STAYS = """
import sys, time
from pathlib import Path
from dmx.exporting.writing import new_folder
with new_folder(Path(sys.argv[1])) as scratch:
    (scratch / "half").write_text("half-written")
    print("writing", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_export_left_goes_with_the_next_and_a_live_one_stays(case, tmp_path):
    _, export = case
    process = Forked("-c", _STARTS_AND_STAYS, tmp_path / "out")

    def meanwhile():
        if process.outputs()[0] != "writing\n":
            return False
        (scratch,) = tmp_path.iterdir()
        export(folder=tmp_path / "other")
        assert (scratch / "half").exists()
        export()  # beside one that is still at it
        return (scratch / "half").exists() and (tmp_path / "out" / "config.json").exists()

    process.kill_once(meanwhile)
    shutil.rmtree(tmp_path / "out")
    export()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]


def test_in_features_no_multiple_of_32(case):
    model, export = case
    good = mixed(model, VLLM)
    layer = "model.layers.0.mlp.down_proj"
    odd = dataclasses.replace(good, shapes={**good.shapes, layer: (64, 80)})
    with pytest.raises(FormatError, match=rf"{layer} has in_features=80, no multiple of 32"):
        export(odd)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "lm_head"])
def test_weights_that_are_not_finite_are_named_quantized_or_not(case, name):
    model, export = case
    with torch.no_grad():
        model.get_submodule(name).weight[3, 3] = torch.inf
    with pytest.raises(ModelError, match=rf"^{name}.weight\[3, 3\] of \w+ is inf"):
        export()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"target": "quarck"}, r"target='quarck' is not allowed.*'quark'"),
        ({"target": "quark", "profile": "vllm"}, "has no profiles"),
        ({"target": "compressed_tensors", "profile": "vlm"}, r"profile='vlm'.*'vllm'"),
        ({"target": "llama_cpp", "profile": "vllm"}, "has no profiles"),
    ],
)
def test_names_that_do_not_exist(changed, words, case):
    with pytest.raises(DmxError, match=words):
        case[1](**changed)


def test_a_model_with_an_assignment_applied(case):
    model, export = case
    assignment = mixed(model, VLLM)
    dmx.apply(model, assignment)
    with pytest.raises(ModelError, match=r"call dmx\.restore"):
        export(assignment)


def test_a_missing_loader_is_said_before_anything_is_written(case, tmp_path, monkeypatch):
    monkeypatch.setattr("dmx.exporting.layouts.importlib.util.find_spec", lambda _: None)
    with pytest.raises(RunError, match=r"pip install amd-quark .*verify=false"):
        case[1](verify=True)
    assert not list(tmp_path.iterdir())


def test_a_loader_too_old_for_a_format_is_said_before_anything_is_written(
    case, tmp_path, monkeypatch
):
    model, export = case
    monkeypatch.setattr("dmx.exporting.layouts.importlib.util.find_spec", lambda _: True)
    monkeypatch.setattr("dmx.exporting.layouts.metadata.version", lambda _: "0.17.0")
    six = mixed(model, (MXFP4, MXFP6_E2M3))
    options = {"target": "compressed_tensors", "verify": True}
    with pytest.raises(
        RunError,
        match=r"compressed-tensors, and 0\.17\.0 .*read mxfp6_e2m3: .*>=0\.20\.0.*verify=false",
    ):
        export(six, **options)
    assert not list(tmp_path.iterdir())
    make_plan(mixed(model, VLLM), **options)  # which it does read
    plan = make_plan(six, target="compressed_tensors", verify=False)
    assert plan.layout.requirements(plan.layers) == ["compressed-tensors>=0.20.0"]
    monkeypatch.setattr("dmx.exporting.layouts.metadata.version", lambda _: "0.20.1.dev3+cpu")
    make_plan(six, **options)


def test_a_rule_that_quark_does_not_scale_inputs_by(case):
    model, export = case
    rules = {"input": {"mxfp8_e4m3": "rceil"}}
    rule = dataclasses.replace(mixed(model, VLLM), scale_rules=rules)
    with pytest.raises(FormatError, match=r"floor, ceil, even.*'rceil' for inputs in mxfp8_e4m3"):
        export(rule, inputs=True)
    export(dataclasses.replace(rule, scale_rules={"weight": rules["input"]}), inputs=True)


def test_folders_that_our_loader_refuses(case, tmp_path):
    _, export = case
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        dmx.load_exported(tmp_path)
    done = export()
    (tmp_path / "model").mkdir()
    shutil.copytree(done.folder, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors files"):
        dmx.load_exported(tmp_path / "cut")
    config = (done.folder / "config.json").read_text()
    (done.folder / "config.json").write_text(config.replace('"quark"', '"gptq"'))
    with pytest.raises(FormatError, match="quant_method 'gptq' is not read here"):
        dmx.load_exported(done.folder)


META = {
    tied: meta_model(ModelConfig(id="t", tiny=TinyConfig(architecture="qwen2", tied=tied)))
    for tied in (False, True)
}
EXPORTS = {
    "vllm": ("compressed_tensors", "vllm"),
    "transformers": ("compressed_tensors", "transformers"),
    "vllm_quark": ("quark", None),
    "vllm_humming": ("humming", None),
    "vllm_modelopt": ("modelopt_checkpoint", None),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(SEARCH_TARGETS)),
    st.sampled_from([*sorted(FAMILIES), ["nvfp4", "fp8"], ["mxfp4", "fp8"], ["nvfp4"]]),
    st.sampled_from(["fused", "layer"]),
    st.booleans(),
    st.floats(4, 9),
    st.integers(0, 999),
    st.lists(st.sampled_from(["*.0.*", "*.q_proj", "*.down_proj", "*.gate_proj"]), max_size=2),
    st.dictionaries(
        st.sampled_from(["*.o_proj", "*.v_proj", "*.up_proj", "*.1.mlp.*"]),
        st.sampled_from(["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "bf16"]),
        max_size=2,
    ),
    st.booleans(),
    st.sampled_from(["joint", "separate", "mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "fp8", "bf16"]),
)
def test_what_a_search_target_yields_its_export_takes(
    target, family, units, tied, limit, seed, exclude, fixed, include_lm_head, choices
):
    is_fixed = choices not in ("joint", "separate")
    try:
        config = SearchConfig(
            name="random",
            family=family,
            units=units,
            target=target,
            exclude=exclude,
            fixed=fixed,
            include_lm_head=include_lm_head,
            choices="joint" if is_fixed else choices,
            input_format=choices if is_fixed else None,
        )
        space = search_space(META[tied], config)
        draw = np.random.default_rng(seed)
        wish = draw.random((len(space.units), len(space.formats) - 1))
        choice = project(space, Budget(limit), np.zeros(len(space.units)), wish)
    except DmxError:
        return  # refused before a search: as it should be
    rules = config.scale_rules.by_format()  # of inputs the runtime's: files hold them
    assignment = make_assignment(space, choice, META[tied], scale_rules=rules)
    layout, profile = EXPORTS[target]
    inputs = choices not in ("joint", "bf16") or (target == "vllm_modelopt" and choices != "bf16")
    if formats := assignment.block_formats("input"):  # as a search measures them
        ranged = {
            n: 1.0
            for n, f in formats.items()
            if f.needs_input_amax or SEARCH_TARGETS[target].per_tensor
        }
        assignment = dataclasses.replace(assignment, input_amax=ranged or None)
    check_holds(assignment, layout, profile, inputs=inputs)
    try:
        make_plan(assignment, target=layout, profile=profile, inputs=inputs, verify=False)
    except FormatError as error:  # a joint choice has this, too
        assert fixed and "does not quantize inputs to mxfp6" in str(error)
    if target != "vllm_modelopt":
        inputs = False
    plan = make_plan(assignment, target=layout, profile=profile, inputs=inputs, verify=False)
    plan_tensors(META[tied], plan)
    holds = TARGETS[target_key(layout, profile)]
    loader, rest = SEARCH_TARGETS[target], assignment.unquantized
    assert not obstacles(assignment.formats, holds, loader, rest, assignment.input_formats)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "torchao", "inputs": True}, "runs inputs in none beside"),
        (
            {"target": "compressed_tensors", "profile": "vllm", "inputs": True},
            r"profile=vllm, inputs=true: runs inputs in fp8 alone beside weights in mxfp4; 10 layers ask for others, "
            r"first model\.layers\.0\.self_attn\.q_proj: weight mxfp4, input mxfp8_e4m3\. Use "
            r"target=compressed_tensors with profile=transformers, target=quark, target=assignment or",
        ),
        ({"target": "llama_cpp"}, "names one format for a layer; 10 have two.*auto_round"),
        ({"target": "llm_compressor"}, r"q_proj: weight mxfp4, input mxfp8_e4m3.*search\.choices"),
    ],
    ids=["torchao", "vllm", "llama.cpp", "llm-compressor"],
)
def test_unequal_operands_that_a_target_cannot_hold(options, words, case, tmp_path):
    model, export = case
    with pytest.raises(FormatError, match=words):
        export(unequal(model), **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("input_format", ["mxfp8_e4m3", "mxfp6_e2m3", "bf16"])
@pytest.mark.parametrize("target", ["compressed_tensors", "torchao", "llm_compressor", "llama_cpp"])
def test_inputs_in_one_format_that_a_target_cannot_hold(target, input_format, case):
    model, export = case
    assignment = mixed(model, (MXFP4, MXFP8_E4M3), "fused", input_format=input_format)
    is_named, is_left = target.startswith("ll"), input_format == "bf16"
    if is_named and is_left:  # these name weights alone
        assert export(assignment, target=target).folder
        return
    if target == "compressed_tensors" and input_format == "mxfp8_e4m3":  # by transformers, not vLLM
        assert make_plan(assignment, target=target, inputs=True).profile == "transformers"
        return
    words = "names one format for a layer" if is_named else f"beside weights.*{input_format}"
    if is_left:
        words = r"inputs=true: the assignment leaves inputs in bf16 .* Use inputs=false"
    with pytest.raises(FormatError, match=words):
        export(assignment, target=target, inputs=not is_named)


@pytest.mark.parametrize("is_static", [False, True])
def test_mxfp4_beside_fp8_inputs_is_w4a8_of_vllm_with_a_scale_a_token(is_static, case):
    model, export = case
    assignment = mixed(model, (MXFP4, FP8), "fused", input_format="fp8")
    if is_static:
        layers = assignment.block_formats("input")
        static = dataclasses.replace(assignment, input_amax=dict.fromkeys(layers, 1.0))
        with pytest.raises(FormatError, match="with a scale a token alone, and 10 layers have one"):
            export(static, target="compressed_tensors", profile="vllm", inputs=True)
        return
    done = export(assignment, target="compressed_tensors", inputs=True)
    assert done.profile == "vllm"
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    (group,) = (
        g for g in config["config_groups"].values() if g["format"] == "mxfp4-pack-quantized"
    )
    asked = {key: group["input_activations"][key] for key in ("num_bits", "type", "strategy")}
    assert asked == {"num_bits": 8, "type": "float", "strategy": "token"}
    assert group["input_activations"]["dynamic"] is True
    text = (done.folder / "README.md").read_text()
    assert "mxfp4 with inputs in fp8: native, from 0.32" in text
    with pytest.raises(FormatError, match=r"have two, .* Use target=assignment, or search"):
        recipe_text(assignment, "llama_cpp")
    others = mixed(model, (MXFP4, MXFP8_E4M3), "fused", input_format="fp8")
    with pytest.raises(FormatError, match=r"beside weights in mxfp4; .*weight mxfp8_e4m3, input"):
        make_plan(others, target="compressed_tensors", profile="vllm", inputs=True, verify=False)


def test_six_bit_inputs_beside_another_weight_are_refused_for_compressed_tensors(case):
    model, export = case
    assignment = unequal(model, (MXFP4, MXFP6_E2M3))
    with pytest.raises(
        FormatError, match=r"inputs in fp8, mxfp4, mxfp8_e4m3, nvfp4 alone .* input mxfp6_e2m3"
    ):
        export(assignment, target="compressed_tensors", inputs=True)


def test_files_with_weights_alone_of_unequal_operands_say_so(case):
    model, export = case
    with pytest.warns(
        UserWarning, match=r"inputs=false: 10 layers have an input in another.*4\.\d+"
    ):
        done = export(unequal(model))
    assert "weights alone take 4." in (done.folder / "README.md").read_text()


@pytest.mark.parametrize("target", ["compressed_tensors", "quark"])
def test_where_a_card_has_other_inputs_than_asked_for_export_and_folder_say_so(target, case):
    model, export = case
    assignment = mixed(model, VLLM, "fused")
    said = (
        r"inputs=true: on Hopper vLLM has .*: those of mxfp4 in fp8; those of mxfp8_e4m3 left alone"
    )
    with pytest.warns(UserWarning, match=said) as warned:
        done = export(assignment, target=target, inputs=True)
    assert not [w for w in warned if "Blackwell" in str(w.message)]
    text = (done.folder / "README.md").read_text()
    assert "mxfp8_e4m3: weights alone; on Blackwell" in text


def test_cards_are_spoken_of_where_an_engine_loads_the_folder(case, tmp_path):
    """Not of split groups in quark, which vLLM refuses; of weights alone the folder speaks, and no warning."""
    model, export = case
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(mixed(model, VLLM), inputs=True)
        done = export(mixed(model, VLLM, "fused"), tmp_path / "alone", target="compressed_tensors")
    assert "on Hopper, mxfp4: inputs in fp8 always" in (done.folder / "README.md").read_text()
