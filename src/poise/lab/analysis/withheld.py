"""GPUs that were there and could not be had: closed, and held by no run (`NodeRestricted`).

A closed GPU counts as there while a run holds it, and as gone from then on, like one of a lost node. So what jobs held never
exceeds what there was.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter

from poise.scheduler.model.cluster import Holding, Slots, bits
from poise.scheduler.model.event import NodeEvent, NodeLost, NodeRestricted, NodeReturned


def withheld_slots(
    nodes: Iterable[tuple[float, NodeEvent]], held: Iterable[tuple[float, float, Holding]]
) -> list[tuple[float, Slots, int]]:
    """Return when slots begin (1) and cease (-1) to be withheld: closed, on a live node, and held by no run; by time.

    nodes   what happened to nodes, by time
    held    (from, until, GPUs) of all runs
    """
    changes = list(_closings(nodes))
    ever: dict[int, int] = {}  # by node: slots that were closed at some time
    for _, node, mask, _ in changes:
        ever[node] = ever.get(node, 0) | mask
    for start, end, gpus in held if ever else ():
        for node, mask in gpus:
            if node in ever:
                changes += [(start, node, mask, -1), (end, node, mask, 1)]
    # Closed counts 1 and each run -1, so that a slot is withheld while its sum is 1.
    sums: Counter[Slots] = Counter()
    found: list[tuple[float, Slots, int]] = []
    for time, together in groupby(sorted(changes), key=itemgetter(0)):
        earlier: dict[Slots, bool] = {}
        for _, node, mask, more in together:
            for bit in bits(mask & ever[node]):
                slot = Slots(node, bit)
                earlier.setdefault(slot, sums[slot] == 1)
                sums[slot] += more
        found += ((time, slot, -1 if was else 1) for slot, was in earlier.items() if was is not (sums[slot] == 1))
    return found


def _closings(nodes: Iterable[tuple[float, NodeEvent]]) -> Iterator[tuple[float, int, int, int]]:
    """Yield (time, node, slots as a mask, 1 or -1) where slots of live nodes begin or cease to be closed."""
    closed: dict[int, int] = {}
    lost: set[int] = set()
    for time, event in nodes:
        node = event.node
        before = 0 if node in lost else closed.get(node, 0)
        match event:
            case NodeRestricted():
                closed[node] = sum(1 << slot for slot in event.closed)
            case NodeLost():
                lost.add(node)
            case NodeReturned():
                lost.discard(node)
        after = 0 if node in lost else closed.get(node, 0)
        for mask, more in ((after & ~before, 1), (before & ~after, -1)):
            if mask:
                yield time, node, mask, more
