"""The CPU kernels: `cpu.cpp` built on first use and called through ctypes. `ops.py` is the door.

The build needs a C++17 compiler and nothing else (no torch headers) and takes a second or two. The
library is kept in ~/.cache/dmx (or DMX_CACHE) under a hash of source, compiler, flags and
processor, and is renamed into place: processes that build at once cannot disturb each other.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmx.errors import RunError
from dmx.formats import BLOCK_SIZE, WEIGHT_RULES, BlockFormat, ElementFormat, ScaleRule
from dmx.kernels.buffers import fresh_like, rows_of, writable_in_place
from dmx.numerics.continuous import N_PATH_PARAMETERS, is_line
from dmx.numerics.mixed_line import sides_of
from dmx.numerics.mx import QuantizedTensor
from dmx.numerics.packing import pack_codes
from dmx.numerics.scaled import AMAX_RULES, amax_scales
from dmx.state import cache_folder

SOURCE = Path(__file__).with_name("cpu.cpp")
# Contraction into fused multiply-adds would change bits. Nobody looks at floating-point exceptions, and
# with an eye on them choices between two values would not be vectorized.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-trapping-math"),
    *("-fPIC", "-shared"),
)
BLOCKS_PER_SUM = 256
"""Blocks behind one row of partial sums of the offset's gradient; kChunk in cpu.cpp."""
MIN_ELEMENTS_PER_THREAD = 16384
"""Below this, waking a thread costs more than it saves."""

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def find_compiler() -> str | None:
    """Path of the C++ compiler: $CXX if set, else c++, g++ or clang++; None when there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


@cache
def openmp_runtime() -> Path | None:
    """File of the OpenMP runtime that torch itself calls; None when it cannot be told.

    Others may be loaded beside it (sentencepiece brings one of its own), so torch's library is
    asked for a symbol of it, and the memory map for the file at that address.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if platform.system() != "Linux" or not library.exists():
        return None
    try:
        symbol = ctypes.CDLL(str(library)).omp_get_max_threads
    except AttributeError:  # built without OpenMP
        return None
    address = ctypes.cast(symbol, ctypes.c_void_p).value
    assert address is not None
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        first, last = (int(bound, 16) for bound in fields[0].split("-"))
        if first <= address < last:
            return Path(fields[5])
    return None


def _openmp_flags() -> list[str]:
    """OpenMP from the runtime that torch itself uses: two thread pools would fight for cores."""
    if platform.system() != "Linux":
        return []
    runtime = openmp_runtime()
    return ["-fopenmp", *([str(runtime), f"-Wl,-rpath,{runtime.parent}"] if runtime else [])]


def _processor() -> str:
    """What -march=native depends on: the flags of the processor, or its name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        prefixes = ("model name", "flags", "Features", "CPU part")
        lines = {s for s in cpuinfo.read_text().splitlines() if s.startswith(prefixes)}
        return "\n".join(sorted(lines))
    return platform.processor()


def _build(compiler: str) -> Path:
    command = [compiler, *FLAGS, *_openmp_flags()]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    key = "\0".join([SOURCE.read_text(), version, *command, _processor()])
    name = hashlib.sha256(key.encode()).hexdigest()[:20]
    folder = cache_folder()
    library = folder / f"cpu-{name}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / library.name
        # The source stands before the runtime library, which the linker would drop otherwise.
        order = [compiler, *FLAGS, str(SOURCE), *_openmp_flags(), "-o", str(built)]
        result = subprocess.run(order, capture_output=True, text=True)
        if result.returncode:
            tail = "\n".join((result.stderr or result.stdout).strip().splitlines()[-12:])
            raise RunError(
                f"backend=cpp: building {SOURCE.name} with {compiler} failed:\n{tail}\n"
                "Set CXX to a working C++17 compiler, or DMX_BACKEND=reference to run without one."
            )
        built.replace(library)
    return library


class _Format(ctypes.Structure):
    _fields_ = [
        *((f, ctypes.c_int) for f in ("emin", "emax", "mantissa", "max_code", "nan_code")),
        *((f, ctypes.c_int) for f in ("sign_shift", "rule")),
        ("max_normal", ctypes.c_float),
    ]


class _Side(ctypes.Structure):
    _fields_ = [
        ("scales", ctypes.c_void_p),
        ("block_size", ctypes.c_int64),
        ("format", _Format),
    ]


class _MixedLine(ctypes.Structure):
    _fields_ = [("share", ctypes.c_float), ("low", _Side), ("high", _Side)]


@cache
def _format(element: ElementFormat, scale_rule: ScaleRule) -> _Format:
    rule = WEIGHT_RULES.index(scale_rule)
    return _Format(
        element.emin,
        element.emax,
        element.mantissa_bits,
        element.max_code,
        element.nan_block_code,
        element.bits - 1,
        rule,
        element.max_normal,
    )


@cache
def load_library() -> ctypes.CDLL:
    """The built library.

    Raises:
        RunError: no compiler, or the build failed; shows the compiler's last lines.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RunError(
            "backend=cpp needs a C++17 compiler and none was found (looked for $CXX, c++, g++, "
            "clang++). Install one, or set DMX_BACKEND=reference."
        )
    library = ctypes.CDLL(str(_build(compiler)))
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    shape = [count, count]
    library.dmx_fake_quant.argtypes = [number, pointer, pointer, *shape, pointer, number]
    library.dmx_quantize.argtypes = [number, *[pointer] * 3, *shape, pointer, number, number]
    for path in ("continuous", "line", "mixed_line"):
        forward, backward = (getattr(library, f"dmx_{path}{end}") for end in ("", "_backward"))
        forward.argtypes = [number, pointer, pointer, *shape, pointer, number]
        backward.argtypes = [number, *[pointer] * 4, *shape, pointer, number]
    library.dmx_mx_scales.argtypes = [number, pointer, pointer, *shape, pointer, number]
    library.dmx_block_amax.argtypes = [number, pointer, pointer, *shape, count, number]
    library.dmx_scaled.argtypes = [number, *[pointer] * 5, *shape, count, pointer, number]
    factor = ctypes.c_float
    library.dmx_cross_entropy.argtypes = [number, *[pointer] * 3, factor, pointer, *shape, number]
    library.dmx_kl.argtypes = [
        number,
        number,
        *[pointer] * 3,
        factor,
        number,
        pointer,
        *shape,
        number,
    ]
    for function in (
        "fake_quant",
        "quantize",
        "continuous",
        "continuous_backward",
        "line",
        "line_backward",
        "mixed_line",
        "mixed_line_backward",
        "mx_scales",
        "block_amax",
        "scaled",
        "cross_entropy",
        "kl",
    ):
        getattr(library, f"dmx_{function}").restype = None
    return library


def _threads(x: Tensor) -> int:
    return max(1, min(torch.get_num_threads(), x.numel() // MIN_ELEMENTS_PER_THREAD))


def fake_quant(
    x: Tensor, block_format: BlockFormat, axis: int, scale_rule: ScaleRule, out: Tensor | None
) -> Tensor:
    """See `dmx.numerics.fake_quant`; arguments are checked by the door."""
    last = x.movedim(axis, -1).contiguous()
    direct = out is not None and axis == x.ndim - 1 and writable_in_place(x, out)
    target = out if direct and out is not None else fresh_like(last)
    rows, n, _blocks = rows_of(last)
    load_library().dmx_fake_quant(
        _DTYPE_CODES[x.dtype],
        last.data_ptr(),
        target.data_ptr(),
        rows,
        n,
        ctypes.byref(_format(block_format.element, scale_rule)),
        _threads(x),
    )
    if direct:
        return target
    result = target.movedim(-1, axis)
    return result.contiguous() if out is None else out.copy_(result)


def _codes(
    last: Tensor, element: ElementFormat, scale_rule: ScaleRule, packed: bool
) -> tuple[Tensor, Tensor]:
    rows, n, _blocks = rows_of(last)
    width = n * element.bits // 8 if packed else n
    codes = torch.empty((*last.shape[:-1], width), dtype=torch.uint8)
    scale_codes = torch.empty((*last.shape[:-1], -(-n // BLOCK_SIZE)), dtype=torch.uint8)
    load_library().dmx_quantize(
        _DTYPE_CODES[last.dtype],
        last.data_ptr(),
        codes.data_ptr(),
        scale_codes.data_ptr(),
        rows,
        n,
        ctypes.byref(_format(element, scale_rule)),
        element.bits if packed else 8,
        _threads(last),
    )
    return codes, scale_codes


def quantize(
    x: Tensor, block_format: BlockFormat, axis: int, scale_rule: ScaleRule
) -> QuantizedTensor:
    """See `dmx.numerics.quantize`; arguments are checked by the door."""
    last = x.movedim(axis, -1).contiguous()
    parts = _codes(last, block_format.element, scale_rule, packed=False)
    codes, scale_codes = (t.movedim(-1, axis).contiguous() for t in parts)
    return QuantizedTensor(codes, scale_codes, block_format, axis, x.dtype)


def quantize_packed(
    x: Tensor, block_format: BlockFormat, scale_rule: ScaleRule
) -> tuple[Tensor, Tensor]:
    """Packed codes and scales along the last axis; arguments are checked by the door."""
    element = block_format.element
    last = x.contiguous()
    if last.shape[-1] % BLOCK_SIZE:
        # Short blocks may end within a byte group: the codes are packed in a second step.
        codes, scale_codes = _codes(last, element, scale_rule, packed=False)
        return pack_codes(codes, element.bits), scale_codes
    return _codes(last, element, scale_rule, packed=True)


def _of_path(parameters: Tensor) -> tuple[Any, Any, Tensor]:
    """Forward and backward function of a row of parameters, and the row without gaps."""
    library, row = load_library(), parameters.contiguous()
    if is_line(row):
        return library.dmx_line, library.dmx_line_backward, row
    assert row.shape == (N_PATH_PARAMETERS,)
    return library.dmx_continuous, library.dmx_continuous_backward, row


def _forward(function: Any, path: Any, x: Tensor, last: Tensor, out: Tensor | None) -> Tensor:
    """What a continuous quantizer gives of x.

    Args:
        path: where the kernel finds its numbers. last: x without gaps.
    """
    direct = out is not None and writable_in_place(x, out)
    target = out if direct and out is not None else fresh_like(last)
    rows, n, _ = rows_of(last)
    function(_DTYPE_CODES[x.dtype], last.data_ptr(), target.data_ptr(), rows, n, path, _threads(x))
    return target if direct or out is None else out.copy_(target)


def _backward(
    function: Any, path: Any, above: Tensor, last: Tensor, n_sums: int, needs_grad_x: bool
) -> tuple[Tensor | None, Tensor]:
    """Gradients by x and, but for the slope of a line, by the offset; as `_forward`.

    Args:
        above: gradient by the output, without gaps. n_sums: rows of partial sums.
    """
    rows, n, _ = rows_of(last)
    sums = torch.zeros(n_sums, BLOCK_SIZE)
    grad_x = fresh_like(last) if needs_grad_x else None
    function(
        _DTYPE_CODES[last.dtype],
        above.data_ptr(),
        last.data_ptr(),
        None if grad_x is None else grad_x.data_ptr(),
        sums.data_ptr(),
        rows,
        n,
        path,
        _threads(last),
    )
    return grad_x, sums.sum(dtype=torch.float64).to(torch.float32)


def continuous_fake_quant(x: Tensor, parameters: Tensor, out: Tensor | None) -> Tensor:
    """See `dmx.numerics.continuous_fake_quant`; arguments are checked by the door."""
    last, (forward, _, path) = x.contiguous(), _of_path(parameters)
    return _forward(forward, path.data_ptr(), x, last, out)


def continuous_fake_quant_backward(
    grad: Tensor, x: Tensor, parameters: Tensor, needs_grad_x: bool
) -> tuple[Tensor | None, Tensor]:
    """See `dmx.numerics.continuous_fake_quant_backward`; arguments are checked by the door.

    Sums at most 256 values in float32 and the rest in float64, in an order that does not depend on
    the number of threads.
    """
    last, above, (_, backward, path) = x.contiguous(), grad.contiguous(), _of_path(parameters)
    n_sums = -(-rows_of(last)[2] // BLOCKS_PER_SUM)
    grad_x, total = _backward(backward, path.data_ptr(), above, last, n_sums, needs_grad_x)
    return grad_x, total * path[1] if is_line(path) else total


def has_scaled(scale_rule: ScaleRule) -> bool:
    """Whether the kernels of formats other than MX know a rule: one that looks at amax alone."""
    return scale_rule in AMAX_RULES


def _scales(
    last: Tensor, block_format: BlockFormat, scale_rule: ScaleRule, amax: Tensor | float | None
) -> Tensor:
    """Scale of each block along the last axis, NaN of NaN blocks; (..., blocks) float32."""
    rows, n, _ = rows_of(last)
    largest = torch.zeros((*last.shape[:-1], block_format.blocks(n) if n else 0))
    load_library().dmx_block_amax(
        _DTYPE_CODES[last.dtype],
        last.data_ptr(),
        largest.data_ptr(),
        rows,
        n,
        block_format.block_size or max(n, 1),
        _threads(last),
    )
    finite = largest.isfinite()
    clean = torch.where(finite, largest, 0.0)
    scales = amax_scales(clean, block_format, scale_rule, amax).scale
    return torch.where(finite, scales, torch.nan).contiguous()


def _scaled(
    last: Tensor,
    block_format: BlockFormat,
    scale_rule: ScaleRule,
    amax: Tensor | float | None,
    *,
    out: Tensor | None,
    wide: Tensor | None,
    inside: Tensor | None,
) -> None:
    rows, n, _ = rows_of(last)
    scales = _scales(last, block_format, scale_rule, amax)
    load_library().dmx_scaled(
        _DTYPE_CODES[last.dtype],
        last.data_ptr(),
        *(None if t is None else t.data_ptr() for t in (out, wide, inside)),
        scales.data_ptr(),
        rows,
        n,
        block_format.block_size or max(n, 1),
        ctypes.byref(_format(block_format.element, "floor")),
        _threads(last),
    )


def scaled_fake_quant(
    x: Tensor,
    block_format: BlockFormat,
    axis: int,
    scale_rule: ScaleRule,
    amax: Tensor | float | None,
    out: Tensor | None,
) -> Tensor:
    """`dmx.numerics.fake_quant` of formats other than MX, by a rule of `has_scaled`; arguments are checked
    by the door."""
    last = x.movedim(axis, -1).contiguous()
    direct = out is not None and axis == x.ndim - 1 and writable_in_place(x, out)
    target = out if direct and out is not None else fresh_like(last)
    _scaled(last, block_format, scale_rule, amax, out=target, wide=None, inside=None)
    if direct:
        return target
    result = target.movedim(-1, axis)
    return result.contiguous() if out is None else out.copy_(result)


def wide_values(
    x: Tensor, block_format: BlockFormat, scale_rule: ScaleRule, amax: Tensor | float | None
) -> tuple[Tensor, Tensor]:
    """`dmx.numerics.mx.wide_values` of formats other than MX along the last axis, likewise."""
    last = x.contiguous()
    wide = torch.empty(last.shape, dtype=torch.float32)
    inside = torch.empty(last.shape, dtype=torch.bool)
    _scaled(last, block_format, scale_rule, amax, out=None, wide=wide, inside=inside)
    return wide, inside


def _mx_scales(last: Tensor, block_format: BlockFormat, scale_rule: ScaleRule) -> Tensor:
    """As `_scales`, of an MX format."""
    rows, n, _ = rows_of(last)
    scales = torch.empty((*last.shape[:-1], block_format.blocks(n) if n else 0))
    load_library().dmx_mx_scales(
        _DTYPE_CODES[last.dtype],
        last.data_ptr(),
        scales.data_ptr(),
        rows,
        n,
        ctypes.byref(_format(block_format.element, scale_rule)),
        _threads(last),
    )
    return scales


def _mixed_line(
    last: Tensor, parameters: Tensor, amax: Tensor | float | None
) -> tuple[_MixedLine, list[Tensor]]:
    """What the kernels read of a row of parameters and of x; and the scales, which must outlive it."""
    path, kept = _MixedLine(float(parameters[0])), []
    for name, (block_format, rule) in zip(("low", "high"), sides_of(parameters), strict=True):
        if rule is None or not isinstance(block_format, BlockFormat):
            continue  # bf16: no scales
        if block_format.is_mx:
            scales = _mx_scales(last, block_format, rule)
        else:
            fixed = amax if block_format.needs_input_amax else None
            scales = _scales(last, block_format, rule, fixed)
        kept.append(scales)
        size = block_format.block_size or max(last.shape[-1], 1)
        numbers = _format(block_format.element, "floor")  # the kernels look at the element alone
        setattr(path, name, _Side(scales.data_ptr(), size, numbers))
    return path, kept


def mixed_fake_quant(
    x: Tensor, parameters: Tensor, amax: Tensor | float | None, out: Tensor | None
) -> Tensor:
    """See `dmx.numerics.mixed_line.mixed_fake_quant`, between the stops, for rules of `has_scaled`; arguments are
    checked by the door."""
    last = x.contiguous()
    path, _kept = _mixed_line(last, parameters, amax)
    return _forward(load_library().dmx_mixed_line, ctypes.byref(path), x, last, out)


def mixed_fake_quant_backward(
    grad: Tensor,
    x: Tensor,
    parameters: Tensor,
    amax: Tensor | float | None,
    needs_grad_x: bool,
) -> tuple[Tensor | None, Tensor]:
    """Both gradients on that line, likewise; sums as in `continuous_fake_quant_backward`."""
    last, above = x.contiguous(), grad.contiguous()
    path, _kept = _mixed_line(last, parameters, amax)
    rows, n, _ = rows_of(last)
    n_sums = rows * -(-n // (BLOCKS_PER_SUM * BLOCK_SIZE))
    backward = load_library().dmx_mixed_line_backward
    grad_x, total = _backward(backward, ctypes.byref(path), above, last, n_sums, needs_grad_x)
    return grad_x, total * parameters[1]


def cross_entropy_rows(
    logits: Tensor, targets: Tensor, gradient: Tensor | None, factor: float
) -> Tensor:
    """See `dmx.numerics.cross_entropy_rows`; arguments are checked by the door.

    Each row is one thread's work, so results do not depend on the number of threads.
    """
    rows, n = logits.shape
    if n == 0 or (rows and int(targets.max()) >= n):
        raise IndexError(f"targets must lie below the {n} columns of logits")
    logits, targets = logits.contiguous(), targets.contiguous()
    losses = torch.empty(rows, dtype=torch.float32)
    load_library().dmx_cross_entropy(
        _DTYPE_CODES[logits.dtype],
        logits.data_ptr(),
        targets.data_ptr(),
        None if gradient is None else gradient.data_ptr(),
        factor,
        losses.data_ptr(),
        rows,
        n,
        _threads(logits),
    )
    return losses


def kl_rows(
    reference: Tensor, logits: Tensor, gradient: Tensor | None, factor: float, normalized: bool
) -> Tensor:
    """See `dmx.numerics.kl_rows`; arguments are checked by the door. Probabilities below 2**-126
    count as 0."""
    rows, n = logits.shape
    if reference.dtype != logits.dtype:
        reference = reference.float()
    logits, reference = logits.contiguous(), reference.contiguous()
    losses = torch.empty(rows, dtype=torch.float32)
    load_library().dmx_kl(
        _DTYPE_CODES[logits.dtype],
        reference.dtype == torch.float32,
        reference.data_ptr(),
        logits.data_ptr(),
        None if gradient is None else gradient.data_ptr(),
        factor,
        normalized,
        losses.data_ptr(),
        rows,
        n,
        _threads(logits),
    )
    return losses
