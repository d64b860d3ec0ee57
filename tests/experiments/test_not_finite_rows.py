"""Losses that are not finite: of the model as it is an error that says where, of a quantized one a row that says why."""

import math

import pytest
import torch

from dmx.errors import ModelError
from dmx.formats import get_block_format
from dmx.models import TinyConfig, byte_tokenizer
from dmx.models.tiny import make_tiny
from dmx.searching import SearchConfig, uniform_assignment
from experiments import search
from experiments.running.measuring import measure_losses
from experiments.running.settings import EvaluationConfig
from tests.settings import TINY


def test_a_loss_of_the_model_as_it_is_names_window_and_module(tiny_random):
    model, tokens = tiny_random.model, torch.arange(96) % 200
    tokens[40] = 222
    seen = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    model.model.layers[0].register_forward_hook(
        lambda _m, _a, out: torch.where((seen[-1] == 222).any(1)[:, None, None], torch.nan, out)
    )
    config = EvaluationConfig(window=32, batch_size=2)
    common = {"inputs": True, "label": "x"}
    with pytest.raises(
        ModelError, match=r"loss of window 1 of the eval.*output of model.layers.0 "
    ):
        measure_losses(model, tokens, config, None, **common)
    uniform = uniform_assignment(model, get_block_format("mxfp4"), SearchConfig(name="uniform"))
    losses = measure_losses(model, tokens, config, uniform, **common)
    fields = losses.fields()
    assert math.isnan(losses.nll) and fields["perplexity"] is None and fields["window_nll"] is None
    assert set(fields["reasons"].values()) == {"the loss is not finite"}


def test_a_command_names_the_weight_and_leaves_no_result(run, tmp_path):
    model = make_tiny(TinyConfig())
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = torch.nan
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    settings = [a for a in TINY if not a.startswith("model=")]
    own = ("model=smollm2_135m", f"model.id={tmp_path}/model", "model.dtype=float32")
    own += ("search=differentiable", "search.steps=2", f"run.folder={tmp_path}/run")
    code, out, err = run(search, *settings, *own)
    assert code == 2 and not out and "model.layers.1.mlp.down_proj.weight[3, 5]" in err
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"config.yaml", "error.json"}
