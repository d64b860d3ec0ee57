"""Where texts come from, how they are cut, and what each mistake is told."""

import gzip
import hashlib
import json
import logging
import platform
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from dmx import hub
from dmx.data import (
    DataConfig,
    DataPair,
    check_tokens,
    check_window,
    encode,
    load_text,
    shared_sequences,
    sources,
    token_batches,
)
from dmx.data.config import SPLITS
from dmx.errors import DataError
from dmx.models import byte_tokenizer

REPO = Path(__file__).parents[2]

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


# ---------------------------------------------------------------- embedded and synthetic


def test_embedded_text_is_split_at_four_fifths_and_shares_no_13_words_in_a_row(no_dmx_data):
    parts = [load_text(DataConfig(name="embedded", split=s)) for s in SPLITS["embedded"]]
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[key] for key in sorted(topics))
    assert parts[1].text == whole[int(0.8 * len(whole)) :]
    kept = parts[0].text.split("\n\n")
    assert set(kept) < set(whole[: int(0.8 * len(whole))].split("\n\n"))
    assert len(parts[0].text) > 0.7 * len(whole)
    assert shared_sequences(parts[1].text, whole[: int(0.8 * len(whole))]).sequences > 0
    assert shared_sequences(parts[1].text, parts[0].text).sequences == 0
    assert platform.python_version() in parts[0].source
    assert parts[0].sha256 == hashlib.sha256(parts[0].text.encode()).hexdigest()
    assert parts[1].name == "embedded/evaluation"


def test_synthetic_text_depends_on_seed_and_split_alone(no_dmx_data):
    def sha256(**options):
        return load_text(DataConfig(name="synthetic", **options)).sha256

    first = sha256(split="calibration")
    assert first == sha256(split="calibration")
    assert len({first, sha256(split="evaluation"), sha256(split="calibration", seed=1)}) == 3
    # committed: the text must not drift between Python versions
    assert first.startswith("26841d73439934d3")


def test_max_characters_keeps_the_start():
    short = load_text(DataConfig(name="synthetic", split="calibration", max_characters=100))
    whole = load_text(DataConfig(name="synthetic", split="calibration"))
    assert short.text == whole.text[:100]


# ---------------------------------------------------------------- local copies


def test_wikitext2_rows_are_joined_by_blank_lines(dmx_data):
    text = load_text(DataConfig(name="wikitext2", split="test"))
    assert text.text.startswith("\n\n = Robert Boulter = \n")
    assert text.name == "wikitext2/test"
    assert "rows-test.parquet" in text.source


@pytest.mark.parametrize(
    ("split", "sha256"),
    [
        ("test", "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"),
        ("validation", "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7"),
    ],
)
def test_wikitext2_document_is_the_published_file_byte_for_byte(dmx_data, split, sha256):
    assert load_text(DataConfig(name="wikitext2", split=split, join="document")).sha256 == sha256


def test_wikitext2_document_from_the_hub_equals_the_raw_file(dmx_data, monkeypatch):
    config = DataConfig(name="wikitext2", split="test", join="document")
    local = load_text(config)
    rows = parquet.read_table(dmx_data / "wikitext2_raw/rows-test.parquet")["text"].to_pylist()
    monkeypatch.delenv("DMX_DATA")
    monkeypatch.setattr(sources, "_hub_rows", lambda *_: rows)
    assert load_text(config).sha256 == local.sha256


def test_calibration_texts_join_whole_documents(dmx_data):
    texts = {
        name: load_text(DataConfig(name=name)).text
        for name in ("fineweb", "c4", "fineweb+c4", "wikitext2_train_head")
    }
    with gzip.open(dmx_data / "calibration/fineweb-300.jsonl.gz", "rt") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    assert texts["fineweb"] == "\n\n".join(documents)
    assert texts["fineweb+c4"] == texts["fineweb"] + "\n\n" + texts["c4"]
    assert len(texts["wikitext2_train_head"]) > 900_000


def test_a_missing_local_copy_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("DMX_DATA", str(tmp_path))
    message = r"rows-test\.parquet does not exist.*or unset DMX_DATA"
    with pytest.raises(DataError, match=message):
        load_text(DataConfig(name="wikitext2", split="test"))


def test_dmx_data_that_is_no_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("DMX_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"DMX_DATA=.*nowhere is no folder"):
        load_text(DataConfig(name="fineweb"))


def test_the_head_of_the_train_split_never_stands_in_for_it(tmp_path, monkeypatch, no_dmx_data):
    with pytest.raises(DataError, match="only as a local copy"):
        load_text(DataConfig(name="wikitext2_train_head"))
    monkeypatch.setenv("DMX_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"Use data\.name=wikitext2_train_head"):
        load_text(DataConfig(name="wikitext2", split="train"))


# ---------------------------------------------------------------- the hub


@pytest.mark.parametrize("name", ["wikitext2", "fineweb", "c4"])
def test_offline_without_dmx_data_names_both_ways_out(no_dmx_data, offline, name):
    split = "test" if name == "wikitext2" else None
    with pytest.raises(
        DataError, match=r"out of reach.*\n?.*Connect to the network, or .*DMX_DATA"
    ):
        load_text(DataConfig(name=name, split=split))


def test_a_data_set_that_the_hub_lacks_says_so(no_dmx_data, monkeypatch):
    import datasets

    def refuse(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("no such data set")

    monkeypatch.setattr(sources, "hub_is_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=r"did not serve allenai/c4 \(missing: no such data set\)"):
        load_text(DataConfig(name="c4"))


def test_hub_streams_only_as_many_documents_as_asked(no_dmx_data, monkeypatch):
    import datasets

    drawn = []

    def endless(path, subset, *, split, streaming):
        assert streaming and not datasets.config.HF_HUB_OFFLINE
        while True:
            drawn.append(1)
            yield {"text": "page"}

    monkeypatch.setattr(sources, "hub_is_reachable", lambda: True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", endless)
    text = load_text(DataConfig(name="fineweb"))
    assert len(drawn) == 300
    assert text.text == "\n\n".join(["page"] * 300)
    assert "train[:300]" in text.source


def test_out_of_reach_the_cache_alone_is_asked(no_dmx_data, monkeypatch):
    import datasets

    def cached(path, subset, *, split, streaming):
        assert datasets.config.HF_HUB_OFFLINE and not streaming
        return [{"text": "from the cache"}]

    before = datasets.config.HF_HUB_OFFLINE
    monkeypatch.setattr(sources, "hub_is_reachable", lambda: False)
    monkeypatch.setattr(datasets, "load_dataset", cached)
    assert load_text(DataConfig(name="wikitext2", split="test")).text == "from the cache"
    assert before == datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_offline_switches_are_heard(monkeypatch, value):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", value)
    assert hub.hub_is_reachable.__wrapped__() is False


def test_an_unreachable_host_is_known_in_seconds(monkeypatch):
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.hub_is_reachable.__wrapped__() is False
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy:3128"})
    assert hub.hub_is_reachable.__wrapped__() is True


# ---------------------------------------------------------------- files


def write_files(folder: Path) -> list[str]:
    (folder / "a.txt").write_bytes(b"one\r\n")
    (folder / "b.raw").write_text("two")
    (folder / "c.jsonl").write_text('{"text": "three"}\n\n{"text": "four"}\n')
    with gzip.open(folder / "d.jsonl.gz", "wt") as file:
        file.write('{"text": "five"}\n')
    parquet.write_table(pa.table({"text": ["six", "seven"]}), folder / "e.parquet")
    return [str(path) for path in sorted(folder.iterdir())]


def test_files_of_every_kind_are_read_in_order(tmp_path):
    files = write_files(tmp_path)
    rows = load_text(DataConfig(name="files", files=files))
    assert rows.text == "one\r\n\n\ntwo\n\nthree\n\nfour\n\nfive\n\nsix\n\nseven"
    assert rows.source == "files: a.txt, b.raw, c.jsonl, d.jsonl.gz, e.parquet"
    document = load_text(DataConfig(name="files", files=files, join="document"))
    assert document.text == "one\r\ntwothreefourfivesixseven"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfea\0", r"is not UTF-8 text \(it begins as UTF-16 .*iconv -f UTF-16"),
        ("a.txt", "naïve".encode("latin-1"), "is not UTF-8 text .*iconv -f LATIN1"),
        ("a.raw", LFS, r"a\.raw is a Git LFS pointer.*git lfs pull"),
        ("a.jsonl", LFS, "is a Git LFS pointer"),
        ("a.jsonl.gz", LFS, "is a Git LFS pointer"),
        ("a.parquet", LFS, "is a Git LFS pointer"),
        ("a.jsonl", '{"text": "x"}'.encode("utf-16"), "begins as UTF-16"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "', "line 2, is not JSON .*Mend or delete the line"),
        ("a.jsonl", b"[" * 100_000, "line 1, is not JSON"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}' * 99, mtime=0)[:-9],
            "is not JSON Lines .*Get the",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}', mtime=0)[:9] + b"\xff" * 30,
            "is not JSON Lines",
        ),
        ("a.parquet", b"PAR1" + bytes(50) + b"PAR1", r"a\.parquet is not a Parquet file"),
        ("a.parquet", b"", "is not a Parquet file"),
        ("a.txt", b" \n ", "the text is empty"),
        ("a.jsonl", b"{text}", "line 1, is not JSON"),
        ("a.jsonl", b'{"body": "x"}', r"data\.column='text' is not in .*Found: body"),
        ("a.jsonl", b'["x"]', r"data\.column='text' is not in .*Found: no fields"),
        ("a.jsonl", b'{"text": 3}', "row 1: text holds a int, not text"),
        ("a.jsonl.gz", b"plain", "is not JSON Lines"),
        ("a.parquet", b"plain", "is not a Parquet file"),
        ("a.csv", b"x", r"file type is unknown\. Known: \.txt"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_text(DataConfig(name="files", files=[str(tmp_path / name)]))


def test_half_a_character_is_replaced_and_a_byte_order_mark_is_no_text(tmp_path):
    body = json.dumps({"text": "good \ud83d day \U0001f600"})
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + body.encode() + b"\r\n")
    (tmp_path / "b.txt").write_bytes("\ufeffplain\r\n".encode())
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.txt")]
    text = load_text(DataConfig(name="files", files=files))
    assert text.text == "good \ufffd day \U0001f600\n\nplain\r\n"


def test_a_cut_parquet_file_is_named(tmp_path):
    parquet.write_table(pa.table({"text": ["some text"] * 500}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for content in (whole[: len(whole) // 2], whole[:40] + bytes(60) + whole[100:]):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.parquet is not a Parquet file"):
            load_text(DataConfig(name="files", files=[str(tmp_path / "a.parquet")]))


def test_a_parquet_file_without_the_column_lists_its_columns(tmp_path):
    parquet.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"data\.column='text' .*Found: body"):
        load_text(DataConfig(name="files", files=[str(tmp_path / "a.parquet")]))


def test_a_missing_file_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"data\.files: nowhere\.txt does not exist \(looked from"):
        load_text(DataConfig(name="files", files=["nowhere.txt"]))


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "wikitext"}, r"data\.name='wikitext' is unknown\. Known: embedded"),
        ({"name": "wikitext2"}, r"data\.split is missing .*train, validation, test"),
        ({"name": "wikitext2", "split": "dev"}, r"data\.split='dev' .*one of train"),
        ({"name": "c4", "split": "train"}, r"data\.split='train' .*null: it has no splits"),
        ({"name": "c4", "join": "lines"}, r"data\.join='lines' is unknown"),
        ({"name": "c4", "join": "document"}, r"data\.join=document is for"),
        ({"name": "files"}, "files and name=files go together"),
        ({"name": "c4", "files": ["a.txt"]}, "files and name=files go together"),
        ({"name": "c4", "max_characters": 0}, r"data\.max_characters=0 must be > 0"),
    ],
)
def test_an_impossible_data_config_is_refused(options, message):
    with pytest.raises(DataError, match=message):
        DataConfig(**options)


@pytest.mark.parametrize(
    "path", sorted((REPO / "configs/data").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_data_config_file_is_valid(path):
    from omegaconf import OmegaConf

    found = OmegaConf.load(path)
    if path.stem == "files":  # its files are for the user to name
        for part in ("calibration", "evaluation"):
            assert OmegaConf.is_missing(found[part], "files")
            found[part].files = [f"{part}.txt"]
    pair = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataPair), found))
    assert isinstance(pair.calibration, DataConfig)
    assert pair.calibration != pair.evaluation


# ---------------------------------------------------------------- tokens


def test_encode_adds_no_special_tokens_and_warns_of_no_length(caplog):
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 4
    with caplog.at_level(logging.WARNING):
        tokens = encode(tokenizer, "héllo, wörld 12")
    assert tokens.tolist() == list("héllo, wörld 12".encode())
    assert tokens.dtype == torch.int64
    assert not caplog.records


def test_batches_are_the_text_in_windows_shuffled_by_seed():
    tokens = torch.arange(107)
    batches = token_batches(tokens, 10, 3, seed=0)
    assert [tuple(batch.shape) for batch in batches] == [(3, 10)] * 3  # 10 windows, one left over
    windows = torch.cat(batches)
    assert (windows % 10 == torch.arange(10)).all()  # whole windows, in place
    assert windows[:, 0].unique().numel() == 9
    assert not torch.equal(windows, windows.sort(dim=0).values)
    again = token_batches(tokens, 10, 3, seed=0)
    assert all(map(torch.equal, batches, again))
    assert not torch.equal(torch.cat(token_batches(tokens, 10, 3, seed=1)), windows)


def test_batches_without_a_seed_keep_the_order_and_own_their_memory():
    tokens = torch.arange(40)
    (first, second) = token_batches(tokens, 10, 2, seed=None)
    assert torch.equal(torch.cat([first, second]).flatten(), tokens)
    first.zero_()
    assert tokens.sum() == 780


def test_n_batches_takes_the_first_of_the_same_order():
    tokens = torch.arange(100)
    some, every = (token_batches(tokens, 10, 2, seed=3, n_batches=n) for n in (2, None))
    assert len(some) == 2
    assert all(map(torch.equal, some, every[:2]))


@pytest.mark.parametrize(
    ("length", "arguments", "message"),
    [
        (0, (10, 1), "0 tokens, less than one window of 10"),
        (9, (10, 1), "9 tokens, less than one window of 10"),
        (25, (10, 3), "2 windows of 10 tokens: 0 batches of 3, 1 needed"),
        (25, (0, 1), "window=0 must be at least 1"),
        (25, (10, 0), "batch_size=0 must be at least 1"),
    ],
)
def test_a_text_too_short_for_a_batch_is_an_error(length, arguments, message):
    with pytest.raises(DataError, match=message):
        token_batches(torch.arange(length), *arguments, seed=0)


def test_more_batches_than_the_text_fills_is_an_error():
    with pytest.raises(DataError, match="4 windows of 10 tokens: 2 batches of 2, 3 needed"):
        token_batches(torch.arange(40), 10, 2, seed=0, n_batches=3)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([0, 7]), "token id 7 is outside the model's vocabulary of 7"),
        (torch.tensor([-1, 3]), "token id -1 is outside"),
        (torch.tensor([], dtype=torch.int64), "tokens are empty"),
        (torch.tensor([1.0]), "must be 1-d int64"),
        (torch.tensor([[1]]), "must be 1-d int64"),
    ],
)
def test_tokens_that_the_model_cannot_read_are_refused(tokens, message):
    with pytest.raises(DataError, match=message):
        check_tokens(tokens, 7)


def test_windows_that_the_model_cannot_read_are_refused():
    check_window(2048, 2048)
    check_window(2048, None)
    with pytest.raises(DataError, match="window=2049 is longer than the model's 2048 positions"):
        check_window(2049, 2048)
    with pytest.raises(DataError, match="window=1 must be at least 2"):
        check_window(1, 2048)
