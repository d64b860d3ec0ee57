"""humming's layout: names, patterns, a second reader of its bytes, and what it does not hold."""

import json
import re
from dataclasses import replace

import pytest
import torch

import dmx
from dmx.applying.apply import applied
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, FormatError
from dmx.exporting import make_plan, read_assignment
from dmx.exporting._fresh_load import rows_of, small_floats
from dmx.exporting.humming import DTYPES, FP8_TOKENS
from dmx.exporting.verify import default_tokens
from dmx.exporting.writing import read_headers
from dmx.formats import BF16, FP8, MX_FORMATS, MXFP4, get_block_format
from tests.exporting.conftest import mixed


def test_all_five_formats_are_read_by_the_formulas_of_its_schema(model, tmp_path, loaded_apart):
    assignment = mixed(model, (*MX_FORMATS, BF16), "fused")
    done = dmx.export(model, assignment, tmp_path / "out", target="humming")
    assert done.verification.equal and "humming's formulas" in done.verification.loader
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    # Short forms would be taken for formats of inputs, and a default for what no pattern names.
    assert not {"dtype", "group_size", "scale_dtype", "a_dtype", "b_dtype"} & set(config)
    headers, own = read_headers(done.folder), Assignment.load(done.folder / "assignment.json")
    for layer, name in own.formats.items():
        fitting = [key for key in config["dynamic"] if re.match(key[2:], layer)]
        if name == "bf16":
            assert fitting[0][0] == "-"
            continue
        (key,) = fitting
        block_format = get_block_format(name)
        assert config["dynamic"][key] == {"b_dtype": DTYPES[block_format]}
        out, into = own.shapes[layer]
        words = headers[f"{layer}.weight"]
        assert (words.dtype, words.shape) == (
            torch.int32,
            (out, into * block_format.element.bits // 32),
        )
        scales = headers[f"{layer}.weight_scale"]
        assert (scales.dtype, scales.shape) == (torch.float8_e8m0fnu, (out, into // 32))
    # what vLLM calls the layers
    for name, parts in {"self_attn.qkv_proj": "q_proj", "mlp.gate_up_proj": "up_proj"}.items():
        whole = f"model.layers.1.{name}"
        part = f"{whole.rpartition('.')[0]}.{parts}"
        fitting = {c.get("b_dtype") for k, c in config["dynamic"].items() if re.match(k[2:], whole)}
        expected = own.formats[part]
        assert fitting == {None if expected == "bf16" else DTYPES[get_block_format(expected)]}
    # vLLM asks for every module that takes a config, and a schema without b_dtype stops it
    for other in ("model.embed_tokens", "model.layers.1.self_attn.attn", "lm_head", "model.norm"):
        assert [key[0] for key in config["dynamic"] if re.match(key[2:], other)][:1] == ["-"]
    again = dmx.load_exported(done.folder)
    chosen = {k: f for k, f in again.assignment.formats.items() if f != "bf16"}
    assert chosen == {k: f for k, f in own.formats.items() if f != "bf16"}
    assert again.target == "humming" and not again.inputs


@pytest.mark.parametrize("block_format", MX_FORMATS, ids=str)
def test_values_of_codes_are_counted_anew(block_format):
    values = small_floats(DTYPES[block_format])
    assert len(values) == 2**block_format.element.bits
    if block_format.element.bits == 8:
        kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[block_format.element.name]
        known = torch.arange(256, dtype=torch.uint8).view(kind).float()
        finite = known.isfinite()
        assert torch.equal(values[finite], known[finite])
    else:
        assert values.max() == block_format.element.max_normal
        assert torch.equal(
            dmx.fake_quant(values.repeat(8)[None, :32], block_format), values.repeat(8)[None, :32]
        )


def test_fp8_inputs_are_asked_for_layer_by_layer(model, tmp_path):
    assignment = mixed(model, MX_FORMATS, "fused", input_format="fp8")
    done = dmx.export(
        model, assignment, tmp_path / "out", target="humming", inputs=True, verify=False
    )
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    asked = [c for key, c in config["dynamic"].items() if key[0] == "+"]
    assert all(FP8_TOKENS.items() <= c.items() for c in asked)
    assert len(asked) == len(assignment.quantized)
    assert FP8_TOKENS["allow_fallback"] is False  # vLLM prefers BF16 beside scales of blocks
    back = dmx.load_exported(done.folder)
    assert back.inputs and back.assignment.input_formats == assignment.input_formats
    tokens = default_tokens(256)
    with applied(model, assignment):
        assert torch.equal(
            rows_of(back.model, tokens, 2)["logits"], rows_of(model, tokens, 2)["logits"]
        )
    static = replace(assignment, input_amax=dict.fromkeys(assignment.quantized, 1.0))
    with pytest.raises(
        FormatError, match=r"layers have one scale for all, first model\..* Leave static"
    ):
        make_plan(static, target="humming", inputs=True, verify=False)


def test_what_it_does_not_hold_is_refused(model):
    with pytest.raises(
        FormatError, match=r"ask for others, first model\.\S+: mxfp4\. Use inputs=false"
    ):
        make_plan(mixed(model, (MXFP4,), "fused"), target="humming", inputs=True)
    with pytest.raises(FormatError, match="fp8"):
        make_plan(mixed(model, (MXFP4, FP8), "fused"), target="humming")
    with pytest.raises(FormatError, match="needs one format in each fused group"):
        make_plan(mixed(model, MX_FORMATS), target="humming")
    head = mixed(model, (MXFP4,), "fused", include_lm_head=True)
    assert "lm_head" in head.formats
    with pytest.raises(
        FormatError, match="builds 1 of the layers without quantization, first lm_head"
    ):
        make_plan(head, target="humming")


def test_configs_of_others_are_read_and_what_is_no_mx_is_refused(model):
    scheme = {"quant_method": "humming", "dtype": "float6e3m2", "scale_dtype": "float8e8m0"}
    body = {**scheme, "group_size": 32, "dynamic": {"-:.*down_proj": {}}}
    read = read_assignment(body, model)
    assert set(read.formats.values()) == {"mxfp6_e3m2"}
    assert all("down_proj" in n or n == "lm_head" for n in read.unquantized)
    with pytest.raises(FormatError, match=r"humming config: .* uint4"):
        read_assignment({**body, "dtype": "uint4"}, model)
    with pytest.raises(AssignmentError, match="no_such_layer"):
        read_assignment({**body, "dynamic": {"+:no_such_layer": {"dtype": "float4e2m1"}}}, model)
