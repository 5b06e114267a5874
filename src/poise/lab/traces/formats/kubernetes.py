"""Kubernetes: what `kubectl get KIND -A -o json` prints of pods, Jobs, Kueue's Workloads and Volcano's Jobs, in any mix.

| object | becomes |
|---|---|
| any | id `<namespace>/<name>`, tenant: the namespace, name; submitted: when the first object of the job was created |
| `Pod` | GPUs and node; run from the condition `PodScheduled` to the last `finishedAt`; Succeeded passed, Failed failed |
| `Job` of `batch` | GPUs: `parallelism` x the pod template; run from `startTime` to the condition `Complete` or `Failed` |
| `Workload` of Kueue | GPUs: all `podSets`; run from the condition `Admitted` to `Finished` |
| `Job` of Volcano | GPUs: all `tasks`; runs from each condition `Running` to the next; Aborted, Terminated killed |

Objects of one owner are one job, by `ownerReferences`; but a CronJob's Jobs are jobs of their own. Pods without an owner
are one job by the label of a pod group, such as `kueue.x-k8s.io/pod-group-name`. Where there are pods, they tell the runs,
and the others only when the job was submitted and how it ended; else a Workload does, else the Job.

gpus       the most GPUs that the pods of the job had at once
unit       the GPUs of a pod, if all its pods have as many
duration   the run times of all attempts added up, s: pods that overlap are one attempt
failures   attempts that failed and were followed by another
gpu_types  what `nodeSelector` asks of `nvidia.com/gpu.product` or `cloud.google.com/gke-accelerator`, as the table calls it
priority   `spec.priority`

GPUs are resources such as `nvidia.com/gpu` in limits or requests; slices (`nvidia.com/mig-1g.5gb`) count as whole ones and
are counted. An object that is there twice counts as it is last, so that exports of several days may stand one after
another in a file.

Left out and counted: other kinds, jobs without a GPU, that never started, that had not ended, and pods that do not say
when they ended. A Job of `batch` without pods does not say when these started: its run then includes their wait, which is
counted.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from poise.lab.traces.formats.kubernetes_objects import GpuSpan, KubeKind, KubeObject, object_of
from poise.lab.traces.parsing import FieldError, TraceInput, label
from poise.lab.traces.schema import FailedAttempt, JobOutcome, RunAttempt, TraceJob
from poise.scheduler.model.job import Job

TELLING = (KubeKind.POD, KubeKind.WORKLOAD, KubeKind.VOLCANO_JOB, KubeKind.JOB)
"""Whose runs count: those of the first kind that there is."""
DECIDING = (KubeKind.VOLCANO_JOB, KubeKind.JOB, KubeKind.WORKLOAD)
"""Who says how a job of several objects ended."""
UNKNOWN_CAUSE = "unknown"


class KubeJob(NamedTuple):
    """The objects of one job, and its name."""

    id: str
    objects: tuple[KubeObject, ...]

    def of(self, kind: KubeKind) -> list[KubeObject]:
        """Return its objects of this kind."""
        return [each for each in self.objects if each.kind is kind]


def records(source: TraceInput) -> Iterator[tuple[int, KubeJob]]:
    """Yield each job with the line of its first object."""
    objects: dict[str, KubeObject] = {}
    for line, record in source.listed("items"):
        try:
            found = object_of(line, record)
        except FieldError as refused:
            raise source.error(line, refused.field, refused.problem) from None
        if found is None:
            source.count("objects left out because they are of another kind")
        else:
            objects[found.uid] = found
    jobs: dict[str, list[KubeObject]] = {}
    for each in objects.values():
        jobs.setdefault(_root(each, objects), []).append(each)
    taken: dict[str, int] = {}
    for root, members in jobs.items():
        name = _name(root, members)
        taken[name] = taken.get(name, 0) + 1
        again = f"~{taken[name]}" if taken[name] > 1 else ""
        yield min(each.line for each in members), KubeJob(name + again, tuple(members))


def _root(found: KubeObject, objects: dict[str, KubeObject]) -> str:
    """Return the uid of the owner of the owner, and so on, as far as it is known."""
    seen = {found.uid}
    while found.owner is not None:
        if found.owner.uid in seen or found.owner.uid not in objects:
            return found.owner.uid
        found = objects[found.owner.uid]
        seen.add(found.uid)
    return found.uid


def _name(root: str, members: Sequence[KubeObject]) -> str:
    """Return namespace and name of the root, which may only be known by those that it owns."""
    for each in members:
        if each.uid == root:
            return f"{each.namespace}/{each.name}"
    owners = (each.owner.name for each in members if each.owner is not None and each.owner.uid == root)
    return f"{members[0].namespace}/{next(owners, members[0].name)}"


def job_of(found: KubeJob, source: TraceInput) -> TraceJob | None:
    """Return the job of its objects; None if it has no GPU, never started or has not ended."""
    kind = next(kind for kind in TELLING if found.of(kind))
    telling = [each for each in found.of(kind) if each.pod_gpus]
    if not telling:
        source.count("jobs left out because they have no GPU")
        return None
    deciding = next((each for other in DECIDING for each in found.of(other)), None)
    if any(each.is_open for each in telling) or (deciding is not None and deciding.is_open):
        source.count("jobs left out because they had not ended when the log was taken")
        return None
    for each in telling:
        if not each.runs and each.has_no_end:
            source.count("pods left out because they do not say when they ended")
    attempts = _attempts([(each, run) for each in telling for run in each.runs])
    if not attempts:
        source.count("jobs left out because they never started")
        return None
    if any(each.sliced for each in telling):
        source.count("jobs on slices of GPUs that get whole ones")
    if kind is KubeKind.JOB:
        source.count("jobs whose run time includes the wait of their pods, which the log does not have")
    if any(each.was_evicted for each in telling):
        source.count("jobs of which only the last run is known, as they were evicted before")
    first = telling[0]
    outcome = attempts[-1].outcome if deciding is None or deciding.outcome is None else deciding.outcome
    job = Job(
        source.prefix + label(found.id, "metadata.name"),
        min(each.created for each in found.objects),
        max(attempt.gpus for attempt in attempts),
        sum(attempt.end - attempt.start for attempt in attempts),
        tenant=first.namespace,
        priority=first.priority,
        gpu_types=first.gpu_types,
        name=found.id.partition("/")[2],
        unit=_unit(telling),
    )
    observed = tuple(RunAttempt(each.start, each.end, each.nodes) for each in attempts)
    return TraceJob(job, outcome, _failures(attempts), observed=observed)


def _unit(telling: Iterable[KubeObject]) -> int:
    """Return the GPUs of each pod; 1 if they differ."""
    sizes = {gpus for each in telling for _, gpus in each.pod_gpus}
    return sizes.pop() if len(sizes) == 1 else 1


@dataclass(slots=True)
class _GangAttempt:
    """Runs that overlap, of pods; or one run of an object that stands for all its pods."""

    start: float
    end: float
    parts: list[tuple[KubeObject, GpuSpan]] = field(default_factory=list)

    @property
    def gpus(self) -> int:
        """The most GPUs at once: at equal times what ends comes before what starts."""
        changes = sorted(
            (at, gpus) for each, run in self.parts for at, gpus in ((run.start, each.gpus), (run.end, -each.gpus))
        )
        held, most = 0, max(each.gpus for each, _ in self.parts)
        for _, gpus in changes:
            held += gpus
            most = max(most, held)
        return most

    @property
    def nodes(self) -> tuple[int, ...]:
        """GPUs on each node; empty if that is not known, or changed in its middle."""
        by_node: dict[str, int] = {}
        for each, _ in self.parts:
            by_node[each.node] = by_node.get(each.node, 0) + each.gpus
        return () if "" in by_node or sum(by_node.values()) != self.gpus else tuple(by_node.values())

    @property
    def outcome(self) -> JobOutcome:
        """How it ended: as the worst of its runs."""
        outcomes = {run.outcome for _, run in self.parts}
        return next(each for each in (JobOutcome.FAILED, JobOutcome.KILLED, JobOutcome.PASSED) if each in outcomes)


def _attempts(parts: Iterable[tuple[KubeObject, GpuSpan]]) -> list[_GangAttempt]:
    """Return the attempts in order."""
    attempts: list[_GangAttempt] = []
    for each, run in sorted(parts, key=lambda part: (part[1].start, part[1].end)):
        if not attempts or run.start >= attempts[-1].end:
            attempts.append(_GangAttempt(run.start, run.end))
        attempts[-1].end = max(attempts[-1].end, run.end)
        attempts[-1].parts.append((each, run))
    return attempts


def _failures(attempts: Sequence[_GangAttempt]) -> tuple[FailedAttempt, ...]:
    """Return the attempts before the last one that failed."""
    failures, ran = [], 0.0
    for attempt in attempts[:-1]:
        ran += attempt.end - attempt.start
        if attempt.outcome is JobOutcome.FAILED:
            failures.append(FailedAttempt(ran, UNKNOWN_CAUSE))
            ran = 0.0
    return tuple(failures)
