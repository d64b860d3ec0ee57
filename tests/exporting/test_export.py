"""What is exported is what was assigned: files, bytes, logits in the loaders and in our own."""

import dataclasses
import json
import math
import warnings

import pytest
import torch

import dmx
from dmx.applying.linear import quantized_layers
from dmx.applying.quantizers import BlockQuantizer
from dmx.assignment.assignment import Assignment
from dmx.assignment.targets import TARGETS
from dmx.errors import AssignmentError
from dmx.exporting import make_plan
from dmx.exporting._fresh_load import rows_of
from dmx.exporting.layouts import layers_of
from dmx.exporting.plan import LAYOUTS
from dmx.exporting.verify import as_loaded, check_loading, default_tokens
from dmx.exporting.writing import read_headers
from dmx.formats import FP8, MXFP4, MXFP6_E2M3, MXFP8_E4M3
from dmx.weights.gptq import gptq
from experiments.running.sources import read_source
from tests.exporting.conftest import HELD, VLLM, mixed, needs, unequal

ARCHITECTURES = ("llama", "smollm2", "qwen2", "qwen3")  # smollm2 is tied, qwen2 has biases


def export(model, assignment, folder, target, **options):
    return dmx.export(model, assignment, folder, target=target, **options)


# ---------------------------------------------------------------- loaders of other projects


@needs("compressed-tensors")
@pytest.mark.slow
def test_compressed_tensors_loads_in_a_fresh_process(make_tiny, tmp_path):
    loaded = make_tiny("llama")  # float32: exported, and compared, in bf16
    assignment = mixed(loaded.model, HELD["compressed_tensors"])
    before = {k: v.clone() for k, v in loaded.model.state_dict().items()}
    done = export(
        loaded.model,
        assignment,
        tmp_path / "out",
        "compressed_tensors",
        tokenizer=loaded.tokenizer,
        max_shard_bytes=40_000,
    )
    assert done.profile == "transformers" and done.verification.equal
    assert done.verification.max_difference == 0.0
    index = json.loads((done.folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(read_headers(done.folder))
    assert len(set(index["weight_map"].values())) > 2
    assert [p.name for p in tmp_path.iterdir()] == ["out"]  # nothing temporary is left
    after = loaded.model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    card = (done.folder / "README.md").read_text()
    for words in ("bit for bit", "| mxfp6_e2m3 |", "compressed-tensors 0.", "vLLM", "SGLang"):
        assert words in card
    for name in ("tokenizer.json", "generation_config.json", "assignment.json"):
        assert (done.folder / name).is_file()


@needs("compressed-tensors")
def test_compressed_tensors_loads_weights_that_gptq_rounded(make_tiny, tmp_path, loaded_apart):
    model = make_tiny("llama", dtype="bfloat16").model
    batches = list(torch.randint(0, 257, (3, 2, 48), generator=torch.Generator().manual_seed(1)))
    rounded = gptq(model, mixed(model, HELD["compressed_tensors"]), batches)
    assert export(model, rounded, tmp_path / "out", "compressed_tensors").verification.equal


def test_formats_of_finished_weights_are_not_given_to_other_weights(make_tiny, tmp_path):
    model = make_tiny("llama", dtype="bfloat16").model
    batches = list(torch.randint(0, 257, (2, 2, 32), generator=torch.Generator().manual_seed(1)))
    plain, to = mixed(model, VLLM), {"target": "quark", "verify": False}
    rounded = gptq(model, plain, batches)
    with pytest.warns(
        UserWarning, match="writes names alone: its tool .* not those that the .* gptq"
    ):
        dmx.export(model, rounded, tmp_path / "names", target="auto_round")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dmx.export(model, plain, tmp_path / "plain", target="auto_round")
    for name, assignment in (("rounded", rounded), ("nearest", plain)):
        dmx.export(model, assignment, tmp_path / name, **to)
    dmx.export(model, tmp_path / "nearest" / "assignment.json", tmp_path / "again", **to)
    dmx.export(model, tmp_path / "names" / "assignment.json", tmp_path / "both", **to)
    path = tmp_path / "rounded" / "assignment.json"
    for read in (
        lambda: dmx.export(model, path, tmp_path / "wrong", **to),
        lambda: read_source(str(path), "assignment"),
    ):
        with pytest.raises(AssignmentError, match=r"needs it for its weights: .* exported folder"):
            read()
    assert read_source(str(path.parent), "assignment").files == path.parent
    assert not (tmp_path / "wrong").exists()
    path = path.rename(tmp_path / "elsewhere.json")
    with pytest.raises(AssignmentError, match="needs it for its weights"):
        dmx.apply(model, Assignment.load(path))
    rounded.save(tmp_path / "assignment.json")  # and what it needs
    dmx.export(model, path, tmp_path / "right", **to)


@needs("compressed-tensors")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compressed_tensors_equals_the_fake_quantized_model(
    architecture, make_tiny, tmp_path, loaded_apart
):
    loaded = make_tiny(architecture, dtype="bfloat16")
    for name, formats, units in (
        ("vllm", VLLM, "fused"),
        ("transformers", HELD["compressed_tensors"], "layer"),
    ):
        assignment = mixed(loaded.model, formats, units)
        done = export(loaded.model, assignment, tmp_path / name, "compressed_tensors")
        assert done.profile == name and done.verification.equal


@needs("compressed-tensors")
def test_inputs_quantized_by_compressed_tensors_follow_its_own_rule(
    make_tiny, tmp_path, loaded_apart
):
    loaded = make_tiny("qwen3", dtype="bfloat16")
    assignment = mixed(loaded.model, VLLM)
    done = export(loaded.model, assignment, tmp_path / "out", "compressed_tensors", inputs=True)
    found = done.verification
    assert not found.equal and 0 < found.max_difference < 0.5 and 0 < found.kl < 1e-2
    facts = json.loads((done.folder / "dmx_export.json").read_text())
    assert "one mantissa bit" in facts["input_rule"] and facts["inputs"] is True
    card = (done.folder / "README.md").read_text()
    assert f"{found.max_difference:.4g}" in card
    assert (
        "own rule: `even` for mxfp4, `rceil` for mxfp8_e4m3). The assignment has `floor`." in card
    )


@needs("torchao")
def test_torchao_loads_all_five_formats_from_several_files(make_tiny, tmp_path, loaded_apart):
    loaded = make_tiny("qwen2", dtype="bfloat16")
    done = export(
        loaded.model,
        mixed(loaded.model, HELD["torchao"]),
        tmp_path / "out",
        "torchao",
        inputs=True,
        max_shard_bytes=40_000,
    )
    assert done.verification.equal  # inputs included: its FLOOR is our floor


@needs("torchao")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_torchao_equals_the_fake_quantized_model(architecture, make_tiny, tmp_path, loaded_apart):
    loaded = make_tiny(architecture, dtype="bfloat16")
    assignment = mixed(loaded.model, HELD["torchao"])
    done = export(loaded.model, assignment, tmp_path / "out", "torchao", inputs=True)
    assert done.verification.equal


def _fixed_inputs(model, formats):
    """Formats of weights in turn, every input in MXFP8: the layers in MXFP8 have equal operands."""
    return mixed(model, formats, "fused", input_format="mxfp8_e4m3")


def _w4a8(model, formats):
    """The same with inputs in FP8."""
    return mixed(model, formats, "fused", input_format="fp8")


@pytest.mark.parametrize(
    ("target", "make", "formats", "bound"),
    [
        pytest.param("compressed_tensors", unequal, VLLM, 1e-2, marks=needs("compressed-tensors")),
        pytest.param("quark", unequal, (MXFP4, MXFP6_E2M3), 1e-4, marks=needs("amd-quark")),
        pytest.param(
            "compressed_tensors", _w4a8, (MXFP4, FP8), 1e-2, marks=needs("compressed-tensors")
        ),
        pytest.param("quark", _fixed_inputs, (MXFP4, MXFP6_E2M3), 1e-4, marks=needs("amd-quark")),
    ],
)
def test_operands_of_unequal_formats_run_in_the_loader(
    target, make, formats, bound, make_tiny, tmp_path, loaded_apart
):
    """Had the loader taken the weight's format for the inputs, the logits would be those of another
    assignment."""
    model = make_tiny("qwen3", dtype="bfloat16").model
    assignment = make(model, formats)
    done = export(model, assignment, tmp_path / "out", target, inputs=True)
    assert done.profile == (
        None if target == "quark" else "vllm" if FP8 in formats else "transformers"
    )
    joint = dataclasses.replace(assignment, input_formats=None)
    tokens = default_tokens(model.config.vocab_size)
    logits = []
    for applied in (assignment, joint):
        dmx.apply(model, applied)
        logits.append(rows_of(model, tokens, len(tokens))["logits"].double().log_softmax(-1))
        dmx.restore(model)
    apart = float((logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean())
    # What is left is the loaders' own scale rule.
    assert done.verification.kl < bound and done.verification.kl < 0.5 * apart
    back = dmx.load_exported(done.folder)
    assert back.assignment.input_formats == assignment.input_formats and back.inputs


@needs("amd-quark")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quark_equals_the_fake_quantized_model(architecture, make_tiny, tmp_path, loaded_apart):
    loaded = make_tiny(architecture, dtype="bfloat16")
    assignment = mixed(loaded.model, HELD["quark"])
    done = export(loaded.model, assignment, tmp_path / "out", "quark")
    assert done.verification.equal and "mxfp8_e4m3" in assignment.formats.values()
    loader = next(x for x in TARGETS["quark"].loaders if x.name == "transformers + amd-quark")
    assert loader.formats == set(map(str, HELD["quark"]))  # what the table says was just loaded


@needs("amd-quark")
def test_inputs_quantized_by_quark_differ_little(make_tiny, tmp_path, loaded_apart):
    model = make_tiny("qwen3", dtype="bfloat16").model
    assignment = mixed(model, HELD["quark"])
    found = export(model, assignment, tmp_path / "out", "quark", inputs=True).verification
    assert not found.equal and found.max_difference < 0.1 and found.kl < 1e-4


def test_configs_of_torchao_are_those_it_writes(make_tiny):
    torchao = pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[export]'")
    from torchao.core.config import config_to_dict
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common import KernelPreference

    assert torchao
    model = make_tiny("llama").model
    assignment = mixed(model, HELD["torchao"])
    ours = LAYOUTS["torchao"].config(layers_of(assignment, inputs=True), [])["quant_type"][
        "default"
    ]
    elements = {
        "mxfp4": torch.float4_e2m1fn_x2,
        "mxfp6_e2m3": "fp6_e2m3",
        "mxfp6_e3m2": "fp6_e3m2",
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
    }
    for layer, name in assignment.formats.items():
        theirs = MXDynamicActivationMXWeightConfig(
            activation_dtype=elements[name],
            weight_dtype=elements[name],
            kernel_preference=KernelPreference.EMULATED,
            scaling_mode=ScaleCalculationMode.FLOOR,
        )
        assert ours["_data"]["fqn_to_config"][layer] == config_to_dict(theirs)


# ---------------------------------------------------------------- files and our own loader


@pytest.mark.parametrize("target", HELD)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_our_loader_gives_the_fake_quantized_model(architecture, target, make_tiny, tmp_path):
    loaded = make_tiny(architecture, dtype="bfloat16")
    inputs = target == "torchao"
    assignment = mixed(loaded.model, HELD[target])
    export(
        loaded.model,
        assignment,
        tmp_path / "out",
        target,
        inputs=inputs,
        verify=False,
        tokenizer=loaded.tokenizer,
    )
    back = dmx.load_exported(tmp_path / "out")
    assert back.assignment == assignment and (back.target, back.inputs) == (target, inputs)
    tokens = default_tokens(288)
    with as_loaded(loaded.model) as reference:
        dmx.apply(reference, assignment, inputs=inputs)
        expected = rows_of(reference, tokens, 2)
    found = rows_of(back.model, tokens, 2)
    assert torch.equal(found["logits"], expected["logits"])
    measured = [dmx.perplexity(m, tokens.flatten(), window=32) for m in (back.model, reference)]
    assert measured[0] == measured[1] and math.isfinite(measured[0])
    assert back.tokenizer.encode("a b") == loaded.tokenizer.encode("a b")


@pytest.mark.parametrize("target", ["compressed_tensors", "quark"])
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
def test_bytes_are_bits_per_element_to_the_byte(rule, target, make_tiny, tmp_path):
    model = make_tiny("smollm2", dtype="bfloat16").model
    found = mixed(model, HELD[target])
    assignment = Assignment.from_dict(
        {
            **json.loads(found.save(tmp_path / "a.json").read_text()),
            "scale_rules": {"weight": dict.fromkeys(HELD[target], rule)},
        }
    )
    done = export(model, assignment, tmp_path / "out", target, verify=False)
    headers = read_headers(done.folder)
    by_hand = sum(
        spec.bytes
        for name, spec in headers.items()
        if name.rpartition(".")[0] in assignment.formats
    )
    elements = sum(out * into for out, into in assignment.shapes.values())
    assert by_hand == done.bytes["quantized_bytes"] == done.bytes["bits_per_element_bytes"]
    assert by_hand == round(elements * assignment.bits["bits_per_element"] / 8)
    assert sum(spec.bytes for spec in headers.values()) == done.bytes["total"]
    assert f"{by_hand:,} bytes" in (done.folder / "README.md").read_text()
    tokens = default_tokens(288)
    back = dmx.load_exported(done.folder).model
    with as_loaded(model) as reference:
        dmx.apply(reference, assignment, inputs=False)
        expected = rows_of(reference, tokens, 2)["logits"]
    assert torch.equal(rows_of(back, tokens, 2)["logits"], expected)


def test_torchao_says_that_it_stores_six_bits_in_bytes(make_tiny, tmp_path):
    model = make_tiny("llama").model
    assignment = mixed(model, (MXFP6_E2M3,))
    done = export(model, assignment, tmp_path / "out", "torchao", inputs=True, verify=False)
    elements = sum(out * into for out, into in assignment.shapes.values())
    assert done.bytes["quantized_bytes"] == elements * 33 // 32
    assert "whole bytes" in (done.folder / "README.md").read_text()
    assert "Not verified" in (done.folder / "README.md").read_text()


def test_one_layer_is_quantized_at_a_time(make_tiny, tmp_path, monkeypatch):
    model = make_tiny("llama").model
    assignment = mixed(model, VLLM)
    layout = LAYOUTS["quark"]
    alive = []
    import weakref

    def encode(weight, *rest):
        assert not [r for r in alive if r() is not None], "the layer before is still in memory"
        made = layout.encode(weight, *rest)
        alive.extend(weakref.ref(t) for t in made.values())
        return made

    import dataclasses

    monkeypatch.setitem(LAYOUTS, "quark", dataclasses.replace(layout, encode=encode))
    export(model, assignment, tmp_path / "out", "quark", verify=False)
    assert len(alive) == 2 * len(assignment.formats)


def test_the_assignment_alone_and_a_model_by_name(make_tiny, tmp_path):
    loaded = make_tiny("llama", dtype="bfloat16")
    assignment = mixed(loaded.model, VLLM)
    done = export(loaded.model, assignment, tmp_path / "names", "assignment")
    assert Assignment.load(done.folder / "assignment.json") == assignment
    assert not list(done.folder.glob("*.safetensors"))
    loaded.model.save_pretrained(tmp_path / "source")
    loaded.tokenizer.save_pretrained(tmp_path / "source")
    by_name = export(
        str(tmp_path / "source"),
        done.folder / "assignment.json",
        tmp_path / "out",
        "quark",
        verify=False,
    )
    assert dmx.load_exported(by_name.folder).assignment == assignment


def test_rotary_frequencies_that_were_rounded_are_computed_anew(make_tiny):
    model = make_tiny("llama", dtype="float32").model
    exact = model.model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    with as_loaded(model) as reference:
        assert reference is not model
        assert torch.equal(reference.model.rotary_emb.inv_freq, exact)
    model.model.rotary_emb.inv_freq = exact
    model.model.rotary_emb.original_inv_freq = exact
    with as_loaded(model) as reference:
        assert reference is model  # no copy where none is needed


def test_bf16_layers_of_an_assignment_stay_in_bf16(make_tiny, tmp_path):
    model = make_tiny("llama").model
    body = json.loads(mixed(model, (MXFP4, MXFP8_E4M3)).save(tmp_path / "a.json").read_text())
    layer = "model.layers.1.mlp.down_proj"
    body["formats"][layer] = "bf16"
    body["search"]["weighting"] = "layers"  # the averages are not those of the formats
    assignment = Assignment.from_dict(body)
    done = export(model, assignment, tmp_path / "out", "compressed_tensors", verify=False)
    assert read_headers(done.folder)[f"{layer}.weight"].dtype == torch.bfloat16
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert layer in config["ignore"] and layer not in assignment.quantized
    stated = sum(layer.bytes for layer in layers_of(assignment).values())
    assert done.bytes["quantized_bytes"] == stated
    dmx.load_exported(done.folder)


@needs("compressed-tensors")
def test_a_folder_can_be_checked_again(make_tiny, tmp_path, loaded_apart):
    model = make_tiny("llama", dtype="bfloat16").model
    assignment = mixed(model, VLLM)
    done = export(model, assignment, tmp_path / "out", "compressed_tensors", verify=False)
    plan = make_plan(assignment, target="compressed_tensors")
    tokens = torch.randint(288, (5, 16), generator=torch.Generator().manual_seed(1))
    found = check_loading(done.folder, plan, model, tokens=tokens)
    assert found.equal and found.tokens == 80 and found.loss == found.reference_loss


@needs("compressed-tensors")
def test_the_rule_recorded_for_compressed_tensors_is_all_the_difference(
    make_tiny, tmp_path, loaded_apart
):
    """With inputs by `even`, as its rule is for MXFP4, our model equals the loaded one."""
    model = make_tiny("llama", dtype="bfloat16").model
    assignment = mixed(model, (MXFP4,))
    options = {"target": "compressed_tensors", "inputs": True}
    found = dmx.export(model, assignment, tmp_path / "out", **options).verification
    assert not found.equal
    with as_loaded(model) as reference:
        dmx.apply(reference, assignment)
        for layer in quantized_layers(reference).values():
            layer.input_quantizer = BlockQuantizer(MXFP4, "even")
        even = rows_of(reference, default_tokens(288), 2)
    assert float(even["losses"].mean()) == found.loss
