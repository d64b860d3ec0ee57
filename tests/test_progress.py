"""The time left on a progress line."""

from rich.progress import Progress

from dmx.progress import TimeLeft


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
