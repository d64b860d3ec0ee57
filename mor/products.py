"""The three products of `MorLinear`, each with its two operands decided on.

A product runs in FP8 only if both operands were accepted; otherwise both enter in BF16, the
accepted one as its dequantized value. Two paths:

Tensor path (policy and partition tensor): the host must know the decision to choose the product.
A pass (forward, backward) waits for the device at most once: all its errors travel in one copy,
and while they travel the product that the last decision would choose is already running; it is
thrown away where the decision turns out otherwise. Between refreshes nothing waits. On Hopper and
newer accepted operands really go through `torch._scaled_mm`. An operand and its transpose share
scale and decision, so the backward pass takes those of input and weight over from the forward.

General path (blocks, rows, columns): no hardware form, emulated with the values that the policy
gives: one computation whether a product counts as FP8 or BF16, so nothing waits.

Source: MoR, arXiv 2512.22804. Speculation, `refresh_every` and the sharing are ours.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mor import fp8
from mor.config import BF16_INDEX, MorConfig, MorError
from mor.fp8 import Fp8
from mor.partition import parse_partition
from mor.policy import quantize, round_to_bf16
from mor.state import LayerState

FAST_ACCUMULATION = {"forward": True, "grad_input": False, "grad_weight": False}
"""As torchao's float8 training: gradients keep full accumulation."""


def is_tensor_path(config: MorConfig) -> bool:
    return config.policy == "tensor" and config.partition == "tensor"


def uses_hardware(config: MorConfig, device: torch.device) -> bool:
    """Whether accepted operands go through FP8 matrix products. MorError: they must and cannot."""
    available = fp8.has_fp8_products(device)
    if config.products == "real" and not available:
        raise MorError(
            f"mor.products=real, but {device.type} has no FP8 matrix products (compute capability "
            "8.9 or higher). Set mor.products=auto or emulated."
        )
    return available and config.products != "emulated"


class Trials:
    """One or two operands with their casts to every FP8 format of the ladder, errors still on the
    device."""

    def __init__(
        self,
        operands: list[Tensor],
        state: LayerState,
        held: list[str | None],
        *,
        transposed: bool = False,
    ) -> None:
        """held: the decisions to keep; None decides anew. transposed: casts of the transposes, too."""
        config = state.config
        self.operands, self.config, self.held = operands, config, held
        self.largest = fp8.amax(*operands)
        self.casts: list[dict[str, fp8.Cast]] = [{} for _ in operands]
        self.errors: Tensor | None = None
        """(n_formats * n,) float64, on the device, or on the host once `arrival` is over."""
        self.arrival: torch.cuda.Event | None = None
        if None in held:
            n, names = len(operands), config.fp8_formats
            memory: list[Tensor | None] = [None] * len(names)
            if operands[0].is_cuda and names:
                # One layer's passes wait for their errors before the next begins: it is free.
                self.errors, self.arrival = state.landing(n * len(names))
                memory = [self.errors] if len(names) == 1 else [*self.errors.split(n)]
            errors = [
                self._cast(name, range(n), transposed, True, room)
                for name, room in zip(names, memory, strict=True)
            ]
            if self.arrival is not None:
                self.arrival.record()
            elif errors:
                self.errors = torch.cat([e for e in errors if e is not None])
        else:
            for name in sorted({name for name in held if name and name != "bf16"}):
                which = [i for i, own in enumerate(held) if own == name]
                self._cast(name, which, transposed, False, None)

    def _cast(
        self,
        format: str,
        which: Sequence[int],
        transposed: bool,
        measured: bool,
        landing: Tensor | None,
    ) -> Tensor | None:
        largest = self.largest
        if len(which) < len(self.operands):
            largest = largest[which[0] : which[0] + 1]
        operands = [self.operands[i] for i in which]
        casts, errors = fp8.cast(
            operands, largest, format, transposed=transposed, measured=measured, landing=landing
        )
        for i, cast in zip(which, casts, strict=True):
            self.casts[i][format] = cast
        return errors

    def wait(self) -> list[float]:
        """The errors, on the host; the pass's one wait. None are measured: no wait, no errors."""
        if self.errors is None:
            return []
        if self.arrival is not None:
            self.arrival.synchronize()
        errors: list[float] = self.errors.tolist()
        return errors

    def decide(self, errors: list[float]) -> tuple[list[str], list[float | None]]:
        """Of each operand the first format whose error is below its threshold, and the error of the
        ladder's first format; errors of all formats and operands, none = all are held."""
        if not errors:
            return [name or "bf16" for name in self.held], [None] * len(self.held)
        n, config = len(self.operands), self.config
        formats = []
        for i in range(n):
            passing = (
                name
                for name, error in zip(config.fp8_formats, errors[i::n], strict=True)
                if error < config.threshold_of(name)
            )
            formats.append(next(passing, "bf16"))
        return formats, list(errors[:n])


class _Operand:
    """One side of a product: FP8, or values that enter in BF16."""

    def __init__(
        self,
        x: Tensor,
        largest: Tensor,
        row: int,
        format: str,
        *,
        cast: Fp8 | None,
        transposed: bool = False,
    ) -> None:
        """row: of largest, `fp8.amax(x)`. cast: codes in the product's orientation, where made."""
        self.x, self.largest, self.row = x, largest, row
        self.format, self.cast, self.transposed = format, cast, transposed

    def fp8(self) -> Fp8:
        """Codes in the product's orientation, contiguous."""
        if self.cast is None:
            largest = self.largest[self.row : self.row + 1]
            casts, _ = fp8.cast(
                [self.x],
                largest,
                self.format,
                plain=not self.transposed,
                transposed=self.transposed,
            )
            self.cast = casts[0].transposed if self.transposed else casts[0].plain
            assert self.cast is not None
        return self.cast

    def dense(self) -> Tensor:
        """Values in BF16: dequantized if accepted."""
        if self.format != "bf16":
            return self.fp8().dequantize(torch.bfloat16)
        values = self.x.to(torch.bfloat16)
        return values.t() if self.transposed else values

    @property
    def shape(self) -> torch.Size:
        """In the product's orientation."""
        return self.x.shape[::-1] if self.transposed else self.x.shape


def _multiply(
    product: str, a: _Operand, b: _Operand, config: MorConfig, dtype: torch.dtype
) -> tuple[Tensor, str]:
    """a @ b.T and how it was executed."""
    if "bf16" in (a.format, b.format):
        return fp8.bf16_product(a.dense(), b.dense(), dtype), "bf16"
    real = uses_hardware(config, a.x.device) and fp8.fits_hardware(
        a.format, b.format, a.shape[0], b.shape[0], a.shape[1]
    )
    if not real:
        return fp8.emulated_product(a.fp8(), b.fp8(), dtype), "fp8_emulated"
    fast = FAST_ACCUMULATION[product]
    return fp8.real_product(a.fp8(), b.fp8(), dtype, fast_accumulation=fast), "fp8"


def tensor_forward(
    x: Tensor, weight: Tensor, state: LayerState, deciding: bool, counting: bool
) -> tuple[Tensor, Tensor, list[str]]:
    """x @ weight.T, `fp8.amax` of both, and the formats decided on."""
    config, names = state.config, ("input", "weight")
    held = [None if deciding else state.formats.get(name) for name in names]
    trials = Trials([x, weight], state, held)

    def product(formats: list[str]) -> tuple[Tensor, str]:
        a, b = (
            _Operand(y, trials.largest, i, name, cast=_plain(casts, name))
            for i, (y, casts, name) in enumerate(
                zip(trials.operands, trials.casts, formats, strict=True)
            )
        )
        return _multiply("forward", a, b, config, x.dtype)

    likely = [held[i] or state.formats.get(name, config.formats[0]) for i, name in enumerate(names)]
    out, execution = product(likely)
    formats, errors = trials.decide(trials.wait())
    if formats != likely:
        out, execution = product(formats)
    if counting:
        for i, name in enumerate(names):
            state.formats[name] = formats[i]
            _count(state, name, trials.operands[i], formats[i], errors[i])
        state.count_product("forward", execution)
    return out, trials.largest, formats


def _plain(casts: dict[str, fp8.Cast], format: str) -> Fp8 | None:
    return casts[format].plain if format in casts else None


def _count(state: LayerState, operand: str, x: Tensor, format: str, error: float | None) -> None:
    state.count_operand(operand, format, x.numel(), error, error != float("inf"))


def tensor_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    largest: Tensor,
    formats: Sequence[str],
    state: LayerState,
    deciding: bool,
    counting: bool,
    need_input: bool,
    need_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by x and weight, None for one that is not needed. largest and formats are of x and
    weight, as `tensor_forward` gave them."""
    config, (input_format, weight_format) = state.config, formats
    held = None if deciding else state.formats.get("grad_output")
    both = need_input and need_weight
    trials = Trials([grad], state, [held], transposed=both)
    likely = held or state.formats.get("grad_output", config.formats[0])
    transposed: list[fp8.Cast | None] = [None, None]
    if both and likely != "bf16" and input_format == weight_format != "bf16":
        transposed[:], _ = fp8.cast(
            [x, weight], largest, input_format, plain=False, transposed=True
        )
    transposed_input, transposed_weight = (
        _Operand(y, largest, i, name, cast=cast.transposed if cast else None, transposed=True)
        for i, (y, name, cast) in enumerate(
            zip((x, weight), (input_format, weight_format), transposed, strict=True)
        )
    )

    def grad_input(format: str) -> tuple[Tensor, str]:
        cast = _plain(trials.casts[0], format)
        a = _Operand(grad, trials.largest, 0, format, cast=cast)
        return _multiply("grad_input", a, transposed_weight, config, grad.dtype)

    def grad_weight(format: str) -> tuple[Tensor, str]:
        both_ways = trials.casts[0].get(format)
        cast = both_ways.transposed if both_ways else None
        a = _Operand(grad, trials.largest, 0, format, cast=cast, transposed=True)
        return _multiply("grad_weight", a, transposed_input, config, grad.dtype)

    # One of the two runs while the errors travel.
    first = grad_input if need_input else grad_weight
    result = first(likely)
    (format,), (error,) = trials.decide(trials.wait())
    if format != likely:
        result = first(format)
    by_input = result if need_input else None
    by_weight = (grad_weight(format) if need_input else result) if need_weight else None
    if counting:
        state.formats["grad_output"] = format
        if by_input is not None:
            _count(state, "grad_output", grad, format, error)
            _count(state, "weight_transposed", weight, weight_format, None)
            state.count_product("grad_input", by_input[1])
        if by_weight is not None:
            _count(state, "grad_output_transposed", grad, format, error)
            _count(state, "input_transposed", x, input_format, None)
            state.count_product("grad_weight", by_weight[1])
    return by_input[0] if by_input else None, by_weight[0] if by_weight else None


# --- the general path ------------------------------------------------------------------------------


def general_product(
    product: str, operands: dict[str, Tensor], state: LayerState, deciding: bool, counting: bool
) -> Tensor:
    """Product of (M, K) and (N, K), each as the policy gives it; dtype of the first."""
    shape = parse_partition(state.config.partition)
    results = {}
    for name, x in operands.items():
        frozen = None if deciding else state.frozen.get(name)
        if frozen is not None and frozen.ndim and frozen.shape != shape.grid(x):
            frozen = None  # another number of tokens: the blocks are others
        results[name] = x, quantize(x, state.config, frozen=frozen), frozen is None
        if counting:
            state.frozen[name] = results[name][1].decision
    if counting:
        state.count_on_device(product, results)
    left, right = (result for _, result, _ in results.values())
    a, b = left.values, right.values
    if state.config.policy == "tensor" and a.dtype != torch.bfloat16:
        enters_bf16 = (left.decision == BF16_INDEX) | (right.decision == BF16_INDEX)
        a, b = (torch.where(enters_bf16, round_to_bf16(v), v) for v in (a, b))
    return a @ b.t()
