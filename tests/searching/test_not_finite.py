"""NaN and Inf in weights, activations and losses: named, refused by every search, and never written as a result."""

import pytest
import torch

import dmx
from dmx import Budget
from dmx.errors import ModelError
from dmx.models.finite import check_finite_weights, first_not_finite
from tests.settings import search_config

SEARCHES = (
    *("uniform", "random", "kl", "kl_per_bit", "fisher", "weight_mse"),
    *("differentiable", "joint"),
)


BATCHES = list(torch.randint(0, 257, (3, 2, 32), generator=torch.Generator().manual_seed(3)))


@pytest.fixture
def tiny(tiny_random):
    return tiny_random.model, BATCHES


def config_of(name, **options):
    exact = {"objective": "kl", "penalty": "exact"} if name == "joint" else {}
    return search_config(name=name, **exact | options)


def poison(model, place, value):
    name, index = place
    with torch.no_grad():
        model.state_dict(keep_vars=True)[name][index] = value


WEIGHTS = [
    (("model.layers.1.mlp.down_proj.weight", (3, 5)), torch.nan),
    (("model.embed_tokens.weight", (7, 0)), torch.inf),
    (("model.norm.weight", (2,)), -torch.inf),
    (("lm_head.weight", (1, 1)), torch.nan),
]


@pytest.mark.parametrize(("place", "value"), WEIGHTS, ids=[p[0] for p, _ in WEIGHTS])
def test_the_first_weight_that_is_not_finite_is_named_with_its_place(tiny, place, value):
    model, _ = tiny
    check_finite_weights(model)
    poison(model, place, value)
    index = ", ".join(map(str, place[1]))
    with pytest.raises(ModelError, match=rf"{place[0]}\[{index}\] of .* is -?(nan|inf)"):
        check_finite_weights(model)


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_refuses_a_weight_that_is_not_finite_and_writes_nothing(tiny, name, tmp_path):
    model, batches = tiny
    poison(model, *WEIGHTS[0])
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight\[3, 5\]"):
        dmx.search(model, batches, Budget(5.0), config_of(name), folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [dmx.gptq, dmx.learn_weights])
def test_stages_of_weights_name_a_weight_that_is_not_finite_and_write_nothing(
    tiny, stage, tmp_path
):
    model, batches = tiny
    assignment = dmx.search(model, batches, Budget(5.0), config_of("random")).assignment
    poison(model, *WEIGHTS[0])
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight\[3, 5\]"):
        stage(model, assignment, batches, folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_names_the_layer_whose_output_overflows(tiny, name, tmp_path):
    model, batches = tiny
    with torch.no_grad():  # finite weights whose products are not
        model.model.layers[1].mlp.up_proj.weight.fill_(3e38)
    with pytest.raises(ModelError, match=r"the output of model\.layers\.1\.mlp\.up_proj \("):
        dmx.search(model, batches, Budget(5.0), config_of(name), folder=tmp_path)
    assert not list(tmp_path.iterdir())


def fails_on(model, token):
    """NaN comes out of the first block wherever the batch holds a token."""
    seen = []
    model.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    model.model.layers[0].register_forward_hook(
        lambda _m, _a, out: out * torch.where((seen[-1] == token).any(), torch.nan, 1.0)
    )


LATER = [
    *(("kl", {"score_batches": 2}), ("kl_per_bit", {"score_batches": 2})),
    *(("fisher", {"score_batches": 2}), ("aumann_shapley", {"score_batches": 2})),
    ("random", {"polish_rounds": 1}),
    ("differentiable", {"objective": "cross_entropy", "steps": 4}),
    ("differentiable", {"objective": "kl", "steps": 4}),
]


@pytest.mark.parametrize(("name", "options"), LATER)
def test_a_later_batch_that_is_not_finite_stops_a_search(tiny, name, options):
    model, batches = tiny
    batches = [b.clamp(max=200) for b in batches]
    batches[1][1, 3] = 222
    fails_on(model, 222)
    with pytest.raises(ModelError, match=r"not finite: NaN or Inf on the calib.*model\.layers\.0 "):
        dmx.search(model, batches, Budget(5.0), config_of(name, **options))


def test_a_quantized_model_alone_that_is_not_finite_is_told_so(tiny, monkeypatch):
    model, batches = tiny
    from dmx.searching.bank import SearchLinear

    usual = SearchLinear.forward

    def forward(layer, x):
        y = usual(layer, x)
        return y if layer.bank.mode == "full" else y / 0.0

    monkeypatch.setattr(SearchLinear, "forward", forward)
    with pytest.raises(
        ModelError, match=r"the loss of step 0 .*, quantized, first in the output of"
    ):
        dmx.search(model, batches, Budget(5.0), search_config(steps=2))
    with pytest.raises(
        ModelError, match=r"the score of .* at mxfp4 is not .*alone at mxfp4, first"
    ):
        dmx.search(model, batches, Budget(5.0), search_config(name="kl"))


def test_finite_models_have_no_place_where_it_begins(tiny):
    model, batches = tiny
    assert first_not_finite(model, batches) is None
