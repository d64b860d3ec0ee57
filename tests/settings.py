"""Settings of a search by their short names, so that one table of a test serves several searches."""

from dataclasses import fields

from dmx.searching.config import DescentConfig, PolishConfig, RotationConfig, SearchSettings

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
