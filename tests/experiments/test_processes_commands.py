"""Commands on several processes: what they leave, what a killed one does to the others, and how the run goes on."""

import json
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from dmx.errors import RunError
from experiments.reporting.record import Record
from experiments.running import watch
from experiments.running.run import Run
from experiments.running.settings import CalibrationConfig, ConfigError, RunConfig, SearchingRun
from tests.forked import Forked, places
from tests.settings import TINY

pytestmark = pytest.mark.slow

SEARCH = [
    *(
        *TINY,
        "search=exact",
        "baselines=[bf16,kl_per_bit]",
        "weights=gptq",
        "baseline_weights=nearest",
    ),
    *("search.steps=12", "search.descent.checkpoint_every=2"),
]


def start(folder, environment=None):
    arguments = ("-m", "experiments.search", *SEARCH, f"run.folder={folder}")
    return Forked(*arguments, environment=environment)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of a run of two processes that nobody disturbed, and what each said."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    processes = [start(folder, place) for place in places(2)]
    said = []
    for process in processes:
        assert process.wait(300) == 0, process.outputs()[1][-2000:]
        said.append(process.outputs())
    return folder, said


def test_the_main_process_alone_tells_and_writes(whole):
    folder, said = whole
    assert said[1] == ("", "") and "bf16" in said[0][0]
    record = Record.load(folder / "record.json")
    assert record.actual["processes"] == 2
    rows = {path.name for path in (folder / "rows").iterdir()}
    names = ("bf16", "kl_per_bit-W+A", "assignment-W+A", "assignment.gptq-W+A")
    assert rows == {f"{name}.json" for name in names} and len(record.rows) == len(rows)
    assert not list(folder.rglob("*.tmp")) and not (folder / "error.json").exists()


# As `accelerate launch --use_fsdp --fsdp_version 2` sets it.
SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
}


def test_a_killed_process_ends_the_others_and_one_goes_on_to_the_same_numbers(whole, tmp_path):
    """Those that are killed shard the weights; the one that goes on has all of them."""
    folder = tmp_path / "run"
    main, other = (start(folder, place | SHARDED) for place in places(2))
    other.kill_once((folder / "search_state.safetensors").exists)
    began = time.monotonic()
    assert main.wait(60) == 2, main.outputs()[1][-2000:]
    assert time.monotonic() - began < 60
    message = main.outputs()[1]
    assert "LostProcess: rank 1 of 2 (process" in message and "is gone without a word" in message
    assert "weights are sharded over 2 processes (FSDP2); no CUDA graphs" in message
    assert "rank 1 of 2" in json.loads((folder / "error.json").read_text())["error"]
    steps = len((folder / "history.jsonl").read_text().splitlines())
    assert 0 < steps < 12
    again = start(folder)
    assert again.wait(300) == 0, again.outputs()[1][-2000:]
    two, one = (Record.load(path / "record.json") for path in (whole[0], folder))
    assert "processes" not in one.actual
    for a, b in zip(two.rows, one.rows, strict=True):
        assert a.method == b.method
        # Rounding of sums alone, and weights of GPTQ that lie between two values.
        assert b.nll == pytest.approx(a.nll, rel=1e-3 if "gptq" in a.label else 1e-5), a.label
    for name in ("assignment.json", "kl_per_bit.json"):
        formats = [json.loads((path / name).read_text())["formats"] for path in (whole[0], folder)]
        assert formats[0] == formats[1] and len(set(formats[0].values())) == 2
    histories = [
        [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]
        for path in (whole[0], folder)
    ]
    for a, b in zip(*histories, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)


class Together:
    """Two of three processes of a run, in one: what all agree on goes from one thread to the other."""

    def __init__(self, monkeypatch):
        self.agreed, self.said, self.exits = queue.Queue(), [], []
        monkeypatch.setattr(watch, "GRACE", 0.2)
        monkeypatch.setattr(watch.os, "_exit", self.exits.append)
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        with ThreadPoolExecutor() as threads:
            self.main, self.other = threads.map(self.one, range(2))

    def one(self, rank):
        def agree(make):
            if rank == 0:
                self.agreed.put(make())
                return self.agreed.queue[0]
            return self.agreed.get(timeout=10)

        processes = SimpleNamespace(rank=rank, size=2, is_main=rank == 0, agree=agree)
        return watch.Watch(processes, lambda lost: self.said.append((rank, str(lost))))

    def wait_for_exit(self):
        deadline = time.monotonic() + 10
        while not self.exits and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.exits == [2]


def test_an_error_of_one_process_is_said_by_the_other_which_then_ends(monkeypatch):
    two = Together(monkeypatch)
    two.other.leave(ValueError("no text."))
    two.wait_for_exit()
    ((rank, text),) = two.said
    assert rank == 0 and text.startswith("rank 1 of 2 (process")
    assert text.endswith("stopped: ValueError: no text. All processes of the run end with it.")
    with pytest.raises(watch.LostProcess, match="no text"):  # what its loss makes elsewhere
        two.main.leave(RuntimeError("connection closed by peer"))


def test_processes_that_end_well_leave_nothing_to_say(monkeypatch):
    two = Together(monkeypatch)
    two.other.leave(None)
    two.main.leave(None)
    time.sleep(0.5)
    assert not two.said and not two.exits


def test_what_several_processes_cannot_do_is_refused_with_the_setting():
    asked = SimpleNamespace(calibration=CalibrationConfig(batch_size=4))
    training = CalibrationConfig(batch_size=6)
    SearchingRun.check_shared(asked, 2, training)
    with pytest.raises(
        ConfigError, match=r"training\.batch_size=6: 4 processes share .* multiple of 4"
    ):
        SearchingRun.check_shared(asked, 4, training)
    with pytest.raises(ConfigError, match="export runs in one process, and here are 3"):
        Run.alone(SimpleNamespace(processes=SimpleNamespace(size=3)), "export")


def test_how_weights_are_sharded_is_asked_of_the_setting_and_of_accelerate(monkeypatch):
    assert not RunConfig(shard="on").shards()  # one process has nothing to share
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert RunConfig(shard="on").shards() and not RunConfig().shards()
    for name, value in SHARDED.items():
        monkeypatch.setenv(name, value)
    assert RunConfig().shards()
    with pytest.raises(ConfigError, match=r"run\.shard=off: accelerate was started"):
        RunConfig(shard="off").shards()
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(RunError, match="--fsdp_version 1: weights are sharded by FSDP2 alone"):
        RunConfig().shards()
    run = SimpleNamespace(shards=True, processes=SimpleNamespace(size=2))
    with pytest.raises(ConfigError, match="train_mor needs whole weights, and those of this run"):
        Run.unsharded(run, "train_mor")


@pytest.mark.gpu
def test_one_named_gpu_for_two_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"run\.device=cuda:0 names one GPU for 2 processes"):
        RunConfig(device="cuda:0").torch_device()
