"""Assignments as files that other runtimes load, proven by loading them.

One file a target (`compressed_tensors`, `quark`, `torchao`, `recipes`); `plan` says what is written
and refuses what a target does not hold, `exporter` writes it, `verify` loads it again in a fresh
process, `loading` reads back, `reading` reads other tools' configs.
"""

from dmx.exporting.exporter import Exported, check_model, check_new, export, write_plan
from dmx.exporting.loading import LoadedExport, assignment_of_files, is_exported, load_exported
from dmx.exporting.plan import EXPORT_TARGETS, PROFILES, Plan, make_plan
from dmx.exporting.reading import read_assignment

__all__ = [
    "EXPORT_TARGETS",
    "PROFILES",
    "Exported",
    "LoadedExport",
    "Plan",
    "assignment_of_files",
    "check_model",
    "check_new",
    "export",
    "is_exported",
    "load_exported",
    "make_plan",
    "read_assignment",
    "write_plan",
]
