"""A batch of any shape, as training loops have them, divided by samples.

a tensor or an array        by its first dimension
a dict                      each of its values
a tuple or a list           each of its elements, if one of them is a tensor or an array; otherwise its elements are samples
a number                    the numbers of that many samples
None                        stays None, where it is in a tuple, list or dict
"""

from collections.abc import Iterator, Mapping
from typing import Any

from poise.worker.protocol import WorkerError


class DividedBatch:
    """A batch: how many samples it has, and any range of them in the same shape."""

    def __init__(self, given: Any) -> None:  # noqa: ANN401  whatever it is made of
        self.given = range(given) if isinstance(given, int) and not isinstance(given, bool) else given
        lengths = dict(_lengths(self.given, "batch"))
        if not lengths:
            raise WorkerError("batch: expected at least one tensor, array or sequence of samples, got none")
        first, self.samples = next(iter(lengths.items()))
        for place, length in lengths.items():
            if length != self.samples:
                raise WorkerError(f"{place}: expected {self.samples} samples as {first} has, got {length}")
        if self.samples < 1:
            raise WorkerError("batch: expected 1 sample or more, got 0")

    def part(self, rows: range) -> Any:  # noqa: ANN401  as the batch
        """Return these samples."""
        return _part(self.given, slice(rows.start, rows.stop))


def is_array(value: object) -> bool:
    """Whether it is a tensor, or an array of numpy or JAX."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _has_fields(value: object) -> bool:
    return isinstance(value, tuple | list) and any(is_array(each) for each in value)


def _lengths(value: Any, place: str) -> Iterator[tuple[str, int]]:  # noqa: ANN401  whatever it is made of
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from () if each is None else _lengths(each, f"{place}[{key!r}]")
    elif _has_fields(value):
        for index, each in enumerate(value):
            yield from () if each is None else _lengths(each, f"{place}[{index}]")
    elif is_array(value):
        if not value.shape:
            raise WorkerError(f"{place}: expected samples in its first dimension, got a single number")
        yield place, value.shape[0]
    elif isinstance(value, tuple | list | range):
        yield place, len(value)
    else:
        raise WorkerError(
            f"{place}: expected a tensor, an array, a tuple, list or dict of such, a sequence of samples, or their number; "
            f"got {type(value).__name__}"
        )


def _part(value: Any, rows: slice) -> Any:  # noqa: ANN401  whatever it is made of
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: _part(each, rows) for key, each in value.items()}
    if _has_fields(value):
        found = [_part(each, rows) for each in value]
        if hasattr(value, "_fields"):
            return type(value)(*found)
        return tuple(found) if isinstance(value, tuple) else found
    return value[rows]
