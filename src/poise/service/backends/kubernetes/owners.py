"""What makes pods: Jobs, JobSets and TrainJobs as Poise reads them, and how they take it when pods are made to leave."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.objects import Json, Owner, controller_of, requested

KUEUE_LABELS = ("kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/managed", "kueue.x-k8s.io/pod-group-name")
KUEUE = "kueue.x-k8s.io/"
KINDS = {
    "Job": ("batch/v1", "jobs"),
    "JobSet": ("jobset.x-k8s.io/v1alpha2", "jobsets"),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", "trainjobs"),
}
"""Owners that Poise knows: the version of their API that is asked if they do not say theirs, and their plural."""

EVICTION_CODES = (75, 137, 143)  # exit codes of a pod that was evicted: saved and left, killed, ended by TERM


class OwnerPhase(StrEnum):
    """How an owner is. GONE: it was deleted, and its pods are about to follow."""

    ACTIVE = "active"
    COMPLETE = "complete"
    FAILED = "failed"
    GONE = "gone"


class PodTemplate(NamedTuple):
    """Pods of one kind that an owner makes.

    name        of the replicated job in its JobSet; empty for a Job
    pods        at once;  gpus: of each
    after       replicated jobs that have to be ready or complete before these pods are made
    """

    name: str
    pods: int
    gpus: int
    scheduler: str
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnerInfo:
    """A Job, JobSet or TrainJob.

    path                 of the object in the API
    owner                what controls it
    templates            of its pods; none for a TrainJob: those of its JobSet count
    finished             pods of its templates that have succeeded and are not made again (of a Job)
    ignores_disruption   a Job that makes evicted pods again without counting a failure
    queue                Kueue decides when it runs
    annotations          Poise's, of itself and of its pod templates
    """

    kind: str
    namespace: str
    name: str
    uid: str
    path: str
    owner: Owner | None
    suspended: bool
    templates: tuple[PodTemplate, ...]
    finished: int
    state: OwnerPhase
    ignores_disruption: bool
    queue: bool
    annotations: Mapping[str, str]

    @property
    def size(self) -> int | None:
        """Number of pods at once, whoever schedules them; None: its JobSet knows."""
        return sum(each.pods for each in self.templates) if self.templates else None

    @property
    def scheduler(self) -> str:
        """The scheduler of its pods that have GPUs, else of the others; empty: its JobSet knows."""
        return max(self.templates, key=lambda each: each.gpus).scheduler if self.templates else ""

    @property
    def gpus(self) -> int:
        """GPUs of each pod that has GPUs: the most, should they differ."""
        return max((each.gpus for each in self.templates), default=0)

    @property
    def is_held(self) -> bool:
        """Whether its user has suspended it; what Poise has suspended says so."""
        return self.suspended and names.SUSPENDED_BY not in self.annotations


def read_owner(found: Json, resource: str) -> OwnerInfo:
    """Read a Job, JobSet or TrainJob. Items of lists are without `kind`: give it to them."""
    kind = found.get("kind", "")
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    version, plural = KINDS[kind]
    meta, spec, status = found["metadata"], found.get("spec") or {}, found.get("status") or {}
    namespace, name = meta.get("namespace", "default"), meta["name"]
    state = _state_of(status)
    templates = tuple(_templates(kind, spec, resource))
    labels = meta.get("labels") or {}
    return OwnerInfo(
        kind=kind,
        namespace=namespace,
        name=name,
        uid=meta["uid"],
        path=f"/apis/{found.get('apiVersion') or version}/namespaces/{namespace}/{plural}/{name}",
        owner=controller_of(found),
        suspended=bool(spec.get("suspend")),
        templates=templates,
        finished=_finished(spec, status, state, templates[0].pods) if kind == "Job" else 0,
        state=state,
        ignores_disruption=kind == "Job" and _ignores_disruption(spec),
        queue=any(each in labels for each in KUEUE_LABELS) or str(spec.get("managedBy", "")).startswith(KUEUE),
        annotations=_annotations(kind, found),
    )


def _state_of(status: Json) -> OwnerPhase:
    words = {"Complete": OwnerPhase.COMPLETE, "Completed": OwnerPhase.COMPLETE, "Failed": OwnerPhase.FAILED}
    for each in status.get("conditions") or ():
        if each.get("status") == "True" and each.get("type") in words:
            return words[each["type"]]
    return OwnerPhase.ACTIVE


def _templates(kind: str, spec: Json, resource: str) -> Iterator[PodTemplate]:
    if kind == "Job":
        yield _template("", spec, resource)
    if kind != "JobSet":
        return
    before: tuple[str, ...] = ()
    in_order = (spec.get("startupPolicy") or {}).get("startupPolicyOrder") == "InOrder"
    for each in spec.get("replicatedJobs") or ():
        job = (each.get("template") or {}).get("spec") or {}
        after = (*(before if in_order else ()), *(other.get("name", "") for other in each.get("dependsOn") or ()))
        made = _template(each.get("name", ""), job, resource)
        yield made._replace(pods=made.pods * _number(each.get("replicas")), after=after)
        before = (made.name,)


def _template(name: str, job: Json, resource: str) -> PodTemplate:
    pod = (job.get("template") or {}).get("spec") or {}
    pods = _number(job.get("parallelism"))
    if job.get("completions") is not None:
        pods = min(pods, int(job["completions"]))
    return PodTemplate(name, pods, round(requested(pod, resource)), pod.get("schedulerName", "default-scheduler"))


def _number(found: int | None) -> int:
    return 1 if found is None else int(found)


def _finished(job: Json, status: Json, state: OwnerPhase, pods: int) -> int:
    """Count the pods that a Job needed and needs no more: of the last ones, fewer than `parallelism` are made."""
    succeeded = status.get("succeeded") or 0
    if state is OwnerPhase.COMPLETE:
        return pods
    if job.get("completions") is None:
        return min(pods, int(succeeded))  # once a pod of a work queue has succeeded no others are made
    completions: int = job["completions"]
    return max(0, pods - max(0, completions - succeeded))


def _ignores_disruption(job: Json) -> bool:
    """Whether an evicted pod is made again and counts as no failure. The first rule that applies decides."""
    for rule in (job.get("podFailurePolicy") or {}).get("rules") or ():
        conditions = rule.get("onPodConditions") or ()
        is_disruption = any(each.get("type") == "DisruptionTarget" for each in conditions)
        codes = rule.get("onExitCodes") or {}
        listed = codes.get("values") or ()
        hit = [code for code in EVICTION_CODES if codes and (code in listed) == (codes.get("operator", "In") == "In")]
        if rule.get("action") == "Ignore":
            # Code 75 is that of a script that has saved and left: whoever ignores it has Poise in mind.
            if is_disruption or 75 in hit:
                return True
        elif is_disruption or hit:
            return False
    return False


def _annotations(kind: str, found: Json) -> Mapping[str, str]:
    spec = found.get("spec") or {}
    jobs = [spec] if kind == "Job" else [(each.get("template") or {}).get("spec") or {} for each in _replicated(spec)]
    metas = [(job.get("template") or {}).get("metadata") or {} for job in jobs]
    said: dict[str, str] = {}
    for meta in (*metas, found["metadata"]):
        said |= {key: text for key, text in (meta.get("annotations") or {}).items() if key.startswith(names.PREFIX + "/")}
    return said


def _replicated(spec: Json) -> Sequence[Json]:
    return spec.get("replicatedJobs") or ()


def group_of(owner: Owner) -> str:
    """Return the API group of an owner."""
    return owner.api_version.rpartition("/")[0]


def is_known_kind(owner: Owner | None) -> bool:
    """Whether Poise reads objects of this kind. Others have Jobs, too: Volcano's is of another group."""
    return owner is not None and owner.kind in KINDS and group_of(owner) == KINDS[owner.kind][0].partition("/")[0]
