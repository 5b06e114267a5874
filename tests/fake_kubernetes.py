"""A Kubernetes API server in memory, as a transport of httpx, so that the real client runs on it; and nodes and pods for it.

It keeps objects, resource versions and a history, and answers as the real one does in what the back end relies on: pages,
watches that expire, conflicts, preconditions, bindings, evictions, graceful deletion. There is no controller and no kubelet:
tests play those by `change` and `finish_deletions`. All of it may be called from any thread.
"""

import asyncio
import json
import re
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from time import gmtime, strftime, time  # noqa: TID251 - objects carry the time at which they were made
from typing import Any, NamedTuple
from urllib.parse import parse_qsl
from uuid import uuid4

import httpx

from poise.service.backends.kubernetes.access import KubeConfig
from poise.service.backends.kubernetes.client import KubeClient

Json = dict[str, Any]
Where = Callable[[str, str], bool]
"""Whether a fault strikes a request, by its verb (Kubernetes' word) and path without the query."""

NODES, PODS, JOBS, LEASES = "nodes", "pods", "jobs", "leases"
GPU = "nvidia.com/gpu"
PRODUCT = "nvidia.com/gpu.product"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
MERGED_BY = {  # how a strategic patch finds the element of a list that it changes
    "conditions": "type",
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ownerReferences": "uid",
}
DELETION = ("deletionTimestamp", "deletionGracePeriodSeconds")
PATCHES = {"application/merge-patch+json", "application/strategic-merge-patch+json", "application/apply-patch+yaml"}
MUTABLE_IN_PODS = {"activeDeadlineSeconds", "terminationGracePeriodSeconds", "tolerations", "schedulingGates"}
SELECTABLE = {
    "pods": {"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "status.phase", "status.podIP"},
    "nodes": {"spec.unschedulable"},
    "namespaces": {"status.phase"},
    "events": {f"involvedObject.{name}" for name in ("kind", "namespace", "name", "uid")} | {"reason", "type"},
    "jobs": {"status.successful"},
}


class Collection(NamedTuple):
    """A kind of object. `prefix` is the path of its group and version."""

    prefix: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        return self.prefix.removeprefix("/apis/").removeprefix("/api/")

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def resource(self) -> str:
        """Its name as in messages: `pods`, `jobs.batch`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def is_custom(self) -> bool:
        """Whether it is of a custom resource definition, which takes no strategic patches."""
        return self.group.endswith((".x-k8s.io", ".kubeflow.org"))

    @property
    def has_status(self) -> bool:
        """Whether its status is written by itself."""
        return self.is_custom or self.plural in (PODS, JOBS, NODES, "namespaces", "services")


COLLECTIONS = [
    Collection("/api/v1", "nodes", "Node", is_namespaced=False),
    Collection("/api/v1", "pods", "Pod"),
    Collection("/api/v1", "services", "Service"),
    Collection("/api/v1", "events", "Event"),
    Collection("/api/v1", "configmaps", "ConfigMap"),
    Collection("/api/v1", "secrets", "Secret"),
    Collection("/api/v1", "serviceaccounts", "ServiceAccount"),
    Collection("/api/v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    Collection("/apis/batch/v1", "jobs", "Job"),
    Collection("/apis/coordination.k8s.io/v1", "leases", "Lease"),
    Collection("/apis/events.k8s.io/v1", "events", "Event"),
    Collection("/apis/policy/v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Collection("/apis/scheduling.k8s.io/v1", "priorityclasses", "PriorityClass", is_namespaced=False),
    Collection("/apis/jobset.x-k8s.io/v1alpha2", "jobsets", "JobSet"),
    Collection("/apis/trainer.kubeflow.org/v1alpha1", "trainjobs", "TrainJob"),
    Collection("/api/v1", "namespaces", "Namespace", is_namespaced=False),  # last: others are below its objects
]
Key = tuple[str, str]
Change = tuple[int, Collection, Json | None, Json | None]
"""A resource version, and an object before and after it."""


class RefusedError(Exception):
    """A request that the server refuses."""

    def __init__(
        self, code: int, reason: str, message: str, causes: Sequence[Json] = (), retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.causes, self.retry_after = code, reason, message, causes, retry_after


class Asked(NamedTuple):
    """A request as the server understands it."""

    method: str
    path: str
    query: Mapping[str, str]
    collection: Collection
    namespace: str
    name: str
    subresource: str
    body: Any
    content_type: str

    @property
    def verb(self) -> str:
        if self.method == "GET":
            return "get" if self.name else "watch" if self.query.get("watch") in ("1", "true") else "list"
        return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[self.method]


@dataclass
class Fault:
    """What goes wrong with the next `left` requests for which `where` holds."""

    status: int | str
    left: int
    where: Where
    retry_after: int | None


@dataclass
class Budget:
    """How many of these pods may still be evicted."""

    allowed: int
    where: Callable[[Json], bool]


@dataclass(eq=False)
class Watcher:
    """One open watch: where it stands, and how its stream is woken."""

    asked: Asked
    loop: asyncio.AbstractEventLoop
    seen: int
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    ending: str = ""  # "end", "break"
    bookmarks: int = 0

    def wake(self) -> None:
        with suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self.woken.set)


class FakeKubernetes:
    """A cluster's API.

    requests   verb and path (without the query) of all requests so far, in order
    tokens     what a review of a token answers: a user, and if need be the token's `audiences`
    bearers    the tokens with which requests may be made; None: any, or none at all
    denied     verbs and resources (`pods`, `pods/binding`, `jobs.batch`) that are forbidden
    logs       of pods, by namespace and name
    absent     paths of groups that this server does not know, such as `/apis/jobset.x-k8s.io/v1alpha2`
    silent     whether open watches get nothing at all, not even their end
    """

    def __init__(self, *, wall: Callable[[], float] = time) -> None:
        self.requests: list[tuple[str, str]] = []
        self.tokens: dict[str, Json] = {}
        self.bearers: set[str] | None = None
        self.denied: set[tuple[str, str]] = set()
        self.logs: dict[Key, str] = {}
        self.absent: set[str] = set()
        self.silent = False
        self._wall = wall
        self._lock = threading.RLock()
        self._version = 1000
        self._compacted = 0
        self._objects: dict[Collection, dict[Key, Json]] = {collection: {} for collection in COLLECTIONS}
        self._history: list[Change] = []
        self._snapshots: dict[str, tuple[int, list[Json]]] = {}
        self._watchers: list[Watcher] = []
        self._faults: list[Fault] = []
        self._budgets: list[Budget] = []
        self._is_away = False
        for name in ("default", "kube-system", "poise"):
            self.add("namespaces", {"metadata": {"name": name}, "status": {"phase": "Active"}})

    def client(self, **more: Any) -> KubeClient:
        """Make a client of this server."""
        return KubeClient(self.config(), transport=FakeTransport(self), **more)

    def config(self) -> KubeConfig:
        return KubeConfig("http://kubernetes.test")

    # What tests do to the cluster, behind the back of whoever is tested

    def add(self, resource: str, thing: Json) -> Json:
        """Create an object as it is, with its status; its namespace comes to be with it."""
        with self._lock:
            collection = _collection(resource)
            thing = deepcopy(thing)
            if collection.is_namespaced:
                namespace = thing["metadata"].setdefault("namespace", "default")
                if ("", namespace) not in self._objects[_collection("namespaces")]:
                    self.add("namespaces", {"metadata": {"name": namespace}, "status": {"phase": "Active"}})
            return deepcopy(self._insert(collection, thing))

    def get(self, resource: str, name: str, namespace: str = "default") -> Json:
        """Return an object; KeyError: there is none."""
        with self._lock:
            collection = _collection(resource)
            return deepcopy(self._objects[collection][namespace if collection.is_namespaced else "", name])

    def exists(self, resource: str, name: str, namespace: str = "default") -> bool:
        with self._lock:
            collection = _collection(resource)
            return (namespace if collection.is_namespaced else "", name) in self._objects[collection]

    def all(self, resource: str, labels: str = "") -> list[Json]:
        """Return all objects of a collection, in the order of their names."""
        with self._lock:
            return [deepcopy(thing) for thing in self._listed(_collection(resource), "", _selector(labels))]

    def change(self, resource: str, name: str, patch: Json, namespace: str = "default") -> Json:
        """Change an object by a strategic patch, its status included."""
        with self._lock:
            collection = _collection(resource)
            old = self._objects[collection][namespace if collection.is_namespaced else "", name]
            return deepcopy(self._replace(collection, old, _merged(old, patch, is_strategic=True)))

    def remove(self, resource: str, name: str, namespace: str = "default") -> None:
        """Remove an object at once, whatever its grace and finalizers."""
        with self._lock:
            collection = _collection(resource)
            self._drop(collection, self._objects[collection][namespace if collection.is_namespaced else "", name])

    def set_phase(self, name: str, phase: str, namespace: str = "default", *, code: int | None = None) -> Json:
        """Play the kubelet: set a pod's phase, and the exit code of its containers."""
        pod = self.get(PODS, name, namespace)
        states: Json = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        statuses = [{"name": container["name"], "state": states} for container in pod["spec"]["containers"]]
        return self.change(PODS, name, {"status": {"phase": phase, "containerStatuses": statuses}}, namespace)

    def finish_deletions(self) -> list[str]:
        """Play the kubelets: let all pods go that are being deleted; return their names."""
        with self._lock:
            going = [pod for pod in self._objects[_collection(PODS)].values() if "deletionTimestamp" in pod["metadata"]]
            for pod in going:
                self._drop(_collection(PODS), pod)
            return [pod["metadata"]["name"] for pod in going]

    def deny(self, verb: str, resource: str) -> None:
        """Forbid a verb on a resource, such as `create` on `pods/binding`."""
        with self._lock:
            self.denied.add((verb, resource))

    def budget(self, allowed: int, where: Callable[[Json], bool] = lambda _pod: True) -> Budget:
        """Let only so many of these pods be evicted. The budget may be changed later."""
        with self._lock:
            self._budgets.append(Budget(allowed, where))
            return self._budgets[-1]

    # What goes wrong

    def fail(
        self, status: int | str, *, next: int = 1, where: Where = lambda _verb, _path: True, retry_after: int | None = None
    ) -> None:
        """Spoil the next requests for which `where` holds.

        A number    the server answers with this status and does nothing
        drop        the connection breaks before the server has the request
        drop-after  the server carries it out, and the answer is lost
        refuse      there is no connection
        hang        there is no answer, and nothing is done
        """
        if isinstance(status, str) and status not in ("drop", "drop-after", "refuse", "hang"):
            raise ValueError(f"no such fault: {status}")
        with self._lock:
            self._faults.append(Fault(status, next, where, retry_after))

    def pause(self) -> None:
        """Go away: requests find no server, and watches break."""
        with self._lock:
            self._is_away = True
            self._end_all("break")

    def resume(self) -> None:
        """Come back, with everything that was kept."""
        with self._lock:
            self._is_away = False

    def end_watches(self) -> None:
        """End all open watches as a server does whose time for them is over."""
        with self._lock:
            self._end_all("end")

    def break_watches(self) -> None:
        """Break the connections of all open watches."""
        with self._lock:
            self._end_all("break")

    def bookmark(self) -> None:
        """Send a bookmark to all open watches."""
        with self._lock:
            for watcher in self._watchers:
                watcher.bookmarks += 1
                watcher.wake()

    def compact(self) -> None:
        """Forget the history: watches and pages from before have expired."""
        with self._lock:
            self._compacted = self._version
            self._history.clear()
            self._snapshots.clear()
            for watcher in self._watchers:
                watcher.wake()

    @property
    def watches(self) -> int:
        """How many watches are open."""
        with self._lock:
            return len(self._watchers)

    @property
    def version(self) -> int:
        """The newest resource version."""
        return self._version

    def _end_all(self, ending: str) -> None:
        for watcher in self._watchers:
            watcher.ending = ending
            watcher.wake()

    # Storage: objects are never changed in place, so that history and snapshots can share them

    def _insert(self, collection: Collection, thing: Json) -> Json:
        head = thing["metadata"]
        if not head.get("name"):
            head["name"] = f"{head['generateName']}{uuid4().hex[:5]}"
        _check_names(collection, thing)
        if (_key(thing)) in self._objects[collection]:
            message = f'{collection.resource} "{head["name"]}" already exists'
            raise RefusedError(409, "AlreadyExists", message)
        head["uid"] = str(uuid4())
        head["creationTimestamp"] = self._now()
        thing["apiVersion"], thing["kind"] = collection.api_version, collection.kind
        if "spec" in thing:
            head["generation"] = 1
        if collection.plural == PODS:
            thing["spec"].setdefault("schedulerName", "default-scheduler")
            thing["spec"].setdefault("terminationGracePeriodSeconds", 30)
            thing.setdefault("status", {}).setdefault("phase", "Pending")
        self._store(collection, None, thing)
        return thing

    def _replace(self, collection: Collection, old: Json, new: Json) -> Json:
        """Store another version of an object; one that is the same is no other version."""
        for name in ("uid", "creationTimestamp", "resourceVersion", "name", "namespace", *DELETION):
            if name in old["metadata"]:
                new["metadata"][name] = old["metadata"][name]
            else:
                new["metadata"].pop(name, None)
        if new == old:
            return old
        _check_names(collection, new)
        if new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        if (
            "deletionTimestamp" in old["metadata"]
            and old["metadata"].get("finalizers")
            and not new["metadata"].get("finalizers")
        ):
            return self._drop(collection, old)
        self._store(collection, old, new)
        return new

    def _drop(self, collection: Collection, old: Json) -> Json:
        gone = deepcopy(old)
        self._version += 1
        gone["metadata"]["resourceVersion"] = str(self._version)
        del self._objects[collection][_key(old)]
        self._note((self._version, collection, gone, None))
        return gone

    def _store(self, collection: Collection, old: Json | None, new: Json) -> None:
        self._version += 1
        new["metadata"]["resourceVersion"] = str(self._version)
        self._objects[collection][_key(new)] = new
        self._note((self._version, collection, old, new))

    def _note(self, change: Change) -> None:
        self._history.append(change)
        for watcher in self._watchers:
            if watcher.asked.collection == change[1]:
                watcher.wake()

    def _listed(self, collection: Collection, namespace: str, is_selected: Callable[[Json], bool]) -> list[Json]:
        found = [
            thing
            for key, thing in self._objects[collection].items()
            if (not namespace or key[0] == namespace) and is_selected(thing)
        ]
        return sorted(found, key=_key)

    def _now(self) -> str:
        return strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(self._wall()))

    # Requests

    def parse(self, request: httpx.Request, content: bytes) -> Asked | httpx.Response:
        """Understand a request; answer one that is about no object, which changes nothing."""
        path, query = request.url.path, dict(parse_qsl(request.url.query.decode()))
        body = json.loads(content) if content else None
        with self._lock:
            return self._parse(request.method, path, query, body, request.headers.get("Content-Type", ""))

    def authorize(self, asked: Asked | None, request: httpx.Request, verb: str) -> httpx.Response | None:
        """Note a request; refuse it if it may not be made."""
        with self._lock:
            self.requests.append((verb, request.url.path))
            token = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if self.bearers is not None and token not in self.bearers:
                return _refusal(RefusedError(401, "Unauthorized", "Unauthorized"))
            if asked is None or not self._is_denied(asked):
                return None
            where = f'in the namespace "{asked.namespace}"' if asked.namespace else "at the cluster scope"
            collection, resource = asked.collection, _resource(asked)
            what = f'User "poise" cannot {verb} resource "{collection.plural}" in API group "{collection.group}" {where}'
            return _refusal(RefusedError(403, "Forbidden", f"{resource} is forbidden: {what}"))

    def _is_denied(self, asked: Asked) -> bool:
        suffix = f"/{asked.subresource}" if asked.subresource else ""
        names = {f"{name}{suffix}" for name in (asked.collection.plural, asked.collection.resource)}
        return any((asked.verb, name) in self.denied for name in names)

    def fault(self, verb: str, path: str) -> Fault | None:
        """Take out the fault that strikes this request."""
        with self._lock:
            if self._is_away:
                return Fault("refuse", 1, lambda _verb, _path: True, None)
            for fault in self._faults:
                if fault.left > 0 and fault.where(verb, path):
                    fault.left -= 1
                    return fault
            return None

    def _parse(
        self, method: str, path: str, query: Mapping[str, str], body: Any, content_type: str
    ) -> Asked | httpx.Response:
        if found := re.fullmatch(r"/apis/(authentication|authorization)\.k8s\.io/v1/(\w+)", path):
            return self._review(found[2], body)
        if path == "/version":
            return httpx.Response(200, json={"major": "1", "minor": "36", "gitVersion": "v1.36.4"})
        if path in ("/readyz", "/healthz", "/livez"):
            return httpx.Response(200, text="ok")
        for collection in COLLECTIONS:
            if collection.prefix in self.absent:
                continue
            if path == collection.prefix:
                return httpx.Response(200, json=_discovery(collection.prefix))
            pattern = rf"{collection.prefix}(?:/namespaces/([^/]+))?/{collection.plural}(?:/([^/]+)(?:/(\w+))?)?"
            found = re.fullmatch(pattern, path)
            if found and (collection.is_namespaced or found[1] is None):
                namespace, name, subresource = (found[number] or "" for number in (1, 2, 3))
                return Asked(method, path, query, collection, namespace, name, subresource, body, content_type)
        return httpx.Response(404, text="404 page not found\n")

    def _review(self, kind: str, body: Json) -> httpx.Response:
        with self._lock:
            if kind == "tokenreviews":
                return httpx.Response(201, json={**body, "status": self._authenticate(body["spec"])})
            given = body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (given["resource"], given.get("subresource"))))
            full = f"{resource}.{given['group']}" if given.get("group") else resource
            allowed = not {(given["verb"], resource), (given["verb"], full)} & self.denied
            return httpx.Response(201, json={**body, "status": {"allowed": allowed}})

    def _authenticate(self, spec: Json) -> Json:
        user = self.tokens.get(spec["token"])
        if user is None:
            return {"authenticated": False, "error": "[invalid bearer token]"}
        wanted, has = spec.get("audiences"), user.get("audiences")
        audiences = [name for name in wanted or has or [] if has is None or name in has]
        if wanted and not audiences:
            return {"authenticated": False, "error": f"token audiences {has} is invalid for the target audiences {wanted}"}
        about = {name: value for name, value in user.items() if name != "audiences"}
        return {"authenticated": True, "user": about, "audiences": audiences}

    def answer(self, asked: Asked) -> httpx.Response:
        """Carry out a request that is no watch."""
        with self._lock:
            try:
                return self._answer(asked)
            except RefusedError as refusal:
                return _refusal(refusal)

    def _answer(self, asked: Asked) -> httpx.Response:
        if asked.subresource in ("binding", "eviction", "log"):
            return {"binding": self._bind, "eviction": self._evict, "log": self._log}[asked.subresource](asked)
        match asked.verb:
            case "list":
                return self._list(asked)
            case "get":
                return httpx.Response(200, json=self._find(asked))
            case "create":
                return self._create(asked)
            case "update":
                return self._update(asked)
            case "patch":
                return self._patch(asked)
            case _:
                return self._delete(asked, self._find(asked), asked.body or {})

    def _find(self, asked: Asked) -> Json:
        found = self._objects[asked.collection].get((asked.namespace, asked.name))
        if found is None:
            raise RefusedError(404, "NotFound", f'{asked.collection.resource} "{asked.name}" not found')
        return found

    def _list(self, asked: Asked) -> httpx.Response:
        limit, token = int(asked.query.get("limit", 0)), asked.query.get("continue", "")
        if token:
            if token not in self._snapshots:
                message = "The provided continue parameter is too old to display a consistent list result."
                raise RefusedError(410, "Expired", message)
            version, items = self._snapshots[token]
        else:
            version, items = self._version, self._listed(asked.collection, asked.namespace, _selected(asked))
        head: Json = {"resourceVersion": str(version)}
        if limit and len(items) > limit:
            rest = b64encode(f"{version} {uuid4().hex}".encode()).decode()
            self._snapshots[rest] = version, items[limit:]
            head |= {"continue": rest, "remainingItemCount": len(items) - limit}
            items = items[:limit]
        bare = [{name: value for name, value in thing.items() if name not in ("kind", "apiVersion")} for thing in items]
        kind = f"{asked.collection.kind}List"
        about = {"kind": kind, "apiVersion": asked.collection.api_version, "metadata": head, "items": bare}
        return httpx.Response(200, json=about)

    def _create(self, asked: Asked) -> httpx.Response:
        collection, thing = asked.collection, deepcopy(asked.body)
        head = thing.setdefault("metadata", {})
        if collection.is_namespaced:
            if head.setdefault("namespace", asked.namespace) != asked.namespace:
                message = "the namespace of the provided object does not match the namespace sent on the request"
                raise RefusedError(400, "BadRequest", message)
            if ("", asked.namespace) not in self._objects[_collection("namespaces")]:
                raise RefusedError(404, "NotFound", f'namespaces "{asked.namespace}" not found')
        if "resourceVersion" in head:
            raise RefusedError(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        if collection.plural in (PODS, JOBS):
            thing.pop("status", None)
        return httpx.Response(201, json=self._insert(collection, thing))

    def _update(self, asked: Asked) -> httpx.Response:
        old, new = self._find(asked), deepcopy(asked.body)
        if asked.collection.plural == LEASES and not new["metadata"].get("resourceVersion"):
            message = f'{asked.collection.resource} "{asked.name}" is invalid: metadata.resourceVersion: must be specified'
            raise RefusedError(422, "Invalid", message)
        return self._change(asked, old, new)

    def _patch(self, asked: Asked) -> httpx.Response:
        old = self._objects[asked.collection].get((asked.namespace, asked.name))
        kind = asked.content_type.partition(";")[0]
        if old is None and kind == "application/apply-patch+yaml" and not asked.subresource:
            return self._create(asked)
        old = self._find(asked)
        if kind == "application/json-patch+json":
            new = _json_patched(old, asked.body)
        elif kind == "application/strategic-merge-patch+json" and asked.collection.is_custom:
            message = "the body of the request was in an unknown format - accepted media types include: json, merge, apply"
            raise RefusedError(415, "UnsupportedMediaType", message)
        elif kind in PATCHES:
            new = _merged(old, asked.body, is_strategic=kind != "application/merge-patch+json")
        else:
            raise RefusedError(415, "UnsupportedMediaType", f"{kind!r} is no type of patch")
        return self._change(asked, old, new)

    def _change(self, asked: Asked, old: Json, new: Json) -> httpx.Response:
        """Store an update or a patch: checked, and of the status only or of everything else."""
        head = new.setdefault("metadata", {})
        if head.get("uid") not in (None, old["metadata"]["uid"]):
            raise _wrong_uid(asked, head["uid"], old)
        if head.get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
            what = f'Operation cannot be fulfilled on {asked.collection.resource} "{asked.name}"'
            changed = "the object has been modified; please apply your changes to the latest version and try again"
            raise RefusedError(409, "Conflict", f"{what}: {changed}")
        if asked.subresource == "status":
            new = {**deepcopy(old), "status": new.get("status", {})}
        elif asked.collection.has_status:
            new.pop("status", None)
            new |= {"status": deepcopy(old["status"])} if "status" in old else {}
        if asked.collection.plural == PODS:
            _check_pod_update(asked, old, new)
        return httpx.Response(200, json=self._replace(asked.collection, old, new))

    def _delete(self, asked: Asked, old: Json, options: Json) -> httpx.Response:
        wanted = (options.get("preconditions") or {}).get("uid")
        if wanted not in (None, old["metadata"]["uid"]):
            raise _wrong_uid(asked, wanted, old)
        grace = _grace(asked.collection, old, options.get("gracePeriodSeconds"))
        if grace == 0 and not old["metadata"].get("finalizers"):
            gone = self._drop(asked.collection, old)
            if asked.collection.plural == PODS:
                return httpx.Response(200, json=gone)
            details = {"name": asked.name, "uid": old["metadata"]["uid"], "kind": asked.collection.plural}
            return httpx.Response(200, json=_success(details))
        new = deepcopy(old)
        head = new["metadata"]
        head["deletionGracePeriodSeconds"] = min(grace, head.get("deletionGracePeriodSeconds", grace))
        head["deletionTimestamp"] = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(self._wall() + head["deletionGracePeriodSeconds"]))
        self._store(asked.collection, old, new)
        return httpx.Response(200, json=new)

    def _bind(self, asked: Asked) -> httpx.Response:
        pod, binding = self._find(asked), asked.body
        about = binding.get("metadata") or {}
        if about.get("uid") not in (None, "", pod["metadata"]["uid"]):
            raise _wrong_uid(asked, about["uid"], pod)
        problem = None
        if "deletionTimestamp" in pod["metadata"]:
            problem = f"pod {asked.name} is being deleted, cannot be assigned to a host"
        elif pod["spec"].get("nodeName"):
            problem = f'pod {asked.name} is already assigned to node "{pod["spec"]["nodeName"]}"'
        elif pod["spec"].get("schedulingGates"):
            problem = f"pod {asked.name} has non-empty .spec.schedulingGates"
        if problem is not None:
            raise RefusedError(409, "Conflict", f'Operation cannot be fulfilled on pods/binding "{asked.name}": {problem}')
        scheduled = {"type": "PodScheduled", "status": "True"}
        patch = {
            "metadata": {name: about[name] for name in ("annotations", "labels") if about.get(name)},
            "spec": {"nodeName": binding["target"]["name"]},
            "status": {"conditions": [scheduled]},
        }
        self._replace(asked.collection, pod, _merged(pod, patch, is_strategic=True))
        return httpx.Response(201, json=_success())

    def _evict(self, asked: Asked) -> httpx.Response:
        pod, options = self._find(asked), asked.body.get("deleteOptions") or {}
        wanted = (options.get("preconditions") or {}).get("uid")
        if wanted not in (None, pod["metadata"]["uid"]):
            raise _wrong_uid(asked, wanted, pod)
        is_over = pod["status"].get("phase") in ("Succeeded", "Failed", "Pending")
        for budget in [] if is_over or "deletionTimestamp" in pod["metadata"] else self._budgets:
            if not budget.where(pod):
                continue
            if budget.allowed <= 0:
                cause = {"reason": "DisruptionBudget", "message": "The disruption budget needs all of its healthy pods"}
                message = "Cannot evict pod as it would violate the pod's disruption budget."
                raise RefusedError(429, "TooManyRequests", message, [cause])
            budget.allowed -= 1
        target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        pod = self._replace(asked.collection, pod, _merged(pod, {"status": {"conditions": [target]}}, is_strategic=True))
        self._delete(asked, pod, options)
        return httpx.Response(201, json=_success())

    def _log(self, asked: Asked) -> httpx.Response:
        self._find(asked)
        text = self.logs.get((asked.namespace, asked.name), "")
        if "tailLines" in asked.query:
            lines = text.splitlines(keepends=True)
            text = "".join(lines[max(0, len(lines) - int(asked.query["tailLines"])) :])
        content = text.encode()[: int(asked.query.get("limitBytes", len(text.encode())))]
        return httpx.Response(200, content=content, headers={"Content-Type": "text/plain"})

    # Watches

    def watch(self, asked: Asked) -> "Watcher":
        """Open a watch; it is woken when there may be something to send."""
        with self._lock:
            try:
                _selected(asked)
                seen = int(asked.query.get("resourceVersion") or self._version)
            except ValueError as error:
                raise RefusedError(400, "BadRequest", f"Invalid value: {error}") from error
            watcher = Watcher(asked, asyncio.get_running_loop(), seen)
            self._watchers.append(watcher)
            return watcher

    def close(self, watcher: Watcher) -> None:
        with self._lock, suppress(ValueError):
            self._watchers.remove(watcher)

    def events(self, watcher: Watcher) -> tuple[list[Json], str]:
        """Return what a watch has not had yet, and how it ends; empty: it goes on."""
        with self._lock:
            watcher.woken.clear()
            if self.silent:
                return [], ""
            asked, is_selected = watcher.asked, _selected(watcher.asked)
            if watcher.seen < self._compacted:
                message = f"too old resource version: {watcher.seen} ({self._compacted})"
                status = _status(RefusedError(410, "Expired", message))
                return [{"type": "ERROR", "object": status}], "end"
            found = []
            for version, collection, old, new in self._later(watcher.seen):
                watcher.seen = version
                if collection == asked.collection:
                    event = _event(old, new, lambda thing: _is_in(asked, thing) and is_selected(thing))
                    found += [event] if event else []
            watcher.seen = max(watcher.seen, self._version)
            if watcher.bookmarks and asked.query.get("allowWatchBookmarks") == "true":
                about = {"kind": asked.collection.kind, "apiVersion": asked.collection.api_version}
                found.append({"type": "BOOKMARK", "object": {**about, "metadata": {"resourceVersion": str(watcher.seen)}}})
            watcher.bookmarks = 0
            return found, watcher.ending

    def _later(self, version: int) -> Iterable[Change]:
        """What happened after a resource version. A watch mostly stands near the end, so the search begins there."""
        first = len(self._history)
        while first and self._history[first - 1][0] > version:
            first -= 1
        return self._history[first:]


class FakeTransport(httpx.AsyncBaseTransport):
    """Carries requests of a client to a fake server, with the faults that it was told to have."""

    def __init__(self, server: FakeKubernetes) -> None:
        self._server = server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        await asyncio.sleep(0)  # others have a turn before the server has the request, and before its answer arrives
        parsed = self._server.parse(request, content)
        asked = parsed if isinstance(parsed, Asked) else None
        verb = {"GET": "get"}.get(request.method, "create") if asked is None else asked.verb
        fault = self._server.fault(verb, request.url.path)
        if fault is not None and isinstance(fault.status, str) and fault.status != "drop-after":
            await _break(fault.status, request)
        response = self._server.authorize(asked, request, verb)
        if fault is not None and isinstance(fault.status, int):
            reason = {
                409: "Conflict",
                410: "Expired",
                429: "TooManyRequests",
                500: "InternalError",
                503: "ServiceUnavailable",
            }
            text = reason.get(fault.status, "")
            return _refusal(RefusedError(fault.status, text, "a fault of the test", retry_after=fault.retry_after))
        if response is None:
            response = self._respond(parsed, request) if isinstance(parsed, Asked) else parsed
        await asyncio.sleep(0)
        if fault is not None:
            await response.aclose()
            raise httpx.ReadError("the connection was closed", request=request)
        return response

    def _respond(self, asked: Asked, request: httpx.Request) -> httpx.Response:
        if asked.verb != "watch":
            return self._server.answer(asked)
        try:
            watcher = self._server.watch(asked)
        except RefusedError as refusal:
            return _refusal(refusal)
        return httpx.Response(200, stream=_WatchStream(self._server, watcher, request))


async def _break(how: str, request: httpx.Request) -> None:
    if how == "refuse":
        raise httpx.ConnectError("All connection attempts failed", request=request)
    if how == "hang":
        await asyncio.sleep(request.extensions["timeout"]["read"] or 3600.0)
        raise httpx.ReadTimeout("", request=request)
    raise httpx.RemoteProtocolError("Server disconnected without sending a response.", request=request)


class _WatchStream(httpx.AsyncByteStream):
    """The answer to a watch: a line per event, until it ends."""

    def __init__(self, server: FakeKubernetes, watcher: Watcher, request: httpx.Request) -> None:
        self._server, self._watcher, self._request = server, watcher, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        until = clock() + float(self._watcher.asked.query.get("timeoutSeconds", 1800))
        patience = self._request.extensions["timeout"]["read"]
        while True:
            events, ending = self._server.events(self._watcher)
            for event in events:
                yield json.dumps(event).encode() + b"\n"
            if ending == "break":
                message = "peer closed connection without sending complete message body (incomplete chunked read)"
                raise httpx.RemoteProtocolError(message, request=self._request)
            if ending or (clock() >= until and not self._server.silent):
                return
            left = patience if self._server.silent else min(until - clock(), patience)
            try:
                async with asyncio.timeout(left):
                    await self._watcher.woken.wait()
            except TimeoutError as error:
                if clock() < until or self._server.silent:
                    raise httpx.ReadTimeout("", request=self._request) from error

    async def aclose(self) -> None:
        self._server.close(self._watcher)


# Objects


def a_node(
    name: str,
    gpus: int = 8,
    product: str | None = "NVIDIA-A100-SXM4-80GB",
    *,
    labels: Mapping[str, str] | None = None,
    cpu: str = "64",
    memory: str = "512Gi",
    is_ready: bool = True,
    **spec: Any,
) -> Json:
    """A node with GPUs of one product. More keywords go into its spec: `unschedulable=True`, `taints=[…]`."""
    amounts = {"cpu": cpu, "memory": memory, "pods": "110", **({GPU: str(gpus)} if gpus else {})}
    product_label = {PRODUCT: product} if product and gpus else {}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **product_label, **(labels or {})}},
        "spec": dict(spec),
        "status": {
            "capacity": dict(amounts),
            "allocatable": dict(amounts),
            "conditions": [{"type": "Ready", "status": "True" if is_ready else "False"}],
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": name}],
        },
    }


def a_pod(
    name: str,
    gpus: int = 1,
    scheduler: str = "poise",
    *,
    namespace: str = "default",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    node: str | None = None,
    owner: Json | None = None,
    phase: str | None = None,
    **spec: Any,
) -> Json:
    """A pod of one container that asks for GPUs. `owner`: the object that controls it. More keywords go into its spec."""
    limits = {"limits": {GPU: str(gpus)}, "requests": {GPU: str(gpus)}} if gpus else {}
    head: Json = {"name": name, "namespace": namespace, "labels": dict(labels or {}), "annotations": dict(annotations or {})}
    if owner is not None:
        about = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "controller": True}
        head["ownerReferences"] = [{**about, "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": head,
        "spec": {
            "schedulerName": scheduler,
            "containers": [{"name": "main", "image": "train", "resources": limits}],
            **({} if node is None else {"nodeName": node}),
            **spec,
        },
        **({} if phase is None else {"status": {"phase": phase}}),
    }


def _collection(resource: str) -> Collection:
    """Find a collection by its plural, or by plural and group (`events.events.k8s.io`)."""
    for collection in COLLECTIONS:
        if resource in (collection.plural, collection.resource):
            return collection
    raise KeyError(resource)


def _key(thing: Json) -> Key:
    return thing["metadata"].get("namespace", ""), thing["metadata"]["name"]


def _resource(asked: Asked) -> str:
    name = asked.collection.resource
    return f"{name}/{asked.subresource}" if asked.subresource else name


def _discovery(prefix: str) -> Json:
    found = [collection for collection in COLLECTIONS if collection.prefix == prefix]
    resources = [{"name": each.plural, "kind": each.kind, "namespaced": each.is_namespaced} for each in found]
    return {"kind": "APIResourceList", "groupVersion": found[0].api_version, "resources": resources}


def _check_names(collection: Collection, thing: Json) -> None:
    head = thing["metadata"]
    pattern = SERVICE_NAME if collection.plural == "services" else NAME
    problem = None if pattern.fullmatch(head["name"]) else f"metadata.name: Invalid value: {head['name']!r}"
    for name, value in (head.get("labels") or {}).items():
        bare = name.rpartition("/")[2]
        if not LABEL.fullmatch(value) or not bare or not LABEL.fullmatch(bare):
            problem = f"metadata.labels: Invalid value: {name}={value!r}"
    for name, value in (head.get("annotations") or {}).items():
        if not isinstance(value, str):
            problem = f"metadata.annotations: Invalid value: {name} is no text"
    if problem is not None:
        raise RefusedError(422, "Invalid", f'{collection.kind} "{head["name"]}" is invalid: {problem}')


def _check_pod_update(asked: Asked, old: Json, new: Json) -> None:
    names = {*old["spec"], *new.get("spec", {})}
    changed = {name for name in names if old["spec"].get(name) != new.get("spec", {}).get(name)} - MUTABLE_IN_PODS
    if changed and asked.subresource != "status":
        message = (
            f"spec: Forbidden: pod updates may not change fields other than some; changed: {', '.join(sorted(changed))}"
        )
        raise RefusedError(422, "Invalid", f'Pod "{asked.name}" is invalid: {message}')


def _grace(collection: Collection, thing: Json, wanted: int | None) -> int:
    """Seconds that an object has to go. Only a pod that is on a node and not over has any."""
    if collection.plural != PODS or not thing["spec"].get("nodeName") or thing["status"]["phase"] in ("Succeeded", "Failed"):
        return 0
    return int(thing["spec"].get("terminationGracePeriodSeconds", 30) if wanted is None else wanted)


def _wrong_uid(asked: Asked, wanted: str, thing: Json) -> RefusedError:
    has = thing["metadata"]["uid"]
    what = f'Operation cannot be fulfilled on {asked.collection.resource} "{asked.name}"'
    precondition = f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {has}"
    return RefusedError(409, "Conflict", f"{what}: {precondition}")


def _success(details: Json | None = None) -> Json:
    about = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return {**about, **({} if details is None else {"details": details}), "code": 201}


def _status(refusal: RefusedError) -> Json:
    details: Json = {"causes": list(refusal.causes)} if refusal.causes else {}
    if refusal.retry_after is not None:
        details["retryAfterSeconds"] = refusal.retry_after
    about = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": refusal.message}
    return {**about, "reason": refusal.reason, "details": details, "code": refusal.code}


def _refusal(refusal: RefusedError) -> httpx.Response:
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    return httpx.Response(refusal.code, json=_status(refusal), headers=headers)


# Patches


def _merged(old: Any, patch: Any, *, is_strategic: bool) -> Any:
    """Apply a merge patch (RFC 7386), or a strategic one, which also merges the lists in `MERGED_BY`."""
    if not isinstance(patch, dict):
        return deepcopy(patch)
    new = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            new.pop(name, None)
        elif is_strategic and name in MERGED_BY and isinstance(value, list):
            new[name] = _merged_list(new.get(name) or [], value, MERGED_BY[name])
        elif is_strategic and name == "finalizers":
            new[name] = [*new.get(name, []), *(each for each in value if each not in new.get(name, []))]
        else:
            new[name] = _merged(new.get(name), value, is_strategic=is_strategic)
    return deepcopy(new)


def _merged_list(old: Sequence[Json], patch: Sequence[Json], by: str) -> list[Json]:
    new = {each[by]: each for each in old}
    for each in patch:
        if each.get("$patch") == "delete":
            new.pop(each[by], None)
        else:
            new[each[by]] = _merged(new.get(each[by]), each, is_strategic=True)
    return [*new.values()]


def _json_patched(old: Json, operations: Sequence[Json]) -> Json:
    """Apply a JSON patch (RFC 6902) of the operations add, replace, remove and test."""
    new = deepcopy(old)
    for each in operations:
        *way, last = (part.replace("~1", "/").replace("~0", "~") for part in each["path"].split("/")[1:])
        place: Any = new
        try:
            for part in way:
                place = place[int(part)] if isinstance(place, list) else place[part]
            _operate(place, last, each)
        except (KeyError, IndexError, ValueError) as error:
            raise RefusedError(422, "Invalid", f"the server rejected our request: {each['op']} {each['path']}") from error
    return new


def _operate(place: Any, last: str, operation: Json) -> None:
    index: Any = (len(place) if last == "-" else int(last)) if isinstance(place, list) else last
    match operation["op"]:
        case "add" if isinstance(place, list):
            place.insert(index, operation["value"])
        case "add":
            place[index] = operation["value"]
        case "replace":
            place[index]  # it has to be there
            place[index] = operation["value"]
        case "remove":
            del place[index]
        case "test":
            if place[index] != operation["value"]:
                raise ValueError(operation["path"])
        case other:
            raise ValueError(other)


# Selectors and events


def _selected(asked: Asked) -> Callable[[Json], bool]:
    labels, fields = _selector(asked.query.get("labelSelector", "")), asked.query.get("fieldSelector", "")
    terms = [_field_term(asked.collection, term) for term in fields.split(",") if term]
    return lambda thing: labels(thing) and all(term(thing) for term in terms)


def _selector(labels: str) -> Callable[[Json], bool]:
    terms = [_label_term(term.strip()) for term in re.split(r",(?![^(]*\))", labels) if term.strip()]
    return lambda thing: all(term(thing["metadata"].get("labels") or {}) for term in terms)


def _label_term(term: str) -> Callable[[Mapping[str, str]], bool]:
    if found := re.fullmatch(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)", term):
        name, is_wanted, values = found[1], found[2] == "in", {value.strip() for value in found[3].split(",")}
        return lambda labels: (labels.get(name) in values) == is_wanted
    if found := re.fullmatch(r"([^!=\s]+)\s*(==|=|!=)\s*(\S*)", term):
        name, value, is_equal = found[1], found[3], found[2] != "!="
        return lambda labels: (labels.get(name) == value) == is_equal
    if term.startswith("!"):
        return lambda labels: term[1:] not in labels
    if re.fullmatch(r"\S+", term):
        return lambda labels: term in labels
    raise RefusedError(400, "BadRequest", f"unable to parse requirement: {term!r}")


def _field_term(collection: Collection, term: str) -> Callable[[Json], bool]:
    found = re.fullmatch(r"([^!=]+)(==|=|!=)(.*)", term)
    if found is None:
        raise RefusedError(400, "BadRequest", f"invalid selector: {term!r}")
    name, value, is_equal = found[1], found[3], found[2] != "!="
    if name not in {"metadata.name", "metadata.namespace", *SELECTABLE.get(collection.plural, ())}:
        raise RefusedError(400, "BadRequest", f"field label not supported: {name}")

    def is_so(thing: Json) -> bool:
        here: Any = thing
        for part in name.split("."):
            here = here.get(part) if isinstance(here, dict) else None
        text = "" if here is None else str(here).lower() if isinstance(here, bool) else str(here)
        return (text == value) == is_equal

    return is_so


def _is_in(asked: Asked, thing: Json) -> bool:
    is_named = not asked.name or thing["metadata"]["name"] == asked.name
    return is_named and (not asked.namespace or thing["metadata"].get("namespace") == asked.namespace)


def _event(old: Json | None, new: Json | None, is_selected: Callable[[Json], bool]) -> Json | None:
    """Say what a change is for a watch of a selection: an object that leaves it is deleted for that watch."""
    was, is_now = old is not None and is_selected(old), new is not None and is_selected(new)
    if is_now:
        return {"type": "MODIFIED" if was else "ADDED", "object": new}
    if not was or old is None:
        return None
    version = (new or old)["metadata"]["resourceVersion"]
    return {"type": "DELETED", "object": {**old, "metadata": {**old["metadata"], "resourceVersion": version}}}
