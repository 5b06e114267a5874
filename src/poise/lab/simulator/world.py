"""A simulated cluster: the back end that `engine.loop` drives when a trace is simulated.

The core decides; the simulator knows what the core does not and lets it happen:

- the true speed of each job (`truths`), where it differs from the speed that the core is told (`beliefs`);
- when attempts fail, and how a job ends once its work is done (`TraceJob`);
- when nodes are lost and return, and when they are drained (`outages`);
- what a start costs, and how much work since the last checkpoint a failure or a lost node destroys (`Truth`).

Time is exact: a run ends at the very time its work is done, whatever rounds the scheduler has. `batches` yields all
events of one time as one batch, always in this order: runs that the last actions stopped, reports of loss, runs that
ended, nodes that were lost, returned or restricted, arrivals, the wake-up. Ends of runs come by the time and then by
the sequence number of their forecast. So one trace gives one journal.

The end of a run is forecast when the run starts and whenever its speed changes, which happens when jobs begin or stop
to share its GPUs. Forecasts are never deleted from the heap: one that is void is recognised by its number.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import assert_never

from poise.lab.simulator.outages import Drain, Outage, node_events
from poise.lab.simulator.runs import SimulatedJob, SimulatedRun, TaskStep
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
"""Stop after this many wake-ups in a row while no job runs and no arrival or change of nodes is to come."""


class ReportedSpeeds(Enum):
    """Which speeds the scheduler is told: those of jobs alone, or also those of pairs that share GPUs."""

    ALONE = auto()
    PAIRS = auto()


@dataclass(frozen=True, slots=True)
class Truth:
    """What running costs in the simulated world. Seconds.

    restart_overhead   time without progress at each start, of jobs whose steps do not divide into tasks
    checkpoint_every   running time between checkpoints; a lost node or a failure destroys the work since the last one
    reported_speeds    which speeds the scheduler is told
    report_every       running time between two reports of loss, of jobs that report it; above 0
    switching          time without progress where a GPU turns to another job whose steps divide; None: such a job pays
                       the restart overhead on each GPU that did not run it last
    """

    restart_overhead: float = 0.0
    checkpoint_every: float = 600.0
    reported_speeds: ReportedSpeeds = ReportedSpeeds.ALONE
    report_every: float = 300.0
    switching: Switching | None = field(default_factory=Switching)


class Simulator:
    """The world of one trace: a `Backend` of `engine.loop`.

    beliefs   the speeds that the scheduler is told;  truths: the speeds that jobs have
    sizes     bytes of a job's model; None if not known
    until     time of the last events
    ended     jobs that have come to their end, for a progress bar
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
        outages: Iterable[Outage | Drain] = (),
        until: float = inf,
    ) -> None:
        self.ended = 0
        self._trace, self._until, self._sizes = jobs, until, sizes
        self._beliefs, self._truths = beliefs, truths
        self._truth = truth or Truth()
        self._topology = Topology(cluster)
        self._now = -inf
        # Jobs that have arrived, those that run, and those that run on the same GPUs.
        self._jobs: dict[str, SimulatedJob] = {}
        self._running: dict[str, SimulatedJob] = {}
        self._sharing: dict[Holding, list[SimulatedJob]] = {}
        # What is to come: heaps of (time, sequence number, job, run), and positions in lists sorted by time.
        self._numbers = count(1)
        self._ends: list[tuple[float, int, SimulatedJob, SimulatedRun]] = []
        self._reports: list[tuple[float, int, SimulatedJob, SimulatedRun]] = []
        self._stopped: list[Event] = []  # of runs that the last actions stopped: known at the same time
        self._next_job = 0
        self._next_arrival = jobs[0].job.submitted if jobs else inf
        self._node_events = node_events(outages)
        self._next_node = 0
        self._wake = inf
        self._first_of_kind: dict[str, Job] = {}  # the scheduler is told each kind's speeds once
        # Jobs whose steps divide into tasks. Most traces have none: then no GPU's models are looked at.
        self._divides = any(each.job.micro_batches is not None for each in jobs)
        switching = self._truth.switching or Switching(keep=1)
        self._gpus = ResidentModels(len(cluster.nodes), switching.keep, switching.resident)
        self._tasks = TaskRuns(
            self._topology, self._gpus, self._running, self._numbers, self._truth.report_every, self._outcome
        )
        self._task_ends = self._tasks.pending

    # Events

    def batches(self) -> Iterator[tuple[float, tuple[Event, ...]]]:
        """Yield (time, events) until every job has ended or nothing can happen any more."""
        vain = 0
        while (now := self._now if self._stopped else self._next_time()) <= self._until and now < inf:
            self._now = now
            yield now, self._events(now)
            # A scheduler may ask to be woken for ever, for jobs that wait for a node that never returns.
            if self._running:
                vain = 0
            elif self._next_job == len(self._trace) and all(time == inf for time, _ in self._node_events[self._next_node :]):
                vain += 1
            if vain > MOST_VAIN_WAKES:
                return

    def _next_time(self) -> float:
        """Return the time of the next event; inf if all jobs have ended or none will come."""
        if self._next_job == len(self._trace) == self.ended:
            return inf
        ends = self._ends
        while ends and (ends[0][2].run is not ends[0][3] or ends[0][3].forecast != ends[0][1]):
            heappop(ends)
        time = self._wake if self._wake < self._next_arrival else self._next_arrival
        if ends and ends[0][0] < time:
            time = ends[0][0]
        if self._next_node < len(self._node_events):
            time = min(time, self._node_events[self._next_node][0])
        while self._reports and self._reports[0][2].run is not self._reports[0][3]:
            heappop(self._reports)
        if self._reports:
            time = min(time, self._reports[0][0])
        if self._task_ends:
            time = min(time, self._tasks.next_time())
        return time if time > self._now else self._now

    def _events(self, now: float) -> tuple[Event, ...]:
        """Return everything that happens at this time, in the order that the module's docstring gives."""
        events = self._stopped
        self._stopped = []
        if self._reports:
            self._report_losses(now, events)
        while self._ends and self._ends[0][0] <= now:
            time, number, job, run = heappop(self._ends)
            if self._task_ends:  # ends of runs and of tasks are ordered together
                self._tasks.emit(now, (time, number), events)
            if job.run is run and run.forecast == number:
                events.append(self._end(job, run, now))
        if self._task_ends:
            self._tasks.emit(now, (now, inf), events)
        while self._next_node < len(self._node_events) and self._node_events[self._next_node][0] <= now:
            change = self._node_events[self._next_node][1]
            self._next_node += 1
            events.append(change)
            if isinstance(change, NodeLost):
                self._lose_node(change.node, now, events)
        while self._next_arrival <= now:
            self._arrive(self._trace[self._next_job], events)
            self._next_job += 1
            self._next_arrival = self._trace[self._next_job].job.submitted if self._next_job < len(self._trace) else inf
        if self._wake <= now:
            self._wake = inf
            events.append(Woke())
        return tuple(events)

    def _report_losses(self, now: float, events: list[Event]) -> None:
        """Report the loss of runs that are due, and schedule their next reports."""
        while self._reports and self._reports[0][0] <= now:
            time, number, job, run = heappop(self._reports)
            curve = job.trace.loss
            if job.run is run and curve is not None:
                steps = run.steps_at(now)
                events.append(Progressed(job.id, run.epoch, steps, curve.loss(steps)))
                heappush(self._reports, (time + self._truth.report_every, number, job, run))

    def _arrive(self, trace_job: TraceJob, events: list[Event]) -> None:
        """Submit a job, with what is believed of the speed of its kind if it is the first of that kind.

        Where belief and truth differ, `Revealed` puts the truth into the journal for analysis; the core ignores it.
        """
        job = trace_job.job
        kind, estimate, steps = self._beliefs.resolve(job)
        if kind not in self._first_of_kind:
            self._first_of_kind[kind] = job
            events.append(Estimated(kind, estimate))
            if self._truth.reported_speeds is ReportedSpeeds.PAIRS:
                for other, known in self._first_of_kind.items():
                    if known.gpus == job.gpus:
                        rates = self._beliefs.pair(job, known)
                        if any(mine > 0 and others > 0 for mine, others in rates):
                            events.append(Colocated(kind, other, rates))
        events.append(Submitted(job, kind, steps))
        if self._truths is not self._beliefs:
            believed = steps, estimate.packed
            _, estimate, steps = self._truths.resolve(job)
            if believed != (steps, estimate.packed):
                events.append(Revealed(job.id, steps, estimate.packed))
        switching = self._truth.switching
        cold = 0.0
        if estimate.tasks is not None:
            cold = self._truth.restart_overhead if switching is None else switching.cold(self._sizes(job))
        self._jobs[job.id] = SimulatedJob(trace_job, estimate, steps, cold)

    def _end(self, job: SimulatedJob, run: SimulatedRun, now: float) -> Event:
        """End a run as forecast: its attempt fails, or its work is done."""
        self._leave(job, run, now)
        if run.dies:
            job.steps = min(run.saved_at(now, self._truth.checkpoint_every), job.total)
            return job.fail_attempt(run.epoch)
        return self._outcome(job, run.epoch)

    def _outcome(self, job: SimulatedJob, epoch: int) -> Event:
        """Return how a job ends whose work is done."""
        if job.trace.outcome is JobOutcome.FAILED:
            return job.fail_at_end(epoch)  # the core abandons it, and that counts as its end
        self.ended += 1
        return Cancelled(job.id) if job.trace.outcome is JobOutcome.KILLED else Finished(job.id, epoch)

    def _lose_node(self, node: int, now: float, events: list[Event]) -> None:
        """Stop all runs on a node; each loses its work since its last checkpoint."""
        for job in [job for job in self._running.values() if job.run and job.run.is_on(node)]:
            self._halt(job, now, events, checkpoint_every=self._truth.checkpoint_every)
        self._gpus.forget(node)

    # Actions

    def apply(self, now: float, actions: Sequence[Action]) -> None:
        """Carry out actions at once. That a run stopped is an event of the same time, in the next batch."""
        for action in actions:
            match action:
                case Launch():
                    self._launch(action, now)
                case Compute():
                    self._tasks.compute(action, self._jobs[action.job], now)
                case Preempt():  # it saves its work as it leaves
                    self._halt(self._jobs[action.job], now, self._stopped, checkpoint_every=0.0)
                case WakeAt():
                    self._wake = action.time
                case Reject() | Abandon():
                    self.ended += 1
                case Cancel():
                    self._cancel(self._jobs[action.job], now)
                case Remark() | Traded() | Entitled():
                    pass
                case _:
                    assert_never(action)

    def _cancel(self, job: SimulatedJob, now: float) -> None:
        self.ended += 1
        if isinstance(job.run, TaskStep):
            self._tasks.leave(job, job.run)
        elif job.run is not None:
            self._leave(job, job.run, now)

    def _launch(self, action: Launch, now: float) -> None:
        """Start a run. It makes progress once the restart, or the switch of its GPUs to it, is over."""
        job = self._jobs[action.job]
        rate = self._rate_alone(job, action.gpus)
        overhead = self._truth.restart_overhead
        if self._divides:  # GPUs remember who ran on them, also jobs that pay the restart overhead
            switching = self._gpus.turn_all(job.id, action.gpus, job.cold)
            if job.speed.tasks is not None and self._truth.switching is not None:
                overhead = switching
        since = now + overhead
        run = SimulatedRun(action.epoch, action.gpus, rate, since, job.steps)
        job.run = run
        self._running[action.job] = job
        if job.trace.loss is not None:
            heappush(self._reports, (since + self._truth.report_every, next(self._numbers), job, run))
        here = self._sharing.setdefault(action.gpus, [])
        here.append(job)
        if len(here) > 1:
            self._change_rates(here, now)
        else:
            if self._divides:
                self._gpus.take(action.job, action.gpus)
            self._forecast(job, run)

    def _halt(self, job: SimulatedJob, now: float, events: list[Event], *, checkpoint_every: float) -> None:
        """Stop a run from outside. It loses the work since its last checkpoint; 0: it has just written one."""
        run = job.run
        if isinstance(run, TaskStep):
            events.append(self._tasks.halt(job, run, now))
        elif run is not None:
            self._leave(job, run, now)
            job.steps = min(run.saved_at(now, checkpoint_every), job.total)
            if run.rate > 0:  # a trial on too few GPUs is an attempt of its own
                job.attempt_seconds += now - run.began if now > run.began else 0.0
            events.append(Stopped(job.id, run.epoch, job.steps))

    def _leave(self, job: SimulatedJob, run: SimulatedRun, now: float) -> None:
        """Take a run off its GPUs; a job that shared them goes on alone."""
        job.run = None
        del self._running[job.id]
        here = self._sharing[run.gpus]
        here.remove(job)
        if here:
            self._change_rates(here, now)
        else:
            del self._sharing[run.gpus]
            if self._divides:
                self._gpus.free(run.gpus)

    # Speeds

    def _rate_alone(self, job: SimulatedJob, gpus: Holding) -> float:
        """Return steps per second of a job that has these GPUs to itself; 0 on fewer than it can run on: a trial."""
        speed, asked = job.speed, job.trace.job
        if speed.tasks is not None:
            return speed.on(self._topology.mix(gpus), self._topology.locality(gpus))
        held = gpu_count(gpus)
        if held < asked.gpus and held < (asked.min_gpus or asked.gpus):
            return 0.0
        rates = speed.at(held) if speed.others else speed.rates
        return rates[self._topology.type_of[gpus[0].node]][self._topology.locality(gpus)]

    def _change_rates(self, here: list[SimulatedJob], now: float) -> None:
        """Give the jobs on the same GPUs the speed that they have together, and forecast their ends anew."""
        jobs = [job.trace.job for job in here]
        for mine, job in enumerate(here):
            run = job.run
            if isinstance(run, SimulatedRun):
                alone = self._rate_alone(job, run.gpus)
                gpu_type = self._topology.type_of[run.gpus[0].node]
                together = len(here) > 1 and self._truths.pair(jobs[mine], jobs[1 - mine])[gpu_type][0]
                run.change_rate(now, together or (alone / len(here)), self._truth.checkpoint_every)
                self._forecast(job, run)

    def _forecast(self, job: SimulatedJob, run: SimulatedRun) -> None:
        """Schedule the end of a run at its present speed; earlier forecasts become void."""
        seconds = (job.total - run.steps) / run.rate if run.rate > 0 else inf
        failure = job.seconds_to_failure() - (run.since - run.began)
        run.dies = failure < seconds
        run.forecast = next(self._numbers)
        heappush(self._ends, (run.since + min(seconds, failure), run.forecast, job, run))
