"""Shared by all tests: thread limit, devices, seeded randomness, tiny models, local data."""

import copy
import gc
import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from dmx.models import LoadedModel, ModelConfig, TinyConfig, load_model
from experiments.reporting.record import Record
from tests.quick import make_commands_quick

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # workers side by side would fight over the cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Modules with long tests first: one that begins last keeps the other worker waiting.
    long = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in long)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, none is here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # imports and tests stay


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def dmx_data() -> Path:
    """The folder of local data sets."""
    if not os.environ.get("DMX_DATA"):
        pytest.skip("needs local copies of the data sets: set DMX_DATA to their folder")
    return Path(os.environ["DMX_DATA"])


@pytest.fixture
def no_dmx_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DMX_DATA", raising=False)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hub is out of reach, whatever this machine can reach."""
    import datasets  # noqa: F401  (reads the switch once, at import: not while it is set here)

    from dmx.hub import hub_is_reachable

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub_is_reachable.cache_clear()
    yield
    hub_is_reachable.cache_clear()


MakeTiny = Callable[..., LoadedModel]


@pytest.fixture(scope="session")
def _tiny_models() -> dict[str, LoadedModel]:
    return {}


def _trained_once(config: ModelConfig, folder: Path) -> LoadedModel:
    """The model that the first worker to need it trains and leaves in `folder` for the others."""
    path = folder / f"{hashlib.sha256(repr(config).encode()).hexdigest()}.pt"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            torch.save(load_model(config), path)
        return torch.load(path, weights_only=False)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this run of pytest; all its workers see it."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture
def make_tiny(_tiny_models: dict[str, LoadedModel], shared_folder: Path) -> MakeTiny:
    """make_tiny("qwen3", train_steps=100, hidden_size=32): a model of the test's own, on CPU.

    Made once a session for equal arguments, and trained once for all workers; each call returns a
    fresh copy.
    """

    def make(architecture: str = "llama", dtype: str = "float32", **tiny: int) -> LoadedModel:
        key = f"{architecture} {dtype} {sorted(tiny.items())}"
        if key not in _tiny_models:
            config = TinyConfig(architecture=architecture, **tiny)
            model = ModelConfig(id=f"tiny_{architecture}", dtype=dtype, tiny=config)
            trained = tiny.get("train_steps", 0) > 0
            _tiny_models[key] = (
                _trained_once(model, shared_folder) if trained else load_model(model)
            )
        kept = _tiny_models[key]
        return LoadedModel(copy.deepcopy(kept.model), kept.tokenizer, dict(kept.provenance))

    return make


@pytest.fixture
def tiny_random(make_tiny: MakeTiny) -> LoadedModel:
    """Random weights: for plumbing."""
    return make_tiny("llama")


@pytest.fixture
def tiny_trained(make_tiny: MakeTiny) -> LoadedModel:
    """Trained for a few seconds: its layers differ in how much a format hurts.

    The one trained model of all tests: each kind more takes ten seconds of its own.
    """
    return make_tiny("llama", train_steps=300)


@pytest.fixture
def record_of():
    """The record of a run's folder, read as strictly as a report reads it."""
    return lambda folder: Record.load(folder / "record.json")


@pytest.fixture
def run(monkeypatch, capfd):
    """run(search, "budget=bits_4p5", ...) -> (exit code, standard output, standard error)."""
    make_commands_quick(monkeypatch.setattr)

    def command(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        code = 0
        try:
            module.main()
        except SystemExit as error:
            code = error.code
        out, err = capfd.readouterr()
        return code, out, " ".join(err.split())

    return command
