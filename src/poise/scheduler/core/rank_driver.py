"""The driver of a policy that is an order: it asks for a rank only when something happened to the job.

Two shortcuts make most events cheap, and both are exact:
- **Catching up.** While no job waits, ranks decide nothing. So ranks of jobs that start are not asked for (`_unranked`), and
  ranks whose time has come (`_due`) are left as they are. Once a job waits (`_contended`), `catch_up` asks for all of them,
  each as of the time at which it would have been asked.
- **Only what is new.** If nothing but arrivals happened since the last decision (`_fresh`), only the new jobs are looked at:
  whatever could not start before cannot start now. Anything else sets `_look_at_all`.
"""

from heapq import heappop, heappush
from math import inf

from poise.scheduler.core.decision import DecisionDraft, Defragmenting, RankedClaims, grant
from poise.scheduler.core.mixed_types import MixedTypeDecision
from poise.scheduler.core.rank_index import Key, RankIndex, Tie, TiesByPreviousDecision, TiesBySubmission
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.job import Status
from poise.scheduler.model.job_table import JobView
from poise.scheduler.model.plan import Order, PreemptionRule, Rank, TieBreak, Unfitting


class RankDriver:
    """Keeps the ranks of an order up to date, job by job.

    _due        heap of (time, row): when a rank has to be asked for again; entries may be out of date
    _unsettled  jobs whose rank holds for one decision only, and has to be asked for again right after it
    _blocked    key of the claim that blocked the queue at the last decision, under policies where a claim can
    _arrived    jobs that were new at the decision under way;  _victims: jobs that lost GPUs in it, by place
    """

    def __init__(self, order: Order, state: SchedulerState, defragment: Defragmenting | None) -> None:
        self._order = order
        self._defragment = defragment
        self._state = state
        self._memory = order.memory
        self._index = RankIndex(state.shape_of)
        self._ties = TiesByPreviousDecision() if order.ties is TieBreak.BY_PREVIOUS_DECISION else TiesBySubmission()
        self._view = JobView(state.columns)
        self._due: list[tuple[float, int]] = []
        self._unsettled: list[int] = []
        self._fresh: list[int] = []
        self._look_at_all = False
        self._contended = False
        self._unranked: dict[int, float] = {}
        self._blocked: Key | None = None
        self._arrived: list[int] = []
        self._victims: dict[int, int] = {}

    @property
    def drifts(self) -> bool:
        """Whether some running job falls behind as it runs."""
        return self._index.drifts

    def arrived(self, row: int, now: float) -> None:
        """Give it its first rank."""
        self._index.add(row, self._rank(row, now, None), self._ties.arrived(row))
        self._fresh.append(row)

    def started(self, row: int, now: float) -> None:
        """Give it a rank among the running jobs, or put that off while no job waits: many end before one does."""
        self._index.stop_waiting(row)
        if self._order.preemption is PreemptionRule.NEVER:
            return
        if self._contended or self._order.ties is TieBreak.BY_PREVIOUS_DECISION:
            self._join(row, now)
        else:
            self._unranked[row] = now

    def _join(self, row: int, since: float) -> None:
        """Give a running job its rank, as of when it started."""
        previous, tie = self._index.ranks[row], self._index.ties[row]
        rank = self._rank(row, since, previous)
        self._index.run(row, rank, self._ties.started(tie, previous, rank), since)

    def preempted(self, row: int, now: float) -> None:
        """Give it a rank among the waiting jobs."""
        if self._index.runs(row):  # one that is only moved did not lose its place on the way
            self._index.stop_running(row)
        self._unranked.pop(row, None)
        previous, tie = self._index.ranks[row], self._index.ties[row]
        rank = self._rank(row, now, previous)
        self._index.wait(row, rank, self._ties.stopped(tie, previous, rank, self._victims.get(row, row)))

    def interrupted(self, row: int, now: float) -> None:
        """Give it a rank among the waiting jobs; its GPUs may be of use to any claim."""
        self.preempted(row, now)
        self._look_at_all = True

    def reported(self, row: int, now: float) -> None:
        """Ask for its rank again, if it has one."""
        if row not in self._unranked:
            self._rank_again(row, now)

    def reshaped(self, row: int, now: float) -> None:
        """Let it wait among the jobs of its new shape, and look at it like at a new job."""
        self._index.wait(row, self._index.ranks[row], self._index.ties[row])
        self._fresh.append(row)
        if self._blocked is not None and self._blocked[4] == row:
            self._blocked = None

    def ended(self, row: int, now: float) -> None:
        """Give its place up; the policy may learn from a job that finished."""
        if self._unranked.pop(row, None) is None:
            if self._index.runs(row):
                self._index.stop_running(row)
            else:
                self._index.stop_waiting(row)
        if self._state.columns.status[row] == Status.FINISHED:
            self._view.row, self._view.now = row, now
            self._memory, stale = self._order.learn(self._memory, self._view)
            if stale:
                self.catch_up(now)
                for each in self._state.active:
                    self._rank_again(each, now)
        self._look_at_all = True

    def opened(self) -> None:
        """Look at all claims in the next decision."""
        self._look_at_all = True

    def refresh(self, now: float) -> bool:
        """Ask again for the ranks whose time has come, unless no job waits."""
        if not self._contended:
            return False
        asked: set[int] = set()
        while self._due and self._next_due() <= now:
            _, row = heappop(self._due)
            if row not in asked:  # a job may be due twice at one time
                asked.add(row)
                self._rank_again(row, now)
                self._look_at_all = True
        return bool(asked)

    def catch_up(self, now: float) -> None:
        """Ask for the ranks that were put off while no job waited, each as of its own time."""
        if self._contended:
            return
        self._contended = True
        for row, since in self._unranked.items():
            self._join(row, since)
        self._unranked.clear()
        while self._due and (until := self._next_due()) < now:
            _, row = heappop(self._due)
            if not self._index.runs(row):
                self._rank_again(row, until)
                continue
            previous, tie = self._index.ranks[row], self._index.ties[row]
            rank = self._rank(row, until, previous)
            if rank.until <= until:
                rank = self._rank(row, until, rank)
            self._index.stop_running(row)
            self._index.run(row, rank, self._ties.changed(row, tie, previous, rank), until)
        self._unsettled.clear()
        self.refresh(now)

    def is_due(self, now: float) -> bool:
        """An order has no times of its own besides those of its ranks."""
        return False

    def is_idle(self) -> bool:
        """Say whether no job waits, and no running one could use more GPUs."""
        state = self._state
        return not state.waiting_shapes and not (state.divisible and any(state.free.idle))

    def decide(self, now: float, draft: DecisionDraft, allowed: PreemptionRule) -> None:
        """Grant claims by rank; look only at new ones if nothing else can have changed."""
        preemption = self._order.preemption if allowed is PreemptionRule.BY_RANK else allowed
        if self._state.divisible:
            self._divide(now, draft, preemption)
            return
        if self._serves_newcomer(draft):
            return
        candidates = self._candidates(now, preemption)
        self._arrived, self._fresh = self._fresh, []
        self._look_at_all = allowed is not PreemptionRule.BY_RANK
        if grant(candidates, draft, self._state, self._defragment):
            self._blocked = candidates.current
        lost = candidates.lost
        self._victims = {row: place for place, row in enumerate(sorted(lost, key=lost.__getitem__))} if lost else {}

    def _divide(self, now: float, draft: DecisionDraft, preemption: PreemptionRule) -> None:
        """Decide where steps of some jobs divide: all jobs are looked at, because a running one may want more GPUs."""
        if self._order.preemption is PreemptionRule.BY_RANK:
            self.catch_up(now)
        division = MixedTypeDecision(self._index, self._state, draft, preemption, self._order.unfitting, self._defragment)
        division.decide()
        for row in division.taken:
            if draft.after.get(row) is None:
                self._index.wait(row, self._index.ranks[row], self._index.ties[row])
        self._arrived, self._fresh = self._fresh, []
        self._look_at_all = True
        self._blocked = None

    def _serves_newcomer(self, draft: DecisionDraft) -> bool:
        """Serve the most common case at once: one job arrived, no other waits, and there is room for it."""
        if self._look_at_all or len(self._fresh) != 1:
            return False
        row = self._fresh[0]
        shape = self._state.shape_of[row]
        if shape.waiting != 1 or len(self._state.waiting_shapes) != 1 or not draft.seat(row, shape):
            return False
        self._index.clear_waiting(row)
        self._arrived, self._fresh = self._fresh, []
        return True

    def _candidates(self, now: float, preemption: PreemptionRule) -> RankedClaims:
        """All claims, or only new ones where nothing but arrivals has happened."""
        shapes, unfitting = self._state.waiting_shapes, self._order.unfitting
        if self._look_at_all or self._index.drifts:
            return RankedClaims(self._index, shapes.values(), unfitting, preemption, now, self.catch_up)
        if unfitting is Unfitting.BLOCKS:
            blocked = self._blocked
            if blocked is not None and self._index.waits(blocked[4]):  # it blocks the queue unless a new claim is before it
                heads = (self._index.head(self._state.shape_of[row]) for row in self._fresh)
                if all(head is None or head >= blocked for head in heads):
                    return RankedClaims(self._index, (), unfitting, preemption, now, self.catch_up)
            return RankedClaims(self._index, shapes.values(), unfitting, preemption, now, self.catch_up)
        fresh = {row: self._state.shape_of[row] for row in self._fresh}
        new = [shape for row, shape in fresh.items() if (head := self._index.head(shape)) and head[4] == row]
        others = (shape for shape in shapes.values() if shape not in new)
        return RankedClaims(self._index, new, unfitting, preemption, now, self.catch_up).but_later(others)

    def settle(self, now: float) -> bool:
        """Put victims that got their GPUs back into their lanes; ask again for ranks that held for one decision."""
        for row in self._victims:
            if self._state.running(row) and not self._index.runs(row):
                self._index.resume(row)
        self._victims = {}
        if self._order.ties is TieBreak.BY_PREVIOUS_DECISION:  # who arrived for this decision has a place in the list now
            for row in self._arrived:
                if self._index.waits(row):
                    self._index.wait(row, self._index.ranks[row], self._ties.settled(self._index.ties[row]))
            self._arrived = []
            self._ties.decided()
        if self._state.waiting_shapes:
            self.catch_up(now)
        else:
            self._contended = False
        if self._unsettled:
            for row in self._unsettled:
                if row in self._state.active and self._index.ranks[row].until <= now:
                    self._rank_again(row, now)
            self._unsettled.clear()
        return False

    def next_change(self) -> float:
        """The first time at which a rank has to be asked for again, if any job waits."""
        return self._next_due() if self._contended else inf

    def line(self, most: int) -> list[int]:
        """Rows of the first waiting jobs, by rank."""
        return self._index.line(most)

    def place(self, row: int) -> tuple[float | Tie, ...]:
        """The key of a waiting job, which is the same at any time."""
        return self._index.key(row, 0.0)

    def _next_due(self) -> float:
        due, active, ranks = self._due, self._state.active, self._index.ranks
        while due:
            until, row = due[0]
            if row in active and ranks[row].until == until:
                return until
            heappop(due)
        return inf

    def _rank(self, row: int, now: float, previous: Rank | None) -> Rank:
        view = self._view
        view.row, view.now = row, now
        rank = self._order.rank(view, previous, self._memory)
        if rank.value != rank.value:  # NaN is neither before nor behind anything
            raise InvariantError(f"the rank of job {view.id!r} is not a number")
        if rank.until <= now:
            self._unsettled.append(row)
        elif rank.until < inf:
            heappush(self._due, (rank.until, row))
        return rank

    def _rank_again(self, row: int, now: float) -> None:
        previous, tie = self._index.ranks[row], self._index.ties[row]
        rank = self._rank(row, now, previous)
        tie = self._ties.changed(row, tie, previous, rank)
        if rank.queue < previous.queue:
            self._fresh.append(row)
        if self._index.runs(row):
            self._index.stop_running(row)
            self._index.run(row, rank, tie, now)
        elif self._index.waits(row):
            self._index.wait(row, rank, tie)
