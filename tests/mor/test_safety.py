"""The safety net: quiet on what it was calibrated on, there when the data leaves that range."""

import json

import pytest
import torch
from torch import Tensor

import dmx
import mor
from dmx.applying.quantizers import BlockQuantizer
from dmx.formats import get_block_format
from dmx.searching import SearchConfig, uniform_assignment
from mor import MorError, SafetyNet
from mor.outliers import rescale_channels
from mor.safety import GuardedQuantizer
from tests.golden import assert_same_bits
from tests.mor.conftest import normal


def uniform(model, name="mxfp6_e2m3"):
    return uniform_assignment(model, get_block_format(name), SearchConfig(name="uniform"))


def batches(vocab: int, n: int = 3) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab, (2, 32), generator=g) for _ in range(n)]


def logits(model, tokens: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits.float()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"))
def test_guard_lets_pass_below_and_falls_back_above(name, dtype):
    quantizer = BlockQuantizer(get_block_format(name))
    x = normal(16, 64).to(dtype)
    error = float(mor.safety._errors_of(x, quantizer(x)))
    at, below = GuardedQuantizer(quantizer, error), GuardedQuantizer(quantizer, error * 0.99)
    assert_same_bits(at(x), quantizer(x))
    assert_same_bits(below(x), x.bfloat16().to(dtype))
    assert at.block_format is quantizer.block_format
    assert at.counters.tolist() == [1, 0, 1024, 0] and below.counters.tolist() == [1, 1, 1024, 1024]


def test_guard_keeps_what_is_not_finite_in_bf16():
    guard = GuardedQuantizer(BlockQuantizer(get_block_format("mxfp4")), 10.0)
    x = normal(4, 32)
    x[0, 0] = float("inf")
    y = guard(x)
    assert y[0, 0] == float("inf") and y[0, 1:].isfinite().all()
    for empty_or_zero in (torch.zeros(4, 32), torch.zeros(0, 32)):
        assert_same_bits(guard(empty_or_zero), empty_or_zero)
    assert guard.counters.tolist()[:2] == [3, 1]


def test_gradient_passes_straight_through_either_way():
    for threshold in (10.0, 1e-9):
        x = normal(4, 32).requires_grad_()
        GuardedQuantizer(BlockQuantizer(get_block_format("mxfp4")), threshold)(x).sum().backward()
        assert_same_bits(x.grad, torch.ones(4, 32))


def test_calibrated_net_is_quiet_on_its_data_and_leaves_the_model_alone(tiny_random):
    model = tiny_random.model
    assignment, data = uniform(model), batches(model.config.vocab_size)
    before = logits(model, data[0])
    net = SafetyNet.calibrate(model, assignment, data)
    assert_same_bits(logits(model, data[0]), before)
    assert not any(p.grad is not None for p in model.parameters())
    dmx.apply(model, assignment)
    plain = logits(model, data[0])
    dmx.restore(model)
    dmx.apply(model, assignment, safety=net)
    guarded = logits(model, data[0])
    dmx.restore(model)
    assert_same_bits(guarded, plain)
    report = net.report()
    json.dumps(report, allow_nan=False)
    assert report["fallback_rate"] == 0 and report["tensors"] == 2 * len(assignment.formats)
    assert report["effective_element_bits"] == 6 and report["effective_bits_per_element"] == 6.25
    assert report["weight"]["tensors"] == report["input"]["tensors"] == len(assignment.formats)
    net.reset()
    assert net.report()["fallback_rate"] is None


def test_outliers_hurt_without_the_net_and_not_with_it(tiny_trained):
    model = tiny_trained.model
    assignment = uniform(model)
    tokens = tiny_trained.tokenizer(
        "The following sections describe the standard types that are built into the interpreter. "
        * 8,
        return_tensors="pt",
    )["input_ids"]
    net = SafetyNet.calibrate(model, assignment, [tokens[:, :300]])

    def loss(safety=None, quantized=True) -> float:
        if quantized:
            dmx.apply(model, assignment, safety=safety)
        out = logits(model, tokens[:, 300:])
        if quantized:
            dmx.restore(model)
        return float(torch.nn.functional.cross_entropy(out[0, :-1], tokens[0, 301:]))

    plain, clean = loss(quantized=False), loss(net)
    channels = list(range(0, 128, 8))
    for layer in range(2):
        rescale_channels(model, f"model.layers.{layer}.mlp", channels)
    assert loss(quantized=False) == pytest.approx(plain, rel=1e-6), "powers of two change nothing"
    net.reset()
    saved, hurt = loss(net), loss()
    fallen = {k for k, v in net.report()["layers"].items() if v.get("input") or v.get("weight")}
    assert fallen == {f"model.layers.{i}.mlp.down_proj" for i in range(2)}
    assert saved < clean + 0.01 and hurt > clean + 0.1


def test_net_is_saved_beside_the_assignment_and_comes_back(tiny_random, tmp_path):
    model = tiny_random.model
    net = SafetyNet.calibrate(
        model, uniform(model), batches(model.config.vocab_size, 1), margin=1.5
    )
    again = SafetyNet.load(net.save(tmp_path / "safety.json"))
    assert again.calibrated == net.calibrated and again.margin == net.margin
    layer = next(iter(net.calibrated))
    largest = net.calibrated[layer]["input"].largest_error
    assert again.threshold(layer, "input") == 1.5 * largest
    assert again.with_margin({"weight": 1.0, "input": 2.0}).threshold(layer, "input") == 2 * largest
    (tmp_path / "other.json").write_text('{"schema": "mor.safety/0"}')
    with pytest.raises(MorError, match=r"schema 'mor.safety/0'"):
        SafetyNet.load(tmp_path / "other.json")
    for text in ("{", "[]", '{"schema": "mor.safety/1"}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(MorError, match="is no safety net"):
            SafetyNet.load(tmp_path / "bad.json")
    with pytest.raises(MorError, match="is no safety net"):
        SafetyNet.load(tmp_path / "absent.json")


def test_constant_net_trades_bits_for_error(tiny_random):
    model = tiny_random.model
    assignment, tokens = uniform(model, "mxfp4"), batches(model.config.vocab_size, 1)[0]
    bits = []
    for threshold in (1e-9, 0.2, 10.0):
        net = SafetyNet.constant(threshold)
        dmx.apply(model, assignment, safety=net)
        logits(model, tokens)
        dmx.restore(model)
        bits.append(net.report()["effective_element_bits"])
    assert bits[0] == 16 and bits[2] == 4 and bits == sorted(bits, reverse=True)


def test_nets_that_do_not_fit_are_refused(tiny_random):
    model = tiny_random.model
    assignment = uniform(model)
    net = SafetyNet.calibrate(model, assignment, batches(model.config.vocab_size, 1))
    quantizer = BlockQuantizer(get_block_format("mxfp4"))
    with pytest.raises(MorError, match=r"no threshold for other\.layer\.input"):
        net.guard(quantizer, "other.layer", "input")
    with pytest.raises(MorError, match="calibrated with mxfp6_e2m3, the assignment says mxfp4"):
        net.guard(quantizer, "model.layers.0.mlp.up_proj", "weight")
    with pytest.raises(MorError, match="batches is empty"):
        SafetyNet.calibrate(model, assignment, [])
    for margin in (0, -1.0, {"weight": 1.0}):
        with pytest.raises(MorError, match=r"safety\.margin"):
            SafetyNet.calibrate(model, assignment, [], margin=margin)
    with pytest.raises(MorError, match=r"safety\.threshold=0"):
        SafetyNet.constant(0)


def test_model_comes_back_when_calibration_breaks(tiny_random):
    model = tiny_random.model
    model.train()
    with pytest.raises(IndexError):
        SafetyNet.calibrate(model, uniform(model), [torch.full((1, 4), 10**6)])
    assert model.training
    with pytest.raises(dmx.errors.ModelError, match="nothing to restore"):
        dmx.restore(model)


def test_rescaling_refuses_what_it_cannot_do(tiny_random):
    model = tiny_random.model
    with pytest.raises(MorError, match=r"is no MLP.*model\.layers\.0\.mlp"):
        rescale_channels(model, "model.layers.9.mlp", [0])
    with pytest.raises(MorError, match="channel 128 is out of range"):
        rescale_channels(model, "model.layers.0.mlp", [128])
    with pytest.raises(MorError, match="overflow fp16"):
        rescale_channels(model.half(), "model.layers.0.mlp", [0])
