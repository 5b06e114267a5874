"""A partial-allocation auction of identical units (Cole, Gkatzelis and Goel, EC'13; Themis, NSDI'20 §5).

    u_a(o), v_a(o)   units that bidder a gets with its option o, and the logarithm of what they are worth to it
    o*      = argmax Σ_a v_a(o_a)                  over choices with Σ_a u_a(o_a) <= R; the Nash optimum
    o^{-a}  = the same without a
    c_a     = exp( Σ_{b≠a} v_b(o*_b) − Σ_{b≠a} v_b(o^{-a}_b) )      in (0, 1]; 1 − c_a is the hidden payment

The answer is exact, by dynamic programming over units: P_k(r) is the most that the first k bidders are worth together with r
units or fewer. What the others have without a is max_r P_{a−1}(r) + S_{a+1}(R − r), where S is the same from the other end.
That is O(R) per bidder, so all payments together cost as much as the optimum: O(R · Σ_a options of a) in all.
docs/algorithms/themis.md has an example.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from poise.scheduler.model.arithmetic import Floats, Ints, exp

FEW = 6
"""Options up to which one pass per option is faster than one pass for all of them."""
_BLOCK = 128
"""Units per pass: large enough to be worth a call, small enough to stay in the cache."""


class BidTable(NamedTuple):
    """The options of a bidder: ascending numbers of units, the first 0, and the logarithm of what each is worth to it."""

    units: Ints
    worth: Floats


@dataclass(frozen=True, slots=True)
class Cleared:
    """The outcome, by bidder.

    units       in the Nash optimum
    share       c, the fraction of them that is left after the hidden payment
    objective   Σ v of the Nash optimum
    """

    units: Ints
    share: Floats
    objective: float


def clear(tables: Sequence[BidTable], supply: int) -> Cleared:
    """The Nash optimum and the hidden payments. Of equally good options the one with fewer units is chosen.

    Options beyond the supply are never chosen.
    """
    bidders = range(len(tables))
    wanted = [int(table.units[int(np.argmax(table.worth))]) for table in tables]
    if sum(wanted) <= supply:  # everyone can have its favourite: no bidder costs another anything
        best = sum((float(table.worth.max()) for table in tables), 0.0)
        return Cleared(np.array(wanted, dtype=np.int64), np.ones(len(tables)), best)

    # P: what the first k bidders are worth together, by supply.
    before = np.zeros((len(tables) + 1, supply + 1))
    for bidder in bidders:
        _add(before[bidder], tables[bidder], before[bidder + 1])

    # The optimum, read off backwards.
    units, left = np.zeros(len(tables), dtype=np.int64), supply
    worth = np.empty(len(tables))
    for bidder in reversed(bidders):
        table = tables[bidder]
        fits = int(np.searchsorted(table.units, left, side="right"))
        option = int(np.argmax(before[bidder][left - table.units[:fits]] + table.worth[:fits]))
        units[bidder], worth[bidder] = table.units[option], table.worth[option]
        left -= int(units[bidder])

    # What the others are worth together without each bidder: S grows from the last one on.
    after, room = np.zeros(supply + 1), np.empty(supply + 1)
    without = np.empty(len(tables))
    for bidder in reversed(bidders):
        without[bidder] = np.max(before[bidder] + after[::-1])
        _add(after, tables[bidder], room)
        after, room = room, after

    objective = float(worth.sum())
    lost = np.maximum(without - (objective - worth), 0.0)
    return Cleared(units, exp(-lost), objective)


def _add(best: Floats, table: BidTable, result: Floats) -> None:
    """Add a bidder: result(r) = max over its options of best(r − u) + v."""
    fits = int(np.searchsorted(table.units, len(best) - 1, side="right"))
    units, worth = table.units[:fits], table.worth[:fits]
    np.add(best, worth[0], out=result)
    steps = units[2:] - units[1:-1]
    if fits <= FEW or not (steps == steps[0]).all():
        for count, value in zip(units[1:].tolist(), worth[1:].tolist(), strict=True):
            np.maximum(result[count:], best[: len(best) - count] + value, out=result[count:])
        return
    # Options of first, first + step, first + 2·step, … units are added all at once: row o of the view is `best`, shifted by
    # as many units as option o takes.
    first, step, values = int(units[1]), int(units[2] - units[1]), worth[1:, None]
    width = first + step * (len(values) - 1)
    padded = np.concatenate((np.full(width, -np.inf), best))
    size = padded.itemsize
    shifted = as_strided(padded[width - first :], (len(values), len(best)), (-step * size, size), writeable=False)
    for start in range(first, len(best), _BLOCK):
        stop = min(start + _BLOCK, len(best))
        fits = min((stop - 1 - first) // step + 1, len(values))
        block = result[start:stop]
        np.maximum(block, (shifted[:fits, start:stop] + values[:fits]).max(axis=0), out=block)
