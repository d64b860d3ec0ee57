"""AdamW on one flat tensor of masters, with masters in float32 or bfloat16, moments in these or 8 bits.

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    w = w - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)           no decay

Everything is computed in float32. What is kept in fewer bits is rounded stochastically: a step is smaller than
half a unit in the last place of most weights, and rounding it to nearest would lose it.

A gradient in float32 exists for a chunk of elements at a time, and so does all that is widened beside it.

Source: AdamW, arXiv 1711.05101; stochastic rounding, arXiv 2010.06192.
"""

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dmx.models.processes import Processes
from dmx.weights.moments import Moments8

CHUNK = 1 << 26
"""Elements that are updated together by the fused kernel."""
NARROW_CHUNK = 1 << 22
"""Elements that are updated together where some are kept in fewer bits: a dozen float32 tensors of so many
exist meanwhile, small enough for a GPU's cache. Whole blocks of 8-bit moments."""
STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
"""What moments are kept in; int8: `dmx.weights.moments`."""
BETAS, EPSILON = (0.9, 0.99), 1e-8


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """float32 to bfloat16: up or down with the chance that keeps the mean; exact values stay."""
    noise = torch.randint(
        0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    bits = (x.view(torch.int32) + noise) & -(1 << 16)
    return bits.view(torch.float32).to(torch.bfloat16)


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
        self.first: Tensor | Moments8
        self.second: Tensor | Moments8
        if state_dtype == torch.int8:
            self.first, self.second = (Moments8(masters, signed=s) for s in (True, False))
        else:
            self.first = torch.zeros_like(masters, dtype=state_dtype)
            self.second = torch.zeros_like(self.first)
        self._generator = torch.Generator(masters.device)
        is_wide = masters.dtype == state_dtype == torch.float32
        self._is_fused = is_wide and masters.device.type in ("cpu", "cuda")
        self._chunk = CHUNK if self._is_fused else NARROW_CHUNK
        size = min(self._chunk, len(masters))
        self._wide = torch.empty(size, dtype=torch.float32, device=masters.device)

    @torch.no_grad()
    def step(self, gradient: Tensor, lr: float, factor: Tensor) -> None:
        """One step along `factor * gradient`.

        Args:
            gradient: (n,) of any floating dtype. factor: (1,) float32 on its device.
        """
        self._generator.manual_seed(self.seed * 1_000_003 + self.count)
        for start in range(0, len(self.masters), self._chunk):
            part = slice(start, start + self._chunk)
            wide = self._wide[: len(self.masters[part])]
            torch.mul(gradient[part], factor, out=wide)
            self._step_part(part, wide, lr)
        self.count += 1

    @torch.no_grad()
    def step_clipped(
        self, gradient: Tensor, lr: float, max_norm: float, processes: Processes
    ) -> Tensor:
        """One step along the gradient that all processes have together, shortened to `max_norm` where it is
        longer; its norm before that, 0-d float32. `gradient` becomes the common one; nothing waits for the
        device."""
        if processes.size > 1:
            gradient.copy_(processes.mean(gradient))
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self.step(gradient, lr, (max_norm / (norm + 1e-6)).clamp(max=1.0)[None])
        return norm

    def _step_part(self, part: slice, gradient: Tensor, lr: float) -> None:
        if isinstance(self.first, Moments8) or isinstance(self.second, Moments8):
            self._step_8bit(part, gradient, lr)
            return
        kept = (self.masters[part], self.first[part], self.second[part])
        if self._is_fused:
            # The kernel counts the step itself.
            count = torch.full((), float(self.count), device=gradient.device)
            adamw(
                [kept[0]],
                [gradient],
                [kept[1]],
                [kept[2]],
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
            return
        master, first, second = (t.to(torch.float32, copy=True) for t in kept)
        self._advance(master, first, second, gradient, lr)
        for target, value in zip(kept, (master, first, second), strict=True):
            self._keep(target, value)

    def _step_8bit(self, part: slice, gradient: Tensor, lr: float) -> None:
        assert isinstance(self.first, Moments8) and isinstance(self.second, Moments8)
        target = self.masters[part]
        end = part.start + len(target)
        master = target.to(torch.float32, copy=True)
        first = self.first.read(part.start, end)
        second = self.second.read(part.start, end).square_()
        self._advance(master, first, second, gradient, lr)
        self._keep(target, master)
        self.first.write(part.start, first, self._generator)
        self.second.write(part.start, second.sqrt_(), self._generator)

    def _advance(
        self, master: Tensor, first: Tensor, second: Tensor, gradient: Tensor, lr: float
    ) -> None:
        """All float32, changed in place but for the gradient."""
        corrections = [1 - beta ** (self.count + 1) for beta in BETAS]
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        denominator = second.sqrt().div_(math.sqrt(corrections[1])).add_(EPSILON)
        master.addcdiv_(first, denominator, value=-lr / corrections[0])

    def _keep(self, target: Tensor, value: Tensor) -> None:
        narrow = target.dtype == torch.bfloat16
        target.copy_(round_stochastically(value, self._generator) if narrow else value)

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
