"""Array arithmetic that gives the same bits on every processor.

A decision can depend on the last bit of a number: two jobs tie on one machine and not on another, and a journal would
replay only where it was written. Two things differ between machines: products by a BLAS, which adds in the order that suits
the processor and the number of threads, and numpy's exponentials, logarithms and powers other than squares. Element-wise
+ − × ÷ √, numpy's sums and `einsum` do not differ. Code that decides uses only those, and this module for the rest.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_LEAST = -750.0
"""exp of this is 0."""
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62E42FEEp-1"), float.fromhex("0x1.A39EF35793C76p-33")
"""ln 2 in two parts: whole multiples of the first are exact."""
_SERIES = tuple(1.0 / math.factorial(power) for power in range(13, -1, -1))


def dot(one: Floats, other: Floats) -> float:
    """The inner product Σ one_i other_i."""
    return float(np.einsum("i,i->", one, other))


def times(matrix: Floats, vector: Floats) -> Floats:
    """The product Σ_j matrix_ij vector_j, by row i."""
    product: Floats = np.einsum("ij,j->i", matrix, vector)
    return product


def solved(matrix: Floats, right: Floats) -> Floats:
    """Solve matrix · x = right for x, of shape (..., n, k); infinite or nan where there is no solution.

    Gauss-Jordan elimination without pivoting, which is safe for positive definite matrices, symmetric or not
    (vᵀ·matrix·v > 0 for all v ≠ 0).
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
    """Exponential of each value up to 709, within two units in the last place."""
    given = np.maximum(values, _LEAST)
    doublings = np.rint(given * (1.0 / math.log(2.0)))
    left = (given - doublings * _LN2_HIGH) - doublings * _LN2_LOW  # at most ln(2)/2 in size, where the series is short
    total = np.full_like(given, _SERIES[0])
    for term in _SERIES[1:]:
        total *= left
        total += term
    return np.ldexp(total, doublings.astype(np.int32))


def cube(values: Floats) -> Floats:
    """Third power of each value. Slow: one call of the C library per value."""
    return np.array([math.pow(value, 3.0) for value in values.tolist()])


def log(values: Floats) -> Floats:
    """Natural logarithm of each value above 0. Slow: one call of the C library per value."""
    return np.array([math.log(value) for value in values.tolist()])
