"""Which micro-batches of a step each rank computes.

Shares are ranges of consecutive numbers in order of rank: disjoint, complete, and the same on whichever rank they are
computed. The slowest rank is done as early as possible. With equal ranks: floor(n / ranks) each, and one more for the first
n mod ranks.
"""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heapreplace


def share(parts: int, rank: int, speeds: Sequence[float]) -> range:
    """Return one rank's micro-batches out of 0 .. parts - 1."""
    given = counts(parts, speeds)
    first = sum(given[:rank])
    return range(first, first + given[rank])


def counts(parts: int, speeds: Sequence[float]) -> list[int]:
    """Return how many of `parts` each rank gets, by their relative speeds. Exact: no rounding error decides.

    No split is done before the fluid one, so a rank gets whatever it can do until then. Each of the few that are left goes
    to the rank that would be done with it first; among equals, to the lowest rank.
    """
    exact = [Fraction(speed) for speed in speeds]
    fluid = parts / sum(exact)
    given = [int(fluid * speed) for speed in exact]
    done = [((had + 1) / speed, rank) for rank, (had, speed) in enumerate(zip(given, exact, strict=True))]
    heapify(done)
    for _ in range(parts - sum(given)):
        end, rank = done[0]
        given[rank] += 1
        heapreplace(done, (end + 1 / exact[rank], rank))
    return given
