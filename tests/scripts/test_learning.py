"""scripts/benchmarks/learning.py: what is in its record, and when it is written."""

import json
import sys

import pytest
import torch

from scripts.benchmarks import learning
from scripts.benchmarks.shapes import LLAMA_1B, LLAMA_8B, TINY


def run(monkeypatch, path, *arguments):
    monkeypatch.setattr(sys, "argv", ["learning", "--json", str(path), *arguments])
    learning.main()


def test_a_run_that_is_cut_leaves_its_rows(tmp_path, monkeypatch):
    path, kept = tmp_path / "learning.json", []

    def seconds(model, batches, device, config):
        kept.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)
        if config.steps == 0 and config.masters == "bfloat16":
            raise KeyboardInterrupt
        if config.masters == "bfloat16":
            raise torch.OutOfMemoryError
        return 9.0 + 0.5 * (config.steps or config.block_steps)

    monkeypatch.setattr(learning, "seconds", seconds)
    monkeypatch.setattr(learning, "make_model", lambda shape, device: None)
    monkeypatch.setattr(learning, "plain_row", lambda *_: {"mode": "plain", "step_seconds": 0.25})
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, path, "--shapes", "tiny")
    assert kept == [1, 1, 1, 2, 3, 3, 3, 4]  # three runs a row, one where it does not fit
    record = json.loads(path.read_text())
    assert record["machine"]["torch"] == torch.__version__
    assert [row["mode"] for row in record["rows"]] == ["plain", *list(learning.MODES)[:3]]
    assert [row["step_seconds"] for row in record["rows"]] == [0.25, 0.5, None, 0.5]
    assert all((row["model"], row["length"]) == ("tiny", 32) for row in record["rows"])


def test_shapes_are_measured_that_are_asked_for(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(learning, "rows_of", lambda shape, *_: asked.append(shape) or [{}])
    run(monkeypatch, tmp_path / "a.json", "--shapes", "8b")
    assert asked == [LLAMA_8B]
    run(monkeypatch, tmp_path / "b.json")
    assert asked[1:] == [LLAMA_1B, LLAMA_8B]
    assert TINY not in asked
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "c.json", "--shapes", "70b")
    assert "invalid choice: '70b'" in capsys.readouterr().err


def test_a_plain_training_step_leaves_the_model_as_it_was():
    model = learning.make_model(TINY, "cpu")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    needed = [weight.requires_grad for weight in model.parameters()]
    row = learning.plain_row(model, learning.make_tokens(TINY, 2, 16), "cpu")
    assert row["mode"] == learning.PLAIN and row["step_seconds"] > 0
    assert [weight.requires_grad for weight in model.parameters()] == needed
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
