"""Mixed assignments, and the loaders of other projects in this process where that is enough."""

import ast
import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch

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
import pathlib, runpy, sys, traceback
# amd-quark parses every model of transformers for mixtures of experts, 20 s; none is loaded here.
rglob = pathlib.Path.rglob
pathlib.Path.rglob = lambda self, pattern: [] if pattern == "modeling_*.py" else rglob(self, pattern)
load = runpy.run_path(sys.argv[1])["main"]
for line in sys.stdin:
    try:
        load(line.strip())
        said = ""
    except Exception:
        said = traceback.format_exc()
    print("done", repr(said), flush=True)
"""


@pytest.fixture
def model(make_tiny):
    return make_tiny("llama", dtype="bfloat16").model


@pytest.fixture
def batches(generator):
    return [torch.randint(0, 256, (2, 16), generator=generator) for _ in range(2)]


@pytest.fixture(scope="session")
def _loader():
    """A fresh process that knows nothing of dmx, and loads one folder after another: what a
    loader's package takes to import (amd-quark ten seconds) is paid once."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _WORKER, _fresh_load.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd="/",
        env=verify.environment(),
    )
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def loaded_apart(monkeypatch, _loader):
    """Exports of this test are verified in `_loader`'s process instead of one each."""

    def run(command, folder):
        print(command[-1], file=_loader.stdin, flush=True)
        for line in _loader.stdout:
            if line.startswith("done "):
                return ast.literal_eval(line.removeprefix("done ")) or None
        raise AssertionError("the loader's process died")

    monkeypatch.setattr(verify, "_run", run)
