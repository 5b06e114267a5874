"""Micro-batches without PyTorch: their number, which can be called, and batches of any shape divided into parts."""

import copy
import json
import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.worker import WorkerError, attach
from poise.worker.batch import DividedBatch
from poise.worker.micro_batches import samples_of

_WANTED = ": expected a tensor, an array, a tuple, list or dict of such, a sequence of samples, or their number; got "
Pair = namedtuple("Pair", ["inputs", "labels"])


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("POISE_MICRO_BATCHES", "4")
    return attach().micro_batches


def test_number_of_micro_batches_is_used_as_a_number(four: int) -> None:
    assert (four, int(four), 3 * four, 7 // four, f"{four}", repr(four)) == (4, 4, 12, 1, "4", "4")
    assert list(range(four)) == [0, 1, 2, 3]
    assert [len(part) for part in np.array_split(np.arange(10), four)] == [3, 3, 2, 2]
    assert json.dumps({"parts": four}) == '{"parts": 4}'
    assert isinstance(four, int)


def test_number_of_micro_batches_is_copied_without_the_lease(four: int) -> None:
    for copied in (pickle.loads(pickle.dumps(four)), copy.copy(four), copy.deepcopy(four)):
        assert (copied, type(copied)) == (4, int)


@pytest.mark.parametrize("parts", [0, -1, 1.5, "2", None])
def test_number_of_parts_that_cannot_be_is_refused(parts: Any) -> None:
    if parts is None:
        assert attach().share(None) == range(1)
        return
    with pytest.raises(WorkerError, match=r"^parts: expected (1 or more|a whole number of) micro-batches, got "):
        attach().share(parts)


@given(st.integers(1, 20), st.integers(0, 50))
def test_samples_of_parts_are_those_of_array_split(parts: int, samples: int) -> None:
    want = [part.tolist() for part in np.array_split(np.arange(samples), parts)]
    assert [list(samples_of(part, parts, samples)) for part in range(parts)] == want


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (6, range(2, 5)),
        (range(10, 16), range(12, 15)),
        (["a", "b", "c", "d", "e", "f"], ["c", "d", "e"]),
        ([[1], [2, 2], [3], [4], [5], [6]], [[3], [4], [5]]),  # samples of different lengths
        ([{"x": 1}] * 6, [{"x": 1}] * 3),
    ],
)
def test_batch_of_samples_is_divided_by_samples(given: Any, want: Any) -> None:
    assert DividedBatch(given).samples == 6
    assert DividedBatch(given).part(range(2, 5)) == want


def test_batch_of_fields_keeps_its_shape() -> None:
    inputs, labels = np.arange(12.0).reshape(6, 2), np.arange(6)
    for batch in ((inputs, labels), [inputs, labels], Pair(inputs, labels)):
        got = DividedBatch(batch).part(range(2, 5))
        assert type(got) is type(batch)
        assert [each.tolist() for each in got] == [inputs[2:5].tolist(), labels[2:5].tolist()]
    named = {"ids": inputs, "more": (labels, ("a", "b", "c", "d", "e", "f")), "mask": None}
    got = DividedBatch(named).part(range(2, 5))
    assert (got["ids"].tolist(), got["more"][0].tolist()) == (inputs[2:5].tolist(), [2, 3, 4])
    assert (got["more"][1], got["mask"]) == (("c", "d", "e"), None)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (0, "batch: expected 1 sample or more, got 0"),
        (-3, "batch: expected 1 sample or more, got 0"),
        ([], "batch: expected 1 sample or more, got 0"),
        ({}, "batch: expected at least one tensor, array or sequence of samples, got none"),
        (np.float64(2.0), "batch: expected samples in its first dimension, got a single number"),
        ({"a": np.zeros(3), "b": np.zeros(2)}, "batch['b']: expected 3 samples as batch['a'] has, got 2"),
        ((np.zeros(3), [np.zeros(3), np.zeros(4)]), "batch[1][1]: expected 3 samples as batch[0] has, got 4"),
        ("text", f"batch{_WANTED}str"),
        (None, f"batch{_WANTED}NoneType"),
        (True, f"batch{_WANTED}bool"),
        (2.5, f"batch{_WANTED}float"),
        ({"x": 3}, f"batch['x']{_WANTED}int"),
    ],
)
def test_batch_that_cannot_be_divided_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(WorkerError) as found:
        DividedBatch(given)
    assert str(found.value) == problem
