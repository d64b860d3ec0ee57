"""ModelOpt's checkpoints: names, scales, and a reader of its formulas in a fresh process."""

import json

import pytest
import torch
from safetensors.torch import load_file

import dmx
from dmx.applying.apply import applied
from dmx.applying.sharing import shares_scales
from dmx.applying.stored import StoredWeight
from dmx.assignment.assignment import Assignment
from dmx.errors import FormatError, RunError
from dmx.exporting import make_plan, read_assignment
from dmx.exporting._fresh_load import rows_of
from dmx.exporting.plan import LAYOUTS
from dmx.exporting.verify import check_loading, default_tokens
from dmx.exporting.writing import read_headers
from dmx.files import sha256
from dmx.formats import BF16, FP8, MXFP4, NVFP4
from dmx.models.linears import fused_group
from tests.exporting.conftest import mixed

TARGET = {"target": "modelopt_checkpoint", "inputs": True}


@pytest.fixture
def assignment(model, batches):
    made = mixed(model, (NVFP4, FP8, BF16), "fused")
    return dmx.calibrate_inputs(model, made, batches, static=True)


def logits_of(model, assignment, inputs):
    with applied(model, assignment, inputs=inputs):
        return rows_of(model, default_tokens(256), 2)["logits"]


def test_a_search_for_it_states_all_scales_that_its_files_have(model, batches, tmp_path):
    config = dmx.SearchConfig(name="random", target="vllm_modelopt", family=["nvfp4", "fp8"])
    found = dmx.search(model, batches, dmx.Budget(6.0), config).assignment
    assert set(found.formats.values()) == {"nvfp4", "fp8"} == set(config.runtime.formats)
    assert shares_scales(found, per_tensor=True)
    again = dmx.calibrate_inputs(model, found, batches, static=True)
    assert found.input_amax == again.input_amax and set(found.input_amax) == set(found.formats)
    plan = make_plan(found, **TARGET, verify=False)
    assert plan.for_model(model) is plan


def test_names_and_scales_are_modelopts_and_its_formulas_give_our_weights(
    model, assignment, tmp_path, loaded_apart
):
    with pytest.warns(UserWarning, match="NVFP4 and FP8 weights of .* fused groups get one"):
        done = dmx.export(model, assignment, tmp_path / "out", **TARGET)
    own = Assignment.load(done.folder / "assignment.json")
    assert (
        done.verification.relative_error < 2**-8
        and "modelopt's formulas" in done.verification.loader
    )
    assert shares_scales(own, per_tensor=True) and not shares_scales(assignment, per_tensor=True)
    stated = json.loads((done.folder / "hf_quant_config.json").read_text())["quantization"]
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert stated["quant_algo"] == config["quant_algo"] == "MIXED_PRECISION"
    assert stated["quantized_layers"] == config["quantized_layers"]
    assert config["ignore"] == stated["exclude_modules"] and config["quant_method"] == "modelopt"
    assert {g["weights"]["num_bits"] for g in config["config_groups"].values()} == {4, 8}
    tensors, headers = load_file(done.folder / "model.safetensors"), read_headers(done.folder)
    of_groups = {}
    for layer, name in own.formats.items():
        out, into = own.shapes[layer]
        parts = {
            k.rpartition(".")[2]: (v.dtype, v.shape)
            for k, v in headers.items()
            if k.rpartition(".")[0] == layer
        }
        if name == "bf16":
            assert layer in stated["exclude_modules"] and layer not in stated["quantized_layers"]
            continue
        of_groups.setdefault(fused_group(layer), []).append(layer)
        scalar = (torch.float32, ())
        if name == "fp8":
            assert stated["quantized_layers"][layer] == {"quant_algo": "FP8"}
            assert parts == {
                "weight": (torch.float8_e4m3fn, (out, into)),
                "weight_scale": scalar,
                "input_scale": scalar,
            }
        else:
            assert stated["quantized_layers"][layer] == {"quant_algo": "NVFP4", "group_size": 16}
            assert parts == {
                "weight": (torch.uint8, (out, into // 2)),
                "weight_scale": (torch.float8_e4m3fn, (out, into // 16)),
                "weight_scale_2": scalar,
                "input_scale": scalar,
            }
    for layers in of_groups.values():
        name = "weight_scale" if own.formats[layers[0]] == "fp8" else "weight_scale_2"
        assert len({float(tensors[f"{n}.{name}"]) for n in layers}) == 1
        assert len({float(tensors[f"{n}.input_scale"]) for n in layers}) == 1
        top = 448.0 if name == "weight_scale" else 6 * 448.0
        largest = max(model.get_submodule(n).weight.abs().max().item() for n in layers)
        assert float(tensors[f"{layers[0]}.{name}"]) == pytest.approx(largest / top, rel=2**-8)
        seen = assignment.input_amax[layers[0]]
        assert float(tensors[f"{layers[0]}.input_scale"]) == pytest.approx(seen / top, rel=2**-8)


def test_dmx_reads_them_back_and_inputs_are_static(model, assignment, tmp_path):
    with pytest.warns(UserWarning, match="fused groups"):
        done = dmx.export(model, assignment, tmp_path / "out", verify=False, **TARGET)
    own = Assignment.load(done.folder / "assignment.json")
    files = dmx.load_exported(done.folder)
    again = rows_of(files.model, default_tokens(256), 2)["logits"]
    expected = logits_of(model, own, inputs=True)
    torch.testing.assert_close(again, expected, rtol=0, atol=float(expected.abs().max()) * 2**-6)
    assert not torch.equal(logits_of(model, own, inputs=False), expected)
    read = read_assignment(done.folder, model)
    assert dict(read.formats) == {k: f for k, f in own.formats.items() if f != "bf16"}
    x = torch.randn(4, 64)
    assert own.amax_of_input(own.quantized[0]) is not None
    row = dmx.fake_quant(x, "fp8", amax=3.0)
    scale = torch.tensor(3.0 / 448).bfloat16().float()
    by_hand = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(row, by_hand)  # one scale for all tokens


def test_weights_of_four_bits_may_stay_alone(model, tmp_path, loaded_apart):
    made = dmx.share_scales(model, mixed(model, (NVFP4, BF16), "fused"))
    done = dmx.export(model, made, tmp_path / "out", target="modelopt_checkpoint")
    stated = json.loads((done.folder / "hf_quant_config.json").read_text())["quantization"]
    assert {x["quant_algo"] for x in stated["quantized_layers"].values()} == {"W4A16_NVFP4"}
    assert not [k for k in read_headers(done.folder) if k.endswith("input_scale")]
    broken = load_file(done.folder / "model.safetensors")
    from safetensors.torch import save_file

    layer = made.quantized[0]
    broken[f"{layer}.weight"] = broken[f"{layer}.weight"].roll(4)
    save_file(broken, done.folder / "model.safetensors", {"format": "pt"})
    plan = make_plan(made, target="modelopt_checkpoint")
    with pytest.raises(RunError, match="logits differ from the fake-quantized model's by"):
        check_loading(done.folder, plan, model)


def test_learned_weights_keep_one_scale(model, assignment, batches, tmp_path):
    shared = dmx.share_scales(model, assignment, per_tensor=True)
    for start, fits in ((assignment, False), (shared, True)):
        made = dmx.learn_weights(model, start, batches, dmx.LearnConfig(steps=1, warmup=0))
        assert shares_scales(made, per_tensor=True) == fits
        if not fits:
            with pytest.raises(FormatError, match="per_tensor=True"):
                make_plan(made, verify=False, **TARGET)
    rounded = dmx.gptq(model, shared, batches)
    assert shares_scales(rounded, per_tensor=True)
    make_plan(rounded, verify=False, **TARGET)


def test_what_is_not_held_is_refused(model, assignment, batches):
    with pytest.raises(FormatError, match=r"inputs=false: its readers quantize the inputs of FP8"):
        make_plan(assignment, target="modelopt_checkpoint", verify=False)
    free = dmx.calibrate_inputs(model, mixed(model, (NVFP4, FP8), "fused"), batches)
    with pytest.raises(FormatError, match=r"one static scale for FP8 inputs.*static=True"):
        make_plan(free, verify=False, **TARGET)
    with pytest.raises(FormatError, match="does not hold mxfp4"):
        make_plan(mixed(model, (MXFP4, NVFP4)), verify=False, target="modelopt_checkpoint")


def test_codes_are_low_nibble_first():
    layout = LAYOUTS["modelopt_checkpoint"]
    weight = torch.zeros(1, 16)
    weight[0, :3] = torch.tensor([6.0, 0.5, -1.0])
    tensors = layout.encode_stored(StoredWeight.of(weight, weight, NVFP4, "amax/6"))
    assert tensors["weight"][0, :2].tolist() == [0x17, 0x0A]
    torch.testing.assert_close(layout.decode(tensors, NVFP4, torch.float32), weight)


def hard_inputs():
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(64, 128, generator=generator)
    shifts = torch.randint(-12, 4, (64, 8, 1), generator=generator).float()
    spread = normal * torch.exp2(shifts).expand(64, 8, 16).reshape(64, 128)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 16).repeat(64, 1)
    signs = torch.where(torch.arange(64)[:, None] % 2 > 0, -1.0, 1.0)
    return {"normal": normal, "spread": spread, "ties": ties * signs}


THEIRS = {
    "normal": "0bdfdce1ccee5463",
    "spread": "f3d6d9e4157d3720",
    "ties": "e92043969e5b0caa",
}
"""SHA-256 of packed codes and scales of NVFP4QTensor.quantize of ModelOpt 0.47.0, first 16 digits. Theirs differ in the
scale of a block of zeros, 1 there and 0 here, and where a quotient lies on a tie up to the last bit of float32."""


@pytest.mark.parametrize("name", THEIRS)
def test_bytes_are_those_of_modelopts_own_quantizer(name):
    weight = hard_inputs()[name]
    stored = StoredWeight.of(weight, weight, NVFP4, "amax/6")
    made = LAYOUTS["modelopt_checkpoint"].encode_stored(stored)
    parts = (made["weight"], made["weight_scale"].view(torch.uint8))
    digest = sha256(b"".join(part.numpy().tobytes() for part in parts))
    assert digest[:16] == THEIRS[name]
    amax = weight.abs().max()
    assert float(made["weight_scale_2"]) == pytest.approx(float(amax) / 2688, rel=2**-23)
