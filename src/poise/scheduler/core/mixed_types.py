"""A decision where some jobs' rounds divide: all jobs in order, each with the best of what is left, then what that changes.

Who has too few GPUs to run as fast as it could is a claim like others, and a job may get a part of what it could use, so
that looking at waiting claims alone (`granting.py`) does not do. Numbers are settled first, by type; then those whose
numbers change are given GPUs, those that they had among them. A gang that wants to be close together may find no place for
its numbers: then those behind it are put elsewhere, or, if that does not help, all is settled anew without it.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf

from poise.scheduler.core.claim_shapes import ClaimShape
from poise.scheduler.core.decision import Clearing, DecisionDraft
from poise.scheduler.core.rank_index import Key, RankIndex
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.micro_batches import Mix
from poise.scheduler.model.plan import PreemptionRule, Unfitting
from poise.scheduler.solve.rank_sharing import GpuSupply, Ownership, ShareRequest, share_out

RUNNING = -1
"""In place of the shape of those who wait."""


class MixedTypeDecision:
    """One decision. `taken` are waiting jobs that were to get something: those that did not still wait."""

    def __init__(
        self,
        lanes: RankIndex,
        state: SchedulerState,
        desk: DecisionDraft,
        preemption: PreemptionRule,
        unfitting: Unfitting,
        clear: Clearing | None,
    ) -> None:
        self.taken: list[int] = []
        self._lanes = lanes
        self._state = state
        self._desk = desk
        self._preemption = preemption
        self._unfitting = unfitting
        self._clear = clear
        self._placeless: set[int] = set()

    def decide(self) -> None:
        """Settle numbers, stop those who lose something, and give."""
        wishes = self._wishes()
        while (row := self._tried(wishes)) is not None:
            self._placeless.add(row)
            self._undo()

    def _tried(self, wishes: dict[int, ShareRequest]) -> int | None:
        """Carry it out at the desk; the first gang that finds no place close together, if there is one."""
        state, desk = self._state, self._desk
        gets = self._settled(wishes)
        evicted = [
            row
            for row, wish in wishes.items()
            if wish.has != gets.get(row) and (wish.title is Ownership.LENT or row in gets)
        ]
        for row in evicted:
            desk.evict(row, state.of(row))
        for row, mix in gets.items():
            is_new = row not in wishes or wishes[row].has != mix
            if is_new and not self._gives(row, mix, wishes, gets) and state.shape_of[row].tasks is None:
                return row
        desk.settle_stops([row for row, had in desk.before.items() if had is not None], state.ledger.partner)
        return None

    def _gives(self, row: int, mix: Mix, wishes: dict[int, ShareRequest], gets: dict[int, Mix]) -> bool:
        """Give a job GPUs of these numbers; a gang if need be before running jobs that are behind it."""
        desk, shape = self._desk, self._state.shape_of[row]
        if shape.tasks is not None:
            desk.mixes[row] = mix
            return desk.seat(row, shape)
        if desk.seat(row, shape) or (self._clear is not None and self._clear(desk, row, shape)):
            return True
        order = list(gets)
        behind = order[order.index(row) + 1 :]
        lent = (each for each in behind if each in wishes and wishes[each].title is Ownership.LENT)
        return self._goes_before(row, shape, [each for each in lent if each not in desk.before])

    def _goes_before(self, row: int, shape: ClaimShape, others: list[int]) -> bool:
        """Seat a gang where these running jobs are; they stay as far as they can, or go to as many GPUs elsewhere."""
        state, desk = self._state, self._desk
        for each in others:
            desk.evict(each, state.of(each))
            if state.shape_of[each].tasks is not None:
                desk.mixes[each] = state.topology.mix(state.of(each))
        is_seated = desk.seat(row, shape)
        for each in others:
            desk.seat(each, state.shape_of[each])
        return is_seated

    def _undo(self) -> None:
        """Everybody has again what they had before the decision."""
        desk, lanes = self._desk, self._lanes
        for holding in desk.after.values():
            desk.free.give(holding or ())
        for holding in desk.before.values():
            desk.free.take(holding or ())
        for changes in (desk.before, desk.after, desk.mixes, desk.sites):
            changes.clear()
        for row in self.taken:
            lanes.wait(row, lanes.ranks[row], lanes.ties[row])
        self.taken.clear()

    def _wishes(self) -> dict[int, ShareRequest]:
        """Of those who run, but for those that cannot be changed: that share GPUs, or compute single tasks."""
        state, desk = self._state, self._desk
        fixed = {row for row, until in state.protected.items() if until == inf}
        wishes: dict[int, ShareRequest] = {}
        for row, holding in state.ledger.holdings.items():
            if row in fixed or row in state.ledger.partner:
                continue
            is_lent = self._preemption is PreemptionRule.BY_RANK and desk.may_preempt(row)
            title = Ownership.LENT if is_lent else Ownership.OWN
            wishes[row] = self._wish(row, state.shape_of[row], state.topology.mix(holding), title)
        return wishes

    @staticmethod
    def _wish(row: int, shape: ClaimShape, has: Mix | None, title: Ownership) -> ShareRequest:
        """A gang that runs stays on its type, whatever else has room: under an order nobody is moved for speed."""
        types = shape.types if has is None else (has.index(max(has)), *shape.types)
        return ShareRequest(row, shape.gang, types, shape.tasks, has=has, title=title)

    def _placeable(self, wish: ShareRequest) -> ShareRequest:
        """A gang that has found no place can be given nothing new."""
        return wish._replace(types=()) if wish.who in self._placeless else wish

    def _settled(self, wishes: dict[int, ShareRequest]) -> dict[int, Mix]:
        """What everybody gets, in order, until nothing is left or somebody blocks those behind.

        Who keeps what it has may exchange it for something better: a second look is for those who were passed over before.
        """
        left = list(self._state.free.idle)
        for wish in wishes.values():
            if wish.has is not None and wish.title is Ownership.LENT:
                left = [most + gpus for most, gpus in zip(left, wish.has, strict=True)]
        gets: dict[int, Mix] = {}
        ground = GpuSupply.of(self._state.topology)
        nobody: dict[int, ShareRequest] = {}
        for who_runs in (wishes, nobody):
            for wish, mix in share_out(self._in_order(who_runs, gets), left, ground):
                if mix is not None:
                    gets[wish.who] = mix
                elif self._unfitting is Unfitting.BLOCKS and wish.has is None:
                    return gets
            if not any(left):
                break
        return gets

    def _in_order(self, wishes: dict[int, ShareRequest], gets: dict[int, Mix]) -> Iterator[ShareRequest]:
        """Running jobs and those who wait, by rank. Of a shape whose first gets nothing, nobody behind it does."""
        lanes, shapes, now = self._lanes, self._state.waiting_shapes, self._desk.now
        queue: list[tuple[Key, int]] = [(lanes.key(row, now), RUNNING) for row in wishes]
        queue += [(key, index) for index, shape in shapes.items() if (key := lanes.head(shape))]
        heapify(queue)
        while queue:
            key, index = heappop(queue)
            row = key[4]
            if index == RUNNING:
                yield self._placeable(wishes[row])
                continue
            yield self._placeable(self._wish(row, shapes[index], None, Ownership.LENT))
            if row in gets:  # it has been looked at by now
                lanes.stop_waiting(row)
                self.taken.append(row)
                if following := lanes.head(shapes[index]):
                    heappush(queue, (following, index))
