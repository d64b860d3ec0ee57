"""Settings that tests share: of a command that takes seconds, and of a search by short names, so that one table
of a test serves several searches."""

from dataclasses import fields

from dmx.searching.config import DescentConfig, PolishConfig, RotationConfig, SearchSettings

TINY = [
    "model=tiny_random",
    "data=synthetic",
    "data.calibration.max_characters=20000",
    "data.evaluation.max_characters=20000",
    "run.device=cpu",
    "calibration.window=32",
    "calibration.batch_size=2",
    "calibration.batches=3",
    "evaluation.window=64",
    "evaluation.batch_size=4",
    "evaluation.max_windows=6",
]
"""A command on the smallest model and texts."""
TINY_LAYERS = [*TINY, "search.units=layer"]
"""One that searches."""
_DESCENT = {f.name for f in fields(DescentConfig)}


def search_config(**settings):
    """SearchConfig of lr=3 (of the descent), polish_rounds=2, rotation_file=... and its own settings;
    what the search does not use is dropped."""
    parts = {"descent": {}, "polish": {}, "rotation": {}, "own": {}}
    for name, value in settings.items():
        head, _, tail = name.partition("_")
        if name in _DESCENT:
            parts["descent"][name] = value
        elif head in ("polish", "rotation"):
            parts[head][tail] = value
        else:
            parts["own"][name] = value
    shared = SearchSettings(
        **parts["own"],
        descent=DescentConfig(**parts["descent"]),
        polish=PolishConfig(**parts["polish"]),
        rotation=RotationConfig(**parts["rotation"]),
    )
    return shared.for_search(shared.name)


def numbers(result):
    """What a search found and measured, but for the seconds: formats, preference, rows of history and polish."""
    rows = [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in (*result.history, *result.polish)
    ]
    return result.assignment.formats, result.preference.tolist(), rows
