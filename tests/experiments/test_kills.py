"""Kills, one for each of two kinds of command; `python -m tests.kills` does twenty of each kind at random moments."""

import pytest

from tests.kills import CASES, _timeless, killed, undisturbed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("case", "begun"), [("scan", "scores/*"), ("export", "model*")])
def test_a_killed_command_goes_on_to_the_same_outcome(case, begun, tmp_path):
    expected, _ = undisturbed(case, tmp_path / "whole")
    folder = tmp_path / "killed"
    found, was_alive = killed(case, folder, lambda: bool(list(folder.glob(begun))))
    assert found == expected and was_alive


def test_every_kind_of_command_has_a_case():
    commands = {command for command, _ in CASES.values()}
    assert commands == {"search", "compare", "train_mor", "export"}
    assert _timeless({"a_seconds": 1, "nll": [2]}) == {"nll": [2]}
