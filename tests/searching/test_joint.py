"""Weights that descend together with the offsets: their gradients, what they leave behind, and resuming."""

import copy

import numpy as np
import pytest
import torch

import dmx
from dmx.errors import ModelError, RunError
from dmx.formats import get_family
from dmx.kernels import ops
from dmx.numerics import path_parameters
from dmx.searching import differentiable, search_space
from dmx.searching.bank import searching_model
from dmx.searching.config import JointConfig
from dmx.searching.joint import JointWeights
from tests.settings import search_config

GENERATOR = torch.Generator().manual_seed(3)
BATCHES = list(torch.randint(0, 257, (4, 2, 32), generator=GENERATOR))
EXACT = {"penalty": "exact", "gradient_scale": "elements", "lr": 3.0, "momentum": 0.9}
SETTINGS = {"objective": "kl", "units": "layer", "steps": 8, **EXACT, "evaluate_every": 4}


def joint(**changes):
    settings = JointConfig(**{"lr": 1e-3, "warmup": 2, **changes})
    return search_config(**SETTINGS, name="joint", joint=settings)


def test_the_gradient_of_the_weights_is_straight_through(make_tiny):
    model = make_tiny("llama").model
    space = search_space(model, joint())
    weights = JointWeights(model, space.unit_of("weight"), JointConfig(), 8, seed=0)
    offsets = torch.linspace(0.1, 1.9, len(space.units)).requires_grad_()
    name = "model.layers.0.mlp.down_proj"
    linear = model.get_submodule(name)
    x = torch.randn(5, linear.in_features, generator=torch.Generator().manual_seed(1))
    grad = torch.randn(5, linear.out_features, generator=torch.Generator().manual_seed(2))
    with searching_model(model, space, get_family("mxfp6_mxfp4"), "floor") as bank:
        weights.attach(model)
        bank.set_soft(offsets)
        unit = space.unit_of("weight")[name]
        model.get_submodule(name)(x).backward(grad)
    row = path_parameters(offsets, "mxfp6_mxfp4")[unit]
    _weight, place = weights.views(name)
    torch.testing.assert_close(place, grad.t() @ ops.continuous_fake_quant(x, row))
    others = weights.gradient.clone()
    start, shape = weights.places[name]
    others[start : start + shape[0] * shape[1]] = 0
    assert not others.any() and offsets.grad[unit] != 0


def test_weights_move_the_choice_and_are_thrown_away(tiny_trained):
    model = tiny_trained.model
    before = copy.deepcopy(model.state_dict())
    budget = dmx.Budget(5.0)
    moved = dmx.search(model, BATCHES, budget, joint(lr=3e-2))
    still = dmx.search(model, BATCHES, budget, joint(lr=0.0))
    alone = dmx.search(model, BATCHES, budget, search_config(**SETTINGS, name="differentiable"))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert np.array_equal(still.raw_offsets, alone.raw_offsets)  # weights at rate 0 stay
    assert np.abs(moved.raw_offsets[-1] - alone.raw_offsets[-1]).max() > 1e-3
    assert moved.history[-1]["loss"] != alone.history[-1]["loss"]
    assert moved.assignment.search.name == "joint" and moved.assignment.weights is None
    assert moved.assignment.bits["element_bits"] <= 5.0


def test_weights_that_descend_lower_the_loss_under_formats(tiny_trained):
    model = tiny_trained.model
    settings = joint(lr=3e-3)
    settings.steps = 60
    found = dmx.search(model, BATCHES[:1], dmx.Budget(4.0), settings)
    alone = search_config(**{**SETTINGS, "steps": 60}, name="differentiable")
    fixed = dmx.search(model, BATCHES[:1], dmx.Budget(4.0), alone)
    assert found.history[-1]["hard_loss"] < 0.5 * fixed.history[-1]["hard_loss"]


def test_a_stopped_search_goes_on_to_the_same_numbers(make_tiny, tmp_path, monkeypatch):
    model = make_tiny("llama").model
    settings = joint()
    settings.descent.checkpoint_every = 3
    whole = dmx.search(model, BATCHES, dmx.Budget(5.0), settings, folder=tmp_path / "whole")
    describe = differentiable.DifferentiableSearch._describe

    def stop(self, *values):
        if self.step == 5:
            raise KeyboardInterrupt
        return describe(self, *values)

    monkeypatch.setattr(differentiable.DifferentiableSearch, "_describe", stop)
    with pytest.raises(KeyboardInterrupt):
        dmx.search(model, BATCHES, dmx.Budget(5.0), settings, folder=tmp_path / "stopped")
    monkeypatch.undo()
    state = tmp_path / "stopped" / differentiable.STATE_FILE
    before = state.stat().st_size
    again = dmx.search(model, BATCHES, dmx.Budget(5.0), settings, folder=tmp_path / "stopped")
    assert state.stat().st_size < before / 10  # masters and moments are gone
    ended = dmx.search(model, BATCHES, dmx.Budget(5.0), settings, folder=tmp_path / "stopped")
    assert np.array_equal(ended.raw_offsets, whole.raw_offsets)
    assert np.array_equal(again.raw_offsets, whole.raw_offsets)
    assert again.history == whole.history and again.assignment.formats == whole.assignment.formats


def test_a_weight_of_two_layers_is_refused(make_tiny):
    model = make_tiny("llama").model
    space = search_space(model, joint())
    layers = dict.fromkeys(space.unit_of("weight"))
    first, second = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"
    model.get_submodule(second).weight = model.get_submodule(first).weight
    with pytest.raises(ModelError, match=rf"{first} and {second} share one weight"):
        JointWeights(model, layers, JointConfig(), 8, seed=0)


def test_a_gradient_that_is_not_finite_names_the_step(make_tiny, monkeypatch):
    update = JointWeights.update

    def broken(self, step, processes):
        if step == 3:
            self.gradient[7] = torch.nan
        return update(self, step, processes)

    monkeypatch.setattr(JointWeights, "update", broken)
    with pytest.raises(RunError, match=r"gradient of the weights in step 3 is not finite"):
        dmx.search(make_tiny("llama").model, BATCHES, dmx.Budget(5.0), joint())


def test_settings_of_the_weights_are_for_this_search_alone():
    with pytest.raises(
        dmx.errors.DmxError, match=r"search\.joint\.lr=0\.001 is not for search\.name"
    ):
        search_config(name="fisher").__class__(name="fisher", joint=JointConfig(lr=1e-3))
