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
from dataclasses import dataclass, replace

import numpy as np

from poise.lab.analysis.history import cumulated
from poise.lab.audit.findings import Case
from poise.lab.audit.instances import Instance
from poise.lab.audit.playback import Played, play
from poise.lab.report.axes import amount
from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.cluster import Cluster, Node
from poise.scheduler.model.job import Job


@dataclass(frozen=True)
class EqualSlices:
    """How many seconds of whole service a gang of one size has had on its slice by each moment.

    last   the part of the time that it is served after the last moment
    """

    moments: Floats
    served: Floats
    last: float

    @staticmethod
    def of(spans: Sequence[tuple[float, float]], gpus: int, gang: int) -> "EqualSlices":
        """With agents active over these spans, on so many GPUs."""
        changes = [change for start, end in spans for change in ((start, 1), (end, -1))]
        moments, levels = cumulated(changes)
        parts = np.minimum(1.0, gpus / (gang * np.maximum(levels, 1)))
        served = np.concatenate(([0.0], np.cumsum(parts[:-1] * np.diff(moments))))
        return EqualSlices(moments, served, float(parts[-1]))

    def alone(self, start: float, seconds: float) -> float:
        """Time from `start` until the slice has served for so many seconds."""
        target = float(np.interp(start, self.moments, self.served)) + seconds
        beyond = target - float(self.served[-1])
        if beyond > 0:
            return float(self.moments[-1]) + beyond / self.last - start
        return float(np.interp(target, self.served, self.moments)) - start


def cases_on_slices(played: Played) -> Iterator[Case]:
    """One case a job; every agent has one."""
    spans = [(job.submitted, played.ended(job.id)) for job in played.jobs]
    by_gang = {gang: EqualSlices.of(spans, played.cluster.gpus, gang) for gang in {job.gpus for job in played.jobs}}
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


# Sharing incentive of tenants: each of them alone, under the same policy, on a cluster that is an N-th of this one.
#
# N is the number of tenants of the trace. The slice has N_j/N GPUs of every type, rounded down, on nodes as large as before
# where that is possible: a smaller slice is easier to beat, so whoever does worse than on it does worse than on its own
# N-th.
# Where a type would be gone altogether, or a job could not run, the tenant has the whole cluster at an N-th of its speed.
#
# measured   mean completion time in the shared run ÷ alone            bound: 1 + 2 turns / alone


def tenant_cases(played: Played) -> Iterator[Case]:
    """One case a tenant."""
    for tenant, jobs in played.agents.items():
        yield _tenant_case(played, tenant, jobs, len(played.agents))


def _tenant_case(played: Played, tenant: str, jobs: Sequence[Job], tenants: int) -> Case:
    instance = played.instance
    whole = instance.experiment.cluster
    own = slice_of(whole, tenants)
    alone = None if own is None else play(_alone(instance, tenant, own, 1))
    where = str(own)
    if alone is None or alone.refused(jobs):
        alone, where = play(_alone(instance, tenant, whole, tenants)), f"{whole} at 1/{tenants} of its speed"
    together, apart = (_mean(each, jobs) for each in (played, alone))
    whose = f"the {len(jobs):,} jobs of {tenant} took, on average," if len(jobs) > 1 else f"the job of {tenant} took"
    text = f"{whose} {amount(together, 'seconds')}; alone on {where} {amount(apart, 'seconds')}"
    data = {
        "instance": instance.name,
        "agent": tenant,
        "jobs": len(jobs),
        "seconds": together,
        "alone_seconds": apart,
        "slice": where,
    }
    ratio, slack = (together / apart, 2.0 * instance.turn / apart) if apart > 0 else (1.0, 0.0)
    return Case(ratio, 1.0 + slack, f"{instance.name}: {text}", data)


def _mean(played: Played, jobs: Sequence[Job]) -> float:
    return sum(played.ended(job.id) - job.submitted for job in jobs) / len(jobs)


def _alone(instance: Instance, tenant: str, cluster: Cluster, slower: int) -> Instance:
    """The window closes at the same moment, though it opens with the first job of the tenant."""
    jobs = tuple(_slowed(each, slower) for each in instance.trace.jobs if instance.agent(each.job) == tenant)
    later = jobs[0].job.submitted - instance.trace.jobs[0].job.submitted
    experiment = replace(instance.experiment, cluster=cluster, until=instance.experiment.until - later)
    return replace(instance, trace=replace(instance.trace, jobs=jobs), experiment=experiment)


def _slowed(each: TraceJob, slower: int) -> TraceJob:
    """So many times the work is the same as so much slower GPUs."""
    job = each.job
    steps, duration = (None if work is None else work * slower for work in (job.steps, job.duration))
    return replace(each, job=replace(job, steps=steps, duration=duration))


def slice_of(cluster: Cluster, parts: int) -> Cluster | None:
    """A cluster with one of so many equal parts of every GPU type, rounded down; None if a type would be gone."""
    nodes: list[Node] = []
    for name in cluster.gpu_types:
        left = cluster.gpus_of(name) // parts
        if left == 0:
            return None
        for node in (node for node in cluster.nodes if node.gpu_type == name):
            if left > 0:
                nodes.append(replace(node, gpus=min(left, node.gpus)))
                left -= nodes[-1].gpus
    return Cluster(tuple(nodes), cluster.speeds, cluster.prices)
