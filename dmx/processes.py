"""The processes that share one run, through accelerate; one process needs nothing set up.

Who am I, how many are we, what do all of us say: only this module asks. Each process takes its rows of every global
batch, so that how many there are changes how sums round and nothing else. What follows from files is decided by
the main process, which alone writes them (`agree`).
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dmx.errors import DataError, RunError

_T = TypeVar("_T")


def own_rank() -> int:
    """Of this process, before anything is set up, too; 0 where it runs alone."""
    if _is_set_up():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0")) if started_together() > 1 else 0


def _is_set_up() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def started_together() -> int:
    """How many processes a launcher (accelerate, torchrun) has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_sharded() -> bool:
    """Whether accelerate was told to shard weights (`--use_fsdp`).

    Raises:
        RunError: in a way that is not there.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() not in ("true", "1"):
        return False
    for name, flag, needed in (
        ("FSDP_VERSION", "fsdp_version", "2"),
        ("FSDP_OFFLOAD_PARAMS", "fsdp_offload_params", "false"),
    ):
        if (found := os.environ.get(name, needed).lower()) != needed:
            raise RunError(
                f"accelerate launch --{flag} {found}: weights are sharded by FSDP2 alone, on the devices that compute. Use "
                f"--{flag} {needed}, or leave out --use_fsdp."
            )
    return started_together() > 1


class Processes:
    """rank and size, and what all processes give together: these methods are called by all of them, in one order."""

    def __init__(self, device: torch.device, *, together: bool = True) -> None:
        self.rank, self.size = 0, 1
        self.own_device = device
        """This process's GPU of those of its host, where `device` names none."""
        if together and (_is_set_up() or started_together() > 1):
            from accelerate import PartialState

            state = PartialState(cpu=device.type == "cpu")
            self.rank, self.size = state.process_index, state.num_processes
            self.own_device = device if device.type == "cpu" else state.device

    @classmethod
    def alone(cls) -> "Processes":
        """One process by itself, whatever a launcher has started beside it."""
        return cls(torch.device("cpu"), together=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    # --- what is whose -------------------------------------------------------------------------

    def own_rows(self, batch: Tensor) -> Tensor:
        """This process's rows of a global batch (batch, length).

        Raises:
            DataError: the rows cannot be shared out evenly, which would bias the mean.
        """
        if batch.shape[0] % self.size:
            raise DataError(
                f"batches of {batch.shape[0]} rows cannot be shared by {self.size} processes: choose a batch "
                "size that they divide (calibration.batch_size, training.batch_size), or another number of them"
            )
        return batch.chunk(self.size)[self.rank]

    def own_part(self, items: Sequence[_T]) -> Sequence[_T]:
        """This process's part of work that is counted one by one: every `size`-th item."""
        return items[self.rank :: self.size]

    # --- what all say --------------------------------------------------------------------------

    def mean(self, value: Tensor) -> Tensor:
        """Mean over processes, equal in all of them; the value itself for one process."""
        if self.size == 1:
            return value
        from accelerate.utils import reduce

        averaged: Tensor = reduce(value.clone(), reduction="mean")
        return averaged

    def average(self, value: Tensor) -> None:
        """`mean` in the place of the value, for what is large."""
        if self.size > 1:
            torch.distributed.all_reduce(value)
            value.div_(self.size)

    def total(self, value: Tensor) -> Tensor:
        """Sum over processes in the order of their ranks; for what is small, as all values exist at once."""
        first, *others = self._of_all(value)
        for other in others:
            first = first + other
        return first

    def largest(self, value: Tensor) -> Tensor:
        """Maximum over processes; for what is small."""
        first, *others = self._of_all(value)
        for other in others:
            first = torch.maximum(first, other)
        return first

    def _of_all(self, value: Tensor) -> tuple[Tensor, ...]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return (value,)
        from accelerate.utils import gather

        return tuple(gather(value[None].contiguous()))

    def agree(self, make: Callable[[], _T]) -> _T:
        """What `make` gives, or raises, in the main process, which alone calls it; must be picklable."""
        if self.size == 1:
            return make()
        from accelerate.utils import broadcast_object_list

        said: list[object] = [None, None]
        if self.is_main:
            try:
                said[0] = make()
            except Exception as error:
                said[1] = error
        broadcast_object_list(said)
        if isinstance(said[1], Exception):
            raise said[1]
        return said[0]  # type: ignore[return-value]

    def check_same_batches(self, digest: str) -> None:
        """Raise DataError, in all processes, where they were given different batches.

        Args:
            digest: hash of the global batches.
        """
        if self.size == 1:
            return
        differs = torch.tensor(self.agree(lambda: digest) != digest, device=self.own_device)
        if bool(self.total(differs.int())):
            raise DataError(
                f"the {self.size} processes were given different batches. Give each of them the same, whole ones: every "
                "process takes its own rows of them."
            )

    def close(self) -> None:
        """After the last of what all do together."""
        if self.size > 1 and _is_set_up():
            torch.distributed.destroy_process_group()
