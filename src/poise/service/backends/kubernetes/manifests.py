"""The pods of a run that Poise starts, as Kubernetes reads them. Pure: an order goes in, JSON comes out.

A pod has the part of a run that is on one node:

    poise-files   (init container)  puts the runner, which needs only Python, into a volume of the pod
    poise-agent   (sidecar)         the agent: to the server, this pod is a node. From Poise's own image
    job                             the user's image; its first process starts the runner when the agent says so

Agent and job share a volume and see each other's processes, so that the agent watches the runner by the same files, locks
and process numbers as on any machine. The user's variables and command are no part of the pod: they come with the order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from poise.service.backends.api import RunOrder, RunPart
from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.objects import Json
from poise.service.wire.request import RELAY, JobRequest, PodOptions, Volume

SHARED = "/poise"  # the volume that agent and job share
SECRETS = "/var/run/secrets/poise"
AUDIENCE = "poise"
TOKEN_SECONDS = 3_600  # the kubelet renews it long before
STARTER = f"{SHARED}/lib/poise/service/backends/local/runner/starter.py"
LEAVING_SECONDS = 30  # beyond the time in which a job saves: for TERM, KILL, and the agent's last words
JOB_CONTAINER, AGENT_CONTAINER, FILES_CONTAINER = "job", "poise-agent", "poise-files"
SIDECAR = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}
"""Of the agent, which takes some 100 MB. Where a namespace has a quota, pods have to say what they ask for."""
NO_RIGHTS = "poise-job"  # service account without any rights
AGENT_FOLDERS = ("/bin", "/etc", "/lib", "/lib64", "/opt/poise", "/proc", "/sys", "/usr/bin", "/usr/lib", "/usr/local")
"""Of Poise's image: the agent could not run without them."""


@dataclass(frozen=True, slots=True)
class PodTerms:
    """What all pods of a service have in common.

    service       identity of the service
    server        URL where agents connect;  certificate: with which they check it, PEM; empty: with those of their image
    image         of Poise itself;  pull_secrets: with which nodes fetch it
    tolerated     keys of taints that pods tolerate, besides that of the GPUs
    runtime_class  with which containers see GPUs, if that is not the default of the nodes
    """

    namespace: str
    service: str
    server: str
    image: str
    certificate: str = ""
    resource: str = names.GPU_RESOURCE
    scheduler: str = names.SCHEDULER
    tolerated: Sequence[str] = ()
    pull_secrets: Sequence[str] = ()
    runtime_class: str | None = None


class RunPods(NamedTuple):
    """What there has to be for a run, in the order in which it is created. `service`: None if it needs none."""

    service: Json | None
    pods: Sequence[Json]


def links_of(order: RunOrder) -> tuple[str, ...]:
    """Return the names of a run's pods, by part. To the server each is a node of its own."""
    return tuple(names.pod_name(order.job, order.epoch, part) for part in range(len(order.gpus)))


def checkpoint_problem(pod: PodOptions, place: str) -> str | None:
    """Say why a job cannot keep its checkpoints at a place; None: it can, as far as is known.

    A path is one of the job's container. What is on none of its volumes would go with the pod.
    """
    path = _local_path(place)
    if path is None:
        return None
    claim = pod.claim_at(path)
    if claim is None:
        return (
            f"checkpoints are kept at {path}, which is on no claim that the job can write; mount one that all nodes share:"
            f" --volume NAME:{path}"
        )
    hidden = next((each for each in AGENT_FOLDERS if f"{each}/".startswith(f"{claim.folder}/")), None)
    if hidden is not None:
        return (
            f"the claim at {claim.folder} has the checkpoints, and would hide {hidden} from Poise's sidecar;"
            " mount it elsewhere, such as at /ckpt"
        )
    return None


def _local_path(place: str) -> str | None:
    """Return the path of a place in the container of a job; None: it is none there."""
    for scheme in ("file://", "local://"):
        place = place.removeprefix(scheme)
    return place if place.startswith("/") else None


def run_pods(order: RunOrder, terms: PodTerms, term: int, place: str = RELAY) -> RunPods:
    """Make the pods of a run, that of rank 0 last: if it is there, all of them are, or have been.

    place   where its checkpoints are kept
    """
    parts = [_pod(order, number, part, terms, term, place) for number, part in enumerate(order.gpus)]
    return RunPods(_service(order, terms, term) if len(parts) > 1 else None, parts[::-1])


def _service(order: RunOrder, terms: PodTerms, term: int) -> Json:
    """Make the headless service by which pods of a run find each other, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.service_name(order.job, order.epoch),
            "namespace": terms.namespace,
            "labels": _labels(order, terms),
            "annotations": {names.TERM: str(term)},
        },
        "spec": {"clusterIP": "None", "selector": _labels(order, terms), "publishNotReadyAddresses": True},
    }


def _labels(order: RunOrder, terms: PodTerms) -> dict[str, str]:
    return {
        names.MANAGED_BY: names.MANAGER,
        names.SERVICE: terms.service,
        names.JOB: names.label_value(order.job),
        names.EPOCH: str(order.epoch),
    }


def _pod(order: RunOrder, number: int, part: RunPart, terms: PodTerms, term: int, place: str) -> Json:
    request, name, alone = order.request, names.pod_name(order.job, order.epoch, number), len(order.gpus) == 1
    group = names.service_name(order.job, order.epoch)
    agent = [
        "poise", "agent", "--once", "--server", terms.server, "--node", name, "--gpus", f"{part.gpu_type}:{len(part.slots)}",
        "--token-file", f"{SECRETS}/token", "--starter", f"{SHARED}/starter", "--state", f"{SHARED}/{name}",
        "--isolate", "off", "--quiet",
    ]  # fmt: skip
    # An agent knows its processes by the path of its state: a name of its own keeps pods apart that see each other's.
    agent += ["--address", "127.0.0.1" if alone else f"{name}.{group}.{terms.namespace}.svc"]
    if terms.certificate:
        agent += ["--tls-ca", f"{SECRETS}/ca.crt"]
    user = request.pod.user
    as_user = {} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    # Agent and job read each other's files and processes, so they are one user: root, unless the job says otherwise, also
    # where the image has another one.
    security: Json = {"runAsUser": user or 0, "allowPrivilegeEscalation": False}
    if user:  # all that the pod security level `restricted` wants
        security |= {
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    # Root of a job keeps what containers usually have, such as setuid programs of its image.
    job_security = security if user else {"runAsUser": 0}
    secrets_to_pull = dict.fromkeys((*request.pod.pull_secrets, *terms.pull_secrets))
    volumes, mounts = _volumes(request.pod.volumes)
    shared = [{"name": "poise", "mountPath": SHARED}]
    secrets = [{"name": "poise-secrets", "mountPath": SECRETS, "readOnly": True}]
    # The agent makes the job's folder for checkpoints, or copies them there. It sees no other volume of the job.
    path = _local_path(place)
    claim = None if path is None else request.pod.claim_at(path)
    kept = [mount for each, mount in zip(request.pod.volumes, mounts, strict=True) if each == claim]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": terms.namespace,
            "labels": {**_labels(order, terms), names.PART: str(number), names.TENANT: names.label_value(order.tenant)},
            "annotations": {
                names.TERM: str(term),
                names.SLOTS: ",".join(map(str, part.slots)),
                **({names.CERTIFICATE: terms.certificate} if terms.certificate else {}),
            },
        },
        "spec": {
            "nodeName": part.node,
            "schedulerName": terms.scheduler,
            "restartPolicy": "Never",
            "hostname": name,
            **({} if alone else {"subdomain": group}),
            **({"runtimeClassName": terms.runtime_class} if terms.runtime_class else {}),
            "shareProcessNamespace": True,
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "serviceAccountName": request.pod.service_account or NO_RIGHTS,
            "terminationGracePeriodSeconds": round(request.checkpoint.deadline) + LEAVING_SECONDS,
            "tolerations": [{"key": each, "operator": "Exists"} for each in (terms.resource, *terms.tolerated)],
            **({"imagePullSecrets": [{"name": each} for each in secrets_to_pull]} if secrets_to_pull else {}),
            **({"securityContext": as_user} if as_user else {}),
            "initContainers": [
                {
                    "name": FILES_CONTAINER,
                    "image": terms.image,
                    "command": ["poise", "agent", "--install", f"{SHARED}/lib"],
                    "resources": SIDECAR,
                    "securityContext": security,
                    "volumeMounts": shared,
                },
                {
                    "name": AGENT_CONTAINER,
                    "image": terms.image,
                    "restartPolicy": "Always",
                    "command": agent,
                    "resources": SIDECAR,
                    "securityContext": security,
                    "volumeMounts": shared + secrets + kept,
                },
            ],
            "containers": [
                {
                    "name": JOB_CONTAINER,
                    "image": request.image,
                    "command": ["python3", STARTER, f"{SHARED}/starter"],
                    "resources": _resources(request, len(part.slots), terms.resource),
                    "securityContext": job_security,
                    "volumeMounts": [*shared, {"name": "shm", "mountPath": "/dev/shm"}, *mounts],
                }
            ],
            "volumes": [
                {"name": "poise", "emptyDir": {}},
                # What data loaders of several processes pass batches through; Docker's own has 64 MB.
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
                {"name": "poise-secrets", "projected": {"defaultMode": 0o440, "sources": _secrets(terms)}},
                *volumes,
            ],
        },
    }


def _resources(request: JobRequest, gpus: int, resource: str) -> Json:
    asked: dict[str, str] = {}
    if request.pod.cpu is not None:
        asked["cpu"] = f"{round(request.pod.cpu * 1000)}m"
    if request.pod.memory is not None:
        asked["memory"] = str(request.pod.memory)
    # Memory that was not asked for may be taken away by killing; processors may be used if they are idle.
    limits = {name: text for name, text in asked.items() if name != "cpu"}
    return {"requests": {**asked, resource: str(gpus)}, "limits": {**limits, resource: str(gpus)}}


def _secrets(terms: PodTerms) -> list[Json]:
    token = {"path": "token", "audience": AUDIENCE, "expirationSeconds": TOKEN_SECONDS}
    sources: list[Json] = [{"serviceAccountToken": token}]
    if terms.certificate:
        field = {"fieldPath": f"metadata.annotations['{names.CERTIFICATE}']"}
        sources.append({"downwardAPI": {"items": [{"path": "ca.crt", "fieldRef": field}]}})
    return sources


def _volumes(wanted: Sequence[Volume]) -> tuple[list[Json], list[Json]]:
    """Return the volumes of a job, and where its container mounts them. What is mounted at two places is one volume.

    They are named by number: names of claims may be longer than those of volumes, and have dots.
    """
    numbers: dict[tuple[str, str], str] = {}
    for each in wanted:
        numbers.setdefault((each.kind, each.name), f"volume-{len(numbers)}")
    sources = {
        "claim": lambda name: {"persistentVolumeClaim": {"claimName": name}},
        "secret": lambda name: {"secret": {"secretName": name}},
        "config": lambda name: {"configMap": {"name": name}},
    }
    volumes = [{"name": number, **sources[kind](name)} for (kind, name), number in numbers.items()]
    mounts = [
        {
            "name": numbers[each.kind, each.name],
            "mountPath": each.path,
            **({"readOnly": True} if each.read_only else {}),
        }
        for each in wanted
    ]
    return volumes, mounts
