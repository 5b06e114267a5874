"""What the tests are written with: builders with sensible defaults, one way to simulate, and a story that can be asked.

Random worlds are in `tests/strategies.py`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TypeVar

from poise.engine.assembly import with_rounds
from poise.lab.simulator.outages import Drain, Outage
from poise.lab.simulator.world import ReportedSpeeds, Simulator, Truth
from poise.lab.traces.schema import FailedAttempt, JobOutcome, TraceJob
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import Action, Cancel, Compute, JournalEntry, Launch, Preempt
from poise.scheduler.model.cluster import Cluster, Holding, Node, Slots, gpu_count, merged, parse_cluster
from poise.scheduler.model.event import (
    Cancelled,
    Computed,
    Event,
    Failed,
    Finished,
    NodeLost,
    Submitted,
    Synchronised,
)
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.plan import Grain, Policy
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import Topology
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import Capability, capabilities_of, policy_named
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import shipped

EVENTS = Settings(cadence=Cadence.EVENTS)
"""Decide at every change: the setting in which exact claims are made."""

MOST_INSTANTS = 4_000
"""More than any small trace needs: a simulation that comes so far goes round in circles."""

A = TypeVar("A", bound=Action)
E = TypeVar("E", bound=Event)

Ending = Finished | Failed | Cancelled | NodeLost | Synchronised | Preempt | Cancel


def a_job(
    name: str = "job",
    *,
    at: float = 0.0,
    gpus: int = 1,
    seconds: float = 10.0,
    weight: float = 1.0,
    model: str | None = None,
    gpu_types: tuple[str, ...] = (),
    outcome: JobOutcome = JobOutcome.PASSED,
    dies: tuple[float, ...] = (),
    batches: int | None = None,
    sync: float = 0.0,
) -> TraceJob:
    """A job of so many seconds on the reference type, whose attempts die after these running times.

    batches   tasks that a step of it divides into;  sync: seconds that it takes to put them together
    """
    job = Job(name, at, gpus, seconds, weight=weight, model=model, gpu_types=gpu_types, micro_batches=batches, sync=sync)
    return TraceJob(job, outcome, tuple(FailedAttempt(after, "out of memory") for after in dies))


def a_cluster(spec: str = "gpu:4", *, racks: int = 1) -> Cluster:
    """The cluster of a specification, its nodes dealt out to racks in turn."""
    cluster = parse_cluster(spec)
    nodes = (Node(n.name, n.gpu_type, n.gpus, f"rack-{i % racks}") for i, n in enumerate(cluster.nodes))
    return Cluster(tuple(nodes), cluster.speeds, cluster.prices)


def nodes(*sizes: int, racks: Iterable[int] = (), gpu_type: str = "gpu") -> Cluster:
    """A cluster of one type with nodes of these sizes, in these racks."""
    where = [*racks] or [0] * len(sizes)
    pairs = zip(sizes, where, strict=True)
    return Cluster(tuple(Node(f"n{i}", gpu_type, size, f"rack-{rack}") for i, (size, rack) in enumerate(pairs)))


def a_table(gpu_type: str = "v100", **rates: float) -> Throughputs:
    """A throughput table in which a model does so many steps a second on one GPU of the reference type."""
    rows = [Alone(JobClass(model), gpu_type, 1, Locality.PACKED, rate) for model, rate in rates.items()]
    return Throughputs.of("test", gpu_type, rows)


@dataclass(frozen=True)
class Run:
    """One run of a job: from its launch to its end, and what ended it; None: the world stopped while it ran.

    At the grain of tasks, `gpus` are all that took part, and `used` is when each task had its GPUs: (from, to, GPUs).
    """

    job: str
    epoch: int
    gpus: Holding
    began: float
    ended: float = inf
    ending: Ending | None = None
    grain: Grain = Grain.LEASE
    used: tuple[tuple[float, float, Holding], ...] = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def spells(self) -> list[tuple[float, float, int]]:
        """From when until when the run had how many GPUs."""
        spells = self.used if self.grain is Grain.TASK else ((self.began, self.ended, self.gpus),)
        return [(began, ended, gpu_count(gpus)) for began, ended, gpus in spells]

    @property
    def gpu_seconds(self) -> float:
        return sum((ended - began) * gpus for began, ended, gpus in self.spells)


@dataclass
class Story:
    """What happened in a simulation: its journal, and the scheduler as it was left."""

    entries: list[JournalEntry]
    scheduler: Scheduler
    cluster: Cluster
    jobs: list[TraceJob]
    speeds: Speeds = field(repr=False)
    """True speeds."""

    def actions(self, kind: type[A]) -> list[tuple[float, A]]:
        """All actions of one kind with their moments."""
        return [(entry.now, each) for entry in self.entries for each in entry.actions if isinstance(each, kind)]

    def events(self, kind: type[E]) -> list[tuple[float, E]]:
        """All facts of one kind with their moments."""
        return [(entry.now, each) for entry in self.entries for each in entry.events if isinstance(each, kind)]

    @cached_property
    def finishes(self) -> dict[str, float]:
        """When each job finished."""
        return {fact.job: now for now, fact in self.events(Finished)}

    @cached_property
    def starts(self) -> dict[str, float]:
        """When each job started first, in the order of starting."""
        starts: dict[str, float] = {}
        for now, _, actions in self.entries:
            for action in actions:
                if isinstance(action, Launch | Compute) and action.epoch == 1:
                    starts.setdefault(action.job, now)
        return starts

    @property
    def preemptions(self) -> int:
        return len(self.actions(Preempt))

    @property
    def completion_times(self) -> dict[str, float]:
        submitted = {fact.job.id: fact.job.submitted for _, fact in self.events(Submitted)}
        return {job: finished - submitted[job] for job, finished in self.finishes.items()}

    def status(self, job: str) -> Status:
        state = self.scheduler.state
        return Status(state.columns.status[state.rows[job]])

    @cached_property
    def runs(self) -> list[Run]:
        """Every run, by the moment of its launch; reconstructed from events and actions alone."""
        return sorted(_runs(self.entries), key=lambda run: (run.began, run.job))

    def runs_of(self, job: str) -> list[Run]:
        return [each for each in self.runs if each.job == job]

    def rate(self, run: Run) -> float:
        """True steps a second of a run; 0 on fewer GPUs than the job can do with."""
        job = next(each.job for each in self.jobs if each.job.id == run.job)
        topology, gpus = Topology(self.cluster), gpu_count(run.gpus)
        estimate = self.speeds.estimate(job)
        if estimate.tasks is not None:
            return estimate.on(topology.mix(run.gpus), topology.locality(run.gpus))
        rates = estimate.at(gpus)
        is_enough = gpus >= (job.min_gpus or job.gpus)
        return rates[topology.type_of[run.gpus[0].node]][topology.locality(run.gpus)] if is_enough else 0.0

    def is_trial(self, gpus: Holding) -> bool:
        """These GPUs are set aside for trials."""
        return gpus[0] in self.scheduler.state.pool.slots


class _Book:
    """Runs under way, by job."""

    def __init__(self) -> None:
        self.open: dict[str, Run] = {}
        self.closed: list[Run] = []
        self.busy: dict[str, dict[int, int]] = {}
        self.since: dict[tuple[int, int], float] = {}

    def close(self, job: str, now: float, ending: Ending) -> None:
        if (run := self.open.pop(job, None)) is not None:
            for node, mask in self.busy.pop(job, {}).items():
                run = _with_task(run, self.since, now, node, mask)
            self.closed.append(replace(run, ended=now, ending=ending))

    def read(self, now: float, fact: Event) -> None:
        match fact:
            case Finished() | Failed() | Cancelled() | Synchronised():
                self.close(fact.job, now, fact)
            case NodeLost(node):
                for job in [job for job, run in self.open.items() if self.is_on(run, node)]:
                    self.close(job, now, fact)
            case Computed(job, _, gpus):
                for node, mask in gpus:
                    self.busy[job][node] &= ~mask
                    self.open[job] = _with_task(self.open[job], self.since, now, node, mask)
            case _:
                pass

    def is_on(self, run: Run, node: int) -> bool:
        if run.grain is Grain.TASK:
            return self.busy[run.job].get(node, 0) > 0
        return any(slots.node == node for slots in run.gpus)

    def carry_out(self, now: float, action: Action) -> None:
        if isinstance(action, Preempt | Cancel):
            self.close(action.job, now, action)
        elif isinstance(action, Launch):
            assert action.job not in self.open, f"{action.job} was launched while it ran"
            self.open[action.job] = Run(action.job, action.epoch, action.gpus, now)
        elif isinstance(action, Compute):
            run = self.open.setdefault(action.job, Run(action.job, action.epoch, (), now, grain=Grain.TASK))
            assert (run.epoch, run.grain) == (action.epoch, Grain.TASK), (
                f"{action.job} was to compute while it ran otherwise"
            )
            self.open[action.job] = replace(run, gpus=merged((*run.gpus, *action.gpus)))
            busy = self.busy.setdefault(action.job, {})
            for node, mask in action.gpus:
                assert not busy.get(node, 0) & mask, f"{action.job} computes two tasks on one GPU at once"
                busy[node] = busy.get(node, 0) | mask
                self.since |= {(node, bit): now for bit in _bits(mask)}


def _bits(mask: int) -> list[int]:
    return [1 << bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def _with_task(run: Run, since: dict[tuple[int, int], float], now: float, node: int, mask: int) -> Run:
    """These GPUs have done their tasks, or given them up."""
    done = tuple((since[node, bit], now, (Slots(node, bit),)) for bit in _bits(mask))
    return replace(run, used=(*run.used, *done))


def _runs(entries: list[JournalEntry]) -> list[Run]:
    book = _Book()
    for now, events, actions in entries:
        for fact in events:
            book.read(now, fact)
        for action in actions:
            book.carry_out(now, action)
    return [*book.closed, *book.open.values()]


def simulate(
    jobs: Iterable[TraceJob],
    policy: str | Policy = "fifo",
    cluster: str | Cluster = "gpu:4",
    *,
    placement: str = "count",
    settings: Settings = EVENTS,
    truth: Truth | None = None,
    believed: Throughputs | None = None,
    true: Throughputs | None = None,
    outages: Iterable[Outage | Drain] = (),
    until: float = inf,
    watch: Callable[[Scheduler, JournalEntry], None] | None = None,
) -> Story:
    """Simulate a trace; jobs are put into order of submission first, equal ones as given.

    The world has the restart overhead that the settings tell the core of, unless `truth` says otherwise. `watch` is shown
    the scheduler after every instant.
    """
    where = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    trace = sorted(jobs, key=lambda each: each.job.submitted)
    beliefs = Speeds(believed or shipped(), where)
    truths = Speeds(true, where) if true else beliefs
    how = policy_named(policy) if isinstance(policy, str) else policy
    costs = truth or Truth(restart_overhead=settings.restart_overhead)
    has_pairs = isinstance(policy, str) and Capability.PAIRS in capabilities_of(policy)
    costs = replace(costs, reported_speeds=ReportedSpeeds.PAIRS if has_pairs else ReportedSpeeds.ALONE)
    world = Simulator(
        trace,
        where,
        beliefs=beliefs,
        truths=truths,
        truth=costs,
        outages=outages,
        until=until,
    )
    scheduler = Scheduler(where, with_rounds(how, settings), placement_named(placement), settings)
    entries: list[JournalEntry] = []
    for now, events in world.batches():
        actions = scheduler.handle(now, events)
        world.apply(now, actions)
        entries.append(JournalEntry(now, events, actions))
        if watch is not None:
            watch(scheduler, entries[-1])
        assert len(entries) < MOST_INSTANTS + 100 * len(trace), f"goes round in circles at {entries[-1]}"
    return Story(entries, scheduler, where, trace, truths)
