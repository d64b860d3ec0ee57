"""A disk that is full, a folder without rights, too little memory, and files that would run code."""

import contextlib
import itertools
import json
import os
import pickle
import resource
import subprocess
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dmx
from dmx.errors import ModelError, RunError
from dmx.exporting import load_exported
from dmx.models import ModelConfig, TinyConfig, byte_tokenizer, load_model
from dmx.models.memory import is_out_of_memory
from dmx.models.tiny import make_tiny
from experiments import search
from experiments.running import bench
from mor.config import MorError
from mor.training.run import CHECKPOINT, TrainingRun
from tests.forked import Forked
from tests.settings import TINY, search_config

BATCHES = list(torch.randint(0, 257, (3, 2, 32), generator=torch.Generator().manual_seed(3)))


# ---------------------------------------------------------------- disks


@contextlib.contextmanager
def files_of_at_most(size):
    """What a quota or a full disk does to a file that grows beyond it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("name", "size"), [("differentiable", 400), ("kl", 200)])
def test_a_full_disk_is_said_and_room_brings_the_same_result(
    tiny_random, tmp_path, capsys, name, size
):
    # capsys: the progress is kept in memory, not in a file that must not grow either
    options = {"steps": 4, "checkpoint_every": 2} if name == "differentiable" else {}
    config = search_config(name=name, **options)

    def found(folder):
        return dmx.search(tiny_random.model, BATCHES, dmx.Budget(5.0), config, folder=folder)

    with files_of_at_most(size), pytest.raises(RunError, match=r"cannot write .*has room"):
        found(tmp_path / "full")
    left = [p for p in (tmp_path / "full").rglob("*") if p.is_file()]
    assert not [p for p in left if p.suffix == ".tmp"], "nothing half-written stays"
    again, whole = found(tmp_path / "full"), found(tmp_path / "whole")
    assert again.assignment.formats == whole.assignment.formats
    np.testing.assert_array_equal(again.preference, whole.preference)


def test_an_assignment_that_has_no_room_leaves_the_old_one(tiny_random, tmp_path):
    config = search_config(name="random")
    made = dmx.search(tiny_random.model, BATCHES, dmx.Budget(5.0), config).assignment
    path = made.save(tmp_path / "a.json")
    before = path.read_bytes()
    with files_of_at_most(100), pytest.raises(RunError, match=r"cannot write .*a\.json"):
        made.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


AS_ORDINARY_USER = """
import os, sys
from pathlib import Path
from dmx.errors import RunError
from dmx.files import write_text
from experiments.running.folder import claim
if os.geteuid() == 0:
    os.setuid(65534)
for use in (lambda f: write_text(f / "a", "x"), lambda f: claim(f, "a: 1"), lambda f: claim(f / "new", "a: 1")):
    try:
        use(Path(sys.argv[1]))
        print("written")
    except RunError as error:
        print(error)
"""


def test_a_folder_without_rights_is_said_to_an_ordinary_user(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        with contextlib.suppress(PermissionError):
            parent.chmod(parent.stat().st_mode | 0o005)
    process = Forked("-c", AS_ORDINARY_USER, folder)
    out, err = process.communicate()
    said = out.splitlines()
    assert len(said) == 3 and all("Permission denied" in line for line in said), out + err
    assert all("hoose a" in line for line in said) and not list(folder.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_file_system_that_fills_up_is_said_and_room_brings_the_same_result(
    tiny_random, tmp_path, small_disk
):
    config = search_config(name="differentiable", steps=4, checkpoint_every=2)

    def found(folder):
        return dmx.search(tiny_random.model, BATCHES, dmx.Budget(5.0), config, folder=folder)

    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    filler.write_bytes(bytes(filler.stat().st_size - 4096))  # room for the first small file
    with pytest.raises(RunError, match=r"cannot write .*No space left.*has room"):
        found(small_disk / "run")
    left = [p.name for p in (small_disk / "run").rglob("*") if p.is_file()]
    assert not [name for name in left if name.endswith(".tmp")], "nothing half-written stays"
    filler.unlink()
    again, whole = found(small_disk / "run"), found(tmp_path / "whole")
    np.testing.assert_array_equal(again.preference, whole.preference)


# ---------------------------------------------------------------- clocks


def test_a_wall_clock_that_jumps_back_breaks_neither_times_nor_going_on(run, tmp_path, monkeypatch):
    settings = [*TINY, "search=differentiable", "baselines=[]", "search.steps=4"]
    settings += ["search.descent.checkpoint_every=1", f"run.folder={tmp_path}/run"]
    now = itertools.count(2_000_000_000, -86_400)  # a day back each time that somebody looks
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    own = bench.search
    stopped = []

    def stops_once(*args, **named):
        found = own(*args, **named)
        if not stopped:
            stopped.append(found)
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(bench, "search", stops_once)
    assert run(search, *settings)[0] == 130
    code, _, err = run(search, *settings)
    assert code == 0, err
    record = json.loads((tmp_path / "run/record.json").read_text())
    assert 0 < record["wall_seconds"] < 600
    assert 0 < record["results"][0]["search_seconds"] < 600
    rows = [json.loads(row) for row in (tmp_path / "run/history.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert len(stopped) == 1


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nmore"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"
        ),
        MemoryError("Unable to allocate 9 GiB"),
    ],
)
def test_too_little_memory_says_what_to_set_lower(error, run, monkeypatch, tmp_path):
    def fail(*_args, **_named):
        raise error

    monkeypatch.setattr(bench, "search", fail)
    code, out, err = run(search, *TINY, "baselines=[]", f"run.folder={tmp_path}/run")
    assert code == 2 and "Set one of these lower: calibration.batch_size" in err and not out
    assert "Traceback" not in err and (tmp_path / "run/error.json").exists()


def test_another_error_of_torch_is_not_one_of_memory():
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


# ---------------------------------------------------------------- code in files


class Runs:
    """A pickle that makes a folder when it is read."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_checkpoint_is_data_and_never_executed(tmp_path):
    trap = tmp_path / "executed"
    torch.save({"identity": {}, "model": Runs(trap)}, tmp_path / CHECKPOINT)
    run = SimpleNamespace(path=tmp_path / CHECKPOINT, identity={}, has_mor=False)
    with pytest.raises(MorError, match="is damaged"):
        TrainingRun.resume(run)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Runs(trap)))
    assert trap.exists(), "the trap works"


def test_pickled_weights_are_data_and_never_executed(tmp_path):
    trap = tmp_path / "executed"
    folder = tmp_path / "model"
    model = make_tiny(TinyConfig())
    model.config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    torch.save({**model.state_dict(), "lm_head.weight": Runs(trap)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(ModelConfig(id=str(folder), dtype="float32"))
    assert not trap.exists()


@pytest.mark.parametrize("load", ["model", "export"])
def test_code_that_a_model_brings_is_never_executed(tmp_path, load):
    trap, folder = tmp_path / "executed", tmp_path / "model"
    make_tiny(TinyConfig()).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(trap)!r})\nclass OwnConfig: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    if load == "export":
        config["quantization_config"] = {"quant_method": "quark"}
    (folder / "config.json").write_text(json.dumps(config))
    read = load_exported if load == "export" else lambda f: load_model(ModelConfig(id=str(f)))
    with pytest.raises(ModelError, match="code of its own, which is never run"):
        read(folder)
    assert not trap.exists()
