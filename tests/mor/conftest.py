"""What several tests of mor share."""

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
