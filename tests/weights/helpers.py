"""Assignments for the tests of what becomes of the weights."""

import functools

from dmx.assignment.assignment import make_assignment
from dmx.assignment.space import build_space
from dmx.data import DataConfig, encode, load_text, token_batches
from dmx.formats import MXFP4, get_family
from dmx.searching import SearchConfig, uniform_assignment


def uniform(model, block_format=MXFP4, **options):
    return uniform_assignment(model, block_format, SearchConfig(name="uniform", **options))


def mixed(model, rule="floor", units="layer"):
    """An assignment with three formats in it."""
    formats = get_family("mxfp8_mxfp6_mxfp4").formats
    space = build_space(model, formats, units=units)
    choice = [i % len(formats) for i in range(len(space.units))]
    return make_assignment(space, choice, model, scale_rules=rule)


@functools.cache
def text_batches(tokenizer, count=16):
    """(4, 64) tokens each, of text as the tiny models are trained on."""
    text = encode(tokenizer, load_text(DataConfig(name="embedded", split="calibration")))
    return token_batches(text, 64, 4, seed=0, n_batches=count)
