"""A simulated cluster: it knows how fast jobs really are, when they fail, and which nodes are lost when.

Times are exact: a run ends at the very moment its work is done, whatever rounds there are. Facts of one instant come in
one batch: what ended, what was lost or returned, what arrived, and then the wake-up.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple, assert_never

from poise.lab.simulator.runs import Fate, Round, SimulatedRun
from poise.lab.simulator.tasks import ResidentModels, Switching, TaskRuns, unknown_size
from poise.lab.traces.schema import JobOutcome, TraceJob
from poise.scheduler.model.action import (
    Abandon,
    Action,
    Cancel,
    Compute,
    Entitled,
    Launch,
    Preempt,
    Reject,
    Remark,
    Traded,
    WakeAt,
)
from poise.scheduler.model.cluster import Cluster, Holding, gpu_count
from poise.scheduler.model.event import (
    Cancelled,
    Colocated,
    Estimated,
    Event,
    Finished,
    NodeLost,
    NodeReturned,
    Progressed,
    Revealed,
    Stopped,
    Submitted,
    Woke,
)
from poise.scheduler.model.job import Job
from poise.scheduler.model.topology import Topology
from poise.scheduler.throughput.speeds import Speeds

MOST_VAIN_WAKES = 100
"""Wake-ups in a row with nobody running and no other news to come, after which nothing can happen any more."""


class Outage(NamedTuple):
    """A node is lost at a moment, for some seconds."""

    time: float
    node: int
    duration: float


class Tells(Enum):
    """What the world tells the scheduler of speeds: of jobs alone, or of pairs that share GPUs too."""

    SPEEDS = auto()
    PAIRS = auto()


@dataclass(frozen=True, slots=True)
class Truth:
    """What the world costs, in seconds, and what it tells.

    restart_overhead   without progress at each start, of jobs whose rounds do not divide into tasks
    checkpoint_every   running time between checkpoints; what a lost node or a failure takes is the work since the last
    tells              what the scheduler is told of speeds
    report_every       running time between two reports of loss, of jobs that report it; above 0
    switching          without progress where a GPU turns to another job whose rounds divide; None: they restart as others
                       do, task by task where their GPU did not run them last
    """

    restart_overhead: float = 0.0
    checkpoint_every: float = 600.0
    tells: Tells = Tells.SPEEDS
    report_every: float = 300.0
    switching: Switching | None = field(default_factory=Switching)


class Simulator:
    """The world of one trace. `beliefs` is what the scheduler is told of speeds, `truths` what they are.

    sizes   bytes of a job's model; None if not known
    ended   jobs that have come to their end, for a progress bar
    """

    def __init__(  # noqa: PLR0913 - a trace, its cluster, and all that is true of them
        self,
        jobs: Sequence[TraceJob],
        cluster: Cluster,
        *,
        beliefs: Speeds,
        truths: Speeds,
        truth: Truth | None = None,
        sizes: Callable[[Job], float | None] = unknown_size,
        outages: Iterable[Outage] = (),
        until: float = inf,
    ) -> None:
        self.ended = 0
        self._jobs = jobs
        self._beliefs = beliefs
        self._truths = truths
        self._truth = truth or Truth()
        self._sizes = sizes
        self._until = until
        self._topology = Topology(cluster)
        self._fates: dict[str, Fate] = {}
        self._running: dict[str, Fate] = {}
        self._told: dict[str, Job] = {}
        self._shared: dict[Holding, list[Fate]] = {}
        self._ends: list[tuple[float, int, Fate, SimulatedRun]] = []
        self._reports: list[tuple[float, int, Fate, SimulatedRun]] = []
        self._numbers = count(1)
        self._divides = any(each.job.micro_batches is not None for each in jobs)
        switching = self._truth.switching or Switching(keep=1)
        self._gpus = ResidentModels(len(cluster.nodes), switching.keep, switching.resident)
        self._tasks = TaskRuns(
            self._topology, self._gpus, self._running, self._numbers, self._truth.report_every, self._outcome
        )
        self._task_ends = self._tasks.pending  # most worlds have none: looked at in every instant
        self._node_news = _node_news(outages)
        self._next_node = 0
        self._next_job = 0
        self._next_arrival = jobs[0].job.submitted if jobs else inf
        self._wake = inf
        self._stopped: list[Event] = []
        self._now = -inf

    def batches(self) -> Iterator[tuple[float, tuple[Event, ...]]]:
        """Facts by instant, until every job has ended or nothing can happen any more."""
        vain = 0
        while (now := self._now if self._stopped else self._next_time()) <= self._until and now < inf:
            self._now = now
            yield now, self._facts(now)
            vain = 0 if self._running else vain + self._has_no_news()
            if vain > MOST_VAIN_WAKES:
                return

    def _has_no_news(self) -> bool:
        """Nobody will arrive, and no node will come or go."""
        left = self._node_news[self._next_node :]
        return self._next_job == len(self._jobs) and all(time == inf for time, _ in left)

    def _next_time(self) -> float:
        if self._next_job == len(self._jobs) == self.ended:
            return inf
        ends = self._ends
        while ends and (ends[0][2].run is not ends[0][3] or ends[0][3].note != ends[0][1]):
            heappop(ends)
        time = self._wake if self._wake < self._next_arrival else self._next_arrival
        if ends and ends[0][0] < time:
            time = ends[0][0]
        if self._next_node < len(self._node_news):
            time = min(time, self._node_news[self._next_node][0])
        while self._reports and self._reports[0][2].run is not self._reports[0][3]:
            heappop(self._reports)
        if self._reports:
            time = min(time, self._reports[0][0])
        if self._task_ends:
            time = min(time, self._tasks.next_time())
        return time if time > self._now else self._now

    def _facts(self, now: float) -> tuple[Event, ...]:
        """What was reported, what ended, what was lost or returned, what arrived, the wake-up."""
        facts = self._stopped
        self._stopped = []
        if self._reports:
            self._report(now, facts)
        while self._ends and self._ends[0][0] <= now:
            time, note, fate, run = heappop(self._ends)
            if self._task_ends:
                self._tasks.tell(now, (time, note), facts)
            if fate.run is run and run.note == note:
                facts.append(self._end(fate, run, now))
        if self._task_ends:
            self._tasks.tell(now, (now, inf), facts)
        while self._next_node < len(self._node_news) and self._node_news[self._next_node][0] <= now:
            self._node_changed(self._node_news[self._next_node][1], now, facts)
            self._next_node += 1
        while self._next_arrival <= now:
            self._arrive(self._jobs[self._next_job], facts)
            self._next_job += 1
            self._next_arrival = self._jobs[self._next_job].job.submitted if self._next_job < len(self._jobs) else inf
        if self._wake <= now:
            self._wake = inf
            facts.append(Woke())
        return tuple(facts)

    def _report(self, now: float, facts: list[Event]) -> None:
        """Runs that are due say how good their models are."""
        while self._reports and self._reports[0][0] <= now:
            time, number, fate, run = heappop(self._reports)
            curve = fate.trace_job.loss
            if fate.run is run and curve is not None:
                steps = run.steps_at(now)
                facts.append(Progressed(fate.trace_job.job.id, run.epoch, steps, curve.loss(steps)))
                heappush(self._reports, (time + self._truth.report_every, number, fate, run))

    def _arrive(self, trace_job: TraceJob, facts: list[Event]) -> None:
        job = trace_job.job
        kind, estimate, steps = self._beliefs.resolve(job)
        if kind not in self._told:
            self._told[kind] = job
            facts.append(Estimated(kind, estimate))
            if self._truth.tells is Tells.PAIRS:
                self._tell_pairs(kind, job, facts)
        facts.append(Submitted(job, kind, steps))
        if self._truths is not self._beliefs:
            believed = steps, estimate.packed
            _, estimate, steps = self._truths.resolve(job)
            if believed != (steps, estimate.packed):
                facts.append(Revealed(job.id, steps, estimate.packed))
        self._fates[job.id] = Fate(trace_job, estimate, steps, 0.0 if estimate.tasks is None else self._cold(job))

    def _cold(self, job: Job) -> float:
        """Seconds until a GPU that knows nothing of a job can compute for it."""
        switching = self._truth.switching
        return self._truth.restart_overhead if switching is None else switching.cold(self._sizes(job))

    def _tell_pairs(self, kind: str, job: Job, facts: list[Event]) -> None:
        """What is believed of a new kind beside each that is known."""
        for other, known in self._told.items():
            if known.gpus == job.gpus:
                rates = self._beliefs.pair(job, known)
                if any(mine > 0 and others > 0 for mine, others in rates):
                    facts.append(Colocated(kind, other, rates))

    def _end(self, fate: Fate, run: SimulatedRun, now: float) -> Event:
        """A run comes to its own end: the attempt dies, or the work is done and the job ends as it is fated to."""
        self._leave(fate, run, now)
        if run.dies:
            fate.steps = min(run.saved_at(now, self._truth.checkpoint_every), fate.total)
            return fate.die(run.epoch)
        return self._outcome(fate, run.epoch)

    def _outcome(self, fate: Fate, epoch: int) -> Event:
        """The job's work is done."""
        if fate.trace_job.outcome is JobOutcome.FAILED:
            return fate.fail(epoch)
        job = fate.trace_job.job.id
        self.ended += 1
        return Cancelled(job) if fate.trace_job.outcome is JobOutcome.KILLED else Finished(job, epoch)

    def _node_changed(self, change: NodeLost | NodeReturned, now: float, facts: list[Event]) -> None:
        facts.append(change)
        if isinstance(change, NodeLost):
            for fate in [fate for fate in self._running.values() if fate.run and fate.run.is_on(change.node)]:
                self._halt(fate, now, facts, saved=self._truth.checkpoint_every)
            self._gpus.forget(change.node)

    def _halt(self, fate: Fate, now: float, facts: list[Event], *, saved: float) -> None:
        """A run is stopped from outside; what it did since its last checkpoint is lost (saved=0: it saved just now)."""
        run = fate.run
        if isinstance(run, Round):
            facts.append(self._tasks.halt(fate, run, now))
        elif run is not None:
            self._leave(fate, run, now)
            fate.steps = min(run.saved_at(now, saved), fate.total)
            if run.rate > 0:  # a trial is an attempt of its own
                fate.attempt_seconds += now - run.began if now > run.began else 0.0
            facts.append(Stopped(fate.trace_job.job.id, run.epoch, fate.steps))

    def apply(self, now: float, actions: Sequence[Action]) -> None:
        """Carry out wishes at once; that a run stopped becomes known at this very moment."""
        for action in actions:
            match action:
                case Launch():
                    self._launch(action, now)
                case Compute():
                    self._tasks.compute(action, self._fates[action.job], now)
                case Preempt():
                    self._halt(self._fates[action.job], now, self._stopped, saved=0.0)
                case WakeAt():
                    self._wake = action.time
                case Reject() | Abandon():
                    self.ended += 1
                case Cancel():
                    self._give_up(self._fates[action.job], now)
                case Remark() | Traded() | Entitled():
                    pass
                case _:
                    assert_never(action)

    def _give_up(self, fate: Fate, now: float) -> None:
        """The job is wanted no more."""
        self.ended += 1
        if isinstance(fate.run, Round):
            self._tasks.leave(fate, fate.run)
        elif fate.run is not None:
            self._leave(fate, fate.run, now)

    def _launch(self, action: Launch, now: float) -> None:
        fate = self._fates[action.job]
        gpu_type = self._topology.type_of[action.gpus[0].node]
        rate = self._alone(fate, action.gpus)
        since = now + (self._overhead(fate, action.gpus) if self._divides else self._truth.restart_overhead)
        run = SimulatedRun(action.epoch, action.gpus, rate, since, fate.steps)
        fate.run = run
        self._running[action.job] = fate
        if fate.trace_job.loss is not None:
            heappush(self._reports, (since + self._truth.report_every, next(self._numbers), fate, run))
        here = self._shared.setdefault(action.gpus, [])
        here.append(fate)
        if len(here) > 1:
            self._change_rates(here, gpu_type, now)
        else:
            if self._divides:
                self._gpus.take(action.job, action.gpus)
            self._foresee(fate, run)

    def _overhead(self, fate: Fate, gpus: Holding) -> float:
        """Seconds without progress at a start; the GPUs remember who ran on them, whoever it is."""
        switching = self._gpus.turn_all(fate.trace_job.job.id, gpus, fate.cold)
        is_rigid = fate.speed.tasks is None
        return self._truth.restart_overhead if is_rigid or self._truth.switching is None else switching

    def _alone(self, fate: Fate, gpus: Holding) -> float:
        """Steps per second of a job that has these GPUs for itself; with fewer than it can do with it is only on trial."""
        speed, job = fate.speed, fate.trace_job.job
        if speed.tasks is not None:
            return speed.on(self._topology.mix(gpus), self._topology.locality(gpus))
        held = gpu_count(gpus)
        if held < job.gpus and held < (job.min_gpus or job.gpus):
            return 0.0
        rates = speed.at(held) if speed.others else speed.rates
        return rates[self._topology.type_of[gpus[0].node]][self._topology.locality(gpus)]

    def _foresee(self, fate: Fate, run: SimulatedRun) -> None:
        """Note when the run will end at its present speed; an earlier note is void."""
        seconds = (fate.total - run.steps) / run.rate if run.rate > 0 else inf
        failure = fate.seconds_to_failure() - (run.since - run.began)
        run.dies = failure < seconds
        run.note = next(self._numbers)
        heappush(self._ends, (run.since + min(seconds, failure), run.note, fate, run))

    def _leave(self, fate: Fate, run: SimulatedRun, now: float) -> None:
        """The run no longer holds its GPUs; who shared them goes on alone."""
        fate.run = None
        del self._running[fate.trace_job.job.id]
        here = self._shared[run.gpus]
        here.remove(fate)
        if here:
            self._change_rates(here, self._topology.type_of[run.gpus[0].node], now)
        else:
            del self._shared[run.gpus]
            if self._divides:
                self._gpus.free(run.gpus)

    def _change_rates(self, here: list[Fate], gpu_type: int, now: float) -> None:
        """Jobs on the same GPUs have the speed of their company."""
        jobs = [fate.trace_job.job for fate in here]
        for mine, fate in enumerate(here):
            run = fate.run
            if isinstance(run, SimulatedRun):
                alone = self._alone(fate, run.gpus)
                together = len(here) > 1 and self._truths.pair(jobs[mine], jobs[1 - mine])[gpu_type][0]
                run.change_rate(now, together or (alone / len(here)), self._truth.checkpoint_every)
                self._foresee(fate, run)


def _node_news(outages: Iterable[Outage]) -> list[tuple[float, NodeLost | NodeReturned]]:
    """Losses and returns by time; overlapping outages of one node count as one."""
    spans: dict[int, list[list[float]]] = {}
    for outage in sorted(outages):
        mine = spans.setdefault(outage.node, [])
        if mine and outage.time <= mine[-1][1]:
            mine[-1][1] = max(mine[-1][1], outage.time + outage.duration)
        else:
            mine.append([outage.time, outage.time + outage.duration])
    news: list[tuple[float, NodeLost | NodeReturned]] = []
    for node, mine in spans.items():
        for lost, returned in mine:
            news += [(lost, NodeLost(node)), (returned, NodeReturned(node))]
    return sorted(news, key=lambda each: (each[0], each[1].node))
