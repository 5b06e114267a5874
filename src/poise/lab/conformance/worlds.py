"""Small worlds to check a policy in: a few that each have one oddity, and random ones with many at once.

Everything about a world can be written as a trace, a file of outages and options of `poise simulate`, so that a
counterexample can be kept and run again.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from shlex import quote

from poise.lab.simulator.outages import Drain, Outage
from poise.lab.simulator.world import Truth
from poise.lab.traces.formats.poise import write_trace
from poise.lab.traces.schema import FailedAttempt, JobOutcome, LossCurve, Trace, TraceJob
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.cluster import Cluster, parse_cluster
from poise.scheduler.model.job import Job

_EVENTS = Settings(cadence=Cadence.EVENTS)
_MOMENTS = (*map(float, range(10)), 0.0, 0.0, 1.0, 1.0, 0.25, 2.5, 7.3)
_SECONDS = (1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 0.0, 0.125, 20.0, 12.5, 3.7)
_GANGS = (1, 2, 4, 1, 2, 3, 4, 5, 6, 8)
_MODELS = (None, "ResNet50", None, "VGG16", None)
_CLUSTERS = ("gpu:4", "gpu:8", "v100:4,k80:4", "v100:2@1,p100:4@2,k80:3@3", "k80:6@2", "gpu:1")
_DEADLINES = (None, None, 5.0, 10.0, 40.0)
_TYPES: tuple[tuple[str, ...], ...] = ((), (), (), ("v100",), ("k80", "gpu"))
_BOUNDS = ((None, None), (None, None), (1, None), (None, 2), (1, 2))
_DEATHS: tuple[tuple[FailedAttempt, ...], ...] = (
    (), (), (), (FailedAttempt(0.5, "cuda-failure"),), (FailedAttempt(1.0, "node-failure"), FailedAttempt(0.25, "x")),
)  # fmt: skip
_OUTCOMES = (*(JobOutcome.PASSED,) * 4, JobOutcome.FAILED, JobOutcome.KILLED)


@dataclass(frozen=True)
class World:
    """Everything that a simulation depends on except the policy."""

    jobs: tuple[TraceJob, ...]
    cluster: Cluster
    placement: str = "consolidate"
    settings: Settings = _EVENTS
    outages: tuple[Outage | Drain, ...] = ()
    truth: Truth | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all jobs are rigid gangs, and each waits for nothing but GPUs."""
        waits = self.settings.packed_wait or self.settings.rack_wait
        return not waits and all(
            each.job.micro_batches is each.job.min_gpus is each.job.max_gpus is None and not each.failures
            for each in self.jobs
        )

    @property
    def costs(self) -> Truth:
        """What running costs: by default starts cost what the core is told."""
        return self.truth or Truth(self.settings.restart_overhead)


def odd_worlds() -> Iterator[World]:
    """Worlds with one oddity each."""

    def jobs(count: int, gpus: int = 1, seconds: float = 4.0, apart: float = 0.0) -> tuple[TraceJob, ...]:
        return tuple(TraceJob(Job(f"j{place}", place * apart, gpus, seconds)) for place in range(count))

    def each(several: tuple[TraceJob, ...], **fields: object) -> tuple[TraceJob, ...]:
        return tuple(replace(one, job=replace(one.job, **fields)) for one in several)  # type: ignore[arg-type]

    few = parse_cluster("gpu:4")
    mixed = parse_cluster("v100:4,k80:4")
    yield World((), few)
    yield World(jobs(1), parse_cluster("gpu:1"))
    yield World(jobs(2, seconds=0.0), few)
    yield World(jobs(8, gpus=2), few)
    line = enumerate(jobs(5, gpus=4, apart=1.0))  # the later, the shorter
    yield World(tuple(replace(one, job=replace(one.job, duration=10.0 - 2 * i)) for i, one in line), few)
    gap = zip(jobs(3, seconds=9.0, apart=1.0), (3, 4, 1), strict=True)  # the second does not fit, the third does
    yield World(tuple(replace(one, job=replace(one.job, gpus=gpus)) for one, gpus in gap), few)
    yield World(jobs(3, gpus=8), few)  # larger than the cluster: rejected
    yield World(each(jobs(6, gpus=2), gpu_types=("k80",)), mixed)  # nobody wants the V100s
    yield World((*jobs(3), *each(jobs(6, gpus=4)[3:], submitted=100.0)), few)  # idle in between
    yield World(jobs(4, gpus=2, apart=1.0), few, outages=(Outage(2.0, 0, 5.0),))  # for a while there is no GPU at all
    yield World(jobs(4, gpus=2, apart=1.0), mixed, outages=(Drain(2.0, 0, 50.0, (0, 1, 2, 3)),))
    yield World(jobs(4, gpus=2, apart=1.0), mixed, settings=replace(_EVENTS, minimum_run=30.0))
    yield World(each(jobs(4, gpus=4, apart=1.0), min_gpus=1, max_gpus=8), mixed)
    yield World(each(jobs(3, gpus=4, seconds=3.0, apart=1.0), micro_batches=8), mixed)
    died = (FailedAttempt(1.0, "cuda-failure"), FailedAttempt(0.5, "cuda-failure"))
    yield World(tuple(replace(one, failures=died, outcome=JobOutcome.KILLED) for one in jobs(3, gpus=2)), few)
    tenants = tuple(replace(one, job=replace(one.job, tenant=f"t{i % 3}", weight=1.0 + i)) for i, one in enumerate(jobs(9)))
    yield World(tenants, few)
    due = tuple(
        replace(one, job=replace(one.job, deadline=3.0 * i, priority=i - 2)) for i, one in enumerate(jobs(6, gpus=2))
    )
    yield World(due, few)


def random_world(seed: int) -> World:
    """The world of a seed; every other one is plain."""
    draw = Random(seed)
    is_plain = seed % 2 == 0
    cluster = parse_cluster(draw.choice(_CLUSTERS))
    count = draw.randint(1, 10)
    jobs = tuple(_job(f"j{place}", draw, is_plain=is_plain) for place in range(count))
    settings = Settings(
        cadence=draw.choice(tuple(Cadence)) if not is_plain else Cadence.EVENTS,
        round=draw.choice((3.0, 2.0, 10.0)),
        backfill=draw.random() < 0.5,
        restart_overhead=draw.choice((0.0, 0.0, 0.25)),
        minimum_run=draw.choice((0.0, 0.0, 2.0)),
    )
    outages: list[Outage | Drain] = []
    for _ in range(0 if is_plain else draw.randint(0, 2)):
        node, at, lasts = draw.randrange(len(cluster.nodes)), draw.choice(_MOMENTS), draw.choice((1.0, 5.0, 20.0))
        slots = tuple(range(0, cluster.nodes[node].gpus, draw.choice((1, 2))))
        outages.append(draw.choice((Outage(at, node, lasts), Drain(at, node, lasts, slots))))
    in_order = sorted(jobs, key=lambda one: one.job.submitted)
    placement = draw.choice(("consolidate", "count", "best-fit", "spread"))
    return World(tuple(in_order), cluster, placement, settings, tuple(outages))


def _job(name: str, draw: Random, *, is_plain: bool) -> TraceJob:
    submitted, due = draw.choice(_MOMENTS), draw.choice(_DEADLINES)
    job = Job(
        name, submitted, draw.choice(_GANGS), draw.choice(_SECONDS),
        tenant=draw.choice(("default", "default", "other")), app=draw.choice((None, None, "sweep")),
        model=draw.choice(_MODELS), weight=draw.choice((1.0, 2.0, 0.5)), priority=draw.choice((0, 0, 5, -1)),
        deadline=None if due is None else submitted + due, gpu_types=draw.choice(_TYPES),
    )  # fmt: skip
    if is_plain:
        return TraceJob(job)
    if draw.random() < 0.2:
        job = replace(job, micro_batches=draw.choice((1, 3, 8)))
    else:
        least, beyond = draw.choice(_BOUNDS)
        job = replace(job, min_gpus=least and min(least, job.gpus), max_gpus=beyond and job.gpus + beyond)
    loss = draw.choice((None, None, LossCurve(0.5, 1.0, 0.1)))
    return TraceJob(job, draw.choice(_OUTCOMES), draw.choice(_DEATHS), loss)


# A world as files and options


def write_world(world: World, trace: Path) -> list[str]:
    """Write the trace of a world, and beside it a file of outages if it has any; return the options for the rest."""
    with trace.open("w", encoding="utf-8") as stream:
        write_trace(Trace(trace.name, world.jobs), stream)
    how, usual = world.settings, Settings()
    options = ["--cluster", str(world.cluster)]
    if world.placement != "consolidate":
        options += ["--placement", world.placement]
    if how.cadence is not usual.cadence:
        options += ["--cadence", str(how.cadence)]
    for name in ("round", "restart_overhead", "minimum_run"):
        if getattr(how, name) != getattr(usual, name):
            options += [f"--{name.replace('_', '-')}", f"{getattr(how, name):g}"]
    if how.backfill != usual.backfill:
        options.append("--backfill" if how.backfill else "--no-backfill")
    if world.outages:
        faults = trace.with_suffix(".faults.jsonl")
        faults.write_text("".join(map(_outage_line, world.outages, [world.cluster] * len(world.outages))), encoding="utf-8")
        options += ["--faults", str(faults)]
    return [quote(each) for each in options]


def _outage_line(outage: Outage | Drain, cluster: Cluster) -> str:
    row: dict[str, object] = {"node": cluster.nodes[outage.node].name, "time": outage.time, "duration": outage.duration}
    if isinstance(outage, Drain):
        row |= {"drain": True, "slots": list(outage.slots)}
    return json.dumps(row) + "\n"


# Smaller worlds


def smaller(world: World) -> Iterator[World]:
    """Worlds that are simpler than this one, the much simpler ones first."""
    return (candidate for candidate in _simplified(world) if candidate != world)


def _simplified(world: World) -> Iterator[World]:
    count = len(world.jobs)
    size = count // 2
    while size:
        for first in range(0, count, size):
            yield replace(world, jobs=world.jobs[:first] + world.jobs[first + size :])
        size //= 2
    for place in range(len(world.outages)):
        yield replace(world, outages=world.outages[:place] + world.outages[place + 1 :])
    if world.settings != _EVENTS:
        yield replace(world, settings=_EVENTS)
        yield replace(world, settings=replace(world.settings, restart_overhead=0.0))
        yield replace(world, settings=replace(world.settings, minimum_run=0.0))
        yield replace(world, settings=replace(world.settings, cadence=Cadence.EVENTS))
    if world.placement != "consolidate":
        yield replace(world, placement="consolidate")
    for place, each in enumerate(world.jobs):
        for plainer in _plainer(each):
            yield replace(world, jobs=(*world.jobs[:place], plainer, *world.jobs[place + 1 :]))


def _plainer(each: TraceJob) -> Iterator[TraceJob]:
    """The same job with one thing less to it."""
    if each != (bare := TraceJob(each.job)):
        yield bare
    job = each.job
    usual = Job(job.id, job.submitted, 1, 1.0)
    for name in (
        "tenant", "app", "model", "weight", "priority", "deadline", "gpu_types", "micro_batches", "min_gpus", "max_gpus",
        "duration", "gpus",
    ):  # fmt: skip
        if getattr(job, name) == getattr(usual, name) or (name == "gpus" and (job.min_gpus or job.max_gpus)):
            continue
        yield replace(each, job=replace(job, **{name: getattr(usual, name)}))
