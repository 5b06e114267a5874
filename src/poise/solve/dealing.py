"""Time that classes of alike rows spend together, dealt out to their members: everybody gets an equal part of it."""

import numpy as np

from poise.model.arrays import Floats, Ints
from poise.model.workload import Pairs


def dealt(shared: Pairs, member: Ints, classes: int) -> Pairs:
    """Pairs of rows for pairs of classes; `member` says of each row which class it is in.

    Two classes are laid side by side, each member with an equal part of the time, and whoever lies beside whom shares (the
    north-west corner rule): as few pairs as members. Members of one class sit in a ring.
    """
    order = np.argsort(member, kind="stable")
    bounds = np.searchsorted(member[order], np.arange(classes + 1))
    parts = [
        _dealt_pair(order[bounds[a] : bounds[a + 1]], order[bounds[b] : bounds[b + 1]], share, column)
        for a, b, column, share in zip(
            shared.first.tolist(), shared.second.tolist(), shared.column.tolist(), shared.share.tolist(), strict=True
        )
    ]
    if not parts:
        return Pairs.none()
    first, second, column, share = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Pairs(first, second, column, share)


def _dealt_pair(one: Ints, other: Ints, share: float, column: int) -> tuple[Ints, Ints, Ints, Floats]:
    if one[0] == other[0]:
        return _ring(one, share, column)
    edges = np.union1d(np.arange(1, len(one) + 1) / len(one), np.arange(1, len(other) + 1) / len(other))
    edges = edges[np.diff(edges, prepend=0.0) > 1e-12]  # the same edge twice, but for rounding
    middle = edges - np.diff(edges, prepend=0.0) / 2
    first = one[np.minimum((middle * len(one)).astype(np.int64), len(one) - 1)]
    second = other[np.minimum((middle * len(other)).astype(np.int64), len(other) - 1)]
    return first, second, np.full(len(edges), column), share * np.diff(edges, prepend=0.0)


def _ring(rows: Ints, share: float, column: int) -> tuple[Ints, Ints, Ints, Floats]:
    """Each beside the next; two rows are one pair."""
    if len(rows) == 2:
        return rows[:1], rows[1:], np.array([column]), np.array([share])
    return rows, np.roll(rows, -1), np.full(len(rows), column), np.full(len(rows), share / len(rows))
