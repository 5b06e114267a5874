"""`poise bench solve`: time one answer of a policy on a random workload.

`time_policy` draws the workload, has the policy answer several times, and reports CPU seconds of all threads of the process;
drawing is not in them. For share policies that is an allocation; for Themis an auction, in which each app bids and half a
GPU per app is free; for Hare a plan, from the relaxation to the last task on its GPU.

Workloads are drawn after Gavel's generator of jobs: gangs, durations, one job in five of weight 5. The cluster is crowded,
so that an answer has to choose. Unless classes are asked for, no two jobs are equally fast anywhere: the hard case, since
nothing can be grouped. Everything is made of `Generator.random`, whose stream numpy keeps from version to version, with one
generator per column, so that a choice changes its own column and what depends on it, and no other.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf, nan
from time import process_time
from typing import TypeVar, cast

import numpy as np

from poise.lab.traces import distributions
from poise.lab.traces.parsing import FieldError
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.job import Job
from poise.scheduler.model.job_table import JobTable, Snapshot
from poise.scheduler.model.plan import Policy
from poise.scheduler.model.speed import Estimate
from poise.scheduler.model.topology import PlacementView, Topology
from poise.scheduler.model.workload import Allocation, Allocator, Workload
from poise.scheduler.policies.catalogue import Capability, capabilities_of
from poise.scheduler.policies.hare.list_schedule import GpuPool, RoundWork, schedule
from poise.scheduler.policies.themis.auction import Sale
from poise.scheduler.policies.themis.bidders import AppRegistry
from poise.scheduler.policies.themis.planner import Themis

CLASSES_OF_PAIRS = 26
"""Classes of jobs where GPUs are shared: pairs are measured between classes, and Gavel measured 26 of them."""
MOST_KINDS_OF_PAIRS = 2_000
"""Limit on kinds of jobs where GPUs are shared: the table of pairs is quadratic in them."""
ONE_GPU = "1:1"
"""Gangs of a draw in which each job wants one GPU."""
CROWDING = 4.0
"""GPUs asked for ÷ GPUs of the cluster."""
TENANTS = 5
MOST_OF_SWEEP = 8
"""Jobs of an app that bids, at most."""
SPREAD_OUT = 0.8
"""Speed of a gang over more nodes than it needs, as a part of its packed speed."""
MOST_ROUNDS = 100
"""Rounds that a job has left, at most, where tasks are planned one by one."""
_SYNC = 0.05
"""Synchronisation of a round, as a part of the seconds of a task on the fastest type."""
_SPREAD = 8.0
"""Power of the fastest GPU type ÷ that of the slowest."""
_SCALING = 0.9
"""A gang of g GPUs is g to this power as fast as one GPU."""
_UNFIT = 0.05
"""Fraction of GPU types, other than the fastest, on which a class of jobs cannot run; and of pairs that do not fit."""
_DEAREST = 2.5
"""Price of the fastest GPU type; the others cost in proportion to their power."""
_COLUMNS = ("classes", "gangs", "speeds", "durations", "progress", "weights", "tenants", "pairs", "sweeps", "rounds")
"""Each has a generator of its own, by its place here: add at the end only."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WorkloadDraw:
    """What to draw; the same draw is always the same workload.

    classes   of jobs: those of one class and gang are equally fast; None if no two jobs are
    gpus      in all, as even over the types as can be; None for one GPU for each `CROWDING` that are asked for, and of
              each type enough for the largest gang
    gangs     `gavel`, or SIZE:SHARE/SIZE:SHARE/...; None for those that suit the policy
    """

    jobs: int
    types: int = 3
    seed: int = 0
    classes: int | None = None
    gpus: int | None = None
    gangs: str | None = None


@dataclass(frozen=True, slots=True)
class SolveTiming:
    """CPU seconds of each repeat, and the objective, which is the same each time.

    bound   limit that no answer can pass, if the policy knows one
    """

    seconds: tuple[float, ...]
    objective: float
    gpus: int
    types: int
    bound: float = nan

    @property
    def best(self) -> float:
        """The least: other work of the machine can only add."""
        return min(self.seconds)


# Timing


def time_policy(policy: Policy, draw: WorkloadDraw, repeats: int, done: Callable[[int], None]) -> SolveTiming:
    """Time the policy on a draw that `with_defaults` completed; `done` is called with the number of finished repeats.

    Raises RequestError for a bad draw, or for a policy that is not timed.
    """
    can = capabilities_of(policy.name)
    if Capability.AUCTIONS in can:
        return time_auction(cast(Themis, policy.answer), draw, repeats, done)
    if Capability.LISTS_TASKS in can:
        return time_plan(draw, repeats, done)
    return time_allocation(allocator_of(policy), draw_for(policy, draw), repeats, done)[0]


def time_allocation(
    allocator: Allocator, workload: Workload, repeats: int, done: Callable[[int], None]
) -> tuple[SolveTiming, Allocation]:
    """Time allocations, each on fresh memory."""
    memories = iter([allocator.start() for _ in range(repeats)])
    seconds, allocation = _timed(lambda: allocator.allocate(workload, next(memories))[0], repeats, done)
    return SolveTiming(seconds, allocation.objective, int(workload.gpus.sum()), workload.types), allocation


def allocator_of(policy: Policy) -> Allocator:
    """The allocator of a policy. Raises RequestError if the policy does not answer with shares."""
    if not isinstance(policy.answer, Allocator):
        raise RequestError(f"bench solve times policies that answer with shares, themis and hare; not {policy.name!r}")
    return policy.answer


def time_auction(themis: Themis, draw: WorkloadDraw, repeats: int, done: Callable[[int], None]) -> SolveTiming:
    """Time auctions in which all apps bid for the same free GPUs: bids, the optimum, payments, placement, leftovers."""
    snapshot = draw_apps(draw)
    roll = AppRegistry().at(snapshot)
    rules = replace(themis, f=0.0)
    nothing = np.zeros(len(snapshot.active), dtype=bool)

    def auction() -> Sale:
        sale = Sale(rules, snapshot, roll, 0)
        sale.auction(nothing)
        return sale

    seconds, sale = _timed(auction, repeats, done)
    return SolveTiming(seconds, sale.worth, snapshot.gpus, 1)


def time_plan(draw: WorkloadDraw, repeats: int, done: Callable[[int], None]) -> SolveTiming:
    """Time Hare's list: the relaxation, the order of all tasks, and each task on its GPU."""
    jobs, gpus = draw_rounds(draw)
    seconds, plan = _timed(lambda: schedule(jobs, gpus), repeats, done)
    return SolveTiming(seconds, plan.value, len(gpus.kinds), draw.types, plan.bound)


def _timed(work: Callable[[], _T], repeats: int, done: Callable[[int], None]) -> tuple[tuple[float, ...], _T]:
    seconds = []
    for repeat in range(repeats):
        before = process_time()
        answer = work()
        seconds.append(process_time() - before)
        done(repeat + 1)
    return tuple(seconds), answer


# Drawing


def with_defaults(policy: Policy, draw: WorkloadDraw) -> WorkloadDraw:
    """The draw with what it leaves open chosen for the policy.

    Single GPUs for AlloX: it is made for them, and then all jobs are in one matching, which is the hardest. Gavel's number
    of classes where GPUs are shared. One GPU type for Themis, which knows no types, and half a GPU for each app.
    """
    can = capabilities_of(policy.name)
    if Capability.AUCTIONS in can:
        return replace(draw, gangs=draw.gangs or distributions.GAVEL, types=1, gpus=draw.gpus or max(1, draw.jobs // 2))
    gangs = draw.gangs or (ONE_GPU if Capability.SINGLE_GPUS in can else distributions.GAVEL)
    classes = draw.classes or (CLASSES_OF_PAIRS if Capability.PAIRS in can else None)
    return replace(draw, gangs=gangs, classes=classes)


def draw_for(policy: Policy, draw: WorkloadDraw) -> Workload:
    """The workload of a draw, with what is known of pairs if the policy shares GPUs. Raises RequestError for a bad draw."""
    draw = with_defaults(policy, draw)
    return with_pairs(draw_workload(draw), draw) if Capability.PAIRS in capabilities_of(policy.name) else draw_workload(draw)


def draw_workload(draw: WorkloadDraw) -> Workload:
    """The workload of a draw: no job runs, jobs of all ages wait. Raises RequestError for a bad draw."""
    jobs, rng = draw.jobs, _generators(draw)
    try:
        sizes = distributions.sizes(draw.gangs or distributions.GAVEL, rng["gangs"].random(jobs))
    except FieldError as refused:
        raise RequestError(f"gangs: {refused.problem}") from None
    gang = sizes.astype(float)
    class_of = kind = np.arange(jobs)
    if draw.classes is not None:
        class_of = (rng["classes"].random(jobs) * draw.classes).astype(np.int64)
        kind = np.unique(class_of * (int(gang.max()) + 1) + sizes, return_inverse=True)[1]  # numbered without gaps
    speed = _speeds(draw, rng["speeds"])[class_of] * gang[:, None] ** _SCALING
    duration = distributions.durations(distributions.GAVEL, sizes, rng["durations"].random((jobs, 2)))
    weight = np.where(rng["weights"].random(jobs) < 0.2, 5.0, 1.0)
    # Up to a half of each job is done. Its age is as if it had had its fair part of the time on the fastest type since its
    # submission, or up to twice as much.
    fair = weight / weight.mean() / (CROWDING * gang)
    uniform = rng["progress"].random((jobs, 2))
    done = 0.5 * uniform[:, 0]
    age = done * duration * np.maximum((0.5 + 0.5 * uniform[:, 1]) / fair, 1.0)
    gpus = _gpus(draw, gang)
    workload = Workload(
        now=float(age.max()),
        rows=np.arange(jobs),
        gang=gang,
        weight=weight,
        submitted=age.max() - age,
        deadline=np.full(jobs, inf),
        steps_left=duration * (1.0 - done) * speed[:, 0],
        tenant=(rng["tenants"].random(jobs) * TENANTS).astype(np.int64),
        speed=np.where(gang[:, None] <= gpus, speed, 0.0),
        held=np.full(jobs, -1),
        partner=np.full(jobs, -1),
        gpus=gpus,
        price=_DEAREST * _powers(draw.types),
        column_type=np.arange(draw.types),
        kind=kind,
    )
    # The earliest job first, and tenants numbered by their first job.
    ordered = workload.only(np.argsort(workload.submitted, kind="stable"))
    _, first, tenant = np.unique(ordered.tenant, return_index=True, return_inverse=True)
    return replace(ordered, rows=np.arange(ordered.jobs), tenant=np.argsort(np.argsort(first))[tenant])


def with_pairs(workload: Workload, draw: WorkloadDraw) -> Workload:
    """The same workload, with how fast its kinds run beside each other.

    Each kind has an appetite for a GPU; two that together want no more than one GPU do not slow each other down, others do
    in proportion. So some pairs gain by sharing and some do not.
    """
    kinds = int(workload.kind.max()) + 1
    if kinds > MOST_KINDS_OF_PAIRS:
        most = f"at most {MOST_KINDS_OF_PAIRS:,}"
        raise RequestError(f"{kinds:,} kinds of jobs (classes by gangs) are too many for pairs; {most}")
    rng = _generators(draw)["pairs"]
    appetite = 0.3 + 0.7 * rng.random((kinds, 1, draw.types))
    wanted = appetite + appetite.transpose(1, 0, 2)
    factor = (0.85 + 0.15 * rng.random(wanted.shape)) / np.maximum(wanted, 1.0)
    unfit = np.triu(rng.random((kinds, kinds)) < _UNFIT)
    of_kind = np.unique(workload.kind, return_index=True)[1]
    gang, speed = workload.gang[of_kind], workload.speed[of_kind]
    can = (gang[:, None] == gang) & ~(unfit | unfit.T)
    beside = np.where(can[:, :, None] & (speed[None, :, :] > 0), factor * speed[:, None, :], 0.0)
    return replace(workload, known_beside=beside)


def draw_apps(draw: WorkloadDraw) -> Snapshot:
    """A snapshot in which `draw.jobs` apps wait for GPUs of nodes of 8: sweeps of up to 8 jobs of one gang, of all ages."""
    workload = draw_workload(draw)
    sizes = 1 + (_generators(draw)["sweeps"].random(draw.jobs) * MOST_OF_SWEEP).astype(np.int64)
    topology = Topology(parse_cluster(f"gpu:{int(workload.gpus.sum())}@8"))
    columns = JobTable()
    estimates: list[Estimate] = []
    for app, (size, gang) in enumerate(zip(sizes.tolist(), workload.gang.astype(int).tolist(), strict=True)):
        speed, steps = float(workload.speed[app, 0]), float(workload.steps_left[app])
        estimate = Estimate(((speed, SPREAD_OUT * speed, SPREAD_OUT * speed),))
        for _ in range(size if speed > 0 else 0):
            job = Job(str(len(estimates)), float(workload.submitted[app]), gang, app=str(app))
            columns.append(job, steps, kind=app, best=speed, skew=None, now=job.submitted)
            estimates.append(estimate)
    masks, alive = list(topology.full), [True] * len(topology.full)
    return Snapshot(
        now=workload.now,
        origin=0.0,
        gpus=sum(topology.totals),
        idle=tuple(topology.totals),
        is_contended=True,
        active=tuple(range(len(estimates))),
        columns=columns,
        placement=PlacementView(topology, masks, alive, {}, {}),
        survey=lambda _snapshot: workload,
        estimate=estimates.__getitem__,
        losses={},
    )


def draw_rounds(draw: WorkloadDraw) -> tuple[list[RoundWork], GpuPool]:
    """The jobs of a draw as rounds of as many tasks as their gangs have GPUs, and the GPUs, all free."""
    workload = draw_workload(draw)
    rounds = 1 + (_generators(draw)["rounds"].random(draw.jobs) * MOST_ROUNDS).astype(np.int64)
    jobs = []
    for job, turns in enumerate(rounds.tolist()):
        left = float(workload.steps_left[job])
        seconds = tuple(left / rate / turns if rate > 0 else 0.0 for rate in workload.speed[job].tolist())
        sync = (_SYNC * min(each for each in seconds if each > 0),) * draw.types
        jobs.append(RoundWork(str(job), float(workload.weight[job]), 0.0, turns, int(workload.gang[job]), seconds, sync))
    kinds = tuple(kind for kind, gpus in enumerate(workload.gpus.astype(int).tolist()) for _ in range(gpus))
    return jobs, GpuPool(kinds, (0.0,) * len(kinds))


def _generators(draw: WorkloadDraw) -> dict[str, np.random.Generator]:
    seeds = np.random.SeedSequence(draw.seed).spawn(len(_COLUMNS))
    return {name: np.random.default_rng(seed) for name, seed in zip(_COLUMNS, seeds, strict=True)}


def _powers(types: int) -> Floats:
    """Power of each GPU type, the fastest first: 1, falling geometrically."""
    return _SPREAD ** -(np.arange(types) / max(types - 1, 1))


def _speeds(draw: WorkloadDraw, rng: np.random.Generator) -> Floats:
    """(classes, types): steps per second on one GPU.

    Classes differ a thousandfold in what a step is, and in how much of a type's power they can use: the slowest type does
    for some classes as much as the fastest, for others a tenth.
    """
    uniform = rng.random((draw.classes or draw.jobs, 2 + 2 * draw.types))
    scale, gain = 10.0 ** (3.0 * uniform[:, :1] - 1.0), 0.1 + uniform[:, 1:2]
    noise, fits = 2.0 ** (uniform[:, 2 : 2 + draw.types] - 0.5), uniform[:, 2 + draw.types :] >= _UNFIT
    fits[:, 0] = True
    return np.where(fits, scale * _powers(draw.types) ** gain * noise, 0.0)


def _gpus(draw: WorkloadDraw, gang: Floats) -> Floats:
    """GPUs of each type; the first types have one more where they cannot be even."""
    if draw.gpus is None:
        each = max(ceil(float(gang.sum()) / CROWDING / draw.types), int(gang.max()))
        return np.full(draw.types, float(each))
    if draw.gpus < draw.types:
        raise RequestError(f"{draw.gpus} GPUs are too few for {draw.types} types; at least one of each")
    return (draw.gpus // draw.types + (np.arange(draw.types) < draw.gpus % draw.types)).astype(float)
