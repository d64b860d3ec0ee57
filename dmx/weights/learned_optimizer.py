"""AdamW on one flat tensor of masters, with masters in float32 or bfloat16, moments in these or 8 bits.

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    w = w - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)           no decay

Everything is computed in float32: where all is kept so, by PyTorch's fused kernel, for which a gradient in float32
exists for a chunk of elements at a time; else by `dmx.numerics.moments`, which rounds stochastically.

Source: AdamW, arXiv 1711.05101.
"""

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dmx.kernels import ops
from dmx.numerics.moments import Moments, Moments8, StepNumbers, step_keys
from dmx.processes import Processes

CHUNK = 1 << 26
"""Elements that are updated together by the fused kernel."""
STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
"""What moments are kept in; int8: `dmx.numerics.moments`."""
BETAS, EPSILON = (0.9, 0.99), 1e-8


def warm_cosine(step: int, steps: int, peak: float, warmup: int) -> float:
    """Rate of a step, 0 to steps - 1: rises to its peak in `warmup` steps, falls to 0 by half a cosine."""
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * share))


class AdamW:
    """Moments and steps; `masters` is changed in place.

    Args:
        masters: (n,) float32 or bfloat16.
        state_dtype: of both moments, one of STATES.
        seed: of the stochastic rounding.
    """

    def __init__(self, masters: Tensor, state_dtype: torch.dtype, seed: int) -> None:
        self.masters, self.seed, self.count = masters, seed, 0
        self.first: Moments
        self.second: Moments
        if state_dtype == torch.int8:
            self.first, self.second = (Moments8(masters, signed=s) for s in (True, False))
        else:
            self.first = torch.zeros_like(masters, dtype=state_dtype)
            self.second = torch.zeros_like(self.first)
        is_wide = masters.dtype == state_dtype == torch.float32
        self._is_fused = is_wide and masters.device.type in ("cpu", "cuda")
        size = min(CHUNK, len(masters)) if self._is_fused else 0
        self._wide = torch.empty(size, dtype=torch.float32, device=masters.device)

    @torch.no_grad()
    def step(self, gradient: Tensor, lr: float, factor: Tensor) -> None:
        """One step along `factor * gradient`.

        Args:
            gradient: (n,) of any floating dtype. factor: (1,) float32 on its device.
        """
        if self._is_fused:
            self._step_fused(gradient, lr, factor)
        else:
            numbers = self._numbers(lr)
            ops.narrow_adamw(self.masters, gradient, factor, self.first, self.second, numbers)
        self.count += 1

    @torch.no_grad()
    def step_clipped(
        self,
        gradient: Tensor,
        lr: float,
        max_norm: float,
        processes: Processes,
        *,
        in_pieces: bool = False,
    ) -> Tensor:
        """One step along the gradient that all processes have together, shortened to `max_norm` where it is
        longer; its norm before that, 0-d float32. `gradient` becomes the common one; nothing waits for the
        device.

        Args:
            in_pieces: the masters are this process's rows, and the gradient is the common one of these.
        """
        if not in_pieces:
            processes.average(gradient)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        if in_pieces:
            norm = processes.total(norm.square()).sqrt()
        self.step(gradient, lr, (max_norm / (norm + 1e-6)).clamp(max=1.0)[None])
        return norm

    def _step_fused(self, gradient: Tensor, lr: float, factor: Tensor) -> None:
        assert isinstance(self.first, Tensor) and isinstance(self.second, Tensor)
        for start in range(0, len(self.masters), CHUNK):
            part = slice(start, start + CHUNK)
            wide = self._wide[: len(self.masters[part])]
            torch.mul(gradient[part], factor, out=wide)
            # The kernel counts the step itself.
            count = torch.full((), float(self.count), device=gradient.device)
            adamw(
                [self.masters[part]],
                [wide],
                [self.first[part]],
                [self.second[part]],
                [],
                [count],
                fused=True,
                amsgrad=False,
                beta1=BETAS[0],
                beta2=BETAS[1],
                lr=lr,
                weight_decay=0.0,
                eps=EPSILON,
                maximize=False,
            )

    def _numbers(self, lr: float) -> StepNumbers:
        corrections = [1 - beta ** (self.count + 1) for beta in BETAS]
        return StepNumbers(
            *BETAS,
            rest1=1 - BETAS[0],
            rest2=1 - BETAS[1],
            rate=lr / corrections[0],
            root=1 / math.sqrt(corrections[1]),
            epsilon=EPSILON,
            keys=step_keys(self.seed, self.count),
        )

    def state(self) -> dict[str, Tensor]:
        """Tensors that `load` takes back; the count is the caller's step."""
        tensors: dict[str, Tensor] = {}
        for name, moment in (("first", self.first), ("second", self.second)):
            if isinstance(moment, Moments8):
                tensors |= {name: moment.codes, f"{name}_scales": moment.scales}
            else:
                tensors[name] = moment
        return tensors

    @torch.no_grad()
    def load(self, state: dict[str, Tensor], count: int) -> None:
        """Go on after `count` steps."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.count = count
