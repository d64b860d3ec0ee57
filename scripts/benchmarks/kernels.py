"""Time of every kernel against a copy of the same tensor, on CPU and GPU, in one table.

    python -m scripts.benchmarks.kernels            # what this machine has
    python -m scripts.benchmarks.kernels --check    # first: equal to the reference on the hard inputs?
    python -m scripts.benchmarks.kernels --tune     # GPU: other tile sizes

`of limit` is the time that a copy's bandwidth needs for the bytes the kernel must move (each input
read once, each output written once) over the measured time; `x copy` is the measured time over
that of a copy. GPU times come from CUDA graphs whose launches walk over enough buffers that the L2
cache cannot serve; CPU times are calls with buffers in use again, except that `backward` and
`quantize` make their results anew (page faults included). All are medians of one process.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmx import numerics
from dmx.formats import (
    FAMILIES,
    FP8,
    MX_FORMATS,
    MXFP4,
    MXFP6_E2M3,
    MXFP8_E4M3,
    NVFP4,
    WEIGHT_RULES,
)
from dmx.kernels import ops
from dmx.numerics.moments import Moments8, StepNumbers, step_keys
from scripts.benchmarks.machine import gpu_seconds

LAUNCHES, REPLAYS = 24, 9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROTATED_BYTES = 400 << 20
"""Eight times the L2 of an H100."""


class Case(NamedTuple):
    name: str
    call: Callable[[Tensor, Tensor, Tensor], Any]
    """(x, another tensor like x, out)"""
    traffic: float
    """Bytes that must move, in copies of x (a copy reads and writes it once)."""


def cases(x: Tensor) -> list[Case]:
    """Our kernels on tensors like x, the copy first."""
    offset = torch.tensor(0.7, device=x.device)
    element, line, line_mse = (
        numerics.continuous_parameters(offset, "mxfp6_mxfp4", rules, path)
        for rules, path in ((None, "element"), (["even"] * 2, "line"), (["mse"] * 2, "line"))
    )
    size = x.element_size()

    def share(bytes_per_element: float) -> float:
        return bytes_per_element / (2 * size)

    def fake(
        x: Tensor, _: Tensor, out: Tensor, f: str, rule: Any = None, amax: float | None = None
    ) -> Tensor:
        return ops.fake_quant(x, f, scale_rule=rule, amax=amax, out=out)

    def packed(x: Tensor, _: Tensor, out: Tensor, f: str) -> tuple[Tensor, Tensor]:
        return ops.quantize_packed(x, f)

    def codes(x: Tensor, _: Tensor, out: Tensor) -> Any:
        return ops.quantize(x, "mxfp4")

    def continuous(
        x: Tensor, _: Tensor, out: Tensor, row: Tensor, amax: float | None = None
    ) -> Tensor:
        return ops.continuous_fake_quant(x, row, amax=amax, out=out)

    def backward(
        x: Tensor,
        grad: Tensor,
        out: Tensor,
        row: Tensor,
        needs_grad_x: bool = True,
        amax: float | None = None,
    ) -> Any:
        return ops.continuous_fake_quant_backward(
            grad, x, row, amax=amax, needs_grad_x=needs_grad_x
        )

    mixed: list[Case] = []
    for formats in (["nvfp4", "fp8"], ["mxfp4", "fp8"], ["fp8", "bf16"]):
        row, name = numerics.line_parameters(offset, formats), "-".join(formats)
        # Inputs in nvfp4 have a range that is known; a weight is read once more for its own.
        known: list[tuple[str, float | None, float]] = [("", 6.0, 0.0)]
        if "nvfp4" in formats:
            known.append((", own amax", None, 0.5))
        for label, amax, more in known:
            kept = {"row": row, "amax": amax}
            mixed += [
                Case(f"line {name}{label}", partial(continuous, **kept), 1.0 + more),
                Case(f"line {name} backward{label}", partial(backward, **kept), 1.5 + more),
            ]

    first, second = (Moments8(x.flatten(), signed=s) for s in (True, False))
    numbers = StepNumbers(0.9, 0.99, 0.1, 0.01, 1e-3, 1.0, 1e-8, keys=step_keys(0, 0))
    factor = torch.ones(1, device=x.device)

    def adamw(x: Tensor, grad: Tensor, _: Tensor) -> None:
        ops.narrow_adamw(x.view(-1), grad.view(-1), factor, first, second, numbers)

    return [
        Case("copy", lambda x, _, out: out.copy_(x), 1.0),
        *(Case(f"fake_quant {f}", partial(fake, f=f.name), 1.0) for f in MX_FORMATS),
        Case("fake_quant mxfp4 even", partial(fake, f="mxfp4", rule="even"), 1.0),
        Case("mse mxfp4", partial(fake, f="mxfp4", rule="mse"), 1.0),
        Case("fake_quant fp8", partial(fake, f="fp8"), 1.0),
        Case("fake_quant nvfp4", partial(fake, f="nvfp4", amax=6.0), 1.0),
        Case("fake_quant nvfp4, own amax", partial(fake, f="nvfp4"), 1.5),
        *(
            Case(f"{rule} nvfp4, own amax", partial(fake, f="nvfp4", rule=rule), 1.5)
            for rule in ("4over6", "mse")
        ),
        *(
            Case(
                f"quantize_packed {f}",
                partial(packed, f=f.name),
                share(size + f.bits_per_element / 8),
            )
            for f in (MXFP4, MXFP6_E2M3, MXFP8_E4M3)
        ),
        Case("quantize mxfp4", codes, share(size + 1 + 1 / 32)),
        Case("continuous", partial(continuous, row=element), 1.0),
        Case("backward", partial(backward, row=element), 1.5),
        Case("backward, offset only", partial(backward, row=element, needs_grad_x=False), 1.0),
        Case("line", partial(continuous, row=line), 1.0),
        Case("line backward", partial(backward, row=line), 1.5),
        Case("line backward, offset only", partial(backward, row=line, needs_grad_x=False), 1.0),
        Case("line mse", partial(continuous, row=line_mse), 1.0),
        *mixed,
        Case("adamw, int8 moments", adamw, share(3 * size + 4)),
    ]


@torch.no_grad()
def seconds_eager_on_gpu(case: Case, x: Tensor, repeats: int = 9) -> float:
    """Median seconds of calls without a graph: not everything can be captured."""
    other, out = x.flip(0), torch.empty_like(x)
    case.call(x, other, out)
    return gpu_seconds(lambda: case.call(x, other, out), repeats)


def seconds_on_gpu(case: Case, x: Tensor) -> float:
    """Median seconds of one launch among the launches of a graph."""
    sets = max(2, -(-ROTATED_BYTES // (2 * x.nbytes)))
    launches = max(LAUNCHES, sets)
    data = [(x.clone(), x.flip(0), torch.empty_like(x)) for _ in range(sets)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        case.call(*data[0])
    side.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=side):
        for i in range(launches):
            # Results stay alive, or the next launch would write to the same cached memory.
            kept.append(case.call(*data[i % sets]))
    return gpu_seconds(graph.replay, REPLAYS) / launches


@torch.no_grad()
def seconds_on_cpu(case: Case, x: Tensor, repeats: int = 11, limit: float = 4.0) -> float:
    """Median of `repeats` calls, or of as many as fit into `limit` seconds."""
    other, out = x.flip(0).contiguous(), torch.empty_like(x)
    times: list[float] = []
    case.call(x, other, out)
    while len(times) < repeats and sum(times) < limit:
        start = time.perf_counter()
        case.call(x, other, out)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def timers(device: str) -> tuple[Callable[[Case, Tensor], float], Callable[[Case, Tensor], float]]:
    """How our kernels are timed on a device, and how other libraries are."""
    if device == "cuda":
        return seconds_on_gpu, seconds_eager_on_gpu
    return seconds_on_cpu, seconds_on_cpu


def make_input(size: int, dtype: torch.dtype, device: str) -> Tensor:
    """(size, size) standard normal."""
    return torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)


def is_asked(name: str, only: Sequence[str] | None) -> bool:
    """Whether the name of a kernel holds one of these; None: every name does."""
    return only is None or any(part in name for part in only)


def rows(
    device: str, sizes: list[int], dtypes: list[torch.dtype], only: list[str] | None = None
) -> Iterator[tuple[str, ...]]:
    """Our kernels; see HEADER. only: those whose names hold one of these, and the copy."""
    measure, _ = timers(device)
    for size, dtype in itertools.product(sizes, dtypes):
        x, copy = make_input(size, dtype, device), 0.0
        for case in cases(x):
            if case.name != "copy" and not is_asked(case.name, only):
                continue
            seconds = measure(case, x)
            copy = copy or seconds
            yield (
                device,
                str(size),
                str(dtype).removeprefix("torch."),
                case.name,
                f"{seconds * 1e3:.4f}",
                f"{seconds / copy:.2f}",
                f"{case.traffic * copy / seconds:.2f}",
                f"{2 * x.nbytes * case.traffic / seconds / 1e9:.0f}",
            )


HEADER = ("device", "size", "dtype", "kernel", "ms", "x copy", "of limit", "GB/s")


def print_table(header: tuple[str, ...], body: Iterator[tuple[str, ...]]) -> None:
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    for row in body:
        print("| " + " | ".join(row) + " |", flush=True)


def check(device: str, dtypes: list[torch.dtype]) -> int:
    """Number of comparisons with the reference that fail."""
    from tests.cases import LINES, MIXED_LINES, OFFSETS, hard_inputs
    from tests.kernels.compare import check_continuous, check_mx, check_scaled

    done = failed = 0
    grid = list(itertools.product(MX_FORMATS, WEIGHT_RULES))
    for dtype in dtypes:
        for name, x in hard_inputs(dtype).items():
            jobs: list[Any] = [(check_mx, (x, f, rule, device)) for f, rule in grid]
            path = itertools.product(FAMILIES.values(), OFFSETS)
            jobs += [(check_continuous, (x, f, b, device)) for f, b in path]
            scaled = [(f, rule) for f in (NVFP4, FP8) for rule in f.rules]
            jobs += [(check_scaled, (x, f, rule, device)) for f, rule in scaled]
            lines = itertools.product((*LINES, *MIXED_LINES), OFFSETS)
            jobs += [(check_continuous, (x, f, b, device, rules)) for (f, rules), b in lines]
            if x.ndim > 1:
                jobs.append((check_mx, (x, MX_FORMATS[3], "floor", device, 0)))
            for function, arguments in jobs:
                done += 1
                try:
                    function(*arguments)
                except AssertionError as error:
                    failed += 1
                    if failed <= 20:
                        print(device, dtype, name, *map(str, arguments[1:]), "->", str(error)[:200])
    print(f"{device}: {done - failed} of {done} comparisons with the reference are equal")
    return failed


def tune(only: Sequence[str] | None) -> None:
    """Times of kernels (those whose names hold one of `only`) over tile sizes, as a share of the copy limit."""
    from dmx.kernels import triton_continuous, triton_line, triton_mixed, triton_mx, triton_scaled

    tables: dict[str, dict[int, Any]] = {
        "fake_quant mxfp4": triton_mx.FAKE_QUANT_TILE,
        "quantize_packed mxfp4": triton_mx.QUANTIZE_TILE,
        "quantize_packed mxfp6_e2m3": triton_mx.QUANTIZE_TILE,
        "continuous": triton_continuous.FORWARD_TILE,
        "backward": triton_continuous.BACKWARD_TILE,
        "backward, offset only": triton_continuous.BACKWARD_TILE,
        "line": triton_line.FORWARD_TILE,
        "line backward": triton_line.BACKWARD_TILE,
        "line backward, offset only": triton_line.BACKWARD_TILE,
        "fake_quant nvfp4": triton_scaled.NVFP4_TILE,
        "fake_quant nvfp4, own amax": triton_scaled.AMAX_TILE,
    }
    tiles = [(16, 1), (16, 2), (32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8)]
    tune_over({k: v for k, v in tables.items() if is_asked(k, only)}, tiles)
    mixed = ("nvfp4-fp8", "mxfp4-fp8", "fp8-bf16")
    lines = [f"line {pair}{way}" for pair in mixed for way in ("", " backward")]
    rows_held = [(b, e, w) for b in (32, 128, 256) for e in (4, 8, 16) for w in (16, 32)]
    asked = [name for name in lines if is_asked(name, only)]
    tune_over(dict.fromkeys(asked, triton_mixed.TILE), rows_held)


def tune_over(tables: Mapping[str, dict[int, Any]], tiles: Sequence[tuple[int, ...]]) -> None:
    """Prints kernels under tiles: values of the tables by bytes of an element, which are as before afterwards."""
    print("| dtype | kernel | " + " | ".join("x".join(map(str, tile)) for tile in tiles) + " |")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(8192, 8192, device="cuda").to(dtype)
        known = {c.name: c for c in cases(x)}
        copy = seconds_on_gpu(known["copy"], x)
        for name, table in tables.items():
            saved, shares = table[dtype.itemsize], []
            for tile in tiles:
                table[dtype.itemsize] = tile
                seconds = seconds_on_gpu(known[name], x)
                shares.append(f"{known[name].traffic * copy / seconds:.2f}")
            table[dtype.itemsize] = saved
            print(f"| {str(dtype)[6:]} | {name} | " + " | ".join(shares) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the reference first")
    parser.add_argument("--tune", action="store_true", help="GPU tile sizes")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: all that are here")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: all for --check")
    parser.add_argument("--no-table", action="store_true", help="only --check or --tune")
    parser.add_argument("--only", nargs="+", help="kernels whose names hold one of these")
    parser.add_argument("--sizes", type=int, nargs="+", help="default: 4096, on a GPU also 8192")
    arguments = parser.parse_args()
    here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    devices = [arguments.device] if arguments.device else here
    checked = [DTYPES[name] for name in arguments.dtypes or DTYPES]
    if arguments.check and sum(check(device, checked) for device in devices):
        sys.exit(1)
    if arguments.tune:
        tune(arguments.only)
    if arguments.no_table:
        return
    timed = [DTYPES[name] for name in arguments.dtypes or ("fp32", "bf16")]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads on CPU")
    if "cuda" in devices:
        print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    for device in devices:
        print(f"{device}: backend {ops.actual_backend(device)}")
    for device in devices:
        sizes = arguments.sizes or ([4096, 8192] if device == "cuda" else [4096])
        print_table(HEADER, rows(device, sizes, timed, arguments.only))


if __name__ == "__main__":
    main()
