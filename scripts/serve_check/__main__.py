"""Run exported folders in an inference engine, and hold what it computes to dmx's emulation.

    make engine-env                                          # vLLM for CPU, in .venv-engine
    python -m scripts.serve_check outputs/vllm/model         # any number of folders
    python -m scripts.serve_check outputs/vllm/model --baseline smollm2-bf16 --speed --json engines.json

    # on a card: an environment with vLLM for CUDA
    python -m scripts.serve_check outputs/vllm/model --python vllm-env/bin/python --device cuda --speed

Prints, for each folder, scheme and kernel that the engine chose, what it did with inputs, and how far each linear
layer's output lies from dmx's on the same input; then the difference of the prompt's log-probabilities, perplexities, and
with --speed tokens per second and bytes. Exit code 1 if a folder does not load or a layer differs by more than the
tolerance.

On the CPU inner products that vLLM lacks there are ours or its emulation (`cpu_kernels`); loader, names, fusion,
scheme and forward pass are vLLM's. On a card nothing is replaced.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dmx
from dmx.errors import DmxError, RunError
from dmx.files import read_json, write_json
from scripts.serve_check import compare

SCHEMA = "dmx.serve_check/1"
WORKER = Path(__file__).with_name("engine_worker.py")
ENVIRONMENT = ".venv-engine/bin/python"
TOLERANCES = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 1e-3}
"""Relative error of a layer's output: sums in another order, rounded to the dtype (2**-9 in bf16, both sides)."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="of dmx.export, or in full precision")
    parser.add_argument("--python", default=os.environ.get("DMX_ENGINE_PYTHON", ENVIRONMENT))
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
    parser.add_argument("--tolerance", type=float, help="relative error of a layer's output")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON"
    )
    parser.add_argument("--note", default="", help="kept in the record")
    parser.add_argument("--json", type=Path, help="write the record there")
    asked = parser.parse_args(arguments)
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


LEAST = {"rows": 1, "window": 2, "prompt": 1, "prompts": 1, "new": 2}
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
    for name, least in LEAST.items():
        if (value := getattr(asked, name)) < least:
            raise RunError(f"--{name} {value} must be at least {least}")
    if not isinstance(asked.options, dict):
        raise RunError(
            f"--options {json.dumps(asked.options)} is no JSON object of arguments of vllm.LLM, such as "
            '\'{"linear_backend": "marlin"}\''
        )
    if asked.json and asked.json.is_dir():
        raise RunError(f"--json {asked.json} is a folder: name a file")


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


def jobs_of(asked: argparse.Namespace, folder: Path, scratch: Path, tokens: Path) -> list[dict]:
    """On a card speed is measured apart, with graphs; operands are read without."""
    speed = {"prompt": asked.prompt, "prompts": asked.prompts, "new": asked.new}
    shared = {
        "folder": str(folder.absolute()),
        "dtype": asked.dtype,
        "tokens": str(tokens),
        "rounds_inputs": bool(compare.facts_of(folder).get("inputs")),
        "options": asked.options,
    }
    apart = asked.speed and asked.device == "cuda"
    jobs = [{"hooks": True, "eager": True, "speed": speed if asked.speed and not apart else None}]
    if apart:
        jobs.append({"hooks": False, "eager": False, "speed": speed})
    return [
        {**shared, **job, "out": str(scratch / f"{folder.absolute().name}.{i}.safetensors")}
        for i, job in enumerate(jobs)
    ]


@contextlib.contextmanager
def ran(asked: argparse.Namespace, folders: Sequence[Path], tokens: Tensor) -> Iterator[dict]:
    """folder -> the files of its jobs, all of them run by one process of the engine's environment."""
    python = engine_python(asked.python)
    with tempfile.TemporaryDirectory() as name:
        scratch, files, outs = Path(name), [], {}
        save_file({"tokens": tokens.contiguous()}, str(scratch / "tokens.safetensors"))
        for number, folder in enumerate(folders):
            place = scratch / str(number)
            place.mkdir()
            jobs = jobs_of(asked, folder, place, scratch / "tokens.safetensors")
            for i, job in enumerate(jobs):
                (place / f"{i}.json").write_text(json.dumps(job))
                files.append(str(place / f"{i}.json"))
            outs[folder] = [Path(job["out"]) for job in jobs]
        calls = [files] if asked.device == "cpu" else [[file] for file in files]
        for call in calls:
            _run_worker(python, call, name)
        yield outs


def _run_worker(python: Path, jobs: Sequence[str], folder: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PATH"] = f"{python.parent}:{environment.get('PATH', '')}"
    done = subprocess.run(
        [str(python), str(WORKER), *jobs],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RunError(f"{python} cannot run the engine:\n{done.stderr.strip()[-2000:]}")


def report_of(out: Path) -> tuple[dict[str, Any], str | None]:
    """What a job reported, or why it failed: the last lines of its error."""
    report, failure = Path(f"{out}.json"), Path(f"{out}.txt")
    if report.is_file():
        return json.loads(report.read_text()), None
    said = failure.read_text() if failure.is_file() else "the process died"
    lines = [line for line in said.strip().splitlines() if line and not line.startswith(" ")]
    return {}, "\n".join(lines[-2:])


def row_of(asked: argparse.Namespace, folder: Path, outs: list[Path], tokens: Tensor) -> dict:
    """What the record keeps of a folder; where dmx cannot read or compare it, why: the others are kept."""
    try:
        return _row_of(asked, folder, outs, tokens)
    except DmxError as error:
        return {"folder": str(folder), "failed": str(error)}


def _row_of(asked: argparse.Namespace, folder: Path, outs: list[Path], tokens: Tensor) -> dict:
    reports = [report_of(out) for out in outs]
    report, failure = reports[0]
    name = str(folder)
    if failure is not None:
        return {"folder": name, "failed": failure}
    tensors = load_file(str(outs[0]))
    dtype = getattr(torch, report["dtype"])
    loaded = compare.load_folder(folder, dtype, asked.device)
    layers = compare.compare_layers(loaded, tensors, report["fused"])
    tolerance = TOLERANCES[asked.dtype] if asked.tolerance is None else asked.tolerance
    for layer, row in layers.items():
        row |= report["layers"][layer]
        row["ok"] = row["error"] <= tolerance
    theirs = tensors["log_probabilities"]
    ours = compare.log_probabilities(loaded.model, tokens)
    compare.check_finite(layers, engine=theirs, dmx=ours)
    speed, speed_failure = reports[-1]
    return {
        "folder": name,
        "target": loaded.target,
        "asks_inputs": loaded.says_inputs,
        "tolerance": tolerance,
        "groups": compare.groups_of(layers),
        "log_probabilities": theirs.tolist() if asked.baseline else None,
        "difference": float((theirs - ours).abs().mean()),
        "noise": compare.noise(loaded.model, tokens, ours),
        "perplexity": compare.perplexity(theirs),
        "perplexity_dmx": compare.perplexity(ours),
        "speed": speed.get("speed"),
        "speed_failed": speed_failure,
        **{k: report[k] for k in ("dtype", "device", "threads", "kernels", "load_seconds")},
        **{k: report[k] for k in ("weight_bytes", "peak_bytes", "versions", "architecture")},
    }


def add_effects(rows: list[dict], folders: Sequence[Path]) -> None:
    """What quantization does in the engine: mean difference of log-probabilities from the first row, the baseline, for
    folders of that model."""
    own = [row.pop("log_probabilities", None) for row in rows]
    models = [model_of(folder) for folder in folders]
    for row, of_row, model in zip(rows, own, models, strict=True):
        known = of_row is not None and own[0] is not None and model == models[0]
        row["effect"] = None
        if known:
            row["effect"] = float((torch.tensor(of_row) - torch.tensor(own[0])).abs().mean())


def model_of(folder: Path) -> dict[str, Any]:
    """What tells models apart in config.json, however they are stored."""
    config = json.loads((folder / "config.json").read_text())
    names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    return {name: config.get(name) for name in (*names, "tie_word_embeddings")}


def say(row: dict) -> None:
    """A folder's lines."""
    if "failed" in row:
        print(f"{row['folder']}: does not load\n  {row['failed']}")
        return
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
    if speed := row["speed"]:
        print(
            f"  prefill {speed['prefill_tokens_per_second']:.0f}, decode "
            f"{speed['decode_tokens_per_second']:.1f} tokens/s"
        )


def check(asked: argparse.Namespace) -> dict[str, Any]:
    """The record."""
    folders = [f for f in (asked.baseline, *asked.folders) if f is not None]
    check_asked(asked, folders)
    tokens = tokens_of(asked, folders)
    with ran(asked, folders, tokens) as outs:
        rows = [row_of(asked, folder, outs[folder], tokens) for folder in folders]
    add_effects(rows, folders)
    return {
        "schema": SCHEMA,
        "note": asked.note,
        "device": asked.device,
        "processor": platform.processor() or platform.machine(),
        "tokens": tokens.numel(),
        "text": None if asked.text is None else asked.text.name,
        "versions": {"dmx": dmx.__version__, "torch": torch.__version__},
        "rows": rows,
    }


def main() -> int:
    asked = parse()
    try:
        record = check(asked)
    except DmxError as error:
        print(error, file=sys.stderr)
        return 2
    for row in record["rows"]:
        say(row)
    if asked.json:
        write_json(asked.json, record)
    return 0 if all(is_right(row) for row in record["rows"]) else 1


def is_right(row: dict) -> bool:
    """It loaded, and every layer is within the tolerance."""
    return "failed" not in row and all(g["within"] == g["layers"] for g in row["groups"])


if __name__ == "__main__":
    sys.exit(main())
