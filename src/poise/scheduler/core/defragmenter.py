"""Small jobs make place for a gang that wants to be close together (Philly's second guideline: migrate to defragment).

A claim that would fit by number but not by place gets the nodes on which the fewest GPUs have to be cleared; the jobs on
them go elsewhere, on GPUs of the same type and as close together. Nobody is stopped: who cannot go elsewhere stays.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from poise.scheduler.core.claim_shapes import ClaimShape
from poise.scheduler.core.decision import Clearing, DecisionDraft
from poise.scheduler.core.settings import Settings
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.cluster import NodeGpus, Site
from poise.scheduler.model.speed import Locality

Movable = Callable[[int], bool]
"""Whether a running job may be moved now."""


class DefragmentingDraft(NamedTuple):
    """A job that could go elsewhere, and how many GPUs it holds."""

    gpus: int
    row: int


def defragmenter(state: SchedulerState, settings: Settings) -> Clearing | None:
    """How place is made for gangs that want to be close together, if it is: by jobs that have been in place for a while."""
    rest = settings.defragment

    def may_move(draft: DecisionDraft, row: int) -> bool:
        until = state.columns.started[row] + rest
        if until > draft.now:
            draft.protected_until = min(draft.protected_until, until)  # then the claim is to be looked at again
        return until <= draft.now and draft.may_preempt(row)

    return (lambda draft, row, shape: clear(draft, row, shape, state, partial(may_move, draft))) if rest else None


def clear(draft: DecisionDraft, row: int, shape: ClaimShape, state: SchedulerState, movable: Movable) -> bool:
    """Give the claim GPUs close together by moving smaller jobs; says whether that could be done."""
    if shape.locality is Locality.CLUSTER or row in draft.sites:
        return False
    types = [gpu_type for gpu_type in shape.types if draft.idle[gpu_type] >= shape.gang]
    movers = _movers(draft, shape.gang, state, movable) if types else {}
    for gpu_type in types:
        for nodes in _choices(draft, shape, gpu_type, movers):
            if _try(draft, row, shape, state, _victims(draft, shape.gang, nodes, movers), nodes):
                return True
    return False


def _movers(draft: DecisionDraft, gang: int, state: SchedulerState, movable: Movable) -> dict[int, list[DefragmentingDraft]]:
    """By node: smaller jobs that are wholly there, share with nobody and are as the decision found them."""
    movers: dict[int, list[DefragmentingDraft]] = {}
    for row, holding in state.ledger.holdings.items():
        gpus = state.columns.gpus[row]
        fixed = row in draft.before or row in state.ledger.partner
        if len(holding) == 1 and gpus < gang and not fixed and movable(row):
            movers.setdefault(holding[0].node, []).append(DefragmentingDraft(gpus, row))
    return movers


def _choices(
    draft: DecisionDraft, shape: ClaimShape, gpu_type: int, movers: dict[int, list[DefragmentingDraft]]
) -> Iterator[list[int]]:
    """For each rack the nodes that would hold the gang once cleared, those with most room first."""
    topology = draft.free.topology
    most = topology.fewest_nodes(gpu_type, shape.gang) if shape.locality is Locality.PACKED else len(topology.full)
    for rack in topology.racks:
        here = [node for node, kind in enumerate(topology.type_of) if kind == gpu_type and rack >> node & 1]
        free = {node: draft.free.masks[node].bit_count() for node in here}
        cleared = {node: free[node] + sum(mover.gpus for mover in movers.get(node, ())) for node in here}
        for room in (free, cleared):  # few moves, else any that will do
            nodes = sorted(here, key=room.__getitem__, reverse=True)[:most]
            if sum(cleared[node] for node in nodes) >= shape.gang:
                yield nodes
                break


def _victims(
    draft: DecisionDraft, gang: int, nodes: list[int], movers: dict[int, list[DefragmentingDraft]]
) -> list[DefragmentingDraft]:
    """Jobs on these nodes that have to go, the fewest GPUs that will do."""
    need = gang - sum(draft.free.masks[node].bit_count() for node in nodes)
    here = sorted((mover for node in nodes for mover in movers.get(node, ())), reverse=True)
    victims = []
    for place, mover in enumerate(here):
        rest = sum(other.gpus for other in here[place + 1 :])
        if need > 0 and (mover.gpus <= need or rest < need):
            victims.append(mover)
            need -= mover.gpus
    return victims


def _try(
    draft: DecisionDraft,
    row: int,
    shape: ClaimShape,
    state: SchedulerState,
    victims: list[DefragmentingDraft],
    nodes: list[int],
) -> bool:
    """Move the victims if all of them find another place; otherwise leave everything as it was."""
    if not victims:
        return False
    shapes = {mover.row: _shape(state, mover) for mover in victims}
    for mover in victims:
        draft.evict(mover.row, state.of(mover.row))
    draft.sites[row] = _site(draft, shape.gang, nodes)
    if draft.seat(row, shape) and all(draft.seat(mover.row, shapes[mover.row]) for mover in victims):
        return True
    draft.retract(row, shapes)
    return False


def _shape(state: SchedulerState, mover: DefragmentingDraft) -> ClaimShape:
    """As close together as it is, on the type that it has."""
    return state.shape(mover.row, Locality.PACKED, (state.type_of(mover.row),), mover.gpus)


def _site(draft: DecisionDraft, gang: int, nodes: list[int]) -> Site:
    parts = []
    for node in sorted(nodes, key=lambda node: -draft.free.masks[node].bit_count()):
        gpus = min(gang, draft.free.masks[node].bit_count())
        if gpus:
            parts.append(NodeGpus(node, gpus))
            gang -= gpus
    return tuple(sorted(parts))
