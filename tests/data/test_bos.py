"""Windows start as the tokenizer itself starts a text: with BOS, with what it has instead, or with nothing."""

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import dmx
from dmx.data import DataConfig, DataPair, encode, load_text, token_batches, windows_of
from dmx.errors import DataError
from dmx.models import byte_tokenizer
from dmx.models.tiny import END_OF_TEXT

TEXT = "some text that is long enough to be cut into windows"


def starting(*pieces):
    """A byte tokenizer that puts these special tokens before a text, and <|endoftext|> behind it if last is $."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[gMASK]", "<sop>"]})
    ids = {p: tokenizer.convert_tokens_to_ids(p) for p in (*pieces, END_OF_TEXT) if p != "$"}
    words = ["$A" if p == "$" else p for p in ([*pieces] if "$" in pieces else [*pieces, "$"])]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=" ".join(words), special_tokens=list(ids.items())
    )
    return tokenizer


@pytest.mark.parametrize(
    ("pieces", "start"),
    [
        ((), ()),
        ((END_OF_TEXT,), (256,)),  # Llama, Gemma, Mistral
        (("[gMASK]", "<sop>"), (257, 258)),  # GLM
        (("$", END_OF_TEXT), ()),  # an end behind the text is no start
    ],
)
def test_windows_start_as_the_tokenizer_starts_a_text(pieces, start):
    tokenizer = starting(*pieces)
    tokens = encode(tokenizer, TEXT)
    assert tokens.tolist() == list(TEXT.encode()) and tokens.start == start
    for part in (tokens, tokens[: len(tokens)], tokens[1:][-40:]):
        rows = windows_of(part, 8)
        assert type(rows) is torch.Tensor and rows.shape == (len(part) // (8 - len(start)), 8)
        assert (rows[:, : len(start)] == torch.tensor(start, dtype=torch.int64)).all()
        text = rows[:, len(start) :].flatten()
        assert torch.equal(text, part[: len(text)].as_subclass(torch.Tensor))
    batches = token_batches(tokens, 8, 2, seed=0)
    assert all(row[: len(start)].tolist() == list(start) for batch in batches for row in batch)


def test_bos_can_be_asked_for_and_left_out():
    assert encode(byte_tokenizer(), TEXT, "yes").start == (256,)
    assert encode(starting(END_OF_TEXT), TEXT, "yes").start == (256,)
    assert encode(starting(END_OF_TEXT), TEXT, "no").start == ()
    without = byte_tokenizer()
    without.bos_token = None
    with pytest.raises(DataError, match=r"data\.bos=yes: the tokenizer .* has no BOS token"):
        encode(without, TEXT, "yes")
    pair = {s: DataConfig(name="embedded", split=s) for s in ("calibration", "evaluation")}
    with pytest.raises(DataError, match=r"data\.bos='always' is unknown. Known: auto, yes, no"):
        DataPair(**pair, bos="always")
    with pytest.raises(DataError, match="is unknown"):
        encode(byte_tokenizer(), TEXT, "always")


def test_a_window_that_its_start_fills_is_refused(tiny_random):
    tokens = encode(starting("[gMASK]", "<sop>"), TEXT)
    with pytest.raises(DataError, match=r"window=2 has no room for text behind the 2 tokens"):
        windows_of(tokens, 2)


def test_a_perplexity_is_that_of_rows_with_bos(tiny_trained):
    text = load_text(DataConfig(name="embedded", split="evaluation"))
    tokens = encode(starting(END_OF_TEXT), text.text[:2000])
    model = tiny_trained.model
    rows = torch.cat([torch.full((62, 1), 256), tokens[: 62 * 31].view(62, 31)], 1)
    right = model(input_ids=rows, labels=rows).loss.exp().item()
    assert dmx.perplexity(model, tokens[: 62 * 31], window=32) == pytest.approx(right, rel=1e-5)
    plain = dmx.perplexity(model, tokens.as_subclass(torch.Tensor), window=32)
    assert abs(plain / right - 1) > 1e-3
