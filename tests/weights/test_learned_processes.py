"""Two processes that share the rows of each batch learn the weights of one."""

import json
import sys

import pytest
from safetensors.torch import load_file

from tests.forked import Forked, places

SCRIPT = """
import sys, torch, dmx
from dmx.formats import MXFP4
from dmx.models import ModelConfig, TinyConfig, load_model
from dmx.searching import SearchConfig, uniform_assignment
torch.set_num_threads(1)
model = load_model(ModelConfig(id="tiny_llama", dtype="float32", tiny=TinyConfig())).model
batches = list(torch.randint(0, 257, (6, 4, 32), generator=torch.Generator().manual_seed(1)))
assignment = uniform_assignment(model, MXFP4, SearchConfig(name="uniform"))
for block_steps in (0, 5):
    config = dmx.LearnConfig(steps=6, block_steps=block_steps, warmup=2, lr=1e-4)
    folder = f"{sys.argv[1]}/{block_steps}"
    done = dmx.learn_weights(model, assignment, batches, config, folder=folder)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        done.save(folder + "/assignment.json")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def test_two_gloo_processes_learn_the_weights_of_one(tmp_path, monkeypatch):
    started = [Forked("-c", SCRIPT, tmp_path / "two", environment=place) for place in places(2)]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "one")])
    exec(SCRIPT, {})
    for process in started:
        assert process.wait() == 0, process.outputs()[1][-2000:]
    for block_steps in ("0", "5"):
        one, two = (tmp_path / n / block_steps for n in ("one", "two"))
        states = [load_file(f / "learning_state.safetensors")["masters"] for f in (one, two)]
        # AdamW divides by the root of the second moment: what rounds otherwise, at 1e-7, may turn a
        # step where gradients are about 0, by at most the rates of all steps.
        moved = (states[0] - states[1]).abs()
        assert moved.mean() < 1e-6 and moved.max() < 2e-3
        facts = [json.loads((f / "assignment.json").read_text())["weights"] for f in (one, two)]
        for key in ("kl_before", "kl_after"):
            assert facts[1][key] == pytest.approx(facts[0][key], rel=1e-3)
