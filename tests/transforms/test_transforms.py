"""Transforms: equal functions before and after, rotations that stay rotations, files that are
honoured or refused, and models that come back to the bit."""

import copy
import json
import pydoc_data.topics

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import dmx
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, FormatError, ModelError, RunError
from dmx.formats import get_block_format
from dmx.kernels import ops
from dmx.models.linears import fused_group
from dmx.searching import search_space, uniform_assignment
from dmx.searching.bank import SearchLinear, searching_model
from dmx.searching.config import SearchConfigError
from dmx.searching.differentiable import DifferentiableSearch
from dmx.searching.transforming import transformed_layers
from dmx.transforms.block import BlockRotation, RotatedLinear, hadamard_block, rotate
from dmx.transforms.learning import LearnedRotations
from dmx.transforms.stage import Transform, read_rotations, transformed, write_rotations
from dmx.transforms.stiefel import CayleySGD
from tests.settings import search_config

TOKENS = torch.arange(2 * 48).reshape(2, 48) * 7 % 256
ALL = ("hadamard_block", "hadamard_full", "learned")
QUICK = {"steps": 4, "evaluate_every": 2, "checkpoint_every": 1}


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits.float()


def relative(a, b):
    return float((a - b).norm() / b.norm())


def random_rotations(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(*shape, 32, 32, generator=generator)).Q


def learned(model, config=None):
    """A transform of random rotations for every input of a model's searched layers."""
    space = search_space(model, config or search_config())
    inputs = dict.fromkeys(fused_group(n) for n in transformed_layers(space))
    return Transform(
        "learned", rotations={name: random_rotations(seed=i) for i, name in enumerate(inputs)}
    )


def some(name, model):
    return learned(model) if name == "learned" else Transform(name, 32)


def uniform(model, transform, name="mxfp4"):
    made = uniform_assignment(model, get_block_format(name), search_config(name="uniform"))
    return transform.attach(made, model)


def snapshot(model):
    """Everything that must come back: modules, Parameters, their values, and flags."""
    return (
        {n: id(m) for n, m in model.named_modules()},
        {n: (id(p), p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()},
        {n: m.training for n, m in model.named_modules()},
        model.config.tie_word_embeddings,
        sorted(model.state_dict()),
    )


def check_same(model, before):
    modules, parameters, modes, tied, keys = before
    assert {n: id(m) for n, m in model.named_modules()} == modules
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert model.config.tie_word_embeddings == tied and sorted(model.state_dict()) == keys
    assert [n for n, _ in model.named_parameters()] == list(parameters)
    for name, parameter in model.named_parameters():
        identity, values, needed = parameters[name]
        assert id(parameter) == identity and parameter.requires_grad == needed
        assert torch.equal(parameter, values)


# ---------------------------------------------------------------- the same function


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("architecture", ["llama", "smollm2", "qwen2", "qwen3"])
def test_a_transformed_model_computes_the_same_function(make_tiny, architecture, name):
    model = make_tiny(architecture, heads=2, head_dim=32).model
    before, expected = snapshot(model), logits(model)
    transform = some(name, model)
    layers = uniform(model, Transform()).quantized
    with transformed(model, transform, layers):
        assert relative(logits(model), expected) < 2e-6
        assert not torch.equal(
            model.model.layers[0].mlp.up_proj.weight,
            before[1]["model.layers.0.mlp.up_proj.weight"][1],
        )
    check_same(model, before)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("name", ALL)
def test_in_bf16_it_is_equal_up_to_rounding(make_tiny, name):
    model = make_tiny("smollm2", dtype="bfloat16", heads=2, head_dim=32).model
    expected = logits(model)
    with transformed(model, some(name, model), uniform(model, Transform()).quantized):
        assert logits(model).isfinite().all() and relative(logits(model), expected) < 0.03


@pytest.mark.parametrize(
    "matrix", [hadamard_block(), random_rotations()], ids=["hadamard", "random"]
)
def test_bf16_inputs_give_bf16_with_float32_accumulation(matrix, generator):
    x = torch.randn(5, 96, generator=generator).bfloat16()
    rotated = BlockRotation(matrix)(x)
    exact = torch.cat([b @ matrix.bfloat16().double() for b in x.double().split(32, -1)], 1)
    assert rotated.dtype == torch.bfloat16 and rotated.shape == x.shape
    assert (rotated.double() - exact).abs().max() <= exact.abs().max() * 2**-8


def test_layers_of_no_whole_blocks_and_the_head_stay_as_they_are(make_tiny):
    model = make_tiny("llama", hidden_size=96, intermediate_size=144, heads=3, kv_heads=3).model
    layers = uniform(model, Transform()).quantized
    with transformed(model, Transform("hadamard_block"), layers):
        kinds = {n: type(m) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    plain = {n for n, kind in kinds.items() if kind is nn.Linear}
    assert plain == {"lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}
    assert {kind for n, kind in kinds.items() if n not in plain} == {RotatedLinear}


def test_the_input_spreads_an_outlier_over_its_block_alone():
    x = torch.zeros(1, 96)
    x[0, 40] = 32.0
    y = BlockRotation(hadamard_block())(x)
    assert torch.equal(y[0, :32], torch.zeros(32)) and torch.equal(y[0, 64:], torch.zeros(32))
    assert torch.allclose(y[0, 32:64].abs(), torch.full((32,), 32**0.5))


# ---------------------------------------------------------------- apply and restore


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("operands", [(True, True), (True, False), (False, True)])
def test_apply_quantizes_the_rotated_operands_and_restore_gives_the_originals(
    make_tiny, name, operands, generator
):
    model = make_tiny("smollm2", heads=2, head_dim=32).model
    before, layer = snapshot(model), "model.layers.0.mlp.up_proj"
    transform, (weights, inputs) = some(name, model), operands
    dmx.apply(model, uniform(model, transform), weights=weights, inputs=inputs)
    assert sorted(model.state_dict()) == before[4]
    applied = model.get_submodule(layer)
    x = torch.randn(3, applied.in_features, generator=generator)
    found = applied(x)
    dmx.restore(model)
    check_same(model, before)

    quantize = lambda t: ops.fake_quant(t, get_block_format("mxfp4"))  # noqa: E731
    with transformed(model, transform, [layer]):
        weight = model.get_submodule(layer).weight
    x = x if name == "hadamard_full" else rotate(x, transform.rotation(layer))
    expected = (quantize(x) if inputs else x) @ (quantize(weight) if weights else weight).T
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_copies_and_moves_of_an_applied_model(make_tiny, name):
    model = make_tiny("smollm2", heads=2, head_dim=32).model
    before = snapshot(model)
    dmx.apply(model, uniform(model, some(name, model)))
    other = dmx.restore(copy.deepcopy(model))
    check = dict(other.named_parameters())
    assert all(torch.equal(check[n], values) for n, (_, values, _) in before[1].items())
    dmx.restore(model)
    check_same(model, before)
    dmx.apply(model, uniform(model, some(name, model)))
    dmx.restore(model.bfloat16())
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_a_failed_apply_leaves_the_model_alone(make_tiny, monkeypatch):
    model = make_tiny("llama").model
    before = snapshot(model)
    monkeypatch.setattr("dmx.applying.apply.replace_layers", lambda *_: 1 / 0)
    for name in ALL:
        with pytest.raises(ZeroDivisionError):
            dmx.apply(model, uniform(model, some(name, model)))
        check_same(model, before)


# ---------------------------------------------------------------- searches


SEARCHES = ("uniform", "random", "kl", "kl_per_bit", "fisher", "weight_mse", "differentiable")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("search", SEARCHES)
def test_every_search_works_on_a_transformed_model_and_gives_it_back(
    make_tiny, tmp_path, search, name
):
    model = make_tiny("smollm2").model.train()
    next(model.parameters()).requires_grad_(False)
    before = snapshot(model)
    file = None
    if name == "learned":
        file = str(tmp_path / "transform.safetensors")
        (tmp_path / "transform.safetensors").write_bytes(write_rotations(learned(model).rotations))
    config = search_config(name=search, transform=name, rotation_file=file, **QUICK)
    result = dmx.search(model, [TOKENS, TOKENS.flip(1)], dmx.Budget(5.0), config)
    check_same(model, before)
    assignment = result.assignment
    assert assignment.transform["name"] == name
    saved = Assignment.load(assignment.save(tmp_path / "found" / "assignment.json"))
    assert saved == assignment and ("file" in saved.transform) == (name == "learned")
    results = []
    for each in (assignment, saved):
        results.append(logits(dmx.apply(model, each)))
        dmx.restore(model)
    assert torch.equal(*results)
    check_same(model, before)


@pytest.mark.parametrize("search", ["kl", "fisher"])
def test_a_scan_measures_the_transformed_model(make_tiny, search):
    """The same scan of a model whose layers are rotated by hand gives the same scores."""
    model, config = make_tiny("llama").model, search_config(name=search, transform="hadamard_block")
    found = dmx.search(model, [TOKENS], dmx.Budget(5.0), config)
    plain = dmx.search(model, [TOKENS], dmx.Budget(5.0), search_config(name=search))
    with transformed(model, Transform("hadamard_block"), found.assignment.quantized):
        by_hand = dmx.search(model, [TOKENS], dmx.Budget(5.0), search_config(name=search))
    assert np.array_equal(found.preference, by_hand.preference)
    assert not np.allclose(found.preference, plain.preference)


def test_score_files_of_another_transform_are_not_taken(make_tiny, tmp_path):
    model = make_tiny("llama").model
    found = {}
    for name in ("none", *ALL[:2], "none"):
        config = search_config(name="weight_mse", transform=name)
        result = dmx.search(model, [TOKENS], dmx.Budget(5.0), config, score_folder=tmp_path)
        found.setdefault(name, result.preference)
        assert np.array_equal(found[name], result.preference)
    assert len(list(tmp_path.glob("*.json"))) == 6


def test_a_model_comes_back_also_after_an_exception(make_tiny, monkeypatch):
    model = make_tiny("smollm2").model
    before = snapshot(model)
    calls = []

    def fail(*arguments, **options):
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("stop")
        return original(*arguments, **options)

    import dmx.searching.differentiable as module

    original = module.model_logits
    monkeypatch.setattr(module, "model_logits", fail)
    for name in ALL:
        calls.clear()
        with pytest.raises(RuntimeError, match="stop"):
            dmx.search(model, [TOKENS], dmx.Budget(5.0), search_config(transform=name, **QUICK))
        check_same(model, before)


def test_the_reference_is_the_untransformed_function(make_tiny):
    model = make_tiny("llama").model
    expected = logits(model)
    space = search_space(model, search_config())
    family = search_config().format_family
    with (
        transformed(model, Transform("hadamard_block"), transformed_layers(space)),
        searching_model(model, space, family, "floor") as bank,
    ):
        bank.set_full()
        assert relative(logits(model), expected) < 1e-6
    rotations = rotations_of(model, space)
    with searching_model(model, space, family, "floor", rotations) as bank:
        bank.set_full()
        assert torch.equal(logits(model), expected)


# ---------------------------------------------------------------- learning


def rotations_of(model, space, *, momentum=0.9):
    return LearnedRotations(
        transformed_layers(space),
        momentum=momentum,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def test_layers_of_one_input_share_a_rotation_which_starts_at_the_hadamard_matrix(make_tiny):
    model = make_tiny("llama").model
    rotations = rotations_of(model, search_space(model, search_config()))
    of = rotations.input_of
    prefix = "model.layers.1."
    assert of[f"{prefix}self_attn.q_proj"] == of[f"{prefix}self_attn.v_proj"]
    assert of[f"{prefix}mlp.gate_proj"] == of[f"{prefix}mlp.up_proj"]
    assert len(rotations.inputs) == 8 == len(set(of.values()))
    views = rotations.views()
    assert len(views) == 8 and all(torch.equal(view, hadamard_block()) for view in views)
    facts = rotations.transform().attach(uniform(model, Transform()), model).transform
    assert facts["run_time"]["elements"] == rotations.matrices.numel()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_rotations_stay_orthogonal_over_many_steps(scale, generator):
    matrices = random_rotations(4)
    optimizer = CayleySGD(matrices, momentum=0.9)
    for _ in range(1000):
        optimizer.step(scale * torch.randn(4, 32, 32, generator=generator), lr=1.0)
    error = matrices.double().mT @ matrices.double() - torch.eye(32)
    assert error.abs().max() < 1e-6


def test_steps_go_downhill_to_the_nearest_rotation(generator):
    target = random_rotations(3, seed=5)
    matrices = random_rotations(3, seed=5) @ torch.matrix_exp(
        0.02 * (lambda a: a - a.mT)(torch.randn(3, 32, 32, generator=generator))
    )
    optimizer = CayleySGD(matrices, momentum=0.9)
    start = float((matrices - target).norm())
    for _ in range(300):
        optimizer.step(matrices - target, lr=0.1)
    assert float((matrices - target).norm()) < 1e-3 * start


def test_a_zero_gradient_and_one_that_is_not_finite_move_nothing(make_tiny):
    model = make_tiny("llama").model
    rotations = rotations_of(model, search_space(model, search_config()))
    before = rotations.matrices.detach().clone()
    gradient = torch.zeros_like(before)
    gradient[2, 3, 4] = torch.nan
    assert rotations.step(gradient, 1.0).tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert torch.allclose(rotations.matrices, before, atol=1e-7)


def test_the_gradient_of_a_rotation_is_that_of_finite_differences(
    make_tiny, monkeypatch, generator
):
    """With a smooth function for the quantizer, whose own derivative is straight-through."""
    monkeypatch.setattr(ops, "continuous_fake_quant", lambda x, parameters, **_: torch.tanh(2 * x))
    monkeypatch.setattr(
        ops,
        "continuous_fake_quant_backward",
        lambda grad, x, parameters, needs_grad_x=True, **_: (
            2 * grad * (1 - torch.tanh(2 * x) ** 2) if needs_grad_x else None,
            torch.zeros(()),
        ),
    )
    model = make_tiny("llama", layers=1).model
    space = search_space(model, search_config(fixed={"*o_proj": "mxfp8_e4m3"}))
    rotations = rotations_of(model, space)
    x = torch.randn(6, 64, generator=generator)
    direction = torch.randn(rotations.matrices.shape, generator=generator)

    with searching_model(model, space, search_config().format_family, "floor", rotations) as bank:
        block = model.model.layers[0]

        def loss():
            bank.set_soft(torch.ones(len(space.units)))
            q, up = block.self_attn.q_proj(x), block.mlp.up_proj(x)
            return q.double().square().sum() + up.double().cos().sum()

        (gradient,) = torch.autograd.grad(loss(), [rotations.matrices])
        step, values = 1e-3, []
        for sign in (1, -1):
            with torch.no_grad():
                rotations.matrices += sign * step * direction
                values.append(float(loss()))
                rotations.matrices -= sign * step * direction
    numeric = (values[0] - values[1]) / (2 * step)
    assert numeric == pytest.approx(float((gradient * direction).sum()), rel=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("operands", ["joint", "separate"])
def test_the_gradient_is_that_of_the_public_quantizer(make_tiny, dtype, operands, checkpointing):
    """Through both operands, straight through the rounding; with and without checkpointing."""
    model = make_tiny("llama", dtype=dtype).model
    config = search_config(
        transform="learned", gradient_checkpointing=checkpointing, raw_start=1.0, choices=operands
    )
    space = search_space(model, config)
    search = DifferentiableSearch(
        model, [TOKENS], space, dmx.Budget(5.0), config, folder=None, fingerprint=""
    )
    if operands == "separate":
        with torch.no_grad():
            search.raw[1::2] = 1.2  # inputs at other offsets than weights
    from dmx.models.checkpointing import checkpointing as checkpointed

    with (
        searching_model(model, space, search.family, "floor", search.rotations) as bank,
        checkpointed(model, checkpointing, "search.descent"),
    ):
        _, _, by_rotation = search._gradient(bank, TOKENS, torch.tensor(0.4))
    with searching_model(model, space, search.family, "floor", search.rotations) as bank:
        expected = reference_gradient(model, bank, search)
    assert by_rotation.dtype == torch.float32 and by_rotation.abs().sum() > 0
    tolerance = 1e-4 if dtype == "float32" else 0.05
    assert relative(by_rotation, expected) < tolerance


def reference_gradient(model, bank, search):
    """The same loss with every product written out in the public differentiable quantizer."""
    from dmx.models.running import model_logits
    from dmx.searching.objective import budget_penalty, task_loss
    from dmx.searching.offsets import anneal

    offsets = anneal(search.raw, torch.tensor(0.4), search.family)
    bank.set_soft(offsets)

    def forward(layer, x):
        x, weight = layer.operands(x)
        x, weight = (
            dmx.continuous_fake_quant(t, offsets[unit], search.family)
            for t, unit in ((x, layer.input_unit), (weight, layer.weight_unit))
        )
        return torch.nn.functional.linear(x, weight, layer.bias)

    original = SearchLinear.forward
    SearchLinear.forward = forward
    try:
        out = model_logits(model, TOKENS)
    finally:
        SearchLinear.forward = original
    loss = task_loss(search.config.objective, out, TOKENS, None)
    loss = loss + budget_penalty(search.config.descent, search.soft_average(offsets), 5.0)
    return torch.autograd.grad(loss, [search.rotations.matrices])[0]


LEARN = {
    "transform": "learned",
    "objective": "kl",
    "raw_start": 1.0,
    "lr": 3.0,
    "momentum": 0.9,
    "lr_schedule": "cosine",
    "steps": 12,
    "evaluate_every": 11,
    "checkpoint_every": 2,
}


def text_batches(count):
    """(4, 64) bytes of text, as the tiny models are trained on."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()[: count * 4 * 64]
    return list(torch.tensor(list(text)).reshape(count, 4, 64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_learning_lowers_the_loss_and_leaves_rotations(tiny_trained, tmp_path, dtype):
    model = tiny_trained.model
    for parameter in model.parameters():  # as loading does it, but trained once for both
        parameter.data = parameter.data.to(getattr(torch, dtype))
    before = snapshot(model)
    losses = {}
    for rate in (0.0, 6.0):
        config = search_config(**LEARN, rotation_lr=rate)
        result = dmx.search(model, text_batches(1), dmx.Budget(4.5), config)
        losses[rate] = result.history[-1]["hard_loss"]
        check_same(model, before)
    assert losses[6.0] < 0.9 * losses[0.0]
    saved = Assignment.load(result.assignment.save(tmp_path / "assignment.json"))
    assert saved.transform["file"] == "transform.safetensors"
    matrices = read_rotations((tmp_path / "transform.safetensors").read_bytes(), "file")
    assert not torch.equal(next(iter(matrices.values())), hadamard_block())


def test_a_rate_of_zero_is_the_search_with_the_hadamard_matrix(make_tiny):
    model = make_tiny("llama").model
    found = [
        dmx.search(model, [TOKENS], dmx.Budget(5.0), search_config(**{**LEARN, **extra}))
        for extra in ({"rotation_lr": 0.0}, {"transform": "hadamard_block"})
    ]
    assert np.allclose(found[0].raw_offsets, found[1].raw_offsets, atol=1e-3)
    assert found[0].assignment.formats == found[1].assignment.formats


def test_checkpointing_changes_no_number_of_a_search_that_learns(make_tiny):
    model = make_tiny("smollm2").model
    before = snapshot(model)
    settings = {**LEARN, "penalty": "exact"}
    found = [
        dmx.search(
            model,
            text_batches(2),
            dmx.Budget(5.0),
            search_config(**settings, include_lm_head=True, gradient_checkpointing=on),
        )
        for on in (False, True)
    ]
    check_same(model, before)
    assert np.allclose(found[0].raw_offsets, found[1].raw_offsets, atol=1e-4)
    rotations = Transform.of(found[0].assignment).rotations
    assert "lm_head" in rotations


def test_a_resumed_search_ends_with_the_same_rotations(make_tiny, tmp_path):
    model, config = make_tiny("llama").model, search_config(**LEARN)
    whole = dmx.search(model, [TOKENS], dmx.Budget(5.0), config, folder=tmp_path / "whole")
    original = DifferentiableSearch.take_step

    def dies(self, *arguments):
        if self.step == 7:
            raise KeyboardInterrupt
        return original(self, *arguments)

    DifferentiableSearch.take_step = dies
    try:
        with pytest.raises(KeyboardInterrupt):
            dmx.search(model, [TOKENS], dmx.Budget(5.0), config, folder=tmp_path / "died")
    finally:
        DifferentiableSearch.take_step = original
    again = dmx.search(model, [TOKENS], dmx.Budget(5.0), config, folder=tmp_path / "died")
    assert np.array_equal(whole.raw_offsets, again.raw_offsets)
    assert whole.assignment == again.assignment
    assert whole.assignment.content("transform") == again.assignment.content("transform")
    histories = [(tmp_path / n / "history.jsonl").read_bytes() for n in ("whole", "died")]
    assert histories[0] == histories[1]
    other = search_config(**{**LEARN, "rotation_lr": 2.0})
    with pytest.raises(RunError, match="other settings"):
        dmx.search(model, [TOKENS], dmx.Budget(5.0), other, folder=tmp_path / "died")


@pytest.mark.parametrize("name", ALL)
def test_a_polish_measures_the_transformed_model(make_tiny, tmp_path, name):
    model = make_tiny("smollm2").model
    with torch.no_grad():  # random, but loud enough for a KL far above its rounding
        for layer in model.model.layers.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(8)
    before = snapshot(model)
    config = search_config(**{**LEARN, "transform": name}, polish_rounds=1)
    result = dmx.search(model, [TOKENS], dmx.Budget(5.0), config, folder=tmp_path)
    check_same(model, before)
    reference = logits(model)
    applied = logits(dmx.apply(model, result.assignment))
    dmx.restore(model)
    from dmx.numerics.distances import kl_divergence

    expected = float(kl_divergence(reference, applied))
    assert result.polish[-1]["kl"] == pytest.approx(expected, rel=1e-3)


def test_fixed_layers_are_rotated_and_pass_the_gradient(tiny_trained):
    model = tiny_trained.model
    config = search_config(
        **{**LEARN, "steps": 2}, fixed={"*down_proj": "mxfp4", "*v_proj": "bf16"}
    )
    result = dmx.search(model, text_batches(2), dmx.Budget(5.0), config)
    rotations = Transform.of(result.assignment).rotations
    down = rotations["model.layers.0.mlp.down_proj"]
    assert not torch.allclose(down, hadamard_block(), atol=1e-7)
    dmx.apply(model, result.assignment)
    assert type(model.get_submodule("model.layers.0.self_attn.v_proj")) is nn.Linear
    assert model.get_submodule("model.layers.0.mlp.down_proj").input_transform is not None


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"transform": "haddamard_block"}, "hadamard_block"),
        ({"transform": "learned", "name": "kl"}, "only the differentiable search learns"),
        ({"rotation_file": "a.safetensors"}, "needs search.transform=learned"),
        ({"transform": "hadamard_block", "target": "vllm_quark"}, "rotates inputs at run time"),
        ({"rotation_lr": -1.0}, "search.rotation.lr"),
        ({"rotation_momentum": 1.0}, "search.rotation.momentum"),
        ({"residual_block": 0}, "search.residual_block"),
        ({"residual_block": 64}, "residual_block=64 needs search.transform=hadamard_full"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises((SearchConfigError, FormatError), match=says):
        search_config(**settings)


def test_uniform_rows_carry_the_transform_and_need_a_file_for_learned_ones(make_tiny, tmp_path):
    model, block_format = make_tiny("llama").model, get_block_format("mxfp4")
    for name in ALL[:2]:
        made = uniform_assignment(
            model, block_format, search_config(name="uniform", transform=name)
        )
        assert made.transform["name"] == name
    with pytest.raises(SearchConfigError, match=r"search\.rotation\.file="):
        uniform_assignment(model, block_format, search_config(transform="learned"))
    path = tmp_path / "t.safetensors"
    path.write_bytes(write_rotations(learned(model).rotations))
    config = search_config(name="uniform", transform="learned", rotation_file=str(path))
    made = uniform_assignment(model, block_format, config)
    assert made.transform["run_time"]["elements"] == 8 * 1024
    assert made.transform["run_time"]["bits_per_element"] == pytest.approx(8 * 1024 * 16 / 73728)


def damaged(content, kind):
    tensors = load(content)
    first = next(iter(tensors))
    if kind == "bytes":
        return content[:-9]
    if kind == "orthogonality":
        tensors[first] = tensors[first] * 1.01
    elif kind == "nan":
        tensors[first][0, 0] = torch.nan
    elif kind == "dtype":
        tensors[first] = tensors[first].bfloat16()
    elif kind == "size":
        tensors[first] = torch.eye(16)
    elif kind == "blocks":
        tensors[first] = tensors[first].repeat(7, 1, 1)
    elif kind == "missing":
        del tensors[first]
    elif kind == "unknown":
        tensors["model.layers.9.mlp.down_proj"] = hadamard_block()
    return save(tensors)


DAMAGE = {
    "bytes": "no safetensors file",
    "orthogonality": "not orthogonal",
    "nan": "not orthogonal",
    "dtype": "expected one rotation",
    "size": "float32 .32, 32.",
    "blocks": "one rotation for all blocks",
    "missing": "lacks model.layers",
    "unknown": "holds model.layers.9",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_or_foreign_file_is_refused(make_tiny, tmp_path, kind):
    model = make_tiny("llama").model
    before, path = snapshot(model), tmp_path / "transform.safetensors"
    path.write_bytes(damaged(write_rotations(learned(model).rotations), kind))
    config = search_config(name="random", transform="learned", rotation_file=str(path))
    with pytest.raises(AssignmentError, match=DAMAGE[kind]):
        search_space(model, config)
    assignment = uniform(model, learned(model))
    assignment = assignment.with_artifact("transform", path.read_bytes(), assignment.transform)
    with pytest.raises(AssignmentError, match=DAMAGE[kind]):
        dmx.apply(model, assignment)
    check_same(model, before)


def test_a_file_that_changed_or_is_gone_is_refused(make_tiny, tmp_path):
    model = make_tiny("llama").model
    before = snapshot(model)
    saved = Assignment.load(uniform(model, learned(model)).save(tmp_path / "assignment.json"))
    file = tmp_path / "transform.safetensors"
    file.write_bytes(write_rotations(learned(model, search_config(include_lm_head=True)).rotations))
    with pytest.raises(AssignmentError, match=r"SHA-256 .* damaged or of another search"):
        dmx.apply(model, saved)
    file.unlink()
    with pytest.raises(AssignmentError, match=r"cannot be read .*copy it beside"):
        dmx.apply(model, saved)
    check_same(model, before)


def test_a_missing_transform_file_is_named(make_tiny):
    config = search_config(name="kl", transform="learned", rotation_file="nowhere.safetensors")
    with pytest.raises(AssignmentError, match=r"search\.rotation\.file=nowhere"):
        search_space(make_tiny("llama").model, config)


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        ({"name": "hadamard"}, "unknown here"),
        ({"name": "none"}, "unknown here"),
        ({"name": "learned"}, "damaged"),
        ({"name": "hadamard_block", "block_size": "32"}, "damaged"),
    ],
)
def test_a_transform_that_makes_no_sense_is_refused(make_tiny, transform, says):
    model = make_tiny("llama").model
    assignment = uniform(model, Transform())
    object.__setattr__(assignment, "transform", transform)
    with pytest.raises(AssignmentError, match=says):
        dmx.apply(model, assignment)


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        ({}, "it has no name"),
        ({"name": "learned", "file": "../x", "sha256": "0" * 64}, "beside the assignment"),
        ({"name": "learned", "file": "x", "sha256": "0" * 63}, "64 hexadecimal digits"),
        ({"name": "learned", "file": "x"}, "64 hexadecimal digits"),
        ([], "an object or null"),
    ],
)
def test_a_malformed_transform_object_is_refused_by_the_reader(
    make_tiny, tmp_path, transform, says
):
    path = uniform(make_tiny("llama").model, Transform()).save(tmp_path / "assignment.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "transform": transform}))
    with pytest.raises(AssignmentError, match=says):
        Assignment.load(path)


# ---------------------------------------------------------------- files beside an assignment


def test_saving_elsewhere_takes_the_file_along_under_the_name_of_the_assignment(
    make_tiny, tmp_path
):
    model = make_tiny("llama").model
    assignment = uniform(model, learned(model))
    first = Assignment.load(assignment.save(tmp_path / "a" / "assignment.json"))
    assert first.artifact("transform") == tmp_path / "a" / "transform.safetensors"
    second = Assignment.load(first.save(tmp_path / "b" / "best.json"))
    assert second.artifact("transform") == tmp_path / "b" / "best.transform.safetensors"
    assert second.content("transform") == assignment.content("transform")
    second.save(tmp_path / "b" / "best.json")  # onto itself
    assert Assignment.load(tmp_path / "b" / "best.json").content("transform")
    with pytest.raises(AssignmentError, match=r"weights .* names no file"):
        first.artifact("weights")
    with pytest.raises(AssignmentError, match="Save it first"):
        assignment.artifact("transform")


def test_equal_searches_are_equal_whatever_folder_they_lie_in(make_tiny, tmp_path):
    assignment = uniform(make_tiny("llama").model, learned(make_tiny("llama").model))
    saved = [Assignment.load(assignment.save(tmp_path / n / "assignment.json")) for n in "ab"]
    assert saved[0] == saved[1] == assignment


def test_what_a_transform_costs_is_stated(make_tiny):
    model = make_tiny("smollm2").model
    block = uniform(model, Transform("hadamard_block")).transform["run_time"]
    assert block["rotated_layers"] == 14 and block["elements"] == 1024
    assert block["products_per_input_element"] == 32
    full = uniform(model, Transform("hadamard_full", 32)).transform["run_time"]
    assert full["rotated_layers"] == 0 and full["elements"] == 288 * 64  # the head, untied


def test_models_that_cannot_be_rotated_as_a_whole_say_so(make_tiny):
    model = make_tiny("llama").model
    model.model.layers[0].extra = nn.Linear(64, 64)
    config = search_config(name="random", transform="hadamard_full", exclude=["*extra"])
    with pytest.raises(ModelError, match="cannot be rotated"):
        dmx.search(model, [TOKENS], dmx.Budget(5.0), config)
    dmx.search(model, [TOKENS], dmx.Budget(5.0), search_config(name="random", exclude=["*extra"]))
