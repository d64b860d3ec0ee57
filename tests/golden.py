"""Reader of the committed golden vectors, which exact rational arithmetic made.

To keep them small, the dequantized values of the block cases are kept as a SHA-256 of their bits
(NaN made canonical); codes and scales are there in full.
"""

import hashlib
import io
import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@cache
def _archive(name: str) -> Any:
    return np.load(io.BytesIO(lzma.decompress((GOLDEN / f"{name}.npz.xz").read_bytes())))


def cases(section: str, archive: str = "mx") -> list[dict[str, Any]]:
    manifest = json.loads(_archive(archive)["manifest"].tobytes())
    return [entry for entry in manifest if entry["section"] == section]


def array(section: str, case: str, field: str, archive: str = "mx") -> np.ndarray:
    return _archive(archive)[f"{section}__{case}__{field}"]


def floats(section: str, case: str, field: str, dtype: str, archive: str = "mx") -> Tensor:
    """Stored bits as a tensor of the manifest's dtype."""
    raw = array(section, case, field, archive)
    signed = np.int32 if dtype == "fp32" else np.int16
    return torch.from_numpy(raw.view(signed).copy()).view(DTYPES[dtype])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal as integers: -0.0 is not 0.0; any NaN equals any NaN."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    integer = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[actual.element_size()]
    a, e = actual.cpu().contiguous(), expected.cpu().contiguous()
    same = a.view(integer) == e.view(integer)
    if actual.is_floating_point():
        same |= a.isnan() & e.isnan()
    if not same.all():
        index = tuple((~same).nonzero()[0].tolist())
        bad = int((~same).sum())
        raise AssertionError(
            f"{bad} of {same.numel()} differ, first at {index}: {a[index]} != {e[index]}"
        )


def sha256_of_bits(values: Tensor) -> str:
    """Hash of the raw bits with every NaN as the dtype's positive quiet NaN."""
    canonical = torch.where(values.isnan(), torch.full_like(values, float("nan")).abs(), values)
    integer = torch.int32 if values.element_size() == 4 else torch.int16
    return hashlib.sha256(canonical.contiguous().view(integer).numpy().tobytes()).hexdigest()
