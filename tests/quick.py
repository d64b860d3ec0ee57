"""Commands without the half of their time that no test of a command asks about.

Pictures are laid out but not drawn: `experiments/test_report.py` draws them all. Hydra composes the settings once
instead of twice: its first time asks for `hydra.mode`, which files in configs/sweep alone set. And it reads each file of
settings once a process, not once a command. What a user gets, with all of it, is tested in `test_wheel.py`.
"""

import copy
from collections.abc import Callable
from typing import Any

from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult

from experiments.reporting import html

MIME = {"svg": "image/svg+xml", "png": "image/png"}

_loaded: dict[tuple[Any, ...], ConfigResult | None] = {}
_load = ConfigRepository.load_config


def _load_once(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """A copy for each composition, which changes it."""
    source = repository._find_object_source(config_path, ObjectType.CONFIG)
    if source is None:
        return None
    key = (source.scheme(), source.provider, source.path, config_path)
    if key not in _loaded:
        _loaded[key] = _load(repository, config_path)
    return copy.deepcopy(_loaded[key])


def _share_repository(caching: CachingConfigRepository, delegate: ConfigRepository) -> None:
    """Without its copy, which keeps `hydra.searchpath` in a command from changing the original."""
    caching.delegate = delegate
    caching.cache = {}


def make_commands_quick(set_attribute: Callable[[object, str, Any], None]) -> None:
    """For what runs in this process from here on; `set_attribute` is `setattr` or a monkeypatch's."""
    set_attribute(Hydra, "get_mode", lambda *_args, **_named: None)
    set_attribute(ConfigRepository, "load_config", _load_once)
    set_attribute(CachingConfigRepository, "__init__", _share_repository)
    leave_pictures_undrawn(set_attribute)


def leave_pictures_undrawn(set_attribute: Callable[[object, str, Any], None]) -> None:
    """Likewise; pages have their captions."""
    set_attribute(html, "figure_uri", lambda _figure, kind="svg": f"data:{MIME[kind]};base64,")
