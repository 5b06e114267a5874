"""Which micro-batches of a step each rank computes.

Shares are runs of consecutive numbers in order of rank: disjoint, all of them together, and the same whoever computes them.
Ranks alike: floor(n / ranks) each, and one more for the first n mod ranks. Ranks of unequal speed: in proportion to it, by
largest remainder; equal remainders go to the lower rank.
"""

from collections.abc import Sequence
from fractions import Fraction


def counts(parts: int, speeds: Sequence[float]) -> list[int]:
    """How many of `parts` each rank gets, by their relative speeds. Exact: no rounding error decides."""
    exact = [Fraction(speed) for speed in speeds]
    whole = sum(exact)
    quotas = [parts * speed / whole for speed in exact]
    given = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda rank: (given[rank] - quotas[rank], rank))
    for rank in by_remainder[: parts - sum(given)]:
        given[rank] += 1
    return given


def share(parts: int, rank: int, speeds: Sequence[float]) -> range:
    """The micro-batches of one rank out of 0 .. parts - 1."""
    given = counts(parts, speeds)
    first = sum(given[:rank])
    return range(first, first + given[rank])
