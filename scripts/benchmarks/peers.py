"""Fake quantization by other libraries, against a copy and ours in the same process."""

import itertools
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.kernels import Case, cases, make_input, timers

PEER_FORMATS = ("mxfp4", "mxfp8_e4m3")


def torchao_cases(x: Tensor) -> list[Case]:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    def call(x: Tensor, _: Tensor, out: Tensor, kind: torch.dtype) -> Tensor:
        return MXTensor.to_mx(x, kind, 32).dequantize(x.dtype)

    kinds = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8_e4m3": torch.float8_e4m3fn}
    return [Case(f, partial(call, kind=kind), 1.0) for f, kind in kinds.items()]


def compressed_tensors_cases(x: Tensor) -> list[Case]:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    from compressed_tensors.quantization.utils import calculate_qparams

    def call(x: Tensor, _: Tensor, out: Tensor, settings: Any) -> Tensor:
        blocks = x.unflatten(-1, (-1, 32))
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), settings)
        return fake_quantize(x, scale, zero, settings)

    schemes = {"mxfp4": "MXFP4", "mxfp8_e4m3": "MXFP8"}
    return [
        Case(f, partial(call, settings=PRESET_SCHEMES[scheme]["weights"]), 1.0)
        for f, scheme in schemes.items()
    ]


def brevitas_cases(x: Tensor) -> list[Case]:
    from brevitas.nn import QuantIdentity
    from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Act

    class MXFloat4e2m1Act(MXFloat8e4m3Act):  # type: ignore[misc]
        bit_width, exponent_bit_width, mantissa_bit_width = 4, 2, 1

    def case(name: str, kind: Any) -> Case:
        act = QuantIdentity(kind, group_dim=-1, return_quant_tensor=False)
        act = act.eval().to(x.device, x.dtype)
        return Case(name, lambda x, _, out: act(x), 1.0)

    return [case("mxfp4", MXFloat4e2m1Act), case("mxfp8_e4m3", MXFloat8e4m3Act)]


PEERS = {
    "torchao": torchao_cases,
    "compressed-tensors": compressed_tensors_cases,
    "brevitas": brevitas_cases,
}
"""Fake quantization as other libraries do it, eagerly; a case is named by its format."""


def peers(x: Tensor) -> Iterator[tuple[str, list[Case] | str]]:
    """Each library with its version and its cases, or with the reason why it has none here."""
    for package, make in PEERS.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            yield package, "not installed"
            continue
        try:
            yield f"{package} {installed}", make(x)
        except Exception as error:  # whatever another library raises where it does not fit
            yield f"{package} {installed}", why(error)


def why(error: Exception) -> str:
    """One line on an error of another library."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def peer_rows(
    device: str, sizes: list[int], dtypes: list[torch.dtype]
) -> Iterator[dict[str, str | float | None]]:
    """Fake quantization by other libraries, beside a copy and our own in the same process."""
    measure, measure_peer = timers(device)
    for size, dtype in itertools.product(sizes, dtypes):
        x = make_input(size, dtype, device)
        known = {c.name: c for c in cases(x)}
        copy = measure(known["copy"], x)
        ours = {f: measure(known[f"fake_quant {f}"], x) for f in PEER_FORMATS}
        head = {"size": str(size), "dtype": str(dtype).removeprefix("torch.")}
        for library, own in peers(x):
            named = {} if isinstance(own, str) else {c.name: c for c in own}
            for f in PEER_FORMATS:
                seconds, reason = None, own if isinstance(own, str) else None
                if f in named:
                    try:
                        seconds = measure_peer(named[f], x)
                    except Exception as error:  # another library's
                        reason = why(error)
                yield {
                    **head,
                    "library": library,
                    "format": f,
                    "reason": reason,
                    "ms": seconds and seconds * 1e3,
                    "x_copy": seconds and seconds / copy,
                    "x_ours": seconds and seconds / ours[f],
                }


def shown(value: str | float | None) -> str:
    """A cell of a line."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.2f}"


def join_peers(rows: list[dict[str, Any]], newer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of several environments: a newer time replaces an older one, a reason replaces none."""

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return row["size"], row["dtype"], row["library"].partition(" ")[0], row["format"]

    joined = {key(row): row for row in rows}
    for row in newer:
        if row["ms"] is not None or key(row) not in joined:
            joined[key(row)] = row
    return list(joined.values())
