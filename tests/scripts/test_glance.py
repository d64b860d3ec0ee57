"""The overview of quality.md: which settings have a line, what their cells and labels say, and which are drawn."""

import math
from dataclasses import replace

import pytest

from experiments.reporting.pages.overview import readme_table
from experiments.reporting.pages.quality import quality_pages
from experiments.reporting.record import Limit, Method, Record, Row

from ..experiments.helpers import FULL, method, row, uniform
from .test_make_tables import PRESETS, compared

BUDGETS = (4.25, 4.5, 5.0)
MXFP4 = {"weight": {"q": {"mxfp4": 7}}}
MIXED = {"weight": {"q": {"mxfp4": 3, "mxfp6_e2m3": 4}}}
EVEN = "mxfp4 even"
BF16 = compared(row(FULL, 3.0, None, seed=None))
JOINT = method("joint", weights="learned", path="line", scale_rules=EVEN)


def searched(of: Method, nlls: dict[float, float], seed: int = 0, **fields) -> list[Row]:
    """A row for each budget."""
    known = {"format_counts": MIXED} | fields
    return [row(of, nll, limit, seed=seed, **known) for limit, nll in nlls.items()]


def line(nll: float, slope: float = 0.2) -> dict[float, float]:
    """Losses that fall with the bits to `nll` at 5."""
    return {limit: nll + slope * (5.0 - limit) for limit in BUDGETS}


def learned(shifts: tuple[float, ...] = (-0.01, -0.02, 0.01)) -> Record:
    """Learned weights of joint and kl_per_bit, whose losses differ by so much at each budget."""
    heuristic = line(3.1)
    ours = {
        limit: nll + shift for (limit, nll), shift in zip(heuristic.items(), shifts, strict=True)
    }
    theirs = replace(JOINT, search="kl_per_bit", path="element")
    return compared(*searched(JOINT, ours), *searched(theirs, heuristic))


def plain() -> Record:
    return compared(*searched(method(), line(3.3)), *searched(method("kl_per_bit"), line(3.32)))


def with_inputs(limit: float, nll: float, rules: str = EVEN, **fields) -> Record:
    of = replace(JOINT, input_format="mxfp8_e4m3", scale_rules=f"weight: {rules}; input: floor")
    return compared(*searched(replace(of, **fields), {limit: nll}, format_counts=MIXED))


def cheapest(of: Method, nll: float) -> Record:
    """Every weight in MXFP4: what rules of other formats are is not seen in its records."""
    rules = of.scale_rules.replace(EVEN, "even")
    flat = replace(of, search="kl_per_bit", path="element", scale_rules=rules)
    return compared(*searched(flat, {4.0: nll}, format_counts=MXFP4))


def parts(*of: Record) -> tuple[str, str]:
    """The first paragraph, and the part at a glance."""
    content = quality_pages(of, PRESETS).texts["quality.md"]
    glance = content.partition("at a glance\n")[2].partition("\n## ")[0]
    return content.split("\n\n")[1], glance


def text(nll: float) -> str:
    return f"{math.exp(nll):.2f}"


def test_a_setting_is_one_line_of_pairs():
    twice = compared(*searched(method(), line(3.3), seed=1))
    _, glance = parts(plain(), twice, learned())
    cells = " | ".join(f"{text(x)} / {text(x + 0.02)}†" for x in line(3.3).values())
    assert "| setting | ≤ 4.25 | ≤ 4.5 | ≤ 5 |" in glance
    assert f"| plain | {cells} |" in glance and "†: one seed." in glance
    assert "| learned weights, even |" in glance and "scale rule of MXFP4 is even" in glance


def test_the_headline_names_the_best_and_hides_no_budget():
    rotated = compared(*searched(replace(JOINT, transform="hadamard_block"), line(3.05)))
    first, _ = parts(BF16, plain(), learned(), rotated)
    best = (
        f"{text(3.05)} with hadamard block and learned weights, {text(3.11)} with learned weights"
    )
    assert (
        f"at 5 element_bits, where bf16 has {text(3.0)}, dMX has {best} and {text(3.3)} alone."
        in first
    )
    assert (
        "dMX joint with learned weights changes perplexity by -1.0 % at 4.25, -2.0 % at 4.5 and +1.0 % at 5 "
        "element_bits, -0.7 % on average; dMX changes perplexity by" in first
    )


def test_what_was_measured_once_and_other_families_stand_apart():
    once = compared(row(method("kl_per_bit", weights="mse"), 3.4, 4.5))
    family = compared(*searched(replace(JOINT, family="mxfp8_mxfp4"), line(3.2)))
    _, glance = parts(plain(), once, family)
    table, _, besides = glance.partition("Besides, of other families or measured once:")
    assert "mse" not in table and "family" not in table
    assert f"| mse | kl_per_bit | ≤ 4.5 | {text(3.4)}† |" in besides
    assert (
        f"| learned weights, family 4/8, even | dMX joint, straight line | ≤ 5 | {text(3.2)}† |"
        in besides
    )
    assert "Besides" not in parts(once)[1]  # nothing else has a line


def test_inputs_in_a_format_of_their_own_have_lines_and_a_sentence():
    flat = replace(JOINT, input_format="mxfp8_e4m3", scale_rules=f"weight: {EVEN}; input: floor")
    records = [BF16, learned(), with_inputs(4.5, 3.05), cheapest(flat, 3.08)]
    first, glance = parts(*records)
    assert f"| W4A8, learned weights, even | {text(3.08)}† | – | {text(3.05)}† / – | – |" in glance
    assert "One number: all layers have one format" in glance
    note = "W4A8: every input is mxfp8_e4m3, formats of weights alone are chosen, and their bits alone count"
    assert f"{note}; one seed." in glance
    assert (
        f"Inputs in few bits cost more than weights: at 4.5 element_bits with learned weights dMX has {text(3.05)} with "
        f"every input in mxfp8_e4m3 (W4A8, bits of weights alone, one seed), {text(3.18)} where"
        in first
    )
    assert "cost more" not in parts(BF16, learned(), with_inputs(4.5, 3.15))[0]
    readme = readme_table(records, PRESETS, None)
    assert f"| dMX joint + learned weights, W4A8 | {text(3.08)} | {text(3.05)} |  |  |" in readme
    assert f"{note}; one seed." in readme[-1]


def test_readme_has_what_engines_load_in_fused_units():
    served = replace(
        JOINT, family="mxfp8_mxfp4", units="fused", scale_rules=f"{EVEN}, mxfp8_e4m3 rceil"
    )
    theirs = replace(served, search="fisher", path="element")
    scaled = replace(JOINT, family="nvfp4 fp8 bf16", units="fused", scale_rules="floor")
    flat = replace(scaled, search="fisher", path="element")
    limit = Limit(6.0, "bits_per_element")
    steps = {"format_counts": MIXED, "weights": {"name": "learned", "steps": 300, "lr": 2e-4}}
    once = steps | {"format_counts": {"weight": {"q": {"nvfp4": 7}}}, "bits_per_element": 4.5}
    rows = [
        *searched(served, {4.5: 3.2}),
        *searched(theirs, {4.5: 3.3}),
        replace(row(scaled, 3.1, 6.0, **steps), budget=limit),
        replace(row(flat, 3.15, 6.0, **steps), budget=limit),
        replace(row(flat, 3.4, 4.5, **once), budget=replace(limit, limit=4.5)),
        row(uniform("fp8"), 3.05, None, bits_per_element=8.0),
    ]
    lines = readme_table([BF16, plain(), compared(*rows)], PRESETS, None)
    name = "+ learned weights, mxfp4/mxfp8_e4m3, fused units |"
    assert f"| best heuristic {name} {text(3.3)} |  |  |" in "\n".join(lines)
    assert f"| dMX joint {name} {text(3.2)} |  |  |" in "\n".join(lines)
    assert (
        f"nvfp4/fp8/bf16, fused units, learned weights, 300 steps: dMX {text(3.1)} at 6 bits with scales "
        f"(best heuristic {text(3.15)}); nvfp4 everywhere {text(3.4)} at 4.5, one seed; to nearest, fp8 "
        f"{text(3.05)} at 8."
    ) in lines
    methods = quality_pages([BF16, compared(*rows)], PRESETS).texts["quality_methods.md"]
    assert f"{text(3.4)} (1), all nvfp4 |" in methods


def test_another_rule_of_the_inputs_is_another_setting():
    rules = f"weight: {EVEN}; input: rceil"
    _, glance = parts(learned(), with_inputs(4.5, 3.05), with_inputs(5.0, 3.01, scale_rules=rules))
    assert f"W4A8, learned weights, scales {rules} | dMX joint" in glance


def names_drawn(*of: Record) -> list[str]:
    left, _ = quality_pages(of, PRESETS).pictures["quality.png"].axes
    return [name for name in left.get_legend_handles_labels()[1] if not name.startswith("_")]


def test_lines_that_are_near_single_or_of_another_rule_are_not_drawn():
    near = compared(*searched(method(transform="learned"), line(3.201)))
    rotated = compared(*searched(method(transform="hadamard_block"), line(3.2)))
    point = compared(
        row(method(weights="gptq"), 3.1, 5.0), row(method(weights="gptq"), 3.1, 5.0, seed=1)
    )
    rule = compared(*searched(method(scale_rules=EVEN), {4.5: 3.2, 5.0: 3.1}))
    drawn = names_drawn(plain(), near, rotated, point, rule)
    assert drawn == ["plain", "hadamard block"]
    assert names_drawn(point) == ["gptq"]


@pytest.mark.parametrize("worse", [3.25, 4.0])
def test_a_picture_has_at_most_eight_lines_and_the_plain_one(worse):
    stages = [("gptq", 3.1), ("learned", 3.0), ("learned_scales", 3.05), ("mse", worse)]
    rotations = [("none", 0.0), ("hadamard_block", 0.025), ("learned", -0.025)]
    records = [
        compared(*searched(method(transform=name, weights=stage), line(nll + shift)))
        for stage, nll in stages
        for name, shift in rotations
    ]
    drawn = names_drawn(compared(*searched(method(), line(4.2))), *records)
    assert len(drawn) == 8 and drawn[0] == "plain"
    assert not any("mse" in name for name in drawn)


def test_budgets_of_another_unit_are_no_part_of_the_picture():
    other = [
        replace(r, budget=Limit(5.25, "bits_per_element")) for r in searched(method(), {5.0: 3.2})
    ]
    pages = quality_pages([plain(), compared(*other)], PRESETS)
    left, _ = pages.pictures["quality.png"].axes
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["4.25", "4.5", "5"]
