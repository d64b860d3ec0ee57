"""One process against several: the script at the smallest shape, its record and its table."""

import json

import pytest
import torch

from scripts.benchmarks import processes
from scripts.benchmarks.shapes import TINY
from tests.forked import Forked, places


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sharded_weights_give_the_perplexity_of_one_process_from_half_of_the_weights(
    tmp_path, kind
):
    if kind == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, one is here")
    arguments = ["--device", kind, "--tiny", "--rows", "4", "--length", "32", "--steps", "2"]
    out = ("--out", tmp_path, "--ways", "sharded")
    command = ("-m", "scripts.benchmarks.processes", *arguments, *out)
    started = [Forked(*command, environment=place) for place in places(2)]
    alone = processes.measure(TINY, 4, 32, kind, "alone", 2)
    for process in started:
        assert process.wait() == 0, process.outputs()[1][-2000:]
    sharded = json.loads((tmp_path / "sharded.json").read_text())
    assert set(sharded) == set(alone) and (alone["processes"], sharded["processes"]) == (1, 2)
    assert sharded["weights_mib"] <= 0.55 * alone["weights_mib"] and not sharded["graph"]
    for key in ("perplexity", "perplexity_mxfp4"):
        assert sharded[key] == pytest.approx(alone[key], rel=1e-4) and alone[key] > 1
    text = processes.report([alone, alone | {"way": "whole"}, sharded])
    assert "| sharded | 2 |" in text and "| perplexity of all to four digits | 1 | 1 |" in text
