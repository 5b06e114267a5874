"""Defragmentation: small jobs move to make room for a gang that requires locality, or whose GPUs come in units.

This is Philly's second guideline. A unit, for instance a pod of several GPUs, cannot be divided over nodes.

A claim that would fit by number but not by place gets the nodes on which the fewest GPUs have to be cleared. The jobs on
them move to GPUs of the same type, as close together as before. No job is stopped for it: one that finds no other place
stays, and then the claim waits.
"""

from collections.abc import Iterator
from typing import NamedTuple

from poise.scheduler.core.claim_shapes import ClaimShape
from poise.scheduler.core.decision import DecisionDraft
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.cluster import NodeGpus
from poise.scheduler.model.speed import Locality
from poise.scheduler.placement.strategies import ALL_NODES


class Mover(NamedTuple):
    """A job that could move, and the number of GPUs that it holds."""

    gpus: int
    row: int


class Defragmenter:
    """Makes room for claims by moving jobs that have been in place for `rest` seconds."""

    def __init__(self, state: SchedulerState, rest: float) -> None:
        self._state = state
        self._rest = rest

    def __call__(self, draft: DecisionDraft, row: int, shape: ClaimShape) -> bool:
        """Give the claim GPUs close together by moving smaller jobs; say whether that could be done."""
        if (shape.locality is Locality.CLUSTER and shape.unit == 1) or row in draft.sites:
            return False
        types = [gpu_type for gpu_type in shape.types if draft.idle[gpu_type] >= shape.gang]
        # By node: smaller jobs on this node alone that share with no other job and are as the decision found them.
        state = self._state
        movers: dict[int, list[Mover]] = {}
        for mover, holding in state.ledger.holdings.items() if types else ():
            gpus = state.columns.gpus[mover]
            if len(holding) > 1 or gpus >= shape.gang or mover in draft.before or mover in state.ledger.partner:
                continue
            rested = state.columns.started[mover] + self._rest
            if rested > draft.now:  # look at the claim again then
                draft.protected_until = min(draft.protected_until, rested)
            elif draft.may_preempt(mover):
                movers.setdefault(holding[0].node, []).append(Mover(gpus, mover))
        for gpu_type in types:
            for nodes in _choices(draft, shape, gpu_type, movers):
                victims = _victims(draft, shape, nodes, movers)
                if victims and self._move(draft, row, shape, victims, nodes):
                    return True
        return False

    def _move(self, draft: DecisionDraft, row: int, shape: ClaimShape, victims: list[Mover], nodes: list[int]) -> bool:
        """Move the victims and seat the claim, if all of them find another place; otherwise leave the draft as it was."""
        state = self._state
        shapes = {each: state.shape(each, Locality.PACKED, (state.type_of(each),), gpus) for gpus, each in victims}
        for each in shapes:
            draft.evict(each, state.of(each))
        parts, left = [], shape.gang
        for node in sorted(nodes, key=lambda node: -draft.free.masks[node].bit_count()):  # from the emptiest node on
            gpus = min(left, _whole(draft.free.masks[node].bit_count(), shape.unit))
            if gpus:
                parts.append(NodeGpus(node, gpus))
                left -= gpus
        draft.sites[row] = tuple(sorted(parts))
        if draft.seat(row, shape) and all(draft.seat(each, its) for each, its in shapes.items()):
            return True
        draft.retract(row, shapes)
        return False


def _choices(draft: DecisionDraft, shape: ClaimShape, gpu_type: int, movers: dict[int, list[Mover]]) -> Iterator[list[int]]:
    """For each rack, the nodes that would hold the gang once cleared, those with most room first.

    A claim that requires no locality, but whose GPUs come in units, may have nodes of several racks.
    """
    topology = draft.free.topology
    most = topology.fewest_nodes(gpu_type, shape.gang) if shape.locality is Locality.PACKED else len(topology.full)
    for rack in topology.racks if shape.locality is not Locality.CLUSTER else (ALL_NODES,):
        here = [node for node, kind in enumerate(topology.type_of) if kind == gpu_type and rack >> node & 1]
        free = {node: draft.free.masks[node].bit_count() for node in here}
        cleared = {node: free[node] + sum(mover.gpus for mover in movers.get(node, ())) for node in here}
        for room in (free, cleared):  # nodes that need few moves, else any that will do
            nodes = sorted(here, key=room.__getitem__, reverse=True)[:most]
            if sum(_whole(cleared[node], shape.unit) for node in nodes) >= shape.gang:
                yield nodes
                break


def _victims(draft: DecisionDraft, shape: ClaimShape, nodes: list[int], movers: dict[int, list[Mover]]) -> list[Mover]:
    """The jobs on these nodes that have to move: greedily, large ones first, so that few GPUs more than needed move."""
    if shape.unit > 1:
        return _victims_in_units(draft, shape, nodes, movers)
    need = shape.gang - sum(draft.free.masks[node].bit_count() for node in nodes)
    here = sorted((mover for node in nodes for mover in movers.get(node, ())), reverse=True)
    victims = []
    for place, mover in enumerate(here):
        rest = sum(other.gpus for other in here[place + 1 :])
        if need > 0 and (mover.gpus <= need or rest < need):
            victims.append(mover)
            need -= mover.gpus
    return victims


def _victims_in_units(
    draft: DecisionDraft, shape: ClaimShape, nodes: list[int], movers: dict[int, list[Mover]]
) -> list[Mover]:
    """As `_victims`, where only whole units of a node count: all that could move, less those that may as well stay."""
    room = {node: draft.free.masks[node].bit_count() for node in nodes}
    here = [(mover, node) for node in nodes for mover in movers.get(node, ())]
    for mover, node in here:
        room[node] += mover.gpus
    victims = []
    for mover, node in sorted(here, reverse=True):
        room[node] -= mover.gpus
        if sum(_whole(gpus, shape.unit) for gpus in room.values()) < shape.gang:
            room[node] += mover.gpus
            victims.append(mover)
    return victims


def _whole(gpus: int, unit: int) -> int:
    """The GPUs of a node as far as they are whole units."""
    return gpus - gpus % unit
