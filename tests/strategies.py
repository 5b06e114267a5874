"""Random worlds: clusters, traces, settings, outages and policies, small and full of ties on purpose.

Most of the time of a property test goes into drawing. So whatever is made of many small choices is drawn as one number
and decoded digit by digit, each digit an index into a list of options from the plainest to the oddest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

from hypothesis import strategies as st
from tests.builders import Story, simulate
from tests.whims import WHIMS, whim

from poise.lab.conformance import worlds as conformance
from poise.lab.conformance.laws import CheckedPolicy
from poise.lab.conformance.play import Play
from poise.lab.simulator.outages import Drain, Outage
from poise.lab.simulator.tasks import FREE, Switching
from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import FailedAttempt, JobOutcome, LossCurve, TraceJob
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence, RetryRule, Settings
from poise.scheduler.model.action import JournalEntry
from poise.scheduler.model.cluster import Cluster, Node
from poise.scheduler.model.job import Job
from poise.scheduler.model.plan import Order, Policy
from poise.scheduler.placement.strategies import PLACEMENTS
from poise.scheduler.policies.catalogue import POLICIES, capabilities_of, policy_named

VARIANTS = (
    "tiresias:limits=8/24",
    "tiresias:limits=8/24,promote=1",
    "tiresias:limits=5,promote=0.5,service=seconds",
    "tiresias-gittins:limits=8/24,samples=2",
    "tiresias-gittins:limits=12/40,samples=1,delta=best,promote=2",
    "stride:quantum=4",
    "stride:quantum=5,clamp=off",
    "gandiva:quantum=4,period=6",
    "gandiva:quantum=2.5,period=3,fragmented=0.3",
    "gandiva-fair:quantum=4,rest=8,cost=0",
    "optimus:interval=5",
    "optimus:interval=3,nodes=tightest",
    "philly:window=2,backoff=1.5,rack=1,any=2",
    "themis:lease=5",
    "themis:lease=3,f=0.4,error=0.2,payment=lease",
    "hlas:lease=5",
    "hlas:lease=4,long=0.01",
    "hlas:lease=3,long=0.3,guard=on",
    "hare:lease=5",
    "hare:lease=4,long=0.01",
    "hare:lease=3,long=0.3,recompute=2",
)
"""Catalogue entries with limits that small jobs reach."""

STABLE = (
    "fifo+stable",
    "fifo-skip+stable",
    "srtf+stable",
    "srsf+stable",
    "smallest-first+stable",
    "las+stable",
    "tiresias:limits=8/24,promote=1+stable",
)
AGNOSTIC = ("srtf+agnostic", "las+agnostic", "fifo-skip+agnostic", "tiresias:limits=8/24,promote=1+stable+agnostic")

SHARES = (
    "max-min:then=water-filling",
    "max-min+packed",
    "finish-time+agnostic",
    "makespan+plain",
    "max-min+partitioned:k=3+fallback:isolated",
    "hierarchical:inside=fifo,weights=1/3",
    "min-cost:form=sum",
    "fifo-fastest:sticky=off",
    "max-throughput:count=raw+packed",
)
"""Share policies in other forms than the default ones."""

ORDERS = tuple(spec for spec in (*POLICIES, *VARIANTS) if isinstance(policy_named(spec).answer, Order))
"""Every policy that is nothing but an order."""

named = st.sampled_from((*POLICIES, *VARIANTS, *SHARES, *STABLE, *AGNOSTIC))
"""Policies of the catalogue."""
policies = named | st.sampled_from(WHIMS)
placements = st.sampled_from(sorted(PLACEMENTS))
cadences = st.sampled_from(Cadence)

GPU_TYPES = ("gpu", "v100", "p100", "k80")
MOMENTS = (*map(float, range(13)), 0.0, 0.0, 1.0, 1.0, 0.25, 2.5, 3.75, 6.125, 7.3, 11.1)
GANGS = (1, 2, 4, 1, 2, 3, 4, 5, 6, 8, 9)
SECONDS = (1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 0.0, 0.125, 20.0, 12.5, 1.3, 3.7, 5.01, 7.123)
MODELS = (None, "ResNet50", "VGG16", None, "nobody knows this one")
WEIGHTS = (1.0, 2.0, 0.5)
CHOICES: tuple[tuple[str, ...], ...] = ((), (), (), (), ("v100",), ("k80", "gpu"))
OUTCOMES = (JobOutcome.PASSED, JobOutcome.PASSED, JobOutcome.PASSED, JobOutcome.PASSED, JobOutcome.FAILED, JobOutcome.KILLED)
DEATHS: tuple[tuple[float, ...], ...] = ((), (), (), (0.5,), (1.0, 3.0), (0.5, 0.5, 1.0, 0.0, 0.5))
CAUSES = ("died", "network-error", "gpu-ecc-error", "syntax-error", "core-dump")
BOUNDS = ((None, None), (None, None), (1, None), (None, 3), (1, 4), (2, 2))
"""Fewest GPUs, and how many beyond the gang."""
BATCHES: tuple[tuple[int | None, float], ...] = (
    (None, 0.0), (None, 0.0), (4, 0.0), (None, 0.0), (6, 0.0), (3, 0.25), (8, 0.0), (1, 0.0), (2, 0.125),
)  # fmt: skip
"""Tasks that a round divides into, and seconds of synchronisation."""
LOSSES = (None, None, LossCurve(0.5, 1.0, 0.1), LossCurve(0.0, 2.0, 0.0))
SWITCHING = (FREE, FREE, Switching(resident=0.125, size=6e9), None)
"""What it costs a GPU to turn to another job whose rounds divide."""
WAITS = ((0.0, 0.0), (0.0, 0.0), (2.0, 0.0), (0.7, 3.1), (0.0, 1.5), (20.0, 5.0))
"""Seconds for which jobs insist on few nodes, and on one rack."""


def choices(*options: Sequence[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """One choice of each list of options, drawn as one number."""
    total = prod(map(len, options))
    assert total < 2**24, "Hypothesis prefers small numbers where there are more"

    def decoded(number: int) -> tuple[Any, ...]:
        chosen = []
        for each in options:
            number, digit = divmod(number, len(each))
            chosen.append(each[digit])
        return tuple(chosen)

    return st.integers(0, total - 1).map(decoded)


@st.composite
def clusters(draw: st.DrawFn, *, most_types: int = 3, most_nodes: int = 5) -> Cluster:
    """One to three GPU types, racks, nodes of uneven sizes; the first node of each type is there."""
    first, types, racks = draw(choices(range(4), range(1, most_types + 1), range(1, 4)))
    kinds = [GPU_TYPES[(first + i) % 4] for i in range(types)]
    parts = draw(
        st.lists(choices((4, 2, 1, 4, 3, 8), range(racks), range(types)), min_size=types, max_size=max(types, most_nodes))
    )
    nodes = (Node(f"n{i}", kinds[i if i < types else kind], size, f"r{rack}") for i, (size, rack, kind) in enumerate(parts))
    return Cluster(tuple(nodes))


def traces(
    *,
    most: int = 14,
    gangs: Sequence[int] = GANGS,
    moments: Sequence[float] = MOMENTS,
    seconds: Sequence[float] = SECONDS,
    models: Sequence[str | None] = MODELS,
    types: Sequence[tuple[str, ...]] = CHOICES,
    trouble: bool = True,
) -> st.SearchStrategy[list[TraceJob]]:
    """Traces with many equal submission times and durations, by submission."""
    world = (OUTCOMES, DEATHS) if trouble else (OUTCOMES[:1], DEATHS[:1])
    each = choices(gangs, moments, seconds, models, WEIGHTS, types, *world)
    return st.lists(each, min_size=1, max_size=most).map(_trace)


def _trace(parts: list[tuple[Any, ...]]) -> list[TraceJob]:
    jobs = []
    for i, (gpus, at, seconds, model, weight, types, outcome, dies) in enumerate(sorted(parts, key=lambda part: part[1])):
        job = Job(f"j{i}", at, gpus, seconds, model=model, weight=weight, gpu_types=types)
        jobs.append(TraceJob(job, outcome, tuple(FailedAttempt(after, "died") for after in dies)))
    return jobs


def varied(jobs: list[TraceJob], number: int) -> list[TraceJob]:
    """The same jobs, some of them elastic, reporting their loss, of an app, or dying of something else; 0: all plain."""
    return [_varied(each, number * (2 * i + 1)) for i, each in enumerate(jobs)] if number else jobs


def divided(jobs: list[TraceJob], number: int) -> list[TraceJob]:
    """The same jobs, the rounds of some of them dividing into tasks; 0: of none. Synchronisation is of steps of a second."""
    return [_divided(each, number // (len(BATCHES) ** (i % 6))) for i, each in enumerate(jobs)]


def _divided(each: TraceJob, number: int) -> TraceJob:
    batches, sync = BATCHES[number % len(BATCHES)]
    if batches is None:
        return each
    sync = sync if each.job.model is None else 0.0
    return replace(each, job=replace(each.job, micro_batches=batches, sync=sync, min_gpus=None, max_gpus=None))


def _varied(each: TraceJob, number: int) -> TraceJob:
    chosen: list[Any] = []
    for options in (BOUNDS, LOSSES, CAUSES, (None, "sweep"), ("default", "other")):
        number, digit = divmod(number, len(options))
        chosen.append(options[digit])
    (least, beyond), loss, cause, app, tenant = chosen
    gpus = each.job.gpus
    least, most = least and min(least, gpus), beyond and gpus + beyond
    job = replace(each.job, app=app, tenant=tenant, min_gpus=least, max_gpus=most)
    return replace(each, job=job, failures=tuple(FailedAttempt(after, cause) for after, _ in each.failures), loss=loss)


@st.composite
def settings(draw: st.DrawFn, *, cadence: st.SearchStrategy[Cadence] = cadences, guidelines: bool = False) -> Settings:
    """Short rounds, some overhead, some protection. No time slice is as short as the overhead.

    With guidelines, jobs may wait for locality, be moved, be tried out, and be retried by what they died of.
    """
    rounds, overheads, protections = (3.0, 2.0, 10.0, 2.7), (0.0, 0.0, 0.25, 0.5), (0.0, 0.0, 2.0, 7.0)
    plain = Settings(draw(cadence), *draw(choices(rounds, (True, False), overheads, protections, (3, 0, 1))))
    if not guidelines:
        return plain
    (packed, rack), moves, pool, trial, retry, backoff = draw(
        choices(WAITS, (0.0, 0.0, 1.0, 3.3), (0, 0, 1, 3), (1.0, 0.6, 4.0), tuple(RetryRule), (1.0, 0.0, 0.3))
    )
    return replace(
        plain, packed_wait=packed, rack_wait=rack, defragment=moves,
        validation_gpus=pool, validation_time=trial, retry=retry, backoff=backoff,
    )  # fmt: skip


def fitted(how: Settings, cluster: Cluster) -> Settings:
    """The same, with a validation pool that leaves at least one GPU for the jobs."""
    return replace(how, validation_gpus=min(how.validation_gpus, cluster.gpus - 1))


@st.composite
def outages(draw: st.DrawFn, cluster: Cluster, *, forever: bool = False, stays: bool = True) -> list[Outage | Drain]:
    """Up to four lost or drained nodes, overlapping at will; of some drained ones only every second GPU is closed.

    stays   whether runs may be left where they are
    """
    durations = (1.0, 0.0, 5.0, 20.0, *((inf,) if forever else ()))
    each = choices(MOMENTS, range(len(cluster.nodes)), durations, (0, 1, 0, 2), (True, not stays))
    found: list[Outage | Drain] = []
    for time, node, duration, step, leaves in draw(st.lists(each, max_size=4)):
        slots = tuple(range(0, cluster.nodes[node].gpus, step or 1))
        found.append(Drain(time, node, duration, slots, leaves) if step else Outage(time, node, duration))
    return found


@dataclass(frozen=True)
class World:
    """Everything that a simulation depends on."""

    jobs: list[TraceJob]
    cluster: Cluster
    policy: str
    placement: str
    settings: Settings
    outages: list[Outage | Drain]
    truth: Truth

    def __repr__(self) -> str:
        jobs = "\n".join(
            f"  {e.job.id}: at {e.job.submitted} {e.job.gpus} GPUs {e.job.duration}s {e.job.model} w{e.job.weight}"
            f" {'/'.join(e.job.gpu_types)} {e.outcome} {[tuple(each) for each in e.failures]}"
            f" {e.job.min_gpus}..{e.job.max_gpus} {e.loss or ''} K={e.job.micro_batches} sync {e.job.sync}"
            for e in self.jobs
        )
        nodes = " ".join(f"{node.gpu_type}*{node.gpus}@{node.rack}" for node in self.cluster.nodes)
        return f"World({nodes}\n{jobs}\n  {self.policy} {self.placement} {self.settings} {self.outages} {self.truth})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    @property
    def at_no_cost(self) -> "World":
        """The same, where it costs a GPU nothing to turn to a job whose rounds divide."""
        return replace(self, truth=replace(self.truth, switching=FREE))

    @property
    def how(self) -> Policy:
        """The policy itself."""
        return whim(self.policy) if self.policy in WHIMS else policy_named(self.policy)

    def judged(self, story: Story) -> tuple[CheckedPolicy, Play]:
        """The policy and what happened, as the laws of `poise check-policy` look at them."""
        can = frozenset() if self.policy in WHIMS else capabilities_of(self.policy)
        where = conformance.World(
            tuple(self.jobs), self.cluster, self.placement, self.settings, tuple(self.outages), self.truth
        )
        played = Play(self.how, where, tuple(story.entries), story.scheduler, story.speeds)
        return CheckedPolicy(lambda: self.how, lambda: self.how, None, can), played

    def played(self, watch: Callable[[Scheduler, JournalEntry], None] | None = None) -> Story:
        """What happens in this world."""
        return simulate(
            self.jobs,
            self.how,
            self.cluster,
            placement=self.placement,
            settings=self.settings,
            truth=self.truth,
            outages=self.outages,
            watch=watch,
        )


@st.composite
def worlds(
    draw: st.DrawFn,
    *,
    policy: st.SearchStrategy[str] = policies,
    cadence: st.SearchStrategy[Cadence] = cadences,
    trouble: bool = True,
    forever: bool = False,
    plain: bool = False,
    divides: bool | None = None,
) -> World:
    """A random world; without trouble nothing fails and no node is lost, a plain one has rigid jobs and no guidelines.

    Rounds of training may divide into tasks, unless the world is plain or `divides` says otherwise.
    """
    cluster = draw(clusters())
    how = fitted(draw(settings(cadence=cadence, guidelines=not plain)), cluster)
    jobs = varied(draw(traces(trouble=trouble)), 0 if plain else draw(st.integers(0, 50_000)))
    may_divide = not plain if divides is None else divides
    switching = draw(st.sampled_from(SWITCHING)) if may_divide else FREE
    return World(
        jobs=divided(jobs, draw(st.integers(0, len(BATCHES) ** 6 - 1))) if may_divide else jobs,
        cluster=cluster,
        policy=draw(policy),
        placement=draw(placements),
        settings=how,
        outages=draw(outages(cluster, forever=forever)) if trouble else [],
        truth=Truth(how.restart_overhead, draw(st.sampled_from((0.0, 1.0, 600.0))), report_every=1.5, switching=switching),
    )
