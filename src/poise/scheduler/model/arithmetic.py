"""Arithmetic on arrays that comes out the same, to the last bit, whatever processor it is done on.

A decision can hang on the last bit of a number: two jobs tie on one machine, and not on another. So a journal would replay
only where it was written. What differs are products by a BLAS, which adds in the order that suits the processor and the
number of threads, and exponentials and logarithms of numpy. Element-wise + − × ÷ √, sums by numpy and `einsum` do not; what
needs more than that is here.
"""

import math

import numpy as np
from numpy.typing import NDArray

# Names of numpy arrays by what they hold.

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_LEAST = -750.0
"""e to the power of this is 0 already."""
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62E42FEEp-1"), float.fromhex("0x1.A39EF35793C76p-33")
"""ln 2 in two parts: whole multiples of the first are exact."""
_SERIES = tuple(1.0 / math.factorial(power) for power in range(13, -1, -1))


def dot(one: Floats, other: Floats) -> float:
    """Σ one_i other_i."""
    return float(np.einsum("i,i->", one, other))


def times(matrix: Floats, vector: Floats) -> Floats:
    """Σ_j matrix_ij vector_j of each row i."""
    product: Floats = np.einsum("ij,j->i", matrix, vector)
    return product


def solved(matrix: Floats, right: Floats) -> Floats:
    """x of matrix · x = right, both (..., n, k); infinite or nan where there is none.

    By elimination without a search for pivots. That is for positive definite matrices, symmetric or not (vᵀ·matrix·v > 0).
    """
    size = matrix.shape[-1]
    table = np.concatenate([matrix, right], axis=-1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for at in range(size):
            row = table[..., at, :] / table[..., at, at, None]
            table -= table[..., :, at, None] * row[..., None, :]
            table[..., at, :] = row
    return table[..., size:]


def exp(values: Floats) -> Floats:
    """e to the power of each; of at most 709. Within two units of the last place."""
    given = np.maximum(values, _LEAST)
    doublings = np.rint(given * (1.0 / math.log(2.0)))
    left = (given - doublings * _LN2_HIGH) - doublings * _LN2_LOW  # at most ln(2)/2 in size, where the series is short
    total = np.full_like(given, _SERIES[0])
    for term in _SERIES[1:]:
        total *= left
        total += term
    return np.ldexp(total, doublings.astype(np.int32))


def log(values: Floats) -> Floats:
    """The natural logarithm of each; of numbers above 0. Slow: one by one."""
    return np.array([math.log(value) for value in values.tolist()])
