"""Running a model leaves every module in the mode that it was in."""

import pytest

from dmx.models.running import evaluating, is_purely_causal, maskless_attention


def test_evaluating_restores_every_module_and_not_only_the_root(make_tiny):
    model, other = make_tiny("llama").model.train(), make_tiny("llama").model.eval()
    model.model.layers[1].mlp.eval()
    before = [m.training for m in (*model.modules(), *other.modules())]
    assert len(set(before)) == 2
    with pytest.raises(KeyError), evaluating(model, other):
        assert not any(m.training for m in (*model.modules(), *other.modules()))
        raise KeyError
    assert [m.training for m in (*model.modules(), *other.modules())] == before


def test_a_model_without_masks_is_still_purely_causal(make_tiny):
    model = make_tiny("llama").model
    with maskless_attention(model):
        assert is_purely_causal(model, 64)
    assert is_purely_causal(model, 64)
