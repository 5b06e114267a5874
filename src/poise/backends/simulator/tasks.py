"""Runs at task grain: rounds of training computed task by task, each task on one GPU, which is free again when it is done.

A round is one run. When the last of its tasks is computed the synchronisation begins, without any GPU; at its end the next
round may begin. Tasks are not preempted: what stops a round (a failure, a lost node, a cancellation) stops all of its tasks,
and nothing of the round counts. Times are exact: a task ends at its start + the GPU's turning to the job + its computation.
"""

from collections.abc import Callable, Iterator
from enum import Enum, auto
from heapq import heappop, heappush
from math import inf

from poise.backends.simulator.runs import Fate, Round, Run
from poise.backends.simulator.switching import Gpus
from poise.model.action import Compute
from poise.model.cluster import bits, gpu_count, merged
from poise.model.errors import InvariantError
from poise.model.event import Computed, Event, Failed, Progressed, Stopped, Synchronised
from poise.model.tasks import Tasks
from poise.model.topology import Topology

LATER = 1 << 62
"""Added to the number of a death: work that is done at that very moment counts first."""

ROUNDING = 1e-9
"""So little of a job's work is not worth a round: it comes of adding and dividing."""


class Due(Enum):
    """What comes for a round at a moment."""

    COMPUTED = auto()
    SYNCHRONISED = auto()
    DEATH = auto()


class TaskRuns:
    """All rounds under way.

    pending   what is to come, by moment and then by the number that it got when it became known; some of it is void
    outcome   (job, epoch) -> how the job ends now that its work is done
    """

    def __init__(
        self,
        topology: Topology,
        gpus: Gpus,
        running: dict[str, Fate],
        numbers: Iterator[int],
        report_every: float,
        outcome: Callable[[Fate, int], Event],
    ) -> None:
        self.pending: list[tuple[float, int, Fate, Round, Due]] = []
        self._topology = topology
        self._gpus = gpus
        self._running = running
        self._numbers = numbers
        self._report_every = report_every
        self._outcome = outcome

    def compute(self, action: Compute, fate: Fate, now: float) -> None:
        """Begin a task of the current round on each of these GPUs; the first tasks of a round begin it.

        Raises InvariantError for more tasks than the round has left, and for GPUs that are busy or of no use to the job.
        """
        tasks = fate.speed.tasks
        if tasks is None:
            raise InvariantError(f"{action.job} is to compute tasks, but its rounds do not divide")
        under_way = self._round(action, fate, tasks, now)
        under_way.left -= gpu_count(action.gpus)
        if under_way.left < 0:
            raise InvariantError(f"{action.job} is to compute {-under_way.left} tasks more than its round has left")
        self._gpus.take(action.job, action.gpus)
        for node, mask in action.gpus:
            seconds = tasks.seconds[self._topology.type_of[node]]
            if seconds <= 0:
                raise InvariantError(f"{action.job} is to compute on node {node}, whose GPUs are of no use to it")
            under_way.used[node] = under_way.used.get(node, 0) | mask
            for bit in bits(mask):
                end = now + (self._gpus.turn(action.job, node, bit, fate.cold) + seconds)
                self._expect(fate, under_way, end, node, bit)

    def _round(self, action: Compute, fate: Fate, tasks: Tasks, now: float) -> Round:
        """The round that the tasks belong to: the one under way, or a new one."""
        run = fate.run
        if run is None:
            run = fate.run = Round(action.epoch, now, tasks)
            self._running[action.job] = fate
            failure = fate.seconds_to_failure()
            if failure < inf:
                heappush(self.pending, (now + failure, next(self._numbers) + LATER, fate, run, Due.DEATH))
        elif isinstance(run, Run) or run.epoch != action.epoch:
            raise InvariantError(f"{action.job} is to compute for run {action.epoch}, but run {run.epoch} has not ended")
        return run

    def _expect(self, fate: Fate, under_way: Round, end: float, node: int, bit: int) -> None:
        """Tasks of a round that end at one moment are one piece of news."""
        gpus = under_way.ends.get(end)
        if gpus is None:
            gpus = under_way.ends[end] = {}
            heappush(self.pending, (end, next(self._numbers), fate, under_way, Due.COMPUTED))
        gpus[node] = gpus.get(node, 0) | bit

    def next_time(self) -> float:
        """When the next news of a round comes; inf if none will."""
        pending = self.pending
        while pending and pending[0][2].run is not pending[0][3]:
            heappop(pending)
        return pending[0][0] if pending else inf

    def tell(self, now: float, before: tuple[float, float], facts: list[Event]) -> None:
        """All that comes before this moment and number."""
        pending = self.pending
        while pending and pending[0][:2] < before:
            time, _, fate, under_way, due = heappop(pending)
            if fate.run is not under_way:
                continue
            if due is Due.COMPUTED:
                self._computed(fate, under_way, time, now, facts)
            elif due is Due.SYNCHRONISED:
                self._synchronised(fate, under_way, now, facts)
            else:
                facts.append(self._die(fate, under_way))

    def _computed(self, fate: Fate, under_way: Round, time: float, now: float, facts: list[Event]) -> None:
        """Tasks are done; if they were the last of the round, it is to be synchronised."""
        gpus = merged(under_way.ends.pop(time).items())
        self._gpus.free(gpus)
        facts.append(Computed(fate.trace_job.job.id, under_way.epoch, gpus))
        if under_way.left or under_way.ends:
            return
        sync = self._sync(under_way)
        if sync > 0:
            heappush(self.pending, (now + sync, next(self._numbers), fate, under_way, Due.SYNCHRONISED))
        else:
            self._synchronised(fate, under_way, now, facts)

    def _sync(self, under_way: Round) -> float:
        """Seconds to put the tasks together: the longest of the types that took part, as far apart as they all are."""
        topology, sync = self._topology, under_way.tasks.sync
        locality = topology.locality(merged(under_way.used.items()))
        return max(sync[topology.type_of[node]][locality] for node in under_way.used)

    def _synchronised(self, fate: Fate, under_way: Round, now: float, facts: list[Event]) -> None:
        """A round is complete: one more step is done, perhaps the last one."""
        job, epoch = fate.trace_job.job.id, under_way.epoch
        self.leave(fate, under_way)
        fate.attempt_seconds += now - under_way.began
        fate.steps = min(fate.steps + 1.0, fate.total)
        if fate.total - fate.steps <= ROUNDING * fate.total:
            facts.append(self._outcome(fate, epoch))
            return
        curve = fate.trace_job.loss
        fate.unreported += now - under_way.began
        if curve is not None and fate.unreported >= self._report_every:
            fate.unreported = 0.0
            facts.append(Progressed(job, epoch, fate.steps, curve.loss(fate.steps)))
        facts.append(Synchronised(job, epoch, fate.steps))

    def _die(self, fate: Fate, under_way: Round) -> Failed:
        """The attempt fails in the middle of the round."""
        self.leave(fate, under_way)
        return fate.die(under_way.epoch)

    def halt(self, fate: Fate, under_way: Round, now: float) -> Stopped:
        """The round is stopped from outside."""
        self.leave(fate, under_way)
        fate.attempt_seconds += now - under_way.began
        return Stopped(fate.trace_job.job.id, under_way.epoch, fate.steps)

    def leave(self, fate: Fate, under_way: Round) -> None:
        """The round is over; whatever computes for it stops."""
        fate.run = None
        del self._running[fate.trace_job.job.id]
        for gpus in under_way.ends.values():
            self._gpus.free(merged(gpus.items()))
