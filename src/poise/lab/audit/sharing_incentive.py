"""Sharing incentive: is an agent worse off than with a cluster of its own, an N-th of this one?

Jobs (`cases_on_slices`): a job's slice holds N_j/N of each GPU type, N being the number of agents that are active at the
time; a gang larger than the slice is served for a part of the time (docs/algorithms/gavel.md, the isolated share). With C
GPUs in all and speeds T_mj,

    slice_m(t) = min(1, C / (g_m·N(t))) · Σ_j T_mj·N_j / C          steps per second
    alone_m    = the time in which ∫ slice_m dt is the work of m
    measured     completion time ÷ alone_m
    bound        the same with two turns of service more to do: whoever is no further behind its slice is so by rounding

The ρ of a summary takes the mean N over the life of a job instead. Where N is sometimes below C and sometimes above, that
asks for more than there is; this does not: a policy that gave each its slice at all times would measure 1.

Tenants (`tenant_cases`): each tenant alone, under the same policy, on a cluster that is an N-th of this one, N being the
number of tenants of the trace. The slice has N_j/N GPUs of each type, rounded down, on nodes as large as before where that
is possible: a smaller slice is easier to beat, so whoever does worse than on it does worse than on its own N-th. Where a
type would be gone altogether, or a job could not run, the tenant has the whole cluster at an N-th of its speed.

    measured   mean completion time in the shared run ÷ alone            bound: 1 + 2 turns / alone
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from poise.lab.analysis.history import cumulated
from poise.lab.audit.findings import Case
from poise.lab.audit.instance_run import InstanceRun, run_instance
from poise.lab.report.axes import amount
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.cluster import Cluster, Node


def cases_on_slices(run: InstanceRun) -> Iterator[Case]:
    """One case per job; each agent has one."""
    spans = [(job.submitted, run.ended(job.id)) for job in run.jobs]
    by_gang = {gang: EqualSlices.of(spans, run.cluster.gpus, gang) for gang in {job.gpus for job in run.jobs}}
    for job in run.jobs:
        seconds, slices = run.truths.steps(job) / run.mean_rate(job), by_gang[job.gpus]
        if not seconds > 0:
            continue
        alone = slices.alone(job.submitted, seconds)
        late = slices.alone(job.submitted, seconds + 2.0 * run.instance.turn)
        took = run.ended(job.id) - job.submitted
        agent = run.instance.agent(job)
        text = (
            f"{agent} ({job.gpus} GPU{'s' * (job.gpus > 1)}) took {amount(took, 'seconds')};"
            f" alone on an equal slice it would have taken {amount(alone, 'seconds')}"
        )
        yield run.case(took / alone, late / alone, text, agent=agent, gpus=job.gpus, seconds=took, alone_seconds=alone)


@dataclass(frozen=True)
class EqualSlices:
    """Seconds of full service that a gang of one size has had on its slice by each of `times`.

    last   the part of the time that it is served after the last one
    """

    times: Floats
    served: Floats
    last: float

    @staticmethod
    def of(spans: Sequence[tuple[float, float]], gpus: int, gang: int) -> "EqualSlices":
        """Slices of `gpus` GPUs among agents that are active over these spans."""
        changes = [change for start, end in spans for change in ((start, 1), (end, -1))]
        times, levels = cumulated(changes)
        parts = np.minimum(1.0, gpus / (gang * np.maximum(levels, 1)))
        served = np.concatenate(([0.0], np.cumsum(parts[:-1] * np.diff(times))))
        return EqualSlices(times, served, float(parts[-1]))

    def alone(self, start: float, seconds: float) -> float:
        """Time from `start` until the slice has served for `seconds`."""
        target = float(np.interp(start, self.times, self.served)) + seconds
        beyond = target - float(self.served[-1])
        if beyond > 0:
            return float(self.times[-1]) + beyond / self.last - start
        return float(np.interp(target, self.served, self.times)) - start


def tenant_cases(run: InstanceRun) -> Iterator[Case]:
    """One case per tenant."""
    instance, tenants = run.instance, len(run.agents)
    whole = instance.experiment.cluster
    own = slice_of(whole, tenants)
    for tenant, jobs in run.agents.items():
        alone = None if own is None else _run_alone(run, tenant, own, 1)
        where = str(own)
        if alone is None or alone.rejected_any(jobs):
            alone, where = _run_alone(run, tenant, whole, tenants), f"{whole} at 1/{tenants} of its speed"
        together, apart = run.mean_completion(jobs), alone.mean_completion(jobs)
        whose = f"the {len(jobs):,} jobs of {tenant} took, on average," if len(jobs) > 1 else f"the job of {tenant} took"
        text = f"{whose} {amount(together, 'seconds')}; alone on {where} {amount(apart, 'seconds')}"
        data = {"agent": tenant, "jobs": len(jobs), "seconds": together, "alone_seconds": apart, "slice": where}
        ratio, slack = (together / apart, 2.0 * instance.turn / apart) if apart > 0 else (1.0, 0.0)
        yield run.case(ratio, 1.0 + slack, text, **data)


def _run_alone(run: InstanceRun, tenant: str, cluster: Cluster, slower: int) -> InstanceRun:
    """Run a tenant's jobs on a cluster that is `slower` times as slow.

    The window closes at the same time as in the shared run, though it opens with the first job of the tenant.
    """
    jobs = []
    for each in run.instance.trace.jobs:
        if run.instance.agent(each.job) == tenant:
            # More work is the same as slower GPUs.
            steps, duration = (None if work is None else work * slower for work in (each.job.steps, each.job.duration))
            jobs.append(replace(each, job=replace(each.job, steps=steps, duration=duration)))
    later = jobs[0].job.submitted - run.start
    experiment = replace(run.instance.experiment, cluster=cluster, until=run.instance.experiment.until - later)
    trace = replace(run.instance.trace, jobs=tuple(jobs))
    return run_instance(replace(run.instance, trace=trace, experiment=experiment))


def slice_of(cluster: Cluster, parts: int) -> Cluster | None:
    """One of `parts` equal parts of each GPU type of a cluster, rounded down; None if a type would be gone."""
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
