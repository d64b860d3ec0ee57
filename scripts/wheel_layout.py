"""Build hook of hatch: a wheel carries the entry points and their settings inside the package.

experiments/ -> dmx/experiments, configs/ -> dmx/configs. An editable installation points at the
clone, which has them beside the package, so nothing is copied there.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelLayout(BuildHookInterface):
    """Adds the two folders to a standard wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """version: standard or editable."""
        if version == "standard":
            inside = {name: f"dmx/{name}" for name in ("experiments", "configs")}
            build_data["force_include"].update(inside)
