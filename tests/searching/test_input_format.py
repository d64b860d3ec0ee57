"""search.input_format: every input in one format, weights alone chosen and counted."""

import numpy as np
import pytest
import torch

import dmx
from dmx.applying.linear import quantized_layers
from dmx.assignment.assignment import Assignment, make_assignment
from dmx.assignment.projection import is_maximal
from dmx.assignment.rules import ScaleRulesConfig
from dmx.errors import AssignmentError, DmxError
from dmx.formats import MXFP4, MXFP6_E2M3, get_family
from dmx.kernels import ops
from dmx.numerics import path_parameters
from dmx.searching import search_space, uniform_assignment
from dmx.searching.bank import searching_model
from dmx.searching.config import SearchConfig
from experiments import compare, evaluate, search
from experiments.running.rows import method_of
from tests.settings import TINY, TINY_LAYERS, search_config
from tests.weights.helpers import text_batches

BATCHES = list(torch.randint(0, 257, (4, 2, 32), generator=torch.Generator().manual_seed(1)))
DOWN = "model.layers.0.mlp.down_proj"
EXACT = {"penalty": "exact", "gradient_scale": "elements", "lr": 3.0, "momentum": 0.9}
DESCENT = {"objective": "kl", "steps": 3, "evaluate_every": 3}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"input_format": "mxfp9"}, r"search\.input_format='mxfp9' is no block format.*Allowed: "),
        (
            {"input_format": "mxfp8", "choices": "separate"},
            r"search\.input_format=mxfp8_e4m3 with search\.choices=separate: .* choice each\. Use "
            r"search\.choices=joint, or search\.input_format=null",
        ),
        (
            {"input_format": "mxfp8", "target": "vllm", "family": "mxfp8_mxfp4"},
            r"search\.input_format=mxfp8_e4m3: vLLM of search\.target=vllm cannot run inputs in it "
            r"beside weights in mxfp4\. .* takes inputs in bf16, beside mxfp4 also fp8\. Use one of these, "
            r"search\.input_format=null, or search\.target=any",
        ),
        (
            {"input_format": "mxfp6", "target": "vllm_quark", "family": ["mxfp4", "mxfp8"]},
            r"beside weights in mxfp4, mxfp8_e4m3\. .*takes inputs in bf16, beside mxfp4 also mxfp6_e2m3, mx",
        ),
        (
            {"target": "vllm_humming", "family": ["mxfp4", "mxfp8_e5m2"]},
            r"target=vllm_humming: its files ask for no inputs in .* Set search\.input_format to bf16 or fp8",
        ),
        (
            {"input_format": "mxfp8", "target": "vllm_humming", "family": ["mxfp4", "mxfp8"]},
            r"takes inputs in bf16, fp8\. Use one of these, or search\.target=any",
        ),
        (
            {"choices": "separate", "target": "vllm_humming", "family": ["mxfp4", "mxfp8"]},
            r"Set search\.input_format to bf16 or fp8, with search\.choices=joint",
        ),
        (
            {"input_format": "fp8", "target": "vllm", "family": ["mxfp4", "bf16"]},
            r"input_format=fp8 with bf16 in search\.family: no export .* weight in bf16\. Leave it out",
        ),
        (
            {"input_format": "bf16", "target": "vllm_modelopt", "family": ["nvfp4", "fp8"]},
            r"beside weights in fp8, nvfp4\. .* takes inputs in bf16 beside nvfp4 alone\.",
        ),
        (
            {"input_format": "mxfp6", "target": "transformers"},
            r"input_format=mxfp6_e2m3: transformers .* takes inputs in bf16, fp8, mxfp4, mxfp8_e4m3",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(DmxError, match=words):
        search_config(**options)


def test_targets_take_the_inputs_that_they_run():
    for options in (
        {"input_format": "mxfp8", "target": "transformers"},
        {"input_format": "mxfp6", "target": "vllm_quark", "family": ["mxfp4", "mxfp6"]},
        {"input_format": "bf16", "target": "vllm", "family": "mxfp8_mxfp4"},
        {"input_format": "fp8", "target": "vllm", "family": ["mxfp4", "fp8"]},
        {"input_format": "bf16", "target": "vllm_humming", "family": ["mxfp4", "mxfp8_e5m2"]},
        {"input_format": "bf16", "target": "vllm_modelopt", "family": ["nvfp4", "bf16"]},
    ):
        assert search_config(**options).input_format in ("mxfp8_e4m3", "mxfp6_e2m3", "bf16", "fp8")


@pytest.mark.parametrize("input_format", ["mxfp8", "mxfp6_e3m2", "bf16"])
@pytest.mark.parametrize(
    "settings",
    [
        *({"name": name} for name in ("uniform", "random", "kl", "kl_per_bit", "weight_mse")),
        {"name": "fisher", "polish_rounds": 1},
        {"name": "aumann_shapley"},
        {"name": "differentiable", **DESCENT},
        {"name": "differentiable", **DESCENT, **EXACT, "transform": "learned"},
        {"name": "joint", **DESCENT, **EXACT},
    ],
    ids=lambda s: "-".join(str(s[k]) for k in ("name", "transform", "penalty") if k in s),
)
def test_every_search_chooses_weights_alone_and_counts_them_alone(
    settings, input_format, tiny_random, tmp_path
):
    model = tiny_random.model
    rules = ScaleRulesConfig(input="rceil")
    config = search_config(
        **settings,
        input_format=input_format,
        fixed={"*.0.mlp.down_proj": "mxfp8"},
        scale_rules=rules,
    )
    space, budget = search_space(model, config), dmx.Budget(5.3)
    assert all(unit.operands == ("weight",) for unit in space.units) and not space.is_separate
    done = dmx.search(model, BATCHES, budget, config).assignment
    name = config.input_format
    assert set(done.input_formats.values()) == {name} and done.formats[DOWN] == "mxfp8_e4m3"
    assert done.search.input_format == name and done.search.choices == "joint"
    assert done.bits["element_bits"] == done.average_bits(["weight"])["element_bits"] <= 5.3
    choice = space.choice_of(done.formats, done.input_formats)
    assert settings["name"] == "uniform" or is_maximal(space, budget, choice)
    assert done.scale_rules["input"] == ({} if name == "bf16" else {name: "rceil"})
    assert Assignment.load(done.save(tmp_path / "assignment.json")) == done
    dmx.apply(model, done)
    for layer in quantized_layers(model).values():
        quantizer = layer.input_quantizer
        assert (name == "bf16") == (quantizer is None)
        assert quantizer is None or (quantizer.block_format.name, quantizer.scale_rule) == (
            name,
            "rceil",
        )
    method = method_of(done, quantized="W+A")
    assert f", inputs {name}" in method.label
    assert (method.input_format, method.choices) == (name, "joint")


@pytest.mark.parametrize("path", ["element", "line"])
@pytest.mark.parametrize("input_format", ["mxfp8_e4m3", "bf16"])
def test_a_soft_model_at_its_stops_is_the_applied_one_bit_for_bit(input_format, path, tiny_random):
    model, family = tiny_random.model, get_family("mxfp6_mxfp4")
    config = SearchConfig(input_format=input_format, fixed={"*.down_proj": "mxfp6_e3m2"})
    space, rules = search_space(model, config), config.scale_rules.by_format()
    choice = np.arange(len(space.units)) % 2
    with torch.no_grad(), searching_model(model, space, family, rules, path=path) as bank:
        bank.set_soft(torch.tensor([family.stops[i] for i in choice]))
        soft = model(input_ids=BATCHES[0], use_cache=False).logits
    dmx.apply(model, make_assignment(space, choice, model, scale_rules=rules))
    with torch.no_grad():
        assert torch.equal(model(input_ids=BATCHES[0], use_cache=False).logits, soft)


def test_the_gradient_passes_the_fixed_inputs_straight_through(tiny_random):
    model, family = tiny_random.model, get_family("mxfp6_mxfp4")
    space = search_space(model, SearchConfig(input_format="mxfp4", units="layer"))
    linear = model.get_submodule(DOWN)
    x = torch.randn(5, linear.in_features, generator=torch.Generator().manual_seed(1))
    grad = torch.randn(5, linear.out_features, generator=torch.Generator().manual_seed(2))
    x.requires_grad_()
    offsets = torch.linspace(0.1, 1.9, len(space.units)).requires_grad_()
    with searching_model(model, space, family, "floor") as bank:
        bank.set_soft(offsets)
        model.get_submodule(DOWN)(x).backward(grad)
    unit = space.unit_of("weight")[DOWN]
    row, weight = path_parameters(offsets, "mxfp6_mxfp4")[unit].detach(), linear.weight.detach()
    product = grad.t() @ ops.fake_quant(x.detach(), MXFP4)
    _, expected = ops.continuous_fake_quant_backward(product, weight, row, needs_grad_x=False)
    assert torch.equal(offsets.grad[unit], expected) and offsets.grad.count_nonzero() == 1
    assert torch.equal(x.grad, grad @ ops.continuous_fake_quant(weight, row))


def test_scores_are_those_of_the_weights_whatever_the_inputs_are_in(tiny_random, tmp_path):
    kept = []
    for input_format in ("mxfp8", "mxfp6", "bf16"):
        config = search_config(name="fisher", input_format=input_format)
        dmx.search(
            tiny_random.model, BATCHES, dmx.Budget(5.0), config, score_folder=tmp_path / "scores"
        )
        kept.append(sorted(path.name for path in (tmp_path / "scores").iterdir()))
    assert kept[0] == kept[1] == kept[2] and len(kept[0]) == 2


@pytest.mark.filterwarnings("ignore:no offset moved")
def test_the_search_sees_the_inputs_that_the_assignment_has(tiny_random):
    """At the same offsets, the loss is larger the coarser the inputs are."""
    model, losses = tiny_random.model, {}
    for name in ("mxfp4", "mxfp6", "bf16"):
        config = search_config(name="differentiable", **DESCENT | {"steps": 1}, input_format=name)
        (row,) = dmx.search(model, BATCHES, dmx.Budget(5.0), config).history
        losses[name] = row["loss"]
        done = uniform_assignment(model, MXFP4, config)
        assert done.bits["element_bits"] == 4.0 and set(done.formats.values()) == {"mxfp4"}
        assert (done.input_formats is None) == (name == "mxfp4")
    assert losses["mxfp4"] > losses["mxfp6"] > losses["bf16"]


def test_a_stopped_search_goes_on_with_the_same_inputs_only(tiny_random, tmp_path, monkeypatch):
    def config(name):
        return search_config(name="differentiable", **DESCENT, input_format=name)

    done = dmx.search(
        tiny_random.model, BATCHES, dmx.Budget(5.0), config("mxfp8"), folder=tmp_path
    ).assignment
    again = dmx.search(
        tiny_random.model, BATCHES, dmx.Budget(5.0), config("mxfp8"), folder=tmp_path
    ).assignment
    assert again.formats == done.formats
    with pytest.raises(DmxError, match=r"search.*other"):
        dmx.search(tiny_random.model, BATCHES, dmx.Budget(5.0), config("mxfp6"), folder=tmp_path)


def test_weights_are_rounded_and_learn_with_those_inputs(tiny_random, tmp_path):
    loaded = tiny_random
    batches = text_batches(loaded.tokenizer, 4)
    config = search_config(name="fisher", input_format="mxfp4")
    found = dmx.search(loaded.model, batches, dmx.Budget(5.0), config).assignment
    learned = dmx.learn_weights(
        loaded.model, found, batches, dmx.LearnConfig(steps=2, held_batches=1)
    )
    for done in (dmx.gptq(loaded.model, found, batches), learned):
        assert done.input_formats == found.input_formats and done.search == found.search
        back = Assignment.load(done.save(tmp_path / f"{done.weights['name']}.json"))
        layers = quantized_layers(dmx.apply(loaded.model, back))
        assert {layer.input_quantizer.block_format for layer in layers.values()} == {MXFP4}
        dmx.restore(loaded.model)
    # What learning measured before its first step is the assignment as it is applied.
    held = [batches[-1]]
    dmx.apply(loaded.model, found)
    with torch.no_grad():
        ours = [loaded.model(input_ids=b, use_cache=False).logits for b in held]
    dmx.restore(loaded.model)
    with torch.no_grad():
        full = [loaded.model(input_ids=b, use_cache=False).logits for b in held]
    kl = sum(_kl(p, q) for p, q in zip(full, ours, strict=True)) / len(held)
    assert learned.weights["kl_before"] == pytest.approx(kl, rel=1e-2)


def _kl(reference, logits):
    p, q = (x.double().log_softmax(-1) for x in (reference, logits))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_bits_that_count_the_inputs_are_refused(tiny_random):
    space = search_space(tiny_random.model, SearchConfig(input_format="mxfp8"))
    made = make_assignment(space, np.zeros(len(space.units), dtype=np.int64), tiny_random.model)
    body = made.__dict__ | {"shapes": {k: list(v) for k, v in made.shapes.items()}}
    body = {k: v for k, v in body.items() if k not in ("folder", "unsaved")}
    body |= {"schema": "dmx.assignment/2", "unquantized": list(made.unquantized)}
    stated = made.search.to_dict()
    assert stated["input_format"] == "mxfp8_e4m3"
    assert Assignment.from_dict(body | {"search": stated}).bits == made.bits
    with pytest.raises(
        AssignmentError, match=r"bits\.element_bits says 4\.0, its formats give 6\.0"
    ):
        Assignment.from_dict(body | {"search": {}})


def test_commands_measure_and_show_them(run, record_of, tmp_path):
    folder = tmp_path / "a8"
    code, _out, err = run(
        search,
        *TINY_LAYERS,
        "search=random",
        "baselines=[bf16,mxfp4]",
        "search.input_format=mxfp8",
        f"run.folder={folder}",
    )
    assert code == 0, err
    rows = record_of(folder).rows
    labels = ["bf16", "uniform mxfp4, inputs mxfp8_e4m3", "random, inputs mxfp8_e4m3"]
    assert [row.label for row in rows] == labels
    assert rows[1].element_bits == 4.0 and 4.9 < rows[2].element_bits <= 5.0
    report = (folder / "report.html").read_text()
    assert "weights alone were chosen" in report and "inputs mxfp8_e4m3" in report
    path = folder / rows[2].assignment
    code, _out, err = run(evaluate, *TINY, f"assignments=[{path}]", f"run.folder={tmp_path}/again")
    assert code == 0, err
    (again,) = record_of(tmp_path / "again").rows
    assert (again.nll, again.method) == (rows[2].nll, rows[2].method)
    code, _out, err = run(compare, *TINY_LAYERS, f"ablate={path}", f"run.folder={tmp_path}/c")
    assert code and "search.input_format=null and search.choices=joint. Set them" in err


def test_weights_that_all_have_the_format_of_the_inputs_still_say_what_counts(
    tiny_random,
):
    config = SearchConfig(family="mxfp8_mxfp6_mxfp4", input_format="mxfp6")
    space = search_space(tiny_random.model, config)
    made = make_assignment(space, np.ones(len(space.units), dtype=np.int64), tiny_random.model)
    assert made.input_formats is None and made.bits["element_bits"] == MXFP6_E2M3.element_bits
    assert made.search.input_format == "mxfp6_e2m3"
