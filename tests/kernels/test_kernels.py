"""Every backend equals the reference bit for bit on the shared hard inputs."""

import importlib.util
import logging

import pytest
import torch

from dmx import numerics
from dmx.errors import FormatError, RunError
from dmx.formats import FAMILIES, FP8, MX_FORMATS, NVFP4, OPERANDS, WEIGHT_RULES
from dmx.kernels import cpu, ops
from dmx.numerics import continuous_parameters
from dmx.numerics.mx import INPUT_DTYPES
from dmx.numerics.packing import pack_codes, unpack_codes
from tests.cases import FOUR, LINES, MIXED_LINES, OFFSETS, hard_inputs
from tests.golden import assert_same_bits
from tests.kernels.compare import check_continuous, check_mx, check_scaled

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(cpu.find_compiler() is None, reason="no C++ compiler was found"),
    ),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
        ],
    ),
]


@pytest.fixture(autouse=True)
def auto_backend(monkeypatch):
    monkeypatch.delenv("DMX_BACKEND", raising=False)
    ops.set_backend(None)
    yield
    ops.set_backend(None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("block_format", MX_FORMATS, ids=str)
def test_mx_equals_reference(block_format, dtype, device):
    for x in hard_inputs(dtype).values():
        for scale_rule in WEIGHT_RULES:
            check_mx(x, block_format, scale_rule, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("block_format", [NVFP4, FP8], ids=str)
def test_nvfp4_and_fp8_equal_reference(block_format, dtype, device):
    backend = {"cpu": "cpp", "cuda": "triton"}[device]
    assert ops.backend_of(torch.zeros(1, device=device), block_format, "amax/6") == backend
    usual = block_format.rules[0]
    for x in hard_inputs(dtype).values():
        for rule in block_format.rules:
            if device == "cpu" and not cpu.has_scaled(rule):
                continue
            check_scaled(x, block_format, rule, device)
            check_scaled(x, block_format, rule, device, amax=0.7)
    x = hard_inputs(dtype)["four_axes"]
    for axis in (0, 2):
        check_scaled(x, block_format, usual, device, axis=axis)
    amax = x.float().abs().amax() if block_format is NVFP4 else x.float().abs().amax(-1, True) * 0.9
    check_scaled(x, block_format, usual, device, amax=amax)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("n", [4096, 11008, 14336, 16416, 40000])
def test_rows_of_real_lengths_equal_reference(n):
    """Rows that a program holds, and longer ones, whose amax another kernel finds; a whole tensor of several
    programs."""
    x = torch.randn(70, n, generator=torch.Generator().manual_seed(n)).bfloat16()
    x[3, 17], x[5] = torch.inf, 0.0
    for block_format in (NVFP4, FP8):
        for rule in {block_format.usual_rule(operand) for operand in OPERANDS}:
            check_scaled(x, block_format, rule, "cuda")
    for family, rules in MIXED_LINES:
        for offset in (0.3, 1.7):
            check_continuous(x, family, offset, "cuda", rules)


@pytest.mark.skipif(cpu.find_compiler() is None, reason="no C++ compiler was found")
def test_what_has_no_kernel_runs_by_the_reference_or_not_at_all(monkeypatch):
    x = torch.randn(2, 32)
    expected = numerics.fake_quant(x, NVFP4, scale_rule="4over6")
    assert ops.backend_of(x, NVFP4, "4over6") == "reference"
    assert_same_bits(ops.fake_quant(x, NVFP4, scale_rule="4over6"), expected)
    ops.set_backend("cpp")
    ops.fake_quant(x, NVFP4)
    with pytest.raises(RunError, match="backend='cpp' has no kernels for nvfp4 by 4over6"):
        ops.fake_quant(x, NVFP4, scale_rule="4over6")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_other_axes_equal_reference(axis, device):
    x = hard_inputs(torch.float32)["four_axes"]
    for dtype in INPUT_DTYPES:
        check_mx(x.to(dtype), MX_FORMATS[0], "floor", device, axis)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
def test_continuous_equals_reference(family, dtype, device):
    for x in hard_inputs(dtype).values():
        for offset in OFFSETS:
            check_continuous(x, family, offset, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize(("family", "rules"), LINES, ids=str)
def test_the_straight_line_equals_reference(family, rules, dtype, device):
    offsets = (0.0, 0.3, 2 / 3, 1.0, 1.7, 2.0)
    for i, x in enumerate(hard_inputs(dtype).values(), start=INPUT_DTYPES.index(dtype)):
        # On the CPU, where the reference takes most of the time, an input meets half of them, the others in another dtype.
        for offset in offsets[i % 2 :: 2] if device == "cpu" else offsets:
            check_continuous(x, family, offset, device, rules)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize(("family", "rules"), MIXED_LINES, ids=str)
def test_the_line_to_other_formats_equals_reference(family, rules, dtype, device):
    inputs = hard_inputs(dtype)
    # On the CPU formats and mixing have kernels of their own, which other tests drive through all inputs.
    few = ("grid_e4m3", "subnormals", "non_finite", "random_bits", "one", "empty_blocks", "sliced")
    offsets = ((0.0, None), (0.3, None), (0.3, 0.7), (1.0, None), (1.7, 0.7), (2.0, None))
    for name in few if device == "cpu" else inputs:
        for offset, amax in offsets[1::3] if device == "cpu" else offsets:
            check_continuous(inputs[name], family, offset, device, rules, amax)


@pytest.mark.parametrize("block_format", [NVFP4, FP8], ids=str)
def test_at_its_stop_a_line_is_the_format(block_format):
    x = hard_inputs(torch.float32)["ragged"]
    row = numerics.line_parameters(torch.tensor(0.0), [block_format.name, "bf16"])
    expected = numerics.fake_quant(x, block_format)
    assert_same_bits(ops.continuous_fake_quant(x, row), expected)


def test_a_fixed_range_is_for_formats_with_a_global_scale_alone():
    """Inputs in fp8 have a scale per token whatever calibration saw: the soft model is that of the files."""
    x = hard_inputs(torch.float32)["ragged"]
    row = numerics.line_parameters(torch.tensor(2.0), ["nvfp4", "fp8"])
    assert_same_bits(ops.continuous_fake_quant(x, row, amax=0.7), numerics.fake_quant(x, FP8))


def test_overlapping_out_equals_reference():
    memory = torch.randn(33, 64)
    x, out = memory[:-1], memory[1:]
    expected = ops.numerics.fake_quant(x.clone(), "mxfp4")
    assert torch.equal(ops.fake_quant(x, "mxfp4", out=out), expected)


@pytest.mark.parametrize("path", ["element", "line"])
def test_offset_gradient_does_not_depend_on_threads(path):
    x, grad = torch.randn(512, 1024), torch.randn(512, 1024)
    parameters = continuous_parameters(torch.tensor(0.7), "mxfp6_mxfp4", path=path)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(ops.continuous_fake_quant_backward(grad, x, parameters)[1].item())
    finally:
        torch.set_num_threads(threads)
    assert len(set(results)) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("family", "rules"),
    [("mxfp6_mxfp4", None), (FOUR, ("even", "mse", "floor", "rceil")), *MIXED_LINES],
    ids=str,
)
def test_cuda_graph_follows_the_parameters(family, rules):
    """Nothing depends on values on the host: a captured launch sees later offsets, and the neighbours
    that are theirs."""
    x, grad = torch.randn(2, 256, 512, device="cuda").unbind()
    offset = torch.tensor(0.3, device="cuda")
    parameters = continuous_parameters(offset, family, rules)

    def step():
        return (
            ops.continuous_fake_quant(x, parameters),
            *ops.continuous_fake_quant_backward(grad, x, parameters),
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    parameters.copy_(continuous_parameters(offset + 1.4, family, rules))
    graph.replay()
    # Equal to the bit, so the sums also run in the same order every time.
    for actual, expected in zip(captured, step(), strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_packing_round_trip_and_layout(bits):
    codes = torch.randint(0, 2**bits, (3, 5, 64), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, 5, 64 * bits // 8)
    assert torch.equal(unpack_codes(packed, bits), codes)
    one_hot = pack_codes(torch.tensor([1, 0, 0, 0], dtype=torch.uint8), bits)
    assert one_hot[0] == 1 and one_hot[1:].sum() == 0


def test_packing_names_what_does_not_fit():
    with pytest.raises(ValueError, match="groups of 4; the last axis has 6"):
        pack_codes(torch.zeros(6, dtype=torch.uint8), 6)
    with pytest.raises(ValueError, match="bits must be"):
        pack_codes(torch.zeros(6, dtype=torch.uint8), 5)
    with pytest.raises(ValueError, match="groups of 2"):
        ops.quantize_packed(torch.zeros(2, 7), "mxfp4")


def test_wrong_arguments_are_named():
    x = torch.zeros(2, 32)
    with pytest.raises(TypeError, match="float64"):
        ops.fake_quant(x.double(), "mxfp4")
    with pytest.raises(FormatError, match="mxfp4"):
        ops.fake_quant(x, "mxpf4")
    with pytest.raises(FormatError, match="scale_rule"):
        ops.quantize(x, "mxfp4", scale_rule="flor")
    with pytest.raises(IndexError, match="axis=2"):
        ops.fake_quant(x, "mxfp4", axis=2)
    with pytest.raises(ValueError, match="out must have"):
        ops.fake_quant(x, "mxfp4", out=x.half())
    with pytest.raises(ValueError, match="path_parameters"):
        ops.continuous_fake_quant(x, torch.zeros(7))


def test_backend_that_is_missing_is_an_error(monkeypatch):
    with pytest.raises(RunError, match="backend='triton' cannot run on device 'cpu'"):
        ops.choose_backend("cpu", "triton")
    with pytest.raises(FormatError, match="backend='cuda'"):
        ops.set_backend("cuda")
    monkeypatch.setenv("DMX_BACKEND", "reference")
    assert ops.actual_backend("cpu") == "reference"
    ops.set_backend("auto")
    assert ops.choose_backend("cpu", "reference") == "reference"


def test_no_compiler_is_said_on_auto_and_an_error_on_request(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    ops._choose.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"reference backend .requested=auto.*no C\+\+"):
            assert ops.choose_backend("cpu") == "reference"
        with pytest.raises(RunError, match="DMX_BACKEND=reference"):
            ops.choose_backend("cpu", "cpp")
    finally:
        ops._choose.cache_clear()


def test_a_gpu_without_triton_is_said_on_auto_and_an_error_on_request(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else found(name)
    )
    ops._choose.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"reference backend .requested=auto.*triton is not"):
            assert ops.choose_backend("cuda") == "reference"
        with pytest.raises(RunError, match=r"triton is not installed.*DMX_BACKEND=reference"):
            ops.choose_backend("cuda", "triton")
    finally:
        ops._choose.cache_clear()


def test_backend_is_said_once(caplog):
    ops._choose.cache_clear()
    with caplog.at_level(logging.INFO, "dmx.kernels.ops"):
        ops.choose_backend("cpu")
        ops.choose_backend("cpu")
    assert [r.message.split(" (")[0] for r in caplog.records if "backend on" in r.message] == [
        f"backend on cpu: {ops.choose_backend('cpu')}"
    ]


@pytest.mark.skipif(cpu.find_compiler() is None, reason="no C++ compiler was found")
def test_failed_build_shows_the_compiler(monkeypatch, tmp_path):
    broken = tmp_path / "cpu.cpp"
    broken.write_text("int main() { return undeclared; }")
    monkeypatch.setattr(cpu, "SOURCE", broken)
    monkeypatch.setenv("DMX_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RunError, match=r"(?s)undeclared.*DMX_BACKEND=reference"):
        cpu.load_library.__wrapped__()
