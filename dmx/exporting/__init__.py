"""Assignments as files that other runtimes load, proven by loading them.

One file a target (`compressed_tensors`, `quark`, `torchao`, `recipes`); `exporter` writes,
`verify` loads again in a fresh process, `loading` reads back, `reading` reads other tools' configs.
"""

from dmx.exporting.exporter import (
    EXPORT_TARGETS,
    PROFILES,
    Exported,
    check_export,
    check_new,
    check_target,
    export,
)
from dmx.exporting.loading import LoadedExport, is_exported, load_exported
from dmx.exporting.reading import read_assignment

__all__ = [
    "EXPORT_TARGETS",
    "PROFILES",
    "Exported",
    "LoadedExport",
    "check_export",
    "check_new",
    "check_target",
    "export",
    "is_exported",
    "load_exported",
    "read_assignment",
]
