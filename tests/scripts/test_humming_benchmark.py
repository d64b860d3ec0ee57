"""scripts/benchmarks/humming.py where there is no card: what is given to humming, and what is kept."""

import pytest
import torch

from dmx import fake_quant
from scripts.benchmarks import humming
from scripts.serve_check.decoding import Element

ELEMENTS = {
    "mxfp4": Element(2, 1),
    "mxfp6_e2m3": Element(2, 3),
    "mxfp6_e3m2": Element(3, 2),
}


def stream(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of rows of 32-bit words, from the lowest bit on, as humming's own unpacking reads them: by plain integers."""
    rows = []
    for row in words.tolist():
        value = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(row))
        count = len(row) * 32 // bits
        rows.append([value >> (bits * i) & (2**bits - 1) for i in range(count)])
    return torch.tensor(rows)


@pytest.mark.parametrize("block_format", humming.DTYPES, ids=str)
def test_humming_gets_the_words_that_mean_our_weight(block_format):
    weight = humming.operands("wide blocks", 4, 96, 1, 15, "cpu")[0]
    tensors, decoded = humming.stored(weight, block_format)
    bits = block_format.element.bits
    assert tensors["weight"].dtype == torch.int32
    assert tensors["weight"].shape == (4, 96 * bits // 32)
    assert tensors["weight_scale"].shape == (4, 3)
    codes = stream(tensors["weight"], bits)
    if bits == 8:
        kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[block_format.element.name]
        values = codes.to(torch.uint8).view(kind).float()
    else:
        values = ELEMENTS[block_format.name].values()[codes]
    meant = values * tensors["weight_scale"].float().repeat_interleave(32, 1)
    assert torch.equal(meant, decoded)
    assert torch.equal(decoded, fake_quant(weight.float(), block_format.name, scale_rule="even"))


def test_wide_weights_spread_and_their_inputs_make_up_for_it():
    weight, x = humming.operands("wide blocks", 64, 1024, 8, 15, "cpu")
    sizes = weight.float().unflatten(1, (-1, 32)).norm(dim=(0, 2))
    assert sizes.max() / sizes.min() > 2**28
    both = sizes * x.float().unflatten(1, (-1, 32)).norm(dim=(0, 2))
    assert both.max() / both.min() < 4
    zero = (weight.unflatten(1, (-1, 32)) == 0).all(-1).float().mean()
    assert 0.02 < zero < 0.1
    rows = humming.operands("wide rows", 64, 1024, 8, 15, "cpu")[0].float().norm(dim=1)
    assert rows.max() / rows.min() > 2**28


def test_the_error_of_the_worst_output_is_not_hidden_by_the_large_ones():
    reference = torch.tensor([[1e6, 1.0], [1e6, 1.0]])
    y = torch.tensor([[1e6, 2.0], [1e6, 2.0]])
    error, worst = humming.relative(y, reference)
    assert error < 1e-5
    assert worst == 1.0


def test_calls_that_fail_leave_their_error_and_the_others_run():
    found = humming.in_parallel({"bad": lambda: 1 / 0, "good": lambda: 7})
    assert found["good"] == 7
    assert isinstance(found["bad"], ZeroDivisionError)
    row = {"format": "mxfp4", "inputs": "fp8", "weights": "normal", "failed": "AssertionError: no"}
    assert "failed: AssertionError: no" in humming.line_of(row)
