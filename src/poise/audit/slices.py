"""Sharing incentive of tenants: each of them alone, under the same policy, on a cluster that is an N-th of this one.

N is the number of tenants of the trace. The slice has N_j/N GPUs of every type, rounded down, on nodes as large as before
where that is possible: a smaller slice is easier to beat, so whoever does worse than on it does worse than on its own N-th.
Where a type would be gone altogether, or a job could not run, the tenant has the whole cluster at an N-th of its speed.

    measured   mean completion time in the shared run ÷ alone            bound: 1 + 2 turns / alone
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from poise.audit.findings import Case
from poise.audit.instances import Instance
from poise.audit.playing import Played, play
from poise.model.cluster import Cluster, Node
from poise.model.job import Job
from poise.report.amounts import amount
from poise.traces.schema import TraceJob


def cases(played: Played) -> Iterator[Case]:
    """One case a tenant."""
    for tenant, jobs in played.agents.items():
        yield _case(played, tenant, jobs, len(played.agents))


def _case(played: Played, tenant: str, jobs: Sequence[Job], tenants: int) -> Case:
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
