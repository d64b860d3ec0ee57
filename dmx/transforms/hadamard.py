"""Hadamard matrices for the sizes that language models have, and the fast product with them.

    H @ H.T = I,  every entry +1/sqrt(order) or -1/sqrt(order)

A matrix is the Kronecker product of one base matrix and 2 x 2 ones:

    order = base * 2^k
    base = 1          Sylvester: powers of two
    base = q + 1      Paley I, q prime, q = 3 mod 4
    base = 2 (q + 1)  Paley II, q prime, q = 1 mod 4

so 576 = 36 * 16 (Paley II, q = 17) and 14336 = 28 * 512 (Paley II, q = 13). Nothing is looked up
in a table, every matrix is deterministic. `hadamard_transform` multiplies factor by factor, so that
a rotation of 4096 channels costs 128 products an element and no matrix of 4096 x 4096.

Source: R. E. A. C. Paley, On orthogonal matrices, J. Math. Phys. 12 (1933), lemmas 2 and 3, for
prime q; J. J. Sylvester (1867) for the Kronecker product.
"""

from functools import lru_cache, reduce

import torch
from torch import Tensor

from dmx.errors import ModelError

_SYLVESTER_SIZE = 64
"""Powers of two are multiplied in factors up to this order: few passes, and each small."""


@lru_cache(maxsize=8)
def hadamard_matrix(order: int) -> Tensor:
    """(order, order) float64 on CPU, orthogonal, entries +-1/sqrt(order); not always symmetric.

    The tensor is cached and shared: copy it before writing into it.

    Raises:
        ModelError: no construction above gives this order.
    """
    return reduce(torch.kron, _factors(order)) / order**0.5


def hadamard_transform(x: Tensor) -> Tensor:
    """`x @ hadamard_matrix(n)` for n = x.shape[-1], by the Kronecker factors of the matrix.

    Args:
        x: (..., n) floating point; computed in its dtype and on its device.

    Returns:
        (..., n) of the same dtype, contiguous.

    Raises:
        ModelError: n has no Hadamard matrix here.
    """
    order = x.shape[-1]
    factors = [factor.to(x.device, x.dtype) for factor in _factors(order)]
    y = x.reshape(-1, *(len(factor) for factor in factors))
    for axis, factor in enumerate(factors, start=1):
        y = torch.tensordot(y, factor, dims=([axis], [0])).movedim(-1, axis)
    return (y / order**0.5).reshape(x.shape)


@lru_cache(maxsize=64)
def _factors(order: int) -> tuple[Tensor, ...]:
    """Small matrices of +-1, float64, whose Kronecker product is the Hadamard matrix of an order."""
    base = order & -order and order // (order & -order)  # the odd part; 0 for order 0
    while 0 < base <= order:
        matrix = _base_matrix(base)
        if matrix is not None:
            sizes = _powers_of_two(order // base)
            return (matrix, *(_sylvester(size) for size in sizes))
        base *= 2
    raise ModelError(
        f"no Hadamard matrix of order {order} can be built from Sylvester's and Paley's "
        "constructions (a power of two times 1, q + 1 or 2(q + 1), q prime), so a width of "
        f"{order} cannot be rotated as a whole. Use a transform on blocks of 32, or none."
    )


def _base_matrix(order: int) -> Tensor | None:
    """The matrix of +-1 of an order that is 1 or of Paley's; None for another."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    q = order - 1
    if q % 4 == 3 and _is_prime(q):
        return _bordered_jacobsthal(q, below=-1) + torch.eye(order, dtype=torch.float64)
    q = order // 2 - 1
    if order % 2 == 0 and q % 4 == 1 and _is_prime(q):
        conference = _bordered_jacobsthal(q, below=1)
        eye = torch.eye(q + 1, dtype=torch.float64)
        plus, minus = torch.tensor([[[1, 1], [1, -1]], [[1, -1], [-1, -1]]], dtype=torch.float64)
        return torch.kron(conference, plus) + torch.kron(eye, minus)
    return None


def _bordered_jacobsthal(q: int, *, below: int) -> Tensor:
    """[[0, 1], [below, Q]] with Q[i, j] the quadratic character of i - j mod q; (q + 1, q + 1)."""
    character = -torch.ones(q, dtype=torch.float64)
    character[torch.arange(1, q) ** 2 % q] = 1
    character[0] = 0
    steps = torch.arange(q)
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1, below
    matrix[1:, 1:] = character[(steps[:, None] - steps) % q]
    return matrix


def _sylvester(order: int) -> Tensor:
    two = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    return reduce(torch.kron, [two] * (order.bit_length() - 1))


def _powers_of_two(order: int) -> list[int]:
    """A power of two as a product of powers of two, each 2 to _SYLVESTER_SIZE."""
    sizes = []
    while order > 1:
        sizes.append(min(order, _SYLVESTER_SIZE))
        order //= sizes[-1]
    return sizes


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))
