"""Rotating the residual stream: the same function, no outlier channels, and back to the bit."""

import copy

import pytest
import torch
from torch import nn

import dmx
from dmx.assignment.assignment import make_assignment
from dmx.assignment.space import build_space
from dmx.errors import ModelError
from dmx.formats import get_family
from dmx.transforms.hadamard import hadamard_matrix, hadamard_transform
from dmx.transforms.residual import rotate_residual

WIDTHS = (
    576,
    768,
    896,
    960,
    1024,
    1152,
    1536,
    2048,
    2304,
    2560,
    3072,
    3584,
    4096,
    5120,
    8192,
    14336,
)
SMALL_ORDERS = (
    1,
    2,
    4,
    8,
    12,
    20,
    24,
    28,
    32,
    36,
    44,
    60,
    64,
    80,
    96,
    108,
    128,
    148,
    576,
    768,
    960,
)
TOKENS = torch.arange(2 * 40).reshape(2, 40) * 31 % 288
MODELS = {
    "llama": {"architecture": "llama"},
    "llama_tied": {"architecture": "llama", "tied": True},
    "qwen3": {"architecture": "qwen3"},
    "qwen3_tied_wide_heads": {"architecture": "qwen3", "tied": True, "head_dim": 32},
    "qwen2_with_biases": {"architecture": "qwen2"},
    "smollm2_576": {
        "architecture": "smollm2",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "heads": 9,
        "kv_heads": 3,
    },
    "paley_heads": {
        "architecture": "llama",
        "hidden_size": 48,
        "intermediate_size": 96,
        "heads": 4,
        "kv_heads": 1,
    },
}


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits.float()


def change(before, after):
    """The largest change of a logit in units of the deviation of all."""
    return float((after - before).abs().max() / before.std())


def stir(model, seed=0):
    """Norm weights and biases that are not the ones and zeros of a fresh model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += (0.3 * noise).to(parameter.dtype)
    return model


def apply_formats(model):
    space = build_space(model, get_family("mxfp6_mxfp4").formats)
    dmx.apply(model, make_assignment(space, [0] * len(space.units), model))


@pytest.fixture(params=MODELS, ids=str)
def model(request, make_tiny):
    return stir(make_tiny(**MODELS[request.param]).model)


def state(model):
    """What an undo must bring back: the Parameters themselves, their values, ties and flags."""
    return (
        {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
        {name: p.detach().clone() for name, p in model.named_parameters()},
        {name: id(module) for name, module in model.named_modules()},
        {module: module.training for module in model.modules()},
        dict(model.all_tied_weights_keys),
        copy.deepcopy(model.config.to_dict()),
    )


def assert_same_state(actual, expected):
    assert actual[0] == expected[0] and actual[2:] == expected[2:]
    assert all(torch.equal(actual[1][name], value) for name, value in expected[1].items())


# ---------------------------------------------------------------- Hadamard matrices


@pytest.mark.parametrize("order", SMALL_ORDERS)
def test_a_hadamard_matrix_is_orthogonal_with_entries_of_one_size(order):
    matrix = hadamard_matrix(order)
    assert matrix.shape == (order, order) and matrix.dtype == torch.float64
    torch.testing.assert_close(
        matrix @ matrix.T, torch.eye(order, dtype=torch.float64), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, order**-0.5))


@pytest.mark.parametrize("order", SMALL_ORDERS)
def test_the_fast_transform_is_the_product_with_the_matrix(order):
    x = torch.randn(2, 3, order, dtype=torch.float64)
    torch.testing.assert_close(
        hadamard_transform(x), x @ hadamard_matrix(order), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_the_widths_of_language_models_have_a_transform(width):
    """One channel spreads evenly over all: the row of an orthogonal matrix of +-1/sqrt(width)."""
    rows = torch.zeros(3, width, dtype=torch.float64)
    rows[0, 0] = rows[1, width // 2] = rows[2, -1] = 1
    turned = hadamard_transform(rows)
    torch.testing.assert_close(turned.abs(), torch.full_like(turned, width**-0.5))
    torch.testing.assert_close(turned @ turned.T, torch.eye(3, dtype=torch.float64))


def test_the_matrix_is_made_once():
    assert hadamard_matrix(64) is hadamard_matrix(64)


@pytest.mark.parametrize("order", [-4, 0, 3, 30, 92])
def test_an_order_without_a_matrix_is_named_with_the_way_out(order):
    with pytest.raises(ModelError, match=rf"order {order} .*Use a transform on blocks of 32"):
        hadamard_matrix(order)


# ---------------------------------------------------------------- the same function


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("value_heads", [True, False])
def test_a_rotated_model_has_the_same_logits(model, value_heads, block_size):
    before, embedding = logits(model), model.get_input_embeddings().weight.clone()
    rotate_residual(model, value_heads=value_heads, block_size=block_size)
    # float32 rounds to 6e-8, and some dozen sums of up to 1536 products follow each other
    assert change(before, logits(model)) < 2e-5
    assert not torch.allclose(embedding, model.get_input_embeddings().weight, atol=1e-3)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    norms = [
        p
        for n, p in model.named_parameters()
        if n.endswith(("layernorm.weight", "model.norm.weight"))
    ]
    assert len(norms) == 5 and all((p == 1).all() for p in norms)
    assert model.lm_head.weight is not model.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_the_logits_move_by_rounding_alone(dtype, make_tiny):
    model = stir(make_tiny("qwen3", dtype=dtype).model)
    full = logits(copy.deepcopy(model).float())
    before = logits(model)
    rotate_residual(model)
    own_rounding = (before - full).square().mean().sqrt()
    assert (logits(model) - full).square().mean().sqrt() < 4 * own_rounding
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_biases_of_every_layer_are_turned(make_tiny):
    """Llama's config can give o_proj and down_proj a bias, too."""
    from transformers import AutoModelForCausalLM

    config = make_tiny("llama").model.config
    config.attention_bias = config.mlp_bias = True
    torch.manual_seed(0)
    model = stir(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    assert model.model.layers[0].mlp.down_proj.bias.abs().max() > 0.1
    before = logits(model)
    rotate_residual(model)
    assert change(before, logits(model)) < 2e-5


def test_mistral_is_built_as_llama_is():
    from transformers import AutoModelForCausalLM, MistralConfig

    config = MistralConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
    )
    model = stir(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    before = logits(model)
    rotate_residual(model)
    assert change(before, logits(model)) < 2e-5


def test_the_seed_chooses_the_signs(make_tiny):
    tables = []
    for seed in (0, 0, 1):
        model = make_tiny("llama").model
        rotate_residual(model, seed=seed)
        tables.append(model.get_input_embeddings().weight)
    assert torch.equal(tables[0], tables[1]) and not torch.allclose(tables[0], tables[2])


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_and_loaded_rotated_model_has_the_same_logits(tied, make_tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    model = stir(make_tiny("llama", tied=tied).model)
    before = logits(model)
    rotate_residual(model)
    rotated = logits(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(loaded), rotated) and change(before, rotated) < 2e-5
    assert loaded.config.tie_word_embeddings is False
    model.tie_weights()  # what loading and resizing do: must not tie the head again
    assert torch.equal(logits(model), rotated)


# ---------------------------------------------------------------- no outliers


def test_outlier_channels_disappear_from_what_the_layers_read(tiny_trained):
    model = tiny_trained.model
    with torch.no_grad():  # three channels of the stream that are forty times the others
        model.get_input_embeddings().weight[:, [5, 17, 40]] *= 40

    def kurtosis(path):
        seen = []
        layer = model.get_submodule(path)
        hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        logits(model)
        hook.remove()
        x = seen[0].flatten(0, 1)
        return float((x**4).mean() / (x**2).mean() ** 2)

    paths = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]
    before = [kurtosis(path) for path in paths]
    rotate_residual(model)
    after = [kurtosis(path) for path in paths]
    assert min(before) > 10  # 64 / 3 where three channels hold everything
    assert max(after) < 4  # normal: 3


def test_a_block_rotation_keeps_an_outlier_in_its_block(make_tiny):
    model = make_tiny("llama").model
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table.zero_()[:, 40] = 1
    rotate_residual(model, block_size=32)
    rotated = model.get_input_embeddings().weight
    assert (rotated[:, :32] == 0).all()
    torch.testing.assert_close(rotated[:, 32:].abs(), torch.full((288, 32), 32**-0.5))


def test_blocks_in_heads_divide_both_sizes(make_tiny):
    """Heads of 12 under blocks of 8: values turn in fours."""
    model = make_tiny("llama", hidden_size=48, heads=4, kv_heads=1).model
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.copy_(torch.eye(12, 48) * 1.0)
    rotate_residual(model, block_size=8)
    weight = model.model.layers[0].self_attn.v_proj.weight
    rows = weight.reshape(3, 4, 48)  # a group of four rows reads its own four channels' block of 8
    reads = (rows.abs() > 1e-6).any(1)
    assert [row.nonzero().flatten().tolist() for row in reads] == [
        list(range(8)),
        list(range(8)),
        list(range(8, 16)),
    ]


# ---------------------------------------------------------------- undo


def test_undo_puts_everything_back_to_the_bit(model):
    model.train()
    model.model.layers[0].eval()
    model.get_input_embeddings().weight.requires_grad_(False)
    before = state(model)
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    undo = rotate_residual(model)
    assert not model.get_input_embeddings().weight.requires_grad
    assert model.model.layers[1].training and not model.model.layers[0].training
    undo()
    assert_same_state(state(model), before)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


def test_undo_follows_a_model_that_changed_its_dtype(make_tiny):
    model = make_tiny("smollm2").model
    expected = copy.deepcopy(model).bfloat16()
    undo = rotate_residual(model)
    model.bfloat16()
    undo()
    assert torch.equal(logits(model), logits(expected))


def test_undo_is_refused_twice_and_under_an_assignment(make_tiny):
    model = make_tiny("smollm2").model
    before = logits(model)
    undo = rotate_residual(model)
    apply_formats(model)
    with pytest.raises(ModelError, match=r"cannot be undone.*dmx\.restore"):
        undo()
    dmx.restore(model)
    undo()
    assert torch.equal(logits(model), before)
    with pytest.raises(ModelError, match="undone before"):
        undo()


def test_rotations_nest(make_tiny):
    model = make_tiny("smollm2").model
    before = logits(model)
    first = rotate_residual(model)
    second = rotate_residual(model, seed=1)
    with pytest.raises(ModelError, match="cannot be undone"):
        first()
    second()
    first()
    assert torch.equal(logits(model), before)


# ---------------------------------------------------------------- refusals


def _from_config(name, **options):
    import transformers

    sizes = {
        "vocab_size": 288,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        **options,
    }
    config = getattr(transformers, f"{name}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _swap(path, make):
    def change_model(model):
        parent, _, name = path.rpartition(".")
        old = model.get_submodule(path)
        setattr(model.get_submodule(parent), name, make(model, old))
        return model

    return change_model


class _OnePlusNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return (1 + self.weight) * nn.functional.rms_norm(x, x.shape[-1:])


class _LinearChild(nn.Linear):
    pass


def _share_a_layer(model):
    model.model.layers[1] = model.model.layers[0]
    return model


def _scale_the_residual(model):
    model.model.layers[1].residual_multiplier = 0.5
    return model


def _own_parameter(path):
    def change_model(model):
        module = model.get_submodule(path)
        module.gain = nn.Parameter(torch.ones(4))
        return model

    return change_model


def _narrow_heads(model):
    model.model.layers[0].self_attn.head_dim = 24
    return model


def _without(attribute):
    def change_model(model):
        delattr(model, attribute)
        return model

    return change_model


class _PostNormLayer(nn.Module):
    """Llama's names, wired as OLMo 2 is: the norms act on what a sub-layer adds."""

    def __init__(self, layer):
        super().__init__()
        for name, child in layer.named_children():
            setattr(self, name, child)

    def forward(self, x, position_embeddings=None, attention_mask=None, **options):
        added, _ = self.self_attn(
            x, position_embeddings=position_embeddings, attention_mask=attention_mask
        )
        x = x + self.input_layernorm(added)
        return x + self.post_attention_layernorm(self.mlp(x))


REFUSED = {
    "norm of one plus weight": (
        _swap("model.layers.1.input_layernorm", lambda m, old: _OnePlusNorm(64)),
        r"model\.layers\.1\.input_layernorm is a _OnePlusNorm, which does not compute",
    ),
    "layer norm": (
        _swap("model.norm", lambda m, old: nn.LayerNorm(64)),
        r"model\.norm is a LayerNorm with weight, bias",
    ),
    "layer norm without bias": (
        _swap("model.norm", lambda m, old: nn.LayerNorm(64, bias=False)),
        r"model\.norm is a LayerNorm, which does not compute",
    ),
    "no norm": (
        _swap("model.layers.0.post_attention_layernorm", lambda m, old: nn.Identity()),
        r"is a Identity with no Parameter",
    ),
    "a shared layer": (_share_a_layer, r"share one Parameter"),
    "residual scaling": (_scale_the_residual, r"layers\.1\.residual_multiplier \(0\.5\) may scale"),
    "residual gain": (_own_parameter("model.layers.0"), r"layers\.0\.gain \(a Parameter\) may"),
    "attention sinks": (
        _own_parameter("model.layers.0.self_attn"),
        r"self_attn\.gain has no place in it",
    ),
    "another kind of linear layer": (
        _swap("model.layers.0.mlp.up_proj", lambda m, old: _LinearChild(64, 128)),
        r"up_proj is a _LinearChild, not a plain nn\.Linear",
    ),
    "another kind of embedding": (
        _swap("model.embed_tokens", lambda m, old: nn.EmbeddingBag(288, 64)),
        r"embed_tokens is a EmbeddingBag",
    ),
    "wide queries": (
        _swap("model.layers.0.self_attn.q_proj", lambda m, old: nn.Linear(64, 128)),
        r"o_proj's input has 64 features where 128 are expected",
    ),
    "odd heads": (_narrow_heads, r"head_dim is 24: v_proj \(32\) and o_proj \(64\)"),
    "norms after the layers": (
        _swap("model.layers.0", lambda m, old: _PostNormLayer(old)),
        r"its logits change by .* compute something else",
    ),
    "no head": (_without("lm_head"), r"it has no lm_head"),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_an_unknown_structure_is_named_and_left_as_it_was(case, make_tiny):
    prepare, message = REFUSED[case]
    model = prepare(stir(make_tiny("llama", tied=case != "no head").model))
    before = state(model)
    with pytest.raises(ModelError, match=message):
        rotate_residual(model)
    assert_same_state(state(model), before)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Gemma", {"head_dim": 16}, "embed_tokens is a GemmaTextScaledWordEmbedding"),
        ("Gemma2", {"head_dim": 16}, "cannot be rotated: "),
        ("Granite", {"residual_multiplier": 0.5}, r"model\.\w+_multiplier \(1\.0\) may scale"),
        ("Olmo2", {}, "it has no model.layers.0.input_layernorm"),
        ("Phi3", {}, "it has no model.layers.0.self_attn.q_proj"),
        ("Mixtral", {"num_local_experts": 2}, "it has no model.layers.0.mlp.gate_proj"),
        ("Cohere", {}, "model.norm is a CohereLayerNorm, which does not compute"),
    ],
)
def test_models_of_transformers_that_are_built_otherwise_are_refused(name, options, message):
    model = _from_config(name, **options)
    before = state(model)
    with pytest.raises(ModelError, match=message):
        rotate_residual(model)
    assert_same_state(state(model), before)


def test_a_width_without_a_hadamard_matrix_is_refused(make_tiny):
    model = make_tiny("llama", hidden_size=92, intermediate_size=92, heads=2, head_dim=46).model
    before = state(model)
    with pytest.raises(ModelError, match="order 92 "):
        rotate_residual(model)
    assert_same_state(state(model), before)
    full = logits(model)
    rotate_residual(model, block_size=4)  # the way out
    assert change(full, logits(model)) < 2e-5


@pytest.mark.parametrize("block_size", [-1, 0, 24])
def test_blocks_that_do_not_divide_the_width_are_refused(block_size, tiny_random):
    before = state(tiny_random.model)
    with pytest.raises(ModelError, match=f"block_size={block_size} does not divide .* 64 of Llama"):
        rotate_residual(tiny_random.model, block_size=block_size)
    assert_same_state(state(tiny_random.model), before)


def test_an_applied_model_and_one_without_values_are_refused(make_tiny):
    model = make_tiny("llama").model
    apply_formats(model)
    with pytest.raises(ModelError, match=r"is a QuantLinear.*dmx\.restore\(model\) first"):
        rotate_residual(model)
    with pytest.raises(ModelError, match="is on the meta device"):
        rotate_residual(make_tiny("llama").model.to("meta"))


def test_an_error_halfway_leaves_the_model_as_it_was(make_tiny, monkeypatch):
    from dmx.transforms import residual

    model = stir(make_tiny("smollm2").model)
    before, calls = state(model), []

    def full(*arguments, **options):
        calls.append(1)
        if len(calls) == 9:
            raise torch.OutOfMemoryError("no memory")
        return rotate_rows(*arguments, **options)

    rotate_rows = residual._rotate_rows
    monkeypatch.setattr(residual, "_rotate_rows", full)
    with pytest.raises(torch.OutOfMemoryError):
        rotate_residual(model)
    assert_same_state(state(model), before)
