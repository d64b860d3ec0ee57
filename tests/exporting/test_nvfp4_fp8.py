"""compressed-tensors folders with NVFP4 and FP8 groups beside layers in BF16."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

import dmx
from dmx.applying.apply import applied
from dmx.applying.stored import StoredWeight
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, FormatError
from dmx.exporting import make_plan, read_assignment
from dmx.exporting._fresh_load import rows_of
from dmx.exporting.plan import LAYOUTS
from dmx.exporting.recipes import RECIPES
from dmx.exporting.verify import default_tokens
from dmx.exporting.writing import read_headers
from dmx.formats import BF16, FP8, MXFP4, NVFP4
from tests.exporting.conftest import mixed, needs

FORMATS = (NVFP4, FP8, BF16)


def stored(kind, model, assignment):
    """The assignment with its weights as they are, rounded or learned."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 256, (2, 16), generator=generator)]
    if kind == "nearest":
        return assignment
    assignment = dmx.calibrate_inputs(model, assignment, batches)
    if kind == "gptq":
        return dmx.gptq(model, assignment, batches)
    return dmx.learn_weights(model, assignment, batches, dmx.LearnConfig(steps=1, warmup=0))


@needs("compressed-tensors")
@pytest.mark.parametrize("kind", ["nearest", "gptq", "learned"])
def test_transformers_loads_them_with_equal_logits_and_so_does_dmx(
    model, tmp_path, loaded_apart, kind
):
    assignment = stored(kind, model, mixed(model, FORMATS))
    done = dmx.export(model, assignment, tmp_path / "out", target="compressed_tensors")
    assert done.profile == "transformers" and done.verification.equal
    assert done.bytes["quantized_bytes"] == done.bytes["bits_per_element_bytes"]
    tokens = default_tokens(256)
    with applied(model, assignment, inputs=False):
        expected = rows_of(model, tokens, 2)["logits"]
    files = dmx.load_exported(done.folder)
    assert torch.equal(rows_of(files.model, tokens, 2)["logits"], expected)
    bare = dmx.restore(files.model)  # what an evaluation of the folder does
    with applied(bare, files.assignment, inputs=False):
        assert torch.equal(rows_of(bare, tokens, 2)["logits"], expected)


def test_groups_and_tensors_are_those_of_the_formats(model, tmp_path):
    assignment = mixed(model, FORMATS)
    done = dmx.export(
        model, assignment, tmp_path / "out", target="compressed_tensors", verify=False
    )
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    groups = {g["format"]: g for g in config["config_groups"].values()}
    assert set(groups) == {"nvfp4-pack-quantized", "float-quantized"}
    assert config["format"] == "mixed-precision"
    kept = [layer for layer, f in assignment.formats.items() if f == "bf16"]
    assert kept and set(kept) <= set(config["ignore"]) and "lm_head" in config["ignore"]
    of_nvfp4 = groups["nvfp4-pack-quantized"]["weights"]
    assert (of_nvfp4["strategy"], of_nvfp4["group_size"]) == ("tensor_group", 16)
    assert of_nvfp4["scale_dtype"] == "torch.float8_e4m3fn"
    assert groups["float-quantized"]["weights"]["strategy"] == "channel"
    headers = read_headers(done.folder)
    for layer, name in assignment.formats.items():
        out, into = assignment.shapes[layer]
        own = {
            k.removeprefix(f"{layer}."): (v.dtype, v.shape)
            for k, v in headers.items()
            if k.startswith(f"{layer}.")
        }
        assert (
            own
            == {
                "nvfp4": {
                    "weight_packed": (torch.uint8, (out, into // 2)),
                    "weight_scale": (torch.float8_e4m3fn, (out, into // 16)),
                    "weight_global_scale": (torch.float32, (1,)),
                },
                "fp8": {
                    "weight": (torch.float8_e4m3fn, (out, into)),
                    "weight_scale": (torch.float32, (out, 1)),
                },
                "bf16": {"weight": (torch.bfloat16, (out, into))},
            }[name]
        )
    read = read_assignment({"quantization_config": config}, model)
    assert dict(read.formats) == {k: f for k, f in assignment.formats.items() if f != "bf16"}


def test_fp8_scales_that_other_tools_write_in_bf16_are_read(generator):
    weight = torch.randn(8, 64, generator=generator)
    layout = LAYOUTS["compressed_tensors"]
    tensors = layout.encode_stored(StoredWeight.of(weight, weight, FP8, "amax/448"))
    other = {**tensors, "weight_scale": tensors["weight_scale"].bfloat16()}
    expected = layout.decode(tensors, FP8, torch.float32)
    assert torch.equal(expected, dmx.fake_quant(weight, "fp8"))
    assert torch.equal(layout.decode(other, FP8, torch.float32), expected)


@needs("compressed-tensors")
def test_fp8_inputs_are_quantized_by_the_loader(model, tmp_path, loaded_apart):
    done = dmx.export(
        model, mixed(model, (FP8,)), tmp_path / "out", target="compressed_tensors", inputs=True
    )
    assert done.profile == "vllm" and "FP8: amax / 448 of each token" in done.input_rule
    assert done.verification.kl < 1e-3


@needs("compressed-tensors")
def test_inputs_that_were_always_zero_have_a_static_scale_to_divide_by(
    model, batches, tmp_path, loaded_apart
):
    dead = copy.deepcopy(model)
    with torch.no_grad():
        dead.get_input_embeddings().weight.zero_()
    assignment = dmx.calibrate_inputs(dead, mixed(dead, (FP8,)), batches, static=True)
    assert set(assignment.input_amax.values()) == {0.0}
    done = dmx.export(dead, assignment, tmp_path / "out", target="compressed_tensors", inputs=True)
    assert done.verification.kl == 0
    scales = [
        t for k, t in load_file(done.folder / "model.safetensors").items() if "input_scale" in k
    ]
    assert scales and all(0 < float(scale) < 1e-30 for scale in scales)
    assert dmx.load_exported(done.folder).assignment.input_amax == assignment.input_amax


@needs("compressed-tensors")
def test_static_scales_of_fp8_inputs_are_in_the_files_and_come_back(
    model, batches, tmp_path, loaded_apart
):
    assignment = dmx.calibrate_inputs(
        model, mixed(model, (FP8, NVFP4), "fused"), batches, static=True
    )
    assignment = dmx.share_scales(model, assignment)
    done = dmx.export(model, assignment, tmp_path / "out", target="compressed_tensors", inputs=True)
    assert "FP8: by static scales of the files" in done.input_rule
    assert done.verification.kl < 1e-3
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    groups = {g["format"]: g["input_activations"] for g in config["config_groups"].values()}
    stated = groups["float-quantized"]
    assert (stated["strategy"], stated["dynamic"], stated["num_bits"]) == ("tensor", False, 8)
    tensors = load_file(done.folder / "model.safetensors")
    of_fp8 = [layer for layer, f in assignment.formats.items() if f == "fp8"]
    assert {f"{layer}.input_scale" for layer in of_fp8} == {
        k for k in tensors if "input_scale" in k
    }
    for layer in of_fp8:
        expected = torch.tensor([assignment.input_amax[layer]]) / torch.tensor([448.0])
        assert torch.equal(tensors[f"{layer}.input_scale"], expected)
    (
        done.folder / "assignment.json"
    ).unlink()  # as another tool's folder, that says it in tensors alone
    read = dmx.load_exported(done.folder).assignment.input_amax
    assert read == pytest.approx(dict(assignment.input_amax), rel=2**-22)


def test_what_is_not_held_is_refused(model):
    assignment = mixed(model, FORMATS)
    with pytest.raises(AssignmentError, match=r"input_amax says nothing of .*calibrate_inputs"):
        make_plan(assignment, target="compressed_tensors", inputs=True, verify=False)
    for target in ("quark", "torchao"):
        with pytest.raises(FormatError, match="does not hold fp8, nvfp4"):
            make_plan(assignment, target=target, verify=False)
    for target in set(RECIPES) - {"llm_compressor"}:
        with pytest.raises(
            FormatError, match=r"written for MX formats alone; .* layers have others"
        ):
            make_plan(assignment, target=target)
    lone = Assignment(
        **{
            **assignment.__dict__,
            "formats": {
                **dict.fromkeys(assignment.formats, "bf16"),
                next(iter(assignment.formats)): "fp8",
            },
            "input_formats": dict.fromkeys(assignment.formats, "fp8"),
        }
    )
    with pytest.raises(FormatError, match="quantized input beside a weight in bf16"):
        make_plan(lone, target="compressed_tensors", inputs=True, verify=False)
    assert (
        make_plan(mixed(model, (MXFP4, FP8), "fused"), target="compressed_tensors").profile
        == "vllm"
    )
