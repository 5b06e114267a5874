"""Arithmetic that is the same everywhere: right, and used wherever decisions are made."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import poise
from poise.scheduler.model.arithmetic import Floats, dot, exp, log, solved, times

SOURCES = Path(poise.__file__).parent
DECIDING = SOURCES / "scheduler"
BLAS = {"linalg", "dot", "vdot", "inner", "matmul", "tensordot"}
UNEVEN = {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "power", "float_power", "logaddexp"}


def numbers(*shape: int) -> st.SearchStrategy[Floats]:
    return arrays(np.float64, shape, elements=st.floats(-1e3, 1e3))


@given(numbers(5, 3), numbers(3))
def test_products_are_those_of_linear_algebra(matrix: Floats, vector: Floats) -> None:
    np.testing.assert_allclose(times(matrix, vector), matrix @ vector, rtol=1e-12, atol=1e-8)
    assert dot(matrix[0], vector) == pytest.approx(matrix[0] @ vector, rel=1e-12, abs=1e-8)


@given(numbers(2, 6, 4), numbers(4, 4), numbers(2, 4, 3))
def test_systems_are_solved_if_positive_definite_symmetric_or_not(rows: Floats, twist: Floats, right: Floats) -> None:
    symmetric = np.einsum("pij,pik->pjk", rows, rows) / 1e3 + np.eye(4)
    matrix = symmetric + (twist - twist.T) / 1e3
    assert np.einsum("pij,pjk->pik", matrix, solved(matrix, right)) == pytest.approx(right, rel=1e-6, abs=1e-6)


def test_a_singular_system_gives_no_finite_answer() -> None:
    assert not np.isfinite(solved(np.zeros((2, 2)), np.ones((2, 1)))).any()


@given(arrays(np.float64, 20, elements=st.floats(-800, 700)))
def test_exponentials_are_within_two_units_of_the_last_place(values: Floats) -> None:
    right = np.array([math.exp(value) for value in values])
    assert (np.abs(exp(values) - right) <= 2 * np.spacing(right)).all()


def test_exponentials_at_the_edges() -> None:
    assert exp(np.array([0.0, -0.0, -np.inf, -1e300])).tolist() == [1.0, 1.0, 0.0, 0.0]


@given(arrays(np.float64, 20, elements=st.floats(1e-300, 1e300)))
def test_logarithms_are_those_of_the_standard_library(values: Floats) -> None:
    assert log(values).tolist() == [math.log(value) for value in values]


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_no_deciding_module_uses_blas_or_exponentials_of_numpy(path: Path) -> None:
    """No matrix products anywhere, so that no figure depends on the machine; numpy's exponentials not in the scheduler."""
    found = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    products = [node.lineno for node in found if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)]
    of_numpy = [node for node in found if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "np"]
    banned = BLAS | UNEVEN if path.is_relative_to(DECIDING) else BLAS
    assert products == []
    assert [(node.lineno, node.attr) for node in of_numpy if node.attr in banned] == []
