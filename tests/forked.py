"""Processes of their own without their imports: torch and transformers take 8 s of a core to import, each time.

A server that has imported them, and computed nothing that counts, forks a process for each command. What a wheel's user
starts, from nothing, is tested in `test_wheel`.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from tests.quick import make_commands_quick

ROOT = Path(__file__).resolve().parents[1]
# Not the entry points themselves: they run as __main__.
PRELOADED = [
    "tests",
    "transformers.models.llama.modeling_llama",
    "experiments.running.bench",
    "experiments.running.collect",
    "experiments.running.exports",
    "experiments.running.training",
    "experiments.reporting.report",
    "tests.warm",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


def _run(
    arguments: Sequence[str], cwd: str, env: Mapping[str, str], outputs: tuple[str, str]
) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # A suite that was started in the background ignores Ctrl-C, and its processes would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    kind, what, *rest = arguments
    if kind == "-m":
        make_commands_quick(setattr)
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def places(size: int) -> list[dict[str, str]]:
    """The environment of each of so many processes of one training, as torchrun sets it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


class Forked:
    """A process as of subprocess.Popen, with what the tests need of it.

    Args:
        arguments: of Python: `-m` and a module, or `-c` and code, and what these take.
        environment: beside the one of the tests.
    """

    def __init__(
        self, *arguments: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
    ) -> None:
        assert arguments[0] in ("-m", "-c")
        self._folder = tempfile.TemporaryDirectory()
        outputs = tuple(f"{self._folder.name}/{name}" for name in ("out", "err"))
        env = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
        command = [str(a) for a in arguments]
        self._process = _context.Process(target=_run, args=(command, str(cwd), env, outputs))
        self._process.start()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float = 120) -> int:
        """The exit code; a process that does not end in time is killed, and TimeoutError raised."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise TimeoutError(f"not ended within {timeout} s:\n{self.outputs()[1][-2000:]}")
        return self._process.exitcode

    def outputs(self) -> tuple[str, str]:
        """What it has written so far to stdout and stderr."""
        paths = (Path(self._folder.name) / name for name in ("out", "err"))
        out, err = (path.read_text() if path.exists() else "" for path in paths)
        return out, err

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Waits for its end; stdout and stderr."""
        self.wait(timeout)
        return self.outputs()

    def kill_once(self, seen: Callable[[], object], timeout: float = 120) -> None:
        """SIGKILL as soon as `seen` says so; it must not have ended before."""
        deadline = time.monotonic() + timeout
        while not seen() and time.monotonic() < deadline:
            assert self.poll() is None, f"it ended before it could be stopped: {self.outputs()[1]}"
            time.sleep(0.002)
        self.send_signal(signal.SIGKILL)
        self.wait()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            assert self._process.pid
            os.kill(self._process.pid, number)
