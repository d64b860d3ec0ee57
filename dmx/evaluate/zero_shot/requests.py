"""A request: a context and a continuation, in tokens, split as lm-eval splits them.

Source: Language Model Evaluation Harness 0.4.13, `TemplateLM._encode_pair` and `loglikelihood`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dmx.errors import DataError


@dataclass(frozen=True)
class Request:
    """One continuation; token ids."""

    context: list[int]
    continuation: list[int]


def encode_pairs(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Request]:
    """Tokens of (context, continuation), as lm-eval splits them.

    Spaces at the end of a context belong to the continuation; both are encoded as one text, which
    is cut after as many tokens as the context alone has. An empty context is the first token of a
    text: BOS, or EOS where there is none.
    """
    prefix = (
        tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    )
    moved = []
    for context, continuation in pairs:
        bare = context.rstrip()
        moved.append((bare, context[len(bare) :] + continuation))
    bare_texts = [continuation for context, continuation in moved if not context]
    texts = {text for c, t in moved if c for text in (c, c + t)}
    begin = tokenizer.decode([prefix]) if prefix is not None else None
    # A text that spells its BOS out must not get another one.
    begun = {text for text in texts if begin is not None and text.startswith(begin)}
    ids = _token_ids(tokenizer, sorted(texts - begun))
    ids |= _token_ids(tokenizer, sorted(begun), add_special_tokens=False)
    bare_ids = _token_ids(tokenizer, sorted(set(bare_texts)), add_special_tokens=False)
    requests = []
    for context, continuation in moved:
        if context:
            cut = len(ids[context])
            request = Request(ids[context], ids[context + continuation][cut:])
        elif prefix is None:
            raise DataError("an empty context needs a tokenizer with a BOS or EOS token")
        elif bare_ids[continuation][:1] == [prefix]:
            request = Request([prefix], bare_ids[continuation][1:])
        else:
            request = Request([prefix], bare_ids[continuation])
        if not request.continuation or not request.context:
            raise DataError(
                f"zero-shot: {continuation!r} after {context[-40:]!r} gives no tokens of its own "
                "with this tokenizer"
            )
        requests.append(request)
    return requests


def _token_ids(tokenizer: Any, texts: list[str], **options: bool) -> dict[str, list[int]]:
    if not texts:
        return {}
    ids = tokenizer(texts, verbose=False, **options)["input_ids"]
    return dict(zip(texts, ids, strict=True))
