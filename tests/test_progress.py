"""The time left on a progress line, and lines of a log."""

from functools import partial

import pytest
from rich.progress import Progress

from dmx import progress as module
from dmx.progress import TimeLeft, progress


def test_the_time_left_counts_what_follows_at_the_pace_so_far():
    now = [0.0]
    bar = Progress(get_time=lambda: now[0])
    for after in (0, 20):
        bar.add_task("", total=10, after=after)
    tasks, left = bar.tasks, TimeLeft()
    assert [str(left.render(task)) for task in tasks] == ["-:--:--"] * 2
    for now[0] in (2.0, 4.0, 6.0):
        for task in tasks:
            bar.advance(task.id)
    assert [str(left.render(task)) for task in tasks] == ["0:00:14", "0:00:54"]


@pytest.mark.parametrize(
    ("every", "quiet", "counts"),
    [(0.0, False, ["1/3", "2/3", "3/3"]), (60.0, False, ["3/3"]), (0.0, True, [])],
)
def test_a_log_has_a_line_now_and_then_and_the_last(monkeypatch, capsys, every, quiet, counts):
    monkeypatch.setattr(module, "LINE_EVERY", every)
    monkeypatch.delenv("FORCE_COLOR", raising=False)  # by which rich takes a log for a terminal
    with progress("scan", 3, quiet=quiet) as advance:
        for number in range(3):
            advance(f"note {number}")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines if line] == counts
    assert not lines or lines[-1].endswith("note 2")


def test_steps_of_minutes_have_a_time_left_too(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(module, "Progress", partial(Progress, get_time=lambda: now[0]))
    monkeypatch.setattr(module, "LINE_EVERY", 0.0)
    with progress("scan", 5) as advance:
        for now[0] in (45.0, 90.0, 135.0, 180.0):
            advance()
    assert "4/5 0:03:00 left 0:00:45" in capsys.readouterr().err
