"""Codes of 4, 6 and 8 bits as bytes, the way files and other tools keep them.

    4 bits   two codes a byte, the first in the low nibble
    6 bits   four codes in three bytes, little-endian: code i at bits 6i..6i+5 of 24
    8 bits   as they are

Source: compressed-tensors (nibbles), AMD Quark (6 bits).
"""

import torch
from torch import Tensor

PACKED_BITS = (4, 6, 8)


def _group(bits: int) -> int:
    if bits not in PACKED_BITS:
        raise ValueError(f"bits must be one of {PACKED_BITS}, got {bits}")
    return {4: 2, 6: 4, 8: 1}[bits]


def check_packable(n: int, bits: int) -> None:
    """Raise ValueError unless n codes of `bits` bits fill whole groups."""
    group = _group(bits)
    if n % group:
        raise ValueError(f"{bits}-bit codes are packed in groups of {group}; the last axis has {n}")


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes (..., n) as uint8 bytes (..., n * bits / 8).

    Raises:
        ValueError: bits is not 4, 6 or 8, or n does not fill whole groups (2 codes, 4 codes).
    """
    check_packable(codes.shape[-1], bits)
    group = _group(bits)
    if group == 1:
        return codes.contiguous()
    grouped = codes.to(torch.int32).unflatten(-1, (-1, group))
    word = sum(grouped[..., i] << (bits * i) for i in range(group))
    assert isinstance(word, Tensor)
    n_bytes = group * bits // 8
    parts = [(word >> (8 * i)) & 0xFF for i in range(n_bytes)]
    return torch.stack(parts, -1).to(torch.uint8).flatten(-2)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_codes`: (..., bytes) -> (..., bytes * 8 / bits), uint8."""
    group = _group(bits)
    if group == 1:
        return packed.contiguous()
    n_bytes = group * bits // 8
    if packed.shape[-1] % n_bytes:
        raise ValueError(
            f"{bits}-bit codes come in groups of {n_bytes} bytes; "
            f"the last axis has {packed.shape[-1]}"
        )
    grouped = packed.to(torch.int32).unflatten(-1, (-1, n_bytes))
    word = sum(grouped[..., i] << (8 * i) for i in range(n_bytes))
    assert isinstance(word, Tensor)
    mask = 2**bits - 1
    parts = [(word >> (bits * i)) & mask for i in range(group)]
    return torch.stack(parts, -1).to(torch.uint8).flatten(-2)
