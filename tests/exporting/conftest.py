"""Mixed assignments, and the loaders of other projects in this process where that is enough."""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from dmx.assignment.assignment import make_assignment
from dmx.assignment.space import build_space
from dmx.exporting import _fresh_load, verify
from dmx.exporting.compressed_tensors import FORMAT_NAMES
from dmx.exporting.layouts import MODULES
from dmx.exporting.quark import DTYPES
from dmx.formats import MX_FORMATS, MXFP4, MXFP8_E4M3

HELD = {
    "compressed_tensors": tuple(f for f in FORMAT_NAMES if f.is_mx),
    "quark": tuple(DTYPES),
    "torchao": MX_FORMATS,
}
"""MX formats of each target."""
VLLM = (MXFP4, MXFP8_E4M3)


def mixed(model, formats, units="layer", **options):
    """Every format in turn, in the order of the units."""
    space = build_space(model, formats, units=units, **options)
    return make_assignment(space, np.arange(len(space.units)) % len(formats), model)


def unequal(model, formats=VLLM):
    """The low format for every weight, the high one for every other layer's input."""
    space = build_space(model, formats, units="fused", choices="separate")
    choice = [i % 4 == 1 for i in range(len(space.units))]
    return make_assignment(space, np.array(choice, dtype=np.int64), model)


def needs(package):
    module = MODULES[package]
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"needs {package}: pip install -e '.[export]'",
    )


_WORKER = """
import os, pathlib, runpy, sys, threading, traceback
from multiprocessing.connection import Listener
# amd-quark parses every model of transformers for mixtures of experts, 20 s; none is loaded here.
rglob = pathlib.Path.rglob
pathlib.Path.rglob = lambda self, pattern: [] if pattern == "modeling_*.py" else rglob(self, pattern)
def end_with_the_tests():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=end_with_the_tests, daemon=True).start()
with Listener(sys.argv[2] + "~", "AF_UNIX") as listener:
    os.rename(sys.argv[2] + "~", sys.argv[2])  # there once it listens
    load = runpy.run_path(sys.argv[1])["main"]
    while True:
        with listener.accept() as tests:
            try:
                load(tests.recv())
                said = ""
            except Exception:
                said = traceback.format_exc()
            tests.send(said)
"""


@pytest.fixture
def model(make_tiny):
    return make_tiny("llama", dtype="bfloat16").model


@pytest.fixture
def batches(generator):
    return [torch.randint(0, 256, (2, 16), generator=generator) for _ in range(2)]


class _Loader:
    """A fresh process that knows nothing of dmx, and loads one folder after another, for all workers of pytest: what
    a loader's package takes to import (amd-quark ten seconds) is paid once.

    Args:
        shared: folder that all workers see.
    """

    def __init__(self, shared: Path) -> None:
        self.lock = FileLock(shared / "loader.lock")
        # In the folder of temporary files itself: the path of a socket is short.
        name = hashlib.sha256(str(shared).encode()).hexdigest()[:12]
        self.place = Path(tempfile.gettempdir()) / f"dmx-loader-{name}"
        self.own: subprocess.Popen | None = None

    def load(self, job: str) -> str:
        """What is wrong with the folder of a job."""
        with self.lock:
            try:
                return self._asked(job)
            except (OSError, EOFError):  # no worker has started it, or the one that did has ended
                self._start()
            return self._asked(job)

    def _asked(self, job: str) -> str:
        with Client(str(self.place), "AF_UNIX") as loader:
            loader.send(job)
            return loader.recv()

    def _start(self) -> None:
        for left in (self.place, Path(f"{self.place}~")):
            left.unlink(missing_ok=True)
        self.own = subprocess.Popen(
            [sys.executable, "-P", "-c", _WORKER, _fresh_load.__file__, str(self.place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=verify.environment(),
        )
        while not self.place.exists():
            assert self.own.poll() is None, "the loader's process died"
            time.sleep(0.02)

    def end(self) -> None:
        if self.own is not None:
            self.own.kill()
            self.own.communicate()
            self.place.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def _loader(shared_folder):
    loader = _Loader(shared_folder)
    yield loader
    loader.end()


@pytest.fixture
def loaded_apart(monkeypatch, _loader):
    """Exports of this test are verified in `_loader`'s process instead of one each."""
    monkeypatch.setattr(verify, "_run", lambda command, folder: _loader.load(command[-1]) or None)
