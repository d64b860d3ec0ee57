"""Batches in fewer rows at a time, where the memory does not hold all rows at once.

Losses and scores are sums over rows, so what is computed from them does not depend on how many run at a time, but for
the order in which floating point adds.
"""

import gc
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

OOM = ("stop", "halve")
MEMORY_SHARE = 0.25
"""Of a GPU's free memory, which what is kept for later passes may take."""
HOST_MEMORY = 1 << 30
"""Bytes that it may take on a CPU."""
_T = TypeVar("_T")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python could not allocate; of a CPU torch raises a RuntimeError like any other."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def ran_out(error: BaseException) -> bool:
    """Whether it is such an error, or follows from one: a capture that ran out ends in an error of the graph's,
    raised while that one is handled."""
    return any(map(is_out_of_memory, filter(None, (error, error.__context__))))


def release() -> None:
    """Give back to the device what nothing holds any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def room_to_keep(device: torch.device) -> float:
    """Bytes that what is kept for later passes may take there."""
    if device.type != "cuda":
        return HOST_MEMORY
    return MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]


class MicroBatch:
    """How many rows of a batch run at a time in one stage; fewer from each time on that the memory does not hold them.

    Args:
        rows: to begin with; None: all.
        oom: stop: memory that does not do is an error. halve: half as many rows at a time go on.
        stage: whose settings these are, for messages: `search`.
    """

    def __init__(self, rows: int | None, oom: str, stage: str) -> None:
        self.rows, self.halves, self.stage = rows, oom == "halve", stage
        self._forget: list[Callable[[], None]] = []

    def forgets(self, *calls: Callable[[], None]) -> None:
        """With each halving these let go of what was made of more rows at a time."""
        self._forget += calls

    def parts(self, batch: Tensor) -> tuple[Tensor, ...]:
        """Of a batch (rows, ...): what runs at a time."""
        return batch.split(self.rows or len(batch))

    def run(self, use: Callable[[], _T], rows: int) -> _T:
        """What `use` gives, which runs a batch of so many rows by `parts`; it begins again after each halving, so
        it must leave nothing behind that counts."""
        while True:
            try:
                return use()
            except (MemoryError, RuntimeError) as error:
                ran = min(self.rows or rows, rows)
                if not (self.halves and ran > 1 and ran_out(error)):
                    raise
            # Here, where nothing holds what the pass that failed had allocated.
            self.rows = (ran + 1) // 2
            for forget in self._forget:
                forget()
            release()
            warnings.warn(
                f"{self.stage}: the memory does not hold {ran} rows at a time; it goes on with {self.rows} "
                f"({self.stage}.oom=halve). {self.stage}.micro_batch={self.rows} begins so.",
                stacklevel=2,
            )
