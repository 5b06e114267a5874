"""Numbers that look drawn but are always the same: no state to carry along, no generator to seed.

SplitMix64 (Steele et al., OOPSLA'14): the number at a place of a stream is a mixture of the bits of the two.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from poise.model.arrays import Floats

Thing = TypeVar("Thing")

_ALL = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def bits(stream: int, place: int) -> int:
    """64 bits."""
    mixed = ((stream << 32) + _STEP * (place + 1)) & _ALL
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _ALL
    return mixed ^ (mixed >> 31)


def uniform(stream: int, count: int) -> Floats:
    """The first numbers of a stream, in [0, 1)."""
    return np.array([bits(stream, place) >> 11 for place in range(count)], dtype=np.float64) / (1 << 53)


def stream(*names: int) -> int:
    """The stream of something that has several numbers for a name."""
    mixed = 0
    for name in names:
        mixed = bits((mixed + name) & (_ALL >> 32), mixed >> 32)
    return mixed >> 32


def shuffled(things: Sequence[Thing], stream: int) -> list[Thing]:
    """The things in the order that a stream has for so many (Fisher and Yates)."""
    left = list(things)
    for last in range(len(left) - 1, 0, -1):
        chosen = bits(stream, last) % (last + 1)
        left[last], left[chosen] = left[chosen], left[last]
    return left
