"""Which micro-batches of a step each rank computes.

Shares are runs of consecutive numbers in order of rank: disjoint, all of them together, and the same whoever computes them.
The slowest rank is done as early as can be. Ranks alike: floor(n / ranks) each, and one more for the first n mod ranks.
"""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heapreplace


def counts(parts: int, speeds: Sequence[float]) -> list[int]:
    """How many of `parts` each rank gets, by their relative speeds. Exact: no rounding error decides.

    No split is done before the fluid one, so whatever a rank can do until then is its own; each of the few that are left
    goes to whoever is done with it first, and of those to the lowest rank.
    """
    exact = [Fraction(speed) for speed in speeds]
    fluid = parts / sum(exact)
    given = [int(fluid * speed) for speed in exact]
    done = [((had + 1) / speed, rank) for rank, (had, speed) in enumerate(zip(given, exact, strict=True))]
    heapify(done)
    for _ in range(parts - sum(given)):
        moment, rank = done[0]
        given[rank] += 1
        heapreplace(done, (moment + 1 / exact[rank], rank))
    return given


def share(parts: int, rank: int, speeds: Sequence[float]) -> range:
    """The micro-batches of one rank out of 0 .. parts - 1."""
    given = counts(parts, speeds)
    first = sum(given[:rank])
    return range(first, first + given[rank])
