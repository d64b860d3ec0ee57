"""Sequences of words that an evaluation text shares with a text for learning."""

import random

import pytest

from dmx.data import Text, check_overlap, overlap, shared_sequences


def words(count, seed, vocabulary=400):
    rng = random.Random(seed)
    return [f"w{rng.randrange(vocabulary)}" for _ in range(count)]


def by_sets(evaluation, training, length):
    """The definition, word for word."""
    split = [text.lower().split() for text in (evaluation, training)]
    each = [[tuple(w[i : i + length]) for i in range(len(w) - length + 1)] for w in split]
    known = set(each[1])
    return sum(sequence in known for sequence in each[0]), len(each[0])


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_sequence_is_found_wherever_it_is_and_unrelated_text_shares_none(
    seed, monkeypatch
):
    evaluation, training = words(500, seed), words(2000, seed + 100)
    monkeypatch.setattr(overlap, "_PIECE", 64)  # many pieces, with sequences across their ends
    assert shared_sequences(" ".join(evaluation), " ".join(training)).sequences == 0
    for place in (0, 777, len(training)):
        planted = training[:place] + evaluation[100:115] + training[place:]
        found = shared_sequences(" ".join(evaluation), ", ".join(planted).upper())
        assert (found.words, found.sequences, found.total) == (13, 3, 488)
        assert found.share == 3 / 488
        broken = [*planted[: place + 7], "other", *planted[place + 7 :]]
        assert shared_sequences(" ".join(evaluation), " ".join(broken)).sequences == 0


def test_parts_that_hold_a_shared_sequence_or_a_piece_of_one_are_left_out():
    evaluation = words(60, 1)
    parts = [" ".join(words(40, seed)) for seed in range(5, 9)]
    inside = " ".join(["x", *evaluation[3:20], "y"])
    halves = " ".join(["x", *evaluation[30:37]]), " ".join([*evaluation[37:43], "y"])
    short = " ".join(evaluation[:12])
    training = [parts[0], inside, parts[1], *halves, parts[2], short, parts[3]]
    left = overlap.without_shared("|".join(training), " ".join(evaluation), "|")
    assert left.split("|") == [*parts[:3], short, parts[3]]
    assert shared_sequences(" ".join(evaluation), left).sequences == 0


@pytest.mark.parametrize("length", [1, 2, 3])
def test_counts_are_those_of_the_definition(length):
    for seed in range(5):
        evaluation, training = (" ".join(words(60, seed + k, 12)) for k in (0, 50))
        found = shared_sequences(evaluation, training, length)
        assert (found.sequences, found.total) == by_sets(evaluation, training, length)


def test_texts_shorter_than_a_sequence_share_none():
    for evaluation, training in (("", ""), ("a b", "a b"), ("a " * 20, "a b"), ("a b", "a " * 20)):
        found = shared_sequences(evaluation, training)
        assert found.sequences == 0 and found.share == 0


def test_a_shared_sequence_is_warned_of(recwarn):
    one, other = (Text(" ".join(words(50, 1)), name, "0", "s") for name in ("tested", "learned"))
    with pytest.warns(UserWarning, match=r"\(tested\) shares 38 of its 38 .*100 %.*\(learned\)"):
        check_overlap(one, other)
    recwarn.clear()
    check_overlap(one, Text(" ".join(words(50, 2)), "learned", "0", "s"))
    assert not recwarn.list
