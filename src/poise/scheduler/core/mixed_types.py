"""Decisions of an order policy where the steps of some jobs divide into micro-batches, so that any mix of GPUs will do.

A job that has fewer GPUs than it could use is a claim like others, and a job may get a part of what it could use. So looking
at waiting claims alone, as `decision.py` does, is not enough. Instead:
1. go through all jobs in order and settle the number of GPUs of each type that each gets (`solve/rank_sharing.py`);
2. stop the jobs whose numbers change, and give them GPUs of the new numbers, those that they had among them;
3. a gang that requires locality may find no place for its numbers: then jobs behind it are put elsewhere, and if that does
   not help, all numbers are settled again without that gang.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from poise.scheduler.core.claim_shapes import ClaimShape
from poise.scheduler.core.decision import DecisionDraft, Defragmenting
from poise.scheduler.core.rank_index import Key, RankIndex
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.micro_batches import Mix
from poise.scheduler.model.plan import PreemptionRule, Unfitting
from poise.scheduler.solve.rank_sharing import GpuSupply, Ownership, ShareRequest, share_out

RUNNING = -1
"""In the queue of `_in_order`: marks a running job, in place of the index of a waiting shape."""


@dataclass(slots=True)
class MixedTypeDecision:
    """One decision.

    taken        waiting jobs that were taken off their heaps to get GPUs; those that got none have to be put back
    _placeless   gangs that found no place close together
    """

    _index: RankIndex
    _state: SchedulerState
    _draft: DecisionDraft
    _preemption: PreemptionRule
    _unfitting: Unfitting
    _defragment: Defragmenting | None
    taken: list[int] = field(default_factory=list)
    _placeless: set[int] = field(default_factory=set)

    def decide(self) -> None:
        """Settle numbers and seat the jobs; again without a gang that finds no place, until none is left."""
        state, draft, index = self._state, self._draft, self._index
        fixed = {row for row, until in state.protected.items() if until == inf}.union(state.on_closed())
        requests: dict[int, ShareRequest] = {}
        for row, holding in state.ledger.holdings.items():
            if row in fixed or row in state.ledger.partner:
                continue  # it cannot change: it computes single tasks, shares GPUs, or holds closed ones
            is_lent = self._preemption is PreemptionRule.BY_RANK and draft.may_preempt(row)
            title = Ownership.LENT if is_lent else Ownership.OWN
            requests[row] = self._request(row, state.shape_of[row], state.topology.mix(holding), title)
        while (placeless := self._tried(requests)) is not None:
            self._placeless.add(placeless)
            for after in draft.after.values():
                draft.free.give(after or ())
            for before in draft.before.values():
                draft.free.take(before or ())
            for changes in (draft.before, draft.after, draft.mixes, draft.sites):
                changes.clear()
            for row in self.taken:
                index.wait(row, index.ranks[row], index.ties[row])
            self.taken.clear()

    def _tried(self, requests: dict[int, ShareRequest]) -> int | None:
        """Settle numbers and carry them out in the draft; return the first gang that finds no place close together."""
        state, draft = self._state, self._draft
        gets = self._settled(requests)
        for row, request in requests.items():
            if request.has != gets.get(row) and (request.title is Ownership.LENT or row in gets):
                draft.evict(row, state.of(row))
        for row, mix in gets.items():
            is_new = row not in requests or requests[row].has != mix
            if is_new and not self._gives(row, mix, requests, gets) and state.shape_of[row].tasks is None:
                return row
        draft.settle_stops([row for row, had in draft.before.items() if had is not None], state.ledger.partner)
        return None

    def _gives(self, row: int, mix: Mix, requests: dict[int, ShareRequest], gets: dict[int, Mix]) -> bool:
        """Give a job GPUs of these numbers; a gang may take the place of running jobs behind it."""
        state, draft, shape = self._state, self._draft, self._state.shape_of[row]
        if shape.tasks is not None:
            draft.mixes[row] = mix
            return draft.seat(row, shape)
        if draft.seat(row, shape) or (self._defragment is not None and self._defragment(draft, row, shape)):
            return True
        order = list(gets)
        behind = order[order.index(row) + 1 :]
        lent = (each for each in behind if each in requests and requests[each].title is Ownership.LENT)
        others = [each for each in lent if each not in draft.before]
        for each in others:
            draft.evict(each, state.of(each))
            if state.shape_of[each].tasks is not None:
                draft.mixes[each] = state.topology.mix(state.of(each))
        is_seated = draft.seat(row, shape)
        for each in others:  # they stay as far as they can, or move to as many GPUs elsewhere
            draft.seat(each, state.shape_of[each])
        return is_seated

    @staticmethod
    def _request(row: int, shape: ClaimShape, has: Mix | None, title: Ownership) -> ShareRequest:
        """What a job could use. A running gang stays on its type whatever has room: an order moves no job for speed."""
        types = shape.types if has is None else (has.index(max(has)), *shape.types)
        return ShareRequest(row, shape.gang, types, shape.tasks, has=has, title=title)

    def _settled(self, requests: dict[int, ShareRequest]) -> dict[int, Mix]:
        """What each job gets, in order, until nothing is left or a claim blocks those behind it.

        A job that exchanges what it has for something better leaves GPUs that jobs before it could use, so the waiting ones
        are looked at twice.
        """
        left = list(self._state.free.idle)
        for request in requests.values():
            if request.has is not None and request.title is Ownership.LENT:
                left = [most + gpus for most, gpus in zip(left, request.has, strict=True)]
        gets: dict[int, Mix] = {}
        supply = GpuSupply.of(self._state.topology)
        none_running: dict[int, ShareRequest] = {}
        for running in (requests, none_running):
            for request, mix in share_out(self._in_order(running, gets), left, supply):
                if mix is not None:
                    gets[request.who] = mix
                elif self._unfitting is Unfitting.BLOCKS and request.has is None:
                    return gets
            if not any(left):
                break
        return gets

    def _in_order(self, requests: dict[int, ShareRequest], gets: dict[int, Mix]) -> Iterator[ShareRequest]:
        """Requests of running and waiting jobs by rank. If the first job of a shape gets nothing, none behind it does."""
        index, shapes, now = self._index, self._state.waiting_shapes, self._draft.now
        queue: list[tuple[Key, int]] = [(index.key(row, now), RUNNING) for row in requests]
        queue += [(key, place) for place, shape in shapes.items() if (key := index.head(shape))]
        heapify(queue)
        while queue:
            key, place = heappop(queue)
            row = key[4]
            request = requests[row] if place == RUNNING else self._request(row, shapes[place], None, Ownership.LENT)
            # A gang that found no place gets nothing new.
            yield request._replace(types=()) if row in self._placeless else request
            if place != RUNNING and row in gets:  # the consumer has looked at it by now
                index.stop_waiting(row)
                self.taken.append(row)
                if following := index.head(shapes[place]):
                    heappush(queue, (following, place))
