"""Recipes for other tools, and other tools' configs read back."""

import json

import pytest

import dmx
from dmx.errors import AssignmentError, FormatError
from dmx.exporting import read_assignment
from dmx.exporting.recipes import RECIPES
from dmx.formats import MX_FORMATS, MXFP8_E5M2
from tests.exporting.conftest import HELD, VLLM, mixed, unequal

L0 = "model.layers.0"


@pytest.mark.parametrize("target", ["compressed_tensors", "quark"])
def test_our_own_configs_read_back_as_the_assignment(target, make_tiny, tmp_path):
    model = make_tiny("qwen3").model
    assignment = mixed(model, HELD[target])
    done = dmx.export(model, assignment, tmp_path / "out", target=target, verify=False)
    found = read_assignment(done.folder, model)
    assert dict(found.formats) == dict(assignment.formats)
    assert found.bits == assignment.bits and found.shapes == assignment.shapes
    assert found.unquantized == assignment.unquantized and found.units == "layer"
    found.check(model)
    assert dmx.Assignment.load(found.save(tmp_path / "a.json")) == found
    (done.folder / "assignment.json").unlink()
    (done.folder / "dmx_export.json").unlink()  # as another tool would have left it
    back = dmx.load_exported(done.folder)
    assert dict(back.assignment.formats) == dict(assignment.formats) and back.inputs


def _group(bits, targets, **changed):
    weights = {"num_bits": bits, "type": "float", "group_size": 32, "strategy": "group"}
    return {"targets": targets, "weights": weights | changed}


def test_compressed_tensors_whole_names_win_over_patterns_and_classes(tiny_random):
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "a": _group(4, ["Linear"]),
            "b": _group(8, [r"re:.*mlp\..*"]),
            "c": _group(6, [f"{L0}.mlp.up_proj"]),
        },
        "ignore": ["lm_head", "re:.*o_proj"],
    }
    found = read_assignment({"quantization_config": config}, tiny_random.model)
    assert found.formats[f"{L0}.mlp.up_proj"] == "mxfp6_e2m3"
    assert found.formats[f"{L0}.mlp.down_proj"] == "mxfp8_e4m3"
    assert found.formats[f"{L0}.self_attn.q_proj"] == "mxfp4"
    assert f"{L0}.self_attn.o_proj" in found.unquantized and "lm_head" in found.unquantized


def test_quark_patterns_global_and_exclude(tiny_random):
    def spec(dtype):
        return {"weight": {"dtype": dtype, "qscheme": "per_group", "group_size": 32}}

    config = {
        "quant_method": "quark",
        "global_quant_config": spec("fp4"),
        "exclude": ["lm_head"],
        "layer_type_quant_config": {},
        "layer_quant_config": {"*.down_proj": spec("fp6_e3m2")},
    }
    found = read_assignment(config, tiny_random.model)
    assert found.formats[f"{L0}.mlp.down_proj"] == "mxfp6_e3m2"
    assert set(found.formats.values()) == {"mxfp4", "mxfp6_e3m2"}
    assert found.unquantized == ("lm_head",) and found.units == "fused"


def test_modelopt_quantized_layers(tiny_random):
    layers = {f"{L0}.mlp.down_proj": {"quant_algo": "MXFP8"}}
    layers[f"{L0}.mlp.up_proj"] = {"quant_algo": "mxfp4", "group_size": 32}
    config = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    found = read_assignment(config, tiny_random.model)
    assert dict(found.formats) == {
        f"{L0}.mlp.up_proj": "mxfp4",
        f"{L0}.mlp.down_proj": "mxfp8_e4m3",
    }
    assert len(found.unquantized) == 13 and found.search.tool == "modelopt"


def test_auto_round_layers_over_defaults(tiny_random):
    config = {
        "quant_method": "auto-round",
        "bits": 4,
        "data_type": "mx_fp",
        "group_size": 32,
        "extra_config": {
            f"{L0}.mlp.down_proj": {"bits": 8},
            ".*o_proj": {"bits": 16},
            f"{L0}.mlp.up_proj": {"bits": 6, "data_type": "mx_fp6e2m3"},
        },
    }
    found = read_assignment(config, tiny_random.model)
    assert found.formats[f"{L0}.mlp.down_proj"] == "mxfp8_e4m3"
    assert found.formats[f"{L0}.mlp.up_proj"] == "mxfp6_e2m3"
    assert found.formats[f"{L0}.self_attn.q_proj"] == "mxfp4"
    assert f"{L0}.self_attn.o_proj" in found.unquantized and "lm_head" in found.unquantized


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"config_groups": {"a": _group(4, ["Linear"], type="int")}}, "int 4 bits, group 32"),
        ({"config_groups": {"a": _group(4, ["Linear"], group_size=16)}}, "group 16"),
        ({"quantized_layers": {f"{L0}.mlp.up_proj": {"quant_algo": "INT8"}}}, "INT8"),
        ({"layer_config": {f"{L0}.mlp.up_proj": {"bits": 4, "data_type": "int"}}}, "4 bits of int"),
    ],
)
def test_formats_of_other_projects_are_refused_by_layer(config, words, tiny_random):
    with pytest.raises(FormatError, match=rf"model\.layers\.0\..*{words}.*no format of this"):
        read_assignment(config, tiny_random.model)


def test_configs_of_no_known_tool_or_another_model(tiny_random, tmp_path):
    with pytest.raises(AssignmentError, match="no config that is read here"):
        read_assignment({"quant_method": "gptq", "bits": 4}, tiny_random.model)
    config = {"config_groups": {"a": _group(4, ["transformer.h.0.mlp"])}}
    with pytest.raises(AssignmentError, match="quantizes none of the 15 linear layers"):
        read_assignment(config, tiny_random.model)
    with pytest.raises(AssignmentError, match="holds neither"):
        read_assignment(tmp_path, tiny_random.model)
    with pytest.raises(AssignmentError, match="the config is damaged"):  # a list for an object
        read_assignment({"quantized_layers": [1]}, tiny_random.model)


def _quark(**changed):
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32} | changed
    return {"weight": weight}


def _round(**changed):
    return {"bits": 4, "data_type": "mx_fp", "group_size": 32} | changed


Q, OUT, UP, GATE = (f"{L0}.{n}" for n in (
    "self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.gate_proj"
))  # fmt: skip
OWN = {"layer_quant_config": {}, "global_quant_config": _quark()}
ROUND = {"quant_method": "auto-round", **_round()}


@pytest.mark.parametrize(
    ("config", "in_format", "left"),
    [
        # names of a runtime that merges layers
        (
            {"config_groups": {"a": _group(4, [f"{L0}.self_attn.qkv_proj", UP])}},
            [Q, UP],
            [GATE, OUT],
        ),
        ({"config_groups": {"a": _group(4, ["Linear"])}, "ignore": ["re:.*qkv_proj"]}, [UP], [Q]),
        (
            {"quantized_layers": {f"{L0}.mlp.gate_up_proj": {"quant_algo": "MXFP4"}}},
            [UP, GATE],
            [Q],
        ),
        ({**OWN, "exclude": [f"{L0}.self_attn.qkv_proj"]}, [UP, OUT], [Q]),
        # excluded names as patterns, and modules that hold what is excluded
        ({**OWN, "exclude": ["*self_attn*"]}, [UP], [Q, OUT]),
        ({**OWN, "exclude": [f"{L0}.self_attn"]}, [UP], [Q, OUT]),
        ({**OWN, "exclude": ["re:.*up_proj"]}, [GATE, Q], [UP]),
        (
            {
                "quantized_layers": {k: {"quant_algo": "MXFP4"} for k in (Q, OUT, UP)},
                "exclude_modules": ["*mlp*"],
            },
            [Q, OUT],
            [UP],
        ),
        ({**ROUND, "modules_to_not_convert": ["up_proj"]}, [Q, GATE], [UP, "lm_head"]),
        # parts of names, and blocks
        ({**ROUND, "extra_config": {"self_attn": {"bits": 16}}}, [UP], [Q, OUT]),
        (
            {**ROUND, "block_name_to_quantize": "model.layers.1"},
            ["model.layers.1.mlp.up_proj"],
            [UP],
        ),
    ],
)
def test_names_are_read_as_their_tool_reads_them(config, in_format, left, tiny_random):
    found = read_assignment(config, tiny_random.model)
    assert {found.formats.get(name) for name in in_format} == {"mxfp4"}
    assert set(left) <= set(found.unquantized)


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        # patterns that are no regular expression
        (
            {"config_groups": {"a": _group(4, ["re:*proj"])}},
            AssignmentError,
            r"'\*proj' is no regular",
        ),
        (
            {"config_groups": {"a": _group(4, ["Linear"])}, "ignore": ["re:(lm_head"]},
            AssignmentError,
            "is no regular expression",
        ),
        (
            {**ROUND, "extra_config": {"*.up_proj": {"bits": 8}}},
            AssignmentError,
            "is no regular expr",
        ),
        ({**ROUND, "modules_to_not_convert": ["["]}, AssignmentError, "is no regular expression"),
        ({**OWN, "exclude": ["re:*"]}, AssignmentError, "is no regular expression"),
        # blocks of other sizes, and scales that are no powers of two
        ({**ROUND, "group_size": 16}, FormatError, "4 bits of mx_fp, group 16"),
        ({"layer_config": {UP: _round(group_size=128)}}, FormatError, "group 128"),
        (
            {"quantized_layers": {UP: {"quant_algo": "MXFP4", "group_size": 16}}},
            FormatError,
            "MXFP4, group 16",
        ),
        (
            {**OWN, "global_quant_config": _quark(group_size=64)},
            FormatError,
            "fp4 per_group, group 64",
        ),
        (
            {"config_groups": {"a": _group(8, ["Linear"], scale_dtype="torch.bfloat16")}},
            FormatError,
            "float 8 bits, group 32, scales torch.bfloat16",
        ),
        # formats for layers that the model does not have
        (
            {"config_groups": {"a": _group(4, [UP, "model.layers.9.mlp.up_proj"])}},
            AssignmentError,
            r"'model\.layers\.9\.mlp\.up_proj' gives a format to no linear layer",
        ),
        (
            {"config_groups": {"a": _group(4, [UP, "re:.*Wqkv"])}},
            AssignmentError,
            "'re:.*Wqkv' gives a format to no linear layer",
        ),
        (
            {"quantized_layers": {k: {"quant_algo": "MXFP4"} for k in (UP, "model.wqkv")}},
            AssignmentError,
            "'model.wqkv' gives a format to no",
        ),
        (
            {**OWN, "layer_quant_config": {"*.query_key_value": _quark()}},
            AssignmentError,
            "query_key_value' gives a format to no",
        ),
        (
            {**ROUND, "extra_config": {"w1": {"bits": 8}}},
            AssignmentError,
            "'w1' gives a format to no",
        ),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(config, kind, words, tiny_random):
    with pytest.raises(kind, match=words):
        read_assignment(config, tiny_random.model)


# ---------------------------------------------------------------- recipes


def recipe(model, assignment, folder, target):
    dmx.export(model, assignment, folder, target=target)
    assert "not checked" in (folder / "README.md").read_text().lower()
    return (folder / RECIPES[target][0]).read_text()


def test_auto_round_and_modelopt_recipes_name_all_five(tiny_random, tmp_path):
    model = tiny_random.model
    assignment = mixed(model, MX_FORMATS)
    text = recipe(model, assignment, tmp_path / "auto_round", "auto_round")
    found = read_assignment({"layer_config": json.loads(text)}, model)
    assert dict(found.formats) == dict(assignment.formats)
    config = json.loads(recipe(model, assignment, tmp_path / "m", "modelopt"))["quant_cfg"]
    assert config["*"] == {"enable": False} and len(config) == 1 + 2 * len(assignment.formats)
    for layer, name in assignment.formats.items():
        element = assignment.format_of("weight", layer).element
        bits = [element.exponent_bits, element.mantissa_bits]
        assert config[f"{layer}.weight_quantizer"]["num_bits"] == bits, name
    apart, layer = unequal(model), "model.layers.0.self_attn.q_proj"  # MXFP4 by MXFP8
    config = json.loads(recipe(model, apart, tmp_path / "n", "modelopt"))["quant_cfg"]
    kinds = [config[f"{layer}.{operand}_quantizer"]["num_bits"] for operand in ("weight", "input")]
    assert kinds == [[2, 1], [4, 3]]
    body = json.loads(recipe(model, apart, tmp_path / "auto_round_apart", "auto_round"))
    assert (body[layer]["bits"], body[layer]["act_bits"]) == (4, 8)
    alone = mixed(model, VLLM, input_format="bf16")
    config = json.loads(recipe(model, alone, tmp_path / "w", "modelopt"))["quant_cfg"]
    assert config[f"{layer}.input_quantizer"] == {"enable": False}
    body = json.loads(recipe(model, alone, tmp_path / "auto_round_w", "auto_round"))
    assert body[layer]["act_bits"] == 16 and "act_data_type" not in body[layer]


def test_llm_compressor_recipe_is_yaml_of_its_groups(tiny_random, tmp_path):
    from omegaconf import OmegaConf

    model = tiny_random.model
    assignment = mixed(model, HELD["compressed_tensors"])
    body = OmegaConf.to_container(
        OmegaConf.create(recipe(model, assignment, tmp_path / "r", "llm_compressor"))
    )
    groups = body["quant_stage"]["quant_modifiers"]["QuantizationModifier"]["config_groups"]
    found = read_assignment({"config_groups": groups, "ignore": ["lm_head"]}, model)
    assert dict(found.formats) == dict(assignment.formats)
    with pytest.raises(FormatError, match="llm_compressor does not hold mxfp8_e5m2"):
        recipe(model, mixed(model, (MXFP8_E5M2,)), tmp_path / "other", "llm_compressor")


def test_llama_cpp_names_tensors_in_full(tiny_random, tmp_path):
    model = tiny_random.model
    text = recipe(model, mixed(model, VLLM), tmp_path / "r", "llama_cpp")
    lines = dict(line.rsplit("=", 1) for line in text.splitlines())
    assert lines[r"^blk\.0\.attn_q\.weight$"] == "mxfp4"
    assert lines[r"^blk\.0\.attn_k\.weight$"] == "q8_0"
    headed = mixed(model, VLLM, include_lm_head=True)
    with pytest.raises(FormatError, match="no tensor name for lm_head"):
        recipe(model, headed, tmp_path / "other", "llama_cpp")
