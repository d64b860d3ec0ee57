"""Counters of MoR layers, where shapes are unusual."""

import pytest
import torch
from torch import nn

import mor
from mor import MorConfig


@pytest.mark.parametrize("policy", ["block_two_way", "block_three_way"])
@pytest.mark.parametrize("partition", ["8x8", "row", "column"])
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_an_empty_batch_has_no_blocks(policy, partition, shape):
    """Ranks without tokens are common in training with experts or ragged batches."""
    config = MorConfig(policy=policy, partition=partition)
    model = mor.swap_linears(nn.Sequential(nn.Linear(32, 16)), config)
    x = torch.zeros(shape, requires_grad=True)
    out = model(x)
    out.sum().backward()
    assert out.shape == (*shape[:-1], 16) and x.grad.shape == shape
    found = mor.stats(model)
    assert found["operands"]["input"]["elements"] == 0
    assert found["operands"]["weight"]["elements"] == 32 * 16
