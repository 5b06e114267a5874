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
        index: RankIndex,
        state: SchedulerState,
        draft: DecisionDraft,
        preemption: PreemptionRule,
        unfitting: Unfitting,
        clear: Clearing | None,
    ) -> None:
        self.taken: list[int] = []
        self._index = index
        self._state = state
        self._draft = draft
        self._preemption = preemption
        self._unfitting = unfitting
        self._clear = clear
        self._placeless: set[int] = set()

    def decide(self) -> None:
        """Settle numbers, stop those who lose something, and give."""
        requests = self._requests()
        while (row := self._tried(requests)) is not None:
            self._placeless.add(row)
            self._undo()

    def _tried(self, requests: dict[int, ShareRequest]) -> int | None:
        """Carry it out at the draft; the first gang that finds no place close together, if there is one."""
        state, draft = self._state, self._draft
        gets = self._settled(requests)
        evicted = [
            row
            for row, request in requests.items()
            if request.has != gets.get(row) and (request.title is Ownership.LENT or row in gets)
        ]
        for row in evicted:
            draft.evict(row, state.of(row))
        for row, mix in gets.items():
            is_new = row not in requests or requests[row].has != mix
            if is_new and not self._gives(row, mix, requests, gets) and state.shape_of[row].tasks is None:
                return row
        draft.settle_stops([row for row, had in draft.before.items() if had is not None], state.ledger.partner)
        return None

    def _gives(self, row: int, mix: Mix, requests: dict[int, ShareRequest], gets: dict[int, Mix]) -> bool:
        """Give a job GPUs of these numbers; a gang if need be before running jobs that are behind it."""
        draft, shape = self._draft, self._state.shape_of[row]
        if shape.tasks is not None:
            draft.mixes[row] = mix
            return draft.seat(row, shape)
        if draft.seat(row, shape) or (self._clear is not None and self._clear(draft, row, shape)):
            return True
        order = list(gets)
        behind = order[order.index(row) + 1 :]
        lent = (each for each in behind if each in requests and requests[each].title is Ownership.LENT)
        return self._goes_before(row, shape, [each for each in lent if each not in draft.before])

    def _goes_before(self, row: int, shape: ClaimShape, others: list[int]) -> bool:
        """Seat a gang where these running jobs are; they stay as far as they can, or go to as many GPUs elsewhere."""
        state, draft = self._state, self._draft
        for each in others:
            draft.evict(each, state.of(each))
            if state.shape_of[each].tasks is not None:
                draft.mixes[each] = state.topology.mix(state.of(each))
        is_seated = draft.seat(row, shape)
        for each in others:
            draft.seat(each, state.shape_of[each])
        return is_seated

    def _undo(self) -> None:
        """Everybody has again what they had before the decision."""
        draft, index = self._draft, self._index
        for holding in draft.after.values():
            draft.free.give(holding or ())
        for holding in draft.before.values():
            draft.free.take(holding or ())
        for changes in (draft.before, draft.after, draft.mixes, draft.sites):
            changes.clear()
        for row in self.taken:
            index.wait(row, index.ranks[row], index.ties[row])
        self.taken.clear()

    def _requests(self) -> dict[int, ShareRequest]:
        """Of those who run, but for those that cannot be changed: that share GPUs, or compute single tasks."""
        state, draft = self._state, self._draft
        fixed = {row for row, until in state.protected.items() if until == inf}
        requests: dict[int, ShareRequest] = {}
        for row, holding in state.ledger.holdings.items():
            if row in fixed or row in state.ledger.partner:
                continue
            is_lent = self._preemption is PreemptionRule.BY_RANK and draft.may_preempt(row)
            title = Ownership.LENT if is_lent else Ownership.OWN
            requests[row] = self._request(row, state.shape_of[row], state.topology.mix(holding), title)
        return requests

    @staticmethod
    def _request(row: int, shape: ClaimShape, has: Mix | None, title: Ownership) -> ShareRequest:
        """A gang that runs stays on its type, whatever else has room: under an order nobody is moved for speed."""
        types = shape.types if has is None else (has.index(max(has)), *shape.types)
        return ShareRequest(row, shape.gang, types, shape.tasks, has=has, title=title)

    def _placeable(self, request: ShareRequest) -> ShareRequest:
        """A gang that has found no place can be given nothing new."""
        return request._replace(types=()) if request.who in self._placeless else request

    def _settled(self, requests: dict[int, ShareRequest]) -> dict[int, Mix]:
        """What everybody gets, in order, until nothing is left or somebody blocks those behind.

        Who keeps what it has may exchange it for something better: a second look is for those who were passed over before.
        """
        left = list(self._state.free.idle)
        for request in requests.values():
            if request.has is not None and request.title is Ownership.LENT:
                left = [most + gpus for most, gpus in zip(left, request.has, strict=True)]
        gets: dict[int, Mix] = {}
        ground = GpuSupply.of(self._state.topology)
        nobody: dict[int, ShareRequest] = {}
        for who_runs in (requests, nobody):
            for request, mix in share_out(self._in_order(who_runs, gets), left, ground):
                if mix is not None:
                    gets[request.who] = mix
                elif self._unfitting is Unfitting.BLOCKS and request.has is None:
                    return gets
            if not any(left):
                break
        return gets

    def _in_order(self, requests: dict[int, ShareRequest], gets: dict[int, Mix]) -> Iterator[ShareRequest]:
        """Running jobs and those who wait, by rank. Of a shape whose first gets nothing, nobody behind it does."""
        index, shapes, now = self._index, self._state.waiting_shapes, self._draft.now
        queue: list[tuple[Key, int]] = [(index.key(row, now), RUNNING) for row in requests]
        queue += [(key, place) for place, shape in shapes.items() if (key := index.head(shape))]
        heapify(queue)
        while queue:
            key, place = heappop(queue)
            row = key[4]
            if place == RUNNING:
                yield self._placeable(requests[row])
                continue
            yield self._placeable(self._request(row, shapes[place], None, Ownership.LENT))
            if row in gets:  # the consumer has looked at it by now
                index.stop_waiting(row)
                self.taken.append(row)
                if following := index.head(shapes[place]):
                    heappush(queue, (following, place))
