"""One GPU for each run of a sweep: the first of this machine's that no other run of a sweep holds.

Launchers start runs beside each other in processes that all see the same GPUs, and `cuda` is the first of them for all.
A process takes a lock of the system on one, which ends with the process however that ends, and narrows
CUDA_VISIBLE_DEVICES to it before CUDA looks. What the user, Slurm or a container left visible is what is chosen from.
"""

import fcntl
import itertools
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dmx.processes import started_together

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Card:
    """A GPU that this process holds until it ends, or closes `descriptor`."""

    name: str
    """As CUDA_VISIBLE_DEVICES has it: a number, or a UUID of a GPU or of a MIG instance."""
    sharing: int
    """Runs that held it before."""
    descriptor: int


_held: Card | None = None
"""Of this process: launchers give one process several runs, one after another."""


def visible_cards() -> list[str]:
    """What CUDA would see, by the names of CUDA_VISIBLE_DEVICES; CUDA is not started."""
    said = os.environ.get(VISIBLE)
    if said is None:
        return [str(i) for i in range(torch.cuda.device_count())]
    names = (name.strip() for name in said.split(","))
    return list(itertools.takewhile(_is_card, names))  # as CUDA reads it: up to the first wrong one


def _is_card(name: str) -> bool:
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))


def uuids() -> dict[str, str]:
    """Number -> UUID of this machine's GPUs, as nvidia-smi says; CUDA is not started. Empty without it, and where its numbers,
    of places on the bus, may be others than CUDA's, of the fastest first."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    cards = [[word.strip() for word in line.split(",", 2)] for line in said.splitlines()]
    if any(len(card) < 3 for card in cards):
        return {}
    is_alike = len({kind for _, _, kind in cards}) == 1
    is_by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return {number: uuid for number, uuid, _ in cards} if is_alike or is_by_bus else {}


def whole_name(name: str, known: Mapping[str, str]) -> str:
    """The UUID of a card that is named by number, or by the beginning of its UUID; the name itself where none is known."""
    found = [uuid for number, uuid in known.items() if name == number or uuid.startswith(name)]
    return found[0] if len(found) == 1 else name


def take_card(cards: Sequence[str], folder: Path, known: Mapping[str, str]) -> Card:
    """The first of the cards that fewest hold.

    Args:
        cards: at least one. folder: of the locks, one a machine. known: what `uuids` says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for sharing in itertools.count():
        for name in cards:
            path = folder / f"{whole_name(name, known).replace('/', '_')}.{sharing}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                return Card(name, sharing, descriptor)
    raise AssertionError("endless")


def locks_folder() -> Path:
    """Of this user on this machine."""
    return Path(tempfile.gettempdir()) / f"dmx-gpus-{os.getuid()}"


def own_card(device: str) -> Card | None:
    """The GPU of this run of a sweep, which from now on is all that the process sees; None where there is no choice: one
    GPU or none is visible, the run names its device, several processes share the run, or CUDA has started.

    Args:
        device: run.device.
    """
    global _held
    if _held is not None or device not in ("auto", "cuda") or started_together() > 1:
        return _held
    if torch.cuda.is_initialized() or len(cards := visible_cards()) < 2:
        return None
    _held = take_card(cards, locks_folder(), uuids())
    os.environ[VISIBLE] = _held.name
    return _held


def held_card() -> Card | None:
    """What `own_card` gave this process."""
    return _held
