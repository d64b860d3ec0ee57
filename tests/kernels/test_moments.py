"""AdamW with masters and moments in few bits: what is drawn, and the kernel against the reference."""

import copy

import pytest
import torch

from dmx.kernels import ops
from dmx.numerics import moments
from dmx.numerics.moments import Moments8, StepNumbers, hashed, random_bits, step_keys
from tests.golden import assert_same_bits


def numbers_of(step: int) -> StepNumbers:
    return StepNumbers(
        beta1=0.9,
        beta2=0.99,
        rest1=0.1,
        rest2=0.01,
        rate=1e-3 / (1 - 0.9 ** (step + 1)),
        root=(1 - 0.99 ** (step + 1)) ** -0.5,
        epsilon=1e-8,
        keys=step_keys(3, step),
    )


@pytest.mark.parametrize("start", [0, 3 << 31, 5 << 32], ids=str)
def test_bits_are_a_hash_of_the_index(start):
    drawn = random_bits(start, 50, 0xDEADBEEF, torch.device("cpu"))
    salt = hashed((0xDEADBEEF + (start >> 32)) & 0xFFFFFFFF)
    expected = [hashed(((start + i) & 0xFFFFFFFF) ^ salt) for i in range(50)]
    assert [b & 0xFFFFFFFF for b in drawn.tolist()] == expected


def test_what_is_drawn_is_even_and_differs_between_steps_and_tensors():
    keys = {key for step in range(50) for key in step_keys(0, step)}
    assert len(keys) == 150
    drawn = torch.stack([random_bits(0, 4096, key, torch.device("cpu")) for key in sorted(keys)])
    shares = ((drawn >> 8) & 0xFFFFFF).double() / 2**24
    assert abs(shares.mean().item() - 0.5) < 0.002  # 4 standard errors of 614,400 draws are 0.0015
    assert abs(torch.corrcoef(shares).fill_diagonal_(0).abs().max().item()) < 0.1
    assert shares.mean(0).std().item() == pytest.approx((1 / 12 / 150) ** 0.5, rel=0.1)


def test_chunks_change_nothing(monkeypatch, generator):
    start, gradient = torch.randn(2, 3000, generator=generator).bfloat16()
    results = []
    for chunk in (512, 1 << 22):
        monkeypatch.setattr(moments, "CHUNK", chunk)
        masters = start.clone()
        first, second = (Moments8(masters, signed=s) for s in (True, False))
        for step in range(2):
            factor = torch.full((1,), 0.5)
            ops.narrow_adamw(masters, gradient, factor, first, second, numbers_of(step))
        results.append((masters, first.codes, second.codes, first.scales, second.scales))
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_equals_the_reference(master, state, generator):
    n = 300_001
    kept = torch.randn(n, generator=generator).to(master).cuda()
    if state == torch.int8:
        both = [Moments8(kept, signed=s) for s in (True, False)]
    else:
        both = [torch.zeros(n, dtype=state, device="cuda") for _ in range(2)]
    ours, theirs = ((kept.clone(), *copy.deepcopy(both)) for _ in range(2))
    factor = torch.full((1,), 0.37, device="cuda")
    for step in range(4):
        scale = 10.0 ** torch.randint(-9, 4, (n,), generator=generator)
        gradient = (torch.randn(n, generator=generator) * scale).to(master).cuda()
        gradient[5000:9000] = 0
        for function, (masters, first, second) in (
            (ops.narrow_adamw, ours),
            (moments.narrow_adamw, theirs),
        ):
            function(masters, gradient, factor, first, second, numbers_of(step))
        for a, b in zip(ours, theirs, strict=True):
            if isinstance(a, Moments8):
                assert_same_bits(a.scales, b.scales)
                a, b = a.codes, b.codes
            assert_same_bits(a, b)
