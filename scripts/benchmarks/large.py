"""The whole path on a model of 8 B or 32 B shape, stage by stage: what docs/results/large.md shows.

    python -m scripts.benchmarks.large --shape 8b --card 80 --json large_h200.json      # all stages, the model whole on the card
    python -m scripts.benchmarks.large --shape 8b --memory block --card 40 --stages search --steps 10 --json large_h200.json
    python -m scripts.benchmarks.large --shape 32b --memory block --stages search --steps 3 --json large_h200.json

A run joins those that the record has already; the record is written after each stage.

Weights are made in place, of pieces of one random tensor: no file, and no second copy. `--card` leaves the process so many
GiB of the card. Stages after the search use what it found, or where it did not run, a random assignment.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dmx
from dmx.errors import RunError
from dmx.files import check_writable, read_json, write_json
from dmx.models.streaming import MEMORIES, stream_blocks, stream_of
from dmx.searching.config import DescentConfig
from experiments.reporting.pages.large import SCHEMA
from scripts.benchmarks.machine import MIB, clear, machine, peak_mib, say, wait
from scripts.benchmarks.shapes import NAMED, Shape, llama_config, make_tokens

STAGES = ("scan", "fisher", "search", "gptq", "learn", "export")
PIECE = 1 << 24
"""Elements of the random tensor."""


def fill(parameter: nn.Parameter, piece: Tensor) -> None:
    """Norms are ones, the others the piece again and again."""
    if parameter.ndim == 1:
        parameter.data.fill_(1.0)
        return
    flat = parameter.data.view(-1)
    for part in flat.split(len(piece)):
        part.copy_(piece[: len(part)])


def make_large(shape: Shape, device: str, memory: str) -> nn.Module:
    """bf16, in eval mode: whole on the device, or held block by block."""
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = llama_config(shape)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    place = "cpu" if memory == "block" else device
    generator = torch.Generator(place).manual_seed(0)
    piece = torch.randn(PIECE, generator=generator, device=place, dtype=torch.float32)
    piece = (0.02 * piece).bfloat16()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                made = nn.Parameter(torch.empty_like(parameter, device=place), requires_grad=False)
                fill(made, piece)
                module._parameters[name] = made
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(place)
    model.tie_weights()
    if memory == "block":
        stream_blocks(model, device)
    return model.eval()


class WholePath:
    """The stages on one model."""

    def __init__(self, model: nn.Module, shape: Shape, steps: int, is_tiny: bool) -> None:
        self.model, self.steps = model, steps
        rows, length = (2, 32) if is_tiny else (8, 1024)
        self.scanned = [make_tokens(shape, rows, length)]
        self.batches = [make_tokens(shape, 2, length, seed) for seed in range(4 if is_tiny else 32)]
        self.assignment: dmx.Assignment | None = None

    def chosen(self) -> dmx.Assignment:
        if self.assignment is None:
            config = dmx.SearchConfig(name="random")
            self.assignment = self.searched(self.batches[:1], config)
        return self.assignment

    def searched(self, batches: list[Tensor], config: dmx.SearchConfig) -> dmx.Assignment:
        return dmx.search(self.model, batches, dmx.Budget(5.0), config).assignment

    def scan(self) -> None:
        self.searched(self.scanned, dmx.SearchConfig(name="kl_per_bit"))

    def fisher(self) -> None:
        self.searched(self.scanned, dmx.SearchConfig(name="fisher", micro_batch=1))

    def search(self) -> None:
        descent = DescentConfig(raw_start=1.0, evaluate_every=50)
        config = dmx.SearchConfig(steps=self.steps, objective="kl", descent=descent, oom="halve")
        self.assignment = self.searched(self.batches, config)

    def gptq(self) -> None:
        dmx.gptq(self.model, self.chosen(), self.batches[:8])

    def learn(self) -> None:
        config = dmx.LearnConfig(steps=0, block_steps=self.steps, held_batches=1)
        self.assignment = dmx.learn_weights(self.model, self.chosen(), self.batches, config)

    def export(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="dmx-large-"))
        try:
            dmx.export(self.model, self.chosen(), folder / "model", target="quark", verify=False)
        finally:
            shutil.rmtree(folder)


def measured(stage: str, run: Callable[[], None], model: nn.Module, device: str) -> dict[str, Any]:
    """Seconds, peak memory and bytes copied of one stage; why it ended, where it did not end well."""
    stream = stream_of(model)
    before = 0 if stream is None else stream.moved_bytes
    clear(device)
    started, failed = time.perf_counter(), None
    try:
        run()
    except torch.OutOfMemoryError as error:
        failed = str(error).partition("\n")[0]
    wait(device)
    row: dict[str, Any] = {"stage": stage, "seconds": time.perf_counter() - started}
    peak = peak_mib(device)
    row["peak_gib"] = None if peak is None else peak * MIB / (1 << 30)
    if stream is not None:
        row["copied_gb"] = (stream.moved_bytes - before) / 1e9
    return row | ({"failed": failed} if failed else {})


def runs_of(path: Path) -> list[dict[str, Any]]:
    """Of the record that is there.

    Raises:
        RunError: the file is none, or cannot be written.
    """
    check_writable(path.parent, "--json")
    if not path.exists():
        return []
    try:
        body = read_json(path)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} cannot be read ({error}). Delete it, or name another file"
        ) from error
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        raise RunError(f"{path} is no record of this benchmark ({SCHEMA}). Name another file")
    runs = body.get("runs")
    if not isinstance(runs, list):
        raise RunError(
            f"{path} has no list `runs`, which a record of this benchmark has. Delete it, or name another file"
        )
    return runs


def parse(device: str) -> argparse.Namespace:
    """What cannot be measured or written is refused before a model is made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=list(NAMED), default="8b")
    parser.add_argument("--memory", choices=MEMORIES, default="all")
    parser.add_argument("--stages", nargs="+", choices=STAGES)
    parser.add_argument("--steps", type=int, default=200, help="of the search, and of each block")
    parser.add_argument("--card", type=float, help="GiB of the card that the process may use")
    parser.add_argument(
        "--json", type=Path, required=True, help="a record, which gets one run more"
    )
    asked = parser.parse_args()
    if asked.steps < 1:
        parser.error(f"--steps {asked.steps}: at least 1")
    if asked.card is not None and device == "cpu":
        parser.error(f"--card {asked.card:g}: there is no card here. Leave it out")
    try:
        asked.runs = runs_of(asked.json)
    except RunError as error:
        parser.error(f"--json {asked.json}: {error}")
    return asked


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = parse(device)
    if asked.card is not None:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, asked.card * (1 << 30) / whole))
    shape = NAMED[asked.shape]
    stages: list[dict[str, Any]] = []
    run = {"machine": machine(device), "shape": shape.name, "memory": asked.memory}
    run |= {"steps": asked.steps, "card": asked.card, "stages": stages}

    def note(row: dict[str, Any]) -> None:
        stages.append(row)
        write_json(asked.json, {"schema": SCHEMA, "runs": [*asked.runs, run]})
        say(json.dumps(row))

    started = time.perf_counter()
    model = make_large(shape, device, asked.memory)
    wait(device)
    note({"stage": "make", "seconds": time.perf_counter() - started})
    if (stream := stream_of(model)) is not None:
        say(stream.describe())
    path = WholePath(model, shape, asked.steps, asked.shape == "tiny")
    # An export takes the model from a folder, whole.
    default = STAGES if asked.memory == "all" else STAGES[:-1]
    for stage in asked.stages or default:
        note(measured(stage, getattr(path, stage), model, device))


if __name__ == "__main__":
    main()
