"""Rotations of inputs that a runtime does: `transform_config` of compressed-tensors folders."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import dmx
from dmx.applying.apply import applied
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, FormatError, RunError
from dmx.exporting import make_plan
from dmx.exporting._fresh_load import rows_of
from dmx.exporting.verify import check_loading, default_tokens
from dmx.formats import FP8, MXFP4, MXFP8_E4M3, NVFP4
from dmx.models.linears import fused_group
from dmx.transforms.block import hadamard_block
from dmx.transforms.stage import Transform, transformed
from tests.exporting.conftest import mixed, needs

FUSED = "model.layers.0.self_attn.{q_proj,k_proj,v_proj}"


def rotation_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(32, 32, generator=generator, dtype=torch.float64))[0].float()


def rotated(model, name, formats=(MXFP4, MXFP8_E4M3)):
    assignment = mixed(model, formats, "fused")
    inputs = list(dict.fromkeys(map(fused_group, assignment.quantized)))
    transform = Transform(
        name,
        rotations={n: rotation_of(i) for i, n in enumerate(inputs)} if name == "learned" else {},
        inputs=frozenset(inputs[::2]) if name == "hadamard_selected" else frozenset(),
    )
    return transform.attach(assignment, model)


@needs("compressed-tensors")
@pytest.mark.parametrize("name", ["hadamard_block", "hadamard_selected", "learned"])
def test_compressed_tensors_applies_the_rotations_of_the_folder(
    model, tmp_path, loaded_apart, name
):
    assignment = rotated(model, name)
    done = dmx.export(model, assignment, tmp_path / "out", target="compressed_tensors")
    assert done.profile == "vllm" and 0 < done.verification.relative_error < 0.02
    assert "transformers ignores that key" in (done.folder / "README.md").read_text()
    files = dmx.load_exported(done.folder)
    alone = Assignment.load(done.folder / "assignment.json")
    if name == "learned":
        with pytest.raises(AssignmentError, match="needs it for its transform"):
            dmx.apply(model, alone)
    else:
        assert alone == assignment
    tokens = default_tokens(256)
    with applied(model, assignment, inputs=False):
        expected = rows_of(model, tokens, 2)["logits"]
    again = rows_of(files.model, tokens, 2)["logits"]
    if name == "learned":  # matrices come back up to their last bit
        torch.testing.assert_close(again, expected)
    else:
        assert torch.equal(again, expected)
    config = json.loads((done.folder / "config.json").read_text())
    groups = config["quantization_config"]["transform_config"]["config_groups"]
    targets = [layer for g in groups.values() for layer in g["apply"][0]["targets"]]
    matrices = {
        k: v for k, v in load_file(done.folder / "model.safetensors").items() if "_input." in k
    }
    if name == "learned":
        assert len(groups) == len(set(map(fused_group, targets))) == 8
        first = rotation_of(0) * 32**0.5
        for layer in ("q_proj", "k_proj", "v_proj"):
            assert torch.equal(matrices[f"model.layers.0.self_attn.{layer}.R0_input.weight"], first)
    else:
        assert list(groups) == ["R"] and groups["R"]["type"] == "hadamard" and not matrices
        assert len(targets) == (14 if name == "hadamard_block" else 10)


@needs("compressed-tensors")
def test_a_folder_whose_rotation_is_not_done_is_noticed(model, tmp_path, loaded_apart):
    assignment = rotated(model, "hadamard_block", (FP8, NVFP4))
    plan = make_plan(assignment, target="compressed_tensors").for_model(model)
    done = dmx.export(
        model, assignment, tmp_path / "out", target="compressed_tensors", verify=False
    )
    config = json.loads((done.folder / "config.json").read_text())
    config["quantization_config"]["transform_config"]["config_groups"]["R"]["apply"][0][
        "targets"
    ].pop()
    (done.folder / "config.json").write_text(json.dumps(config))
    with (
        transformed(model, plan.rotation, assignment.transformed),
        pytest.raises(
            RunError, match="with inputs rotated as its transform_config says, logits differ"
        ),
    ):
        check_loading(done.folder, plan, model)


def test_what_cannot_be_rotated_is_refused(model, make_tiny):
    assignment = rotated(model, "hadamard_block")
    with pytest.raises(FormatError, match="transformers ignores rotations without a word"):
        make_plan(assignment, target="compressed_tensors", profile="transformers", verify=False)
    for target in ("quark", "torchao"):
        with pytest.raises(FormatError, match=f"target={target} cannot rotate inputs"):
            make_plan(assignment, target=target, verify=False)
    lone = replace(
        assignment,
        formats={**assignment.formats, "model.layers.0.mlp.down_proj": "bf16"},
        input_formats=dict(assignment.formats),
    )
    with pytest.raises(FormatError, match="1 layers have a weight in bf16 and a rotated input"):
        make_plan(lone, target="compressed_tensors", verify=False)
    biased = make_tiny("qwen2", dtype="bfloat16").model
    with pytest.raises(FormatError, match=r"inputs of layers with a bias \(6 layers"):
        dmx.export(
            biased,
            rotated(biased, "hadamard_block"),
            "out",
            target="compressed_tensors",
            verify=False,
        )


def test_searches_for_vllm_may_rotate():
    dmx.SearchConfig(name="kl", transform="hadamard_block", target="vllm", family=["mxfp4", "fp8"])
    with pytest.raises(ValueError, match="rotates inputs at run time"):
        dmx.SearchConfig(name="kl", transform="hadamard_block", target="transformers")


def test_the_matrix_is_that_of_compressed_tensors():
    hadamard = pytest.importorskip("compressed_tensors.transform.utils.hadamard")
    theirs = hadamard.deterministic_hadamard_matrix(32, torch.float64, "cpu")
    assert torch.equal((theirs / 32**0.5).float(), hadamard_block())
