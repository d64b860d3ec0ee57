"""NVFP4 as vLLM runs it: inputs too, and one global scale for the weights of a fused group."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import dmx
from dmx.applying.apply import applied
from dmx.applying.sharing import shares_scales, sharing_groups
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, FormatError
from dmx.exporting import make_plan
from dmx.exporting._fresh_load import rows_of
from dmx.exporting.verify import default_tokens
from dmx.formats import BF16, FP8, MXFP4, NVFP4
from tests.exporting.conftest import mixed, needs

VLLM = {"target": "compressed_tensors", "profile": "vllm"}


@pytest.fixture
def assignment(model, batches):
    made = mixed(
        model,
        (NVFP4, FP8, BF16),
        "fused",
        fixed={"*.1.mlp.gate_proj": "nvfp4", "*.1.mlp.up_proj": "nvfp4"},
    )
    return dmx.calibrate_inputs(model, made, batches)


def logits_of(model, assignment, inputs):
    with applied(model, assignment, inputs=inputs):
        return rows_of(model, default_tokens(256), 2)["logits"]


@needs("compressed-tensors")
@pytest.mark.parametrize("inputs", [False, True], ids=["W", "W+A"])
def test_vllm_gets_shared_scales_and_dmx_quantizes_by_them(
    model, assignment, tmp_path, loaded_apart, inputs
):
    with pytest.warns(UserWarning, match=r"2 fused groups get one global scale each"):
        done = dmx.export(model, assignment, tmp_path / "out", inputs=inputs, **VLLM)
    own = Assignment.load(done.folder / "assignment.json")
    groups = sharing_groups(assignment)
    assert shares_scales(own) and not shares_scales(assignment)
    assert set(own.weight_amax) == {layer for group in groups.values() for layer in group}
    tensors = load_file(done.folder / "model.safetensors")
    for layers in groups.values():
        weights = {float(tensors[f"{n}.weight_global_scale"]) for n in layers}
        largest = max(model.get_submodule(n).weight.abs().max().item() for n in layers)
        assert weights == {float(torch.tensor(2688.0) / largest)}
        if inputs:
            amax = torch.tensor(assignment.input_amax[layers[0]])
            of_inputs = {float(tensors[f"{n}.input_global_scale"]) for n in layers}
            assert of_inputs == {float(torch.tensor(2688.0) / amax)}
    scales = [name for name in tensors if name.endswith("input_global_scale")]
    assert len(scales) == (sum(f == "nvfp4" for f in own.formats.values()) if inputs else 0)
    assert done.verification.equal != inputs and done.verification.kl < 1e-3
    expected = logits_of(model, own, inputs)
    assert torch.equal(
        rows_of(dmx.load_exported(done.folder).model, default_tokens(256), 2)["logits"], expected
    )
    assert not torch.equal(logits_of(model, assignment, inputs), expected)
    (done.folder / "assignment.json").unlink()  # as of another tool
    other = dmx.load_exported(done.folder, inputs=inputs)
    again = rows_of(other.model, default_tokens(256), 2)["logits"]
    assert torch.equal(again, expected) or inputs  # an input's scale comes back up to its last bit
    assert inputs == bool(other.assignment.input_amax)


def test_config_says_that_scales_of_inputs_lie_in_the_file(model, assignment, tmp_path):
    shared = dmx.share_scales(model, assignment)
    with pytest.warns(UserWarning) as warned:
        done = dmx.export(
            model, shared, tmp_path / "out", inputs=True, verify=False, target="compressed_tensors"
        )
    (only,) = warned
    assert (
        "on Hopper vLLM has inputs otherwise than the files ask: those of nvfp4 left alone"
        in str(only.message)
    )
    assert done.profile == "vllm" and dmx.share_scales(model, shared) is shared
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    asked = {g["format"]: g["input_activations"] for g in config["config_groups"].values()}
    assert asked["nvfp4-pack-quantized"]["dynamic"] == "local"
    assert asked["nvfp4-pack-quantized"]["strategy"] == "tensor_group"
    assert asked["float-quantized"]["dynamic"] is True


@pytest.mark.parametrize("kind", ["gptq", "learned"])
def test_stored_weights_keep_the_scales_that_they_were_made_for(
    model, assignment, batches, tmp_path, kind
):
    def made(start):
        if kind == "gptq":
            return dmx.gptq(model, start, batches)
        return dmx.learn_weights(model, start, batches, dmx.LearnConfig(steps=1, warmup=0))

    apart = made(assignment)
    with pytest.raises(
        FormatError, match=r"stored with more, one for each layer or row, first .*q_proj"
    ):
        make_plan(apart, verify=False, **VLLM)
    with pytest.raises(AssignmentError, match="others would round them again"):
        dmx.share_scales(model, apart)
    assert make_plan(apart, target="compressed_tensors", verify=False).profile == "transformers"
    shared = made(dmx.share_scales(model, assignment))
    assert shares_scales(shared)
    done = dmx.export(model, shared, tmp_path / "out", inputs=True, verify=False, **VLLM)
    files = dmx.load_exported(done.folder)
    logits = rows_of(files.model, default_tokens(256), 2)["logits"]
    assert torch.equal(logits, logits_of(model, shared, inputs=True))


def test_scales_of_smaller_weights_are_refused(model, assignment, make_tiny, tmp_path):
    shared = dmx.share_scales(model, assignment)
    other = make_tiny("llama").model
    with torch.no_grad():
        for layer in shared.weight_amax:
            other.get_submodule(layer).weight.mul_(1.5)
    words = r"weight_amax of the assignment says .* of model.*, whose weight reaches .* here: .* made for other weights"
    with pytest.raises(AssignmentError, match=words):
        dmx.apply(other, shared)
    with pytest.raises(AssignmentError, match=words):
        dmx.export(other, shared, tmp_path / "out", verify=False, **VLLM)
    assert not (tmp_path / "out").exists()
    dmx.apply(other, shared, weights=False)


def test_inputs_of_a_group_must_agree(model, assignment):
    layer = next(iter(sharing_groups(assignment).values()))[0]
    wrong = replace(assignment, input_amax={**assignment.input_amax, layer: 9.0})
    with pytest.raises(FormatError, match=r"read one input, and input_amax says 9\.0 and"):
        make_plan(wrong, inputs=True, verify=False, **VLLM)


def test_a_search_for_vllm_shares_them(model, batches, tmp_path):
    settings = dmx.SearchConfig(name="uniform", family=["nvfp4", "fp8"], target="vllm")
    found = dmx.search(model.float(), batches, dmx.Budget(4.5), settings).assignment
    assert set(found.formats.values()) == {"nvfp4"} and shares_scales(found)
    assert Assignment.load(found.save(tmp_path / "assignment.json")) == found


@needs("compressed-tensors")
def test_both_four_bit_formats_lie_in_one_folder(model, tmp_path, loaded_apart):
    done = dmx.export(
        model, mixed(model, (NVFP4, MXFP4)), tmp_path / "out", target="compressed_tensors"
    )
    assert done.verification.equal
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    kinds = {g["format"] for g in config["config_groups"].values()}
    assert kinds == {"nvfp4-pack-quantized", "mxfp4-pack-quantized"}
