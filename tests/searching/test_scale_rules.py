"""search.scale_rules: what a search states is what it measures with and what the assignment has."""

import pytest
import torch

import dmx
from dmx.applying.linear import quantized_layers
from dmx.assignment.assignment import Assignment
from dmx.assignment.facts import SearchFacts
from dmx.assignment.rules import ScaleRulesConfig
from dmx.assignment.targets import COMPRESSED_TENSORS_INPUT_RULES
from dmx.errors import FormatError
from dmx.formats import MXFP4, MXFP6_E2M3, MXFP8_E4M3, get_block_format
from dmx.numerics import fake_quant
from dmx.numerics.scaling import amax_to_scale_exponent
from dmx.searching import SearchConfig, uniform_assignment
from dmx.searching.config import PolishConfig
from experiments import compare, search
from tests.settings import TINY_LAYERS

BATCHES = list(torch.randint(0, 257, (4, 2, 32), generator=torch.Generator().manual_seed(1)))
RULES = {"weight": {"mxfp4": "even", "mxfp6_e2m3": "mse"}, "input": "rceil"}
STATED = {
    "weight": {"mxfp4": "even", "mxfp6_e2m3": "mse"},
    "input": {"mxfp4": "rceil", "mxfp6_e2m3": "rceil"},
}


def searched(model, name, **settings):
    config = SearchConfig(
        name=name, scale_rules=ScaleRulesConfig(**RULES), units="layer", **settings
    )
    return dmx.search(model, BATCHES, dmx.Budget(4.7), config)


@pytest.mark.parametrize("name", ["kl_per_bit", "fisher", "weight_mse", "random"])
def test_heuristics_state_and_know_the_rules(name, tiny_random, tmp_path):
    done = searched(tiny_random.model, name).assignment
    assert done.scale_rules == STATED and done.search.path is None
    assert Assignment.load(done.save(tmp_path / "a.json")) == done
    dmx.apply(tiny_random.model, done)
    for layer_name, layer in quantized_layers(tiny_random.model).items():
        block_format = done.formats[layer_name]
        expected = fake_quant(layer.weight, block_format, scale_rule=STATED["weight"][block_format])
        assert torch.equal(layer.weight_quantizer(layer.weight), expected)
        assert layer.input_quantizer.scale_rule == "rceil"


@pytest.mark.parametrize("rounds", [0, 1])
def test_the_differentiable_search_knows_the_rules(rounds, tiny_random):
    result = searched(
        tiny_random.model, "differentiable", steps=3, polish=PolishConfig(rounds=rounds)
    )
    assert result.assignment.scale_rules == STATED and not any(
        "gradient" in w for w in result.warnings
    )
    assert result.assignment.search.path == "line"
    assert result.assignment.search.searched_under is None


def test_uniform_formats_have_the_rules_of_their_format(tiny_random):
    config = SearchConfig(
        name="uniform", scale_rules=ScaleRulesConfig(weight={"mxfp8": "rceil"}, input="even")
    )
    for block_format, rule in ((MXFP8_E4M3, "rceil"), (MXFP4, "floor")):
        done = uniform_assignment(tiny_random.model, block_format, config)
        assert done.scale_rules == {
            "weight": {block_format.name: rule}, "input": {block_format.name: "even"}
        }  # fmt: skip


def test_with_rule_changes_one_operand(tiny_random):
    done = uniform_assignment(tiny_random.model, MXFP6_E2M3, SearchConfig(name="uniform"))
    changed = done.with_rule("weight", "mse")
    assert changed.scale_rules == {
        "weight": {"mxfp6_e2m3": "mse"},
        "input": {"mxfp6_e2m3": "floor"},
    }
    with pytest.raises(FormatError, match=r"scale_rules\.input='mse'"):
        done.with_rule("input", "mse")


def inputs_of(target, family="mxfp8_mxfp4", **rules):
    return SearchConfig(target=target, family=family, scale_rules=ScaleRulesConfig(**rules))


@pytest.mark.parametrize(
    ("target", "rules", "taken", "foreign"),
    [
        ("any", {}, {"mxfp4": "floor", "mxfp8_e4m3": "floor"}, {}),
        ("vllm", {}, {"mxfp4": "even", "mxfp8_e4m3": "rceil"}, {}),
        ("vllm_quark", {}, {"mxfp4": "even", "mxfp8_e4m3": "even"}, {}),
        ("transformers", {}, {"mxfp4": "even", "mxfp8_e4m3": "rceil"}, {}),
        ("vllm", {"weight": "mse"}, {"mxfp4": "even", "mxfp8_e4m3": "rceil"}, {}),
        ("vllm", {"input": "rceil"}, {"mxfp4": "rceil", "mxfp8_e4m3": "rceil"}, {}),
        (
            "vllm",
            {"input": "floor"},
            {"mxfp4": "floor", "mxfp8_e4m3": "floor"},
            {"mxfp4": "floor", "mxfp8_e4m3": "floor"},
        ),
        (
            "vllm",
            {"input": {"mxfp8": "ceil"}},
            {"mxfp4": "even", "mxfp8_e4m3": "ceil"},
            {"mxfp8_e4m3": "ceil"},
        ),
    ],
)
def test_inputs_take_the_rule_of_the_targets_runtime_unless_another_is_asked_for(
    target, rules, taken, foreign
):
    config = inputs_of(target, **rules)
    assert config.input_rules() == taken and config.foreign_input_rules() == foreign
    again = config.for_search("kl_per_bit")  # what auto stands for stays
    assert again.scale_rules == config.scale_rules and "auto" not in config.scale_rules.input
    weights = config.scale_rules.by_format()["weight"]
    assert weights["mxfp4"] == rules.get("weight", "floor")


def test_formats_whose_rule_is_no_runtimes_own_keep_theirs():
    config = inputs_of("vllm", family=["nvfp4", "fp8"])
    by_format = config.scale_rules.by_format()["input"]
    assert (by_format["nvfp4"], by_format["fp8"]) == ("amax/6", "amax/448_float32")
    assert config.input_rules() == {}
    unknown = inputs_of("transformers", family="mxfp6_mxfp4")  # it runs no inputs in MXFP6
    assert unknown.input_rules() == {"mxfp4": "even", "mxfp6_e2m3": "floor"}
    assert unknown.foreign_input_rules() == {}


def test_compressed_tensors_scales_inputs_by_the_rules_that_we_have_of_it():
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    amax = torch.logspace(-6, 6, 4001, base=2).bfloat16()
    for name, (rule,) in COMPRESSED_TENSORS_INPUT_RULES.items():
        block_format = get_block_format(name)
        own = utils.generate_mx_scales(amax, block_format.element_bits) - 127
        ours = amax_to_scale_exponent(amax.float(), block_format.element, rule)
        is_other = own.int() != ours
        full = amax.float() / block_format.element.max_normal
        is_full = full.log2() == full.log2().round()
        assert bool((is_other <= is_full).all()) and is_other.any() == (rule == "rceil")


def test_other_rules_than_the_runtimes_are_warned_of_once_and_measured(make_tiny):
    config = SearchConfig(
        name="random",
        family="mxfp8_mxfp4",
        target="vllm",
        scale_rules=ScaleRulesConfig(input={"mxfp4": "floor"}),
    )
    with pytest.warns(UserWarning, match="target=vllm") as told:
        model = make_tiny("llama").model
        done = dmx.search(model, BATCHES[:1], dmx.Budget(6.0), config).assignment
    said = [str(w.message) for w in told if "scale_rules.input" in str(w.message)]
    assert len(said) == 1
    assert "by mxfp4 floor, as asked" in said[0] and "them by mxfp4 even or rceil" in said[0]
    assert done.scale_rules["input"] == {"mxfp4": "floor", "mxfp8_e4m3": "rceil"}
    assert set(done.scale_rules["weight"].values()) == {"floor"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"weight": "auto"}, r"search\.scale_rules\.weight='auto' is not allowed"),
        (
            {"weight": "round"},
            r"search\.scale_rules\.weight='round'.*floor, ceil, even, rceil, mse",
        ),
        ({"input": "mse"}, r"search\.scale_rules\.input='mse'.*floor, ceil, even, rceil"),
        ({"input": {"mxfp4": "mse"}}, r"search\.scale_rules\.input\.mxfp4='mse'"),
        ({"weight": {"mxfp5": "even"}}, r"search\.scale_rules\.weight='mxfp5'"),
        ({"weight": 3}, r"search\.scale_rules\.weight=3 must be a rule or a dict"),
    ],
)
def test_rules_check_themselves(settings, says):
    with pytest.raises(FormatError, match=says):
        ScaleRulesConfig(**settings)


def test_commands_take_rules_and_rows_say_them(run, record_of, tmp_path):
    rules = ["search.scale_rules.weight={mxfp4: even}", "search.scale_rules.input=rceil"]
    code, _out, err = run(
        compare, *TINY_LAYERS, *rules, "search.target=transformers", "searches=[fisher,differentiable]", "search.steps=3",
        "budgets=[4.7]", "baselines=[uniform]", f"run.folder={tmp_path}/run",
    )  # fmt: skip
    assert code == 0, err
    record = record_of(tmp_path / "run")
    said = "search.target=transformers: mxfp4 rceil (as asked), mxfp6_e2m3 rceil (its own is not known)"
    assert f"scale rules of inputs, {said}" in err
    assert len([w for w in record.warnings if "scale_rules.input: inputs are scaled" in w]) == 1
    assert record.actual["search"] == {"scale_rules": {"input": "rceil"}}
    told = {row.method.base: row.method.scale_rules for row in record.rows}
    assert told["uniform mxfp4"] == "weight: even; input: rceil"
    assert told["fisher"] == told["dMX"] == "weight: mxfp4 even; input: rceil"
    paths = {row.method.base: row.method.path for row in record.rows}
    assert paths["dMX"] == "line" and paths["fisher"] == "element"
    code, _out, err = run(
        search, *TINY_LAYERS, "search.scale_rule=even", f"run.folder={tmp_path}/old"
    )
    assert code == 2 and "search.scale_rules.weight=even search.scale_rules.input=even" in err


def test_files_of_a_descent_that_knew_floor_alone_are_still_read():
    facts = SearchFacts.from_dict({"name": "differentiable", "searched_under": "floor"})
    assert facts.to_dict() == {"name": "differentiable", "searched_under": "floor"}
    with pytest.raises(ValueError, match=r"search\.path is 'lines', expected 'element' or 'line'"):
        SearchFacts.from_dict({"path": "lines"})
