"""Run exported folders in an inference engine, and hold what it computes to dmx's emulation.

    make engine-env                                          # vLLM for CPU, in .venv-engine
    python -m scripts.serve_check outputs/vllm/model         # any number of folders
    python -m scripts.serve_check outputs/vllm/model --baseline smollm2-bf16 --speed --json engines.json
    python -m scripts.serve_check outputs/more/model --baseline smollm2-bf16 --add --json engines.json    # one more row

    # on a card: an environment with vLLM for CUDA
    python -m scripts.serve_check outputs/vllm/model --python vllm-env/bin/python --device cuda --speed
    python -m scripts.serve_check many/* --device cuda --at-once 6 --seconds 300 --json engines.json   # with --python

Prints, for each folder, scheme and kernel that the engine chose, what it did with inputs, and how far each linear
layer's output lies from dmx's on the same input; then the difference of the prompt's log-probabilities, perplexities, and
with --speed tokens per second and bytes. Exit code 1 if a folder does not load or a layer differs by more than the
tolerance.

On a card every folder gets a process: --at-once many of them, and after them, one by one, those of --speed. The record is
written after each; what --seconds cuts off says so, and the others are kept.

On the CPU inner products that vLLM lacks there are ours or its emulation (`cpu_kernels`); loader, names, fusion,
scheme and forward pass are vLLM's. On a card nothing is replaced.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dmx
from dmx.errors import DmxError, RunError
from dmx.files import read_json, sha256, write_json
from dmx.models.weight_files import check_whole
from scripts.least import check_least
from scripts.serve_check import compare, joining

SCHEMA = "dmx.serve_check/1"
HERE = Path(__file__).parent
WORKERS = {"vLLM": "engine_worker.py", "transformers": "transformers_worker.py"}
ENVIRONMENT = ".venv-engine/bin/python"
TOLERANCES = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 1e-3}
"""Relative error of a layer's output: sums in another order, rounded to the dtype (2**-9 in bf16, both sides). Rotated
inputs are rounded once more: `tolerance_of`."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="of dmx.export, or in full precision")
    parser.add_argument("--runtime", default="vLLM", choices=tuple(WORKERS))
    parser.add_argument(
        "--python",
        help=f"of the runtime; default: {ENVIRONMENT} for vLLM, this one for transformers",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--dtype",
        choices=tuple(TOLERANCES),
        help="of the engine's model; default: float32 on the cpu, where differences are not those of "
        "rounding, bfloat16 on a card",
    )
    parser.add_argument("--baseline", type=Path, help="the model in full precision, for the effect")
    parser.add_argument("--text", type=Path, help="of the prompts; default: drawn tokens")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--speed", action="store_true", help="tokens per second, too")
    parser.add_argument("--prompt", type=int, default=128, help="of --speed: tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=4, help="of --speed: at once")
    parser.add_argument("--new", type=int, default=32, help="of --speed: tokens after each")
    parser.add_argument(
        "--tolerance",
        type=float,
        help=f"relative error of a layer's output; default: {', '.join(f'{v:g} in {k}' for k, v in TOLERANCES.items())}, "
        "and half an epsilon more in folders that rotate inputs",
    )
    parser.add_argument(
        "--options", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON"
    )
    parser.add_argument(
        "--speed-options",
        type=json.loads,
        default={},
        help="the same for --speed on a card alone, such as its compilation_config",
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="on a card: folders in the engine at once"
    )
    parser.add_argument("--seconds", type=float, help="on a card: what takes longer is cut off")
    parser.add_argument("--note", default="", help="kept in the record")
    parser.add_argument("--json", type=Path, help="write the record there")
    parser.add_argument(
        "--add", action="store_true", help="to the rows of --json, which are of the same check"
    )
    asked = parser.parse_args(arguments)
    own = {"vLLM": os.environ.get("DMX_ENGINE_PYTHON", ENVIRONMENT), "transformers": sys.executable}
    asked.python = asked.python or own[asked.runtime]
    asked.dtype = asked.dtype or {"cpu": "float32", "cuda": "bfloat16"}[asked.device]
    return asked


def engine_python(path: str) -> Path:
    """The engine's interpreter.

    Raises:
        RunError: there is none.
    """
    found = Path(path).absolute()
    if not found.is_file():
        raise RunError(
            f"--python {path} does not exist: `make engine-env` makes {ENVIRONMENT}, vLLM for CPU. For a "
            "card, make an environment with vLLM for CUDA and name its interpreter."
        )
    return found


def engine_versions(asked: argparse.Namespace) -> dict[str, str]:
    """Of the runtime and its torch, as its worker says them; seconds, where the engine takes minutes.

    Raises:
        RunError: there is no engine, or it cannot be imported.
    """
    python = engine_python(asked.python)
    script = (
        "import json, sys; print(json.dumps({n: __import__(n).__version__ for n in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [str(python), "-c", script, asked.runtime.lower(), "torch"],
        cwd=python.parent,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunError(
            f"--python {asked.python} has no {asked.runtime} that can be imported: {why}"
        )
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])  # it may log before
    return versions


LEAST = {"rows": 1, "window": 2, "prompt": 1, "prompts": 1, "new": 2, "at_once": 1}
"""Of the numbers: a token has no log-probability without one before it, and decoding no speed without a second."""


def check_asked(asked: argparse.Namespace, folders: Sequence[Path]) -> None:
    """Raise RunError for what is known to be wrong before the engine, which takes minutes, has run."""
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise RunError(
                f"{folder} has no config.json: give folders that dmx.export wrote, or of models that "
                "transformers saved."
            )
        try:
            is_config = isinstance(read_json(folder / "config.json"), dict)
        except (OSError, ValueError):
            is_config = False
        if not is_config:
            raise RunError(
                f"{folder / 'config.json'} is damaged: it is no JSON object. Export again."
            )
        for path in sorted(folder.glob("*.safetensors")):
            check_whole(path)
        compare.facts_of(folder)
    check_least(asked, LEAST)
    for name in ("tolerance", "seconds"):
        value = getattr(asked, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise RunError(
                f"--{name} {value:g} must be a number above 0; leave it out for the usual"
            )
    for name in ("options", "speed_options"):
        if not isinstance(given := getattr(asked, name), dict):
            raise RunError(
                f"--{name.replace('_', '-')} {json.dumps(given)} is no JSON object of arguments of vllm.LLM, "
                'such as \'{"linear_backend": "marlin"}\''
            )
    if asked.speed and asked.runtime != "vLLM":
        raise RunError(f"--speed: of vLLM alone, not of --runtime {asked.runtime}. Leave it out")
    if asked.json and asked.json.is_dir():
        raise RunError(f"--json {asked.json} is a folder: name a file")
    if asked.add and not asked.json:
        raise RunError("--add: to the rows of which record? Name it by --json, or leave --add out")


def text_tokens(asked: argparse.Namespace, folder: Path) -> list[int]:
    """Of --text, by the folder's tokenizer."""
    from transformers import AutoTokenizer

    try:
        text = asked.text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"--text {asked.text} cannot be read as UTF-8 text ({error})") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise RunError(
            f"--text needs a tokenizer, and {folder} holds none that transformers reads. Leave --text out "
            "for drawn tokens, or copy the tokenizer's files into it."
        ) from error
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def tokens_of(asked: argparse.Namespace, folders: Sequence[Path]) -> Tensor:
    """(rows, window) int64, drawn from what is in the vocabulary of every folder where there is no text."""
    if asked.text is None:
        generator = torch.Generator().manual_seed(0)
        configs = [read_json(folder / "config.json") for folder in folders]
        sizes = [c.get("vocab_size") or c.get("text_config", {}).get("vocab_size") for c in configs]
        largest = min([256, *(size for size in sizes if size)])
        return torch.randint(largest, (asked.rows, asked.window), generator=generator)
    ids = text_tokens(asked, asked.folders[0])
    needed = asked.rows * asked.window
    if len(ids) < needed:
        raise RunError(f"--text {asked.text} has {len(ids)} tokens, {needed} are asked for")
    return torch.tensor(ids[:needed]).view(asked.rows, asked.window)


@dataclass(frozen=True)
class Job:
    """What one process of the engine is asked for, in `file`, and where it leaves what it found."""

    folder: Path
    file: Path
    out: Path
    is_speed: bool

    @property
    def failure(self) -> Path:
        return Path(f"{self.out}.txt")

    def is_done(self) -> bool:
        return Path(f"{self.out}.json").is_file() or self.failure.is_file()


CACHE_BYTES = 1 << 30
"""Of keys and values, where folders share a card: the prompts are short, and a share of what is free at the start would
depend on the others."""


def jobs_of(asked: argparse.Namespace, folder: Path, place: Path, tokens: Path) -> list[Job]:
    """On a card speed is measured apart, with graphs; operands are read without."""
    speed = {"prompt": asked.prompt, "prompts": asked.prompts, "new": asked.new}
    shared = {
        "folder": str(folder.absolute()),
        "device": asked.device,
        "dtype": asked.dtype,
        "tokens": str(tokens),
        "rounds_inputs": bool(compare.facts_of(folder).get("inputs")),
    }
    sharing = {}
    if asked.at_once > 1:
        sharing = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": CACHE_BYTES}
    apart = asked.speed and asked.device == "cuda"
    bodies: list[dict[str, Any]] = [
        {
            "hooks": True,
            "eager": True,
            "speed": speed if asked.speed and not apart else None,
            "options": sharing | asked.options,
        }
    ]
    if apart:
        options = asked.options | asked.speed_options
        bodies.append({"hooks": False, "eager": False, "speed": speed, "options": options})
    jobs = []
    for i, body in enumerate(bodies):
        job = Job(folder, place / f"{i}.json", place / f"{i}.safetensors", is_speed=i > 0)
        job.file.write_text(json.dumps({**shared, **body, "out": str(job.out)}))
        jobs.append(job)
    return jobs


@contextlib.contextmanager
def jobs_in_files(
    asked: argparse.Namespace, folders: Sequence[Path], tokens: Tensor
) -> Iterator[list[Job]]:
    """Of all folders; their files go when the context ends."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        save_file({"tokens": tokens.contiguous()}, str(scratch / "tokens.safetensors"))
        jobs = []
        for number, folder in enumerate(folders):
            place = scratch / str(number)
            place.mkdir()
            jobs += jobs_of(asked, folder, place, scratch / "tokens.safetensors")
        yield jobs


def ran(asked: argparse.Namespace, jobs: Sequence[Job]) -> Iterator[Job]:
    """Jobs as they end. Speed comes last, one at a time.

    Raises:
        RunError: there is no engine, or, on the CPU, its process did not get as far as the first job.
    """
    command = [str(engine_python(asked.python)), str(HERE / WORKERS[asked.runtime])]
    if asked.device == "cpu":
        _run_worker(command, [str(job.file) for job in jobs], jobs[0].file.parent)
        yield from jobs
        return
    deadline = time.monotonic() + asked.seconds if asked.seconds else None
    run = _Apart(command, deadline, asked.seconds)
    with ThreadPoolExecutor(asked.at_once) as pool:
        started = [pool.submit(run, job) for job in jobs if not job.is_speed]
        for done in as_completed(started):
            yield done.result()
    for job in jobs:
        if job.is_speed:
            yield run(job)


@dataclass(frozen=True)
class _Apart:
    """Runs a job in a process of its own, whose end, however it comes, is the job's and no other's."""

    command: Sequence[str]
    deadline: float | None
    seconds: float | None

    def __call__(self, job: Job) -> Job:
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left <= 0:
            job.failure.write_text(f"not reached within --seconds {self.seconds:g}")
            return job
        try:
            _run_worker(self.command, [str(job.file)], job.file.parent, left)
        except subprocess.TimeoutExpired:
            job.failure.write_text(f"cut off after --seconds {self.seconds:g}")
        except RunError as error:
            if not job.is_done():
                job.failure.write_text(str(error))
        return job


def _run_worker(
    command: Sequence[str], jobs: Sequence[str], folder: Path, seconds: float | None = None
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PATH"] = f"{Path(command[0]).parent}:{environment.get('PATH', '')}"
    with subprocess.Popen(
        [*command, *jobs],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            said = process.communicate(timeout=seconds)[1]
        except BaseException:  # an interrupt, too: what the engine started ends with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise RunError(f"{command[0]} cannot run the engine:\n{said.strip()[-2000:]}")


def report_of(out: Path) -> tuple[dict[str, Any], str | None]:
    """What a job reported, or why it failed: the last lines of its error."""
    report, failure = Path(f"{out}.json"), Path(f"{out}.txt")
    if report.is_file():
        return json.loads(report.read_text()), None
    said = failure.read_text().strip() if failure.is_file() else ""
    lines = [line for line in (said or "the process died").splitlines() if line.strip()]
    outer = [i for i, line in enumerate(lines) if not line.startswith(" ")]
    error = [lines[i] for i in outer[-2:] if not lines[i].startswith("Traceback")]
    return {}, "\n".join(error + lines[outer[-1] + 1 :])  # an error may go on in lines of its own


def row_of(asked: argparse.Namespace, folder: Path, out: Path, tokens: Tensor) -> dict:
    """What the record keeps of a folder; where dmx cannot read or compare it, why: the others are kept."""
    row: dict[str, Any] = {"folder": str(folder)}
    try:
        row |= compare.stated_in(folder)
        return row | _row_of(asked, folder, out, tokens)
    except DmxError as error:
        return row | {"failed": str(error)}


def _row_of(asked: argparse.Namespace, folder: Path, out: Path, tokens: Tensor) -> dict:
    report, failure = report_of(out)
    if failure is not None:
        return {"failed": failure}
    tensors = load_file(str(out))
    dtype = getattr(torch, report["dtype"])
    loaded = compare.load_folder(folder, dtype, asked.device)
    layers = compare.compare_layers(loaded, tensors, report["fused"])
    tolerance = tolerance_of(asked, compare.stated_in(folder)["transform"] != "none")
    for layer, row in layers.items():
        row |= report["layers"][layer]
        row["ok"] = row["error"] <= tolerance
    theirs = tensors["log_probabilities"]
    ours = compare.log_probabilities(loaded.model, tokens)
    compare.check_finite(layers, engine=theirs, dmx=ours)
    return {
        "target": loaded.target,
        "asks_inputs": loaded.says_inputs,
        "tolerance": tolerance,
        "groups": compare.groups_of(layers),
        "log_probabilities": theirs.tolist() if asked.baseline else None,
        "difference": float((theirs - ours).abs().mean()),
        "noise": compare.noise(loaded.model, tokens, ours),
        "perplexity": compare.perplexity(theirs),
        "perplexity_dmx": compare.perplexity(ours),
        "speed": report.get("speed"),
        "speed_failed": None,
        **{k: report[k] for k in ("dtype", "device", "threads", "kernels", "load_seconds")},
        **{k: report[k] for k in ("weight_bytes", "peak_bytes", "versions", "architecture")},
    }


def tolerance_of(asked: argparse.Namespace, rotates: bool = False) -> float:
    """Of the relative error of a layer's output.

    Args:
        rotates: the folder's inputs are rotated, and then rounded once more to the dtype before the product: each by half an
            epsilon at most, so their product by that share of its terms. Measured in bf16, on layers of SmolLM2: 1.5e-3,
            3.7e-3 where the terms cancel (v_proj).
    """
    if asked.tolerance is not None:
        return float(asked.tolerance)
    rounded = "bfloat16" if asked.runtime == "transformers" else asked.dtype  # as it decompresses
    once_more = torch.finfo(getattr(torch, rounded)).eps / 2 if rotates else 0.0
    return TOLERANCES[rounded] + once_more


def speed_of(out: Path) -> dict[str, Any]:
    """What a job of speed adds to its folder's row."""
    report, failure = report_of(out)
    return {"speed": report.get("speed"), "speed_failed": failure}


def add_effects(rows: list[dict], folders: Sequence[Path]) -> None:
    """What quantization does in the engine: mean difference of log-probabilities from the first row, the baseline, for
    folders of that model."""
    own = [row.pop("log_probabilities", None) for row in rows]
    models = [joining.model_of(folder) for folder in folders]
    for row, of_row, model in zip(rows, own, models, strict=True):
        known = of_row is not None and own[0] is not None and model == models[0]
        row["effect"] = None
        if known:
            row["effect"] = float((torch.tensor(of_row) - torch.tensor(own[0])).abs().mean())


def say(row: dict, is_speed: bool = False) -> None:
    """A folder's lines, those of speed where it was measured apart."""
    if "failed" in row:
        if not is_speed:
            print(f"{row['folder']}: does not load\n  {row['failed']}", flush=True)
    elif is_speed:
        print(f"{row['folder']}:{speed_line(row)}", flush=True)
    else:
        say_layers(row)
        print(speed_line(row), end="\n" if row["speed"] else "", flush=True)


def speed_line(row: dict) -> str:
    """Empty where speed was not asked for."""
    if speed := row["speed"]:
        return (
            f"  prefill {speed['prefill_tokens_per_second']:.0f}, decode "
            f"{speed['decode_tokens_per_second']:.1f} tokens/s"
        )
    return f"  no speed: {row['speed_failed']}" if row["speed_failed"] else ""


def say_layers(row: dict) -> None:
    """What the engine chose and how far it is from dmx."""
    count, equal, within = (
        sum(group[key] for group in row["groups"]) for key in ("layers", "equal", "within")
    )
    effect = "" if row.get("effect") is None else f", of an effect of {row['effect']:.2g}"
    print(
        f"{row['folder']}: {count} layers, {equal} equal to the bit, {count - within} beyond {row['tolerance']:g}; "
        f"log-probabilities differ by {row['difference']:.2g} (rounding errors in dmx alone: {row['noise']:.2g}){effect}; perplexity "
        f"{row['perplexity']:.4f}, dmx {row['perplexity_dmx']:.4f}"
    )
    for group in row["groups"]:
        asked = group["asked_inputs"]
        print(
            f"  {group['layers']} x {group['formats']}: {group['scheme']}, {group['kernel']}; inputs "
            f"{group['inputs']}{'' if asked == group['inputs'] else f' (the file: {asked})'}; relative error up "
            f"to {group['error']:.2g}, {group['worst']}"
        )


def check(
    asked: argparse.Namespace, told: Callable[[dict[str, Any], bool], None] | None = None
) -> dict[str, Any]:
    """The record of this run; --json has what is known of it after each job, and with --add the rows that it had.

    Args:
        told: gets the row of each job as it ends, and whether the job was one of speed.
    """
    folders = [f for f in (asked.baseline, *asked.folders) if f is not None]
    check_asked(asked, folders)
    tokens = tokens_of(asked, folders)
    head = head_of(asked, folders, tokens)
    versions = engine_versions(asked) if asked.add else {}
    if asked.add:
        joining.stored(asked.json, head, versions)
    rows: dict[Path, dict] = {}
    with jobs_in_files(asked, folders, tokens) as jobs:
        for job in ran(asked, jobs):
            if not job.is_speed:
                rows[job.folder] = row_of(asked, job.folder, job.out, tokens)
            elif "failed" not in rows[job.folder]:
                rows[job.folder] |= speed_of(job.out)
            known = [folder for folder in folders if folder in rows]
            record = head | {"rows": rows_of(asked, [rows[folder] for folder in known], known)}
            if asked.add:
                joining.join(asked.json, record, versions)
            elif asked.json:
                write_json(asked.json, record)
            if told is not None:
                told(record["rows"][known.index(job.folder)], job.is_speed)
    return record


def rows_of(
    asked: argparse.Namespace, rows: Sequence[dict], folders: Sequence[Path]
) -> list[dict[str, Any]]:
    """Of the folders that are done, with effects."""
    kept = [dict(row) for row in rows]
    if folders[0] != asked.baseline:  # of which nothing is known yet
        for row in kept:
            row.pop("log_probabilities", None)
    add_effects(kept, folders)
    return kept


def head_of(asked: argparse.Namespace, folders: Sequence[Path], tokens: Tensor) -> dict[str, Any]:
    """Of the record: all but its rows, known before anything runs."""
    return {
        "schema": SCHEMA,
        "note": asked.note,
        "runtime": asked.runtime,
        "device": asked.device,
        "processor": platform.processor() or platform.machine(),
        "dtype": asked.dtype,
        "tolerance": tolerance_of(asked),
        "models": joining.models_of(folders),
        "tokens": tokens.numel(),
        "window": tokens.shape[1],
        "text": None if asked.text is None else asked.text.name,
        "tokens_sha256": sha256(tokens.numpy().tobytes()),
        "options": {"all": asked.options, "speed": asked.speed_options},
        "versions": {"dmx": dmx.__version__, "torch": torch.__version__},
    }


def main() -> int:
    asked = parse()
    try:
        record = check(asked, say)
    except DmxError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if all(is_right(row) for row in record["rows"]) else 1


def is_right(row: dict) -> bool:
    """It loaded, and every layer is within the tolerance."""
    return "failed" not in row and all(g["within"] == g["layers"] for g in row["groups"])


if __name__ == "__main__":
    sys.exit(main())
