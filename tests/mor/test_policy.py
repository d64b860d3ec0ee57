"""Hard inputs through every policy, and configurations that must be refused."""

import math

import pytest
import torch
from torch import Tensor

import mor
from mor import MorConfig, MorError
from mor.policy import round_to_bf16
from tests.golden import assert_same_bits
from tests.mor.conftest import normal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POLICIES = {
    "e4m3_bf16": MorConfig(),
    "e4m3_e5m2_bf16": MorConfig(formats=("e4m3", "e5m2", "bf16")),
    "e5m2_e4m3_bf16": MorConfig(formats=("e5m2", "e4m3", "bf16")),
    "e5m2_bf16": MorConfig(formats=("e5m2", "bf16")),
    "bf16": MorConfig(formats=("bf16",)),
    "tensor_rows": MorConfig(partition="row"),
    "tensor_columns": MorConfig(partition="column"),
    "tensor_blocks": MorConfig(partition="32x32"),
    "two_way": MorConfig("block_two_way", "16x16"),
    "two_way_1x128": MorConfig("block_two_way", "1x128"),
    "two_way_rows": MorConfig("block_two_way", "row"),
    "three_way": MorConfig("block_three_way", "16x16"),
    "three_way_columns": MorConfig("block_three_way", "column"),
}
every_policy = pytest.mark.parametrize("config", POLICIES.values(), ids=POLICIES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def names(result: mor.MorTensor) -> set[str]:
    return {mor.FORMATS[i] for i in result.decision.reshape(-1).tolist()}


def check_form(x: Tensor, config: MorConfig, result: mor.MorTensor) -> None:
    assert result.values.shape == x.shape and result.values.dtype == x.dtype
    assert result.decision.dtype == torch.uint8
    assert result.decision.ndim == (0 if config.policy == "tensor" else 2)
    assert result.relative_error.dtype == torch.float32 and result.relative_error.ndim == 0


def bf16_where_not(names_allowed: set[str], config: MorConfig) -> set[str]:
    return {"bf16"} if config.formats == ("bf16",) else names_allowed


@every_policy
@every_dtype
class TestHardInputs:
    def test_zeros_stay_zero_and_are_fp8(self, config, dtype):
        x = torch.zeros(40, 48, dtype=dtype)
        result = mor.quantize(x, config)
        check_form(x, config, result)
        first = config.formats[0] if config.policy == "tensor" else "e4m3"
        assert names(result) == {first}
        assert_same_bits(result.values, x)
        assert float(result.relative_error) == 0

    def test_normal_values_are_good_enough_in_the_first_format(self, config, dtype):
        x = normal(64, 128).to(dtype)
        result = mor.quantize(x, config)
        check_form(x, config, result)
        first = config.formats[0] if config.policy == "tensor" else "e4m3"
        assert names(result) == {first}
        error = float((result.values.float() - x.float()).norm() / x.float().norm())
        # Half a mantissa step, uniformly distributed: 2**-5/sqrt(3) E4M3, twice that for E5M2.
        assert error < {"e4m3": 0.04, "e5m2": 0.08, "bf16": 0.003}[first]

    def test_an_outlier_of_a_million_goes_to_bf16_where_it_crushes_the_rest(self, config, dtype):
        outlier = 1e6 if dtype != torch.float16 else 6e4
        x = (normal(64, 128) * (1.0 if dtype != torch.float16 else 0.06)).to(dtype)
        x[3, 5] = outlier
        result = mor.quantize(x, config)
        check_form(x, config, result)
        if config.policy == "tensor":
            if config.partition == "tensor" and "e4m3" in config.formats:
                # E5M2 has the range for 10**6; E4M3 has not.
                assert names(result) == {"e5m2" if "e5m2" in config.formats else "bf16"}
        else:
            rows, columns = result.decision.shape
            at = 3 * rows // 64, 5 * columns // 128
            hit = mor.FORMATS[int(result.decision[at])]
            assert hit in (("bf16",) if config.policy == "block_two_way" else ("e5m2", "bf16"))
            others = result.decision.clone()
            others[at] = 0
            assert not others.any()
        assert math.isclose(float(result.values[3, 5]), outlier, rel_tol=2**-3)

    @pytest.mark.parametrize("special", (math.nan, math.inf, -math.inf), ids=str)
    def test_not_finite_goes_to_bf16_and_is_kept(self, config, dtype, special):
        x = normal(64, 128).to(dtype)
        x[40, 100] = special
        result = mor.quantize(x, config)
        check_form(x, config, result)
        if config.policy == "tensor":
            assert names(result) == {"bf16"}
            assert_same_bits(result.values, round_to_bf16(x))
        else:
            rows, columns = result.decision.shape
            at = 40 * rows // 64, 100 * columns // 128
            assert mor.FORMATS[int(result.decision[at])] == "bf16"
            others = result.decision.clone()
            others[at] = 0
            assert not others.any(), "one bad block must not spoil the scales of the others"
        value = result.values[40, 100]
        assert value.isnan() if math.isnan(special) else float(value) == special
        if config.formats != ("bf16",):
            assert float(result.relative_error) == math.inf

    def test_subnormals(self, config, dtype):
        tiny = torch.finfo(dtype).smallest_normal
        x = (normal(32, 64).double() * tiny / 8).to(dtype)
        assert ((x != 0) & (x.abs() < tiny)).any()
        result = mor.quantize(x, config)
        check_form(x, config, result)
        assert result.values.isfinite().all()
        assert (result.values[x == 0] == 0).all()

    def test_one_element(self, config, dtype):
        for x in (torch.tensor(3.0, dtype=dtype), torch.tensor([3.0], dtype=dtype)):
            result = mor.quantize(x, config)
            check_form(x, config, result)
            # Its own amax maps to the largest FP8 value and back.
            assert float(result.values) == pytest.approx(3.0, rel=2**-8)

    @pytest.mark.parametrize("shape", ((0,), (0, 5), (5, 0), (2, 0, 3)), ids=str)
    def test_empty(self, config, dtype, shape):
        x = torch.zeros(shape, dtype=dtype)
        result = mor.quantize(x, config)
        check_form(x, config, result)
        assert float(result.relative_error) == 0

    @pytest.mark.parametrize("shape", ((33, 130), (7, 9), (100,), (3, 5, 17)), ids=str)
    def test_shapes_that_are_no_multiple_of_the_block(self, config, dtype, shape):
        x = normal(*shape).to(dtype)
        result = mor.quantize(x, config)
        check_form(x, config, result)
        assert names(result) <= bf16_where_not({"e4m3", "e5m2", "bf16"}, config)
        error = float((result.values.float() - x.float()).norm() / x.float().norm())
        assert error < 0.08
        # Padding must not move a decision: the same values cut into whole blocks agree.
        if config.policy != "tensor" and x.ndim == 2 and config.partition == "16x16":
            corner = mor.quantize(x[: x.shape[0] // 16 * 16], config)
            assert torch.equal(corner.decision, result.decision[: corner.decision.shape[0]])

    def test_non_contiguous_equals_contiguous(self, config, dtype):
        x = normal(96, 64, 2).to(dtype)[:, ::2, 1].t()
        assert not x.is_contiguous()
        result, expected = mor.quantize(x, config), mor.quantize(x.contiguous(), config)
        check_form(x, config, result)
        assert_same_bits(result.values, expected.values)
        assert torch.equal(result.decision, expected.decision)


@every_policy
def test_other_dtypes_are_refused(config):
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(TypeError, match="must be one of float32, bfloat16, float16"):
            mor.quantize(torch.ones(4, 4).to(dtype), config)


def test_leading_axes_are_rows():
    x = normal(4, 8, 32)
    config = MorConfig("block_two_way", "16x16")
    folded = mor.quantize(x.reshape(32, 32), config)
    assert torch.equal(mor.quantize(x, config).decision, folded.decision)


def test_order_of_the_ladder_is_the_order_of_the_tries():
    x = normal(64, 64)
    for formats in (("e4m3", "e5m2", "bf16"), ("e5m2", "e4m3", "bf16")):
        assert names(mor.quantize(x, MorConfig(formats=formats))) == {formats[0]}


def test_e5m2_has_its_own_default_threshold():
    config = MorConfig(formats=("e4m3", "e5m2", "bf16"))
    assert config.threshold_of("e4m3") == 0.045 and config.threshold_of("e5m2") == 0.09
    one = MorConfig(formats=("e4m3", "e5m2", "bf16"), threshold=0.03)
    assert one.threshold_of("e4m3") == one.threshold_of("e5m2") == 0.03
    both = MorConfig(formats=("e4m3", "e5m2", "bf16"), threshold={"e5m2": 0.2})
    assert both.threshold_of("e4m3") == 0.045 and both.threshold_of("e5m2") == 0.2


def test_threshold_is_strict():
    x = normal(64, 64)
    error = float(mor.quantize(x, MorConfig()).errors[0])
    assert names(mor.quantize(x, MorConfig(threshold=error))) == {"bf16"}
    above = math.nextafter(error, 1)
    assert names(mor.quantize(x, MorConfig(threshold=above))) == {"e4m3"}


def test_frozen_decision_is_applied_but_never_to_what_is_not_finite():
    x = normal(32, 32)
    config = MorConfig("block_two_way", "16x16")
    frozen = torch.full((2, 2), 2, dtype=torch.uint8)
    assert names(mor.quantize(x, config, frozen=frozen)) == {"bf16"}
    x[0, 0] = math.inf
    result = mor.quantize(x, config, frozen=torch.zeros_like(frozen))
    assert result.decision.tolist() == [[2, 0], [0, 0]]
    with pytest.raises(ValueError, match="shape of the decision"):
        mor.quantize(x, config, frozen=frozen[:1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "block"}, "mor.policy='block' is not allowed"),
        ({"policy": "block_two_way"}, "mor.partition=tensor has none"),
        ({"partition": "128"}, "tensor, row, column, or RxC"),
        ({"partition": "0x32"}, "tensor, row, column, or RxC"),
        ({"formats": ("e4m3",)}, "bf16 last"),
        ({"formats": ("bf16", "e4m3")}, "bf16 last"),
        ({"formats": ("e4m3", "e4m3", "bf16")}, "each format once"),
        ({"formats": ()}, "bf16 last"),
        ({"formats": ("fp4", "bf16")}, "mor.formats='fp4' is not allowed"),
        ({"threshold": 0}, "a number > 0"),
        ({"threshold": "big"}, "a number > 0"),
        ({"threshold": {"e5m2": 0.1}}, "mor.threshold='e5m2' is not allowed"),
        ({"metric": "sqnr"}, "mor.metric='sqnr' is not allowed"),
        ({"refresh_every": 0}, "at least 1"),
        ({"products": "fast"}, "mor.products='fast'"),
        ({"policy": "block_two_way", "partition": "row", "threshold": 0.1}, "would be ignored"),
        (
            {"policy": "block_two_way", "partition": "row", "formats": ("e5m2", "bf16")},
            "would be ignored",
        ),
    ],
)
def test_impossible_configurations_are_refused(settings, words):
    with pytest.raises(ValueError, match=None) as caught:
        MorConfig(**settings)
    assert words in str(caught.value)
    assert isinstance(caught.value, MorError) or "is not allowed" in str(caught.value)
