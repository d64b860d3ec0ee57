"""Time of every kernel against a copy of the same tensor, on CPU and GPU, in one table.

    python scripts/bench_kernels.py            # what this machine has
    python scripts/bench_kernels.py --check    # first: equal to the reference on the hard inputs?
    python scripts/bench_kernels.py --tune     # GPU: other tile sizes

`of limit` is the time that a copy's bandwidth needs for the bytes the kernel must move (each input
read once, each output written once) over the measured time; `x copy` is the measured time over
that of a copy. GPU times come from CUDA graphs whose launches walk over enough buffers that the L2
cache cannot serve; CPU times are calls with buffers in use again. All are medians of one process.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dmx import numerics  # noqa: E402
from dmx.formats import FAMILIES, MX_FORMATS, SCALE_RULES  # noqa: E402
from dmx.kernels import ops  # noqa: E402

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
    parameters = numerics.path_parameters(torch.tensor(0.7), "mxfp6_mxfp4").to(x.device)
    high = numerics.path_parameters(torch.tensor(1.3), "mxfp8_mxfp4").to(x.device)
    size = x.element_size()
    found = [Case("copy", lambda x, _, out: out.copy_(x), 1.0)]
    for f in MX_FORMATS:
        found.append(Case(f"fake_quant {f}", lambda x, _, out, f=f: ops.fake_quant(x, f, out=out), 1.0))
    found.append(
        Case("fake_quant mxfp4 even", lambda x, _, out: ops.fake_quant(x, "mxfp4", scale_rule="even", out=out), 1.0)
    )
    for f in MX_FORMATS[:2] + MX_FORMATS[3:4]:
        moved = (size + f.bits_per_element / 8) / (2 * size)
        found.append(Case(f"quantize_packed {f}", lambda x, _, out, f=f: ops.quantize_packed(x, f), moved))
    moved = (size + 1 + 1 / 32) / (2 * size)
    return [
        *found,
        Case("quantize mxfp4", lambda x, _, out: ops.quantize(x, "mxfp4"), moved),
        Case("continuous 4/6", lambda x, _, out: ops.continuous_fake_quant(x, parameters, out=out), 1.0),
        Case("continuous 4/8", lambda x, _, out: ops.continuous_fake_quant(x, high, out=out), 1.0),
        Case("backward", lambda x, g, out: ops.continuous_fake_quant_backward(g, x, parameters), 1.5),
        Case(
            "backward, offset only",
            lambda x, g, out: ops.continuous_fake_quant_backward(g, x, parameters, needs_grad_x=False),
            1.0,
        ),
    ]


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
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / launches)
    return statistics.median(times)


def seconds_on_cpu(case: Case, x: Tensor, repeats: int = 11) -> float:
    other, out = x.flip(0).contiguous(), torch.empty_like(x)
    case.call(x, other, out)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        case.call(x, other, out)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rows(device: str, sizes: list[int], dtypes: list[torch.dtype]) -> Iterator[tuple[str, ...]]:
    measure = seconds_on_gpu if device == "cuda" else seconds_on_cpu
    for size, dtype in itertools.product(sizes, dtypes):
        x = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
        copy = 0.0
        for case in cases(x):
            seconds = measure(case, x)
            copy = copy or seconds
            moved = 2 * x.nbytes * case.traffic / seconds
            yield (
                device, str(size), str(dtype).removeprefix("torch."), case.name,
                f"{seconds * 1e3:.4f}", f"{seconds / copy:.2f}", f"{case.traffic * copy / seconds:.2f}",
                f"{moved / 1e9:.0f}",
            )  # fmt: skip


HEADER = ("device", "size", "dtype", "kernel", "ms", "x copy", "of limit", "GB/s")


def print_table(header: tuple[str, ...], body: Iterator[tuple[str, ...]]) -> None:
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    for row in body:
        print("| " + " | ".join(row) + " |", flush=True)


def check(device: str, dtypes: list[torch.dtype]) -> int:
    """Number of comparisons with the reference that fail."""
    from tests.cases import OFFSETS, hard_inputs
    from tests.kernels.compare import check_continuous, check_mx

    done = failed = 0
    grid = list(itertools.product(MX_FORMATS, SCALE_RULES))
    for dtype in dtypes:
        for name, x in hard_inputs(dtype).items():
            jobs: list[Any] = [(check_mx, (x, f, rule, device)) for f, rule in grid]
            jobs += [(check_continuous, (x, f, b, device)) for f in FAMILIES.values() for b in OFFSETS]
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


def tune() -> None:
    """Times of each kernel over tile sizes, as a share of the copy limit."""
    from dmx.kernels import triton_continuous, triton_mx

    tables = {
        "fake_quant mxfp4": triton_mx.FAKE_QUANT_TILE,
        "quantize_packed mxfp4": triton_mx.QUANTIZE_TILE,
        "quantize_packed mxfp6_e2m3": triton_mx.QUANTIZE_TILE,
        "continuous 4/6": triton_continuous.FORWARD_TILE,
        "backward": triton_continuous.BACKWARD_TILE,
        "backward, offset only": triton_continuous.BACKWARD_TILE,
    }
    tiles = [(16, 1), (32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8)]
    print("| dtype | kernel | " + " | ".join(f"{b}x{w}" for b, w in tiles) + " |")
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the reference first")
    parser.add_argument("--tune", action="store_true", help="GPU tile sizes")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: all that are here")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: all for --check")
    parser.add_argument("--no-table", action="store_true", help="only --check or --tune")
    parser.add_argument("--sizes", type=int, nargs="+", help="default: 4096, on a GPU also 8192")
    arguments = parser.parse_args()
    here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    devices = [arguments.device] if arguments.device else here
    checked = [DTYPES[name] for name in arguments.dtypes or DTYPES]
    if arguments.check and sum(check(device, checked) for device in devices):
        sys.exit(1)
    if arguments.tune:
        tune()
    if arguments.no_table:
        return
    timed = [DTYPES[name] for name in arguments.dtypes or ("fp32", "bf16")]
    if "cuda" in devices:
        print(f"GPU {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, torch {torch.__version__}")
    if "cpu" in devices:
        print(f"CPU {torch.get_num_threads()} threads, torch {torch.__version__}, {ops.actual_backend('cpu')}")
    for device in devices:
        sizes = arguments.sizes or ([4096, 8192] if device == "cuda" else [4096])
        print_table(HEADER, rows(device, sizes, timed))


if __name__ == "__main__":
    main()
