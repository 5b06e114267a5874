"""What tests of the audit build with: instances whose answers are known."""

from dataclasses import replace
from math import inf

from poise.lab.audit.findings import Case
from poise.lab.audit.instances import AgentKind, Instance
from poise.lab.experiment import Experiment
from poise.lab.traces.schema import Trace, TraceJob
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.job import Job
from poise.scheduler.model.speed import Locality
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs


def an_instance(
    *jobs: TraceJob,
    policy: str = "fifo",
    cluster: str = "gpu:1",
    turn: float = 1.0,
    until: float = inf,
    agent_kind: AgentKind = AgentKind.JOBS,
) -> Instance:
    """Exact: decisions at every change, and no rounds."""
    settings = Settings(cadence=Cadence.EVENTS)
    experiment = Experiment(parse_cluster(cluster), policy, placement="count", settings=settings, until=until)
    return Instance(Trace("by hand", jobs), experiment, turn, agent_kind)


def by_agent(cases: list[Case]) -> dict[str, Case]:
    return {case.data["agent"]: case for case in cases}


def of(tenant: str, job: TraceJob) -> TraceJob:
    return replace(job, job=replace(job.job, tenant=tenant))


def a_mixed_table(**speedups: float) -> Throughputs:
    """Models that do one step a second on a K80, and so many times as much on a V100."""
    rows = [
        Alone(JobClass(model), gpu_type, 1, Locality.PACKED, rate)
        for model, speedup in speedups.items()
        for gpu_type, rate in (("v100", speedup), ("k80", 1.0))
    ]
    return Throughputs.of("by hand", "k80", rows)


def a_mixed_instance(policy: str, steps: dict[str, float], speedups: dict[str, float], until: float = inf) -> Instance:
    jobs = tuple(TraceJob(Job(name, 0.0, 1, steps=work, tenant=name, model=name)) for name, work in steps.items())
    drawn = an_instance(*jobs, policy=policy, cluster="v100:1,k80:1", until=until)
    return replace(drawn, experiment=replace(drawn.experiment, throughputs=a_mixed_table(**speedups)))
