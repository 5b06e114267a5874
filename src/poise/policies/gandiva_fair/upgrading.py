"""While nobody waits: running jobs move to faster GPUs that stand idle, if that pays.

A move pays if it gains more than it costs until the job may move again: (1 − speed here ÷ speed there) · rest > cost.
"""

from collections.abc import Mapping

from poise.model.cluster import site_of
from poise.model.columns import Snapshot
from poise.model.plan import Claim
from poise.model.speed import Locality
from poise.policies.gandiva_fair.entitling import Seen
from poise.policies.sketch import Sketch


def upgrades(
    snapshot: Snapshot, seen: Seen | None, moved: Mapping[int, float], *, rest: float, cost: float
) -> tuple[Claim, ...]:
    """Jobs that gain most first, each on one node or as few as can hold it.

    seen    (tenant, kind, type) that have run: only their speeds are known; None: all are
    moved   when jobs were last moved
    """
    sketch = Sketch(snapshot.floor)
    claims: list[Claim] = []
    for _, row, there in sorted(_gains(snapshot, seen, moved, rest=rest, cost=cost)):
        gang = snapshot.columns.gang[row]
        site = sketch.tightest(there, gang)
        is_close = site is not None and (len(site) == 1 or gang > sketch.topology.largest_node(there))
        if site is not None and is_close and all(claim.row != row for claim in claims):
            sketch.take(site)
            sketch.give(site_of(snapshot.floor.holdings[row]))
            claims.append(Claim(row, site=site))
    return tuple(claims)


def _gains(
    snapshot: Snapshot, seen: Seen | None, moved: Mapping[int, float], *, rest: float, cost: float
) -> list[tuple[float, int, int]]:
    """(minus the GPU-seconds gained, job, type) of all moves that pay."""
    columns, now = snapshot.columns, snapshot.now
    type_of = snapshot.floor.topology.type_of
    idle = [gpu_type for gpu_type, gpus in enumerate(snapshot.idle) if gpus]
    found = []
    for row, holding in snapshot.floor.holdings.items():
        if now - max(columns.started[row], moved.get(row, 0.0)) < rest:
            continue
        here, gang, kind = type_of[holding[0].node], columns.gang[row], (columns.tenant[row], columns.kind[row])
        rates = snapshot.estimate(row).rates
        for there in idle:
            known = seen is None or (*kind, there) in seen
            speed = rates[there][Locality.PACKED]
            if known and snapshot.idle[there] >= gang and speed > 0:
                gain = (1 - rates[here][Locality.PACKED] / speed) * rest
                if gain > cost:
                    found.append((-gain * gang, row, there))
    return found
