"""What Poise reads of Kubernetes objects: small values made from the API's JSON, so that 20,000 pods fit into memory."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import isnan
from typing import Any, NamedTuple

from poise.service.backends.kubernetes import names

Json = dict[str, Any]
ObjectKey = tuple[str, str]  # namespace and name

_SUFFIXES = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "n": 1e-9, "u": 1e-6,
    "E": 1e18, "Ei": 2.0**60,
}  # fmt: skip
MOST = 2.0**53
"""Of any quantity. Kubernetes refuses larger ones in pods; what others have defined, as JobSets, may say infinitely much."""
_KEPT_PREFIXES = (
    names.PREFIX + "/",
    "kueue.x-k8s.io/",
    "scheduling.k8s.io/",
    "scheduling.x-k8s.io/",
    "batch.kubernetes.io/",
)


class Owner(NamedTuple):
    """The object that controls another one."""

    api_version: str
    kind: str
    name: str
    uid: str


class Condition(NamedTuple):
    """A condition of a node, a pod or an owner."""

    type: str
    is_true: bool
    reason: str
    message: str


class ContainerState(NamedTuple):
    """How one container is.

    state   waiting, running or terminated
    code    exit code once it has terminated; None before
    """

    name: str
    state: str
    reason: str
    message: str
    code: int | None
    is_init: bool


@dataclass(frozen=True, slots=True)
class PodInfo:
    """A pod.

    node       it is bound to; empty: to none
    gpus       that it asks for, as the scheduler counts them
    is_gated   it has scheduling gates, and may not be bound yet
    ending     it is being deleted
    selector   node labels that it asks for;  affinity: required node affinity as JSON text, empty: none
    """

    namespace: str
    name: str
    uid: str
    version: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    owner: Owner | None
    scheduler: str
    node: str
    gpus: int
    phase: str
    reason: str
    message: str
    ending: bool
    is_gated: bool
    selector: Mapping[str, str]
    affinity: str
    tolerations: tuple[tuple[str, str, str, str], ...]  # key, operator, value, effect
    created: float
    conditions: tuple[Condition, ...] = ()
    containers: tuple[ContainerState, ...] = ()
    cpu: float = 0.0  # cores
    memory: float = 0.0  # bytes

    @property
    def key(self) -> ObjectKey:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def is_over(self) -> bool:
        """Whether its kubelet has said that its containers have ended for good."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def holds_gpus(self) -> bool:
        """Whether it counts against the GPUs of its node."""
        return bool(self.node) and self.gpus > 0 and not self.is_over

    def condition(self, kind: str) -> Condition | None:
        """Return its condition of this type."""
        return next((each for each in self.conditions if each.type == kind), None)


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node of the cluster. `gpus`: those that can be given out; `taints`: key, value, effect."""

    name: str
    uid: str
    labels: Mapping[str, str]
    gpus: int
    cpu: float
    memory: float
    is_ready: bool
    message: str  # why it is not
    is_cordoned: bool
    taints: tuple[tuple[str, str, str], ...] = ()


def read_pod(found: Json, resource: str) -> PodInfo:
    """Read a pod. What it lacks is taken as Kubernetes' own defaults have it."""
    meta, spec, status = found["metadata"], found.get("spec", {}), found.get("status", {})
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    return PodInfo(
        namespace=sys.intern(meta.get("namespace", "default")), name=meta["name"], uid=meta["uid"],
        version=meta.get("resourceVersion", ""), labels=_interned(meta.get("labels")),
        annotations=_interned(
            {key: text for key, text in (meta.get("annotations") or {}).items() if key.startswith(_KEPT_PREFIXES)}
        ),
        owner=controller_of(found), scheduler=sys.intern(spec.get("schedulerName", "default-scheduler")),
        node=sys.intern(spec.get("nodeName") or ""), gpus=round(requested(spec, resource)),
        phase=sys.intern(status.get("phase", "Pending")), reason=status.get("reason", ""),
        message=status.get("message", ""), ending="deletionTimestamp" in meta,
        is_gated=bool(spec.get("schedulingGates")), selector=_interned(spec.get("nodeSelector")),
        affinity="" if not affinity else sys.intern(json.dumps(affinity, sort_keys=True)),
        tolerations=tuple(
            (each.get("key", ""), each.get("operator", "Equal"), each.get("value", ""), each.get("effect", ""))
            for each in spec.get("tolerations") or ()
        ),
        created=moment(meta.get("creationTimestamp")),
        conditions=tuple(_conditions(status)), containers=tuple(_containers(status)),
        cpu=requested(spec, "cpu"), memory=requested(spec, "memory"),
    )  # fmt: skip


def read_node(found: Json, resource: str) -> NodeInfo:
    """Read a node. One that has never reported is not ready."""
    meta, spec, status = found["metadata"], found.get("spec", {}), found.get("status", {})
    allocatable = status.get("allocatable") or {}
    ready = next((each for each in _conditions(status) if each.type == "Ready"), None)
    return NodeInfo(
        name=meta["name"], uid=meta["uid"], labels=dict(meta.get("labels") or {}),
        gpus=int(quantity(allocatable.get(resource, "0"))), cpu=quantity(allocatable.get("cpu", "0")),
        memory=quantity(allocatable.get("memory", "0")), is_ready=ready is not None and ready.is_true,
        message="it has never reported" if ready is None else ready.message or ready.reason,
        is_cordoned=bool(spec.get("unschedulable")),
        taints=tuple((each["key"], each.get("value", ""), each["effect"]) for each in spec.get("taints") or ()),
    )  # fmt: skip


def requested(spec: Json, resource: str) -> float:
    """Return how much of a resource a pod asks for: its containers and sidecars together, or its largest init container.

    Limits count where there is no request: of GPUs, that is how they are usually written.
    """
    running = sum(_asked(each, resource) for each in spec.get("containers") or ())
    most, sidecars = 0.0, 0.0
    for each in spec.get("initContainers") or ():
        if each.get("restartPolicy") == "Always":
            sidecars += _asked(each, resource)
            most = max(most, sidecars)
        else:
            most = max(most, sidecars + _asked(each, resource))
    return max(running + sidecars, most)


def quantity(text: str | float) -> float:
    """Read a quantity such as `500m` or `16Gi`: at least nothing, which counts for what makes no sense, at most MOST."""
    if isinstance(text, int | float):
        return min(max(0.0, float(text)), MOST)
    number = text.rstrip("".join({*"".join(_SUFFIXES)}))
    try:
        value = float(number) * _SUFFIXES[text[len(number) :]]
    except (ValueError, KeyError):
        try:
            value = float(text)  # 1e3
        except ValueError:
            return 0.0
    return 0.0 if isnan(value) else min(max(0.0, value), MOST)


def controller_of(found: Json) -> Owner | None:
    """Return the object that controls this one; None: it has none."""
    for each in found["metadata"].get("ownerReferences") or ():
        if each.get("controller"):
            return Owner(each.get("apiVersion", ""), each.get("kind", ""), each.get("name", ""), each.get("uid", ""))
    return None


def moment(text: str | None) -> float:
    """Read a time as seconds since 1970; 0 if there is none."""
    return 0.0 if not text else datetime.fromisoformat(text).timestamp()


def _asked(container: Json, resource: str) -> float:
    resources = container.get("resources") or {}
    asked = (resources.get("requests") or {}).get(resource, (resources.get("limits") or {}).get(resource, 0))
    return quantity(asked)


def _conditions(status: Json) -> Iterator[Condition]:
    for each in status.get("conditions") or ():
        yield Condition(
            each.get("type", ""), each.get("status") == "True", each.get("reason") or "", each.get("message") or ""
        )


def _containers(status: Json) -> Iterator[ContainerState]:
    kinds: Iterable[tuple[str, bool]] = (("initContainerStatuses", True), ("containerStatuses", False))
    for name, is_init in kinds:
        for each in status.get(name) or ():
            for state, detail in (each.get("state") or {}).items():
                about = detail or {}
                yield ContainerState(
                    each["name"], state, about.get("reason", ""), about.get("message", ""), about.get("exitCode"), is_init
                )


def _interned(found: Mapping[str, str] | None) -> Mapping[str, str]:
    """Copy labels, sharing their texts: those of pods of one gang are nearly the same."""
    return {sys.intern(key): sys.intern(text) for key, text in (found or {}).items()}
