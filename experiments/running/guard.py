"""A command from the outside: Hydra's main, one clear line for an error, no Ctrl-C that is lost."""

import _thread
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from dmx.errors import DmxError
from dmx.models.memory import is_out_of_memory
from dmx.processes import own_rank

from .cards import own_card
from .composing import check_overrides, register
from .folder import FolderTaken, is_free_for, write_error
from .overrides import understood
from .settings import CONFIGS
from .watch import LostProcess

console = Console(stderr=True, quiet=own_rank() > 0)
"""Of processes that share a run the main one tells; `_errors` is for all."""
_errors = Console(stderr=True)


def is_for_users(record: logging.LogRecord) -> bool:
    """All but what torch's pytree says of classes of torchao."""
    args = record.args if isinstance(record.args, tuple) else ()
    return not any(isinstance(a, type) and a.__module__.startswith("torchao.") for a in args)


# transformers imports torchao, where it is installed, with every model. torchao 0.18 then registers two enums in a way that
# torch 2.13 warns of, and two lines, of nothing that a user could act on, would open every command.
logging.getLogger("torch.utils._pytree").addFilter(is_for_users)


def entry_point(
    command: str, schema: type
) -> Callable[[Callable[[DictConfig], Any]], Callable[[], None]]:
    """Decorator: a Hydra main whose users see one clear line for an error they can mend.

    Exit code 2 for such errors, 130 for Ctrl-C; in a sweep they are raised, so that the sweep
    records them and goes on.

    Args:
        command: name of the root config.
        schema: dataclass of all its settings.
    """
    register(command, schema)

    def decorate(task: Callable[[DictConfig], Any]) -> Callable[[], None]:
        # Launchers send this closure to other processes by value, so it names nothing but
        # functions that can be sent by name.
        @functools.wraps(task)
        def guarded(cfg: DictConfig) -> Any:
            return _guard(task, command, cfg)

        composed: Callable[[], None] = hydra.main(
            version_base="1.3", config_path=str(CONFIGS), config_name=command
        )(guarded)

        def main() -> None:
            try:
                check_overrides(sys.argv[1:], command)
                sys.argv[1:] = understood(sys.argv[1:], schema)
            except DmxError as error:
                _refuse(error)
            with no_lost_interrupts():
                composed()

        return main

    return decorate


def is_sweep() -> bool:
    """Whether this run is one of several that Hydra starts."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def sweep_folder() -> Path:
    """Of this run of a sweep."""
    return Path(HydraConfig.get().runtime.output_dir)


def with_folder(cfg: DictConfig, folder: Path) -> DictConfig:
    """The settings as the run of a sweep writes them down."""
    merged = OmegaConf.merge(cfg, {"run": {"folder": str(folder)}})
    assert isinstance(merged, DictConfig)
    return merged


def _guard(task: Callable[[DictConfig], Any], command: str, cfg: DictConfig) -> Any:
    try:
        if is_sweep():
            _take_card(cfg)
        return stopping_at_an_interrupt(task, cfg)
    except Exception as error:
        if is_sweep():
            folder = sweep_folder()
            settings = OmegaConf.to_yaml(with_folder(cfg, folder), resolve=True)
            if is_free_for(folder, settings) and not isinstance(error, FolderTaken):
                write_error(folder, command, error)
            raise
        if is_out_of_memory(error):
            _refuse(OutOfMemory(_LESS_MEMORY.format(str(error).partition("\n")[0])))
        if not isinstance(error, DmxError):
            raise
        _refuse(error)
    except KeyboardInterrupt:
        console.print("interrupted; the same command in the same run.folder goes on from here")
        sys.exit(130)


def _take_card(cfg: DictConfig) -> None:
    """A GPU of its own for this run of a sweep, said where it is one of several."""
    card = own_card(str(OmegaConf.select(cfg, "run.device")))
    if card is not None:
        beside = (
            f", beside {card.sharing} other runs: fewer at once do not share"
            if card.sharing
            else ""
        )
        console.print(f"this run takes GPU {card.name}{beside}", highlight=False)


class OutOfMemory(DmxError):
    """The device or the machine has too little memory for the settings."""


_LESS_MEMORY = (
    "{}. Set one of these lower: calibration.batch_size, calibration.window, evaluation.batch_size, "
    "eval.batch_size, search.micro_batch, learn.micro_batch; train.batch_size of a training; or "
    "search.descent.gradient_checkpointing=true, learn.gradient_checkpointing=true; or let a search and learning "
    "find out how many rows fit: search.oom=halve, learn.oom=halve. With other settings the run needs another run.folder; "
    "with run.memory=block, for models larger than a GPU, it goes on in this one."
)


def stopping_at_an_interrupt(task: Callable[[DictConfig], Any], cfg: DictConfig) -> Any:
    """The task, whose Ctrl-C stays one where a library's cleaning up fails because of it."""
    try:
        return task(cfg)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise


@contextmanager
def no_lost_interrupts() -> Iterator[None]:
    """Raise a Ctrl-C once more that came while some object was being deleted: Python drops those."""
    usual = sys.unraisablehook
    timers: list[threading.Timer] = []

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        if lost.exc_type is KeyboardInterrupt:
            # Later, for what this hook itself raises is dropped too.
            timers.append(threading.Timer(0.05, _thread.interrupt_main))
            timers[-1].start()
        else:
            usual(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
        for timer in timers:
            timer.cancel()  # the run has ended anyway


def show_error(error: DmxError) -> None:
    """On standard error, with the rank of a process that is not the main one of its run."""
    rank = f"rank {own_rank()}: " if own_rank() else ""
    # In one write: a progress bar of another thread would come between two.
    said = Text.assemble(rank, (type(error).__name__, "bold red"), f": {error}")
    _errors.print(said, highlight=False, soft_wrap=True)


def _refuse(error: DmxError) -> NoReturn:
    if not isinstance(error, LostProcess):
        show_error(error)
    sys.exit(2)
