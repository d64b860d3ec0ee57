"""Ids of long texts are kept on disk: the same ids, found under all that they depend on, made again where damaged."""

import logging
import os

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dmx.data import Text, check_overlap, encode, kept, shared_sequences
from dmx.errors import DataError
from dmx.models import byte_tokenizer
from dmx.models.loading import split_digits
from dmx.state import StateFile

TEXT = "Ids of 2026, ünlike words: \N{SNOWMAN} <|endoftext|> and 17 more.\r\n" * 7


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where ids are kept, of texts of any length."""
    monkeypatch.setenv("DMX_CACHE", str(tmp_path))
    monkeypatch.delenv("DMX_TEXTS_GIB", raising=False)
    monkeypatch.setattr(kept, "SHORTEST", 1)
    return tmp_path / "texts"


def files(folder):
    return sorted(folder.glob("*"))


def plain(tokens):
    return tokens.as_subclass(torch.Tensor)


class Counting:
    """Files that were asked for and not found."""

    def __init__(self, monkeypatch):
        self.made, load = 0, StateFile.load

        def counted(file):
            found = load(file)
            self.made += found is None
            return found

        monkeypatch.setattr(StateFile, "load", counted)


def test_ids_from_disk_are_those_that_the_tokenizer_gives(folder, monkeypatch):
    counting = Counting(monkeypatch)
    expected = byte_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]
    tokenizer = byte_tokenizer()
    # the last one is made anew: its tables lie in memory in another order
    for made in (tokenizer, tokenizer, byte_tokenizer()):
        tokens = encode(made, TEXT, "yes")
        assert tokens.tolist() == expected and tokens.dtype == torch.int64
        assert tokens.start == (256,)
    assert counting.made == 1 and len(files(folder)) == 1


def test_another_text_or_tokenizer_finds_nothing_of_this_one(folder, monkeypatch):
    counting = Counting(monkeypatch)
    digits, words, special, split = (byte_tokenizer() for _ in range(4))
    split_digits(digits)
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    special.add_special_tokens({"additional_special_tokens": ["unlike"]})
    split.split_special_tokens = True
    tokenizers = (byte_tokenizer(), digits, words, special, split)
    for tokenizer in tokenizers:
        for text in (TEXT, TEXT + "."):
            expected = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert encode(tokenizer, text).tolist() == expected
    assert counting.made == len(files(folder)) == 2 * len(tokenizers)


def test_a_damaged_file_is_encoded_anew(folder, caplog):
    expected = encode(byte_tokenizer(), TEXT)
    (path,) = files(folder)
    content = path.read_bytes()
    encode(byte_tokenizer(), "another text")
    other = next(p for p in files(folder) if p != path)
    flipped = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    for wrong in (content[:-1], flipped, b"", other.read_bytes()):
        path.write_bytes(wrong)
        for says in (True, False):  # the second time it is whole again
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert torch.equal(plain(encode(byte_tokenizer(), TEXT)), plain(expected))
            assert ("Made again" in caplog.text) == says


def test_what_texts_share_is_looked_for_once(folder, monkeypatch, caplog):
    counting = Counting(monkeypatch)
    words = " ".join(f"w{i}" for i in range(30))
    one, other = (Text(words + end, "n", "0", "s") for end in ("", " more"))
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"shares 18 of its 18"):
            assert check_overlap(one, other) == shared_sequences(one.text, other.text)
    with pytest.warns(UserWarning, match=r"shares 18 of its 19"):
        assert check_overlap(other, one) == shared_sequences(other.text, one.text)
    assert counting.made == 2


def test_what_does_not_say_how_it_encodes_is_not_kept(folder):
    class Own(PreTrainedTokenizerFast):
        """Its module is not that of the library: code of its own may decide."""

    own = Own(tokenizer_object=byte_tokenizer().backend_tokenizer)
    custom = byte_tokenizer()

    class Python:
        def pre_tokenize(self, text):
            pass

    custom.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Python())
    for tokenizer in (own, custom):
        assert len(encode(tokenizer, TEXT)) > 0
    assert files(folder) == []


def test_short_texts_are_not_kept_and_neither_is_anything_with_a_size_of_0(folder, monkeypatch):
    monkeypatch.setattr(kept, "SHORTEST", len(TEXT) + 1)
    encode(byte_tokenizer(), TEXT)
    monkeypatch.setattr(kept, "SHORTEST", 1)
    monkeypatch.setenv("DMX_TEXTS_GIB", "0")
    encode(byte_tokenizer(), TEXT)
    assert files(folder) == []


@pytest.mark.parametrize("size", ["some", "-1", "nan", "inf"])
def test_what_is_no_size_is_refused(folder, monkeypatch, size):
    monkeypatch.setenv("DMX_TEXTS_GIB", size)
    with pytest.raises(DataError, match=rf"DMX_TEXTS_GIB={size} must be a number of GiB.*0 keeps"):
        encode(byte_tokenizer(), TEXT)


def test_files_that_were_not_used_for_longest_make_room(folder, monkeypatch):
    texts = [TEXT + str(i) for i in range(4)]
    for text in texts[:3]:
        encode(byte_tokenizer(), text)
    paths = files(folder)
    assert len(paths) == 3
    for path in paths:  # a file system's clock may stand still between two writes
        os.utime(path, ns=(0, 0))
    encode(byte_tokenizer(), texts[0])  # used last
    monkeypatch.setenv("DMX_TEXTS_GIB", str(2.5 * paths[0].stat().st_size / 2**30))
    encode(byte_tokenizer(), texts[3])
    assert len(files(folder)) == 2
    counting = Counting(monkeypatch)
    for text in (texts[0], texts[3]):
        encode(byte_tokenizer(), text)
    assert counting.made == 0


def test_ids_that_cannot_be_kept_are_given_all_the_same(folder, caplog):
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert len(encode(byte_tokenizer(), TEXT)) > 300
    assert "not kept for the next process" in caplog.text


def test_ids_in_a_folder_that_one_may_only_read_serve(folder, monkeypatch, caplog):
    def refused(*_, **__):
        raise PermissionError("Operation not permitted")

    encode(byte_tokenizer(), TEXT)
    counting = Counting(monkeypatch)
    monkeypatch.setattr(kept.os, "utime", refused)
    with caplog.at_level(logging.WARNING):
        assert len(encode(byte_tokenizer(), TEXT)) > 300
    assert counting.made == 0 and caplog.text == ""
