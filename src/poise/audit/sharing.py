"""Sharing incentive: is anybody worse off than with a cluster of its own, an N-th of this one?

An agent's slice holds N_j/N of every GPU type, N being the number of agents that are active, from moment to moment; a gang
larger than the slice is served for a part of the time (ALGORITHMS §2.1, iso). With C GPUs in all and speeds T_mj,

    slice_m(t) = min(1, C / (g_m·N(t))) · Σ_j T_mj·N_j / C          steps per second
    alone_m    = the time in which ∫ slice_m dt is the work of m
    measured     completion time ÷ alone_m
    bound        the same with two turns of service more to do: who is no further behind its slice is so by rounding

The ρ of a summary takes the mean N over the life of a job instead. Where N is sometimes below C and sometimes above, that
asks for more than there is; this does not: a policy that gave everybody its slice at every moment would measure 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from poise.analysis.history import cumulated
from poise.audit.findings import Case
from poise.audit.playing import Played
from poise.model.arrays import Floats
from poise.model.job import Job
from poise.report.amounts import amount


@dataclass(frozen=True)
class Slices:
    """How many seconds of whole service a gang of one size has had on its slice by each moment.

    last   the part of the time that it is served after the last moment
    """

    moments: Floats
    served: Floats
    last: float

    @staticmethod
    def of(spans: Sequence[tuple[float, float]], gpus: int, gang: int) -> "Slices":
        """With agents active over these spans, on so many GPUs."""
        changes = [change for start, end in spans for change in ((start, 1), (end, -1))]
        moments, levels = cumulated(changes)
        parts = np.minimum(1.0, gpus / (gang * np.maximum(levels, 1)))
        served = np.concatenate(([0.0], np.cumsum(parts[:-1] * np.diff(moments))))
        return Slices(moments, served, float(parts[-1]))

    def alone(self, start: float, seconds: float) -> float:
        """Time from `start` until the slice has served for so many seconds."""
        target = float(np.interp(start, self.moments, self.served)) + seconds
        beyond = target - float(self.served[-1])
        if beyond > 0:
            return float(self.moments[-1]) + beyond / self.last - start
        return float(np.interp(target, self.served, self.moments)) - start


def cases(played: Played) -> Iterator[Case]:
    """One case a job; every agent has one."""
    spans = [(job.submitted, played.ended(job.id)) for job in played.jobs]
    by_gang = {gang: Slices.of(spans, played.cluster.gpus, gang) for gang in {job.gpus for job in played.jobs}}
    for job in played.jobs:
        seconds, slices = played.truths.steps(job) / played.mean_rate(job), by_gang[job.gpus]
        if seconds > 0:
            late = slices.alone(job.submitted, seconds + 2.0 * played.instance.turn)
            yield _case(played, job, slices.alone(job.submitted, seconds), late)


def _case(played: Played, job: Job, alone: float, late: float) -> Case:
    took = played.ended(job.id) - job.submitted
    agent = played.instance.agent(job)
    text = (
        f"{agent} ({job.gpus} GPU{'s' * (job.gpus > 1)}) took {amount(took, 'seconds')};"
        f" alone on an equal slice it would have taken {amount(alone, 'seconds')}"
    )
    data = {"instance": played.instance.name, "agent": agent, "gpus": job.gpus, "seconds": took, "alone_seconds": alone}
    return Case(took / alone, late / alone, f"{played.instance.name}: {text}", data)
