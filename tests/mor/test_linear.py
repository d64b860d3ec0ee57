"""MorLinear: the six operands, the rule of the products, and the company it has to keep."""

import copy
import io
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mor
from mor import MorConfig, MorError, MorLinear, fp8, log, products
from mor.policy import round_to_bf16
from mor.state import EXECUTIONS, OPERANDS
from tests.forked import Forked
from tests.golden import assert_same_bits
from tests.mor.conftest import normal

CONFIGS = {
    "tensor": MorConfig(),
    "ladder": MorConfig(formats=("e4m3", "e5m2", "bf16")),
    "held": MorConfig(refresh_every=3),
    "rows": MorConfig(partition="row"),
    "two_way": MorConfig("block_two_way", "16x16"),
    "three_way": MorConfig("block_three_way", "1x32", refresh_every=2),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class Mlp(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(32, 64, dtype=dtype)
        self.down = nn.Linear(64, 32, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


def run(model: nn.Module, x: Tensor, seed: int = 9) -> tuple[Tensor, ...]:
    """Output and all gradients."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = model(x)
    out.backward(normal(*out.shape, seed=seed).to(out.dtype))
    return out.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def expected_products(x: Tensor, weight: Tensor, grad: Tensor, config: MorConfig) -> list[Tensor]:
    """The three products from `mor.quantize`, each operand in its product's orientation."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        (qa, qb) = (mor.quantize(t.contiguous(), config) for t in (a, b))
        if config.policy == "tensor" and 2 in (int(qa.decision), int(qb.decision)):
            qa, qb = (round_to_bf16(q.values) for q in (qa, qb))
            return qa.double() @ qb.double().t()
        return qa.values.double() @ qb.values.double().t()

    return [product(x, weight), product(grad, weight.t()), product(grad.t(), x.t())]


@every_config
@pytest.mark.parametrize("outlier", ("none", "input", "weight", "grad"))
def test_products_equal_those_of_the_quantized_operands(config, outlier):
    x, grad = normal(48, 32), normal(48, 64, seed=1)
    model = Mlp().up
    model.bias = None
    with torch.no_grad():
        for name, t in (("input", x), ("weight", model.weight), ("grad", grad)):
            if name == outlier:
                t[2, 3] = 1e6
    wrapped = MorLinear.wrap(model, config)
    x.requires_grad_()
    out = wrapped(x)
    out.backward(grad)
    actual = [out.detach(), x.grad, wrapped.weight.grad]
    expected = expected_products(x.detach(), model.weight.detach(), grad, config)
    for a, e in zip(actual, expected, strict=True):
        # float32 accumulation of at most 64 terms, and 1/S rounded once.
        assert relative(a, e) < 1e-5
    counted = mor.stats(nn.Sequential(wrapped))["operands"]
    if config.formats == ("e4m3", "bf16") and config.partition == "tensor":
        fallen = {
            "none": set(),
            "input": {"input", "input_transposed"},
            "weight": {"weight", "weight_transposed"},
            "grad": {"grad_output", "grad_output_transposed"},
        }
        found = {name for name in OPERANDS if counted[name]["fallbacks"]}
        assert found == fallen[outlier]


def test_one_rejected_operand_sends_the_product_to_bf16_but_not_the_others():
    x = normal(16, 32)
    x[0, 0] = 1e6
    layer = MorLinear.wrap(Mlp().up, MorConfig())
    run(layer, x)
    products = mor.stats(nn.Sequential(layer))["products"]
    executed = {name: [e for e in EXECUTIONS if row[e]] for name, row in products.items()}
    assert executed == {
        "forward": ["bf16"],
        "grad_input": ["fp8_emulated"],
        "grad_weight": ["bf16"],
    }


def test_bf16_ladder_equals_a_plain_layer_in_bf16():
    plain = Mlp(torch.bfloat16).down
    x = normal(16, 64).bfloat16()
    expected = run(plain, x)
    for a, e in zip(
        run(MorLinear.wrap(plain, MorConfig(formats=["bf16"])), x), expected, strict=True
    ):
        assert_same_bits(a, e)


@every_config
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_gradients_are_near_those_of_the_plain_model(config, dtype):
    model, x = Mlp(dtype), normal(4, 8, 32).to(dtype)
    expected = run(model, x)
    mor.swap_linears(model, config)
    for a, e in zip(run(model, x), expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        # Two E4M3 roundings a product (2.6 % RMS each) through two layers.
        assert relative(a, e) < 0.1


def test_waits_once_per_layer_and_pass_and_never_between_refreshes(monkeypatch):
    waits = []
    wait = products.Trials.wait

    def counted(self):
        if self.errors is not None:
            waits.append(self)
        return wait(self)

    monkeypatch.setattr(products.Trials, "wait", counted)
    for formats in (("e4m3", "bf16"), ("e4m3", "e5m2", "bf16")):
        model = mor.swap_linears(Mlp(), MorConfig(formats=formats, refresh_every=4))
        per_step = []
        for step in range(8):
            waits.clear()
            run(model, normal(16, 32, seed=step))
            per_step.append(len(waits))
        layers, passes = 2, 2
        assert per_step == [layers * passes, 0, 0, 0] * 2


def test_decisions_hold_between_refreshes():
    model = mor.swap_linears(Mlp(), MorConfig(refresh_every=3))
    calm, wild = normal(16, 32), normal(16, 32)
    wild[0, 0] = 1e6
    fallbacks = []
    for x in (calm, wild, wild, wild, calm):
        mor.reset_stats(model)
        run(model, x)
        fallbacks.append(mor.stats(model)["layers"]["up"]["operands"]["input"]["fallbacks"])
    assert fallbacks == [0, 0, 0, 1, 1]


def test_what_is_not_finite_shows_even_between_refreshes():
    model = mor.swap_linears(Mlp(), MorConfig(refresh_every=10))
    run(model, normal(16, 32))
    bad = normal(16, 32)
    bad[0, 0] = math.inf
    assert not model(bad).isfinite().all()


def test_wrong_guess_is_thrown_away():
    """The product that runs while the errors travel must not be the answer if it guessed wrong."""
    calm, wild = normal(16, 32), normal(16, 32)
    wild[0, 0] = 1e6
    used = mor.swap_linears(Mlp(), MorConfig())
    for x in (calm, wild, calm):
        fresh = mor.swap_linears(Mlp(), MorConfig())
        for a, e in zip(run(used, x), run(fresh, x), strict=True):
            assert_same_bits(a, e)


@every_config
def test_activation_checkpointing_changes_neither_numbers_nor_counts(config):
    plain, saved = (mor.swap_linears(Mlp(), config) for _ in range(2))
    for step in range(4):
        x = normal(16, 32, seed=step)
        expected = run(plain, x)
        x = x.requires_grad_()
        saved.zero_grad()
        out = checkpoint(saved, x, use_reentrant=False)
        out.backward(normal(*out.shape, seed=9))
        actual = (out.detach(), x.grad, *[p.grad for p in saved.parameters()])
        for a, e in zip(actual, expected, strict=True):
            assert_same_bits(a, e)
    assert mor.stats(saved) == mor.stats(plain)


@pytest.mark.parametrize("name", ("tensor", "held", "two_way"))
def test_compiles_to_one_graph_with_equal_numbers(name):
    torch._dynamo.reset()
    eager = mor.swap_linears(Mlp(), CONFIGS[name])
    compiled = mor.swap_linears(Mlp(), CONFIGS[name])
    fast = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for step in range(2):
        x = normal(16, 32, seed=step)
        for a, e in zip(run(fast, x), run(eager, x), strict=True):
            assert_same_bits(a, e)
    assert mor.stats(compiled) == mor.stats(eager)


@every_config
def test_autocast_runs_in_its_dtype_and_gives_gradients_in_the_weights(config):
    model = mor.swap_linears(Mlp(), config)
    x = normal(16, 32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    out.backward(torch.ones_like(out))
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    half = mor.swap_linears(Mlp().bfloat16(), config)
    assert_same_bits(out.detach(), half(x.detach().bfloat16()).detach())


def test_mixed_dtypes_outside_autocast_are_refused():
    layer = MorLinear.wrap(Mlp().up, MorConfig())
    with pytest.raises(TypeError, match=r"cast one of them or use torch\.autocast"):
        layer(normal(4, 32).bfloat16())
    with pytest.raises(ValueError, match="the layer takes 32"):
        layer(normal(4, 31))


def test_state_dict_is_that_of_plain_linears():
    plain, model = Mlp(), mor.swap_linears(Mlp(), MorConfig())
    run(model, normal(16, 32))
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(Mlp().state_dict())
    for a, e in zip(model.parameters(), Mlp().parameters(), strict=True):
        assert_same_bits(a.detach(), e.detach())


def test_swap_keeps_parameters_and_restore_brings_the_modules_back():
    model = Mlp()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    assert mor.swap_linears(model, MorConfig()) is model
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert isinstance(model.up, MorLinear)
    with pytest.raises(MorError, match="already"):
        mor.swap_linears(model, MorConfig())
    mor.restore_linears(model)
    assert all(m is modules[n] for n, m in model.named_modules())
    with pytest.raises(MorError, match="not called"):
        mor.restore_linears(model)
    with pytest.raises(MorError, match="no MorLinear"):
        mor.stats(model)


def test_patterns_choose_layers_and_must_match():
    assert list(mor.stats(mor.swap_linears(Mlp(), MorConfig(), exclude=["up"]))["layers"]) == [
        "down"
    ]
    assert list(mor.stats(mor.swap_linears(Mlp(), MorConfig(), include="*p"))["layers"]) == ["up"]
    for setting in ("include", "exclude"):
        with pytest.raises(MorError, match=f"{setting}='gate' matches no linear layer. Layers: up"):
            mor.swap_linears(Mlp(), MorConfig(), **{setting: ["gate"]})
    with pytest.raises(MorError, match="leave no linear layer"):
        mor.swap_linears(Mlp(), MorConfig(), exclude=["*"])


def test_output_embedding_stays_plain_unless_asked(tiny_random):
    model = mor.swap_linears(tiny_random.model, MorConfig())
    assert type(model.lm_head) is nn.Linear
    mor.restore_linears(model)
    assert type(mor.swap_linears(model, MorConfig(), include=["*"]).lm_head) is MorLinear


def test_copies_decide_and_count_for_themselves():
    model = mor.swap_linears(Mlp(), MorConfig())
    run(model, normal(16, 32))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert other.up.handle != model.up.handle
        assert mor.stats(other)["total"]["tensors"] == 0
        run(other, normal(16, 32))
        assert mor.stats(other) == mor.stats(model)


@every_config
def test_resumed_decisions_and_counts_go_on_as_before(config):
    model = mor.swap_linears(Mlp(), config)
    for step in range(2):
        run(model, normal(16, 32, seed=step))
    other = mor.swap_linears(Mlp(), config)
    mor.load_decision_state(other, mor.decision_state(model))
    x = normal(16, 32, seed=2)
    x[0, 0] = 1e6
    for a, e in zip(run(other, x), run(model, x), strict=True):
        assert_same_bits(a, e)
    assert mor.stats(other) == mor.stats(model)
    with pytest.raises(MorError, match="other layers"):
        mor.load_decision_state(
            mor.swap_linears(Mlp(), config, exclude=["up"]), mor.decision_state(model)
        )


def test_evaluation_mode_neither_counts_nor_moves_the_refresh():
    model = mor.swap_linears(Mlp(), MorConfig(refresh_every=2))
    run(model, normal(16, 32))
    before = mor.decision_state(model)
    model.eval()
    with torch.no_grad():
        model(normal(16, 32))
    assert str(mor.decision_state(model)) == str(before)


@every_config
def test_stats_add_up_and_are_json(config):
    model = mor.swap_linears(Mlp(), config)
    for step in range(3):
        run(model, normal(16, 32, seed=step))
    result = mor.stats(model)
    json.dumps(result, allow_nan=False)
    elements = {"input": 16 * 32 + 16 * 64, "weight": 2 * 32 * 64, "grad_output": 16 * 64 + 16 * 32}
    for operand, row in result["operands"].items():
        assert row["elements"] == 3 * elements[operand.removesuffix("_transposed")]
        for share in ("tensor_share", "block_share", "element_share", "byte_share"):
            assert sum(row[share].values()) == pytest.approx(1)
        assert row["tensors"] == 3 * 2
    assert all(sum(row.values()) == 3 * 2 for row in result["products"].values())
    total = result["total"]
    assert result["fp8_tensor_share"] == pytest.approx(1 - total["fallbacks"] / total["tensors"])


def test_e5m2_times_e5m2_is_emulated_and_counted_so():
    assert not fp8.fits_hardware("e5m2", "e5m2", 16, 16, 16)
    assert fp8.fits_hardware("e5m2", "e4m3", 17, 16, 32)
    assert not fp8.fits_hardware("e4m3", "e4m3", 16, 24, 16)
    model = mor.swap_linears(Mlp(), MorConfig(formats=("e5m2", "bf16")))
    run(model, normal(16, 32))
    assert mor.stats(model)["products"]["forward"]["fp8_emulated"] == 2


def test_real_products_without_the_hardware_are_an_error():
    model = mor.swap_linears(Mlp(), MorConfig(products="real"))
    with pytest.raises(MorError, match=r"mor\.products=real, but cpu has no FP8"):
        model(normal(4, 32))


def test_fast_path_codes_equal_the_reference():
    for name in ("e4m3", "e5m2"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = (normal(64, 48) * 100).to(dtype)
            tensors = [x, -3 * x[:5]]
            casts, errors = fp8.cast(
                tensors, fp8.amax(*tensors), name, transposed=True, measured=True
            )
            for y, cast, error in zip(tensors, casts, errors, strict=True):
                expected = mor.quantize(y, MorConfig(formats=(name, "bf16"), threshold=1.0))
                assert_same_bits(cast.plain.dequantize(dtype), expected.values)
                assert torch.equal(error.reshape(1), expected.errors)
                assert_same_bits(cast.transposed.codes.float(), cast.plain.codes.t().float())


def test_logger_writes_each_step_and_reads_the_device_once_per_flush(tmp_path, monkeypatch):
    model = mor.swap_linears(Mlp(), CONFIGS["two_way"])
    path = tmp_path / "mor.jsonl"
    logger = mor.MorLogger(model, path, flush_every=3)
    reads = []
    collect = log.collect
    monkeypatch.setattr(log, "collect", lambda s: reads.append(len(s)) or collect(s))
    for step in range(7):
        x = normal(16, 32, seed=step)
        if step == 4:
            x[0, 0] = math.nan
        run(model, x)
        logger.step(step)
    assert reads == [3, 3]
    logger.flush()
    header, rows = log.read_log(path)
    assert header["layers"] == ["up", "down"] and tuple(header["operands"]) == OPERANDS
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["nonfinite"] > 0 for row in rows] == [step == 4 for step in range(7)]
    assert rows[4]["elements_bf16"][0][0] > rows[3]["elements_bf16"][0][0] == 0
    with pytest.raises(MorError, match="at least 1"):
        mor.MorLogger(model, path, flush_every=0)


def train_ddp(number: str, folder: str) -> None:
    """One of two processes: leaves its gradients in the folder."""
    rank = int(number)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    model = mor.swap_linears(Mlp(), MorConfig())
    wrapped = nn.parallel.DistributedDataParallel(model)
    x = normal(16, 32, seed=rank)
    if rank == 1:
        x[0, 0] = 1e6  # the ranks decide differently
    run(wrapped, x)
    torch.save([p.grad for p in model.parameters()], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ddp_averages_the_gradients_of_ranks_that_decide_differently(tmp_path):
    script = "import sys; from tests.mor.test_linear import train_ddp; train_ddp(*sys.argv[1:])"
    processes = [Forked("-c", script, rank, tmp_path) for rank in range(2)]
    for process in processes:
        assert process.wait() == 0, process.outputs()[1]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    alone = []
    for rank in range(2):
        x = normal(16, 32, seed=rank)
        if rank == 1:
            x[0, 0] = 1e6
        alone.append(run(mor.swap_linears(Mlp(), MorConfig()), x)[2:])
    for a, b, first, second in zip(*ranks, *alone, strict=True):
        assert_same_bits(a, b)
        torch.testing.assert_close(a, (first + second) / 2)


@pytest.mark.parametrize("config", [MorConfig(), MorConfig("block_two_way", "8x8")], ids=str)
def test_second_derivatives_are_refused(config):
    model = mor.swap_linears(Mlp(), config)
    x = normal(4, 32).requires_grad_()
    with pytest.raises(MorError, match="no second derivatives"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
