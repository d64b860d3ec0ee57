"""Assignments: files that survive a round trip, files that are refused, and the bits they state."""

import copy
import json

import pytest

import dmx
import dmx.files
from dmx.applying.linear import quantized_layers
from dmx.assignment.assignment import SCHEMA, Assignment, make_assignment
from dmx.assignment.budget import Budget
from dmx.assignment.facts import SearchFacts
from dmx.assignment.space import build_space
from dmx.errors import AssignmentError, FormatError, RunError
from dmx.formats import get_family, get_format
from dmx.models.identity import architecture_sha256


def made(model, choice=(0, 1), scale_rules="floor", **options):
    space = build_space(model, get_family("mxfp6_mxfp4").formats, **options)
    choice = [choice[i % len(choice)] for i in range(len(space.units))]
    return make_assignment(
        space,
        choice,
        model,
        budget=Budget(5.5),
        search=SearchFacts(name="x", seed=3),
        scale_rules=scale_rules,
    )


@pytest.fixture
def assignment(tiny_random):
    return made(tiny_random.model)


@pytest.fixture
def body(assignment, tmp_path):
    return json.loads(assignment.save(tmp_path / "a.json").read_text())


def test_a_saved_assignment_loads_equal(assignment, tmp_path):
    path = assignment.save(tmp_path / "new folder" / "assignment.json")
    assert dmx.Assignment.load(path) == assignment
    assert dmx.Assignment.load(str(path)).save(tmp_path / "b.json").read_text() == path.read_text()


def test_the_file_has_the_keys_of_the_schema_in_order(body, tiny_random):
    assert list(body) == [
        "schema",
        "model",
        "formats",
        "input_formats",
        "shapes",
        "unquantized",
        "units",
        "scale_rules",
        "transform",
        "weights",
        "bits",
        "budget",
        "search",
    ]
    assert body["schema"] == SCHEMA == "dmx.assignment/2"
    assert body["model"]["architecture_sha256"] == architecture_sha256(tiny_random.model.config)
    assert body["unquantized"] == ["lm_head"] and body["input_formats"] is None
    assert body["budget"] == {"limit": 5.5, "unit": "element_bits"}


def test_stated_bits_are_the_average_of_the_formats_and_of_the_whole_model(assignment, tiny_random):
    model = tiny_random.model
    sizes = {k: a * b for k, (a, b) in assignment.shapes.items()}
    bits = {k: sizes[k] * get_format(f).bits_per_element for k, f in assignment.formats.items()}
    total = sum(p.numel() for p in model.parameters())
    stored, quantized = sum(bits.values()), sum(sizes.values())
    assert assignment.bits["bits_per_element"] == pytest.approx(stored / quantized, rel=1e-12)
    assert assignment.bits["element_bits"] == pytest.approx(stored / quantized - 0.25, rel=1e-12)
    whole = (stored + 16 * (total - quantized)) / total
    assert assignment.bits["whole_model_bits_per_element"] == pytest.approx(whole, rel=1e-12)


def test_the_table_of_a_quantized_tied_head_stays_and_counts_beside_it(make_tiny):
    model = make_tiny("smollm2").model
    assignment = made(model, choice=(0,), include_lm_head=True)
    head = 288 * 64
    quantized = sum(a * b for a, b in assignment.shapes.values())
    norms = sum(p.numel() for p in model.parameters()) - quantized  # the head is the embedding
    assert norms == 5 * 64 and head < quantized
    expected = (4.25 * quantized + 16 * (norms + head)) / (quantized + norms)
    assert assignment.bits["whole_model_bits_per_element"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("operands", ["joint", "separate"])
@pytest.mark.parametrize("weighting", ["elements", "layers"])
def test_either_weighting_survives_a_round_trip(weighting, operands, tiny_random, tmp_path):
    fixed = {"*.0.mlp.down_proj": "mxfp8"}
    assignment = made(tiny_random.model, weighting=weighting, fixed=fixed, choices=operands)
    assert Assignment.load(assignment.save(tmp_path / "a.json")) == assignment


def test_shared_weights_survive_a_round_trip(tiny_random, tmp_path):
    layers = tiny_random.model.model.layers
    layers[1].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight
    assignment = made(tiny_random.model, units="layer")
    assert Assignment.load(assignment.save(tmp_path / "a.json")) == assignment


def test_bits_of_separate_operands_count_both_and_what_is_stored_the_weights(tiny_random, tmp_path):
    model = tiny_random.model
    low = made(model, choice=(0,))
    apart = made(model, choices="separate", fixed={"*.0.mlp.down_proj": "mxfp8"}, units="layer")
    searched = [k for k in apart.formats if k != "model.layers.0.mlp.down_proj"]
    assert {apart.formats[k] for k in searched} == {"mxfp4"}  # every weight 0, every input 1
    assert {apart.input_formats[k] for k in searched} == {"mxfp6_e2m3"} and len(apart.unequal) == 13
    assert apart.input_formats["model.layers.0.mlp.down_proj"] == "mxfp8_e4m3"
    sizes = {k: a * b for k, (a, b) in apart.shapes.items()}
    high, total = sizes["model.layers.0.mlp.down_proj"], sum(sizes.values())
    assert apart.bits["element_bits"] == (5 * (total - high) + 8 * high) / total
    weights = (4 * (total - high) + 8 * high) / total
    assert apart.average_bits(["weight"])["element_bits"] == pytest.approx(weights, rel=1e-12)
    raised = 4 * high / sum(p.numel() for p in model.parameters())
    found = apart.bits["whole_model_bits_per_element"]
    assert found - low.bits["whole_model_bits_per_element"] == pytest.approx(raised, rel=1e-9)
    assert apart.search.choices == "separate"
    assert Assignment.load(apart.save(tmp_path / "a.json")) == apart


def test_equal_operands_are_not_named_apart_and_have_the_bits_of_the_joint_choice(tiny_random):
    joint = made(tiny_random.model)
    apart = made(tiny_random.model, choice=(0, 0, 1, 1), choices="separate")
    assert apart.input_formats is None and not apart.unequal
    assert (apart.formats, apart.bits) == (joint.formats, joint.bits)


def test_bits_that_do_not_count_the_inputs_are_refused(body, tmp_path):
    body["input_formats"] = dict.fromkeys(body["formats"], "mxfp8_e4m3")
    with pytest.raises(AssignmentError, match=r"bits\.element_bits says .*, its formats give"):
        Assignment.from_dict(body)


FIRST = {
    "schema": "dmx.assignment/1",
    "model": {"id": "tiny", "revision": None, "architecture_sha256": None},
    "formats": {"a": "mxfp4", "b": "mxfp6"},
    "input_formats": {"a": "mxfp8_e4m3", "b": "mxfp6_e2m3"},
    "shapes": {"a": [32, 64], "b": [32, 64]},
    "unquantized": ["lm_head"],
    "units": "layer",
    "scale_rule": "even",
    "transform": None,
    "rounding": {"name": "gptq", "file": "rounding.safetensors", "sha256": "0" * 64},
    "bits": {"element_bits": 6.0, "bits_per_element": 6.25, "whole_model_bits_per_element": 7.0},
    "budget": {"limit": 6.0, "unit": "element_bits"},
    "search": {
        "name": "fisher",
        "family": "mxfp8_mxfp6_mxfp4",
        "seed": 0,
        "polish_rounds": 8,
        "weighting": "elements",
        "operands": "separate",
        "kl": 0.25,
        "seconds": 3.5,
    },
}
"""A file as it was written before schema 2."""


def test_a_file_of_the_first_schema_loads_in_the_words_of_the_second(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(FIRST))
    loaded = Assignment.load(path)
    assert loaded.formats == {"a": "mxfp4", "b": "mxfp6_e2m3"}
    assert loaded.scale_rules == {
        "weight": {"mxfp4": "even", "mxfp6_e2m3": "even"},
        "input": {"mxfp8_e4m3": "even", "mxfp6_e2m3": "even"},
    }
    assert loaded.weights == FIRST["rounding"]
    assert loaded.search == SearchFacts(
        name="fisher",
        family="mxfp8_mxfp6_mxfp4",
        seed=0,
        polish_rounds=8,
        choices="separate",
        kl=0.25,
        seconds=3.5,
    )
    path.write_text(json.dumps({k: v for k, v in FIRST.items() if k != "rounding"}))
    with pytest.raises(AssignmentError, match=r"missing keys \['weights'\]"):
        Assignment.load(path)


def test_a_rule_is_that_of_the_operand_and_the_format_and_else_floor(tiny_random, body):
    body["scale_rules"] = {"weight": {"mxfp4": "even"}, "input": {"mxfp6": "ceil"}}
    loaded = Assignment.from_dict(body)
    assert [
        loaded.rule(operand, get_format(name))
        for operand in ("weight", "input")
        for name in ("mxfp4", "mxfp6", "mxfp8")
    ] == ["even", "floor", "floor", "floor", "ceil", "floor"]
    model = dmx.apply(tiny_random.model, loaded)
    for name, layer in quantized_layers(model).items():
        own = [layer.weight_quantizer.scale_rule, layer.input_quantizer.scale_rule]
        is_low = loaded.formats[name] == "mxfp4"
        assert own == (["even", "floor"] if is_low else ["floor", "ceil"])
    for bad in ({"input": {"mxfp4": "round"}}, "round"):
        with pytest.raises(FormatError, match=r"scale_rules\.\w+\.mxfp4='round'"):
            made(tiny_random.model, scale_rules=bad)


def test_aliases_load_under_their_canonical_name(body):
    layer = next(k for k, v in body["formats"].items() if v == "mxfp6_e2m3")
    body["formats"][layer] = "mxfp6"
    assert Assignment.from_dict(body).formats[layer] == "mxfp6_e2m3"


# ---------------------------------------------------------------- refusals


def test_a_file_that_is_not_there_or_not_json_is_refused(assignment, tmp_path):
    with pytest.raises(AssignmentError, match=r"missing\.json: cannot be read .*a search wrote"):
        Assignment.load(tmp_path / "missing.json")
    with pytest.raises(AssignmentError, match=r"cannot be read"):
        Assignment.load(tmp_path)
    path = assignment.save(tmp_path / "a.json")
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"\xff\xfe\x00", b"not json"):
        path.write_bytes(damaged)
        with pytest.raises(AssignmentError, match=r"a\.json: is no JSON file .*search again"):
            Assignment.load(path)
    for other in ("[]", "null", '"mxfp4"', '{"formats": {}}', '{"schema": "dmx.assignment/9"}'):
        path.write_text(other)
        with pytest.raises(AssignmentError, match=r"schema .*, expected 'dmx\.assignment/2'"):
            Assignment.load(path)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"formats": ...}, r"missing keys \['formats'\]"),
        ({"bits": ..., "search": ...}, r"missing keys \['bits', 'search'\]"),
        ({"comment": "mine"}, r"unknown keys \['comment'\]"),
        ({"formats": {}}, "formats and shapes must be non-empty objects"),
        ({"formats": ["mxfp4"]}, "formats and shapes must be non-empty objects"),
        ({"formats": {Q: "mxfp4"}}, "formats and shapes name other layers"),
        ({"formats." + Q: "mxfp5"}, f"{Q}='mxfp5' is no block format.*Did you mean"),
        ({"formats." + Q: None}, f"format of {Q} is None, expected a name"),
        ({"formats." + Q: ["mxfp4"]}, f"format of {Q} is ..mxfp4.., expected a name"),
        ({"formats." + Q: "mxfp8"}, r"bits\.element_bits says .*, its formats give"),
        ({"input_formats": {Q: "mxfp4"}}, "input_formats must be null or name the layers"),
        ({"shapes." + Q: [64]}, f"shape of {Q} is"),
        ({"shapes." + Q: [64, -1]}, f"shape of {Q} is"),
        ({"shapes." + Q: [64, 64.0]}, f"shape of {Q} is"),
        ({"shapes." + Q: [64, 65536]}, r"bits\.\w+ says"),
        ({"bits.element_bits": 4.0}, r"bits\.element_bits says 4\.0, its formats give"),
        ({"bits.bits_per_element": None}, r"bits\.bits_per_element is None"),
        ({"bits.element_bits": float("nan")}, r"bits\.element_bits is nan"),
        ({"bits.element_bits": True}, r"bits\.element_bits is True"),
        ({"bits.whole_model_bits_per_element": 99}, r"bits\.whole_model_bits_per_element is 99"),
        ({"bits": None}, "bits is None, expected an object"),
        ({"model": "Llama"}, "model is 'Llama', expected an object"),
        ({"search": None}, "search is None, expected an object"),
        ({"budget": 5.0}, "budget is 5.0, expected an object or null"),
        ({"budget": {"limit": 5.0}}, r"budget has the keys \['limit'\], expected limit and unit"),
        ({"budget.limit": "five"}, r"budget\.limit='five' is not a number of bits"),
        ({"budget.unit": "bits"}, r"budget\.unit='bits' is not allowed"),
        ({"unquantized": None}, "unquantized is None, expected a list"),
        ({"unquantized": [1]}, "unquantized must hold layer names"),
        ({"units": "fuse"}, "units 'fuse', allowed: fused, layer"),
        (
            {"scale_rules.input": {"mxfp6": "round"}},
            r"scale_rules\.input\.mxfp6='round' is not allowed.* floor, ceil, even, rceil",
        ),
        ({"scale_rules.weight": {"mxfp5": "floor"}}, r"scale_rules\.weight='mxfp5'.*Did you mean"),
        ({"scale_rules.weight": {"bf16": "floor"}}, r"scale_rules\.weight='bf16' cannot be"),
        ({"scale_rules.weight": "floor"}, r"scale_rules\.weight is 'floor', expected an object"),
        ({"scale_rules.output": {}}, r"scale_rules has unknown keys \['output'\], allowed: weight"),
        ({"search.steeps": 3}, r"search has unknown keys \['steeps'\], allowed: name, family"),
        ({"search.seed": True}, "search.seed is True, expected int or null"),
        ({"search.choices": "both"}, "search.choices is 'both', expected 'joint' or 'separate'"),
        ({"search.family": [1]}, "search.family is .*expected str or list of names or null"),
    ],
)
def test_a_damaged_or_edited_file_is_refused(body, change, words, tmp_path):
    for key, value in change.items():
        place, _, rest = key.partition(".")
        node, last = (body[place], rest) if rest else (body, key)
        if value is ...:
            del node[last]
        else:
            node[last] = value
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(body))
    with pytest.raises(AssignmentError, match=words) as caught:
        Assignment.load(path)
    assert str(path) in str(caught.value)


def test_an_assignment_for_another_model_is_refused(assignment, make_tiny):
    deeper, wider = make_tiny("llama", layers=3), make_tiny("llama", intermediate_size=160)
    shallower = make_tiny("llama", layers=1)
    with pytest.raises(AssignmentError, match=r"layer model\.layers\.1\..* does not exist"):
        assignment.check(shallower.model)
    with pytest.raises(AssignmentError, match=r"gate_proj is \(128, 64\) there and"):
        assignment.check(wider.model)
    with pytest.raises(AssignmentError, match=r"nothing of model\.layers\.2\..* and 6 more layers"):
        assignment.check(deeper.model)
    assignment.check(make_tiny("llama", dtype="bfloat16").model)


def test_a_refused_apply_leaves_the_model_alone(assignment, make_tiny):
    model = make_tiny("llama", layers=1).model
    before = copy.copy(dict(model.named_modules()))
    with pytest.raises(AssignmentError):
        dmx.apply(model, assignment)
    assert dict(model.named_modules()) == before
    with pytest.raises(dmx.errors.ModelError, match=r"nothing to restore"):
        dmx.restore(model)


def test_an_unwritable_place_is_an_error_that_names_it(assignment, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "a.json", "/proc/nowhere/a.json"):
        with pytest.raises(RunError, match=rf"cannot write {place}: .*may write"):
            assignment.save(place)


def test_a_failed_save_keeps_the_old_file_and_leaves_no_scraps(assignment, tmp_path):
    path = assignment.save(tmp_path / "a.json")
    before = path.read_text()
    broken = copy.copy(assignment)
    object.__setattr__(broken, "bits", {"element_bits": float("nan")})
    with pytest.raises(ValueError, match=r"JSON"):
        broken.save(path)
    assert path.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["a.json"]


# ---------------------------------------------------------------- edited by hand


def edited(body, path, value):
    """The body with a value at a dotted place, `layer` for the first layer."""
    body = copy.deepcopy(body)
    *above, last = path
    place = body
    for key in above:
        place = place[key]
    place[last] = value
    return body


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (
            ("unquantized",),
            ["lm_head", "model.layers.0.mlp.up_proj"],
            "stands both in formats and in",
        ),
        (("unquantized",), ["lm_head", "lm_head"], "unquantized names lm_head twice"),
        (("bits", "element_bits"), 4.0, r"bits\.element_bits says 4\.0, its formats give"),
        (("bits", "whole_model_bits_per_element"), 3.0, "formats give at least 4.25"),
        (("search", "shared_weights"), True, None),
        (("search", "weighting"), "layers", None),
    ],
)
def test_an_edited_assignment_is_refused(body, tmp_path, path, value, words):
    changed = edited(body, path, value)
    if words is None:  # the exact check cannot be made; a plausible one still is
        assert Assignment.from_dict(changed).bits == body["bits"]
        changed["bits"]["element_bits"], words = 7.5, "its formats give at least 4.0"
    (tmp_path / "a.json").write_text(json.dumps(changed))
    with pytest.raises(AssignmentError, match=words):
        Assignment.load(tmp_path / "a.json")


@pytest.mark.parametrize("key", ["model.layers.0.mlp.up_proj", "schema", "element_bits"])
def test_a_key_that_stands_twice_is_refused(body, tmp_path, key):
    text = json.dumps(body)
    own = f'"{key}": '
    assert own in text
    (tmp_path / "a.json").write_text(text.replace(own, f"{own}4, {own}", 1))
    with pytest.raises(AssignmentError, match=f"the key '{key}' is there twice"):
        Assignment.load(tmp_path / "a.json")


def test_a_file_too_deep_or_too_large_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text('{"schema": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(AssignmentError, match="nested too deep"):
        Assignment.load(path)
    monkeypatch.setattr(dmx.files, "LARGEST_JSON", 100)
    with pytest.raises(AssignmentError, match="has 200,012 bytes, at most 100 are read"):
        Assignment.load(path)
