"""Commands that are killed at random moments and started again give what an undisturbed one gives.

    python -m tests.kills --times 20 [--case search]

Each time a run is killed once, at a moment drawn evenly from the time that an undisturbed one takes, and started again
until it ends. Prints a line a case. `tests/experiments/test_kills.py` does each once.
"""

import argparse
import hashlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.forked import Forked
from tests.settings import TINY, TINY_LAYERS

_STEPS = ["search.steps=12", "search.descent.checkpoint_every=2", "search.descent.evaluate_every=5"]
_NONE = ["baselines=[]"]
CASES: dict[str, tuple[str, list[str]]] = {
    "search": ("search", [*TINY, "search=differentiable", *_STEPS, "baselines=[bf16]"]),
    "scan": ("search", [*TINY, "search=kl_per_bit", *_NONE]),
    "compare": (
        "compare",
        [*TINY_LAYERS, "searches=[fisher,differentiable]", "budgets=[4.7]", *_NONE, *_STEPS[:2]],
    ),
    "gptq": ("search", [*TINY, "search=fisher", "weights=gptq", *_NONE]),
    "learned": (
        "search",
        [
            *(*TINY, "search=fisher", "weights=learned", *_NONE),
            *("learn.steps=6", "learn.warmup=1", "learn.lr=1e-3", "learn.checkpoint_every=2"),
        ],
    ),
    "train": (
        "train_mor",
        [
            *("model=tiny_random", "data=embedded", "run.device=cpu", "model.tiny.layers=1"),
            *("mor=[bf16,tensor]", "train.max_steps=6", "train.window=32", "train.batch_size=4"),
            *("train.validation_windows=4", "train.checkpoint_every=2"),
            *("data.calibration.max_characters=20000", "data.evaluation.max_characters=4000"),
        ],
    ),
    "export": (
        "export",
        [
            *("model=tiny_random", "data=synthetic", "run.device=cpu"),
            *("assignment=mxfp4", "target=quark", "verify=false"),
        ],
    ),
}
"""Name -> command and its settings."""


def outcome(folder: Path) -> dict[str, Any]:
    """What two equal runs have in common: everything but times, and hashes of tensors."""
    record = json.loads((folder / "record.json").read_text())
    found: dict[str, Any] = {"results": _timeless(record["results"])}
    for path in sorted(folder.rglob("*.json")):
        if path.name.startswith("assignment"):
            found[str(path.relative_to(folder))] = _timeless(json.loads(path.read_text()))
    for path in sorted(folder.rglob("*.safetensors")):
        if "state" not in str(path.relative_to(folder)):
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _timeless(part)
            for key, part in value.items()
            if not key.endswith(("seconds", "tokens_per_second", "time"))
        }
    return [_timeless(part) for part in value] if isinstance(value, list) else value


def start(case: str, folder: Path) -> Forked:
    command, settings = CASES[case]
    return Forked("-m", f"experiments.{command}", *settings, f"run.folder={folder}")


def undisturbed(case: str, folder: Path) -> tuple[dict[str, Any], float]:
    """Outcome of a run that nobody kills, and its seconds."""
    Forked("-c", "pass").wait()  # what all of them share takes longer than a run
    began = time.monotonic()
    process = start(case, folder)
    assert process.wait(600) == 0, process.outputs()[1][-2000:]
    return outcome(folder), time.monotonic() - began


def killed(case: str, folder: Path, now: Callable[[], bool]) -> tuple[dict[str, Any], bool]:
    """Outcome of a run that was killed once `now` says so, and whether it still ran then."""
    process = start(case, folder)
    while process.poll() is None and not now():
        time.sleep(0.005)
    was_alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = start(case, folder)
    assert again.wait(600) == 0, again.outputs()[1][-2000:]
    return outcome(folder), was_alive


def try_case(case: str, times: int, seed: int) -> tuple[int, int]:
    """How many of so many kills gave the undisturbed outcome, and how many hit a run that lived."""
    draw = random.Random(seed)
    same = alive = 0
    with tempfile.TemporaryDirectory() as top:
        expected, seconds = undisturbed(case, Path(top) / "whole")
        for number in range(times):
            end = time.monotonic() + draw.uniform(0.05, seconds)
            folder = Path(top) / str(number)
            found, was_alive = killed(case, folder, lambda end=end: time.monotonic() > end)  # type: ignore[misc]
            same += found == expected
            alive += was_alive
            if found != expected:
                print(f"{case}: kill {number} gave another outcome", file=sys.stderr)
    return same, alive


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit code 1 where an outcome differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args(arguments)
    failed = False
    for case in a.case or CASES:
        same, alive = try_case(case, a.times, a.seed)
        failed |= same < a.times
        print(f"{case:8} {same} of {a.times} as undisturbed; {alive} hit a living run", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
