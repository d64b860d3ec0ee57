"""Means with their standard errors."""

import math

import pytest

from dmx.errors import DataError
from dmx.evaluate.statistics import paired_difference


def test_paired_difference_is_exact():
    mean, stderr, count = paired_difference([1, 1, 0, 1], [1, 0, 0, 0])
    # differences 0, 1, 0, 1: mean 1/2, sample variance 1/3
    assert (mean, count) == (0.5, 4)
    assert stderr == pytest.approx(math.sqrt(1 / 3 / 4))
    assert paired_difference([0.25], [1.0]) == (-0.75, None, 1)
    assert paired_difference([1, 0], [1, 0]) == (0.0, 0.0, 2)
    for a, b in (([1], [1, 0]), ([], [])):
        with pytest.raises(DataError, match="as many on both sides"):
            paired_difference(a, b)
