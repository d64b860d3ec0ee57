"""Safetensors files written tensor by tensor: never more in memory than one layer's.

A file is 8 bytes of header length (little-endian), a JSON header (name -> dtype, shape, place of
the bytes), and the bytes. The header follows from shapes, so it is written first, and the size of
an export is known before anything is.

Source: safetensors, README section "Format".
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dmx.errors import RunError
from dmx.exporting.layouts import TensorSpec
from dmx.files import write_json
from dmx.models.weight_files import safetensors_header

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
INDEX_FILE = "model.safetensors.index.json"
SPARE_BYTES = 64 * 2**20
"""Room for config, tokenizer and headers on top of the tensors."""


@dataclass(frozen=True)
class Part:
    """Tensors that are made together: one layer's, or one that is only copied."""

    specs: Mapping[str, TensorSpec]
    """full tensor name -> what it will be"""
    make: Callable[[], Mapping[str, Tensor]]

    @property
    def bytes(self) -> int:
        """Of its tensors."""
        return sum(spec.bytes for spec in self.specs.values())

    def renamed(self, named: Callable[[str], str]) -> "Part":
        """With other names of its tensors."""
        make = self.make
        return Part(
            {named(name): spec for name, spec in self.specs.items()},
            lambda: {named(name): tensor for name, tensor in make().items()},
        )


def check_disk_space(folder: Path, parts: Sequence[Part]) -> None:
    """Raise RunError unless the file system of `folder`, which need not exist, has room for the
    tensors."""
    needed = sum(part.bytes for part in parts) + SPARE_BYTES
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise RunError(
            f"folder={folder}: {there} has {free / 1e9:.2f} GB free, the export needs "
            f"{needed / 1e9:.2f} GB. Make room or choose another folder."
        )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write to, renamed to it at the end: what exists is whole.

    It goes if the block raises. One that a killed process left goes with the next start: a live
    one is locked, and a lock dies with its process.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    scratch = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(f".{_escaped(folder.name)}.*.tmp"):
            with contextlib.suppress(FileNotFoundError), _locked(left) as is_mine:
                if is_mine:
                    shutil.rmtree(left)
        scratch = Path(
            tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp")
        )
        with _locked(scratch):
            yield scratch
            scratch.chmod(0o755)
            scratch.rename(folder)
    except OSError as error:
        raise RunError(
            f"folder={folder} cannot be written ({error.strerror or error}). Make room, or choose "
            "another folder."
        ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _escaped(name: str) -> str:
    """For a glob: every character as itself."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether no other process holds the folder; it is held meanwhile."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def write_tensors(
    parts: Sequence[Part], folder: Path, metadata: Mapping[str, str], max_shard_bytes: int
) -> int:
    """Write `model.safetensors`, or numbered shards with an index; returns the tensors' bytes."""
    # Wider elements first: every tensor then starts at a multiple of its element's size.
    ordered = sorted(parts, key=lambda p: -max(s.dtype.itemsize for s in p.specs.values()))
    shards = list(_shards(ordered, max_shard_bytes))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        one = len(shards) == 1
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / ("model.safetensors" if one else name), shard, metadata)
        index |= {tensor: name for part in shard for tensor in part.specs}
    total = sum(part.bytes for part in parts)
    if len(shards) > 1:
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": index})
    return total


def _shards(parts: Sequence[Part], max_bytes: int) -> Iterator[list[Part]]:
    shard: list[Part] = []
    for part in parts:
        if shard and sum(p.bytes for p in shard) + part.bytes > max_bytes:
            yield shard
            shard = []
        shard.append(part)
    yield shard


def _write_file(path: Path, parts: Sequence[Part], metadata: Mapping[str, str]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    place = 0
    for part in parts:
        for name, spec in part.specs.items():
            end = place + spec.bytes
            dtype, shape = DTYPE_NAMES[spec.dtype], list(spec.shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, end]}
            place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for part in parts:
            tensors = part.make()
            for name, spec in part.specs.items():
                tensor = tensors[name]
                made = TensorSpec(tensor.dtype, tuple(tensor.shape))
                assert made == spec, f"{name}: planned {spec}, made {made}"
                flat = tensor.detach().cpu().contiguous().flatten()
                file.write(flat.view(torch.uint8).numpy().data)
            del tensors, tensor, flat  # before the next layer is made
        file.flush()
        os.fsync(file.fileno())


def read_headers(folder: Path) -> dict[str, TensorSpec]:
    """name -> dtype and shape of every tensor of the safetensors files in a folder; ModelError for one that is cut
    off."""
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    specs: dict[str, TensorSpec] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in safetensors_header(path).items():
            specs[name] = TensorSpec(dtypes[entry["dtype"]], tuple(entry["shape"]))
    return specs
