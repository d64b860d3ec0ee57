"""search.family as a list: checked, the same as its name, and taken by every search under any scale rules."""

import csv
import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dmx
from dmx.applying.quantizers import continuous_fake_quant, fake_quant
from dmx.assignment.assignment import Assignment
from dmx.assignment.budget import Budget
from dmx.assignment.projection import is_maximal, project
from dmx.assignment.rules import ScaleRulesConfig
from dmx.assignment.space import build_space
from dmx.errors import DmxError, FormatError
from dmx.formats import BIT_UNITS, FAMILIES, family_name, get_family
from dmx.searching import search_space
from dmx.searching.bank import searching_model
from dmx.searching.config import DESCENDING, SEARCHES, SearchConfig
from dmx.searching.descent import shift_to_average
from dmx.searching.offsets import added_bits, anneal, harden, preference, raw_thresholds
from experiments import compare, search
from experiments.reporting.pooling import search_settings
from experiments.reporting.record import Method
from tests.cases import FOUR
from tests.settings import TINY_LAYERS, search_config

LISTS = (
    ["mxfp4", "mxfp6_e3m2"],
    ["mxfp4", "mxfp8_e5m2"],
    ["mxfp4", "mxfp6_e3m2", "mxfp8_e4m3"],
)
EVERY = (*map(get_family, FAMILIES), *map(get_family, LISTS), FOUR)
RULES = ScaleRulesConfig(weight={"mxfp4": "even", "mxfp6_e2m3": "mse"}, input="rceil")


@pytest.fixture
def tiny(tiny_trained):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 256, (2, 32), generator=generator) for _ in range(3)]
    return tiny_trained.model, batches


# ---------------------------------------------------------------- lists


@pytest.mark.parametrize("name", FAMILIES)
def test_a_list_with_a_name_is_that_family(name):
    formats = [f.name for f in FAMILIES[name].formats]
    assert get_family(formats) is get_family(tuple(formats)) is FAMILIES[name]
    assert SearchConfig(family=formats) == SearchConfig(family=name)
    assert family_name(formats) == name and FAMILIES[name].setting == name


def test_aliases_in_a_list_are_resolved():
    assert SearchConfig(family=["mxfp4", "mxfp6"]).family == "mxfp6_mxfp4"
    config = SearchConfig(family=["mxfp4_e2m1", "mxfp8_e5m2"])
    assert config.family == ["mxfp4", "mxfp8_e5m2"]
    assert config.summary().family == ("mxfp4", "mxfp8_e5m2")
    assert str(config.format_family) == "mxfp4 mxfp8_e5m2"


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ([], r"search\.family=\[\] has 0 formats.* two to four formats"),
        (["mxfp4"], r"search\.family=\[mxfp4\] has 1 formats"),
        (["mxfp4", "mxfp4"], r"mxfp4 \(4 bits\) does not have more bits than mxfp4"),
        (["mxfp6_e2m3", "mxfp6_e3m2"], r"mxfp6_e3m2 \(6 bits\) does not have more .*mxfp6_e2m3"),
        (["mxfp8", "mxfp4"], r"search\.family=\[mxfp8_e4m3,mxfp4\].*cheapest first"),
        (["bf16", "fp8"], r"fp8 \(8 bits\) does not have more bits than bf16 \(16\)"),
        (["mxfp4", "nvfp4"], r"nvfp4 \(4 bits\) does not have more bits than mxfp4 \(4\)"),
        (["mxfp4", "mxfp7"], r"search\.family='mxfp7' is no block format\. Did you mean"),
        ("mxfp4", r"search\.family='mxfp4' is no format family.*or a list of two to four"),
        (3, r"search\.family=3 is no format family"),
    ],
    ids=str,
)
def test_what_cannot_be_a_family_is_refused(family, words):
    with pytest.raises(FormatError, match=words):
        SearchConfig(family=family)


def test_a_target_names_the_formats_that_lists_may_have():
    words = r"cannot load mxfp6_e3m2 of search\.family=mxfp4 mxfp6_e3m2.* lists of fp8, mxfp4, mxfp8_e4m3"
    with pytest.raises(FormatError, match=words):
        SearchConfig(family=LISTS[0], target="vllm")
    assert SearchConfig(family=LISTS[0], target="vllm_quark").family == LISTS[0]


# ---------------------------------------------------------------- offsets


@pytest.mark.parametrize("family", EVERY, ids=str)
def test_annealing_ends_at_the_stops_whatever_their_number(family):
    raw = torch.linspace(0, 2, 4001)
    hard = anneal(raw, 1000.0, family)
    expected = torch.tensor(family.stops)[torch.from_numpy(harden(raw.numpy(), family))]
    near = (raw[:, None] - torch.tensor(raw_thresholds(family))).abs().amin(-1) < 0.005
    torch.testing.assert_close(hard[~near], expected[~near], rtol=0, atol=1e-6)
    assert near.sum() < 100
    stops = torch.tensor(family.stops)
    assert torch.equal(anneal(stops, 20.0, family), stops)
    soft = anneal(raw, 0.4, family)
    assert (soft.diff() > 0).all() and soft.min() >= 0 and soft.max() <= 2
    torch.testing.assert_close(
        soft.flip(0), 2 - soft, rtol=0, atol=1e-5
    )  # the middle is the middle


@pytest.mark.parametrize("unit", BIT_UNITS)
@pytest.mark.parametrize("family", EVERY, ids=str)
def test_bits_are_exact_at_the_stops_and_linear_between(family, unit):
    bits = torch.tensor([f.bits(unit) for f in family.formats])
    stops = torch.tensor(family.stops, requires_grad=True)
    added = added_bits(stops, torch.tensor(family.steps(unit)))
    assert torch.equal(bits[0] + added, bits)
    # At a stop the slope of the step above counts, at the last that of the step below.
    (slope,) = torch.autograd.grad(added.sum(), stops)
    steps = torch.tensor(family.steps(unit)) / family.width
    torch.testing.assert_close(slope, torch.cat([steps, steps[-1:]]))
    share = torch.linspace(0, 1, 11)
    for k, (low, high) in enumerate(itertools.pairwise(family.stops)):
        between = added_bits(low + (high - low) * share, torch.tensor(family.steps(unit)))
        expected = added[k] + share * (added[k + 1] - added[k])
        torch.testing.assert_close(between, expected.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", EVERY, ids=str)
def test_a_shift_meets_the_average_of_uneven_steps(family, generator):
    raw = torch.rand(300, generator=generator) * 2
    steps = torch.tensor(family.steps("element_bits"))

    def average_of(rows):
        return added_bits(anneal(rows, 0.4, family), steps).mean(-1)

    top = sum(family.steps("element_bits"))
    for share in (0.15, 0.5, 0.9):
        shifted = shift_to_average(raw, average_of, share * top)
        assert 0 <= share * top - float(average_of(shifted)) < 1e-3 * top


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(EVERY), st.integers(0, 2**32), st.floats(0, 1))
def test_hard_choices_project_onto_any_budget(family, seed, share):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            for i, size in enumerate((64, 32, 96, 32, 160)):
                setattr(self, f"fc{i}", nn.Linear(32, size))

    space = build_space(Many(), family.formats, units="layer")
    low, high = space.bounds("element_bits")
    budget = Budget(low + share * (high - low))
    raw = np.random.default_rng(seed).uniform(0, 2, len(space.units))
    choice, wish = harden(raw, family), preference(raw, family)
    assert choice.max() < len(family.formats) and (np.diff(wish, axis=1) < 0).all()
    chosen = project(space, budget, choice, wish)
    assert is_maximal(space, budget, chosen)
    if space.average(choice, "element_bits") <= budget.limit:
        assert (chosen >= choice).all()  # nothing is lowered without need


# ---------------------------------------------------------------- the soft layer


class Toy(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.fc = nn.Linear(96, 8)
        with torch.no_grad():
            self.fc.weight.copy_(torch.randn(8, 96, generator=generator).sinh())


@pytest.mark.parametrize("family", EVERY, ids=str)
def test_the_soft_layer_at_the_stops_is_the_hard_layer_under_its_rules(family, generator):
    toy, x = Toy(generator), torch.randn(6, 96, generator=generator)
    rules = {
        "weight": dict.fromkeys((f.name for f in family.formats), "mse"),
        "input": {family.formats[0].name: "even"},
    }
    space = build_space(toy, family.formats, choices="separate")
    with torch.no_grad(), searching_model(toy, space, family, rules) as bank:
        for (i, w), (j, b) in itertools.product(enumerate(family.stops), repeat=2):
            bank.set_soft(torch.tensor([w, b]))
            soft = toy.fc(x)
            formats = [family.formats[i], family.formats[j]]
            bank.set_formats(formats)
            assert torch.equal(soft, toy.fc(x))
            weight = fake_quant(toy.fc.weight, formats[0], scale_rule="mse")
            inputs = fake_quant(x, formats[1], scale_rule="floor" if j else "even")
            assert torch.equal(soft, F.linear(inputs, weight, toy.fc.bias))


@pytest.mark.parametrize("n_units", [1, 2], ids=["joint", "separate"])
@pytest.mark.parametrize("family", [get_family(LISTS[2]), FOUR], ids=str)
def test_gradients_of_a_soft_layer_are_those_of_its_operands(family, n_units, generator):
    toy, x = Toy(generator), torch.randn(6, 96, generator=generator, requires_grad=True)
    direction = torch.randn(6, 8, generator=generator)
    weight_rules = ("even", *["floor"] * (len(family.formats) - 1))
    rules = {"weight": {family.formats[0].name: "even"}}
    offsets = torch.tensor([0.8, 1.4][:n_units], requires_grad=True)
    space = build_space(toy, family.formats, choices=("joint", "separate")[n_units - 1])
    with searching_model(toy, space, family, rules) as bank:
        bank.set_soft(offsets)
        (toy.fc(x) * direction).sum().backward()
        seen = offsets.grad.clone(), x.grad.clone()
    offsets.grad = x.grad = None
    weight = continuous_fake_quant(
        toy.fc.weight.detach(), offsets[0], family, scale_rules=weight_rules
    )
    inputs = continuous_fake_quant(x, offsets[-1], family)
    (F.linear(inputs, weight, toy.fc.bias) * direction).sum().backward()
    torch.testing.assert_close(seen[0], offsets.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen[1], x.grad)
    assert (offsets.grad != 0).all()


# ---------------------------------------------------------------- whole searches


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("family", LISTS, ids=str)
def test_every_search_takes_a_list_and_any_rules(name, family, tiny, tmp_path):
    model, batches = tiny
    options = {"weight": RULES.weight, "input": RULES.input}
    config = search_config(
        name=name, family=family, steps=3, scale_rules=ScaleRulesConfig(**options)
    )
    space = search_space(model, config)
    limit = float(np.mean(space.bounds("element_bits")))
    result = dmx.search(model, batches, Budget(limit), config)
    done = result.assignment
    assert done.bits["element_bits"] <= limit and set(done.formats.values()) <= set(family)
    assert done.search.family == tuple(family) and not any("gradient" in w for w in result.warnings)
    assert done.search.path == ("line" if name in DESCENDING and result.history else None)
    assert done.search.searched_under is None
    if name != "uniform":
        assert is_maximal(space, Budget(limit), space.choice_of(done.formats))
    assert Assignment.load(done.save(tmp_path / "a.json")) == done


def test_a_name_and_its_list_search_alike_and_resume_each_other(tiny, tmp_path):
    model, batches = tiny
    named = search_config(steps=4, family="mxfp8_mxfp6_mxfp4", path="element")
    listed = search_config(steps=4, family=["mxfp4", "mxfp6_e2m3", "mxfp8_e4m3"])
    first = dmx.search(model, batches, Budget(5.0), named, folder=tmp_path)
    model.register_forward_hook(lambda *_: pytest.fail("a step was taken again"))
    again = dmx.search(model, batches, Budget(5.0), listed, folder=tmp_path)
    assert again.assignment == first.assignment
    np.testing.assert_array_equal(again.raw_offsets, first.raw_offsets)
    assert json.dumps(again.assignment.search.to_dict()) == json.dumps(
        first.assignment.search.to_dict()
    )
    other = search_config(steps=4, family="mxfp8_mxfp6_mxfp4", path="line")
    with pytest.raises(DmxError, match="other settings"):
        dmx.search(model, batches, Budget(5.0), other, folder=tmp_path)


def test_weights_and_inputs_have_paths_of_their_own(tiny):
    model, batches = tiny
    rules = ScaleRulesConfig(input="rceil")
    config = search_config(steps=3, scale_rules=rules)
    assert config.paths == {"weight": "element", "input": "line"}
    facts = dmx.search(model, batches, Budget(5.0), config).assignment.search
    assert (facts.path, facts.input_path) == ("element", "line")
    # Rules of formats that it does not choose from are none of its business.
    other = SearchConfig(scale_rules=ScaleRulesConfig(weight={"mxfp8_e4m3": "rceil"}))
    assert set(other.paths.values()) == {"element"}
    line = search_config(path="line")
    assert set(line.paths.values()) == {"line"} and line.summary().input_path is None
    assert search_config(name="kl", scale_rules=rules).paths == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "lines"}, r"search\.descent\.path='lines'.*Did you mean 'line'.*auto, element"),
        (
            {"path": "element", "family": LISTS[0]},
            r"search\.descent\.path=element: there is no element path between mxfp4, mxfp6_e3m2",
        ),
        (
            {"path": "element", "scale_rules": ScaleRulesConfig(input="even")},
            r"with the scale rules even, even\. It exists for mxfp8_mxfp4, .*path=line, or search\.scale_rules\.input=floor",
        ),
        (
            {"path": "element", "family": "mxfp8_mxfp4", "target": "vllm"},
            r"with the scale rules even, rceil\. .*path=line, or search\.scale_rules\.input=floor",
        ),
    ],
    ids=str,
)
def test_a_path_that_there_is_not_is_refused(options, words):
    with pytest.raises(FormatError, match=words):
        search_config(**options)


# ---------------------------------------------------------------- commands

TINY_STEPS = [*TINY_LAYERS, "search.steps=3"]


def test_commands_take_lists_and_rows_say_them(run, record_of, tmp_path):
    asked = [*TINY_STEPS, "searches=[fisher,differentiable]", "budgets=[4.7]", "baselines=[]"]
    folder = tmp_path / "run"
    code, _out, err = run(
        compare, *asked, "search.family=[mxfp4,mxfp6_e3m2]", f"run.folder={folder}"
    )
    assert code == 0, err
    record = record_of(folder)
    searched = {row.method.base: row.method for row in record.rows if row.method.is_searched}
    assert {m.family for m in searched.values()} == {"mxfp4 mxfp6_e3m2"}
    named = "family mxfp4/mxfp6_e3m2"
    assert searched["dMX"].label == f"dMX, {named}, straight line"
    assert searched["fisher"].label == f"fisher, {named}"
    assert search_settings(record)["family"] == "mxfp4 mxfp6_e3m2"
    with (folder / "results.csv").open() as f:
        table = list(csv.DictReader(f))
    assert {row["family"] for row in table} == {"mxfp4 mxfp6_e3m2"}
    assert {row["path"] for row in table} == {"element", "line"}
    assert f"dMX, {named}, straight line" in (folder / "report.html").read_text()


def test_a_command_takes_a_list_with_a_name_as_that_name(run, record_of, tmp_path):
    families = ("mxfp6_mxfp4", "[mxfp4,mxfp6]")
    texts = []
    for index, family in enumerate(families):
        folder = tmp_path / str(index)
        code, _out, err = run(
            search,
            *TINY_STEPS,
            "search=differentiable",
            "budget.limit=4.7",
            f"search.family={family}",
            f"run.folder={folder}",
        )
        assert code == 0, err
        facts = json.loads((folder / "assignment.json").read_text())
        assert (facts["search"]["family"], facts["search"]["path"]) == ("mxfp6_mxfp4", "element")
        facts["search"].pop("seconds")
        row = next(row for row in record_of(folder).rows if row.method.is_dmx)
        texts.append((facts, row.method, row.nll))
    assert texts[0] == texts[1]
    code, _out, err = run(
        search, *TINY_STEPS, "search.family=[mxfp6,mxfp4]", f"run.folder={tmp_path}/refused"
    )
    assert code == 2 and "Name formats of rising bits, cheapest first" in err


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("element", "dMX"),
        ("line", "dMX, straight line"),
        ("line, element", "dMX, straight line of weights"),
        ("element, line", "dMX, straight line of inputs"),
    ],
)
def test_labels_say_which_operand_took_the_line(path, text):
    assert Method(search="differentiable", path=path).label == text
