"""Running a model leaves every module in the mode that it was in."""

import pytest

from dmx.models.running import evaluating


def test_evaluating_restores_every_module_and_not_only_the_root(make_tiny):
    model, other = make_tiny("llama").model.train(), make_tiny("llama").model.eval()
    model.model.layers[1].mlp.eval()
    before = [m.training for m in (*model.modules(), *other.modules())]
    assert len(set(before)) == 2
    with pytest.raises(KeyError), evaluating(model, other):
        assert not any(m.training for m in (*model.modules(), *other.modules()))
        raise KeyError
    assert [m.training for m in (*model.modules(), *other.modules())] == before
