"""Whether a text for learning holds what the result is measured on: sequences of words in both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

WORDS = 13
"""Of a sequence; as language models' training data are cleaned of benchmarks (arXiv 2005.14165, C)."""
_WORD = re.compile(r"\w+")
_PIECE = 1 << 20
"""Characters that are looked at at a time."""


@dataclass(frozen=True)
class Overlap:
    """What an evaluation text shares with a text for learning."""

    words: int
    """Of a sequence."""
    sequences: int
    """Of the evaluation text, each counted as often as it is there, that are in the other text, too."""
    total: int
    """All sequences of the evaluation text."""

    @property
    def share(self) -> float:
        """Of the evaluation text's sequences."""
        return self.sequences / self.total if self.total else 0.0


def _words(text: str) -> Iterator[list[str]]:
    """Words of a text in lower case, piece by piece; no piece ends inside a word."""
    start = 0
    while start < len(text):
        end = start + _PIECE
        while end < len(text) and (text[end - 1].isalnum() or text[end - 1] == "_"):
            end += 1
        yield _WORD.findall(text[start:end].lower())
        start = end


def _hashes(ids: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """A 64-bit hash of every sequence of len(factors) ids; (n,) uint64 -> (n - len(factors) + 1,)."""
    count = max(0, len(ids) - len(factors) + 1)
    total = np.zeros(count, dtype=np.uint64)
    for offset, factor in enumerate(factors):
        total += ids[offset : offset + count] * factor  # modulo 2**64
    return total


def shared_sequences(evaluation: str, training: str, words: int = WORDS) -> Overlap:
    """Sequences of words (`\\w+`, in lower case) of one text that another one holds.

    One pass over either text. Sequences are compared by 64-bit hashes: that two different ones are taken for
    one is less likely than one in a million for texts of millions of words.
    """
    random = np.random.default_rng(words)
    # Odd factors are invertible modulo 2**64: no bit of an id is lost.
    factors = random.integers(0, 1 << 63, words, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    known: dict[str, int] = {}
    listed = [word for piece in _words(evaluation) for word in piece]
    for word in listed:
        known.setdefault(word, len(known) + 1)
    # An id of its own for words of the evaluation text; 0, and nothing else, for all others.
    of_id = random.integers(1, 1 << 63, len(known) + 1, dtype=np.uint64)
    of_id[0] = 0
    wanted = _hashes(of_id[np.array([known[word] for word in listed], dtype=np.int64)], factors)
    distinct, counts = np.unique(wanted, return_counts=True)
    seen = np.zeros(len(distinct), dtype=bool)
    before = np.zeros(0, dtype=np.int64)
    for piece in _words(training) if len(distinct) else ():
        found = np.array([known.get(word, 0) for word in piece], dtype=np.int64)
        ids = np.concatenate([before, found])
        before = ids[max(0, len(ids) - words + 1) :]
        # Sequences without a word that the evaluation text lacks.
        foreign = np.concatenate([[0], np.cumsum(ids == 0)])
        whole = foreign[words:] == foreign[:-words] if len(ids) >= words else np.zeros(0, bool)
        candidates = _hashes(of_id[ids], factors)[whole]
        places = np.searchsorted(distinct, candidates).clip(max=len(distinct) - 1)
        seen[places[distinct[places] == candidates]] = True
    return Overlap(words, int(counts[seen].sum()), len(wanted))


def without_shared(training: str, evaluation: str, separator: str, words: int = WORDS) -> str:
    """A text for learning without the parts that hold, or help to hold, a sequence of the evaluation text.

    Args:
        separator: between the parts of `training`; short texts only, all sequences are kept in memory.
    """
    listed = _WORD.findall(evaluation.lower())
    wanted = set(_sequences(listed, words))
    parts = training.split(separator)
    known = [(word, i) for i, part in enumerate(parts) for word in _WORD.findall(part.lower())]
    shared: set[int] = set()
    for start, sequence in enumerate(_sequences([word for word, _ in known], words)):
        if sequence in wanted:
            shared.update(part for _, part in known[start : start + words])
    return separator.join(part for i, part in enumerate(parts) if i not in shared)


def _sequences(listed: list[str], words: int) -> Iterator[tuple[str, ...]]:
    """Every so many words of a list that follow each other, from the first on."""
    return zip(*(listed[first:] for first in range(words)), strict=False)
