"""Losses of rows: values and gradients, on every backend."""

import pytest
import torch

from dmx import numerics
from dmx.kernels import cpu, ops
from tests.kernels.test_kernels import DEVICES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEEDS_COMPILER = pytest.mark.skipif(cpu.find_compiler() is None, reason="no C++ compiler was found")
ON_ALL = [pytest.param("reference"), *DEVICES]


@pytest.fixture
def device(request):
    """The device of a backend: "reference" on the CPU, "cpu" with its kernels, "cuda"."""
    ops.set_backend("reference" if request.param == "reference" else "auto")
    yield "cuda" if request.param == "cuda" else "cpu"
    ops.set_backend(None)


def rows(dtype, vocab=5003, n=7):
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(n, vocab, generator=generator) * 6
    logits = reference + 0.3 * torch.randn(n, vocab, generator=generator)
    logits[3] -= 40.0  # the same distribution far away
    logits[4, :9] = reference[4, :9] = -torch.inf  # tokens that the model never predicts
    reference[5, 11] = -torch.inf
    targets = torch.randint(9, vocab, (n,), generator=generator)
    targets[2] = -1
    return reference.to(dtype), logits.to(dtype), targets


def by_hand(reference, logits, targets, factor):
    """Both losses in float64, with their gradients by autograd."""
    p = logits.double().requires_grad_()
    log_p, log_q = p.log_softmax(-1), reference.double().log_softmax(-1)
    q = log_q.exp()
    kl = torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1)
    picked = log_p.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    ce = torch.where(targets >= 0, -picked, 0.0)
    gradients = [
        torch.autograd.grad(
            factor * torch.where(loss.isfinite(), loss, 0.0).sum(), p, retain_graph=True
        )[0]
        for loss in (kl, ce)
    ]
    # -inf logits on both sides: autograd sees inf - inf where the answer is 0
    return kl.detach(), ce.detach(), [g.nan_to_num(0.0) for g in gradients]


@pytest.mark.parametrize("device", ON_ALL, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_gradients_are_those_of_float64(dtype, device):
    reference, logits, targets = rows(dtype)
    factor = 0.37
    kl, ce, (kl_gradient, ce_gradient) = by_hand(reference, logits, targets, factor)
    reference, logits, targets = (x.to(device) for x in (reference, logits, targets))
    own = torch.full_like(logits, 7.0)
    eps = torch.finfo(dtype).eps
    rounding = {"rtol": max(eps, 1e-4), "atol": factor * 4 * eps}
    found = ops.kl_rows(reference, logits, gradient=own, factor=factor)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), kl, rtol=1e-4, atol=5e-6)
    torch.testing.assert_close(own.cpu().double(), kl_gradient, **rounding)
    own.fill_(7.0)
    found = ops.cross_entropy_rows(logits, targets, gradient=own, factor=factor)
    torch.testing.assert_close(found.cpu().double(), ce, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(own.cpu().double(), ce_gradient, **rounding)
    assert found[2] == 0 and not own[2].any()


@pytest.mark.parametrize("device", ON_ALL, indirect=True)
def test_log_probabilities_serve_as_a_reference_and_rows_may_be_many(device, monkeypatch):
    reference, logits, targets = (x.to(device) for x in rows(torch.float32))
    expected = ops.kl_rows(reference, logits)
    log_q = reference.log_softmax(-1)
    close = {"rtol": 1e-4, "atol": 5e-6}
    torch.testing.assert_close(ops.kl_rows(log_q, logits, normalized=True), expected, **close)
    entropies = ops.cross_entropy_rows(logits, targets)
    monkeypatch.setitem(numerics.distances.CHUNK_ELEMENTS, logits.device.type, 2 * logits.shape[1])
    assert torch.equal(ops.kl_rows(reference, logits), expected)
    assert torch.equal(ops.cross_entropy_rows(logits, targets), entropies)


@NEEDS_COMPILER
@pytest.mark.parametrize("wide", [True, False], ids=["log_q", "logits"])
@pytest.mark.parametrize("vocab", [1, 31, 32, 4099, 49152])
def test_cpu_losses_are_no_further_from_float64_than_the_reference(vocab, wide):
    """Model-like logits of a nearly equal model: the loss is small beside the numbers it is of."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(16, vocab, generator=generator)).bfloat16()
    reference = logits.float() + 0.1 * torch.randn(16, vocab, generator=generator)
    reference = reference.log_softmax(-1) if wide else reference.bfloat16()
    targets = torch.randint(0, vocab, (16,), generator=generator)
    kl, ce, _ = by_hand(reference, logits, targets, 1.0)
    if wide:  # log probabilities count as they are given: torch's own need not sum to one by 4e-6
        log_p, log_q = logits.double().log_softmax(-1), reference.double()
        kl = (log_q.exp() * (log_q - log_p)).sum(-1)
    for losses, exact in (
        (lambda own: own.kl_rows(reference, logits, normalized=wide), kl),
        (lambda own: own.cross_entropy_rows(logits, targets), ce),
    ):
        own, reference_own = (float((losses(m) - exact).abs().max()) for m in (ops, numerics))
        # 2e-6: one float32 unit in the last place of a logit of 16
        assert own <= max(reference_own, 2e-6)


@NEEDS_COMPILER
def test_cpu_losses_do_not_depend_on_threads_and_rows_may_have_gaps():
    reference, logits, targets = rows(torch.bfloat16, n=61)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            gradient = torch.empty_like(logits)
            kl = ops.kl_rows(reference, logits, gradient=gradient)
            results.append((kl, gradient, ops.cross_entropy_rows(logits, targets)))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))
    gaps = logits.repeat(1, 2)[:, : logits.shape[1]]
    assert torch.equal(ops.kl_rows(reference, gaps), results[0][0])


@pytest.mark.parametrize("device", ON_ALL, indirect=True)
def test_equal_rows_have_no_divergence_and_nan_stays_in_its_row(device):
    reference, logits, targets = (x.to(device) for x in rows(torch.float32))
    assert ops.kl_rows(logits, logits).abs().max() < 1e-6
    logits[6, 100] = torch.nan
    for losses in (ops.kl_rows(reference, logits), ops.cross_entropy_rows(logits, targets)):
        assert losses[6].isnan() and losses[[0, 1, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("device", ON_ALL, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (64, 4097)])
def test_fisher_sums_are_those_of_float64_and_add_up(shape, dtype, device):
    generator = torch.Generator().manual_seed(0)
    grad, exact, error = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    grad = grad.transpose(0, 1).contiguous().transpose(0, 1)  # gradients may have gaps
    quantized = exact + error / 8
    expected = (grad.double() * (quantized.double() - exact.double())).square().sum()
    sums = torch.zeros(512, device=device)
    tensors = [x.to(device) for x in (grad, exact, quantized)]
    ops.add_fisher(*tensors, sums)
    torch.testing.assert_close(sums.double().sum().cpu(), expected, rtol=1e-5, atol=0)
    once = sums.clone()
    ops.add_fisher(*tensors, sums)
    assert torch.equal(sums, once + once)
    with pytest.raises(ValueError, match="must have one shape"):
        ops.add_fisher(tensors[0][:1], *tensors[1:], sums)
    with pytest.raises(ValueError, match=r"sums must be \(n,\) float32"):
        ops.add_fisher(*tensors, sums.double())


def test_wrong_rows_are_named():
    logits, targets = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logits must be \(rows, vocab\), got \(3, 8, 1\)"):
        ops.kl_rows(logits[..., None], logits[..., None])
    with pytest.raises(ValueError, match=r"reference must be \(3, 8\).*got \(2, 8\)"):
        ops.kl_rows(logits[:2], logits)
    with pytest.raises(ValueError, match=r"targets must be \(3,\) int64, got \(3,\) torch.int32"):
        ops.cross_entropy_rows(logits, targets.int())
    with pytest.raises(ValueError, match="gradient must be contiguous"):
        ops.kl_rows(logits, logits, gradient=torch.zeros(8, 3).t())
    with pytest.raises(TypeError, match="float64"):
        ops.cross_entropy_rows(logits.double(), targets)


@NEEDS_COMPILER
def test_a_target_beyond_the_vocabulary_is_an_error():
    with pytest.raises(IndexError, match="targets must lie below the 8 columns"):
        ops.cross_entropy_rows(torch.zeros(3, 8), torch.tensor([0, 8, 1]))
