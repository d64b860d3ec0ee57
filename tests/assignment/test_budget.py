"""Budgets: what is reachable, that a projection fits and is maximal, and how ties are broken."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dmx.assignment.assignment import make_assignment
from dmx.assignment.budget import Budget
from dmx.assignment.projection import is_maximal, project
from dmx.assignment.space import SearchSpace, Unit, build_space
from dmx.errors import BudgetError, FormatError, ModelError
from dmx.formats import (
    BF16,
    BIT_UNITS,
    FAMILIES,
    FP8,
    MXFP6_E3M2,
    MXFP8_E4M3,
    NVFP4,
    OPERANDS,
    get_family,
)
from dmx.searching.heuristics import uniform_choice

WEIGHTINGS = ("elements", "layers")
CASES = [(f, u, w) for f in FAMILIES for u in BIT_UNITS for w in WEIGHTINGS]


def apart(space):
    """The same space with a choice for each operand."""
    units = [replace(u, name=f"{u.name}:{o}", operands=(o,)) for u in space.units for o in OPERANDS]
    return replace(space, units=tuple(units))


def make_space(sizes, family="mxfp6_mxfp4", weighting="elements", fixed_size=0, names=None):
    names = names or [f"u{i}" for i in range(len(sizes))]
    units = tuple(
        Unit(name, (name,), int(size), int(size) if weighting == "elements" else 1)
        for name, size in zip(names, sizes, strict=True)
    )
    fixed = {"fixed": MXFP6_E3M2} if fixed_size else {}
    return SearchSpace(
        units=units,
        formats=get_family(family).formats,
        granularity="layer",
        shapes={u.name: (1, u.elements) for u in units},
        fixed=fixed,
        fixed_elements=dict.fromkeys(fixed, fixed_size),
        weighting=weighting,
    )


def average_by_hand(space, choice, unit):
    """The definition, in exact integers: bits are multiples of 1/4."""
    quarters = [round(4 * f.bits(unit)) for f in space.formats]
    by_elements = space.weighting == "elements"
    pairs = [
        (u.elements if by_elements else 1, quarters[i])
        for u, i in zip(space.units, choice, strict=True)
    ]
    for name, size in space.fixed_elements.items():
        for _ in OPERANDS if space.is_separate else OPERANDS[:1]:
            pairs.append((size if by_elements else 1, round(4 * space.fixed[name].bits(unit))))
    return sum(w * q for w, q in pairs) / (4 * sum(w for w, _ in pairs))


def fits_maximally(space, budget, choice, gain=None):
    """Independent of `project` and `is_maximal`: tries every raise."""
    if average_by_hand(space, choice, budget.unit) > budget.limit:
        return False
    for u in range(len(choice)):
        useful = choice[u] < len(space.formats) - 1 and (gain is None or gain[u, choice[u]] > 0)
        raised = [c + (i == u) for i, c in enumerate(choice)]
        if useful and average_by_hand(space, raised, budget.unit) <= budget.limit:
            return False
    return True


def random_case(rng, family, unit, weighting):
    n = int(rng.integers(1, 24))
    sizes = 2 ** rng.integers(0, 28, n) if rng.random() < 0.5 else rng.integers(1, 10**9, n)
    fixed = int(rng.integers(1, 10**6)) if rng.random() < 0.3 else 0
    space = make_space(sizes, family, weighting, fixed)
    if rng.random() < 0.3:
        space, n = apart(space), 2 * n
    low, high = space.bounds(unit)
    choice = rng.integers(0, len(space.formats), n)
    # A limit that some choice meets exactly is where rounding would show.
    limit = space.average(choice, unit) if rng.random() < 0.4 else rng.uniform(low, high * 1.05)
    wish = rng.integers(0, 4, (n, len(space.formats) - 1)).astype(float)  # many ties
    gain = rng.normal(size=wish.shape) if rng.random() < 0.5 else None
    return space, Budget(float(limit), unit), rng.integers(0, len(space.formats), n), wish, gain


@pytest.mark.parametrize(("family", "unit", "weighting"), CASES)
def test_projections_onto_random_budgets_fit_and_are_maximal(family, unit, weighting):
    rng = np.random.default_rng([CASES.index((family, unit, weighting)), 1])
    for _ in range(100):  # 12 cases: 1200 budgets
        space, budget, choice, wish, gain = random_case(rng, family, unit, weighting)
        before = choice.copy()
        projected = project(space, budget, choice, wish, gain=gain)
        assert fits_maximally(space, budget, projected, gain), (space, budget, choice)
        assert is_maximal(space, budget, projected, gain=gain)
        np.testing.assert_array_equal(choice, before)  # the argument is not changed
        again = project(space, budget, projected, wish, gain=gain)
        np.testing.assert_array_equal(again, projected)  # what fits and is maximal stays


@pytest.mark.parametrize(("family", "unit", "weighting"), CASES)
def test_a_joint_choice_has_the_same_bits_in_the_space_of_separate_operands(
    family, unit, weighting
):
    rng = np.random.default_rng([CASES.index((family, unit, weighting)), 3])
    for _ in range(50):
        sizes = rng.integers(1, 10**9, int(rng.integers(1, 24)))
        space = make_space(sizes, family, weighting, int(rng.integers(0, 10**6)))
        choice = rng.integers(0, len(space.formats), len(sizes))
        both = np.repeat(choice, 2)
        assert apart(space).average(both, unit) == space.average(choice, unit)
        assert apart(space).bounds(unit) == space.bounds(unit)
        formats = space.layer_formats(choice)
        assert apart(space).choice_of(formats).tolist() == both.tolist()
        assert apart(space).layer_formats(both, "input") == formats


def test_choices_follow_from_the_formats_of_both_operands():
    space = apart(make_space([3, 5, 11], "mxfp8_mxfp6_mxfp4"))
    for choice in ([0, 1, 2, 0, 1, 1], [2, 2, 0, 1, 0, 0]):
        formats, inputs = (space.layer_formats(choice, operand) for operand in OPERANDS)
        assert space.choice_of(formats, inputs).tolist() == choice
    joint = make_space([3, 5, 11], "mxfp8_mxfp6_mxfp4")
    with pytest.raises(ValueError, match="mxfp6_e2m3 of the input of u1"):
        joint.choice_of(formats, inputs)
    with pytest.raises(KeyError):
        joint.choice_of({"u0": "mxfp4"}, {"u0": "mxfp4"})


def test_the_check_of_maximality_can_fail():
    space, budget = make_space([10, 10, 10]), Budget(5.0)
    assert not fits_maximally(space, budget, [0, 0, 0])
    assert not fits_maximally(space, budget, [1, 1, 0])
    assert not is_maximal(space, budget, np.array([0, 0, 0]))
    assert not is_maximal(space, budget, np.array([1, 1, 0]))
    assert is_maximal(space, budget, np.array([1, 0, 0]))
    worthless = np.array([[1.0], [0.0], [-1.0]])
    assert is_maximal(space, Budget(6.0), np.array([1, 0, 0]), gain=worthless)


def test_a_choice_that_fits_only_rises():
    rng = np.random.default_rng(2)
    for case in CASES:
        space, budget, choice, wish, gain = random_case(rng, *case)
        if space.average(choice, budget.unit) <= budget.limit:
            assert (project(space, budget, choice, wish, gain=gain) >= choice).all()


@pytest.mark.parametrize("unit", BIT_UNITS)
def test_a_limit_equal_to_a_reachable_average_is_reached_exactly(unit):
    # 1/3 has no exact float: the average and the limit must round alike.
    for sizes in ([1, 1, 1], [7, 11, 13, 17], [576 * 576, 192 * 576, 192 * 576, 1536 * 576]):
        space = make_space(sizes)
        for pattern in range(2 ** len(sizes)):
            choice = [pattern >> i & 1 for i in range(len(sizes))]
            budget = Budget(space.average(choice, unit), unit)
            wish = np.array(choice, dtype=float)[:, None]
            np.testing.assert_array_equal(project(space, budget, choice, wish), choice)
            assert average_by_hand(space, choice, unit) == pytest.approx(budget.limit, rel=1e-15)


def test_bits_per_element_and_element_bits_of_one_choice_differ_by_a_quarter():
    space = make_space([3, 5, 11], "mxfp8_mxfp6_mxfp4", fixed_size=4)
    element, stored = (space.average([0, 1, 2], unit) for unit in BIT_UNITS)
    assert element == (4 * 3 + 6 * 5 + 8 * 11 + 6 * 4) / 23
    assert stored == pytest.approx(element + 0.25, rel=1e-15)


def test_over_budget_the_least_wanted_step_is_taken_back_first():
    space = make_space([10, 10, 10, 10])
    wish = np.array([[0.4], [0.1], [0.3], [0.2]])
    assert project(space, Budget(5.0), [1, 1, 1, 1], wish).tolist() == [1, 0, 1, 0]


def test_room_is_filled_by_the_most_wanted_step_that_fits():
    space = make_space([60, 10, 20, 10])
    wish = np.array([[0.9], [0.1], [0.5], [0.2]])
    assert project(space, Budget(4.6), [0, 0, 0, 0], wish).tolist() == [0, 0, 1, 1]


def test_ties_go_by_name_whatever_the_order_of_the_units():
    wish = np.zeros((3, 1))
    for names in (["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"]):
        space = make_space([1, 1, 1], names=names)
        for start in ([0, 0, 0], [1, 1, 1]):
            choice = project(space, Budget(4 + 2 / 3 + 1e-9), start, wish)
            assert [n for n, c in zip(names, choice, strict=True) if c] == ["a"]


def test_a_second_step_waits_for_the_first():
    space = make_space([1, 1], "mxfp8_mxfp6_mxfp4")
    wish = np.array([[0.0, 9.0], [1.0, 2.0]])  # unit 0 wants 6 -> 8 most, 4 -> 6 least
    assert project(space, Budget(6.0), [0, 0], wish).tolist() == [0, 2]
    assert project(space, Budget(7.0), [0, 0], wish).tolist() == [1, 2]


def test_steps_without_gain_leave_room_unused():
    space = make_space([1, 1])
    gain = np.array([[0.0], [1.0]])
    assert project(space, Budget(6.0), [0, 0], np.zeros((2, 1)), gain=gain).tolist() == [0, 1]


def test_uniform_is_the_largest_format_that_fits():
    space = make_space([5, 7], "mxfp8_mxfp6_mxfp4")
    for limit, expected in ((4.0, 0), (5.999, 0), (6.0, 1), (7.9, 1), (8.0, 2), (100.0, 2)):
        assert uniform_choice(space, Budget(limit)).tolist() == [expected] * 2


# ---------------------------------------------------------------- refusals


def test_an_unreachable_budget_says_the_range():
    space = make_space([1, 1], "mxfp8_mxfp4")
    words = r"budget\.limit=3\.9 element_bits is below .*: 4 \(all mxfp4\).* 4 to 8\. Raise"
    for call in (
        lambda b: space.check_budget(b),
        lambda b: project(space, b, [0, 0], np.zeros((2, 1))),
        lambda b: uniform_choice(space, b),
    ):
        with pytest.raises(BudgetError, match=words):
            call(Budget(3.9))
    with pytest.raises(BudgetError, match=r"4\.25 to 8\.25"):
        space.check_budget(Budget(4.0, "bits_per_element"))


def test_the_lowest_budget_that_a_refusal_names_is_taken():
    space = build_space(toy(**linears("a", size=(9, 96))), (NVFP4, FP8))  # 4.5 + 32 / 864
    with pytest.raises(BudgetError, match=r"Reachable with \[nvfp4, fp8\]: ") as refused:
        space.check_budget(Budget(4.5, "bits_per_element"))
    named = float(str(refused.value).partition("]: ")[2].split()[0])
    space.check_budget(Budget(named, "bits_per_element"), warn=False)


def test_a_budget_above_all_gives_all_high_and_says_so():
    space = make_space([1, 2])
    with pytest.warns(UserWarning, match=r"not below the dearest .* no layer back from mxfp6_e2m3"):
        space.check_budget(Budget(6.0))
    assert project(space, Budget(16.0), [0, 0], np.zeros((2, 1))).tolist() == [1, 1]


@pytest.mark.parametrize("limit", [math.nan, math.inf, -math.inf, 0, -1.0, "5", None, True, [5.0]])
def test_a_limit_that_is_no_number_of_bits_is_refused(limit):
    with pytest.raises(BudgetError, match=r"budget\.limit=.*Give a finite number > 0"):
        Budget(limit)


def test_an_unknown_unit_of_bits_names_the_nearest():
    with pytest.raises(FormatError, match=r"budget\.unit='bits'.*element_bits, bits_per_element"):
        Budget(5.0, "bits")
    with pytest.raises(FormatError, match=r"budget\.unit"):
        Budget(5.0, None)


# ---------------------------------------------------------------- units of a model


def toy(**layers):
    model = nn.Module()
    model.block = nn.ModuleDict(layers)
    return model


def linears(*names, size=(32, 32)):
    return {name: nn.Linear(size[1], size[0], bias=False) for name in names}


def test_fused_units_join_what_vllm_joins(tiny_random):
    space = build_space(tiny_random.model, get_family("mxfp6_mxfp4").formats)
    assert [(u.name.split("layers.")[1], len(u.layers)) for u in space.units[:4]] == [
        ("0.self_attn.{q_proj,k_proj,v_proj}", 3),
        ("0.self_attn.o_proj", 1),
        ("0.mlp.{gate_proj,up_proj}", 2),
        ("0.mlp.down_proj", 1),
    ]
    assert len(space.units) == 8 and space.unquantized == ("lm_head",)
    separate = build_space(tiny_random.model, space.formats, choices="separate")
    assert [u.name for u in separate.units] == [
        f"{u.name}:{operand}" for u in space.units for operand in OPERANDS
    ]
    assert separate == apart(space)
    layers = build_space(tiny_random.model, space.formats, units="layer")
    assert len(layers.units) == 14 and layers.shapes == space.shapes
    assert sum(u.elements for u in layers.units) == sum(u.elements for u in space.units)


def test_groups_are_built_from_modules_that_exist():
    space = build_space(toy(**linears("q_proj", "v_proj", "fc")), get_family("mxfp6_mxfp4").formats)
    assert [u.layers for u in space.units] == [("block.q_proj", "block.v_proj"), ("block.fc",)]


def test_layers_that_no_block_of_32_divides_stay_in_bf16():
    odd = nn.Linear(40, 32)
    space = build_space(toy(odd=odd, **linears("fc")), get_family("mxfp6_mxfp4").formats)
    assert space.unquantized == ("block.odd",) and list(space.shapes) == ["block.fc"]


def test_a_shared_weight_counts_once_and_shares_one_choice():
    layers = linears("a", "b", "c")
    layers["b"].weight = layers["a"].weight
    space = build_space(toy(**layers), get_family("mxfp6_mxfp4").formats, units="layer")
    assert [(u.layers, u.elements) for u in space.units] == [
        (("block.a", "block.b"), 1024),
        (("block.c",), 1024),
    ]
    assert space.model_elements == 2048


def test_a_shared_weight_of_fixed_layers_counts_once():
    layers = linears("a", "b", "c", "d")
    layers["b"].weight = layers["a"].weight
    layers["d"].weight = layers["c"].weight
    model, formats = toy(**layers), get_family("mxfp6_mxfp4").formats
    space = build_space(model, formats, fixed={"*.[abd]": "mxfp8"})
    assert space.fixed_elements == {"block.a": 1024, "block.b": 0, "block.d": 0}  # d as c
    assert space.average([0], "element_bits") == 6.0
    bits = make_assignment(space, np.array([0]), model).bits
    assert bits["whole_model_bits_per_element"] == bits["bits_per_element"] == 6.25


def test_fixed_layers_count_and_bf16_layers_do_not():
    space = build_space(
        toy(**linears("a", "b", "c", "d")),
        get_family("mxfp6_mxfp4").formats,
        exclude=["*.d"],
        fixed={"*.a": "mxfp8", "*.[ab]": "bf16"},  # the first match counts
    )
    assert space.fixed == {"block.a": MXFP8_E4M3} and BF16 not in space.fixed.values()
    assert space.unquantized == ("block.b", "block.d")
    assert space.average([0], "element_bits") == 6.0  # c at 4, a at 8
    assert space.bounds("element_bits") == (6.0, 7.0)


def test_meta_and_real_models_have_the_same_space(tiny_random):
    formats = get_family("mxfp6_mxfp4").formats
    meta = build_space(tiny_random.model.to("meta"), formats, units="layer")
    assert meta.total_weight == 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 128)


def test_tied_embeddings_count_once(make_tiny):
    tied, free = make_tiny("smollm2").model, make_tiny("llama").model
    formats = get_family("mxfp6_mxfp4").formats
    kept = build_space(tied, formats)
    assert kept.unquantized == ("lm_head",)
    assert build_space(free, formats).model_elements - kept.model_elements == 288 * 64
    asked = build_space(tied, formats, include_lm_head=True)
    assert "lm_head" in asked.shapes and asked.model_elements == kept.model_elements


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"exclude": ["*.nothing"]},
            r"search\.exclude: .*'\*\.nothing' matches none of the 2",
        ),
        ({"fixed": {"fc": "mxfp4"}}, r"search\.fixed: pattern 'fc' matches none.*whole names"),
        ({"exclude": ["*"]}, r"nothing to search: 2 linear layers.*excluded: 2"),
        ({"fixed": {"*": "mxfp4"}}, r"nothing to search.*fixed: 2.*Loosen search\.exclude"),
    ],
)
def test_patterns_that_leave_nothing_or_match_nothing_are_refused(options, words):
    with pytest.raises(ModelError, match=words):
        build_space(toy(**linears("fc", "out")), get_family("mxfp6_mxfp4").formats, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fixed": {"*.fc": "mxfp5"}}, r"search\.fixed='mxfp5' is no block format.*Did you mean"),
        ({"choices": "apart"}, r"search\.choices='apart'.*joint, separate"),
        ({"units": "fuse"}, r"search\.units='fuse'.*Did you mean 'fused'.*fused, layer"),
        ({"weighting": "bytes"}, r"search\.weighting='bytes'.*elements, active, layers"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(options, words):
    with pytest.raises(FormatError, match=words):
        build_space(toy(**linears("fc")), get_family("mxfp6_mxfp4").formats, **options)


def test_a_model_on_the_meta_device_needs_no_memory():
    with torch.device("meta"):
        model = toy(**linears("fc", size=(10**6, 32 * 10**5)))
    assert build_space(model, get_family("mxfp6_mxfp4").formats).units[0].elements == 32 * 10**11
