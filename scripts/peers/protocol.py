"""What a runner is asked for (`request.json`, `tokens.safetensors`) and answers (`answer.json`, `weights.safetensors`,
`rotated.safetensors`).

Both lie in the folder of one cell. This file is the one that both sides import: the standard library alone, since an
environment of a peer holds the peer and what it needs.
"""

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

REQUEST = "request.json"
TOKENS = "tokens.safetensors"
"""`tokens` (rows, window) int64 for the search; `evaluation` (windows, window) int64 for the peer's own measurement."""
ANSWER = "answer.json"
WEIGHTS = "weights.safetensors"
"""`NAME.weight` of every layer with a format, dequantized; of a stage that changes weights."""
ROTATED = "rotated.safetensors"
"""Of a rotated model: every parameter that WEIGHTS does not hold, by name, and ONLINE_ROTATION where there is one."""
ONLINE_ROTATION = "online_rotation"
"""(size, size) float32, by which every `size` channels of a layer's input are multiplied before they are quantized; the
file's metadata of this key names the layers, apart by spaces."""
FAILURE = "failure.txt"
INPUTS = "inputs"
"""The option by which a method is told to leave inputs alone (bf16); else they have the formats of their weights."""
PUBLISHED = "dmx"
"""The option that names the folder of the published dMX's PLUGINS."""
PLUGINS = ("learned_float_quantizer", "custom_trainer")
"""Modules."""
COMPILE = "compile"
"""The option by which the published dMX's quantizers are not compiled (no)."""


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A dataclass in a JSON file."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            ValueError: it is no JSON object of these keys, names those that are missing or unknown; or of values of
                their types.
        """
        try:
            body = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged ({error}): delete it, and it is made again"
            ) from error
        known = {f.name for f in fields(cls)}
        if not isinstance(body, dict) or set(body) != known:
            found = sorted(set(body) ^ known) if isinstance(body, dict) else type(body).__name__
            raise ValueError(f"{path}: keys that are missing or unknown: {found}")
        hints = get_type_hints(cls)
        if wrong := [f"{k}={v!r:.80}" for k, v in body.items() if not _fits(v, hints[k])]:
            raise ValueError(
                f"{path} is damaged ({', '.join(wrong)}): delete it, and it is made again"
            )
        return cls(**body)

    def save(self, path: Path) -> None:
        """Write a file, whole or not at all."""
        part = Path(f"{path}.part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.replace(path)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a type, whatever lists and objects hold."""
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    return any(isinstance(value, int | float if k is float else get_origin(k) or k) for k in kinds)


@dataclass(frozen=True, kw_only=True)
class Request(_Kept):
    """What a peer is asked for."""

    method: str
    """Of the peer."""
    model: str
    """Folder of safetensors and a tokenizer."""
    dtype: str
    device: str
    formats: list[str]
    """Candidates of every unit, cheapest first, by our names."""
    units: list[list[str]]
    """Layers that share one choice; every layer that is to have a format is in one."""
    limit: float
    """Upper bound of the average element_bits over the weights of these layers."""
    seed: int
    given: dict[str, str] | None
    """layer -> format, that another method chose; None: this one chooses."""
    own_windows: int
    """The peer measures its own model on so many windows of `evaluation`; 0: not asked for."""
    options: dict[str, Any]
    """Of the peer alone."""

    @property
    def has_inputs(self) -> bool:
        """Whether inputs are quantized, in the format of their weights; else they are left alone."""
        return INPUTS not in self.options


@dataclass(frozen=True, kw_only=True)
class Answer(_Kept):
    """What a peer answers."""

    formats: dict[str, str]
    """layer -> our name of its format"""
    seconds: float
    """Of the search, or of the stage that changes weights; loading the model does not count."""
    peak_memory_bytes: int
    """Of the process, or on a GPU of its allocator."""
    versions: dict[str, str]
    said_bits: float | None
    """The average as the peer counts it."""
    own_nll: list[float] | None
    """nats/token of each window in the peer's own model, weights and inputs quantized."""
    notes: list[str] = field(default_factory=list)
    """How it ran, where that is not as its own command would."""


@contextlib.contextmanager
def ending_with_this() -> Iterator[int]:
    """What processes that are started meanwhile give to `end_with`, passed on to them, to end with this one, however that ends."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def end_with(descriptor: int) -> None:
    """End this process when the other end of a pipe is closed, as the system closes those of a process that was killed.

    Args:
        descriptor: the end to read from, in which nothing is ever written.
    """

    def wait() -> None:
        os.read(descriptor, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def layer_bits(formats: Mapping[str, str], elements: Mapping[str, int]) -> float:
    """Average element_bits by weight elements, of the names alone; beside `SearchSpace.average` a second count."""
    bits = {name: int(name.removeprefix("mxfp")[0]) for name in set(formats.values())}
    total = sum(elements[layer] for layer in formats)
    return sum(bits[f] * elements[layer] for layer, f in formats.items()) / total
