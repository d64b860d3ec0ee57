"""Inputs that are rotated because a search measured that they gain by it."""

import pytest
import torch

import dmx
from dmx.applying.apply import applied
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError
from dmx.formats import get_block_format
from dmx.models.linears import fused_group
from dmx.numerics.distances import kl_divergence
from dmx.searching import SearchConfig, search_space, uniform_assignment
from dmx.searching.config import SearchConfigError
from dmx.searching.transforming import selected_transform
from dmx.transforms.block import RotatedLinear
from dmx.transforms.stage import Transform, transformed
from experiments.running.rows import method_of
from tests.settings import search_config

DOWN = "model.layers.1.mlp.down_proj"
QKV = "model.layers.0.self_attn.{q_proj,k_proj,v_proj}"
FEW = Transform("hadamard_selected", inputs=frozenset({DOWN, QKV}))
QUICK = {"name": "differentiable", "steps": 3, "units": "layer", "transform": "hadamard_selected"}


@pytest.fixture
def model(tiny_trained):
    """Two channels that are far larger than all others, as models of size have them."""
    with torch.no_grad():
        for layer, channel in zip(tiny_trained.model.model.layers, (3, 70), strict=True):
            layer.mlp.up_proj.weight[channel] *= 100
            layer.mlp.down_proj.weight[:, channel] /= 100
    return tiny_trained.model


def batches(n=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (2, 32), generator=generator) for _ in range(n)]


def mxfp4(model, **settings):
    config = search_config(name="uniform", **settings)
    return uniform_assignment(model, get_block_format("mxfp4"), config)


def test_only_inputs_that_are_named_are_rotated_and_the_function_stays(model):
    tokens = batches()[0]
    plain = mxfp4(model)
    expected = model(input_ids=tokens).logits
    with transformed(model, FEW, plain.quantized):
        kinds = {n for n, m in model.named_modules() if isinstance(m, RotatedLinear)}
        assert {fused_group(name) for name in kinds} == FEW.inputs and len(kinds) == 4
        rotated = model(input_ids=tokens).logits
    assert (rotated - expected).norm() < 2e-6 * expected.norm()
    facts = FEW.attach(plain, model).transform
    assert facts["run_time"]["rotated_layers"] == 4 and facts["inputs"] == sorted(FEW.inputs)


def test_an_assignment_keeps_them(model, tmp_path):
    made = FEW.attach(mxfp4(model), model)
    read = Assignment.load(made.save(tmp_path / "assignment.json"))
    assert read == made and Transform.of(read) == FEW
    assert method_of(read, quantized="W+A").label == "uniform mxfp4 + hadamard selected"
    logits = []
    for assignment in (read, Transform("hadamard_block").attach(mxfp4(model), model), mxfp4(model)):
        dmx.apply(model, assignment)
        logits.append(model(input_ids=batches()[0]).logits)
        dmx.restore(model)
    assert all(not torch.equal(logits[0], other) for other in logits[1:])


def test_a_search_selects_what_quantizing_each_input_alone_shows(model):
    """Measured here by assignments of one group of layers, rotated and not."""
    data, budget = batches(), dmx.Budget(5.0)
    found = dmx.search(model, data, budget, SearchConfig(**QUICK, objective="kl")).assignment
    expected = set()
    names = mxfp4(model).quantized
    for group in {fused_group(name) for name in names}:
        others = [name for name in names if fused_group(name) != group]
        alone = mxfp4(model, exclude=others)
        losses = []
        for transform in (Transform(), Transform("hadamard_block")):
            loss = 0.0
            for tokens in data[:2]:  # the third one is not looked at
                with torch.no_grad():
                    reference = model(input_ids=tokens).logits
                    with applied(model, transform.attach(alone, model), inputs=True):
                        loss += float(kl_divergence(reference, model(input_ids=tokens).logits))
            losses.append(loss)
        if losses[1] < losses[0]:
            expected.add(group)
    assert 0 < len(expected) < 8
    assert Transform.of(found) == Transform("hadamard_selected", inputs=frozenset(expected))


@pytest.mark.parametrize("name", ["uniform", "kl_per_bit", "fisher", "joint"])
def test_every_search_selects_the_same_and_gives_the_model_back(model, tmp_path, name):
    config = {"steps": 2} if name == "joint" else {}
    config = SearchConfig(name=name, transform="hadamard_selected", **config)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = dmx.search(model, batches(), dmx.Budget(5.0), config, folder=tmp_path)
    other = SearchConfig(name="random", units="layer", transform="hadamard_selected")
    other = dmx.search(model, batches(), dmx.Budget(5.0), other, folder=tmp_path / "other")
    assert Transform.of(found.assignment) == Transform.of(other.assignment)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    again = dmx.search(model, batches(), dmx.Budget(5.0), config, folder=tmp_path)
    assert again.assignment.formats == found.assignment.formats
    assert again.assignment.transform == found.assignment.transform


def test_what_does_not_gain_stays_and_fixed_layers_are_rotated(model):
    space = search_space(model, search_config(name="kl", fixed={"*.1.mlp.*": "mxfp4"}))
    plain = torch.tensor([1.0, 1.0, float("nan"), 1.0, 2.0, 1.0]).numpy()
    rotated = torch.tensor([1.0, 0.5, 0.5, 2.0, 1.0, float("nan")]).numpy()
    names = [unit.name for unit in space.units]
    made = selected_transform(space, space, plain, rotated)
    assert made.inputs - set(names) == {DOWN, "model.layers.1.mlp.{gate_proj,up_proj}"}
    assert made.inputs & set(names) == {names[1], names[4]}


@pytest.mark.parametrize(
    "inputs", [None, "x", [3], ["model.layers.7.mlp.down_proj"], [f"{DOWN}.x"]]
)
def test_inputs_that_the_model_lacks_are_refused(model, inputs):
    made = mxfp4(model)
    object.__setattr__(made, "transform", {"name": "hadamard_selected", "inputs": inputs})
    with pytest.raises(AssignmentError, match="transform is damaged"):
        dmx.apply(model, made)


def test_where_nothing_can_be_measured_it_says_so(model):
    with pytest.raises(
        SearchConfigError, match=r"hadamard_selected.*search\.transform=hadamard_block"
    ):
        mxfp4(model, transform="hadamard_selected")
    with pytest.raises(SearchConfigError, match="rotates inputs at run time"):
        SearchConfig(transform="hadamard_selected", target="vllm_quark")


def test_inputs_are_selected_for_nvfp4_too(model):
    config = SearchConfig(name="kl_per_bit", family=["nvfp4", "fp8"], transform="hadamard_selected")
    found = dmx.search(model, batches(), dmx.Budget(6.0), config).assignment
    assert found.transform["name"] == "hadamard_selected" and found.input_amax
