"""Mixed assignments, and the loaders of other projects in this process where that is enough."""

import contextlib
import importlib.util
import io
import traceback

import numpy as np
import pytest

from dmx.assignment import make_assignment
from dmx.budget import build_space
from dmx.exporting import _fresh_load, verify
from dmx.exporting.compressed_tensors import FORMAT_NAMES
from dmx.exporting.quark import DTYPES
from dmx.formats import MX_FORMATS, MXFP4, MXFP8_E4M3

HELD = {
    "compressed_tensors": tuple(FORMAT_NAMES), "quark": tuple(DTYPES), "torchao": MX_FORMATS
}  # fmt: skip
VLLM = (MXFP4, MXFP8_E4M3)


def mixed(model, formats, units="layer", **options):
    """Every format in turn, in the order of the units."""
    space = build_space(model, formats, units=units, **options)
    return make_assignment(space, np.arange(len(space.units)) % len(formats), model)


def needs(package):
    module = verify.MODULES[package]
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"needs {package}: pip install 'dmx[export]'",
    )


@pytest.fixture
def loaded_here(monkeypatch):
    """Loaders run in this process: their packages are imported once, not for every folder."""

    def run(command, folder):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                _fresh_load.main(command[-1])
        except Exception:
            return traceback.format_exc()
        return None

    monkeypatch.setattr(verify, "_run", run)
