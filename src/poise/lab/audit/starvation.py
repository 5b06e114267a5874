"""Starvation: is anybody passed over for ever?

The yardstick is the time that a job takes under equal shares: at every moment each of the N active jobs is served for
min(1, C/(g·N)) of the time on the cluster's mix of GPU types, whatever the policy under audit does.

    measured   time without GPUs while a job that came later has some that it could use  ÷  time under equal shares
    bound      twice the time under equal shares, and two turns                       ÷  time under equal shares

Taking turns costs no more than about 1, however many jobs there are. In a stream that asks for more than there is, a job
that is passed over again and again comes to any number if only the stream lasts; ours lasts three times as long as the
slowest of those who are watched takes under equal shares.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf, isfinite

import numpy as np

from poise.lab.audit.findings import Case
from poise.lab.audit.instances import Instance
from poise.lab.audit.playback import Played, Spell, mean_rate, rates_of
from poise.lab.experiment import speeds_of
from poise.lab.report.axes import amount
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.job import Job
from poise.scheduler.throughput.speeds import Speeds

BOUND = 2.0
"""Times under equal shares, besides two turns."""
LASTS = 3.0
"""Times under equal shares that a stream lasts."""


def cut(instance: Instance) -> Instance:
    """The stream no longer than it takes to tell who starves; the run ends with it."""
    taken = equal_shares(instance, speeds_of(instance.experiment)[1])
    first = instance.trace.jobs[0].job.submitted
    watched = {each.job.id: each.job.submitted for each in instance.trace.jobs if each.job.id in instance.marked}
    until = max(submitted + LASTS * taken[job] for job, submitted in watched.items())
    jobs = tuple(each for each in instance.trace.jobs if each.job.submitted <= until)
    return replace(
        instance,
        trace=replace(instance.trace, jobs=jobs),
        experiment=replace(instance.experiment, until=until - first),
    )


def equal_shares(instance: Instance, truths: Speeds) -> dict[str, float]:
    """Seconds that every job takes under equal shares; jobs that can run nowhere are left out."""
    cluster = instance.experiment.cluster
    counts = [cluster.gpus_of(name) for name in cluster.gpu_types]
    left: dict[str, float] = {}
    gangs: dict[str, int] = {}
    taken: dict[str, float] = {}
    came = {each.job.id: each.job.submitted for each in instance.trace.jobs}
    now = -inf
    coming = [(each.job, _seconds(each.job, truths, counts)) for each in instance.trace.jobs]
    coming = [(job, seconds) for job, seconds in coming if seconds < inf]
    place = 0
    while left or place < len(coming):
        pace = {job: min(1.0, cluster.gpus / (gangs[job] * len(left))) for job in left}
        soonest = min((now + left[job] / pace[job] for job in left), default=inf)
        arrival = coming[place][0].submitted if place < len(coming) else inf
        moment = min(soonest, arrival)
        for job in left:
            left[job] -= pace[job] * (moment - now)
        now = moment
        if arrival <= soonest:
            newcomer, seconds = coming[place]
            left[newcomer.id], gangs[newcomer.id] = seconds, newcomer.gpus
            place += 1
        else:
            done = min(left, key=lambda job: left[job] / pace[job])
            taken[done] = now - came[done]
            del left[done]
    return taken


def _seconds(job: Job, truths: Speeds, counts: Sequence[int]) -> float:
    """Of the whole gang's service on the cluster's mix; infinite if it can run nowhere."""
    speed = mean_rate(rates_of(job, truths, counts), counts)
    return truths.steps(job) / speed if speed > 0 else inf


@dataclass(frozen=True)
class Rota:
    """Of those who hold GPUs of a type, when the last one came: (types, intervals)."""

    moments: Floats
    latest: Floats

    @staticmethod
    def of(spells: Sequence[Spell], came: Mapping[str, float], types: int) -> "Rota":
        """Read it off who held what when; -inf where nobody holds any."""
        moments = sorted({moment for spell in spells for moment in (spell.start, spell.end)})
        by_type = [[spell for spell in spells if spell.gpu_type == gpu_type] for gpu_type in range(types)]
        return Rota(np.array(moments), np.array([_latest(moments, held, came) for held in by_type]))

    def passed(self, job: Job, ended: float, held: Sequence[Spell], usable: Sequence[int]) -> float:
        """Seconds of a job's life in which somebody who came later had GPUs of a type it can use, and it had none."""
        if not len(self.moments):
            return 0.0
        edges = np.clip(np.append(self.moments, max(ended, self.moments[-1])), job.submitted, ended)
        is_passed = self.latest[usable].max(axis=0) > job.submitted
        for spell in held:
            is_passed[np.searchsorted(self.moments, spell.start) : np.searchsorted(self.moments, spell.end)] = False
        return float(np.diff(edges)[is_passed].sum())


def _latest(moments: Sequence[float], spells: Sequence[Spell], came: Mapping[str, float]) -> list[float]:
    starting = sorted((spell.start, came[spell.job], spell.end) for spell in spells)
    latest, place = [], 0
    holding: list[tuple[float, float]] = []  # (-came, until): the last comer is on top
    for moment in moments:
        while place < len(starting) and starting[place][0] <= moment:
            heappush(holding, (-starting[place][1], starting[place][2]))
            place += 1
        while holding and holding[0][1] <= moment:
            heappop(holding)
        latest.append(-holding[0][0] if holding else -inf)
    return latest


def cases(played: Played) -> Iterator[Case]:
    """One case a job that is watched."""
    taken = equal_shares(played.instance, played.truths)
    came = {each.job.id: each.job.submitted for each in played.instance.trace.jobs}
    rota = Rota.of(played.spells, came, len(played.counts))
    for job in played.jobs:
        is_watched = not played.instance.marked or job.id in played.instance.marked
        if is_watched and taken.get(job.id, 0.0) > 0:
            usable = [place for place, rate in enumerate(played.rates(job)) if rate > 0]
            passed = rota.passed(job, played.ended(job.id), played.held_by(job.id), usable)
            yield _case(played, job, passed, taken[job.id])


def _case(played: Played, job: Job, passed: float, fair: float) -> Case:
    is_done = isfinite(played.history.jobs[job.id].ended)
    so_far = "it took" if is_done else "after which it had not ended"
    took = played.ended(job.id) - job.submitted
    limits = f", {' or '.join(job.gpu_types)} only" * bool(job.gpu_types)
    text = (
        f"{played.instance.agent(job)} ({job.gpus} GPU{'s' * (job.gpus > 1)}{limits}) was passed over for"
        f" {amount(passed, 'seconds')} of the {amount(took, 'seconds')} {so_far};"
        f" with equal shares it would have taken {amount(fair, 'seconds')}"
    )
    data = {
        "instance": played.instance.name,
        "agent": played.instance.agent(job),
        "job": job.id,
        "gpus": job.gpus,
        "passed_over_seconds": passed,
        "seconds": took,
        "finished": is_done,
        "equal_share_seconds": fair,
    }
    return Case(passed / fair, BOUND + 2.0 * played.instance.turn / fair, f"{played.instance.name}: {text}", data)
