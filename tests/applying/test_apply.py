"""Applying an assignment and taking it away: same Parameters, same keys, same model afterwards."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dmx
from dmx.applying.apply import is_applied
from dmx.applying.linear import QuantLinear, quantized_layers
from dmx.assignment.assignment import make_assignment
from dmx.assignment.space import build_space
from dmx.errors import AssignmentError, DataError, ModelError
from dmx.formats import FAMILIES, get_family
from dmx.models.swap import replace_layers
from dmx.numerics import fake_quant
from dmx.searching.bank import FixedLinear, SearchLinear, searching_model

TOKENS = torch.arange(2 * 40).reshape(2, 40) % 288


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def mixed(model, family="mxfp6_mxfp4", **options):
    """An assignment with every candidate of the family in it."""
    space = build_space(model, get_family(family).formats, **options)
    choice = [i % len(space.formats) for i in range(len(space.units))]
    return space, choice, make_assignment(space, choice, model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("units", ["fused", "layer"])
@pytest.mark.parametrize(
    "options",
    [{}, {"choices": "separate"}, {"input_format": "mxfp8_e4m3"}, {"input_format": "bf16"}],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_hard_model_and_applied_assignment_give_equal_logits(
    family, options, units, dtype, make_tiny
):
    model = make_tiny("qwen3", dtype=dtype).model
    fixed = {"*.1.self_attn.o_proj": "mxfp8_e5m2"}
    space, choice, assignment = mixed(model, family, units=units, fixed=fixed, **options)
    assert bool(assignment.unequal) == bool(options)
    full = logits(model)
    with searching_model(model, space, get_family(family), "floor") as bank:
        assert torch.equal(logits(model), full)
        bank.set_formats([space.formats[i] for i in choice])
        hard = logits(model)
    dmx.apply(model, assignment)
    assert torch.equal(logits(model), hard) and not torch.equal(hard, full)
    assert torch.equal(logits(dmx.restore(model)), full)


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
def test_a_layer_is_the_product_of_its_quantized_operands_under_the_assignments_rule(
    rule, tiny_random
):
    model = tiny_random.model
    space, choice, _ = mixed(model)
    dmx.apply(model, make_assignment(space, choice, model, scale_rules=rule))
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(3, 5, layer.in_features)
    operands = [fake_quant(t, "mxfp6_e2m3", scale_rule=rule) for t in (x, layer.weight)]
    assert layer.weight_quantizer.block_format.name == "mxfp6_e2m3"
    assert torch.equal(layer(x), F.linear(*operands))


def test_weights_and_inputs_are_quantized_as_asked(tiny_random):
    model = tiny_random.model
    _, _, assignment = mixed(model)
    x, seen = torch.randn(2, 64), {}
    for weights, inputs in ((True, True), (True, False), (False, True)):
        layer = dmx.apply(model, assignment, weights=weights, inputs=inputs).model.layers[0]
        layer = layer.self_attn.q_proj
        seen[weights, inputs] = layer(x)
        operands = [
            fake_quant(t, "mxfp4") if on else t for t, on in ((x, inputs), (layer.weight, weights))
        ]
        assert torch.equal(layer(x), F.linear(*operands))
        dmx.restore(model)
    with pytest.raises(ModelError, match=r"would quantize nothing; set one"):
        dmx.apply(model, assignment, weights=False, inputs=False)


def test_input_formats_may_differ_from_those_of_the_weights(tiny_random):
    _, _, assignment = mixed(tiny_random.model)
    inputs = dict.fromkeys(assignment.formats, "mxfp8_e4m3")
    object.__setattr__(assignment, "input_formats", inputs)
    dmx.apply(tiny_random.model, assignment)
    for name, layer in quantized_layers(tiny_random.model).items():
        assert layer.input_quantizer.block_format.name == "mxfp8_e4m3"
        assert layer.weight_quantizer.block_format.name == assignment.formats[name]


def test_state_dict_parameters_hooks_and_mode_stay_through_apply_and_restore(tiny_random):
    model = tiny_random.model.train()
    calls = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: calls.append(1))
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    dmx.apply(model, mixed(model)[2])
    assert model.training and all(m.training for m in model.modules())
    applied = dict(model.named_parameters())
    assert list(applied) == list(parameters)
    assert all(applied[k] is parameters[k] for k in parameters)
    after = model.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[k], state[k]) for k in state)
    logits(model)
    assert calls == [1]
    model.eval()
    assert dmx.restore(model) is model
    assert dict(model.named_modules()) == modules
    assert not any(m.training for m in model.modules())
    assert "save_pretrained" not in model.__dict__


def test_a_second_apply_and_saving_an_applied_model_are_errors(tiny_random, tmp_path):
    model = tiny_random.model
    _, _, assignment = mixed(model)
    dmx.apply(model, assignment)
    with pytest.raises(ModelError, match=r"already applied .*dmx\.restore\(model\) first"):
        dmx.apply(model, assignment)
    with pytest.raises(ModelError, match=r"full-precision.*dmx\.restore.*dmx\.export"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ModelError, match=r"call dmx\.restore\(model\) first"):
        dmx.search(model, [TOKENS], dmx.Budget(5.0), dmx.SearchConfig(name="uniform"))
    dmx.restore(model).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "config.json").is_file()
    with pytest.raises(ModelError, match=r"nothing to restore"):
        dmx.restore(model)


def test_a_copy_of_an_applied_model_restores_by_itself(tiny_random):
    model = dmx.apply(tiny_random.model, mixed(tiny_random.model)[2])
    applied = logits(model)
    other = dmx.restore(copy.deepcopy(model))
    assert is_applied(model) and torch.equal(logits(model), applied)
    assert torch.equal(logits(other), logits(dmx.restore(model)))


def test_tied_weights_stay_tied_and_full_in_the_embedding(make_tiny):
    model = make_tiny("smollm2").model
    embedding = model.model.embed_tokens.weight
    dmx.apply(model, mixed(model, include_lm_head=True)[2])
    assert isinstance(model.lm_head, QuantLinear)
    assert model.lm_head.weight is embedding is model.model.embed_tokens.weight
    assert dmx.restore(model).lm_head.weight is embedding


def test_one_module_under_two_names_is_replaced_under_both():
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    made = replace_layers(model, lambda _, linear: QuantLinear.wrap(linear, None, None))
    assert model[0] is model[2] and isinstance(model[0], QuantLinear) and set(made) == {"0", "2"}


def test_an_error_while_layers_are_made_leaves_the_model_as_it_was(tiny_random):
    model = tiny_random.model

    class Failing:
        def guard(self, quantizer, layer_name, operand):
            if "layers.1" in layer_name:
                raise RuntimeError("no statistics for this layer")
            return quantizer

    before = dict(model.named_modules())
    with pytest.raises(RuntimeError, match=r"no statistics"):
        dmx.apply(model, mixed(model)[2], safety=Failing())
    assert dict(model.named_modules()) == before and not is_applied(model)


def test_a_safety_net_guards_every_operand_of_every_layer(tiny_random):
    asked = []

    class Net:
        def guard(self, quantizer, layer_name, operand):
            asked.append((layer_name, operand))
            return quantizer

    _, _, assignment = mixed(tiny_random.model)
    dmx.apply(tiny_random.model, assignment, safety=Net())
    both = {(name, o) for name in assignment.formats for o in ("weight", "input")}
    assert set(asked) == both and len(asked) == len(both)


def test_cached_weights_give_equal_logits_and_follow_a_change(tiny_random):
    model = tiny_random.model
    _, _, assignment = mixed(model)
    plain = logits(dmx.apply(model, assignment))
    dmx.restore(model)
    dmx.apply(model, assignment, cache_weights=True)
    assert torch.equal(logits(model), plain) and torch.equal(logits(model), plain)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    changed = logits(model)
    dmx.restore(model)
    assert torch.equal(logits(dmx.apply(model, assignment)), changed)
    assert not torch.equal(changed, plain)


def test_weights_cached_by_an_evaluation_serve_a_pass_with_gradients(tiny_random):
    model = tiny_random.model.requires_grad_(False)
    dmx.apply(model, mixed(model)[2], cache_weights=True)
    dmx.perplexity(model, TOKENS.flatten(), window=40)  # runs in inference mode
    model.model.embed_tokens.weight.requires_grad_(True)
    model(input_ids=TOKENS).logits.sum().backward()
    assert model.model.embed_tokens.weight.grad.isfinite().all()


def test_gradients_pass_an_applied_model_straight_through(tiny_random):
    model = tiny_random.model
    layer = dmx.apply(model, mixed(model)[2]).model.layers[0].self_attn.q_proj
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    weight, inputs = fake_quant(layer.weight.detach(), "mxfp4"), fake_quant(x.detach(), "mxfp4")
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1), rtol=0, atol=1e-6)
    torch.testing.assert_close(layer.weight.grad, inputs.sum(0).expand(64, -1), rtol=0, atol=1e-5)


def test_bf16_in_an_assignment_leaves_the_layer_in_full_precision(tiny_random):
    model = tiny_random.model
    _, _, assignment = mixed(model)
    formats = dict(assignment.formats) | {"model.layers.0.mlp.down_proj": "bf16"}
    object.__setattr__(assignment, "formats", formats)
    layer = dmx.apply(model, assignment).model.layers[0].mlp.down_proj
    x = torch.randn(2, 128)
    assert torch.equal(layer(x), F.linear(x, layer.weight))


def test_stored_weights_without_their_file_are_an_error(tiny_random):
    _, _, assignment = mixed(tiny_random.model)
    object.__setattr__(assignment, "weights", {"name": "dice"})
    with pytest.raises(AssignmentError, match=r"weights .*dice.* names no file"):
        dmx.apply(tiny_random.model, assignment)


def test_the_applied_model_prints_its_formats(tiny_random):
    dmx.apply(tiny_random.model, mixed(tiny_random.model)[2])
    assert "weight=mxfp4, input=mxfp4" in repr(tiny_random.model)


def test_divergence_from_itself_is_refused_and_of_a_copy_zero(tiny_random):
    model, other = tiny_random.model, copy.deepcopy(tiny_random.model)
    tokens = TOKENS.flatten()
    with pytest.raises(DataError, match=r"same object"):
        dmx.kl_divergence(model, model, tokens, window=40)
    assert dmx.kl_divergence(other, model, tokens, window=40) == 0
    dmx.apply(other, mixed(other)[2])
    assert dmx.kl_divergence(other, model, tokens, window=40) > 0


def test_search_layers_are_gone_after_the_block_whatever_happens(tiny_random):
    model = tiny_random.model
    space, _, _ = mixed(model, fixed={"*.down_proj": "mxfp8"})
    before = dict(model.named_modules())
    with (
        pytest.raises(KeyboardInterrupt),
        searching_model(model, space, get_family("mxfp6_mxfp4"), "floor"),
    ):
        kinds = {type(m) for m in model.modules()}
        assert {SearchLinear, FixedLinear} <= kinds
        raise KeyboardInterrupt
    assert dict(model.named_modules()) == before


def test_a_float64_model_is_refused_and_left_as_it_was(tiny_random):
    model = tiny_random.model
    assignment = mixed(model)[2]
    before = dict(model.double().named_modules())
    with pytest.raises(ModelError, match=r"q_proj is float64; .*model\.float\(\)"):
        dmx.apply(model, assignment)
    assert dict(model.named_modules()) == before and not is_applied(model)


def test_an_assignment_of_another_shape_is_refused_at_apply(tiny_random, make_tiny):
    other = make_tiny("llama", hidden_size=96, heads=6).model
    with pytest.raises(AssignmentError, match=r"for another model"):
        dmx.apply(other, mixed(tiny_random.model)[2])


def test_an_assignment_for_another_architecture_of_the_same_shapes_warns(tiny_random, make_tiny):
    assignment = mixed(tiny_random.model)[2]
    other = make_tiny("llama").model
    other.config.rms_norm_eps = 0.125
    with pytest.warns(UserWarning, match="made for a model of another architecture"):
        dmx.apply(other, assignment)
    plain = make_tiny("llama").model
    plain.config = {"hidden_size": 64}  # somebody's own: says nothing of the architecture
    same = make_tiny("llama").model
    same.config.tie_word_embeddings = not same.config.tie_word_embeddings  # as folded rotations do
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dmx.apply(same, assignment)
        dmx.apply(plain, assignment)
