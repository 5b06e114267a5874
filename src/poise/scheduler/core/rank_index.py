"""The order of jobs by rank, kept up to date instead of sorted at every decision.

A rank is a straight line over time. That makes two cheap structures enough:
- **Waiting jobs** stand still in rank. They are heaps, one per claim shape: of one shape only the head can be next, because
  whatever the head needs, those behind it need too.
- **Running jobs** change rank along their lines, so those of equal (queue, section, slope) never overtake one another. Each
  such set is a sorted lane, and the order of all running jobs at any time is a merge of a few lanes.

Heap entries are not removed when a job stops waiting; each carries a ticket, and one that is not the job's current ticket is
skipped when it comes to the top.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge
from math import inf

from poise.scheduler.core.claim_shapes import ClaimShape
from poise.scheduler.model.plan import Rank

Tie = tuple[float, ...]
"""Orders jobs of equal rank; compared before the row."""

Key = tuple[int, int, float, Tie, int]
"""(queue, section, value now, tie, row): the total order of jobs at one time."""

Lane = list[tuple[float, Tie, int]]
"""(value at time 0, tie, row), ascending."""


class RankIndex:
    """All active jobs in order of rank.

    shape_of   the core's own list of claim shapes by row; a waiting job is in the heap of the shape that it had when it was
               put there, so a job whose shape changes has to be put there again
    ranks      the current rank of each job, by row;  ties: likewise
    """

    def __init__(self, shape_of: list[ClaimShape]) -> None:
        self.shape_of = shape_of
        self.ranks: list[Rank] = []
        self.ties: list[Tie] = []
        self._heaps: dict[int, list[tuple[int, int, float, Tie, int, int]]] = {}
        self._tickets: list[int] = []
        """Ticket of the valid heap entry, by row; 0: the job does not wait."""
        self._last_ticket = 0
        self._running: dict[tuple[int, int], dict[float, Lane]] = {}
        self._spots: list[float] = []
        """Value of a running job's line at time 0, by row."""
        self._runs: list[bool] = []
        self._rising = 0
        """Number of running jobs whose value rises, that is, which fall behind as they run."""

    def add(self, row: int, rank: Rank, tie: Tie) -> None:
        """Add a job that waits. Rows between it and the last one belong to jobs that never competed."""
        while len(self.ranks) <= row:
            self.ranks.append(rank)
            self.ties.append(tie)
            self._tickets.append(0)
            self._spots.append(0.0)
            self._runs.append(False)
        self.wait(row, rank, tie)

    def wait(self, row: int, rank: Rank, tie: Tie) -> None:
        """Let a job wait with this rank; its earlier entry is void from now on."""
        self.ranks[row] = rank
        self.ties[row] = tie
        self._last_ticket += 1
        self._tickets[row] = self._last_ticket
        heap = self._heaps.setdefault(self.shape_of[row].index, [])
        heappush(heap, (rank.queue, rank.section, rank.value, tie, row, self._last_ticket))

    def stop_waiting(self, row: int) -> None:
        """Take a job out of the waiting ones."""
        self._tickets[row] = 0

    def clear_waiting(self, row: int) -> None:
        """Take out a job that was the only one waiting with its shape, and void entries with it."""
        self._tickets[row] = 0
        self._heaps[self.shape_of[row].index].clear()

    def waits(self, row: int) -> bool:
        """Say whether the job is among the waiting ones."""
        return self._tickets[row] > 0

    def head(self, shape: ClaimShape) -> Key | None:
        """The key of the first waiting job of a shape."""
        heap = self._heaps.get(shape.index)
        while heap:
            queue, section, value, tie, row, ticket = heap[0]
            if self._tickets[row] == ticket:
                return queue, section, value, tie, row
            heappop(heap)
        return None

    def run(self, row: int, rank: Rank, tie: Tie, now: float) -> None:
        """Let a job run, with this rank as of now."""
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
        """Say whether the job is in a lane of running jobs."""
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
        """The key of a running job now."""
        rank = self.ranks[row]
        return rank.queue, rank.section, self._spots[row] + rank.slope * now, self.ties[row], row

    def key(self, row: int, now: float) -> Key:
        """The key of a job now. Under policies that never preempt, running jobs are in no lane and keep their last rank."""
        if self._runs[row]:
            return self.running_key(row, now)
        rank = self.ranks[row]
        return rank.queue, rank.section, rank.value, self.ties[row], row

    def line(self, most: int) -> list[int]:
        """Rows of the first waiting jobs, in order. Walks the heaps from their tops, so it costs O(most log heaps)."""
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
        """Whether time alone may bring a running job behind a waiting one."""
        return self._rising > 0

    def running_behind(self, key: Key, now: float) -> Iterator[int]:
        """Rows of the running jobs behind this key, the last one first."""
        level, place = key[:2], key[2:]
        for each in sorted(self._running, reverse=True):
            if each < level:
                return
            lanes = [_backwards(lane, slope, now) for slope, lane in self._running[each].items()]
            for behind in merge(*lanes, reverse=True) if len(lanes) > 1 else lanes[0]:
                if each == level and behind <= place:
                    return
                yield behind[2]


def _backwards(lane: Lane, slope: float, now: float) -> Iterator[tuple[float, Tie, int]]:
    """(value now, tie, row) of the jobs of a lane, the last one first."""
    for spot, tie, row in reversed(lane):
        yield spot + slope * now, tie, row


class TiesBySubmission:
    """Break ties by submission: ties are empty, so that rows decide."""

    def arrived(self, _row: int) -> Tie:
        """The tie of a job that has just arrived."""
        return ()

    def settled(self, _tie: Tie) -> Tie:
        """The tie of a waiting job that arrived before this decision."""
        return ()

    def started(self, _tie: Tie, _previous: Rank, _rank: Rank) -> Tie:
        """The tie of a job that starts; those that start at one decision are told in order."""
        return ()

    def stopped(self, _tie: Tie, _previous: Rank, _rank: Rank, _place: int) -> Tie:
        """The tie of a job that stops, at `place` among those that stop at this decision."""
        return ()

    def changed(self, _row: int, _tie: Tie, _previous: Rank, _rank: Rank) -> Tie:
        """The tie of a job that has another rank, and runs or waits as before."""
        return ()

    def decided(self) -> None:
        """Note that a decision is over."""


class TiesByPreviousDecision(TiesBySubmission):
    """Break ties by the place at the previous decision, as a list that is sorted stably at every event would.

    The Tiresias authors' simulator keeps such a list. None is kept here, because the outcome follows from how ranks became
    equal:
    - A job whose value falls came from above. So it stands behind one whose value stands still, and that one behind a job
      whose value rises: at equal value the larger slope comes first.
    - A job that has just arrived is at the end of the list.
    - Running jobs of equal slope have been equal since the later one started. Where values fall it was waiting below the
      other and stays ahead of it, unless it had just arrived; where they do not, it came from behind.
    - Likewise a job that stops: behind the waiting ones if its value was falling, ahead of them if it was rising.
    - A job that changes queue goes to the end, by submission.

    A tie is (−slope, decision with a sign, what happened at it, place); a job that has just arrived has inf for its slope.
    """

    def __init__(self) -> None:
        self._decision = 1
        self._starts = 0

    def arrived(self, row: int) -> Tie:
        """Put it at the end of the list."""
        return (inf, self._decision, 1, row)

    def settled(self, tie: Tie) -> Tie:
        """Keep its place; the value of a waiting job stands still."""
        return (0.0, *tie[1:])

    def started(self, tie: Tie, previous: Rank, rank: Rank) -> Tie:
        """Put it ahead of its equals where values fall, unless it had just arrived."""
        if _stands_still(previous, rank):
            return self.settled(tie)
        self._starts += 1
        ahead = rank.slope < 0 and tie[0] < inf
        return (-rank.slope, -self._decision if ahead else self._decision, 0, self._starts)

    def stopped(self, tie: Tie, previous: Rank, rank: Rank, place: int) -> Tie:
        """Put it behind its equals, unless its value was rising."""
        if _stands_still(previous, rank):
            return self.settled(tie)
        return (0.0, -self._decision if previous.slope > 0 else self._decision, 0, place)

    def changed(self, row: int, tie: Tie, previous: Rank, rank: Rank) -> Tie:
        """Put it behind all others, also those that arrived now, if it changed queue; keep its place otherwise."""
        if rank.queue != previous.queue:
            return (inf if rank.queue < previous.queue else -rank.slope, self._decision, 2, row)
        return (-rank.slope, *tie[1:])

    def decided(self) -> None:
        """Count decisions: what happens from now on is later."""
        self._decision += 1


def _stands_still(previous: Rank, rank: Rank) -> bool:
    """Say whether the rank neither changed nor changes with time, so that the job keeps its place among its equals."""
    return previous[:3] == rank[:3] and previous.slope == rank.slope == 0
