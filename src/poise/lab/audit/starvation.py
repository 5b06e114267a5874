"""Starvation: is a job passed over for ever?

The yardstick is the time that a job takes under equal shares: at all times each of the N active jobs is served for
min(1, C/(g·N)) of the time on the cluster's mix of GPU types, whatever the policy under audit does.

    measured   time without GPUs while a job that came later has some that it could use  ÷  time under equal shares
    bound      twice the time under equal shares, and two turns                       ÷  time under equal shares

Taking turns costs no more than about 1, however many jobs there are. In an overloaded stream, a job that is passed over
again and again reaches any number if only the stream lasts; ours lasts three times as long as the slowest of the watched
jobs takes under equal shares.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf, isfinite

import numpy as np

from poise.lab.audit.findings import Case
from poise.lab.audit.instance_run import GpuHold, InstanceRun, mean_rate, rates_of
from poise.lab.audit.instances import Instance, InstanceGenerator, InstanceShape
from poise.lab.experiment import speeds_of
from poise.lab.report.axes import amount
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.job import Job
from poise.scheduler.throughput.speeds import Speeds

BOUND = 2.0
"""Bound, in times under equal shares, besides two turns."""
LASTS = 3.0
"""How long a stream lasts, in times under equal shares."""


def cases(run: InstanceRun) -> Iterator[Case]:
    """One case per job that is watched."""
    alone = equal_shares(run.instance, run.truths)
    submitted = {each.job.id: each.job.submitted for each in run.instance.trace.jobs}
    holders = LatestHolders.of(run.holds, submitted, len(run.counts))
    for job in run.jobs:
        is_watched = not run.instance.marked or job.id in run.instance.marked
        if is_watched and alone.get(job.id, 0.0) > 0:
            usable = [place for place, rate in enumerate(run.rates(job)) if rate > 0]
            passed = holders.passed_over(job, run.ended(job.id), run.held_by(job.id), usable)
            fair, took = alone[job.id], run.ended(job.id) - job.submitted
            is_done = isfinite(run.history.jobs[job.id].ended)
            agent, limits = run.instance.agent(job), f", {' or '.join(job.gpu_types)} only" * bool(job.gpu_types)
            text = (
                f"{agent} ({job.gpus} GPU{'s' * (job.gpus > 1)}{limits}) was passed over for {amount(passed, 'seconds')} of "
                f"the {amount(took, 'seconds')} {'it took' if is_done else 'after which it had not ended'}; with equal "
                f"shares it would have taken {amount(fair, 'seconds')}"
            )
            who = {"agent": agent, "job": job.id, "gpus": job.gpus, "passed_over_seconds": passed}
            data = {**who, "seconds": took, "finished": is_done, "equal_share_seconds": fair}
            yield run.case(passed / fair, BOUND + 2.0 * run.instance.turn / fair, text, **data)


def short_stream(draw: InstanceGenerator, shape: InstanceShape) -> Instance:
    """A crowded stream no longer than it takes to tell which jobs starve."""
    return cut(draw.crowded(shape))


def cut(instance: Instance) -> Instance:
    """Shorten a stream to what it takes to tell which watched jobs starve; the run ends with it."""
    taken = equal_shares(instance, speeds_of(instance.experiment)[1])
    first = instance.trace.jobs[0].job.submitted
    watched = {each.job.id: each.job.submitted for each in instance.trace.jobs if each.job.id in instance.marked}
    until = max(submitted + LASTS * taken[job] for job, submitted in watched.items())
    jobs = tuple(each for each in instance.trace.jobs if each.job.submitted <= until)
    return replace(
        instance, trace=replace(instance.trace, jobs=jobs), experiment=replace(instance.experiment, until=until - first)
    )


def equal_shares(instance: Instance, truths: Speeds) -> dict[str, float]:
    """Seconds that each job takes under equal shares; jobs that can run nowhere are left out."""
    cluster = instance.experiment.cluster
    counts = [cluster.gpus_of(name) for name in cluster.gpu_types]
    coming: list[tuple[Job, float]] = []  # with its seconds of full service on the cluster's mix
    for each in instance.trace.jobs:
        speed = mean_rate(rates_of(each.job, truths, counts), counts)
        seconds = truths.steps(each.job) / speed if speed > 0 else inf
        if seconds < inf:
            coming.append((each.job, seconds))
    active: dict[str, Job] = {}
    left: dict[str, float] = {}
    taken: dict[str, float] = {}
    now, place = -inf, 0
    while active or place < len(coming):
        pace = {name: min(1.0, cluster.gpus / (job.gpus * len(active))) for name, job in active.items()}
        soonest = min((now + left[name] / pace[name] for name in active), default=inf)
        arrival = coming[place][0].submitted if place < len(coming) else inf
        time = min(soonest, arrival)
        for name in active:
            left[name] -= pace[name] * (time - now)
        now = time
        if arrival <= soonest:
            job, seconds = coming[place]
            active[job.id], left[job.id] = job, seconds
            place += 1
        else:
            done = min(active, key=lambda name: left[name] / pace[name])
            taken[done] = now - active.pop(done).submitted
    return taken


@dataclass(frozen=True)
class LatestHolders:
    """For each GPU type and interval, when the latest-submitted job that holds some was submitted: (types, intervals)."""

    times: Floats
    latest: Floats

    @staticmethod
    def of(holds: Sequence[GpuHold], submitted: Mapping[str, float], types: int) -> "LatestHolders":
        """Read it off what jobs held; -inf where no job holds any."""
        times = sorted({time for hold in holds for time in (hold.start, hold.end)})
        latest = np.full((types, len(times)), -inf)
        for gpu_type in range(types):
            starting = sorted((each.start, submitted[each.job], each.end) for each in holds if each.gpu_type == gpu_type)
            place = 0
            holding: list[tuple[float, float]] = []  # (-submitted, until): the last comer is on top
            for index, time in enumerate(times):
                while place < len(starting) and starting[place][0] <= time:
                    heappush(holding, (-starting[place][1], starting[place][2]))
                    place += 1
                while holding and holding[0][1] <= time:
                    heappop(holding)
                if holding:
                    latest[gpu_type, index] = -holding[0][0]
        return LatestHolders(np.array(times), latest)

    def passed_over(self, job: Job, ended: float, held: Sequence[GpuHold], usable: Sequence[int]) -> float:
        """Seconds of a job's life in which one submitted later had GPUs of a type it can use, and it had none."""
        if not len(self.times):
            return 0.0
        edges = np.clip(np.append(self.times, max(ended, self.times[-1])), job.submitted, ended)
        is_passed = self.latest[usable].max(axis=0) > job.submitted
        for hold in held:
            is_passed[np.searchsorted(self.times, hold.start) : np.searchsorted(self.times, hold.end)] = False
        return float(np.diff(edges)[is_passed].sum())
