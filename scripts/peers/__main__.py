"""Searches of other tools and ours on one model, tokens, candidates, units and budget; one record a cell, as it comes.

    python -m scripts.peers smollm2_135m_instruct_gguf --out outputs/peers --device cpu --dtype float32 \\
        --peers ours auto_round:auto_scheme --family mxfp4 mxfp8_e4m3 --budgets 5.0 --tokens 512 --windows 8
    python -m scripts.peers path/to/model --out outputs/peers --device cuda --peers ours modelopt auto_round \\
        --family mxfp4 mxfp8_e4m3 --family mxfp4 mxfp6_e2m3 mxfp8_e4m3 --budgets 4.5 5.0 5.5 --tasks all

MODEL is a file of configs/model, or a folder. Peers run in environments of their own (`make peers`). Started again, it
goes on: a cell that has its record.json is shown, one that failed is tried again. Several processes may have one --out
(--at-once 8 starts them): a cell that another runs is left to it, and what it follows from is waited for. Seconds are then
taken beside other work, and records say beside how much. Records for docs/results/peers.md:
python -m scripts.publish_record OUT/cells/NAME peers_NAME.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from dmx.errors import DmxError, RunError
from dmx.evaluate.zero_shot import TASKS
from dmx.files import check_writable, write_json
from dmx.formats import BF16, SCALE_RULES, get_family
from dmx.models import ModelConfig, max_positions, meta_model
from dmx.models.dtype import DTYPES
from experiments.reporting.record import Record, Row
from experiments.running.cards import VISIBLE, visible_cards
from experiments.running.provenance import device_facts, peak_memory_bytes, time_text, versions
from experiments.running.settings import (
    CONFIGS,
    MOST_SEED,
    ConfigError,
    EvalConfig,
    EvaluationConfig,
    RunConfig,
)

from ..claiming import claimed
from ..least import check_least
from .answers import assignment_of, check_readable, finished_weights, weight_rule
from .bench import Bench
from .protocol import (
    ANSWER,
    COMPILE,
    FAILURE,
    INPUTS,
    PLUGINS,
    PUBLISHED,
    REQUEST,
    ROTATED,
    WEIGHTS,
    Answer,
    Request,
    end_with,
    ending_with_this,
)
from .rotated import RotatedParts
from .texts import NAMES, read_texts
from .tools import LEARN_INPUTS, PEERS, ROOT, RULE, asked, check_can, given_pythons, python_of

RECORD = "record.json"
FAILED = "failed.json"
MEASURED = (
    "model", "dtype", "device", "calibration", "evaluation", "token_window", "window", "windows", "rules", "quantized",
    "tasks", "task_limit", "own_windows",
)  # fmt: skip
"""Arguments beside a cell's own that its record depends on."""
LEAST = {
    "seeds": 0, "window": 2, "windows": 1, "batch_size": 1, "task_limit": 1, "own_windows": 0, "at_once": 1, "beside": 0,
}  # fmt: skip
"""Of numbers that are given."""
APART = 0.05
"""nats/token of a window between a tool's own loss and ours of its answer, above which it is warned of; 0.03 was seen, of a
rotated model in bfloat16."""
COUNTS = ("learn_steps", "iters", "steps")
"""Options that are whole numbers, at least 1."""
USUAL = ["mxfp4", "mxfp8_e4m3"]
"""Candidates where none are given."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One peer's method at one point of the grid."""

    peer: str
    method: str
    family: tuple[str, ...]
    limit: float
    tokens: int
    units: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        family = "-".join(f.removeprefix("mxfp")[0] for f in self.family)
        return f"{self.peer}-{self.method}-{family}-{self.limit:g}-{self.tokens}-{self.units}-{self.seed}"

    def of(self, name: str) -> "Cell":
        """The same point for another `PEER:METHOD`."""
        peer, _, method = name.partition(":")
        return Cell(**{**asdict(self), "family": self.family, "peer": peer, "method": method})


def _methods_text() -> str:
    """Which peers, methods and options there are."""
    lines = ["PEER[:METHOD], and which --option it takes:"]
    for peer, of in PEERS.items():
        for name, method in of.methods.items():
            options = [*(f"{n} (needed)" for n in method.needs), *method.takes]
            said = f" ({', '.join(options)})" if options else ""
            lines.append(f"  {peer}:{name}: {method.label}{said}")
    return "\n".join([*lines, "", f"TEXT: {', '.join(NAMES)}"])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.peers",
        description=__doc__,
        epilog=_methods_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a file of configs/model, or a folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), metavar="PEER[:METHOD]")
    parser.add_argument("--family", nargs="+", action="append", help="candidates, cheapest first")
    parser.add_argument("--budgets", nargs="+", type=float, default=[5.0], help="element_bits")
    parser.add_argument("--tokens", nargs="+", type=int, default=[512], help="of calibration")
    parser.add_argument("--token-window", type=int, default=256, help="tokens of a row of them")
    parser.add_argument("--units", default="fused", choices=("fused", "layer"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--device", default="cpu", help="cpu | cuda | auto")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    text: Any = {"choices": NAMES, "metavar": "TEXT"}
    parser.add_argument(
        "--calibration", default="fineweb+c4", help="data set, or data set:split", **text
    )
    parser.add_argument("--evaluation", default="wikitext2:test", help="likewise", **text)
    parser.add_argument("--window", type=int, default=2048, help="tokens of an evaluation window")
    parser.add_argument("--windows", type=int, help="so many of them; default: the whole text")
    parser.add_argument("--batch-size", type=int, default=8, help="windows at once")
    parser.add_argument(
        "--rules", nargs="+", default=["floor", "even"], choices=SCALE_RULES, help="of rows"
    )
    parser.add_argument("--quantized", nargs="+", default=["W+A"], choices=("W+A", "W"))
    parser.add_argument(
        "--tasks", nargs="+", default=[], choices=(*TASKS, "all"), help="zero-shot tasks"
    )
    parser.add_argument("--task-limit", type=int, help="items of each task")
    parser.add_argument(
        "--own-windows", type=int, default=2, help="that a peer measures itself, too"
    )
    parser.add_argument(
        "--option", nargs="+", default=[], metavar="KEY=VALUE", help="of peers alone"
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="cells at once, over the cards by turns"
    )
    parser.add_argument(
        "--beside", type=int, default=0, help="cells that run beside each; records say so"
    )
    parser.add_argument("--ends-with", type=int, help=argparse.SUPPRESS)  # of `end_with`
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="PEER=PATH",
        help="an interpreter that has the tool, in place of .venv-peers",
    )
    return parser.parse_args(arguments)


def model_of(given: argparse.Namespace) -> ModelConfig:
    """The file of configs/model, or a folder.

    Raises:
        RunError: neither is there.
    """
    path = CONFIGS / "model" / f"{given.model}.yaml"
    if path.is_file():
        body: Any = OmegaConf.to_container(OmegaConf.load(path))
        return ModelConfig(**{**body, "dtype": given.dtype})
    if Path(given.model).is_dir():
        return ModelConfig(id=given.model, dtype=given.dtype)
    raise RunError(
        f"{given.model} is no file of {path.parent} and no folder: give one of "
        f"{', '.join(sorted(p.stem for p in path.parent.glob('*.yaml')))}, or a model's folder."
    )


def cells_of(given: argparse.Namespace, options: dict[str, str]) -> Iterator[Cell]:
    """The grid; what a peer cannot be given is said and left out."""
    names = [pair for name in given.peers for pair in asked(name)]
    for seed in given.seeds:
        for tokens in given.tokens:
            for family in given.family or [USUAL]:
                for peer, method in names:
                    if why := check_can(f"{peer}:{method}", family, given.units, list(options)):
                        print(f"{peer}:{method} {why}; left out", flush=True)
                        continue
                    for limit in given.budgets:
                        yield Cell(
                            peer=peer,
                            method=method,
                            family=tuple(family),
                            limit=limit,
                            tokens=tokens,
                            units=given.units,
                            seed=seed,
                        )


def options_of(given: argparse.Namespace) -> dict[str, str]:
    """Of --option.

    Raises:
        RunError: one is no KEY=VALUE, or none of the methods asked for takes it.
    """
    options = {}
    methods = [PEERS[peer].methods[method] for name in given.peers for peer, method in asked(name)]
    known = sorted({key for method in methods for key in (*method.needs, *method.takes)})
    for text in given.option:
        key, is_pair, value = text.partition("=")
        if not is_pair or key not in known:
            raise RunError(
                f"--option {text}: what is asked for takes {', '.join(f'{k}=VALUE' for k in known) or 'none'}."
            )
        if key in options:
            raise RunError(f"--option {key} is given twice, {options[key]} and {value}: give one.")
        options[key] = value
    alone = (BF16.name,)
    for key, known_values in (
        (RULE, SCALE_RULES),
        (INPUTS, alone),
        (LEARN_INPUTS, alone),
        (COMPILE, ("no",)),
    ):
        if (value := options.get(key, known_values[0])) not in known_values:
            raise RunError(
                f"--option {key}={value} must be {' or '.join(known_values)}, where it is given."
            )
    if {INPUTS, LEARN_INPUTS} <= options.keys():
        raise RunError(
            f"--option {LEARN_INPUTS}: {INPUTS}={options[INPUTS]} leaves inputs alone while learning, too. Leave one out."
        )
    for key in options.keys() & set(COUNTS):
        if not (options[key].isascii() and options[key].isdecimal() and int(options[key]) > 0):
            raise RunError(f"--option {key}={options[key]} must be a whole number, at least 1")
    if PUBLISHED in options:
        options[PUBLISHED] = str(published_folder(options[PUBLISHED]))
    return options


def published_folder(given: str) -> Path:
    """Absolute, since a worker does not start where the command does.

    Raises:
        RunError: a plugin is not there.
    """
    folder = Path(given).absolute()
    for plugin in PLUGINS:
        if not (folder / f"{plugin}.py").is_file():
            raise RunError(
                f"--option {PUBLISHED}={given}: there is no {plugin}.py. Give a copy of brevitas_examples/papers/dMX of "
                "Brevitas's repository."
            )
    return folder


def device_of(name: str) -> str:
    """Of --device; `auto` is one of them.

    Raises:
        RunError: it is not there.
    """
    try:
        return str(RunConfig(device=name).torch_device())
    except ConfigError as error:
        raise RunError(str(error).replace("run.device=", "--device ")) from error


def check_tokens(given: argparse.Namespace) -> None:
    """Raise RunError for rows that predict nothing, and for numbers of tokens that are no whole rows."""
    if given.token_window < 2:
        raise RunError(
            f"--token-window {given.token_window}: a row needs at least 2 tokens, to predict one of them."
        )
    if wrong := [n for n in given.tokens if n < 1 or n % given.token_window]:
        raise RunError(
            f"--tokens {wrong[0]}: rows have --token-window {given.token_window} tokens. Give a multiple, or other rows."
        )


def check_numbers(given: argparse.Namespace) -> None:
    """Raise RunError for numbers below what they may be, for candidates that are none, and for budgets outside these."""
    check_least(given, LEAST)
    if (seed := max(given.seeds)) > MOST_SEED:
        raise RunError(f"--seeds {seed} must be at most {MOST_SEED}")
    for names in given.family or [USUAL]:
        formats = get_family(names, setting="--family").formats
        low, high = formats[0].element_bits, formats[-1].element_bits
        for limit in given.budgets:
            if not low <= limit <= high:  # which no NaN is
                raise RunError(
                    f"--budgets {limit:g}: layers of {'/'.join(names)} have {low:g} to {high:g} element_bits. Give a number "
                    f"from {low:g} to {high:g}, or other candidates (--family)."
                )


def check_positions(given: argparse.Namespace, most: int | None) -> None:
    """Raise RunError for rows or windows beyond the positions of the model; None: it states none."""
    for name in ("token_window", "window"):
        length = getattr(given, name)
        if most is not None and length > most:
            raise RunError(
                f"--{name.replace('_', '-')} {length} is longer than the model's {most} positions. Give at most {most}."
            )


class Grid:
    """Runs cells in the output folder."""

    def __init__(
        self,
        given: argparse.Namespace,
        bench: Bench,
        options: dict[str, str],
        pythons: Mapping[str, Path],
    ) -> None:
        self.given, self.bench, self.options, self.pythons = given, bench, options, pythons

    def folder(self, cell: Cell) -> Path:
        return self.given.out / "cells" / cell.name

    def run(self, cell: Cell, *, wait: bool = False) -> Record | None:
        """The record of a cell, read back if it is there. None: another process runs it.

        Args:
            wait: for the other process.

        Raises:
            RunError: the peer failed, its answer cannot be measured, or the folder has the cell of other settings.
        """
        with claimed(self.given.out / "claims" / cell.name, wait=wait) as is_ours:
            return self._run(cell) if is_ours else None

    def _run(self, cell: Cell) -> Record:
        folder, requested = self.folder(cell), self._requested(cell)
        if (folder / RECORD).exists():
            return _same(_read(folder / RECORD), requested, folder)
        # Before a search is run for it: a tool that is missing, a model that cannot be read.
        python_of(cell.peer, self.pythons)
        method = PEERS[cell.peer].methods[cell.method]
        if method.gives == "weights":
            units = self.bench.space(cell.family, cell.units).units
            layers = [layer for unit in units for layer in unit.layers]
            check_readable(self.bench.model, layers, biases=method.holds_biases)
        folder.mkdir(parents=True, exist_ok=True)
        started, clock = time.time(), time.perf_counter()
        formats = None if method.after is None else self._chosen(cell, method.after)
        answer = self._answer(cell, formats)
        actual, rows = self._measured(cell, answer)
        record = Record(
            command="peers",
            started=time_text(started),
            finished=time_text(),
            wall_seconds=time.perf_counter() - clock,
            versions=versions() | {f"peer {k}": v for k, v in answer.versions.items()},
            device=device_facts(torch.device(self.given.device)),
            peak_memory_bytes=peak_memory_bytes(torch.device(self.given.device)),
            seed=cell.seed,
            requested=requested,
            actual=actual,
            model=self.bench.facts,
            data=self.bench.data(self.bench.rows(cell.tokens, cell.seed)),
            results=tuple(rows),
            verdict=None,
            warnings=misread(actual["own"]),
        )
        record.save(folder / RECORD)
        (folder / FAILED).unlink(missing_ok=True)
        return record

    def _requested(self, cell: Cell) -> dict[str, Any]:
        """All that the record of a cell depends on, as its file has it."""
        measured = {name: getattr(self.given, name) for name in MEASURED}
        named = {**asdict(cell), "family": list(cell.family)}
        return {**named, "option": self._all_options(cell), **measured}

    def _options(self, cell: Cell) -> dict[str, str]:
        """Those of --option that the cell's method takes."""
        method = PEERS[cell.peer].methods[cell.method]
        return {k: v for k, v in self.options.items() if k in (*method.needs, *method.takes)}

    def _all_options(self, cell: Cell) -> dict[str, str]:
        """Those, and of weights also those of the method that chose their formats."""
        after = PEERS[cell.peer].methods[cell.method].after
        before = {} if after is None else self._all_options(cell.of(after))
        return before | self._options(cell)

    def _chosen(self, cell: Cell, after: str) -> dict[str, str]:
        """Formats of the method before, which runs first if it has not."""
        record = self.run(cell.of(after), wait=True)
        assert record is not None  # waited for
        return dict(record.actual["formats"])

    def _answer(self, cell: Cell, formats: dict[str, str] | None) -> Answer:
        """The peer's, kept from an earlier start if the same was asked."""
        folder, bench = self.folder(cell), self.bench
        space = bench.space(cell.family, cell.units)
        request = Request(
            method=cell.method,
            model=str(bench.model_folder.absolute()),
            dtype=self.given.dtype,
            device=self.given.device,
            formats=list(cell.family),
            units=[list(unit.layers) for unit in space.units],
            limit=cell.limit,
            seed=cell.seed,
            given=formats,
            own_windows=self.given.own_windows if PEERS[cell.peer].own_rule else 0,
            options=self._options(cell),
        )
        is_same = (folder / REQUEST).exists() and Request.load(folder / REQUEST) == request
        if not (is_same and (folder / ANSWER).exists()):
            # Before the request: an answer is never beside one that it is not of.
            for name in (ANSWER, FAILURE, WEIGHTS, ROTATED):
                (folder / name).unlink(missing_ok=True)
            request.save(folder / REQUEST)
            bench.write_tokens(folder, bench.rows(cell.tokens, cell.seed), request.own_windows)
            run_worker(cell.peer, folder, self.pythons)
        return Answer.load(folder / ANSWER)

    def _measured(self, cell: Cell, answer: Answer) -> tuple[dict[str, Any], list[Row]]:
        """Facts of the answer, and our rows."""
        folder, bench, peer = self.folder(cell), self.bench, PEERS[cell.peer]
        method = peer.methods[cell.method]
        space = bench.space(cell.family, cell.units)
        facts = {"tool": method.label, "seed": cell.seed}
        assignment = assignment_of(answer, space, bench.model, cell.limit, **facts)
        assignment.save(folder / "assignment.json")
        finished, rule = None, None
        options = self._all_options(cell)
        label = method.label
        if INPUTS in options:
            label += ", told W"
        if RULE in options:
            label += f", told {options[RULE]}"
        if LEARN_INPUTS in options:
            label += ", inputs left alone while learning"
        if method.gives == "weights":
            finished = finished_weights(folder / WEIGHTS, list(answer.formats))
            rule = weight_rule(finished, answer.formats)
        rotated = RotatedParts()
        if method.rotates:
            rotated = RotatedParts.load(folder / ROTATED, bench.model, list(answer.formats))
        with bench.weights(finished), rotated.inside(bench.model):
            rows = [
                bench.row(
                    assignment,
                    quantized=quantized,
                    label=label,
                    weight_rule=rule or inputs,
                    input_rule=inputs,
                )
                for quantized in self.given.quantized
                for inputs in self.given.rules
            ]
            own = None
            if answer.own_nll and peer.own_rule:
                inputs = INPUTS not in options
                ours = bench.own_windows(assignment, peer.own_rule, len(answer.own_nll), inputs)
                own = {"rule": peer.own_rule, "theirs": answer.own_nll, "ours": ours}
        facts = {
            "label": label,
            "gives": method.gives,
            "rotates": method.rotates,
            "formats": answer.formats,
            "seconds": answer.seconds,
            "peak_memory_bytes": answer.peak_memory_bytes,
            "said_bits": answer.said_bits,
            "own": own,
            "weight_rule": rule,
            "chose_formats": method.after is None,
            "notes": answer.notes,
            "beside": self.given.beside,
            "cannot": list(peer.cannot),
        }
        return facts, rows


def _read(path: Path) -> Record:
    """The record of a cell that is done; RunError says to delete one that cannot be read."""
    try:
        record = Record.load(path)
        line_of(record)  # has what a line says
        return record
    except (RunError, LookupError, TypeError) as error:
        raise RunError(
            f"{path} is damaged or of another version: delete it, and the cell is measured again"
        ) from error


def _same(record: Record, requested: dict[str, Any], folder: Path) -> Record:
    """The record, if it is of these settings.

    Raises:
        RunError: it is not; says where they differ.
    """
    if changed := [key for key, value in requested.items() if record.requested.get(key) != value]:
        there = ", ".join(f"{key}={record.requested.get(key)}" for key in changed)
        here = ", ".join(f"{key}={requested[key]}" for key in changed)
        raise RunError(
            f"{folder} has this cell with {there}, not {here}: give another --out, or delete it"
        )
    return record


def run_worker(peer: str, folder: Path, pythons: Mapping[str, Path]) -> None:
    """Answer the request of a folder in the peer's environment, or by its interpreter of `pythons`. The process ends with
    this one, however that ends: another may then claim the cell.

    Raises:
        RunError: the peer is not installed, or failed; ends in the last line of its error.
    """
    python = python_of(peer, pythons)
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    environment = {**os.environ, **dict.fromkeys(offline, "1")}
    environment["PATH"] = f"{python.parent}:{environment.get('PATH', '')}"
    module = f"scripts.peers.workers.{PEERS[peer].worker}"
    with ending_with_this() as descriptor, (folder / "worker.log").open("w") as log:
        done = subprocess.run(
            [str(python), "-m", module, str(folder.absolute()), str(descriptor)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(descriptor,),
            check=False,
        )
    if done.returncode or not (folder / ANSWER).exists():
        failure = folder / FAILURE
        said = failure.read_text() if failure.exists() else (folder / "worker.log").read_text()
        last = said.strip().splitlines()[-1:] or ["it said nothing"]
        how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
        raise RunError(f"{peer} {how} ({last[0]}); see {folder / 'worker.log'}")


def misread(own: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What a tool's own losses say against our reading of its answer; nothing where it has none."""
    if own is None:
        return ()
    apart = [abs(a - b) for a, b in zip(own["theirs"], own["ours"], strict=True)]
    if all(d <= APART for d in apart):  # which no NaN is
        return ()
    return (
        f"its own losses are up to {max(apart):.3g} nats/token from ours: it may be read wrongly",
    )


def line_of(record: Record) -> str:
    """A cell in a line."""
    asked_for, actual = record.requested, record.actual
    said = [
        f"{row.perplexity:.2f} {row.method.quantized} {row.method.scale_rules}"
        for row in record.rows
        if row.perplexity is not None
    ]
    bits = record.rows[0].element_bits
    return (
        f"{actual['label']}, {'/'.join(asked_for['family'])}, {asked_for['tokens']} tokens: {bits:.3f} bits, "
        f"{', '.join(said)}; {actual['seconds']:.0f} s, {actual['peak_memory_bytes'] / 2**30:.1f} GiB"
        f"{''.join(f'; {text}' for text in record.warnings)}"
    )


def run_together(arguments: Sequence[str], count: int, device: str) -> int:
    """So many processes of this command, over the cards by turns, which end with this one; ends as the worst of them."""
    cards = visible_cards() if device == "cuda" else []  # a card that is named by number is one
    # of an option given twice the last holds
    alone = ["--at-once", "1", "--beside", f"{count - 1}"]
    command = [sys.executable, "-m", "scripts.peers", *arguments, *alone, "--ends-with"]
    threads = str(max(1, (os.cpu_count() or 1) // count))
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    usual = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path}
    running: list[subprocess.Popen[bytes]] = []
    with ending_with_this() as descriptor:
        try:
            for i in range(count):
                own = {VISIBLE: cards[i % len(cards)]} if cards else {}
                started = [*command, f"{descriptor}"]
                running.append(subprocess.Popen(started, env=usual | own, pass_fds=(descriptor,)))
            codes = [process.wait() for process in running]
        finally:
            for process in running:
                if process.poll() is None:
                    process.terminate()
    return 2 if 2 in codes else int(any(codes))


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parse(arguments)
    if given.ends_with is not None:
        end_with(given.ends_with)
    failed = 0
    try:
        check_tokens(given)
        check_numbers(given)
        options = options_of(given)
        pythons = given_pythons(given.python)
        given.device = device_of(given.device)
        cells = list(cells_of(given, options))
        if not cells:
            raise RunError(
                f"--peers {' '.join(given.peers)}: nothing to run with these candidates, units and options"
            )
        model = model_of(given)
        check_writable(given.out, "--out")
        texts = read_texts(model, given.calibration, given.evaluation, given.token_window)
        texts.check_enough(given.tokens, given.calibration, given.window, given.evaluation)
        check_positions(given, max_positions(meta_model(model).config))
        if given.at_once > 1:
            return run_together(arguments, given.at_once, given.device)
        tasks = list(TASKS) if "all" in given.tasks else given.tasks
        bench = Bench(
            model,
            texts,
            EvaluationConfig(
                window=given.window, batch_size=given.batch_size, max_windows=given.windows
            ),
            EvalConfig(zero_shot=bool(tasks), limit=given.task_limit, tasks=tasks or list(TASKS)),
            given.out,
            given.device,
        )
    except DmxError as error:
        print(error, file=sys.stderr)
        return 2
    grid = Grid(given, bench, options, pythons)
    for cell in cells:
        try:
            record = grid.run(cell)
            busy = f"{cell.name}: another process runs it; left to that"
            print(busy if record is None else line_of(record), flush=True)
        except (ValueError, OSError) as error:  # a DmxError, or a file of the cell is damaged
            failed += 1
            folder = grid.folder(cell)
            if not (folder / RECORD).exists():  # what is done did not fail
                with contextlib.suppress(RunError):  # the folder itself may be what failed
                    write_json(folder / FAILED, {"cell": asdict(cell), "why": str(error)})
            print(f"{cell.name}: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
