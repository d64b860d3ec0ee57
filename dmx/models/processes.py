"""The processes of a distributed run, through accelerate; one process needs nothing set up."""

import os

import torch
from torch import Tensor

from dmx.errors import DataError


class Processes:
    """rank and size, and means over processes. Each takes its rows of every global batch."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = 0, 1
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            state = PartialState(cpu=device.type == "cpu")
            self.rank, self.size = state.process_index, state.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def own_rows(self, batch: Tensor) -> Tensor:
        """This process's rows of a global batch (batch, length).

        Raises:
            DataError: the rows cannot be shared out evenly, which would bias the mean.
        """
        if batch.shape[0] % self.size:
            raise DataError(
                f"batches of {batch.shape[0]} rows cannot be shared by {self.size} processes: "
                "choose a batch size that they divide"
            )
        return batch.chunk(self.size)[self.rank]

    def mean(self, value: Tensor) -> Tensor:
        """Mean over processes; the value itself for one process."""
        if self.size == 1:
            return value
        from accelerate.utils import reduce

        averaged: Tensor = reduce(value.clone(), reduction="mean")
        return averaged
