"""scripts/benchmarks/humming.py where there is no card: what is given to humming, and what is kept."""

import pytest
import torch

from dmx import fake_quant
from experiments.reporting.pages.humming import humming_page
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


def test_the_page_has_errors_times_and_what_did_not_run():
    head = {"format": "mxfp4", "inputs": "fp8"}
    errors = [
        {**head, "weights": "normal", "error": 2e-3, "worst_output": 3e-3, "emulated": 1.5e-3},
        {"format": "mxfp8_e5m2", "inputs": "fp8", "weights": "normal", "failed": "ValueError: no"},
    ]
    shape = {"out": 2048, "in": 1024, "bf16_us": 9.0}
    times = [
        {**head, **shape, "tokens": 1, "us": 3.0},
        {**head, **shape, "tokens": 16, "failed": "ValueError: no"},
    ]
    page = humming_page(
        "humming h200",
        {
            "machine": {"name": "NVIDIA H200", "torch": "2.11"},
            "humming": "0.1.20",
            "compiler": "nvrtc",
            "seconds": 60,
            "errors": errors,
            "times": times,
        },
    )
    assert (
        "1 of 2 products whose errors were asked for ran, with a relative error of at most 2.0e-03 on normal"
        in page
    )
    assert (
        "; 1 of 2 were timed, the missing ones are of 2048 x 1024; one token: 3.00 to 3.00 times"
        in page
    )
    assert "| mxfp4 | fp8 | normal | 2.0e-03 | 3.0e-03 | 1.5e-03 |" in page
    assert "| bf16 | bf16 | 9.0 | 9.0 |\n| mxfp4 | fp8 | 3.0 (3.00) | - |" in page
    assert "Not run: mxfp8_e5m2 fp8, mxfp4 fp8: ValueError: no" in page
