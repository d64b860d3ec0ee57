"""Models that are more, or made otherwise, than a stack of decoder blocks in plain linear layers."""

import copy
import dataclasses
import json
import warnings

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

import dmx
from dmx.assignment.targets import SEARCH_TARGETS, TARGETS, obstacles
from dmx.errors import ModelError
from dmx.exporting.plan import check_holds
from dmx.exporting.verify import as_loaded
from dmx.models import ModelConfig, byte_tokenizer, load_model
from dmx.models.backbone import decoder_blocks, unreached_layers
from dmx.models.identity import architecture_sha256
from dmx.models.linears import fused_group, linear_layers, plain_model
from dmx.models.replay import prefix_replay_is_exact
from dmx.models.searchable import check_searchable
from dmx.tiny_models import TinyConfig, make_tiny

SIZES = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
PICTURES = VISION | {"image_size": 28, "patch_size": 14}


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 250, (2, 16), generator=generator) for _ in range(2)]


def searched(model, name="random", *, limit=5.0, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        config = dmx.SearchConfig(name=name, **settings)
        return dmx.search(model, batches(), dmx.Budget(limit), config).assignment


def gemma3():
    text = tf.Gemma3TextConfig(**SIZES, head_dim=32, query_pre_attn_scalar=32)
    vision = tf.SiglipVisionConfig(**PICTURES)
    config = tf.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4,
        image_token_index=257, boi_token_index=258, eoi_token_index=259,
    )  # fmt: skip
    return tf.Gemma3ForConditionalGeneration(config).eval()


def llava():
    config = tf.LlavaConfig(
        text_config=tf.LlamaConfig(**SIZES).to_dict(),
        vision_config=tf.CLIPVisionConfig(**PICTURES).to_dict(),
        image_token_index=257,
    )
    return tf.LlavaForConditionalGeneration(config).eval()


def idefics3():
    config = tf.Idefics3Config(
        text_config=tf.LlamaConfig(**SIZES).to_dict(),
        vision_config=tf.Idefics3VisionConfig(**PICTURES).to_dict(),
        image_token_id=257, scale_factor=2,
    )  # fmt: skip
    return tf.Idefics3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("make", [llava, idefics3, gemma3])
def test_layers_that_read_images_are_left_out_and_named(make):
    model = make()
    with pytest.warns(UserWarning, match="are run by no calibration token and stay in BF16"):
        config = dmx.SearchConfig(name="random")
        found = dmx.search(model, batches(), dmx.Budget(5.0), config).assignment
    assert len(found.formats) == 14 and not any("vision" in name for name in found.formats)
    assert any("vision" in name for name in found.unquantized)
    assert len(decoder_blocks(model)) == 2
    assert prefix_replay_is_exact(model, batches()[0][:1])


def test_the_tower_that_is_excluded_by_name_is_no_news_and_cannot_be_fixed():
    model = gemma3()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        config = dmx.SearchConfig(name="kl", exclude=["model.vision_tower.*"])
        dmx.search(model, batches(), dmx.Budget(5.0), config)
    with pytest.raises(ModelError, match="matches only layers that stay in BF16"):
        searched(model, fixed={"model.vision_tower.*": "mxfp8_e4m3"})


def test_the_encoder_of_a_model_that_has_two_stacks_is_searched_too():
    sizes = {"encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = tf.BartConfig(vocab_size=288, d_model=64, max_position_embeddings=64, **sizes, **heads)
    model = tf.BartForConditionalGeneration(config).eval()
    assert unreached_layers(model, batches()) == []
    assert len(decoder_blocks(model)) == 2
    found = searched(model, "kl")
    assert any(".encoder." in name for name in found.formats)


def test_a_model_that_needs_more_than_tokens_is_refused():
    config = tf.T5Config(vocab_size=288, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    with pytest.raises(ModelError, match="does not run on token ids alone"):
        searched(tf.T5ForConditionalGeneration(config).eval(), allow_unsearched=True)


class Experts(nn.Module):
    """A block with more experts than the model has blocks; all but the first two are run by nothing."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(5)])

    def forward(self, x):
        return x + self.experts[0](x) + self.experts[1](x)


class Mixture(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.table = nn.Embedding(288, 32)
        made = [Experts() for _ in range(2)]
        self.blocks = nn.ModuleList(made) if blocks else nn.Sequential(*made)
        self.head = nn.Linear(32, 288, bias=False)

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, **_):
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return type("Output", (), {"logits": self.head(x)})()


def test_experts_are_no_blocks_and_those_without_a_token_do_not_pay():
    model = Mixture(blocks=True)
    assert decoder_blocks(model) is model.blocks
    found = searched(model, "kl", family="mxfp8_mxfp4")
    assert set(found.formats) == {f"blocks.{b}.experts.{e}" for b in (0, 1) for e in (0, 1)}
    assert "blocks.1.experts.4" in found.unquantized


# ------------------------------------------------------------------------------ configs and buffers


@pytest.mark.parametrize("key", ["intermediate_size", "num_key_value_heads", "head_dim"])
def test_configs_whose_attributes_differ_by_layer_have_a_hash(key):
    value = {"intermediate_size": 64, "num_key_value_heads": 4, "head_dim": 32}[key]
    config = tf.Qwen3Config(**SIZES, head_dim=16, per_layer_config={1: {key: value}})
    plain = tf.Qwen3Config(**SIZES, head_dim=16)
    again = tf.Qwen3Config.from_dict(config.to_dict())
    assert architecture_sha256(config) == architecture_sha256(again) != architecture_sha256(plain)


def test_a_model_with_other_heads_in_some_layers_is_searched():
    kinds = ["sliding_attention", "full_attention"]
    own = {
        "head_dim": 16,
        "global_head_dim": 32,
        "layer_types": kinds,
        "hidden_size_per_layer_input": 0,
    }
    model = tf.AutoModelForCausalLM.from_config(tf.Gemma4TextConfig(**SIZES | own)).eval()
    shapes = searched(model).shapes
    heads = [shapes[f"model.layers.{i}.self_attn.q_proj"][0] for i in (0, 1)]
    assert heads == [64, 128]


@pytest.mark.parametrize("kind", [tf.GemmaConfig, tf.Gemma2Config, tf.Gemma3TextConfig])
@pytest.mark.parametrize("cast", [False, True])
def test_the_factor_of_an_embedding_is_what_a_loader_makes_of_it(kind, cast, tmp_path):
    model = tf.AutoModelForCausalLM.from_config(kind(**SIZES, head_dim=32)).eval()
    model.save_pretrained(tmp_path)
    model = model.to(torch.bfloat16) if cast else model
    theirs = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with as_loaded(model) as ours, torch.no_grad():
        tokens = batches()[0]
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


# ---------------------------------------------------------------------------------- what runtimes do


@pytest.mark.parametrize(
    "names",
    [
        ("q_proj", "k_proj", "v_proj"),
        ("in_proj_qkv", "in_proj_z"),
        ("in_proj_b", "in_proj_a"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("w1", "w3"),
        ("c_fc_0", "c_fc_1"),
    ],
)
def test_what_vllm_merges_is_one_group_and_a_split_one_does_not_load(names):
    layers = [f"model.layers.0.part.{name}" for name in names]
    assert len({fused_group(layer) for layer in layers}) == 1
    formats = dict.fromkeys(layers, "mxfp4") | {layers[0]: "mxfp8_e4m3"}
    loader = SEARCH_TARGETS["vllm"]
    reasons = obstacles(formats, TARGETS["compressed_tensors, profile vllm"], loader)
    assert any("fused groups" in reason for reason in reasons)


def test_mla_pairs_are_units():
    mla = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
    sizes = SIZES | {"num_key_value_heads": 4}
    config = tf.DeepseekV3Config(**sizes, **mla, v_head_dim=16, first_k_dense_replace=2)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    for seed in range(4):
        found = searched(model, target="vllm", seed=seed, family="mxfp8_mxfp4")
        for block in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
            assert (
                found.formats[f"{block}.q_a_proj"] == found.formats[f"{block}.kv_a_proj_with_mqa"]
            )


def test_an_architecture_whose_merges_are_not_known_is_named():
    with pytest.warns(UserWarning, match=r"which layers of 'Mixture' vLLM merges is not known"):
        config = dmx.SearchConfig(name="random", target="vllm", family="mxfp8_mxfp4")
        dmx.search(Mixture(blocks=False), batches(), dmx.Budget(5.0), config)


def moe(kind, **more):
    model = tf.AutoModelForCausalLM.from_config(kind(**SIZES, **more), dtype=torch.bfloat16)
    return model.float().eval()


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    "kind, more",
    [
        (tf.Qwen2MoeConfig, EXPERTS | {"shared_expert_intermediate_size": 64}),
        (tf.Qwen3MoeConfig, EXPERTS),
    ],
)
def test_routers_and_gates_stay_unquantized_for_vllm_and_are_ignored(kind, more, tmp_path):
    model = moe(kind, **more)
    found = searched(model, target="vllm", family="mxfp8_mxfp4")
    assert not any(name.endswith("gate") for name in found.formats)
    assert "model.layers.1.mlp.experts.gate_up_proj" in found.formats
    dmx.export(
        model, found, tmp_path / "x", target="compressed_tensors", profile="vllm", verify=False
    )
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    assert {"model.layers.0.mlp.gate", "lm_head"} <= set(ignored)
    assert {*linear_layers(model)} <= {*ignored, *found.formats}


def test_a_gate_that_another_search_quantized_is_refused_for_vllm(tmp_path):
    model = moe(tf.Qwen2MoeConfig, **EXPERTS, shared_expert_intermediate_size=64)
    found = searched(model, family="mxfp8_mxfp4", exclude=["*.experts.*"])
    with pytest.raises(
        dmx.errors.FormatError, match=r"without quantization, first .*shared_expert_gate"
    ):
        dmx.export(
            model, found, tmp_path / "x", target="compressed_tensors", profile="vllm", verify=False
        )
    eight = dataclasses.replace(found, formats=dict.fromkeys(found.formats, "nvfp4"))
    with pytest.raises(
        dmx.errors.FormatError, match=r"modelopt_checkpoint: vLLM builds .*shared_exp"
    ):
        check_holds(eight, "modelopt_checkpoint", None)
    with pytest.warns(
        UserWarning, match=r"vLLM builds .*, transformers \+ amd-quark can.*vllm_quark"
    ):
        check_holds(found, "quark", None)


def test_an_export_is_held_to_the_loader_that_its_layout_is_for():
    assert {name: target.held_to.name for name, target in TARGETS.items()} == {
        "assignment.json": "dmx",
        "compressed_tensors, profile vllm": "vLLM",
        "compressed_tensors, profile transformers": "transformers",
        "quark": "transformers + amd-quark",
        "humming": "vLLM",
        "modelopt_checkpoint": "vLLM",
        "torchao": "transformers",
    }


# -------------------------------------------------------------------------------------- bits and files


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(
    "target, family",
    [
        ("compressed_tensors", "mxfp6_mxfp4"),
        ("compressed_tensors", ["nvfp4", "fp8"]),
        ("quark", "mxfp8_mxfp4"),
        ("torchao", "mxfp8_mxfp4"),
    ],
)
def test_stated_bits_are_those_of_the_files(target, family, tied, head, tmp_path):
    model = make_tiny(TinyConfig(tied=tied)).bfloat16()
    found = searched(model, family=family, include_lm_head=head)
    inputs = target == "torchao"
    done = dmx.export(
        model, found, tmp_path / "x", target=target, inputs=inputs, verify=False, profile=None
    )
    stored = 8 * done.bytes["total"] / sum(p.numel() for p in model.parameters())
    assert found.bits["whole_model_bits_per_element"] == pytest.approx(stored, rel=1e-12)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("family", ["mxfp8_mxfp4", ["mxfp4", "bf16"]], ids=str)
@pytest.mark.parametrize("transform", ["none", "hadamard_full"])
def test_stated_bits_are_those_of_the_files_for_any_choice(transform, family, tied, head, tmp_path):
    model = make_tiny(TinyConfig(tied=tied, layers=1)).bfloat16()
    elements = sum(p.numel() for p in model.parameters())
    settings = {"family": family, "include_lm_head": head, "transform": transform, "units": "layer"}
    for seed, limit in enumerate((5.0, 7.0, 14.0)):
        found = searched(model, limit=limit, seed=seed, **settings)
        folder = tmp_path / str(seed)
        done = dmx.export(model, found, folder, target="quark", verify=False)
        stored = 8 * done.bytes["total"] / elements
        assert found.bits["whole_model_bits_per_element"] == pytest.approx(stored, rel=1e-12)


def test_what_a_model_keeps_in_float32_stays_so(tmp_path):
    model = make_tiny(TinyConfig())
    model._keep_in_fp32_modules_strict = {"input_layernorm", "down_proj"}
    found = searched(model, family="mxfp8_mxfp4")
    assert "model.layers.0.mlp.down_proj" in found.unquantized
    done = dmx.export(model, found, tmp_path / "x", target="compressed_tensors", verify=False)
    files = load_file(tmp_path / "x" / "model.safetensors")
    assert files["model.layers.0.input_layernorm.weight"].dtype == torch.float32
    assert files["model.layers.0.mlp.down_proj.weight"].dtype == torch.float32
    assert files["model.norm.weight"].dtype == torch.bfloat16
    stored = 8 * done.bytes["total"] / sum(p.numel() for p in model.parameters())
    assert found.bits["whole_model_bits_per_element"] == pytest.approx(stored, rel=1e-12)


def edited(folder, config=None, tensors=None):
    """A tiny model's folder with other keys in its config and more tensors in its file."""
    make_tiny(TinyConfig(architecture="qwen3")).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    body = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(body | (config or {})))
    file = folder / "model.safetensors"
    save_file(load_file(file) | (tensors or {}), file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "config, tensors, named",
    [
        ({}, {"mtp.layers.0.proj.weight": torch.zeros(8, 8)}, "1 tensors .* mtp.layers.0.proj"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, {}, "model.layers.1."),
        ({}, {"model.extra.weight": torch.zeros(8)}, "model.extra.weight"),
    ],
)
def test_tensors_that_the_loader_leaves_out_are_named(config, tensors, named, tmp_path):
    with pytest.warns(UserWarning, match=named):
        load_model(ModelConfig(id=str(edited(tmp_path, config, tensors)), dtype="float32"))


def test_also_those_that_its_models_say_nothing_of(tmp_path, monkeypatch):
    monkeypatch.setattr(tf.Qwen3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp.*"])
    folder = edited(tmp_path, tensors={"mtp.weight": torch.zeros(8)})
    with pytest.warns(UserWarning, match="mtp.weight"):
        load_model(ModelConfig(id=str(folder), dtype="float32"))


def test_an_export_says_which_heads_it_has_not_and_takes_side_files_along(tmp_path):
    tensors = {f"mtp.layers.{i}.proj.weight": torch.zeros(8, 8) for i in range(5)}
    folder = edited(tmp_path / "m", {"num_nextn_predict_layers": 1}, tensors)
    for name in ("preprocessor_config.json", "LICENSE", "modeling_own.py"):
        (folder / name).write_text("{}")
    with pytest.warns(UserWarning, match="5 tensors of its files have no place"):
        loaded = load_model(ModelConfig(id=str(folder), dtype="float32"))
    assert loaded.left_out == tuple(tensors)
    found = searched(loaded.model, family="mxfp8_mxfp4")
    with pytest.warns(UserWarning, match="num_nextn_predict_layers=1"):
        dmx.export(str(folder), found, tmp_path / "x", target="compressed_tensors", verify=False)
    card = (tmp_path / "x" / "README.md").read_text()
    assert "5 tensors of the source" in card and "`mtp.layers.0.proj.weight`" in card
    assert "and 1 more" in card and "`num_nextn_predict_layers` 1" in card
    facts = json.loads((tmp_path / "x" / "dmx_export.json").read_text())
    assert facts["left_out"] == list(tensors)
    assert json.loads((tmp_path / "x" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    for name in ("preprocessor_config.json", "LICENSE", "modeling_own.py"):
        assert (tmp_path / "x" / name).read_text() == "{}"


# -------------------------------------------------------------------------------------------- wrappers


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_blocks(model):
    for i, block in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(block, backend="eager")
    return model


def checkpointed_blocks(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for i, block in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(block)
    return model


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, compiled_blocks, checkpointed_blocks])
def test_an_assignment_made_on_a_wrapped_model_fits_the_plain_one(wrap, tmp_path):
    plain = make_tiny(TinyConfig())
    wrapped = wrap(copy.deepcopy(plain))
    with torch.compiler.set_stance("force_eager"):  # names are what this is about
        found = searched(wrapped)
    assert found.formats == searched(plain).formats
    assert found.unquantized == ("lm_head",)
    dmx.apply(plain, found)
    assert dmx.apply(wrapped, found) is wrapped
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        inner = plain_model(wrapped)
        ours, theirs = (m(input_ids=batches()[0]).logits for m in (plain, inner))
    torch.testing.assert_close(ours, theirs)
    dmx.restore(wrapped)
    dmx.export(wrapped, found, tmp_path / "x", target="compressed_tensors", verify=False)
    assert not [k for k in load_file(tmp_path / "x" / "model.safetensors") if "_mod" in k]


def test_a_model_made_in_inference_mode_is_refused_by_name_and_its_copy_is_not():
    with torch.inference_mode():
        model = make_tiny(TinyConfig())
    with pytest.raises(
        ModelError, match=r"model.embed_tokens.weight was made in torch.inference_mode"
    ):
        searched(model)
    assert searched(copy.deepcopy(model)).formats
    check_searchable(model)


def test_weights_that_are_not_whole_here_are_refused_by_name():
    model = make_tiny(TinyConfig())
    model.model.layers[0].mlp.up_proj.weight.data = torch.zeros(0)
    with pytest.raises(ModelError, match=r"up_proj.weight is sharded"):
        searched(model)
