"""humming's products of MX weights on a card, against dmx's emulation of them and against bf16.

    pip install --no-deps humming-kernels    # its other needs come with torch for CUDA 13
    python -m scripts.benchmarks.humming --json humming.json --seconds 170

Weights are packed by dmx and given to humming byte for byte. For each format, with inputs in bf16 and in FP8 (a scale a
token; e5m2 for e5m2 weights, whose exponents e4m3 lacks):

    error            |y - F.linear(x, W)| / |F.linear(x, W)| in float32, W as dmx decodes it, x as the kernel had it
    worst output     the same of the worst output feature alone
    emulated         the error of dmx's emulation, F.linear in bf16

on normal weights; on rows whose sizes differ by up to 2**30; and on blocks that do (beside FP8 inputs by 2**14), the inputs
of each as much smaller, so that every block counts. A twentieth of the blocks of the latter two is zero. Times: medians of CUDA graphs that run
as many layers as make weights come from memory, not from the cache, and quantizing of inputs is in them.

Kernels are compiled when they are first met, some hundred of them, on all cores. What fails is kept with its sentence, the
record is written after each shape, and --seconds ends the run: what was not reached is named.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dmx.exporting.humming import DTYPES, LAYOUT
from dmx.files import write_json
from dmx.formats import MXFP8_E5M2, BlockFormat
from experiments.reporting.pages.humming import SCHEMA
from scripts.benchmarks.machine import gpu_seconds, machine, say
from scripts.benchmarks.peers import why

SHAPES = ((2048, 2048), (4096, 4096), (8192, 2048), (14336, 4096), (2048, 8192), (4096, 14336))
"""(out, in) of linear layers of Llamas of 1 B and 8 B; both sizes first, should time run out."""
TOKENS = (1, 16, 256, 4096)
WEIGHTS = ("normal", "wide rows", "wide blocks")
SPREAD = 15
"""Wide weights: sizes of 2**-15 to 2**15."""
FP8_SPREAD = 7
"""The same of blocks whose inputs are as much smaller and go to FP8, which holds no more."""
UNCACHED = 180 << 20
"""Bytes of weights in a graph: three times the cache of an H200."""
CHECKED_TOKENS = 64


def stored(weight: Tensor, block_format: BlockFormat) -> tuple[dict[str, Tensor], Tensor]:
    """humming's tensors of a weight, as exports have them, and the weight that they mean.

    Args:
        weight: (out, in) bf16.

    Returns:
        `weight` and `weight_scale`; and (out, in) float32.
    """
    assert LAYOUT.encode is not None
    tensors = LAYOUT.encode(weight, block_format, "even")
    return tensors, LAYOUT.decode(tensors, block_format, torch.float32)


def operands(
    kind: str, out: int, inner: int, tokens: int, spread: int, device: str
) -> list[Tensor]:
    """A weight (out, in) and inputs (tokens, in), bf16; see `WEIGHTS`."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device)
    weight, x = draw(out, inner), draw(tokens, inner)
    if kind != "normal":
        size = torch.linspace(-spread, spread, out if kind == "wide rows" else inner // 32)
        shuffled = size[torch.randperm(len(size), generator=torch.Generator().manual_seed(0))]
        factor = torch.exp2(shuffled.round()).to(device)
        if kind == "wide rows":
            weight *= factor[:, None]
        else:
            weight *= factor.repeat_interleave(32)
            x /= factor.repeat_interleave(32)
        zero = torch.rand(out, inner // 32, generator=generator, device=device) < 0.05
        weight.masked_fill_(zero.repeat_interleave(32, 1), 0)
    return [weight.bfloat16(), x.bfloat16()]


@dataclasses.dataclass
class Product:
    """One layer in humming: tensors as its kernels want them, and the kernel of each number of tokens."""

    block_format: BlockFormat
    inputs: str
    config: Any
    tensors: dict[str, Tensor]
    tunings: dict[int, str] = dataclasses.field(default_factory=dict)

    def __call__(self, x: Tensor, tensors: dict[str, Tensor] | None = None) -> Tensor:
        from humming.forward import humming_forward

        tuning = self.tunings[x.shape[0]]
        given = self.tensors if tensors is None else tensors
        y: Tensor = humming_forward(self.config, inputs=x, tuning_config=tuning, **given)
        return y

    def inputs_had(self, x: Tensor) -> Tensor:
        """float32: inputs as the kernel multiplies them."""
        from humming.forward import may_quant_input

        if self.inputs == "bf16":
            return x.float()
        codes, scale = may_quant_input(self.config, x)
        return codes.float() * scale.float().view(-1, 1)

    def copy(self) -> dict[str, Tensor]:
        """The tensors elsewhere in memory."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def nbytes(self) -> int:
        return sum(t.nbytes for name, t in self.tensors.items() if name != "locks")


def fp8_inputs(block_format: BlockFormat) -> str:
    """The FP8 whose exponents hold the weights'."""
    return "float8e5m2" if block_format == MXFP8_E5M2 else "float8e4m3"


def prepare(block_format: BlockFormat, inputs: str, weight: Tensor) -> tuple[Product, Tensor]:
    """A layer of humming, and the weight that it holds in float32."""
    from humming.layer import HummingLayer

    out, inner = weight.shape
    tensors, decoded = stored(weight, block_format)
    layer = HummingLayer(
        shape_n=out,
        shape_k=inner,
        weight_config={
            "dtype": DTYPES[block_format],
            "scale_dtype": "float8e8m0",
            "group_size": block_format.block_size,
        },
        input_config=None if inputs == "bf16" else {"dtype": fp8_inputs(block_format)},
        torch_dtype=torch.bfloat16,
    ).cuda()
    layer.load_state_dict(tensors, strict=False)
    for name, given in tensors.items():  # strict=False would say nothing of a wrong name
        held = getattr(layer, name)
        if not torch.equal(held.view(torch.uint8), given.view(torch.uint8)):
            raise ValueError(f"humming did not take {name}")
    layer.transform()
    names = ("weight", "weight_scale", "weight_scale_2", "locks")
    kept = {n: t.data for n in names if (t := getattr(layer, n, None)) is not None}
    return Product(block_format, inputs, layer.humming_config, kept), decoded


def compile_kernel(product: Product, tokens: int) -> None:
    """The kernels of a number of tokens, that of FP8 inputs too."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    tuning = json.dumps(get_heuristics_config(product.config, shape_m=tokens))
    HummingKernel.prepare_kernels(product.config.to_str(), None, tuning)
    product.tunings[tokens] = tuning
    product.inputs_had(torch.ones(tokens, product.config.shape_k, device="cuda").bfloat16())


def in_parallel(calls: dict[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Key -> what a call returned, or the exception that it raised; compilers run beside each other."""

    def run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # whatever humming raises where it does not fit
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(calls, pool.map(run, calls.values()), strict=True))


def relative(y: Tensor, reference: Tensor) -> tuple[float, float]:
    """Error of all outputs, and of the worst output feature."""
    off, size = (y.float() - reference).norm(dim=0), reference.norm(dim=0)
    return float(off.norm() / size.norm()), float((off / size.clamp(min=1e-30)).max())


def errors_of(product: Product, decoded: Tensor, x: Tensor) -> dict[str, float]:
    """See the module."""
    had = product.inputs_had(x)
    reference = F.linear(had, decoded)
    error, worst = relative(product(x), reference)
    emulated = F.linear(had.bfloat16(), decoded.bfloat16())
    return {"error": error, "worst_output": worst, "emulated": relative(emulated, reference)[0]}


def graph_seconds(calls: Iterable[Callable[[], Tensor]], rounds: int = 5) -> float:
    """Median seconds of one of the calls, all of them in one CUDA graph."""
    listed = list(calls)
    listed[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in listed:
            call()
    graph.replay()
    return gpu_seconds(graph.replay, rounds) / len(listed)


def copies(nbytes: int) -> range:
    """As many layers as the cache does not hold."""
    return range(max(2, -(-UNCACHED // nbytes)))


def bf16_seconds(out: int, inner: int) -> dict[int, float]:
    """Of F.linear, by tokens."""
    weights = [torch.randn(out, inner, device="cuda").bfloat16() for _ in copies(2 * out * inner)]
    xs = {m: torch.randn(m, inner, device="cuda").bfloat16() for m in TOKENS}
    return {
        m: graph_seconds(partial(F.linear, x, weight) for weight in weights) for m, x in xs.items()
    }


def product_seconds(product: Product, tokens: int) -> float:
    x = torch.randn(tokens, product.config.shape_k, device="cuda").bfloat16()
    held = [product.copy() for _ in copies(product.nbytes())]
    return graph_seconds(partial(product, x, tensors) for tensors in held)


def checked(out: int, inner: int) -> Iterator[dict[str, Any]]:
    """Rows of errors on one shape, every format, input and kind of weight."""
    made: dict[tuple[BlockFormat, str, str], list[Tensor]] = {}
    for kind in WEIGHTS:
        for inputs in ("bf16", "fp8"):
            spread = FP8_SPREAD if (kind, inputs) == ("wide blocks", "fp8") else SPREAD
            given = operands(kind, out, inner, CHECKED_TOKENS, spread, "cuda")
            made |= {(f, inputs, kind): given for f in DTYPES}
    products = in_parallel(
        {key: partial(prepare, key[0], key[1], given[0]) for key, given in made.items()}
    )
    good = {key: found for key, found in products.items() if isinstance(found, tuple)}
    told = in_parallel(
        {k: partial(compile_kernel, p, CHECKED_TOKENS) for k, (p, _) in good.items()}
    )
    for (block_format, inputs, kind), found in products.items():
        head = {"format": block_format.name, "inputs": inputs, "weights": kind}
        key = (block_format, inputs, kind)
        broken = found if isinstance(found, Exception) else told[key]
        try:
            if broken is not None:
                raise broken
            product, decoded = found
            yield head | errors_of(product, decoded, made[key][1])
        except Exception as error:
            yield head | {"failed": why(error)}


def timed(out: int, inner: int, is_late: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Rows of times on one shape."""
    weight = operands("normal", out, inner, 1, 0, "cuda")[0]
    keys = [(f, inputs) for f in DTYPES for inputs in ("bf16", "fp8")]
    prepared = in_parallel({key: partial(prepare, *key, weight) for key in keys})
    good = {key: found[0] for key, found in prepared.items() if isinstance(found, tuple)}
    told = in_parallel(
        {(key, m): partial(compile_kernel, p, m) for key, p in good.items() for m in TOKENS}
    )
    base = bf16_seconds(out, inner)
    for key, found in prepared.items():
        for tokens in TOKENS:
            head = {"format": key[0].name, "inputs": key[1], "tokens": tokens}
            head |= {"out": out, "in": inner, "bf16_us": base[tokens] * 1e6}
            broken = found if isinstance(found, Exception) else told[key, tokens]
            try:
                if broken is not None:
                    raise broken
                if is_late():
                    raise TimeoutError("not reached within --seconds")
                yield head | {"us": product_seconds(good[key], tokens) * 1e6}
            except Exception as error:
                yield head | {"failed": why(error)}


def use_found_compiler() -> str:
    """NVRTC as humming finds it, else nvcc."""
    from humming.utils.nvrtc import get_nvrtc_library_path

    try:
        get_nvrtc_library_path()
    except Exception as error:
        os.environ["HUMMING_COMPILER"] = "nvcc"
        return f"nvcc ({why(error)})"
    return os.environ.get("HUMMING_COMPILER", "nvrtc")


def line_of(row: dict[str, Any]) -> str:
    """A row, printed."""
    head = f"{row['format']:11} {row['inputs']:5}"
    if "weights" in row:
        what = f"{row['weights']:11}"
    else:
        what = f"{row['out']:5} x {row['in']:5}, {row['tokens']:4} tokens"
    if "failed" in row:
        return f"{head} {what} failed: {row['failed']}"
    if "weights" in row:
        return (
            f"{head} {what} error {row['error']:.2e}, worst output {row['worst_output']:.2e}, "
            f"emulated {row['emulated']:.2e}"
        )
    speed = row["bf16_us"] / row["us"]
    return f"{head} {what} {row['us']:8.1f} us, bf16 {row['bf16_us']:8.1f} us, x{speed:.2f}"


def measure(shapes: Iterable[tuple[int, int]], seconds: float, path: Path | None) -> dict[str, Any]:
    """The record; written after each part."""
    started = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine("cuda"),
        "humming": version("humming-kernels"),
        "compiler": use_found_compiler(),
        "checked_tokens": CHECKED_TOKENS,
        "errors": [],
        "times": [],
    }

    def is_late() -> bool:
        return time.monotonic() - started > seconds

    def keep(rows: Iterable[dict[str, Any]], part: str) -> None:
        try:
            for row in rows:
                record[part].append(row)
                say(line_of(row))
        finally:  # a broken card breaks all that comes after
            record["seconds"] = time.monotonic() - started
            if path is not None:
                write_json(path, record)
        torch.cuda.empty_cache()
        say(f"{part}: {record['seconds']:.0f} s since the start")

    keep(checked(2048, 2048), "errors")
    for out, inner in shapes:
        if is_late():
            say(f"{out} x {inner}: not reached within --seconds {seconds:g}")
        else:
            keep(timed(out, inner, is_late), "times")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the record there")
    parser.add_argument("--seconds", type=float, default=170, help="no new product after these")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="the first of them")
    asked = parser.parse_args()
    measure(SHAPES[: asked.shapes], asked.seconds, asked.json)


if __name__ == "__main__":
    main()
