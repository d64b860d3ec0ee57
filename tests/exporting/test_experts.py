"""Exports of experts: names as engines read them, bytes, loaded again by compressed-tensors and here."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dmx
from dmx.applying.stored import stored_weights
from dmx.assignment.assignment import make_assignment
from dmx.assignment.space import build_space
from dmx.errors import AssignmentError, FormatError
from dmx.exporting import make_plan, read_assignment
from dmx.formats import FP8, MXFP4, NVFP4, get_format
from dmx.models.experts import linear_experts
from dmx.numerics import quantize
from dmx.searching import SearchConfig, uniform_assignment
from tests.exporting.conftest import needs
from tests.mixtures import BLOCKS, STACKED, logits, mixture, token_ids

CT = {"target": "compressed_tensors", "profile": "transformers"}


@pytest.fixture(scope="module")
def model():
    return mixture(dtype=torch.bfloat16)


def alternating(model, *names, form="stacked", **options):
    """The formats in turn, unit by unit."""
    with linear_experts(model, form):
        space = build_space(model, tuple(map(get_format, names)), **options)
        return make_assignment(space, np.arange(len(space.units)) % len(names), model)


def uniform(model, block_format, **options):
    return uniform_assignment(model, block_format, SearchConfig(name="uniform", **options))


def applied_logits(model, assignment):
    dmx.apply(model, assignment, inputs=False)
    found = logits(model)
    dmx.restore(model)
    return found


def test_experts_that_a_block_keeps_whole_are_ignored_by_one_pattern(model, tmp_path):
    made = uniform(model, MXFP4)
    formats = {k: "bf16" if k.startswith(BLOCKS[0]) else f for k, f in made.formats.items()}
    assignment = dataclasses.replace(made, formats=formats)
    folder = dmx.export(model, assignment, tmp_path / "x", **CT, verify=False).folder
    body = json.loads((folder / "config.json").read_text())["quantization_config"]
    of_experts = [name for name in body["ignore"] if ".experts" in name.replace("\\", "")]
    assert of_experts == [r"re:model\.layers\.0\.mlp\.experts[.].*"]
    with linear_experts(model, "split"):
        read = read_assignment({"quantization_config": body}, model)
    experts = [layer for layer in read.formats if ".experts." in layer]
    assert len(experts) == 12 and all(layer.startswith(BLOCKS[1]) for layer in experts)


@pytest.mark.parametrize("target", ["compressed_tensors", "quark"])
def test_files_hold_each_expert_under_its_own_name(model, target, tmp_path):
    assignment = alternating(model, "mxfp4", "mxfp6_e2m3")
    codes = "weight_packed" if target == "compressed_tensors" else "weight"
    done = dmx.export(model, assignment, tmp_path / "x", target=target, verify=False)
    files = load_file(tmp_path / "x" / "model.safetensors")
    experts = {name for name in files if ".experts." in name}
    assert experts == {
        f"{block}.{e}.{kind}_proj.{part}"
        for block in BLOCKS for e in range(4) for kind in ("gate", "up", "down") for part in (codes, "weight_scale")
    }  # fmt: skip
    for layer, block_format in assignment.formats.items():
        if layer in STACKED[:2]:
            path, kind = layer.rsplit(".", 1)
            whole = model.get_parameter(layer)[2]
            parts = dict(zip(("gate_proj", "up_proj"), whole.chunk(2), strict=True))
            for name, weight in (parts if kind == "gate_up_proj" else {kind: whole}).items():
                wanted = quantize(weight, get_format(block_format))
                assert torch.equal(files[f"{path}.2.{name}.weight_scale"], wanted.scale_codes)
    expected = sum(
        n * m * get_format(assignment.formats[layer]).bits("bits_per_element", (n, m)) / 8
        for layer, (n, m) in assignment.shapes.items()
    )
    assert done.bytes["quantized_bytes"] == expected
    loaded = dmx.load_exported(tmp_path / "x")
    assert torch.equal(logits(loaded.model), applied_logits(model, assignment))
    assert f"{BLOCKS[1]}.3.down_proj" in loaded.assignment.formats


@needs("compressed-tensors")
@pytest.mark.usefixtures("loaded_apart")
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])  # the latter with biases
def test_compressed_tensors_decompresses_mixed_experts_to_the_same_logits(kind, tmp_path):
    model = mixture(kind, torch.bfloat16)
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith(".bias"):
                bias.normal_()
    assignment = alternating(model, "mxfp4", "mxfp8_e4m3")
    done = dmx.export(model, assignment, tmp_path / "x", **CT)
    assert done.verification.equal
    assert "compressed-tensors' own decompressors" in done.verification.loader


@pytest.mark.parametrize("kind", ["learned", "nvfp4"])
def test_weights_that_were_rounded_together_are_written_apart(model, kind, tmp_path):
    assignment = uniform(model, NVFP4 if kind == "nvfp4" else MXFP4)
    if kind == "nvfp4":  # of q/k/v, too
        assignment = dmx.share_scales(model, assignment)
    else:
        assignment = dmx.learn_weights(model, assignment, token_ids(), dmx.LearnConfig(steps=1))
        assert set(STACKED) <= set(stored_weights(assignment))
    dmx.export(model, assignment, tmp_path / "x", target="compressed_tensors", verify=False)
    loaded = dmx.load_exported(tmp_path / "x", inputs=False)
    assert torch.equal(logits(loaded.model), applied_logits(model, assignment))
    if kind == "nvfp4":
        files = load_file(tmp_path / "x" / "model.safetensors")
        scales = {
            float(files[f"{BLOCKS[0]}.{e}.{k}_proj.weight_global_scale"])
            for e in range(4)
            for k in ("gate", "up")
        }
        assert len(scales) == 1
    else:
        other = mixture(dtype=torch.bfloat16)
        with torch.no_grad():
            other.get_parameter(STACKED[0])[1].neg_()
        with pytest.raises(AssignmentError, match=rf"made from other weights: {STACKED[0]}"):
            dmx.export(other, assignment, tmp_path / "y", target="compressed_tensors", verify=False)


def test_quark_names_the_experts_of_a_block_for_engines_too(model, tmp_path):
    assignment = uniform(model, MXFP4)
    dmx.export(model, assignment, tmp_path / "x", target="quark", verify=False)
    config = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    layers = config["layer_quant_config"]
    assert layers[BLOCKS[0]] == layers[f"{BLOCKS[0]}.3.up_proj"]
    assert f"{BLOCKS[0].removesuffix('.experts')}.gate" in config["exclude"]


def test_each_expert_may_have_a_format_of_its_own_in_files_that_no_engine_fuses(model, tmp_path):
    assignment = alternating(model, "mxfp4", "mxfp8_e4m3", form="split", experts="each")
    dmx.export(model, assignment, tmp_path / "x", **CT, verify=False)
    loaded = dmx.load_exported(tmp_path / "x")
    assert torch.equal(logits(loaded.model), applied_logits(model, assignment))
    with pytest.raises(
        FormatError, match=rf"needs one format in each fused group .*first {BLOCKS[0]}\."
    ):
        dmx.export(model, assignment, tmp_path / "y", target="compressed_tensors", profile="vllm")


@needs("compressed-tensors")
@pytest.mark.usefixtures("loaded_apart")
@pytest.mark.parametrize("exclude", [(), ("*.experts.*",)])
def test_mixtral_has_the_names_of_its_own_files_where_vllm_reads_them(exclude, tmp_path):
    mixtral = mixture("mixtral", torch.bfloat16)
    assignment = uniform(mixtral, MXFP4, exclude=list(exclude))
    vllm = {"target": "compressed_tensors", "profile": "vllm"}
    assert dmx.export(mixtral, assignment, tmp_path / "x", **vllm).verification.equal
    files = load_file(tmp_path / "x" / "model.safetensors")
    moe = "model.layers.1.block_sparse_moe"
    parts = ("weight",) if exclude else ("weight_packed", "weight_scale")
    assert {name for name in files if name.startswith(moe)} == {
        f"{moe}.gate.weight",
        *(f"{moe}.experts.{e}.w{i}.{part}" for e in range(4) for i in (1, 2, 3) for part in parts),
    }
    up = mixtral.get_parameter(STACKED[2])[3].chunk(2)[1]
    if exclude:
        assert torch.equal(files[f"{moe}.experts.3.w3.weight"], up)
    else:
        scales = quantize(up, MXFP4).scale_codes
        assert torch.equal(files[f"{moe}.experts.3.w3.weight_scale"], scales)
    body = json.loads((tmp_path / "x" / "config.json").read_text())
    (group,) = body["quantization_config"]["config_groups"].values()
    named = f"{moe}.experts.0.w2"
    assert (named in group["targets"]) is not bool(exclude) and ".mlp." not in json.dumps(body)
    loaded = dmx.load_exported(tmp_path / "x")
    assert torch.equal(logits(loaded.model), applied_logits(mixtral, assignment))
    with linear_experts(mixtral, "split"):
        read = read_assignment(body, mixtral)
    assert (f"{BLOCKS[1]}.0.down_proj" in read.formats) is not bool(exclude)


def test_names_that_vllm_does_not_read_are_said(tmp_path):
    mixtral = mixture("mixtral", torch.bfloat16)
    assignment = uniform(mixtral, MXFP4)
    with pytest.warns(
        UserWarning, match="reads the experts of 'mixtral' .*amd-quark can. For vLLM"
    ):
        dmx.export(mixtral, assignment, tmp_path / "x", target="quark", verify=False)
    with pytest.warns(UserWarning, match="target=vllm_quark: vLLM reads the experts of 'mixtral'"):
        search = SearchConfig(name="random", target="vllm_quark", family="mxfp8_mxfp4")
        dmx.search(mixtral, token_ids(), dmx.Budget(5.0), search)


def test_experts_in_fp8_need_inputs_for_vllm(model, tmp_path):
    vllm = {"target": "compressed_tensors", "profile": "vllm", "verify": False}
    with pytest.raises(
        FormatError, match=rf"vLLM runs experts in fp8 .*first {BLOCKS[0]}\.0\.gate_proj"
    ):
        dmx.export(model, uniform(model, FP8), tmp_path / "x", **vllm)
    dmx.export(model, uniform(model, FP8), tmp_path / "x", **vllm, inputs=True)
    four = uniform(model, MXFP4)
    four = dataclasses.replace(four, input_formats=dict.fromkeys(four.formats, "fp8"))
    with pytest.raises(
        FormatError, match="beside experts in mxfp4 are the choice of vLLM's kernel"
    ):
        make_plan(four, **vllm, inputs=True)


@pytest.mark.parametrize(
    "target, words",
    [
        (
            "torchao",
            r"target=torchao: how it holds quantized experts is not known .*compressed_tensors, quark",
        ),
        ("llama_cpp", r"target=llama_cpp: how it holds quantized experts"),
        (
            "quark",
            r"target=quark, verify=true: amd-quark loads no quantized experts .*verify=false",
        ),
    ],
)
def test_what_cannot_hold_experts_says_so(model, target, words, tmp_path):
    with pytest.raises(FormatError, match=words):
        dmx.export(model, uniform(model, MXFP4), tmp_path / "x", target=target)
    with pytest.raises(FormatError, match="cannot rotate the inputs of experts"):
        rotated = uniform(model, MXFP4, transform="hadamard_block")
        dmx.export(model, rotated, tmp_path / "x", target="compressed_tensors")
