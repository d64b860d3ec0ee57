"""Each known trap: what the files must look like, and that stepping into it does not pass."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

import dmx
from dmx.errors import AssignmentError, FormatError, RunError
from dmx.exporting import make_plan, writing
from dmx.exporting.plan import LAYOUTS
from dmx.exporting.tensors import plan_tensors
from dmx.exporting.verify import check_files
from dmx.exporting.writing import read_headers
from dmx.formats import MXFP4, MXFP6_E2M3, MXFP8_E4M3, MXFP8_E5M2
from tests.exporting.conftest import HELD, VLLM, mixed, needs

LAYER = "model.layers.0.self_attn.q_proj"
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M3 = [m / 8 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(3) for m in range(8)]


def one_block(model, values):
    """Put 32 values at the start of the first row of LAYER, zeros elsewhere in it."""
    weight = model.get_submodule(LAYER).weight
    with torch.no_grad():
        weight[0] = 0
        weight[0, :32] = torch.tensor(values)


def exported(model, assignment, folder, target="compressed_tensors", **options):
    options = {"verify": False} | options
    done = dmx.export(model, assignment, folder, target=target, **options)
    return load_file(done.folder / "model.safetensors"), json.loads(
        (done.folder / "config.json").read_text()
    )["quantization_config"]


@pytest.mark.parametrize(
    ("target", "name"), [("compressed_tensors", "weight_packed"), ("quark", "weight")]
)
def test_fp4_low_nibble_first(target, name, make_tiny, tmp_path):
    model = make_tiny("llama").model
    values = [(-1) ** i * E2M1[i % 8] for i in range(32)]  # amax 6: scale 2**0, codes as they are
    one_block(model, values)
    tensors, _ = exported(model, mixed(model, (MXFP4,)), tmp_path / "out", target)
    codes = [E2M1.index(abs(v)) | (8 if i % 2 else 0) for i, v in enumerate(values)]
    codes[0] = 0
    expected = [codes[i] | codes[i + 1] << 4 for i in range(0, 32, 2)]
    assert tensors[f"{LAYER}.{name}"][0, :16].tolist() == expected
    assert tensors[f"{LAYER}.weight_scale"][0].tolist() == [127, 0]


@pytest.mark.parametrize(
    ("target", "name"), [("compressed_tensors", "weight_packed"), ("quark", "weight")]
)
def test_fp6_four_codes_in_three_bytes_little_endian(target, name, make_tiny, tmp_path):
    model = make_tiny("llama").model
    one_block(model, E2M3)  # amax 7.5: scale 2**0
    tensors, _ = exported(model, mixed(model, (MXFP6_E2M3,)), tmp_path / "out", target)
    word = sum(code << 6 * code for code in range(32))  # code i at bits 6i..6i+5
    assert bytes(tensors[f"{LAYER}.{name}"][0, :24].tolist()) == word.to_bytes(24, "little")


@pytest.mark.parametrize("target", ["compressed_tensors", "quark"])
def test_scales_are_bytes_of_out_by_in_over_32(target, make_tiny, tmp_path):
    model = make_tiny("qwen3").model
    assignment = mixed(model, HELD[target])
    dmx.export(model, assignment, tmp_path / "out", target=target, verify=False)
    headers = read_headers(tmp_path / "out")
    for layer, (out, into) in assignment.shapes.items():
        scale = headers[f"{layer}.weight_scale"]
        assert scale.dtype == torch.uint8 and scale.shape == (out, into // 32)


def test_every_layer_is_named_in_full_and_no_class_is_a_target(make_tiny, tmp_path):
    model = make_tiny("llama").model
    assignment = mixed(model, HELD["compressed_tensors"])
    _, config = exported(model, assignment, tmp_path / "ct")
    targets = [t for g in config["config_groups"].values() for t in g["targets"]]
    assert sorted(targets) == sorted(assignment.formats)
    assert config["ignore"] == ["lm_head"] and config["quantization_status"] == "compressed"
    _, config = exported(model, mixed(model, HELD["quark"]), tmp_path / "quark", "quark")
    assert set(config["layer_quant_config"]) == set(assignment.formats)
    assert config["layer_type_quant_config"] == {} and not any(
        config["global_quant_config"].values()
    )
    _, config = exported(
        model, mixed(model, HELD["torchao"]), tmp_path / "ao", "torchao", inputs=True
    )
    layers = config["quant_type"]["default"]["_data"]["fqn_to_config"]
    assert set(layers) == set(assignment.formats)  # no _default, no pattern


def _catch_all(layout):
    def config(layers, kept):
        body = layout.config(layers, kept)
        for group in body["config_groups"].values():
            group["targets"] = ["Linear"]
        return body

    return dataclasses.replace(layout, config=config)


def _no_status(layout):
    def config(layers, kept):
        body = layout.config(layers, kept)
        del body["quantization_status"]
        return body

    return dataclasses.replace(layout, config=config)


def _swapped_nibbles(layout):
    def encode(weight, block_format, scale_rule):
        tensors = layout.encode(weight, block_format, scale_rule)
        if "weight_packed" in tensors:
            packed = tensors["weight_packed"]
            tensors["weight_packed"] = packed >> 4 | packed << 4
        return tensors

    return dataclasses.replace(layout, encode=encode)


def _flipped_scales(layout):
    def encode(weight, block_format, scale_rule):
        tensors = layout.encode(weight, block_format, scale_rule)
        return tensors | {"weight_scale": tensors["weight_scale"].flip(-1)}

    return dataclasses.replace(layout, encode=encode)


@needs("compressed-tensors")
@pytest.mark.parametrize("step", [_catch_all, _no_status, _swapped_nibbles, _flipped_scales])
def test_stepping_into_a_trap_is_found_by_loading(
    step, make_tiny, tmp_path, loaded_apart, monkeypatch
):
    model = make_tiny("llama", dtype="bfloat16").model
    assignment = mixed(model, VLLM)
    dmx.export(model, assignment, tmp_path / "good", target="compressed_tensors")
    wrong = step(LAYOUTS["compressed_tensors"])
    monkeypatch.setitem(LAYOUTS, "compressed_tensors", wrong)
    with pytest.raises(RunError, match=r"logits differ|cannot load it|loaded it with"):
        dmx.export(model, assignment, tmp_path / "bad", target="compressed_tensors")
    assert [p.name for p in tmp_path.iterdir()] == ["good"]  # nothing half-right is left


@pytest.mark.parametrize(
    ("trap", "words"),
    [
        (lambda s: {"weight": s["weight_packed"], "weight_scale": s["weight_scale"]}, "weight is"),
        (lambda s: {k: dataclasses.replace(v, shape=v.shape[::-1]) for k, v in s.items()}, "shape"),
    ],
)
def test_a_tensor_of_another_name_or_shape_is_found_in_the_files(
    trap, words, make_tiny, tmp_path, monkeypatch
):
    model = make_tiny("llama").model
    assignment = mixed(model, (MXFP4,))
    done = dmx.export(
        model, assignment, tmp_path / "out", target="compressed_tensors", verify=False
    )
    layout = LAYOUTS["compressed_tensors"]
    wrong = dataclasses.replace(layout, specs=lambda f, s: trap(layout.specs(f, s)))
    plan = make_plan(assignment, target="compressed_tensors", verify=False)
    plain = plan_tensors(model, plan).plain
    check_files(done.folder, plan.layout, plan.layers, plain)
    with pytest.raises(RunError, match=words):
        check_files(done.folder, wrong, plan.layers, plain)


def test_bytes_that_bits_per_element_does_not_explain_are_found(make_tiny, tmp_path, monkeypatch):
    model = make_tiny("llama").model
    packed = dataclasses.replace(LAYOUTS["torchao"], packed=True)  # 6 bits lie in bytes
    monkeypatch.setitem(LAYOUTS, "torchao", packed)
    with pytest.raises(RunError, match=r"quantized tensors take \d+ bytes, bits_per_element says"):
        exported(model, mixed(model, (MXFP6_E2M3,)), tmp_path / "out", "torchao", inputs=True)
    assert not list(tmp_path.iterdir())


@needs("torchao")
def test_a_shard_of_torchao_that_names_its_own_tensors_alone_is_found_by_loading(
    make_tiny, tmp_path, loaded_apart, monkeypatch
):
    def write(path, parts, metadata):
        own = {name.rpartition(".")[0] for part in parts for name in part.specs}
        kept = {k: v for k, v in metadata.items() if k.removesuffix(".weight") in own}
        return write_file(path, parts, kept | {"tensor_names": json.dumps(list(kept))})

    write_file = writing._write_file
    monkeypatch.setattr(writing, "_write_file", write)
    model = make_tiny("llama", dtype="bfloat16").model
    with pytest.raises(RunError, match=r"cannot load it|loaded it with|logits differ"):
        dmx.export(
            model,
            mixed(model, HELD["torchao"]),
            tmp_path / "out",
            target="torchao",
            inputs=True,
            max_shard_bytes=40_000,
        )


def test_a_split_fused_group_has_no_vllm_profile(make_tiny, tmp_path):
    model = make_tiny("llama").model
    split = mixed(model, VLLM, "layer")
    with pytest.raises(FormatError, match=r"one format in each fused group.*4 groups are split"):
        exported(model, split, tmp_path / "out", profile="vllm")
    done = dmx.export(model, split, tmp_path / "out", target="compressed_tensors", verify=False)
    assert done.profile == "transformers"  # the strictest that holds it
    partial = mixed(model, VLLM, "fused", exclude=["*.k_proj"])
    with pytest.raises(FormatError, match="one format in each fused group"):
        exported(model, partial, tmp_path / "other", profile="vllm")


def test_tied_embeddings_are_written_once_and_never_quantized(make_tiny, tmp_path):
    model = make_tiny("smollm2").model
    tensors, config = exported(model, mixed(model, (MXFP4,)), tmp_path / "out")
    assert "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert config["ignore"] == ["lm_head"]


@needs("compressed-tensors")
@pytest.mark.parametrize("architecture", ["smollm2", "llama"])  # tied, and not
def test_a_quantized_head_leaves_the_embedding_as_it_is(
    architecture, make_tiny, tmp_path, loaded_apart
):
    model = make_tiny(architecture, dtype="bfloat16").model
    assignment = mixed(model, VLLM, include_lm_head=True)
    done = dmx.export(model, assignment, tmp_path / "out", target="compressed_tensors")
    assert done.verification.equal
    headers = read_headers(done.folder)
    assert headers["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert {"lm_head.weight_packed", "lm_head.weight"} & set(headers)
    config = json.loads((done.folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    card = (done.folder / "README.md").read_text()
    assert ("ties the head" in card) == (architecture == "smollm2")
    back = dmx.load_exported(done.folder).model
    assert torch.equal(back.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert model.config.tie_word_embeddings == (architecture == "smollm2")


def test_layers_that_share_a_weight_are_refused(make_tiny, tmp_path):
    model = make_tiny("llama").model
    blocks = model.model.layers
    blocks[1].mlp.up_proj.weight = blocks[0].mlp.up_proj.weight
    with pytest.raises(AssignmentError, match=r"0\.mlp\.up_proj shares its weight with .*1\.mlp"):
        exported(model, mixed(model, (MXFP4,)), tmp_path / "out")


@pytest.mark.parametrize("profile", [None, "vllm", "transformers"])
def test_e5m2_has_no_compressed_tensors_form(profile, make_tiny, tmp_path):
    model = make_tiny("llama").model
    assignment = mixed(model, (MXFP4, MXFP8_E5M2))
    with pytest.raises(FormatError, match=r"does not hold mxfp8_e5m2: 7 layers.*torchao"):
        exported(model, assignment, tmp_path / "out", profile=profile)
    with pytest.raises(FormatError, match="mxfp8_e5m2"):
        exported(model, assignment, tmp_path / "out", "quark")
    assert not list(tmp_path.iterdir())


def test_mxfp6_inputs_are_refused_for_compressed_tensors(make_tiny, tmp_path):
    model = make_tiny("llama").model
    assignment = mixed(model, (MXFP4, MXFP6_E2M3))
    with pytest.raises(FormatError, match=r"inputs to mxfp6_e2m3 \(7 layers"):
        exported(model, assignment, tmp_path / "out", inputs=True)
    eight = dict.fromkeys(assignment.formats, "mxfp8_e4m3")
    allowed = dataclasses.replace(assignment, input_formats=eight)
    _, config = exported(model, allowed, tmp_path / "out", inputs=True)
    bits = {
        (g["weights"]["num_bits"], g["input_activations"]["num_bits"])
        for g in config["config_groups"].values()
    }
    assert bits == {(4, 8), (6, 8)}


def test_torchao_with_weights_alone_is_refused(make_tiny, tmp_path):
    model = make_tiny("llama").model
    with pytest.raises(FormatError, match=r"needs inputs=true"):
        exported(model, mixed(model, (MXFP8_E4M3,)), tmp_path / "out", "torchao")


@needs("torchao")
@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.float4_e2m1fn_x2, "fp6_e2m3"])
def test_torchao_has_no_product_of_mx_weights_and_plain_inputs(element):
    """Why weights alone are refused. Fails when torchao learns it: then it can be supported."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common import KernelPreference

    x, bias = torch.randn(4, 64).bfloat16(), torch.zeros(64).bfloat16()
    for preference in KernelPreference:
        weight = MXTensor.to_mx(
            torch.randn(64, 64).bfloat16(),
            element,
            32,
            ScaleCalculationMode.FLOOR,
            preference,
            act_quant_kwargs=None,
        )
        for product in (
            lambda w: torch.nn.functional.linear(x, w),
            lambda w: x @ w.t(),
            lambda w: torch.addmm(bias, x, w.t()),
        ):
            with pytest.raises(AssertionError, match="weight-only quant not yet supported"):
                product(weight)
