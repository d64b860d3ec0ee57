"""Errors that a caller can cause. Each message names the setting, what was found, what is allowed, the way out."""

import json
from typing import Any


def setting_text(value: Any) -> str:
    """A setting's value as the command line has it: `null`, `true`, `[4.5, 5.0]`; a text as it is."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


class DmxError(ValueError):
    """Base of all errors that the user of dmx can provoke and mend."""


class FormatError(DmxError):
    """A format, family or scale rule that does not exist or does not fit here."""


class BudgetError(DmxError):
    """A budget that no assignment can meet, or a malformed one."""


class AssignmentError(DmxError):
    """An assignment that is damaged, or that belongs to another model."""


class ModelError(DmxError):
    """A model that cannot be loaded or cannot be searched."""


class DataError(DmxError):
    """Text or tokens that are missing, too short, or of the wrong shape."""


class RunError(DmxError):
    """An output folder or a run state that cannot be used."""
