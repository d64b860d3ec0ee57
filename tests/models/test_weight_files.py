"""Files of a model that are not whole: each is named, with the way out, whatever its kind."""

import json
import shutil

import pytest
import torch

from dmx.errors import DmxError, ModelError
from dmx.models import ModelConfig, byte_tokenizer, load_model

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same model whole, in shards, and as torch.save writes it."""
    from dmx.models import TinyConfig
    from dmx.models.tiny import make_tiny

    top = tmp_path_factory.mktemp("saved")
    model = make_tiny(TinyConfig())
    model.save_pretrained(top / "whole")
    model.save_pretrained(top / "shards", max_shard_size="300KB")
    (top / "pickled").mkdir()
    shutil.copy(top / "whole/config.json", top / "pickled")
    torch.save(model.state_dict(), top / "pickled/pytorch_model.bin")
    for kind in ("whole", "shards", "pickled"):
        byte_tokenizer().save_pretrained(top / kind)
    return top


def cut(content):
    return content[:-64]


def lfs(_):
    return LFS


def other_index(content):
    body = json.loads(content)
    name = next(n for n, of in body["weight_map"].items() if of == SHARD)
    body["weight_map"][name + "_of_another"] = SHARD
    return json.dumps(body).encode()


def index_outside(content):
    return content.replace(SHARD.encode(), b"../" + SHARD.encode())


CASES = [
    ("whole", "model.safetensors", cut, "damaged: it has .* bytes and its header says"),
    ("whole", "model.safetensors", lfs, "is a Git LFS pointer.*git lfs pull"),
    ("whole", "model.safetensors", lambda _: b"", "damaged: it is empty"),
    ("whole", "model.safetensors", lambda c: c[:20], "damaged: of a header of"),
    ("whole", "model.safetensors", lambda c: c[:8] + b"x" + c[9:], "header cannot be read"),
    ("shards", SHARD, cut, "damaged: it has"),
    ("shards", SHARD, lfs, "is a Git LFS pointer"),
    ("shards", SHARD, None, r"index\.json names model-00001.*which is not there"),
    ("shards", INDEX, cut, "damaged: it is no JSON"),
    ("shards", INDEX, lfs, "is a Git LFS pointer"),
    ("shards", INDEX, other_index, "it says that .* holds .*_of_another, which it does not"),
    ("shards", INDEX, index_outside, "which is no file beside it"),
    ("pickled", "pytorch_model.bin", cut, "damaged: it is cut off"),
    ("pickled", "pytorch_model.bin", lfs, "is a Git LFS pointer"),
    ("pickled", "pytorch_model.bin", lambda c: b"no" + c[2:], "cannot be loaded"),
    ("whole", "config.json", cut, "damaged: it is no JSON"),
    ("whole", "config.json", lfs, "is a Git LFS pointer"),
    ("whole", "tokenizer.json", cut, "damaged: it is no JSON"),
    ("whole", "tokenizer.json", lfs, "is a Git LFS pointer"),
    ("whole", "tokenizer.json", lambda _: b"{}", "cannot be loaded"),
]


@pytest.mark.parametrize(("kind", "name", "change", "words"), CASES)
def test_a_file_that_is_not_whole_is_named(saved, tmp_path, kind, name, change, words):
    folder = tmp_path / "model"
    shutil.copytree(saved / kind, folder)
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
    with pytest.raises(ModelError, match=words) as raised:
        load_model(ModelConfig(id=str(folder), dtype="float32"))
    assert name in str(raised.value) or "cannot be loaded" in words


@pytest.mark.parametrize("kind", ["whole", "shards", "pickled"])
def test_whole_files_load(saved, kind):
    assert load_model(ModelConfig(id=str(saved / kind), dtype="float32")).model is not None


@pytest.mark.parametrize("content", [LFS, b"", b"GGUX" + bytes(100), b"GGUF" + bytes(3)])
def test_a_gguf_file_that_is_not_whole_is_named(tmp_path, content):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(DmxError, match=r"model\.gguf"):
        load_model(ModelConfig(id=str(tmp_path), gguf_file="model.gguf"))
