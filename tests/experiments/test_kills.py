"""Kills at random moments, once for each kind of command; `python -m tests.kills` does twenty of each."""

import pytest

from tests.kills import CASES, _timeless, killed, undisturbed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", ["scan", "export"])
def test_a_killed_command_goes_on_to_the_same_outcome(case, tmp_path):
    expected, seconds = undisturbed(case, tmp_path / "whole")
    found, was_alive = killed(case, tmp_path / "killed", 0.6 * seconds)
    assert found == expected and was_alive


def test_every_kind_of_command_has_a_case():
    assert {command for command, _ in CASES.values()} == {
        "search",
        "compare",
        "train_mor",
        "export",
    }
    assert _timeless({"a_seconds": 1, "nll": [2]}) == {"nll": [2]}
