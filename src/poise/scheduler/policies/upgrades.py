"""While no job waits: running jobs move to faster GPUs that stand idle, if that pays.

A move pays if it gains more than it costs until the job may move again: (1 − speed here ÷ speed there) · rest > cost.
"""

from collections.abc import Mapping
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from poise.scheduler.model.cluster import site_of
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies.placement_draft import PlacementDraft

Seen = frozenset[tuple[int, int, int]]
"""(tenant, kind of job, GPU type) that have run."""

NEVER: Mapping[int, float] = MappingProxyType({})
"""No job has been moved."""


class Upgrades(NamedTuple):
    """Moves that pay now, and when the next one may."""

    claims: tuple[Claim, ...]
    later: float


class _Move(NamedTuple):
    """GPU-seconds that it gains, negative so that the best comes first; the job; the type; from when it may be done."""

    gain: float
    row: int
    there: int
    time: float


def upgrades(
    snapshot: Snapshot, *, rest: float, cost: float, seen: Seen | None = None, moved: Mapping[int, float] = NEVER
) -> Upgrades:
    """Jobs that gain most first, each on one node or as few as can hold it.

    rest    seconds for which a job stays where it has come to
    seen    types that have been run on: only their speeds are known; None: all are
    moved   when jobs were last moved, if not at their last start
    """
    draft = PlacementDraft(snapshot.placement)
    claims: dict[int, Claim] = {}
    later = inf
    for move in sorted(_gains(snapshot, seen, moved, rest=rest, cost=cost)):
        gang = snapshot.columns.gang[move.row]
        site = draft.tightest(move.there, gang)
        if site is None or move.row in claims or (len(site) > 1 and gang <= draft.topology.largest_node(move.there)):
            continue
        if move.time > snapshot.now:
            later = min(later, move.time)
            continue
        draft.take(site)
        draft.give(site_of(snapshot.placement.holdings[move.row]))
        claims[move.row] = Claim(move.row, site=site)
    return Upgrades(tuple(claims.values()), later)


def _gains(snapshot: Snapshot, seen: Seen | None, moved: Mapping[int, float], *, rest: float, cost: float) -> list[_Move]:
    """All moves that pay, or will once the job has stayed long enough; of jobs that have the gang that they ask for."""
    columns, type_of = snapshot.columns, snapshot.placement.topology.type_of
    idle = [gpu_type for gpu_type, gpus in enumerate(snapshot.idle) if gpus]
    found = []
    for row, holding in snapshot.placement.holdings.items():
        here, gang, kind = type_of[holding[0].node], columns.gang[row], (columns.tenant[row], columns.kind[row])
        rates = snapshot.estimate(row).rates
        may_move = columns.gpus[row] == gang and row not in snapshot.placement.partner and row not in snapshot.pinned
        for there in idle if may_move else ():
            known = seen is None or (*kind, there) in seen
            speed = rates[there][Locality.PACKED]
            if known and snapshot.idle[there] >= gang and speed > 0:
                gain = (1 - rates[here][Locality.PACKED] / speed) * rest
                if gain > cost:
                    since = max(columns.started[row], moved.get(row, columns.started[row]))
                    found.append(_Move(-gain * gang, row, there, since + rest))
    return found
