"""A partial-allocation auction of like units (Cole, Gkatzelis and Goel, EC'13; Themis, NSDI'20 §5; ALGORITHMS §3.3).

    u_a(o), v_a(o)   units that bidder a gets with its option o, and the logarithm of what they are worth to it
    o*      = argmax Σ_a v_a(o_a)                  over choices with Σ_a u_a(o_a) <= R; the Nash optimum
    o^{-a}  = the same without a
    c_a     = exp( Σ_{b≠a} v_b(o*_b) − Σ_{b≠a} v_b(o^{-a}_b) )      in (0, 1]; 1 − c_a is the hidden payment

Exact, by dynamic programming over units: P_k(r), the most that the first k bidders are worth together with r units or fewer.
What the others have without a is max_r P_{a−1}(r) + S_{a+1}(R − r), S being the same from the other end: O(R) each, so that
all payments together cost as much as the optimum does. O(R · Σ_a options of a) in all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from poise.scheduler.model.arithmetic import Floats, Ints, exp

FEW = 6
"""Options up to which one pass for each is faster than one for all of them."""
_BLOCK = 128
"""Units whose best option is looked for at a time: large enough to be worth a call, small enough to stay in the cache."""


class BidTable(NamedTuple):
    """What a bidder would take: units by ascending number, none among them, and the logarithm of what each is worth."""

    units: Ints
    worth: Floats


@dataclass(frozen=True, slots=True)
class Cleared:
    """The outcome, by bidder.

    units       in the Nash optimum
    share       c, the part of them that is left after the hidden payment
    objective   Σ v of the Nash optimum
    """

    units: Ints
    share: Floats
    objective: float


def clear(tables: Sequence[BidTable], supply: int) -> Cleared:
    """The Nash optimum and the hidden payments; of equal options the one of fewer units is chosen.

    Options beyond the supply are never chosen; every table has one of no units.
    """
    wanted = [int(table.units[int(np.argmax(table.worth))]) for table in tables]
    if sum(wanted) <= supply:  # nobody is in anybody's way
        best = sum((float(table.worth.max()) for table in tables), 0.0)
        return Cleared(np.array(wanted, dtype=np.int64), np.ones(len(tables)), best)
    before = _prefixes(tables, supply)
    units = _chosen(tables, before, supply)
    worth = np.array([table.worth[np.searchsorted(table.units, got)] for table, got in zip(tables, units, strict=True)])
    objective = float(worth.sum())
    lost = np.maximum(_without(tables, before, supply) - (objective - worth), 0.0)
    return Cleared(np.array(units, dtype=np.int64), exp(-lost), objective)


def _prefixes(tables: Sequence[BidTable], supply: int) -> Floats:
    """(bidders + 1, supply + 1): P_k(r)."""
    best = np.zeros((len(tables) + 1, supply + 1))
    for bidder, table in enumerate(tables):
        _add(best[bidder], table, best[bidder + 1])
    return best


def _chosen(tables: Sequence[BidTable], before: Floats, supply: int) -> list[int]:
    """The units of each bidder in the optimum, found from the last one on."""
    units, left = [], supply
    for bidder in range(len(tables) - 1, -1, -1):
        table = tables[bidder]
        fits = int(np.searchsorted(table.units, left, side="right"))
        option = int(np.argmax(before[bidder][left - table.units[:fits]] + table.worth[:fits]))
        units.append(int(table.units[option]))
        left -= units[-1]
    return units[::-1]


def _without(tables: Sequence[BidTable], before: Floats, supply: int) -> Floats:
    """What all others are worth together without each bidder."""
    after, room = np.zeros(supply + 1), np.empty(supply + 1)
    worth = np.empty(len(tables))
    for bidder in range(len(tables) - 1, -1, -1):
        worth[bidder] = np.max(before[bidder] + after[::-1])
        _add(after, tables[bidder], room)
        after, room = room, after
    return worth


def _add(best: Floats, table: BidTable, result: Floats) -> None:
    """One more bidder: result(r) = max over its options of best(r − u) + v."""
    fits = int(np.searchsorted(table.units, len(best) - 1, side="right"))
    units, worth = table.units[:fits], table.worth[:fits]
    if fits <= FEW or not _is_even(units):
        _add_each(best, units, worth, result)
    else:
        _add_evenly(best, int(units[1]), int(units[2] - units[1]), worth, result)


def _is_even(units: Ints) -> bool:
    """Whether all options but that of no units are equally far apart."""
    steps = units[2:] - units[1:-1]
    return bool((steps == steps[0]).all())


def _add_each(best: Floats, units: Ints, worth: Floats, result: Floats) -> None:
    np.add(best, worth[0], out=result)
    for count, value in zip(units[1:].tolist(), worth[1:].tolist(), strict=True):
        np.maximum(result[count:], best[: len(best) - count] + value, out=result[count:])


def _add_evenly(best: Floats, first: int, step: int, worth: Floats, result: Floats) -> None:
    """The same for options of `first`, first + step, first + 2·step, … units, all at once: row o of the view is best,

    shifted by as many units as option o takes.
    """
    np.add(best, worth[0], out=result)
    values = worth[1:, None]
    width = first + step * (len(values) - 1)
    padded = np.concatenate((np.full(width, -np.inf), best))
    size = padded.itemsize
    shifted = as_strided(padded[width - first :], (len(values), len(best)), (-step * size, size), writeable=False)
    for start in range(first, len(best), _BLOCK):
        stop = min(start + _BLOCK, len(best))
        fits = min((stop - 1 - first) // step + 1, len(values))
        block = result[start:stop]
        np.maximum(block, (shifted[:fits, start:stop] + values[:fits]).max(axis=0), out=block)
