"""The folder of a run: taken by one command, and what a failed one leaves in it."""

import fcntl
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from dmx.errors import RunError, setting_text
from dmx.files import temporary_prefix, write_json, write_text

from ..reporting.stored import flatten
from .provenance import time_text

CONFIG_FILE = "config.yaml"
ERROR_FILE = "error.json"
"""What a failed run leaves; a new start of the same run takes it away."""
PACE_FILE = "pace.json"
"""What stages took, in plain steps beside them; of a run that is asked for it."""


class FolderTaken(RunError):
    """The run's folder holds something else; nothing may be written there."""


def claim(folder: Path, config_yaml: str) -> None:
    """Take a new folder, one that the same settings began, or one whose run failed before it
    left anything but its error.

    Raises:
        RunError: the folder holds another run, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):  # of commands that start at once one takes the folder
            _claim_locked(folder, config_yaml)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunError(
            f"run.folder={folder} cannot be read or written ({why}). Choose another folder."
        ) from error


def _claim_locked(folder: Path, config_yaml: str) -> None:
    path = folder / CONFIG_FILE
    held = {
        p.name for p in folder.iterdir()
        if not p.name.startswith(temporary_prefix(path))  # of a start that was killed
    }  # fmt: skip
    settings = path.read_text() if path.exists() else None
    if held - {PACE_FILE} == {CONFIG_FILE, ERROR_FILE}:
        settings, held = None, set()
        (folder / PACE_FILE).unlink(missing_ok=True)
    if settings is None:
        if held - {ERROR_FILE}:
            raise FolderTaken(
                f"run.folder={folder} is not empty and holds no run of this project. Choose "
                "another folder."
            )
        write_text(path, config_yaml)
    elif _of_results(settings) != _of_results(config_yaml):
        raise FolderTaken(
            f"run.folder={folder} holds another run (its config.yaml differs{_differences(settings, config_yaml)}). "
            "Give the settings there to go on with it, choose another folder, or delete that one."
        )
    (folder / ERROR_FILE).unlink(missing_ok=True)


_OF_ANY_RUNTIME = r"(?m)^(  target: any\n  scale_rules:\n(?:    (?!input:).*\n)*    input: )auto$"
"""Of a search, where auto stands for floor, which files of before it say."""


def _of_results(config_yaml: str) -> str:
    """The settings without how a model is held: a run may go on otherwise, and as files of before those settings say it."""
    for name in ("memory", "shard"):
        config_yaml = re.sub(rf"(?m)^(run:\n(?:  .*\n)*?)  {name}: \S+\n", r"\1", config_yaml)
    return re.sub(_OF_ANY_RUNTIME, r"\1floor", config_yaml)


_NAMED_SETTINGS = 3
"""That a message names, of those that differ."""


def _differences(there: str, here: str) -> str:
    """`: gptq.order is natural there, activity here`; empty where the file in the folder cannot be read."""
    try:
        held, asked = (yaml.safe_load(_of_results(text)) for text in (there, here))
    except yaml.YAMLError:
        return ""
    if not isinstance(held, dict) or not isinstance(asked, dict):
        return ""
    held, asked = flatten(held), flatten(asked)
    names = [name for name in {**asked, **held} if _said(held, name) != _said(asked, name)]
    names.sort(key=lambda name: name not in held or name not in asked)  # of both first
    said = [
        f"{n} is {_said(held, n)} there, {_said(asked, n)} here" for n in names[:_NAMED_SETTINGS]
    ]
    if more := len(names) - len(said):
        said.append(f"{more} more")
    return f": {'; '.join(said)}" if said else ""


def _said(settings: Mapping[str, Any], name: str) -> str:
    """A setting as the command line has it."""
    if name not in settings:
        return "not set"
    return setting_text(settings[name])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; where the file system has no locks, all."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def hold(folder: Path) -> int | None:
    """Keep others out of a claimed folder while this process lives, or until `release`; kill -9 frees it, too.

    Returns:
        What `release` takes; None where the file system has no locks.

    Raises:
        FolderTaken: another command runs in it.
    """
    descriptor = os.open(folder / CONFIG_FILE, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise FolderTaken(
            f"run.folder={folder} is in use: the same command is running in it. Wait for that one, whose "
            "results will be shown here, or choose another folder."
        ) from error
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def release(held: int | None) -> None:
    """Let others into the folder again."""
    if held is not None:
        os.close(held)


def is_free_for(folder: Path, config_yaml: str) -> bool:
    """Whether the folder's settings are these, or none are there: another's are another run's, and
    so is the folder."""
    path = folder / CONFIG_FILE
    if not path.exists():
        return True
    if not path.is_file():
        return False
    return _of_results(path.read_text(errors="replace")) == _of_results(config_yaml)


def write_error(folder: Path, command: str, error: Exception) -> None:
    """Leave what went wrong in the folder of a run, for `compare collect=`."""
    write_json(folder / ERROR_FILE, {
        "command": command, "error": f"{type(error).__name__}: {error}",
        "time": time_text(), "traceback": traceback.format_exc(),
    })  # fmt: skip
