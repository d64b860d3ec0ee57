"""Commands without the half of their time that no test of a command asks about.

Pictures are laid out but not drawn: `experiments/test_report.py` draws them all. Hydra composes the settings once
instead of twice: its first time asks for `hydra.mode`, which files in configs/sweep alone set. What a user gets,
with both, is tested in `test_wheel.py`.
"""

from collections.abc import Callable
from typing import Any

from hydra._internal.hydra import Hydra

from experiments.reporting import html

MIME = {"svg": "image/svg+xml", "png": "image/png"}


def make_commands_quick(set_attribute: Callable[[object, str, Any], None]) -> None:
    """For what runs in this process from here on; `set_attribute` is `setattr` or a monkeypatch's."""
    set_attribute(Hydra, "get_mode", lambda *_args, **_named: None)
    set_attribute(html, "figure_uri", lambda _figure, kind="svg": f"data:{MIME[kind]};base64,")
