"""Experts of 3-D parameters as linear layers: what they compute, what they are called, what is left behind."""

import copy

import pytest
import torch
import transformers as tf
from torch import nn

from dmx.errors import ModelError
from dmx.models.backbone import unreached_layers
from dmx.models.experts import (
    KNOWN_EXPERTS,
    counting_tokens,
    expert_layers,
    experts_modules,
    experts_path,
    form_of,
    install_experts,
    linear_experts,
)
from dmx.models.linears import linear_layers
from dmx.models.products import Groups, product, product_by_input, product_by_weight
from dmx.models.searchable import check_searchable
from tests.mixtures import BLOCKS, CONFIGS, STACKED, logits, mixture, token_ids


@pytest.mark.parametrize("kind", CONFIGS)
def test_both_forms_compute_what_the_experts_compute_bit_for_bit(kind):
    model = mixture(kind)
    before, state = logits(model), {k: v.clone() for k, v in model.state_dict().items()}
    assert {type(m).__name__ for m in experts_modules(model).values()} <= set(KNOWN_EXPERTS)
    for form in ("stacked", "split"):
        with linear_experts(model, form):
            assert torch.equal(logits(model), before)
            check_searchable(model)
    assert torch.equal(logits(model), before)
    after = model.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[k], state[k]) for k in state)


@pytest.mark.parametrize(
    "not_yet_said",
    [["has_post_expert_norm"], ["has_post_expert_norm", "has_gate", "is_concatenated"]],
    ids=["5.17", "5.0"],
)
def test_experts_of_older_versions_are_known_that_say_less_of_themselves(not_yet_said):
    model = mixture()
    before = logits(model)
    for module in experts_modules(model).values():
        for name in not_yet_said:
            module.__dict__.pop(name, None)  # the version installed may be that old itself
    assert list(experts_modules(model)) == BLOCKS
    with linear_experts(model, "stacked"):
        check_searchable(model)
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name, found", [("has_bias", True), ("has_post_expert_norm", True), ("is_transposed", None)])  # fmt: skip
def test_experts_of_a_known_name_and_another_layout_are_refused_with_what_differs(name, found):
    model = mixture()
    experts = model.model.layers[0].mlp.experts
    if found is None:
        delattr(experts, name)
    else:
        setattr(experts, name, found)
    assert list(experts_modules(model)) == BLOCKS[1:]
    message = rf"these are Qwen3MoeExperts of another layout \({name}={found}, expected False\)\."
    with pytest.raises(ModelError, match=message):
        check_searchable(model)


def test_transformers_own_loop_differs_by_the_order_of_its_sums_alone():
    model = mixture()
    before = logits(model)
    model.set_experts_implementation("eager")
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-6)


def test_layers_are_called_as_parameters_or_as_in_files():
    model = mixture()
    for form, names in (
        ("stacked", STACKED),
        ("split", [name for layer in STACKED for name in expert_layers(layer, 4)]),
    ):
        with linear_experts(model, form):
            linears = linear_layers(model)
            experts = {name for name in linears if experts_path(name) in BLOCKS}
            assert experts == set(names)
            assert form_of(model, names) == form
            for name in names:  # views of the same memory
                own = linears[name].weight.untyped_storage().data_ptr()
                path, _, _ = name.partition(".experts.")
                module = experts_modules(model)[f"{path}.experts"]
                whole = (module.gate_up_proj, module.down_proj)["down_proj" in name]
                assert own == whole.untyped_storage().data_ptr()
    assert "model.layers.0.mlp.experts.3.up_proj" in names
    assert form_of(model, ["lm_head"]) is None


def test_a_model_may_move_while_its_experts_are_linear_layers():
    for form in ("stacked", "split"):
        model = mixture()
        wanted = copy.deepcopy(model).bfloat16().state_dict()
        undo = install_experts(model, form)
        model.bfloat16()
        undo()
        assert all(torch.equal(v, wanted[k]) for k, v in model.state_dict().items())


def test_one_form_at_a_time():
    model = mixture()
    with linear_experts(model, "stacked"), pytest.raises(ModelError, match="in stacked form"):
        install_experts(model, "split")


def test_experts_that_are_not_known_are_refused_by_name():
    config = tf.GptOssConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    message = (
        r"experts\.gate_up_proj.*Experts are searched of Qwen2MoeExperts.*these are GptOssExperts"
    )
    with pytest.raises(ModelError, match=message):
        check_searchable(model)
    check_searchable(model, allow_unsearched=True)


def test_tokens_are_counted_expert_by_expert():
    model, batches = mixture(), token_ids()
    given = []
    experts = model.model.layers[0].mlp.experts
    handle = experts.register_forward_pre_hook(lambda _m, args: given.append(args[1]))
    for batch in batches:
        model(input_ids=batch)
    handle.remove()
    wanted = torch.stack(given).flatten().bincount(minlength=4).tolist()
    for form in ("stacked", "split"):
        with linear_experts(model, form), counting_tokens(model) as counts:
            assert unreached_layers(model, batches, whole=True) == []
        assert list(counts) == BLOCKS
        assert counts[BLOCKS[0]].tolist() == wanted
        assert sum(wanted) == 2 * 2 * 16 * 3
    with counting_tokens(nn.Linear(2, 2)) as counts:
        assert counts == {}


@pytest.mark.parametrize("kernel", [True, False])
def test_products_by_groups_are_those_of_each_group(kernel, device, generator, monkeypatch):
    if not kernel:
        monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    x, weight, grad = (
        torch.randn(shape, generator=generator).to(device)
        for shape in ((9, 16), (4 * 32, 16), (9, 32))
    )
    sizes = [3, 0, 5, 1]
    groups = Groups(torch.tensor(sizes, device=device).cumsum(0, dtype=torch.int32))
    parts = list(zip(x.split(sizes), weight.split(32), grad.split(sizes), strict=True))
    tight = {"rtol": 1e-5, "atol": 1e-5}
    found = product(x, weight, None, groups)
    torch.testing.assert_close(found, torch.cat([a @ w.T for a, w, _ in parts]), **tight)
    found = product_by_input(grad, weight, groups)
    torch.testing.assert_close(found, torch.cat([g @ w for _, w, g in parts]), **tight)
    found = product_by_weight(grad, x, groups)
    torch.testing.assert_close(found, torch.cat([g.T @ a for a, _, g in parts]), **tight)
