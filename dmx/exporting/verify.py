"""Is what was written what was meant? Asked of the files, and of a fresh process that loads them.

    check_files    every tensor's name, dtype and shape, and the bytes against bits_per_element
    check_loading  the target's own loader in a new process; its logits against the fake-quantized
                   model's, bit for bit where the loader's arithmetic is ours

The reference is the model as any loader makes it: parameters in bf16, rotary frequencies in
float32.
"""

import contextlib
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dmx.applying.apply import applied
from dmx.errors import ModelError, RunError
from dmx.exporting import _fresh_load
from dmx.exporting.layouts import Layers, Layout, TensorSpec
from dmx.exporting.plan import Plan
from dmx.exporting.rotating import KEY
from dmx.exporting.writing import read_headers
from dmx.models.in_files import file_dtype

KEPT_ROWS = 2
ROTATED_MAY_DIFFER = 0.05
"""Relative error of logits: this project rotates by matrices in bf16, compressed-tensors in float32. Without
rotations, or with wrong ones, it is about 1."""
DEFAULT_WINDOW = 32


@dataclass(frozen=True)
class Verification:
    """What a fresh process measured."""

    loader: str
    versions: dict[str, str]
    tokens: int
    equal: bool
    """Logits equal bit for bit."""
    max_difference: float
    """Largest absolute difference of a logit."""
    relative_error: float
    """Of logits, by their norm."""
    kl: float
    """KL(fake-quantized, loaded), token mean, nats."""
    loss: float
    """Mean loss of the loaded model, nats/token."""
    reference_loss: float
    """The same of the fake-quantized model in memory."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def check_files(
    folder: Path, layout: Layout, layers: Layers, plain: Mapping[str, TensorSpec]
) -> dict[str, int]:
    """Compare the headers of the files with what was planned.

    Args:
        layers: the quantized ones, by their names in files.
        plain: name -> dtype and shape of the tensors that are stored unquantized.

    Returns:
        bytes of the quantized tensors in the files, and what bits_per_element says they are.

    Raises:
        RunError: a tensor is missing, unknown or of another dtype or shape, or bytes differ.
    """
    there = read_headers(folder)
    quantized = {
        f"{name}.{part}": spec
        for name, layer in layers.items()
        for part, spec in layout.specs(layer.weight, layer.shape).items()
    }
    of_inputs = {
        f"{name}.{part}": TensorSpec(tensor.dtype, tuple(tensor.shape))
        for name, layer in layers.items()
        for part, tensor in layout.input_tensors(layer).items()
    }
    expected = {**plain, **quantized, **of_inputs}
    for name in sorted(expected.keys() | there.keys()):
        if expected.get(name) != there.get(name):
            raise RunError(
                f"{folder}: tensor {name} is {there.get(name)}, the assignment asks for "
                f"{expected.get(name)}. The export is wrong; please report it."
            )
    stored = sum(there[name].bytes for name in quantized)
    stated = sum(layer.bytes for layer in layers.values())
    if layout.packed and stored != stated:
        raise RunError(
            f"{folder}: quantized tensors take {stored} bytes, bits_per_element says {stated}. "
            "The export is wrong; please report it."
        )
    return {"quantized_bytes": stored, "bits_per_element_bytes": stated}


def default_tokens(vocabulary: int) -> Tensor:
    """(2, 32) int64, drawn by seed."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (KEPT_ROWS, DEFAULT_WINDOW), generator=generator)


def check_loading(
    folder: Path, plan: Plan, model: nn.Module, *, tokens: Tensor | None = None
) -> Verification:
    """Load the folder in a fresh process and compare.

    Args:
        model: what was written, with the transform that its weights were written under.
        tokens: (rows, window) int64; None draws two short rows.

    Raises:
        RunError: the loader fails or complains, or logits differ where they must be equal.
    """
    layout = plan.layout
    assert layout is not None
    assignment = replace(plan.assignment, transform=None)
    inputs = plan.inputs and plan.reader(model) == _fresh_load.TRANSFORMERS
    may_differ = layout.may_differ if plan.rotation is None else ROTATED_MAY_DIFFER
    if tokens is None:
        tokens = default_tokens(int(model.config.get_text_config().vocab_size))  # type: ignore[union-attr, operator]
    with as_loaded(model) as reference:
        device = str(next(reference.parameters()).device)
        with applied(reference, assignment, inputs=inputs, cache_weights=True):
            ours = _fresh_load.rows_of(reference, tokens, KEPT_ROWS)
    attention = getattr(model.config, "_attn_implementation", None)
    theirs, report = _load_elsewhere(folder, plan, plan.reader(model), tokens, device, attention)
    if report["problems"]:
        raise RunError(
            f"{folder}: transformers loaded it with {report['problems']}. The export is wrong; "
            "please report it."
        )
    result = _compare(ours, theirs, report, _in_words(layout, plan.reader(model)), tokens)
    if not math.isfinite(result.kl):
        raise RunError(
            f"{folder}: loaded in a fresh process, logits are not all finite: loss {result.loss:.3g} nats/token there, "
            f"{result.reference_loss:.3g} of the fake-quantized model. Look at the model on this text before it is "
            "exported; where it is finite, please report it. verify=false writes the files all the same."
        )
    if may_differ:
        rotated = f", with inputs rotated as its {KEY} says" if plan.rotation else ""
        if not inputs and result.relative_error > may_differ:
            raise RunError(
                f"{folder}: loaded in a fresh process{rotated}, logits differ from the fake-quantized "
                f"model's by {result.relative_error:.3g} of their norm. The export is wrong; please report "
                "it."
            )
    elif not result.equal and (not inputs or layout.exact_inputs):
        raise RunError(
            f"{folder}: loaded in a fresh process, logits differ from the fake-quantized model's "
            f"by up to {result.max_difference:.3g} and must be equal. The export is wrong; please "
            "report it."
        )
    return result


def _compare(
    ours: dict[str, Tensor],
    theirs: dict[str, Tensor],
    report: dict[str, Any],
    loader: str,
    tokens: Tensor,
) -> Verification:
    largest = kl = wrong = norm = 0.0
    count = 0
    for rows in zip(
        *(side["logits"].flatten(0, 1).split(64) for side in (ours, theirs)), strict=True
    ):
        a, b = (row.double() for row in rows)  # 64 tokens at once: float64 logits are large
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        largest = max(largest, float((a - b).abs().max()))
        wrong, norm = wrong + float((a - b).square().sum()), norm + float(a.square().sum())
        kl += float((p.exp() * (p - q)).sum())
        count += len(a)
    return Verification(
        loader=loader,
        versions=report["versions"],
        tokens=tokens.numel(),
        equal=torch.equal(ours["logits"], theirs["logits"])
        and torch.equal(ours["losses"], theirs["losses"]),
        max_difference=largest,
        relative_error=math.sqrt(wrong / norm) if norm else 0.0,
        kl=kl / count,
        loss=float(theirs["losses"].mean()),
        reference_loss=float(ours["losses"].mean()),
        seconds=report["seconds"],
    )


def _in_words(layout: Layout, reader: str) -> str:
    """What loads the files."""
    if reader == _fresh_load.TRANSFORMERS:
        return " + ".join(("transformers", *layout.packages))
    whose = _fresh_load.READERS[reader].whose
    return f"transformers, weights dequantized by {whose}, inputs left alone"


def _load_elsewhere(
    folder: Path,
    plan: Plan,
    reader: str,
    tokens: Tensor,
    device: str,
    attention: str | None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    assert plan.layout is not None
    with tempfile.TemporaryDirectory() as scratch:
        job_file, out = Path(scratch, "job.json"), Path(scratch, "out.safetensors")
        save_file({"tokens": tokens.contiguous()}, str(Path(scratch, "tokens.safetensors")))
        job = {
            "folder": str(folder),
            "tokens": str(Path(scratch, "tokens.safetensors")),
            "device": device,
            "threads": torch.get_num_threads(),
            "attention": attention,
            "kept": KEPT_ROWS,
            "rotates": plan.rotation is not None,
            "reader": reader,
            "packages": plan.layout.packages,
            "out": str(out),
        }
        job_file.write_text(json.dumps(job))
        # -P and another directory: nothing of this project is importable by accident.
        command = [sys.executable, "-P", str(_fresh_load.__file__), str(job_file)]
        failure = _run(command, scratch)
        if failure is not None:
            raise RunError(
                f"{folder}: transformers with {', '.join(plan.layout.packages)} cannot load it in a "
                f"fresh process:\n{failure.strip()[-2000:]}"
            )
        return load_file(str(out)), json.loads(Path(f"{out}.json").read_text())


def _run(command: list[str], folder: str) -> str | None:
    """Run to the end; None, or what it said when it failed."""
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment(), check=False
    )
    return done.stderr if done.returncode else None


def environment() -> dict[str, str]:
    """Of the fresh process: amd-quark compiles its kernels once and looks for ninja, which pip puts
    beside python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path}


@contextlib.contextmanager
def as_loaded(model: nn.Module) -> Iterator[nn.Module]:
    """The model as a loader makes it: the same one where it already is, else a copy.

    Parameters are bf16, but for those that stay in float32, and so are the buffers of embeddings (the factor of
    Gemma's). Buffers elsewhere that no file holds (rotary frequencies) are computed anew where
    they lie in 16 bits: `model.to(torch.bfloat16)` rounds them, loaders keep them in float32.
    """
    rounded = _rounded_buffers(model)
    dtypes = {name: file_dtype(model, name, p) for name, p in model.named_parameters()}
    if not rounded and all(p.dtype == dtypes[name] for name, p in model.named_parameters()):
        yield model
        return
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            for name in module._non_persistent_buffers_set:
                buffer = module._buffers[name]
                module._buffers[name] = None if buffer is None else buffer.to(torch.bfloat16)
    for path in _rounded_buffers(model):
        _renew(model.get_submodule(path), path)
    yield model


def _rounded_buffers(model: nn.Module) -> list[str]:
    """Modules with floating-point buffers of 16 bits that no state dict holds, but for embeddings."""
    return [
        path
        for path, module in model.named_modules()
        if not isinstance(module, nn.Embedding)
        and any(
            buffer is not None and buffer.is_floating_point() and buffer.dtype.itemsize < 4
            for buffer in (module._buffers[n] for n in module._non_persistent_buffers_set)
        )
    ]


def _renew(module: nn.Module, path: str) -> None:
    config = getattr(module, "config", None)
    try:
        fresh = type(module)(config=config)
    except TypeError as error:
        raise ModelError(
            f"the buffers of {path} ({type(module).__name__}) lie in 16 bits and cannot be "
            f"computed anew: {error}. Load the model with dtype=bfloat16 instead of casting it."
        ) from error
    for name in module._non_persistent_buffers_set:
        old, new = module._buffers[name], fresh._buffers[name]
        assert old is not None and new is not None
        module._buffers[name] = new.to(old.device)
