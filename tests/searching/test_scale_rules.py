"""search.scale_rules: what a search states is what it measures with and what the assignment has."""

import pytest
import torch

import dmx
from dmx.applying.linear import quantized_layers
from dmx.assignment.assignment import Assignment
from dmx.assignment.facts import SearchFacts
from dmx.assignment.rules import ScaleRulesConfig
from dmx.errors import FormatError
from dmx.formats import MXFP4, MXFP6_E2M3, MXFP8_E4M3
from dmx.numerics import fake_quant
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


@pytest.mark.parametrize(
    ("settings", "says"),
    [
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
        compare, *TINY_LAYERS, *rules, "searches=[fisher,differentiable]", "search.steps=3",
        "budgets=[4.7]", "baselines=[uniform]", f"run.folder={tmp_path}/run",
    )  # fmt: skip
    assert code == 0, err
    record = record_of(tmp_path / "run")
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
