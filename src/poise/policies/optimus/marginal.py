"""Greedy by marginal gain: the next unit goes where it saves the most for its cost (Optimus, EuroSys'18 §4.1).

Knows nothing of what a unit is: a contender's state and the units that can be added to it are its own affair. Optimus proper
adds parameter servers and workers; where jobs reduce among themselves there are only GPUs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State")


class Offer(NamedTuple, Generic[State]):
    """A unit that could be added: what it saves, what it costs, and what its contender is with it."""

    saves: float
    cost: int
    after: State


class Grant(NamedTuple, Generic[State]):
    """A unit that was added: to whom, what it saves for its cost, and what its contender is now."""

    to: int
    gain: float
    state: State


@dataclass(frozen=True, slots=True)
class Granted(Generic[State]):
    """The outcome: the state of everybody, the units in the order in which they were given, what is left over."""

    states: dict[int, State]
    grants: tuple[Grant[State], ...]
    left: int


def greedily(
    starts: Mapping[int, State], offers: Callable[[int, State], Iterable[Offer[State]]], capacity: int
) -> Granted[State]:
    """Give units out, the largest saving for its cost first, until none is left or none saves anything.

    `capacity` is what is left once everybody has its start. Equal gains go to the lower key, and of one contender's to the
    first that it offers. A unit that costs more than is left is passed over. O(log n) a unit.
    """
    states, grants = dict(starts), list[Grant[State]]()
    heap: list[tuple[float, int, Offer[State]]] = []
    asking = list(states)
    while True:
        for key in asking:
            able = [offer for offer in offers(key, states[key]) if offer.saves > 0 and offer.cost <= capacity]
            if able:
                best = max(able, key=_gain)
                heappush(heap, (-_gain(best), key, best))
        if not heap:
            return Granted(states, tuple(grants), capacity)
        gain, key, offer = heappop(heap)
        asking = [key]
        if offer.cost <= capacity:
            capacity -= offer.cost
            states[key] = offer.after
            grants.append(Grant(key, -gain, offer.after))


def _gain(offer: Offer[State]) -> float:
    """What it saves for its cost."""
    return offer.saves / offer.cost
