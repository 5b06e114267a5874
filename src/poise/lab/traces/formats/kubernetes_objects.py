"""Objects of the Kubernetes API, reduced to what a trace needs: pods, Jobs, Kueue's Workloads and Volcano's Jobs."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from poise.lab.traces.gpu_types import gpu_type_of
from poise.lab.traces.parsing import Record, field_refusal, label, object_in, objects_in, text_in, timestamp, whole
from poise.lab.traces.schema import JobOutcome

KEYS = ("apiVersion",)
"""Keys that every object has, a list of them too, and no other format."""
TYPE_LABELS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator")
GROUP_LABELS = (
    "kueue.x-k8s.io/pod-group-name",
    "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io",
    "pod-group.scheduling.sigs.k8s.io/name",
    "scheduling.k8s.io/group-name",
)
"""Labels by which pods without an owner are one gang."""
SLICE = "nvidia.com/mig-"
MOST_PODS = 1_000_000
_VOLCANO_ENDS = {
    "Completed": JobOutcome.PASSED,
    "Failed": JobOutcome.FAILED,
    "Aborted": JobOutcome.KILLED,
    "Terminated": JobOutcome.KILLED,
}
_POD_ENDS = {"Succeeded": JobOutcome.PASSED, "Failed": JobOutcome.FAILED}


class KubeKind(StrEnum):
    """The kinds that are read, as group and kind."""

    POD = "/Pod"
    JOB = "batch/Job"
    WORKLOAD = "kueue.x-k8s.io/Workload"
    VOLCANO_JOB = "batch.volcano.sh/Job"


class KubeOwner(NamedTuple):
    """The object that controls another; of a pod that has none, its group of pods, whose uid is made up of its name."""

    uid: str
    name: str


class GpuSpan(NamedTuple):
    """From when to when GPUs were held, and how that ended."""

    start: float
    end: float
    outcome: JobOutcome


class KubeObject(NamedTuple):
    """What an object tells of the job that it is a part of.

    created       seconds since 1970, as all times
    pod_gpus      how many pods there are of each size in GPUs; pods without one are left out
    runs          those that have ended
    outcome       how it ended; None if it has not, or does not say
    is_open       it has not ended
    has_no_end    it has ended, and does not say when
    was_evicted   it ran before, which it does not tell
    """

    line: int
    kind: KubeKind
    uid: str
    owner: KubeOwner | None
    namespace: str
    name: str
    created: float
    pod_gpus: tuple[tuple[int, int], ...]
    runs: tuple[GpuSpan, ...]
    outcome: JobOutcome | None
    is_open: bool
    has_no_end: bool
    was_evicted: bool
    sliced: bool
    node: str
    gpu_types: tuple[str, ...]
    priority: int

    @property
    def gpus(self) -> int:
        """The GPUs of all its pods."""
        return sum(pods * gpus for pods, gpus in self.pod_gpus)


class _Story(NamedTuple):
    """Runs of an object that have ended, how it ended as a whole, and what is missing."""

    runs: tuple[GpuSpan, ...] = ()
    outcome: JobOutcome | None = None
    is_open: bool = False
    has_no_end: bool = False
    was_evicted: bool = False


def object_of(line: int, record: Record) -> KubeObject | None:
    """Return what an object of one of our kinds tells; None for any other. Raises FieldError for a wrong value."""
    version, name = text_in(record, "apiVersion"), text_in(record, "kind")
    group = version.rpartition("/")[0]
    kind = next((each for each in KubeKind if each == f"{group}/{name}"), None)
    if kind is None:
        return None
    meta, spec, status = (object_in(record, key) for key in ("metadata", "spec", "status"))
    match kind:
        case KubeKind.POD:
            templates = [(1, spec)]
            story = _pod_story(status)
        case KubeKind.JOB:
            templates = [(_count(spec, "parallelism"), _template(spec))]
            story = _job_story(status)
        case KubeKind.WORKLOAD:
            templates = [(_count(each, "count"), _template(each)) for each in objects_in(spec, "podSets")]
            story = _workload_story(status)
        case KubeKind.VOLCANO_JOB:
            templates = [(_count(each, "replicas"), _template(each)) for each in objects_in(spec, "tasks")]
            story = _volcano_story(status)
    sizes = [(pods, _gpus(template)) for pods, template in templates if pods]
    created = _time(meta, "creationTimestamp")
    if created is None:
        raise field_refusal("metadata.creationTimestamp", "a time such as 2026-01-02T03:04:05Z", None)
    return KubeObject(
        line=line,
        kind=kind,
        uid=label(text_in(meta, "uid"), "metadata.uid"),
        owner=_owner(meta),
        namespace=label(text_in(meta, "namespace") or "default", "metadata.namespace"),
        name=label(text_in(meta, "name"), "metadata.name"),
        created=created,
        pod_gpus=tuple((pods, gpus) for pods, gpus in sizes if gpus),
        runs=story.runs,
        outcome=story.outcome,
        is_open=story.is_open,
        has_no_end=story.has_no_end,
        was_evicted=story.was_evicted,
        sliced=any(map(_is_sliced, (template for _, template in templates))),
        node=text_in(spec, "nodeName"),
        gpu_types=next(filter(None, (_gpu_types(template) for _, template in templates)), ()),
        priority=_priority(spec, templates),
    )


def _owner(meta: Record) -> KubeOwner | None:
    """Return the controller, or else the group; a CronJob is none, since each of its Jobs is a job."""
    for each in objects_in(meta, "ownerReferences"):
        if (each.get("controller") or text_in(each, "kind") in ("Job", "Pod")) and text_in(each, "kind") != "CronJob":
            return KubeOwner(text_in(each, "uid"), label(text_in(each, "name"), "metadata.ownerReferences.name"))
    labels = object_in(meta, "labels")
    group = next(filter(None, (text_in(labels, key) for key in GROUP_LABELS)), "")
    return KubeOwner(f"{text_in(meta, 'namespace')}/{label(group, 'metadata.labels')}", group) if group else None


# When each kind ran, and how it ended.


def _pod_story(status: Record) -> _Story:
    outcome = _POD_ENDS.get(text_in(status, "phase"))
    if outcome is None:
        return _Story(is_open=True)
    scheduled = _condition(status, "PodScheduled")
    start = _time(scheduled, "lastTransitionTime") if scheduled else _time(status, "startTime")
    ended = [object_in(object_in(each, "state"), "terminated") for each in objects_in(status, "containerStatuses")]
    ends = [_time(each, "finishedAt") for each in ended]
    known = [end for end in ends if end is not None]
    if start is None:
        return _Story(outcome=outcome)
    if not known or len(known) < len(ends) or max(known) < start:
        return _Story(outcome=outcome, has_no_end=True)
    return _Story((GpuSpan(start, max(known), outcome),), outcome)


def _job_story(status: Record) -> _Story:
    done, failed = _condition(status, "Complete"), _condition(status, "Failed")
    if done is None and failed is None:
        return _Story(is_open=True)
    outcome = JobOutcome.PASSED if done is not None else JobOutcome.FAILED
    end = _time(status, "completionTime") if done is not None else None
    end = end if end is not None else _time(done or failed or {}, "lastTransitionTime")
    return _story(_time(status, "startTime"), end, outcome)


def _workload_story(status: Record) -> _Story:
    finished = _condition(status, "Finished")
    if finished is None:
        return _Story(is_open=True)
    admitted = _condition(status, "Admitted") or _condition(status, "QuotaReserved")
    outcome = JobOutcome.FAILED if text_in(finished, "reason") == "Failed" else JobOutcome.PASSED
    story = _story(_time(admitted or {}, "lastTransitionTime"), _time(finished, "lastTransitionTime"), outcome)
    evicted = any(text_in(each, "type") == "Evicted" for each in objects_in(status, "conditions"))
    return story._replace(was_evicted=evicted)


def _volcano_story(status: Record) -> _Story:
    phase = text_in(object_in(status, "state"), "phase")
    outcome = _VOLCANO_ENDS.get(phase)
    if outcome is None:
        return _Story(is_open=True)
    changes = [(text_in(each, "status"), _time(each, "lastTransitionTime")) for each in objects_in(status, "conditions")]
    changes.append((phase, _time(object_in(status, "state"), "lastTransitionTime")))
    runs: list[GpuSpan] = []
    start: float | None = None
    for now, at in changes:
        if now == "Running":
            start = at if start is None else start
        elif start is not None and at is not None and now != "Completing":
            runs.append(GpuSpan(start, max(at, start), _VOLCANO_ENDS.get(now, JobOutcome.FAILED)))
            start = None
    return _Story(tuple(runs), outcome, has_no_end=start is not None)


def _story(start: float | None, end: float | None, outcome: JobOutcome) -> _Story:
    if start is None or end is None or end < start:
        return _Story(outcome=outcome, has_no_end=start is not None)
    return _Story((GpuSpan(start, end, outcome),), outcome)


def _condition(status: Record, kind: str) -> Record | None:
    """Return the condition of this type, if it holds."""
    for each in objects_in(status, "conditions"):
        if text_in(each, "type") == kind and text_in(each, "status") == "True":
            return each
    return None


# What a pod, or the template of one, asks for.


def _template(spec: Record) -> Record:
    return object_in(object_in(spec, "template"), "spec")


def _gpus(pod: Record) -> int:
    """Return the GPUs of a pod: of all containers and sidecars, or of the largest that comes before them."""
    inits = objects_in(pod, "initContainers")
    stays = [text_in(each, "restartPolicy") == "Always" for each in inits]
    sidecars = sum(_container_gpus(each) for each, is_sidecar in zip(inits, stays, strict=True) if is_sidecar)
    before = max((_container_gpus(each) for each, is_sidecar in zip(inits, stays, strict=True) if not is_sidecar), default=0)
    return sidecars + max(before, sum(_container_gpus(each) for each in objects_in(pod, "containers")))


def _container_gpus(container: Record) -> int:
    resources = object_in(container, "resources")
    limits, requests = (object_in(resources, key) for key in ("limits", "requests"))
    names = [name for name in {**limits, **requests} if _is_gpu(name)]
    return sum(max(_quantity(limits, name), _quantity(requests, name)) for name in names)


def _is_gpu(resource: str) -> bool:
    return resource.endswith("/gpu") or resource.startswith(SLICE)


def _is_sliced(pod: Record) -> bool:
    resources = (object_in(each, "resources") for each in objects_in(pod, "containers"))
    return any(name.startswith(SLICE) for each in resources for name in object_in(each, "limits"))


def _gpu_types(pod: Record) -> tuple[str, ...]:
    """Return the types that the pod selects; none if any will do."""
    selector = object_in(pod, "nodeSelector")
    return tuple(gpu_type_of(label(text_in(selector, key), key)) for key in TYPE_LABELS if selector.get(key))


def _priority(spec: Record, templates: Iterable[tuple[int, Record]]) -> int:
    for each in (spec, *(template for _, template in templates)):
        value = each.get("priority")
        if type(value) is int and abs(value) < 1 << 31:
            return value
    return 0


def _quantity(resources: Record, name: str) -> int:
    """Return a whole number of GPUs, which is written as text or as a number."""
    value = resources.get(name, 0)
    return whole(str(value), name, 0)


def _count(spec: Record, key: str) -> int:
    """Return a number of pods; 1 where none is given."""
    value = spec.get(key)
    if value is None:
        return 1
    if type(value) is not int or not 0 <= value <= MOST_PODS:
        raise field_refusal(key, f"a whole number from 0 to {MOST_PODS:,}", value)
    return value


def _time(record: Record, key: str) -> float | None:
    """Return seconds since 1970; None where there is no time."""
    text = text_in(record, key)
    return timestamp(text, key) if text else None
