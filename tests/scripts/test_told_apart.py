"""Rows that differ in more than their seed never pool: made from records of real runs, one change each."""

import dataclasses
from collections import Counter
from typing import get_args

import pytest

from dmx.assignment.facts import Kept
from dmx.errors import DmxError
from dmx.weights.config import GptqConfig
from dmx.weights.learn_config import LearnConfig
from experiments.reporting.groups import group_rows
from experiments.reporting.pages.overview import readme_table
from experiments.reporting.pages.quality import quality_pages
from experiments.reporting.pooling import pooled, search_settings
from experiments.reporting.record import Limit, Method, Record
from experiments.reporting.stages import stage_text, usual_drawn, with_stage
from scripts.make_tables import RECORDS, presets

PRESETS = presets()
REAL = Record.load(RECORDS / "quality_test_learn_none_45_1.json")
JOINT, LEARNED = REAL.rows
KL_PER_BIT = dataclasses.replace(
    LEARNED, method=dataclasses.replace(LEARNED.method, search="kl_per_bit", path="element")
)
replace = dataclasses.replace


def made(*rows, **fields):
    return replace(REAL, results=rows or (KL_PER_BIT, LEARNED), **fields)


def told(row=LEARNED, **fields):
    """A row of another method."""
    return replace(row, method=replace(row.method, **fields))


def learned_in(row=LEARNED, **facts):
    """A row whose weights learned with other settings."""
    return replace(row, weights={**row.weights, **facts})


def rounded_in(order="activity", **facts):
    """A row whose weights GPTQ rounded."""
    return replace(told(weights="gptq"), weights={"name": "gptq", "order": order, **facts})


def training(**fields):
    return {**REAL.data, "training": replace(REAL.data["training"], **fields)}


def searched(**settings):
    return {**REAL.requested, "search": {**REAL.requested["search"], **settings}}


def in_bits(row, limit):
    return replace(row, budget=Limit(limit, "bits_per_element"))


ROWS = {
    "950 steps": learned_in(steps=950),
    "lr 0.0001": learned_in(lr=1e-4),
    "warm-up 5": learned_in(warmup=5),
    "norm 0.5": learned_in(max_norm=0.5),
    "inputs in full precision": learned_in(inputs=False),
    "masters bfloat16": learned_in(masters="bfloat16"),
    "moments int8": learned_in(optimizer_state="int8"),
    "learned from all batches": learned_in(batches=954, held_batches=0),
    "200 steps a block": learned_in(block_steps=200),
    "learned scales": told(weights="learned_scales"),
    "family 4/8": told(family="mxfp8_mxfp4"),
    "family nvfp4/fp8/bf16": in_bits(told(family="nvfp4 fp8 bf16"), 5.5),
    "inputs mxfp6_e2m3": told(input_format="mxfp6_e2m3"),
    "inputs mxfp8_e4m3": told(input_format="mxfp8_e4m3"),
    "fused units": told(units="fused"),
    "gptq": rounded_in(),
    "gptq, natural order": rounded_in("natural"),
    "gptq, inputs corrected": rounded_in(correct_inputs=True),
    "gptq, scales searched": rounded_in(scales="search"),
}
"""What a table's title or setting says -> a row that it is said of."""


def unusual(row):
    """A record of a row, with a heuristic of its kind."""
    return made(told(row, search="kl_per_bit", path="element"), row)


RECORDS_OF = {text: unusual(row) for text, row in ROWS.items()} | {
    "4 x 1024 tokens a step": made(data=training(batch_shape=(4, 1024))),
    "0.5 M tokens of fineweb+c4": made(
        data=training(name="fineweb+c4", sha256="c4", tokens=500_000)
    ),
    "each expert a unit": made(
        *(replace(row, expert_tokens={"b": (7, 0)}) for row in (KL_PER_BIT, LEARNED)),
        requested=searched(experts="each"),
    ),
    "7.82 M tokens of text 123456": made(data=training(sha256="1234567890")),
}


def test_what_differs_in_more_than_a_seed_is_a_table_of_its_own_that_says_so():
    records = [made(), made(), *RECORDS_OF.values()]
    tables = pooled(records, PRESETS)
    assert len(tables) == 1 + len(RECORDS_OF)
    usual = {"learned weights", "scales mxfp4 even"}
    said = {", ".join(p for p in t.setting.split(", ") if p not in usual): t for t in tables}
    assert set(said) == {"", *RECORDS_OF}
    for text, table in said.items():
        if not text:
            continue
        assert table.title != next(iter(tables)).title
        assert [len(group.rows) for group in tables[table]] == [1, 1], text
    content = quality_pages(records, PRESETS).texts["quality_methods.md"]
    titles = [line for line in content.splitlines() if line.startswith("## Smol")]
    assert len(titles) == len(set(titles)) == len(tables)
    assert all(count == 1 for count in Counter(t.setting for t in tables).values())


@pytest.mark.parametrize("text", RECORDS_OF)
def test_a_method_is_compared_with_heuristics_of_its_own_setting(text):
    better = tuple(nll - 0.1 for nll in KL_PER_BIT.window_nll)
    usual = made(replace(KL_PER_BIT, window_nll=better, perplexity=20.0), LEARNED)
    content = quality_pages([usual, usual, RECORDS_OF[text]], PRESETS).texts["quality.md"]
    lines = [x for x in content.splitlines() if text in x and "| dMX joint" in x]
    # The heuristic of the setting has the same windows; those of the usual one are far below.
    assert lines and any("| same |" in line for line in lines), content


def test_paths_and_searches_stand_in_one_table_under_names_of_their_own():
    exact = told(search="differentiable")
    kinds = [
        exact, told(exact, path="element"), told(search="fisher", path="element"),
        told(search="kl_per_bit", path="element"), told(exact, polish=True), LEARNED,
    ]  # fmt: skip
    line = made(
        told(exact, path="line"), requested=searched(descent={"lr": 1.0, "penalty": "target"})
    )
    ((_, groups),) = pooled([made(*kinds), line], PRESETS).items()
    labels = [group.method.short_label for group in groups]
    assert all(len(group.rows) == 1 for group in groups) and len(set(labels)) == 7
    assert labels[:4] == ["dMX, straight line", "dMX", "fisher", "kl_per_bit"]


def test_an_adaptive_search_is_called_by_what_it_kept_where_its_seeds_agree():
    scores, fisher, descent = (
        told(KL_PER_BIT, search="adaptive", kept=kept) for kept in get_args(Kept)
    )
    for rows, says in (
        ([scores, scores], "adaptive: kl_per_bit"),
        ([fisher, fisher], "adaptive: fisher"),
        ([descent, descent], "adaptive: dMX"),
        ([scores, descent], "adaptive"),
    ):
        (group,) = group_rows([replace(row, seed=seed) for seed, row in enumerate(rows)])
        assert group.method.base == says and len(group.seeds) == 2


def test_an_automatic_polish_is_told_by_what_it_became():
    asked = {**REAL.requested, "search": {**REAL.requested["search"], "polish": {"rounds": "auto"}}}
    record = replace(REAL, requested=asked, actual={"search": {"polish": {"rounds": 12}}})
    assert search_settings(record)["polish.rounds"] == 12
    assert "polish.rounds" not in search_settings(replace(record, actual={}))


def test_seeds_pool_whatever_draws_their_batches():
    other = replace(
        learned_in(seed=2, batches_sha256="0", kl_before=0.5, cuda_graph="off", seconds=1.0), seed=2
    )
    groups = [g for of in pooled([made(LEARNED), made(other)], PRESETS).values() for g in of]
    assert [len(group.rows) for group in groups] == [2]


def test_what_a_search_does_not_read_tells_nothing_apart():
    scores = told(KL_PER_BIT, path="element")
    for row, alike in ((LEARNED, True), (told(search="differentiable"), True), (scores, False)):
        records = [made(row), made(row, requested=searched(score_batches=None))]
        ((_, groups),) = pooled(records, PRESETS).items()
        assert [len(group.seeds) for group in groups] == ([1] if alike else [1, 1])


def test_a_joint_search_on_another_text_is_another_method():
    records = [made(JOINT), made(JOINT), made(JOINT, data=training(sha256="1234567890"))]
    ((_, groups),) = pooled(records, PRESETS).items()
    assert [len(group.rows) for group in groups] == [1, 1]
    assert groups[1].label.endswith(" on 7.82 M tokens of text 123456")


def test_models_of_one_name_with_other_weights_are_refused():
    tenfold = replace(REAL.model, revision=None, note="ten passes over data/pretrain")
    twice = replace(tenfold, note="two passes over data/pretrain")
    with pytest.raises(DmxError, match=r"not measured alike.*another model has another model\.id"):
        pooled([made(model=twice), made(model=tenfold)], PRESETS)
    own = replace(tenfold, id="Llama, trained here, ten passes")
    tables = pooled([made(model=twice), made(model=own)], PRESETS)
    assert sorted(table.model for table in tables) == sorted({own.id, twice.id})


def test_a_run_with_rows_of_several_settings_labels_them_itself():
    rows = [KL_PER_BIT, learned_in(KL_PER_BIT, steps=950), told(KL_PER_BIT, family="mxfp8_mxfp4")]
    shown = [with_stage(row, REAL, usual_drawn([REAL])) for row in rows]
    base = "kl_per_bit + learned weights"
    assert [group.label for group in group_rows(shown)] == [
        f"{base}, scales mxfp4 even",
        f"{base}, 950 steps, scales mxfp4 even",
        f"{base}, family 4/8, scales mxfp4 even",
    ]


def test_usual_settings_are_the_defaults_and_go_without_saying():
    usual = LearnConfig()
    facts = {"name": "learned", "lr": usual.lr, "batches": 7, "held_batches": 1}
    assert stage_text(facts | {"steps": 70}) == stage_text({"name": "learned"}) == ""
    # All took 600 once, also on so few batches.
    assert stage_text(facts | {"steps": 600}) == "600 steps"
    assert stage_text(facts | {"steps": 600, "batches": 93, "held_batches": 4}) == ""
    rounding = {"name": "learned_rounding", "block_steps": 200, "steps": 0}
    assert stage_text(rounding) == stage_text(rounding | {"batches": 7, "held_batches": 1}) == ""
    scales = {"name": "learned_scales", "lr": usual.scale_lr}
    assert stage_text(scales) == "" and stage_text(scales | {"lr": usual.lr}) == "lr 0.0002"
    assert stage_text(None) == stage_text({"name": "mse"}) == ""
    assert stage_text({"name": "gptq", "order": GptqConfig().order}) == ""
    assert stage_text({"name": "gptq"}) == "natural order"  # older ones do not say it
    assert Method(family="mxfp8_mxfp6_mxfp4", search="kl").label == "kl, family 4/6/8"
    listed = Method(family="mxfp4 mxfp8_e5m2", search="kl")
    assert listed.label == "kl, family mxfp4/mxfp8_e5m2"


def test_readme_finds_its_rows_among_others():
    records = [made(), *RECORDS_OF.values(), *([made()] * 2)]
    lines = "\n".join(readme_table(records, PRESETS, None))
    assert f"| dMX joint + learned weights | {24.89} |" in lines
    # Of less text a row that says nothing had fewer.
    assert (
        "Weights learned in 600 steps, or 10 passes over a shorter text, where nothing else is"
        in lines
    )
