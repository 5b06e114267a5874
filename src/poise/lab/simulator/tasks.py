"""Runs at task grain: rounds of training computed task by task, each task on one GPU, which is free again when it is done.

A round is one run. When the last of its tasks is computed the synchronisation begins, without any GPU; at its end the next
round may begin. Tasks are not preempted: what stops a round (a failure, a lost node, a cancellation) stops all of its tasks,
and nothing of the round counts. Times are exact: a task ends at its start + the GPU's turning to the job + its computation.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from heapq import heappop, heappush
from math import inf, nan

from poise.lab.simulator.runs import Fate, Round, SimulatedRun
from poise.scheduler.model.action import Compute
from poise.scheduler.model.cluster import Holding, bits, gpu_count, merged
from poise.scheduler.model.errors import InvariantError, RequestError, UnknownNameError
from poise.scheduler.model.event import Computed, Event, Failed, Progressed, Stopped, Synchronised
from poise.scheduler.model.job import Job
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.topology import Topology

# What it costs a GPU to turn to another job (Hare; ALGORITHMS §5.4), for jobs whose rounds divide into tasks.
#
# the same job ran last        nothing
# its model is still resident  a few milliseconds
# otherwise (cold)             size of the model ÷ bandwidth of the bus
#
# A GPU keeps the models of the jobs that ran on it last, and makes room by giving up the one whose run completed earliest.
# Two jobs never have the same weights, and so residency is a matter of jobs, whatever their models are called.


@dataclass(frozen=True, slots=True)
class Switching:
    """Costs of turning to another job.

    resident    seconds, if the GPU still keeps the job's model
    bandwidth   bytes a second at which a model comes to a GPU that does not
    size        bytes of a model whose size nobody states
    keep        jobs whose models a GPU keeps, the one that runs included
    """

    resident: float = 0.003
    bandwidth: float = 12e9
    size: float = 500e6
    keep: int = 4

    def cold(self, size: float | None) -> float:
        """Seconds to load a model of so many bytes."""
        return (self.size if size is None else size) / self.bandwidth


FREE = Switching(resident=0.0, bandwidth=inf)
"""As if turning to another job cost nothing."""


def parse_switching(spec: str) -> Switching | None:
    """`naive` (None): every start costs the restart overhead; `free`; or costs: `resident=0.01,bandwidth=6e9,keep=2`."""
    if spec == "naive":
        return None
    if spec == "free":
        return FREE
    given: dict[str, float] = {}
    for part in spec.split(","):
        name, _, value = part.partition("=")
        if name not in _LEAST:
            raise UnknownNameError("cost of switching", name, (*_LEAST, "naive", "free"))
        given[name] = _read(name, value)
    return replace(Switching(**given), keep=int(given.get("keep", Switching().keep)))  # type: ignore[arg-type]


_LEAST = {"resident": 0.0, "bandwidth": 1.0, "size": 0.0, "keep": 1.0}
"""Of each cost."""


def _read(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not _LEAST[name] <= value < inf:
        raise RequestError(f"--switching {name}: expected a number of at least {_LEAST[name]:g}, got {text[:50]!r}")
    if name == "keep" and value != int(value):
        raise RequestError(f"--switching keep: expected a whole number of jobs, got {text[:50]!r}")
    return value


def unknown_size(_job: Job) -> float | None:
    """Nobody states how large models are."""
    return None


class ResidentModels:
    """Every GPU of the cluster: whether somebody computes on it, and whose models it keeps. All of it O(1) a GPU.

    A GPU is named by its node and its bit in a mask of slots. Runs on a GPU follow one another, so that they complete in the
    order in which they began; jobs that share one count in that order too.
    """

    def __init__(self, nodes: int, keep: int, resident: float) -> None:
        self._keep = keep
        self._resident = resident
        self._busy = [0] * nodes
        self._kept: list[dict[int, dict[str, None]]] = [{} for _ in range(nodes)]

    def take(self, job: str, gpus: Holding) -> None:
        """These compute for a job from now on. Raises InvariantError if one of them does already."""
        busy = self._busy
        for node, mask in gpus:
            if busy[node] & mask:
                raise InvariantError(f"{job} is to run on node {node}, slots {mask:#b}, of which {busy[node]:#b} are busy")
            busy[node] |= mask

    def free(self, gpus: Holding) -> None:
        """These compute no more."""
        for node, mask in gpus:
            self._busy[node] &= ~mask

    def turn(self, job: str, node: int, bit: int, cold: float) -> float:
        """A GPU turns to a job; seconds that it takes, `cold` if it does not keep the job's model."""
        kept = self._kept[node].get(bit)
        if kept is None:
            kept = self._kept[node][bit] = {}
        elif job in kept:
            if next(reversed(kept)) == job:
                return 0.0
            del kept[job]
            kept[job] = None  # the last to have run
            return self._resident
        kept[job] = None
        if len(kept) > self._keep:
            del kept[next(iter(kept))]
        return cold

    def turn_all(self, job: str, gpus: Holding, cold: float) -> float:
        """These GPUs turn to a job; seconds until the last of them has."""
        return max(self.turn(job, node, bit, cold) for node, mask in gpus for bit in bits(mask))

    def forget(self, node: int) -> None:
        """A lost node keeps nothing."""
        self._kept[node].clear()


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
        gpus: ResidentModels,
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
        elif isinstance(run, SimulatedRun) or run.epoch != action.epoch:
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
