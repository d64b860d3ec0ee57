"""Whatever runs a model leaves every module in the mode that it was in, not only the root."""

import importlib.util

import pytest
import torch

import dmx
import mor
from dmx.formats import MXFP4
from dmx.searching import SearchConfig, uniform_assignment

BATCHES = list(torch.randint(0, 257, (2, 2, 32), generator=torch.Generator().manual_seed(1)))
TOKENS = torch.cat([batch.flatten() for batch in BATCHES])


def measure_divergence(loaded, other):
    dmx.kl_divergence(loaded.model, other.model, TOKENS, window=32)


def measure_tasks(loaded, _):
    dmx.zero_shot(loaded.model, loaded.tokenizer, ["winogrande"], limit=2, quiet=True)


def calibrate_net(loaded, _):
    mor.SafetyNet.calibrate(loaded.model, uniform(loaded.model), BATCHES)


def search_formats(loaded, _):
    config = SearchConfig(name="kl", units="layer")
    dmx.search(loaded.model, BATCHES, dmx.Budget(5.0), config)


def uniform(model):
    return uniform_assignment(model, MXFP4, SearchConfig(name="uniform"))


WAYS = {
    "perplexity": lambda loaded, _: dmx.perplexity(loaded.model, TOKENS, window=32),
    "kl_divergence": measure_divergence,
    "zero_shot": measure_tasks,
    "gptq": lambda loaded, _: dmx.gptq(loaded.model, uniform(loaded.model), BATCHES),
    "safety_net": calibrate_net,
    "search": search_formats,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_module_keeps_its_mode(way, make_tiny, request):
    if way == "zero_shot":
        request.getfixturevalue("dmx_data")
        if importlib.util.find_spec("lm_eval") is None:
            pytest.skip("needs lm-eval: pip install -e '.[eval]'")
    loaded, other = make_tiny("llama"), make_tiny("qwen2")
    for model in (loaded.model, other.model):
        model.train()
        model.model.layers[1].mlp.eval()
    before = [m.training for x in (loaded, other) for m in x.model.modules()]
    assert len(set(before)) == 2
    WAYS[way](loaded, other)
    assert [m.training for x in (loaded, other) for m in x.model.modules()] == before
