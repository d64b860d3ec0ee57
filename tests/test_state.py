"""Kept results and states of runs: found again under the same key, refused under another, never damaged."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dmx import state
from dmx.errors import RunError
from dmx.state import Cache, State, StateFile, code_version, read_source

KERNELS = Path(state.__file__).parent / "kernels"


# ---------------------------------------------------------------- code


def edited(target, addition):
    """A reader of sources under which one file has another content."""
    return lambda path: read_source(path) + (addition if path == target else b"")


@pytest.mark.parametrize(
    "name", ["cpu.cpp", "triton_mx.py", "triton_loss.py", "ops.py", "../numerics/rounding.py"]
)
def test_another_kernel_is_another_version_of_the_scan(name):
    path = (KERNELS / name).resolve()
    before = code_version("dmx.searching.heuristics")
    assert before == code_version("dmx.searching.heuristics", edited(path, b""))
    assert before != code_version(
        "dmx.searching.heuristics", edited(path, b"\nint_of_another = 1;\n")
    )


def test_comments_docstrings_and_modules_that_it_does_not_reach_do_not_count():
    before = code_version("dmx.searching.heuristics")
    path = KERNELS / "ops.py"
    assert before == code_version(
        "dmx.searching.heuristics", edited(path, b'\n# a word\n"""more"""\n')
    )
    foreign = KERNELS.parent / "exporting" / "writing.py"
    assert before == code_version("dmx.searching.heuristics", edited(foreign, b"\nx = 1\n"))


def test_a_name_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no module of dmx"):
        code_version("dmx.no_such_module")


# ---------------------------------------------------------------- cache


@pytest.fixture
def kept(tmp_path):
    return Cache(tmp_path, "test/1", "score file", "scan again")


def test_a_result_is_found_under_its_own_key_alone(kept, tmp_path):
    key = {"formats": ("a", "b"), "n": 3}
    assert kept.load(key) is None
    kept.save(key, {"values": [0.1, 1e-300]})
    assert kept.load(key) == {"values": [0.1, 1e-300]}
    assert kept.load(key | {"n": 4}) is None and len(list(tmp_path.iterdir())) == 1
    assert Cache(None, "test/1", "x", "y").path(key) is None


@pytest.mark.parametrize("damage", ["cut", "result", "key", "schema", "no result", "list"])
def test_a_damaged_file_is_an_error_that_names_it_and_the_way_out(kept, damage):
    kept.save({"n": 3}, [1, 2])
    path = kept.path({"n": 3})
    body = json.loads(path.read_text())
    body |= {"result": [1, 3]} if damage == "result" else {}
    body |= {"key": {"n": 4}} if damage == "key" else {}
    body |= {"schema": "test/2"} if damage == "schema" else {}
    if damage == "no result":
        del body["result"]
    text = json.dumps([body] if damage == "list" else body)
    path.write_text(text[:-9] if damage == "cut" else text)
    with pytest.raises(RunError, match=rf"score file .*{path.name} is damaged .*to scan again"):
        kept.load({"n": 3})


# ---------------------------------------------------------------- state


def state_file(tmp_path, fingerprint="f", code="c"):
    return StateFile(tmp_path / "run.safetensors", fingerprint, code, "search", "search again")


def test_a_state_comes_back_to_the_bit(tmp_path):
    file = state_file(tmp_path)
    assert file.load() is None
    tensors = {
        "raw": torch.tensor([0.1, -0.0, torch.inf]),
        "gain": torch.full((2, 3), torch.nan, dtype=torch.float64),
        "half": torch.ones(3, dtype=torch.bfloat16).requires_grad_(),
        "none": torch.zeros(0, 4, dtype=torch.int64),
    }
    file.save(State({"step": 3, "seconds": 0.1 + 0.2, "rows": [{"a": None}]}, tensors))
    found = file.load()
    assert found.facts == {"step": 3, "seconds": 0.1 + 0.2, "rows": [{"a": None}]}
    assert set(found.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        torch.testing.assert_close(
            found.tensors[name], tensor.detach(), rtol=0, atol=0, equal_nan=True
        )
    assert StateFile(None, "f", "c", "search", "x").load() is None


def test_a_state_of_another_run_or_other_code_is_refused(tmp_path):
    state_file(tmp_path).save(State({"step": 3}))
    with pytest.raises(RunError, match="of a search with other settings, data or model"):
        state_file(tmp_path, fingerprint="g").load()
    with pytest.raises(RunError, match=r"written by another version of dmx.*delete it to search"):
        state_file(tmp_path, code="d").load()


def test_a_refusal_names_the_settings_that_differ(tmp_path):
    file = state_file(tmp_path)
    other = replace(file, fingerprint="g", settings={"lr": 2.0, "order": "a", "on": None, "new": 1})
    replace(file, settings={"lr": 2.0, "order": "b", "on": True, "old": 1}).save(State())
    with pytest.raises(
        RunError, match=r"model \(order is b there, a here; on is true there, null here\)\."
    ):
        other.load()
    for alike in (replace(file, fingerprint="g"), replace(other, settings={"lr": 2.0})):
        with pytest.raises(RunError, match=r"other settings, data or model\. Choose"):
            alike.load()


@pytest.mark.parametrize("damage", ["empty", "cut", "bit", "text", "no facts"])
def test_a_damaged_state_is_an_error_that_names_it(tmp_path, damage):
    file = state_file(tmp_path)
    file.save(State({"step": 3}, {"raw": torch.ones(4)}))
    content = bytearray(file.path.read_bytes())
    if damage == "bit":
        content[-1] ^= 1
    elif damage == "no facts":
        content = bytearray(bytes(content).replace(b'"facts"', b'"fakts"'))
    made = {"empty": b"", "cut": content[:-3], "text": b"{}"}.get(damage, content)
    file.path.write_bytes(made)
    with pytest.raises(RunError, match=r"run\.safetensors is damaged .*Delete it to search again"):
        file.load()
