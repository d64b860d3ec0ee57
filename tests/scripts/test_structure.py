"""The counts of docs/architecture.md, on a checkout small enough to count by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "structure.py"


@pytest.fixture
def structure():
    spec = importlib.util.spec_from_file_location("structure", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["structure"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["structure"]


@pytest.fixture
def checkout(tmp_path):
    files = {
        "dmx/__init__.py": "from dmx.low import one\n",
        "dmx/low.py": 'def one():\n    """Documented."""\n\n\ndef two():\n    pass\n',
        "dmx/part/high.py": "def _own():\n    from ..low import one\n    x = 1  # fmt: skip\n",
        "mor/base.py": "import dmx.part.high\n",
        "experiments/run.py": "class Run:\n    def go(self):\n        pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_counts_of_a_small_checkout(structure, checkout):
    counts = structure.measure(checkout, ("dmx", "mor"))
    assert counts["files"] == "4" and counts["rings"] == "0" and counts["format-off marks"] == "1"
    assert counts["arrows between modules"] == "3"  # dmx, part.high and mor.base have one each
    assert counts["public functions documented"] == "50% of 2"


def test_a_ring_is_found(structure, checkout):
    (checkout / "dmx/low.py").write_text("def one():\n    import dmx.part.high\n")
    assert structure.measure(checkout, ("dmx",))["rings"] == "1"
