"""What a command keeps from its terminal."""

import enum
import logging

from torch.utils import _pytree

import experiments.running.guard  # noqa: F401


def test_what_torch_says_of_the_enums_of_torchao_is_not_shown(monkeypatch):
    shown = []
    handler = logging.Handler()
    handler.emit = shown.append
    logger = logging.getLogger("torch.utils._pytree")
    monkeypatch.setattr(logger, "handlers", [handler])
    ours = enum.Enum("Ours", {"A": "a"}, type=str)
    theirs = enum.Enum("Theirs", {"A": "a"}, type=str, module="torchao.common")
    for kind in (theirs, ours):
        _pytree.register_constant(kind)
    (record,) = shown
    assert "Ours" in record.getMessage() and "deprecated" in record.getMessage()
