"""On a GPU: Triton kernels against the reference, real FP8 products against emulated ones."""

import copy

import pytest
import torch
from torch import Tensor, nn

import mor
from mor import MorConfig, fp8, products
from tests.golden import assert_same_bits, cases, floats

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (64, 128), (1000, 513))


def hard(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if kind == "zeros":
        x.zero_()
    elif kind == "outlier":
        x.view(-1)[-1] = 6e4
    elif kind == "subnormal":
        x *= torch.finfo(dtype).smallest_normal / 4
    elif kind == "wide":
        x *= torch.exp(4 * torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    return x.to(dtype)


def assert_equal_casts(found: list[fp8.Cast], expected: list[fp8.Cast]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert_same_bits(a.inv_scale, b.inv_scale)
                assert_same_bits(a.scale, b.scale)
                assert_same_bits(a.codes.view(torch.uint8), b.codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ("normal", "zeros", "outlier", "subnormal", "wide"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_the_reference_bit_for_bit(shape, kind, dtype):
    one, other = hard(shape, kind, dtype), hard(shape[::-1], kind, dtype).t()
    small = hard((70, 33), "normal", dtype)
    for tensors in ((one,), (other, small), (small, one[:0])):
        on_gpu = [x.cuda() if x.is_contiguous() else x.t().cuda().t() for x in tensors]
        largest, expected_largest = fp8.amax(*on_gpu), fp8.amax(*tensors)
        assert largest.shape == (len(tensors), mor.config.partials(largest.device))
        assert_same_bits(largest.amax(1, keepdim=True), expected_largest)
        for name in ("e4m3", "e5m2"):
            for asked in (
                {"measured": True},
                {"measured": True, "transposed": True},
                {"transposed": True},
                {"plain": False, "transposed": True},
            ):
                found, errors = fp8.cast(on_gpu, largest, name, **asked)
                expected, expected_errors = fp8.cast(tensors, expected_largest, name, **asked)
                assert_equal_casts(found, expected)
                assert (errors is None) == (expected_errors is None)
                if errors is not None:
                    # A term is rounded at another place (1e-7 of x, where the mean is 0.02 or
                    # more), and the float32 sum within a tile has another order.
                    torch.testing.assert_close(errors.cpu(), expected_errors, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("special", (float("nan"), float("inf"), float("-inf")), ids=str)
def test_what_is_not_finite_is_noticed(special):
    for at in (0, 12345, -1):
        x = torch.randn(300, 500, device="cuda", dtype=torch.bfloat16)
        fine = torch.randn(30, 50, device="cuda", dtype=torch.bfloat16)
        x.view(-1)[at] = special
        largest = fp8.amax(x, fine)
        casts, errors = fp8.cast([x, fine], largest, "e4m3", measured=True)
        assert largest[0].amax().item() == float("inf") and largest[1].isfinite().all()
        assert errors[0].item() == float("inf") and 0.01 < errors[1].item() < 0.045
        assert casts[0].plain.scale.isnan().all() and casts[1].plain.scale.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ("normal", "zeros", "outlier", "subnormal", "wide", "nan"))
@pytest.mark.parametrize("partition", ("128x128", "1x128", "33x70", "row"))
def test_block_policies_equal_the_reference_bit_for_bit(partition, kind, dtype):
    x = hard((300, 520), kind, dtype)
    if kind == "nan":
        x[5, 7], x[200, 300] = float("nan"), float("inf")
    blocks = torch.exp(3 * torch.randn(10, 13, generator=torch.Generator().manual_seed(2)))
    x = (x.float() * blocks.repeat_interleave(30, 0).repeat_interleave(40, 1)).to(dtype)
    for y in (x, x.t()):
        for policy in ("block_two_way", "block_three_way"):
            config = MorConfig(policy, partition)
            expected = mor.quantize(y, config)
            on_gpu = x.cuda() if y is x else x.cuda().t()
            for frozen in (None, expected.decision):
                of = None if frozen is None else frozen.cuda()
                found = mor.quantize(on_gpu, config, frozen=of)
                assert torch.equal(found.decision.cpu(), expected.decision)
                torch.testing.assert_close(
                    found.values.cpu(), expected.values, rtol=0, atol=0, equal_nan=True
                )
                torch.testing.assert_close(found.errors.cpu(), expected.errors, rtol=1e-9, atol=0)


def test_more_blocks_side_by_side_than_a_grid_takes():
    x = hard((2, 70000), "normal", torch.float32)
    config = MorConfig("block_two_way", "2x1")
    found, expected = mor.quantize(x.cuda(), config), mor.quantize(x, config)
    assert torch.equal(found.decision.cpu(), expected.decision)
    assert torch.equal(found.values.cpu(), expected.values)


@pytest.mark.parametrize("case", cases("mor_tensor", "mor"), ids=lambda c: c["case"])
def test_decisions_on_the_gpu_equal_golden(case):
    if case["part"] != "tensor":
        pytest.skip("the fast path is tensor-level")
    source = next(c for c in cases("morin", "mor") if c["case"] == case["input"])
    x = floats("morin", source["case"], "x", source["dtype"], "mor").reshape(source["shape"]).cuda()
    for run in case["runs"]:
        config = MorConfig(formats=run["ladder"], threshold=run["threshold"])
        trials = products.Trials([x], mor.state.LayerState(config), [None])
        assert trials.decide(trials.wait())[0] == [run["choice"]]
        assert mor.FORMATS[int(mor.quantize(x, config).decision)] == run["choice"]


def train_step(model: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = model(x)
    out.backward(grad)
    return [out.detach(), x.grad, *[p.grad for p in model.parameters()]]


@pytest.mark.parametrize(
    "formats", (("e4m3", "bf16"), ("e4m3", "e5m2", "bf16"), ("e5m2", "e4m3", "bf16")), ids=str
)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_real_and_emulated_products_agree_and_decide_alike(formats, dtype):
    if not fp8.has_fp8_products(torch.device("cuda")):
        pytest.skip("this GPU has no FP8 products")
    torch.manual_seed(0)
    # One layer: behind it, casts of results that differ a little would differ by whole steps.
    plain = nn.Sequential(nn.Linear(512, 1024, bias=False)).to("cuda", dtype)
    models = [
        mor.swap_linears(copy.deepcopy(plain), MorConfig(formats=formats, products=p))
        for p in ("real", "emulated")
    ]
    # With fast accumulation the FP8 units keep about 14 bits of a partial sum and cut the rest
    # (5e-3 over 512 terms, 8e-3 over 2048); without it, and in BF16, rounding of results is left.
    allowed = (1e-2, 3e-3, 3e-3)
    for step in range(4):
        x = torch.randn(2048, 512, device="cuda", dtype=dtype)
        grad = torch.randn(2048, 1024, device="cuda", dtype=dtype)
        if step == 2:
            x[0, 0] = 1e6
        if step == 3:
            grad *= torch.exp(5 * torch.randn_like(grad))
        real, emulated = (train_step(m, x, grad) for m in models)
        distances = [
            float((a.float() - e.float()).norm() / e.float().norm())
            for a, e in zip(real, emulated, strict=True)
        ]
        assert all(d <= most for d, most in zip(distances, allowed, strict=True)), distances
        stats = [mor.stats(m) for m in models]
        assert stats[0]["operands"] == stats[1]["operands"], "decisions must be equal"
    executed = mor.stats(models[0])["products"]
    # Two operands in E5M2 have no product in hardware; where E5M2 comes first, so they are.
    assert bool(executed["forward"]["fp8"]) == (formats[0] == "e4m3")
    assert sum(row["fp8"] for row in mor.stats(models[1])["products"].values()) == 0


def waits_of(monkeypatch) -> list[int]:
    """A list that grows by an entry whenever the host waits for an event of the GPU."""
    waits: list[int] = []
    wait = torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda e: waits.append(1) or wait(e))
    return waits


@pytest.mark.parametrize("every", (1, 4))
def test_host_waits_only_for_decisions(every, monkeypatch):
    model = mor.swap_linears(
        nn.Sequential(nn.Linear(256, 256, bias=False)).to("cuda", torch.bfloat16),
        MorConfig(refresh_every=every),
    )
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    train_step(model, x, grad)
    torch.cuda.synchronize()
    waits = waits_of(monkeypatch)
    torch.cuda.set_sync_debug_mode("error")  # for every wait of another kind
    try:
        for _ in range(3):
            train_step(model, x, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # A deciding step waits once in its forward and once in its backward pass.
    assert len(waits) == (6 if every == 1 else 0)


@pytest.mark.parametrize(
    "config", (MorConfig(), MorConfig("block_two_way", "128x128")), ids=("tensor", "blocks")
)
def test_compiled_equals_eager(config):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 128)).cuda()
    eager, compiled = (mor.swap_linears(copy.deepcopy(plain), config) for _ in range(2))
    fast = torch.compile(compiled, fullgraph=True)
    x, grad = torch.randn(256, 256, device="cuda"), torch.randn(256, 128, device="cuda")
    for a, e in zip(train_step(fast, x, grad), train_step(eager, x, grad), strict=True):
        # Compiled, SiLU rounds otherwise; where that crosses a rounding boundary of FP8 an element
        # moves by a whole step.
        assert float((a - e).norm() / e.norm()) <= 2e-2
    assert mor.stats(compiled)["products"] == mor.stats(eager)["products"]


def test_two_runs_agree_to_the_bit():
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = mor.swap_linears(nn.Sequential(nn.Linear(512, 512)).cuda(), MorConfig())
        x = torch.randn(1024, 512, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return train_step(model, x, torch.randn(1024, 512, device="cuda").bfloat16())

    for a, b in zip(run(), run(), strict=True):
        assert_same_bits(a, b)
