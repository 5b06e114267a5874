"""Numbers that look drawn but are always the same: no state to carry along, no generator to seed.

SplitMix64 (Steele et al., OOPSLA'14): the number at a place of a stream is a mixture of the bits of the two.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from poise.scheduler.model.arithmetic import Floats

Thing = TypeVar("Thing")

STEP = 0x9E3779B97F4A7C15
"""From one state of a stream to the next."""
_ALL = (1 << 64) - 1


def mixed(state: int) -> int:
    """64 bits out of a state."""
    bits = state & _ALL
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _ALL
    return bits ^ (bits >> 31)


def bits(stream: int, place: int) -> int:
    """64 bits."""
    return mixed((stream << 32) + STEP * (place + 1))


def uniform(stream: int, count: int) -> Floats:
    """The first numbers of a stream, in [0, 1)."""
    return np.array([bits(stream, place) >> 11 for place in range(count)], dtype=np.float64) / (1 << 53)


def stream(*names: int) -> int:
    """The stream of something that has several numbers for a name."""
    found = 0
    for name in names:
        found = bits((found + name) & (_ALL >> 32), found >> 32)
    return found >> 32


def shuffled(things: Sequence[Thing], drawn: Callable[[int], int]) -> list[Thing]:
    """The things in an order that is drawn (Fisher and Yates): a number for each place, from the last one on."""
    left = list(things)
    for last in range(len(left) - 1, 0, -1):
        chosen = drawn(last) % (last + 1)
        left[last], left[chosen] = left[chosen], left[last]
    return left
