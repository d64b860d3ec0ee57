"""Files that are nearly right, for everything that reads files: whatever they hold, a DmxError or a sound result.

    python -m tests.fuzzing --minutes 10      (make fuzz) all readers in turn; prints the count of inputs

`tests/test_fuzzing.py` runs the same with a small fixed budget.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dmx.applying.stored import StoredWeight, from_bytes, to_bytes
from dmx.assignment.assignment import Assignment, make_assignment
from dmx.assignment.budget import Budget
from dmx.assignment.facts import SearchFacts
from dmx.assignment.space import build_space
from dmx.data.readers import read_rows
from dmx.errors import DmxError
from dmx.exporting import read_assignment
from dmx.formats import get_block_format, get_family
from dmx.models import TinyConfig
from dmx.models.tiny import make_tiny
from dmx.models.weight_files import check_whole
from dmx.state import Cache, State, StateFile
from dmx.transforms.stage import read_rotations, write_rotations
from experiments.reporting.record import Record
from mor import SafetyNet
from mor.safety import SCHEMA as NET_SCHEMA

WORDS = (
    *("mxfp4", "mxfp8_e4m3", "bf16", "floor", "mse", "weights", "../a", "/etc/passwd", "a" * 300),
    *(
        "dmx.assignment/1",
        "dmx.assignment/3",
        "re:*",
        "re:.*proj",
        "*",
        "[",
        "lm_head",
        "\ud83d",
        "\0",
    ),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 33)
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=4,
)


def _places(body: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    parts: Any = body.items() if isinstance(body, dict) else enumerate(body)
    inside = [
        (*place, key, *rest)
        for key, part in parts
        if isinstance(part, dict | list)
        for rest in _places(part)
    ]
    return [
        (*place, key) for key, _ in (body.items() if isinstance(body, dict) else enumerate(body))
    ] + inside


@st.composite
def changed_json(draw: Any, body: Any) -> bytes:
    """A body with a few values changed, moved, taken out or put in, and perhaps its text damaged."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(0, 3))):
        places = _places(body)
        if not places:
            break
        *above, last = draw(st.sampled_from(places))
        parent = body
        for key in above:
            parent = parent[key]
        what = draw(st.sampled_from(("value", "number", "other", "delete", "add")))
        if what == "delete":
            del parent[last]
        elif what == "number" and type(parent[last]) in (int, float):
            parent[last] = draw(st.sampled_from((0, -1, 1e308, 2**64, 0.5, float("nan"), True)))
        elif what == "other":  # from elsewhere in the file
            other = draw(st.sampled_from(places))
            value: Any = body
            for key in other:
                value = value[key] if _has(value, key) else None
            parent[last] = copy.deepcopy(value)
        elif what == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from(WORDS))] = draw(VALUES)
        else:
            parent[last] = draw(VALUES)
    text = json.dumps(body).encode()
    damage = draw(st.sampled_from(("none",) * 5 + ("bytes", "twice", "deep")))
    if damage == "bytes":
        return draw(damaged(text))
    if damage == "twice" and text.startswith(b'{"'):
        return b'{"' + text[2:].split(b'"')[0] + b'": 1, ' + text[1:]
    if damage == "deep":
        return text[:-1] + b', "x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    return text


def _has(value: Any, key: Any) -> bool:
    if isinstance(value, dict):
        return key in value
    return isinstance(value, list) and isinstance(key, int) and key < len(value)


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """Content that is cut, or has bytes changed, taken out or put in."""
    made = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(made) - 1)))
        what = draw(st.sampled_from(("cut", "flip", "insert", "remove")))
        if what == "cut":
            del made[at:]
        elif what == "flip" and made:
            made[at] ^= draw(st.integers(1, 255))
        elif what == "insert":
            made[at:at] = draw(st.binary(min_size=1, max_size=9))
        else:
            del made[at : at + draw(st.integers(1, 9))]
    return bytes(made)


@st.composite
def damaged_safetensors(draw: Any, content: bytes) -> bytes:
    """Its bytes damaged, or a header that says something else of them."""
    if draw(st.booleans()):
        return draw(damaged(content))
    length = int.from_bytes(content[:8], "little")
    header = draw(changed_json(json.loads(content[8 : 8 + length])))
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


@dataclass
class Reader:
    """One thing that reads files. `read(content)` may raise DmxError alone."""

    inputs: st.SearchStrategy[bytes]
    read: Callable[[bytes], object]
    count: int = field(default=0)

    def check(self, examples: int, number: int | None = None) -> None:
        """Read so many inputs; of a number of their own, else the same every time.

        Raises:
            Exception: a reader raised anything but a DmxError; hypothesis shows the smallest input.
        """

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=number is None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        @given(self.inputs)
        def run(content: bytes) -> None:
            self.count += 1
            try:
                self.read(content)
            except DmxError as error:
                assert len(str(error)) > 10, "an error says what is wrong"

        (run if number is None else seed(number)(run))()


def _assignment(model: Any) -> Assignment:
    space = build_space(model, get_family("mxfp6_mxfp4").formats)
    choice = [i % 2 for i in range(len(space.units))]
    facts = SearchFacts(name="x", seed=3, family="mxfp6_mxfp4")
    return make_assignment(space, choice, model, budget=Budget(6.0), search=facts)


def _tools() -> list[dict[str, Any]]:
    """Configs of other tools, as they mean something for a tiny model."""
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}
    spec = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}}
    up = "model.layers.0.mlp.up_proj"
    return [
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"targets": ["Linear", "re:.*mlp.*"], "weights": weights}},
            "ignore": ["lm_head", "re:.*o_proj"],
        },
        {
            "layer_quant_config": {"*.down_proj": spec},
            "global_quant_config": spec,
            "exclude": ["lm_head"],
        },
        {
            "quantized_layers": {up: {"quant_algo": "MXFP8", "group_size": 32}},
            "exclude_modules": ["*o_proj"],
        },
        {
            "quant_method": "auto-round",
            **{"bits": 4, "data_type": "mx_fp", "group_size": 32},
            "extra_config": {up: {"bits": 8}, ".*o_proj": {"bits": 16}},
            "modules_to_not_convert": ["gate"],
        },
    ]


def readers(folder: Path) -> dict[str, Reader]:
    """All of them by name; files lie in `folder`."""
    model = make_tiny(TinyConfig())
    assignment = _assignment(model)
    path = assignment.save(folder / "assignment.json")
    body = json.loads(path.read_text())
    with_file = {
        **body,
        "transform": {"name": "learned", "file": "t.safetensors", "sha256": "0" * 64},
    }

    def read_at(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def run(content: bytes) -> object:
            (folder / name).write_bytes(content)
            return read(folder / name)

        return run

    def load_assignment(path: Path) -> None:
        loaded = Assignment.load(path)
        again = (
            Assignment.load(loaded.save(folder / "again.json"))
            if loaded.transform is None
            else loaded
        )
        assert again == loaded
        loaded.check(model)

    block_format = get_block_format("mxfp4")
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    stored = to_bytes({"a": StoredWeight.of(weight, weight, block_format, "floor")}, "x")
    rotations = write_rotations({"a": torch.eye(32)})
    cache, key = Cache(folder / "cache", "x/1", "score file", "scan again"), {"a": 1}
    cache.save(key, {"values": [1.0, 2.0], "done": 1})
    kept = cache.path(key)
    assert kept is not None
    state = StateFile(folder / "state.safetensors", "f", "c", "search", "search again")
    state.save(State({"step": 3}, {"raw": torch.ones(3)}))
    entry = {"weight": {"largest_error": 0.1, "block_format": "mxfp4"}}
    net = {
        "schema": NET_SCHEMA,
        "margin": {"weight": 1.2, "input": 1.2},
        "constant_threshold": None,
        "layers": {"a": entry},
    }
    rows = [json.dumps({"text": f"row {i}", "n": i}) for i in range(4)]
    parquet.write_table(pa.table({"text": ["some text"] * 20}), folder / "rows.parquet")
    tables = (folder / "rows.parquet").read_bytes()

    def tool(content: bytes) -> None:
        (folder / "tool.json").write_bytes(content)
        read_assignment(folder / "tool.json", model).check(model)

    def texts(name: str) -> Callable[[bytes], object]:
        def run(path: Path) -> None:
            for text in read_rows(path, "text"):
                text.encode()

        return read_at(name, run)

    return {
        "assignment": Reader(
            changed_json(body) | changed_json(with_file), read_at("a.json", load_assignment)
        ),
        "weights": Reader(
            damaged_safetensors(stored), lambda c: from_bytes(c, {"a": "mxfp4"}, {"a": (4, 64)})
        ),
        "rotations": Reader(
            damaged_safetensors(rotations), lambda c: read_rotations(c, "transform.safetensors")
        ),
        "scores": Reader(
            changed_json(json.loads(kept.read_text())),
            lambda c: (kept.write_bytes(c), cache.load(key)),
        ),
        "state": Reader(
            damaged_safetensors((folder / "state.safetensors").read_bytes()),
            read_at("state.safetensors", lambda _: state.load()),
        ),
        "safety net": Reader(changed_json(net), read_at("net.json", SafetyNet.load)),
        "record": Reader(
            changed_json({"command": "search", "results": []}), read_at("r.json", Record.load)
        ),
        "tool config": Reader(st.one_of(*map(changed_json, _tools())), tool),
        "weight file": Reader(damaged_safetensors(stored), read_at("w.safetensors", check_whole)),
        "json lines": Reader(damaged("\n".join(rows).encode()), texts("t.jsonl")),
        "parquet": Reader(damaged(tables), texts("t.parquet")),
    }


def main() -> None:
    """All readers in turn, each time with other inputs, until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        every, end, number = readers(Path(folder)), time.monotonic() + 60 * a.minutes, a.seed
        while time.monotonic() < end:
            for reader in every.values():
                number += 1
                reader.check(100, number)
                if time.monotonic() >= end:
                    break
    for name, reader in every.items():
        print(f"{name:12} {reader.count:8,} inputs")
    print(f"{'all':12} {sum(r.count for r in every.values()):8,} inputs, no failure")


if __name__ == "__main__":
    main()
