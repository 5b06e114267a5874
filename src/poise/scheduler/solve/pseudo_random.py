"""Pseudo-random numbers by hashing: a number is a pure function of what it is drawn for.

Policies that draw by lot must be deterministic and pure. A generator would be state: it would have to be carried through
every memory of every policy, stored with a checkpoint, and a draw more or less in one place would change all later draws
everywhere. A hash has no state. The draw for, say, bidder 7 of auction 12 depends on the seed and these two numbers and on
nothing else, so replay, restart and the order of evaluation cannot change it. `random` and numpy's generators also promise
no fixed algorithm for shuffles across versions; this module is the algorithm.

The hash is SplitMix64 (Steele et al., OOPSLA'14). A *stream* is named by integers such as a seed and a counter; the number
at a place of a stream is a mixture of the bits of both.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from poise.scheduler.model.arithmetic import Floats

Thing = TypeVar("Thing")

STEP = 0x9E3779B97F4A7C15
"""From one state of a SplitMix64 generator to the next: 2⁶⁴ divided by the golden ratio, made odd."""
_ALL = (1 << 64) - 1


def mixed(state: int) -> int:
    """64 well-mixed bits from a state of which only the lowest 64 count."""
    bits = state & _ALL
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _ALL
    return bits ^ (bits >> 31)


def bits(stream: int, place: int) -> int:
    """The 64 bits at a place of a stream."""
    return mixed((stream << 32) + STEP * (place + 1))


def uniform(stream: int, count: int) -> Floats:
    """The first numbers of a stream, in [0, 1)."""
    return np.array([bits(stream, place) >> 11 for place in range(count)], dtype=np.float64) / (1 << 53)


def stream(*names: int) -> int:
    """The stream that these integers name; other integers, or another order of them, name another one."""
    found = 0
    for name in names:
        found = bits((found + name) & (_ALL >> 32), found >> 32)
    return found >> 32


def shuffled(things: Sequence[Thing], drawn: Callable[[int], int]) -> list[Thing]:
    """The things in a drawn order (Fisher-Yates); `drawn` gives the number for a place, asked for from the last one on."""
    left = list(things)
    for last in range(len(left) - 1, 0, -1):
        chosen = drawn(last) % (last + 1)
        left[last], left[chosen] = left[chosen], left[last]
    return left
