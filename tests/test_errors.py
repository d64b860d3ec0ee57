"""One family of errors, and quantizers that refuse what they cannot do, in words."""

import copy
import math

import pytest
import torch

import dmx
from dmx import errors
from dmx.errors import DataError, DmxError, FormatError

KINDS = ("FormatError", "BudgetError", "AssignmentError", "ModelError", "DataError", "RunError")


@pytest.mark.parametrize("name", KINDS)
def test_every_error_of_the_library_is_a_value_error_of_one_family(name):
    assert issubclass(getattr(errors, name), DmxError) and issubclass(DmxError, ValueError)


def test_importing_the_package_shows_its_names_and_no_hydra():
    assert {
        "Assignment",
        "Budget",
        "SearchConfig",
        "SearchResult",
        "apply",
        "continuous_fake_quant",
        "fake_quant",
        "kl_divergence",
        "perplexity",
        "quantize",
        "restore",
        "search",
        "zero_shot",
    } <= set(dmx.__all__)
    assert all(hasattr(dmx, name) for name in dmx.__all__)


X = torch.randn(3, 64)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: dmx.fake_quant(X, "mxfp3"), FormatError, r"'mxfp3' is no block format.*Did you"),
        (lambda: dmx.fake_quant(X, None), FormatError, r"None is no block format.*Allowed"),
        (lambda: dmx.fake_quant(X, "bf16"), FormatError, r"'bf16' cannot be quantized to"),
        (lambda: dmx.quantize(X, "bf16"), FormatError, r"'bf16' cannot be quantized to"),
        (
            lambda: dmx.fake_quant(X, "mxfp4", scale_rule="round"),
            FormatError,
            r"scale_rule='round'.*floor, ceil, even, rceil",
        ),
        (lambda: dmx.fake_quant(X.double(), "mxfp4"), TypeError, r"float32, .*got torch\.float64"),
        (lambda: dmx.fake_quant(X.int(), "mxfp4"), TypeError, r"got torch\.int32; convert"),
        (lambda: dmx.fake_quant(X, "mxfp4", axis=2), IndexError, r"axis=2 is out of range"),
        (lambda: dmx.fake_quant(torch.tensor(1.0), "mxfp4"), IndexError, r"axis=-1 .*shape \(\)"),
        (lambda: dmx.quantize(torch.tensor(1.0), "mxfp4"), IndexError, r"axis=-1"),
        (
            lambda: dmx.fake_quant(X, "mxfp4", out=torch.empty(64, 3)),
            ValueError,
            r"out must have the shape.*\(3, 64\).*\(64, 3\)",
        ),
        (
            lambda: dmx.fake_quant(X, "mxfp4", out=torch.empty(3, 64, dtype=torch.bfloat16)),
            ValueError,
            r"out must have the shape, dtype",
        ),
        (
            lambda: dmx.fake_quant(X.clone().requires_grad_(), "mxfp4", out=X.clone()),
            ValueError,
            r"out= cannot be used while x needs a gradient",
        ),
        (
            lambda: dmx.continuous_fake_quant(X, torch.tensor(1.0).double(), "mxfp6_mxfp4"),
            TypeError,
            r"offset must be float32, got torch\.float64",
        ),
        (
            lambda: dmx.continuous_fake_quant(X, torch.ones(1), "mxfp6_mxfp4"),
            ValueError,
            r"offset must be 0-d, got shape \(1,\)",
        ),
        (
            lambda: dmx.continuous_fake_quant(X, 1.0, "mxfp6_mxfp4"),
            TypeError,
            r"offset must be float32, got float; use torch\.tensor",
        ),
        *(
            (
                lambda value=value: dmx.continuous_fake_quant(
                    X, torch.tensor(value), "mxfp6_mxfp4"
                ),
                ValueError,
                rf"offset must lie in \[0, 2\], got {value:g}; clamp",
            )
            for value in (-0.01, 2.01, math.nan)
        ),
        (
            lambda: dmx.continuous_fake_quant(X, torch.tensor(1.0), "mxfp4_mxfp8"),
            FormatError,
            r"is no format family.*Allowed: mxfp8_mxfp4",
        ),
    ],
)
def test_a_quantizer_refuses_what_it_cannot_do(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_out_may_be_the_input_itself_or_a_strided_view(axis):
    x = torch.randn(64, 96)
    expected = dmx.fake_quant(x, "mxfp6_e2m3", axis=axis)
    for target in (x.clone(), torch.empty(96, 64).t(), torch.empty(64, 192)[:, ::2]):
        target.copy_(x)
        assert dmx.fake_quant(target, "mxfp6_e2m3", axis=axis, out=target) is target
        assert torch.equal(target, expected)


def test_out_that_overlaps_the_input_shifted_is_written_after_all_is_read():
    memory = torch.randn(128)
    x, out = memory[:96], memory[32:]
    expected = dmx.fake_quant(x.clone(), "mxfp4")
    dmx.fake_quant(x, "mxfp4", out=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("shape", [(0,), (0, 32), (4, 0), (2, 0, 3)])
def test_empty_tensors_are_quantized_to_empty_ones(shape):
    x = torch.empty(shape)
    assert dmx.fake_quant(x, "mxfp4").shape == shape
    assert dmx.quantize(x, "mxfp4").codes.shape == shape
    offset = torch.tensor(1.0, requires_grad=True)
    dmx.continuous_fake_quant(x, offset, "mxfp6_mxfp4").sum().backward()
    assert offset.grad == 0


@pytest.mark.parametrize(
    ("tokens", "window", "words"),
    [
        (torch.zeros(5, dtype=torch.int64), 8, "has 5 tokens, fewer than one window of 8"),
        (torch.zeros(0, dtype=torch.int64), 8, "has 0 tokens"),
        (torch.zeros(2, 8, dtype=torch.int64), 8, "tokens must be 1-d int64"),
        (torch.zeros(8), 8, r"tokens must be 1-d int64, got torch\.float32"),
        (torch.zeros(8, dtype=torch.int64), 1, "window=1 predicts nothing"),
        (torch.full((8,), 288), 8, "token id 288 is outside the model's vocabulary of 288"),
        (torch.full((8,), -1), 8, "token id -1 is outside"),
        (torch.zeros(4096, dtype=torch.int64), 4096, "window=4096 .* 2048 positions"),
    ],
)
def test_a_text_that_cannot_be_measured_is_refused(tokens, window, words, tiny_random):
    with pytest.raises(DataError, match=words):
        dmx.perplexity(tiny_random.model, tokens, window=window)
    with pytest.raises(DataError, match=words):
        dmx.kl_divergence(tiny_random.model, torch.nn.Linear(1, 1), tokens, window=window)


def test_a_batch_of_no_windows_is_refused(tiny_random):
    tokens = torch.zeros(64, dtype=torch.int64)
    model = tiny_random.model
    with pytest.raises(DataError, match=r"batch_size=0 measures nothing"):
        dmx.perplexity(model, tokens, window=64, batch_size=0)
    with pytest.raises(DataError, match=r"batch_size=-1 measures nothing"):
        dmx.kl_divergence(model, copy.deepcopy(model), tokens, window=64, batch_size=-1)


def test_models_of_different_vocabularies_have_no_divergence(tiny_random, make_tiny):
    other = make_tiny("llama", vocab_size=320).model
    with pytest.raises(DataError, match=r"vocabularies of 288 and 320 tokens.*one tokenizer"):
        dmx.kl_divergence(tiny_random.model, other, torch.zeros(64).long(), window=64)


def test_a_bare_number_is_no_budget_and_a_dict_no_config(tiny_random):
    batches = [torch.zeros(2, 16, dtype=torch.int64)]
    with pytest.raises(TypeError, match=r"budget must be a dmx\.Budget, got 5\.0: dmx\.Budget"):
        dmx.search(tiny_random.model, batches, 5.0, dmx.SearchConfig())
    with pytest.raises(TypeError, match=r"config must be a dmx\.SearchConfig, got \{\}"):
        dmx.search(tiny_random.model, batches, dmx.Budget(5.0), {})
