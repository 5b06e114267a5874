"""Low-rank matrix completion: fill the gaps of a matrix as if it were the product of two thin ones.

A (rows × columns), known on a set K. Find a (rows), b (columns), U (rows × rank) and V (columns × rank):

    min  Σ_K (A_ij − a_i − b_j − U_i·V_j)²  +  regulariser · (‖U‖² + ‖V‖²)          with a = b = 0 for Offsets.NONE

by alternating least squares: with b and V fixed, each row is a small ridge regression of its own, and vice versa. It starts
from the leading singular vectors of what is known, so that the same matrix always has the same answer, on every machine
(model/arithmetic.py).
"""

from dataclasses import dataclass
from enum import Enum
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Floats, dot, solved, times

_MOST_SWEEPS = 60
_OFFSETS_COST = 1e-9
"""Just enough for a row without any known entry to have an answer, which is 0."""
_FURTHEST = 2.0
"""No gap departs from the offsets by more than this many times what any known entry does: a row of which little is known
would else be carried anywhere by a factor that happens to be small where the row is known."""
_TURNS = 40
"""Iterations towards the singular vectors that the factors start from."""
_NONE = 1e-12
"""A remainder below this part of a vector is rounding."""
_STILL = 1e-5
"""A sweep that moves no entry by more than this part of the largest is the last."""


class Offsets(Enum):
    """Whether each row and each column has an offset of its own, as logarithms of speeds do; the value is 1 if so."""

    NONE = 0.0
    BOTH = 1.0


def completed(known: Floats, *, rank: int, regulariser: float, offsets: Offsets) -> Floats:
    """The matrix with its gaps (nan) filled in. Known entries stay as they are, to the last bit."""
    mask = ~np.isnan(known)
    if mask.all() or not mask.any():
        return np.where(mask, known, 0.0)
    weights = mask.astype(np.float64)
    # The factors only have to explain what offsets cannot; otherwise rows of very different levels would pass for structure.
    levels = np.zeros(known.shape)
    if offsets is Offsets.BOTH:  # the best a_i + b_j without any factors, from the normal equations of all offsets at once
        here, height = np.where(mask, known, 0.0), len(known)
        counts = np.diag(np.concatenate([weights.sum(axis=1), weights.sum(axis=0)]) + _OFFSETS_COST)
        counts[:height, height:], counts[height:, :height] = weights, weights.T
        best = solved(counts, np.concatenate([here.sum(axis=1), here.sum(axis=0)])[:, None])[:, 0]
        levels = best[:height, None] + best[height:]
    left = np.where(mask, known - levels, 0.0)
    columns = _start(left, min(rank, *known.shape))
    across, down = _Fit.of(left, weights, regulariser, offsets), _Fit.of(left.T, weights.T, regulariser, offsets)
    product = left
    for _ in range(_MOST_SWEEPS):
        rows = across.given(columns)
        columns = down.given(rows)
        before, product = product, np.einsum("ik,jk->ij", rows[:, 1:], columns[:, 1:]) + rows[:, :1] + columns[:, 0]
        if np.abs(product - before).max() <= _STILL * np.abs(product).max():
            break
    furthest = _FURTHEST * np.abs(left).max()
    return np.where(mask, known, levels + np.clip(product, -furthest, furthest))


def _start(left: Floats, rank: int) -> Floats:
    """By column: its offset, 0, then its factors, singular vectors times the roots of their values.

    Orthogonal iteration from fixed directions. Vectors of nearly equal values may come out mixed, which is as good a start:
    the objective does not change when factors are rotated.
    """
    squares = np.einsum("ij,ik->jk", left, left)
    basis = _orthonormal(np.random.default_rng(0).random((rank, left.shape[1])) - 0.5)
    for _ in range(_TURNS):
        basis = _orthonormal(np.einsum("rj,jk->rk", basis, squares))
    values = np.sqrt((np.einsum("ij,rj->ri", left, basis) ** 2).sum(axis=1))
    return np.column_stack([np.zeros(left.shape[1]), basis.T * np.sqrt(values)])


def _orthonormal(rows: Floats) -> Floats:
    """An orthonormal basis of the rows (Gram-Schmidt); a row that the ones before it span already becomes 0."""
    basis = np.zeros_like(rows)
    for at, row in enumerate(rows):
        for _ in range(2):  # the second time removes what rounding left
            row = row - np.einsum("r,rj->j", times(basis[:at], row), basis[:at])
        length = sqrt(dot(row, row))
        basis[at] = row / length if length > _NONE * sqrt(dot(rows[at], rows[at])) else 0.0
    return basis


@dataclass(frozen=True)
class _Fit:
    """One ridge regression per row: the best offset and factors of each row, given those of the columns.

    Many rows have their gaps in the same places, and then the same normal equations, which are solved once.
    """

    left: Floats
    weights: Floats
    patterns: Floats
    pattern: NDArray[np.int64]
    regulariser: float
    offsets: Offsets

    @classmethod
    def of(cls, left: Floats, weights: Floats, regulariser: float, offsets: Offsets) -> "_Fit":
        """The regressions for the rows of this matrix."""
        patterns, pattern = np.unique(weights, axis=0, return_inverse=True)
        return cls(left, weights, patterns, pattern.reshape(-1).astype(np.int64), regulariser, offsets)

    def given(self, columns: Floats) -> Floats:
        """By row: its offset, then its factors."""
        design = np.column_stack([np.full(len(columns), self.offsets.value), columns[:, 1:]])
        penalty = np.diag([_OFFSETS_COST] + [self.regulariser] * (design.shape[1] - 1))
        normal = np.einsum("pj,jk,jl->pkl", self.patterns, design, design) + penalty
        inverse = solved(normal, np.broadcast_to(np.eye(len(penalty)), normal.shape))
        aim = np.einsum("ij,jk->ik", (self.left - columns[:, 0]) * self.weights, design)
        fitted: Floats = np.einsum("ikl,il->ik", inverse[self.pattern], aim)
        return fitted


def nearest(row: Floats, references: Floats, chance: np.random.Generator) -> int:
    """The reference row at the least cosine distance, the first of equals; at random for a row of zeros."""
    length, lengths = sqrt(dot(row, row)), np.sqrt((references**2).sum(axis=1))
    if length == 0 or not lengths.any():
        return int(chance.integers(len(references)))
    cosines = np.where(lengths > 0, times(references, row) / (np.where(lengths > 0, lengths, 1.0) * length), -np.inf)
    return int(np.argmax(cosines))
