"""The order of an order policy, kept up to date instead of sorted anew (DESIGN §5).

Waiting jobs stand still in rank, so they are heaps, one a shape: of one shape only the head can be next. Running jobs change
rank along straight lines, so those of equal (queue, section, slope) keep their order for ever: each such set is a sorted
lane, and the order of all of them at a moment is a merge of a few lanes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge
from math import inf
from typing import Protocol

from poise.scheduler.core.claim_shapes import ClaimShape
from poise.scheduler.model.plan import Rank

# How equal ranks are ordered: by submission, or by the place they had at the previous decision.
#
# The second is what one gets by keeping one list and sorting it stably at every event, as the Tiresias authors' simulator
# does. No list is kept here, because the outcome follows from how ranks got to be equal:
# - a job whose value falls came from above, so it stands behind one whose value stands still, and that behind one whose
# value
# rises: at equal value the larger slope comes first
# - a job that has just arrived is at the end of the list, behind everybody
# - running jobs of equal slope have been equal since the later one started: where values fall it was waiting below the other
# and stays ahead of it (unless it had just arrived), where they do not it came from behind
# - likewise for a job that stops: behind the waiting ones if its value was falling, ahead of them if it was rising
# - a job that changes queue goes to the end, by submission
# A tie is a tuple that compares accordingly; by submission it is empty, and rows decide.

Tie = tuple[float, ...]


class TieBreaker(Protocol):
    """Gives every job a tie when something happens to it. `previous` is the rank it had until now."""

    def arrived(self, row: int) -> Tie:
        """It has just arrived."""

    def settled(self, tie: Tie) -> Tie:
        """It has come earlier than just now."""

    def started(self, tie: Tie, previous: Rank, rank: Rank) -> Tie:
        """It runs; those that start at one decision are told in order."""

    def stopped(self, tie: Tie, previous: Rank, rank: Rank, place: int) -> Tie:
        """It waits; `place` is its place among those that stopped at this decision."""

    def changed(self, row: int, tie: Tie, previous: Rank, rank: Rank) -> Tie:
        """It has another rank, and runs or waits as before."""

    def decided(self) -> None:
        """A decision is over."""


class TiesBySubmission:
    """Rows decide: there is nothing to say about ties."""

    def arrived(self, _row: int) -> Tie:
        """Empty."""
        return ()

    def settled(self, _tie: Tie) -> Tie:
        """Empty."""
        return ()

    def started(self, _tie: Tie, _previous: Rank, _rank: Rank) -> Tie:
        """Empty."""
        return ()

    def stopped(self, _tie: Tie, _previous: Rank, _rank: Rank, _place: int) -> Tie:
        """Empty."""
        return ()

    def changed(self, _row: int, _tie: Tie, _previous: Rank, _rank: Rank) -> Tie:
        """Empty."""
        return ()

    def decided(self) -> None:
        """Nothing to count."""


class TiesByPreviousDecision:
    """Ties are (−slope, decision with a sign, what happened at it, place); who has just come has inf for its slope."""

    def __init__(self) -> None:
        self._decision = 1
        self._starts = 0

    def arrived(self, row: int) -> Tie:
        """At the end of the list."""
        return (inf, self._decision, 1, row)

    def settled(self, tie: Tie) -> Tie:
        """A waiting job's value stands still."""
        return (0.0, *tie[1:])

    def started(self, tie: Tie, previous: Rank, rank: Rank) -> Tie:
        """Ahead of its equals where values fall, unless it had just arrived."""
        if _stands_still(previous, rank):
            return self.settled(tie)
        self._starts += 1
        ahead = rank.slope < 0 and tie[0] < inf
        return (-rank.slope, -self._decision if ahead else self._decision, 0, self._starts)

    def stopped(self, tie: Tie, previous: Rank, rank: Rank, place: int) -> Tie:
        """Behind its equals, unless its value was rising."""
        if _stands_still(previous, rank):
            return self.settled(tie)
        return (0.0, -self._decision if previous.slope > 0 else self._decision, 0, place)

    def changed(self, row: int, tie: Tie, previous: Rank, rank: Rank) -> Tie:
        """Behind everybody, those that arrived now included, if it changed queue; otherwise where it was."""
        if rank.queue != previous.queue:
            return (inf if rank.queue < previous.queue else -rank.slope, self._decision, 2, row)
        return (-rank.slope, *tie[1:])

    def decided(self) -> None:
        """What happens from now on is later."""
        self._decision += 1


def _stands_still(previous: Rank, rank: Rank) -> bool:
    """Neither has the rank changed, nor does it as time goes by: among its equals the job stays where it was."""
    return previous[:3] == rank[:3] and previous.slope == rank.slope == 0


Key = tuple[int, int, float, Tie, int]
"""(queue, section, value now, tie, row): the total order of jobs at one moment."""

Lane = list[tuple[float, Tie, int]]
"""(value at time 0, tie, row), ascending."""


class RankIndex:
    """All active jobs in order of rank. `shape_of` is the core's own list of shapes by row."""

    def __init__(self, shape_of: list[ClaimShape]) -> None:
        self.shape_of = shape_of
        self.ranks: list[Rank] = []
        self.ties: list[Tie] = []
        self._heaps: dict[int, list[tuple[int, int, float, Tie, int, int]]] = {}
        self._tickets: list[int] = []
        self._last_ticket = 0
        self._running: dict[tuple[int, int], dict[float, Lane]] = {}
        self._spots: list[float] = []
        self._runs: list[bool] = []
        self._rising = 0

    def add(self, row: int, rank: Rank, tie: Tie) -> None:
        """A new row arrives, and waits. Rows between it and the last one belong to jobs that never compete."""
        while len(self.ranks) <= row:
            self.ranks.append(rank)
            self.ties.append(tie)
            self._tickets.append(0)
            self._spots.append(0.0)
            self._runs.append(False)
        self.wait(row, rank, tie)

    def wait(self, row: int, rank: Rank, tie: Tie) -> None:
        """The job waits with this rank; an earlier entry of it is void from now on."""
        self.ranks[row] = rank
        self.ties[row] = tie
        self._last_ticket += 1
        self._tickets[row] = self._last_ticket
        heap = self._heaps.setdefault(self.shape_of[row].index, [])
        heappush(heap, (rank.queue, rank.section, rank.value, tie, row, self._last_ticket))

    def stop_waiting(self, row: int) -> None:
        """The job no longer waits."""
        self._tickets[row] = 0

    def clear_waiting(self, row: int) -> None:
        """The job no longer waits, and it was the only one of its shape."""
        self._tickets[row] = 0
        self._heaps[self.shape_of[row].index].clear()

    def waits(self, row: int) -> bool:
        """The job is among the waiting."""
        return self._tickets[row] > 0

    def head(self, shape: ClaimShape) -> Key | None:
        """The first waiting job of a shape."""
        heap = self._heaps.get(shape.index)
        while heap:
            queue, section, value, tie, row, ticket = heap[0]
            if self._tickets[row] == ticket:
                return queue, section, value, tie, row
            heappop(heap)
        return None

    def run(self, row: int, rank: Rank, tie: Tie, now: float) -> None:
        """The job runs, with this rank as of now."""
        self.ranks[row] = rank
        self.ties[row] = tie
        self._tickets[row] = 0
        self._spots[row] = rank.value - rank.slope * now
        self.resume(row)

    def resume(self, row: int) -> None:
        """Put a running job back into its lane."""
        rank, spot = self.ranks[row], self._spots[row]
        self._runs[row] = True
        self._rising += rank.slope > 0
        lanes = self._running.setdefault((rank.queue, rank.section), {})
        insort(lanes.setdefault(rank.slope, []), (spot, self.ties[row], row))

    def runs(self, row: int) -> bool:
        """The job is in a lane of running jobs."""
        return self._runs[row]

    def stop_running(self, row: int) -> None:
        """Take a running job out of its lane."""
        rank, spot = self.ranks[row], self._spots[row]
        self._runs[row] = False
        self._rising -= rank.slope > 0
        lanes = self._running[rank.queue, rank.section]
        lane = lanes[rank.slope]
        del lane[bisect_left(lane, (spot, self.ties[row], row))]
        if not lane:
            del lanes[rank.slope]
            if not lanes:
                del self._running[rank.queue, rank.section]

    def running_key(self, row: int, now: float) -> Key:
        """Where a running job stands now."""
        rank = self.ranks[row]
        return rank.queue, rank.section, self._spots[row] + rank.slope * now, self.ties[row], row

    def key(self, row: int, now: float) -> Key:
        """Where a job stands now, be it that running jobs have no lanes because nobody can be made to give way."""
        if self._runs[row]:
            return self.running_key(row, now)
        rank = self.ranks[row]
        return rank.queue, rank.section, rank.value, self.ties[row], row

    def line(self, most: int) -> list[int]:
        """Rows of the first waiting jobs, in order. Of each heap only what is smaller than the last of them is looked at."""
        found: list[int] = []
        heads = [(heap[0], shape, 0) for shape, heap in self._heaps.items() if heap]
        heapify(heads)
        while heads and len(found) < most:
            entry, shape, place = heappop(heads)
            if self._tickets[entry[4]] == entry[5]:
                found.append(entry[4])
            heap = self._heaps[shape]
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(heap):
                    heappush(heads, (heap[below], shape, below))
        return found

    @property
    def drifts(self) -> bool:
        """Time alone may bring a running job behind a waiting one."""
        return self._rising > 0

    def running_behind(self, key: Key, now: float) -> Iterator[int]:
        """Running jobs that stand behind this key, the last one first."""
        level, place = key[:2], key[2:]
        for each in sorted(self._running, reverse=True):
            if each < level:
                return
            for behind in _backwards(self._running[each], now):
                if each == level and behind <= place:
                    return
                yield behind[2]


def _backwards(lanes: dict[float, Lane], now: float) -> Iterator[tuple[float, Tie, int]]:
    """(value now, tie, row) of all jobs in the lanes, the last one first."""
    parts = [_lane_backwards(lane, slope, now) for slope, lane in lanes.items()]
    return merge(*parts, reverse=True) if len(parts) > 1 else parts[0]


def _lane_backwards(lane: Lane, slope: float, now: float) -> Iterator[tuple[float, Tie, int]]:
    for spot, tie, row in reversed(lane):
        yield spot + slope * now, tie, row
