"""Pretend kubelets for the nodes of an API server: `Pretend` runs nothing, `Processes` runs containers as processes.

Both watch pods that are bound to their nodes, admit them as a kubelet does (never more GPUs than a node has), report what
becomes of them, and honour deletion. What they report outlives an API server that is away for a while. One object is the
kubelet of all nodes, or of those that it is given.

Annotations of pods that `Pretend` heeds:

    test/seconds        how long it runs; without: until it is deleted
    test/exit           its exit code, 0 by default
    test/stop-seconds   how long it takes to end when it is deleted, at most its grace

What `Processes` does and does not: see there.
"""

import heapq
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tests.kube.keeper import Keeper
from tests.kube.pods import Image, an_ip, gpus_of, named, pod_status
from tests.kube.provisions import AWAY
from tests.kube.running import RunningPod
from tests.kube.server import GPU, STRATEGIC, Admin, Json, KubeError, KubeServer, Watch, now

TERMINAL = ("Succeeded", "Failed")

NodeState = Literal["up", "hung", "dead"]

__all__ = ["Image", "Kubelet", "Pretend", "Processes", "cannot_run", "gpus_of"]


@dataclass(slots=True)
class _Word:
    """What is still to be told of a pod."""

    namespace: str
    name: str
    node: str
    status: Json | None = None
    deletes: bool = False


class Kubelet(ABC):
    """What both kinds have in common: watching, admission, reporting, and the state of nodes."""

    def __init__(self, server: KubeServer, nodes: Collection[str] | None = None) -> None:
        self.server = server
        self.nodes = nodes
        self.api = Admin(server.url, server.ca, server.token("admin"))
        self.closing = threading.Event()
        self.states: dict[str, NodeState] = {}
        self.problems: list[str] = []
        """What a pod asks for and this kubelet does not know: worth a look when a test waits in vain."""
        self._pods: dict[str, Json] = {}
        self._held: dict[str, tuple[str, frozenset[int]]] = {}
        self._refusals: dict[str, list[tuple[str, str]]] = {}
        self._words: dict[str, _Word] = {}
        self._changed = threading.Condition()
        self._stream: Watch | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to look after pods."""
        for work in (self._watch, self._tell):
            thread = threading.Thread(target=work, daemon=True, name=f"kubelet {work.__name__}")
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End everything that runs; report nothing more."""
        self.closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._stream is not None:
            self._stream.close()
        for thread in self._threads:
            thread.join(60)
        self._end_all()
        self.api.close()

    def _end_all(self) -> None:  # noqa: B027  (nothing runs, unless a kind has something that does)
        """End what runs."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # What tests do to it ------------------------------------------------------------------------------------------------

    def refuse_next(self, node: str, reason: str = "UnexpectedAdmissionError", message: str = "") -> None:
        """Refuse the next pod that comes to a node: it fails and never began."""
        said = message or f"Allocate failed due to requested number of devices unavailable for {GPU}, which is unexpected"
        self._refusals.setdefault(node, []).append((reason, f"Pod was rejected: {said}"))

    def stop_node(self, name: str, *, told: bool = True) -> None:
        """Hang a node: what runs there stands still, nothing is reported; `start_node` lets it go on.

        told    the node is said to be unreachable, as the node controller finds after a while
        """
        self._set_state(name, "hung")
        if told:
            self.server.set_ready(name, None)

    def kill_node(self, name: str, *, told: bool = True) -> None:
        """Kill a node with all that runs there; nothing is reported until `start_node`, as when it has booted again."""
        self._set_state(name, "dead")
        if told:
            self.server.set_ready(name, None)

    def start_node(self, name: str) -> None:
        """Have a node back. Pods of one that was killed have failed."""
        self._set_state(name, "up")
        self.server.set_ready(name, True)

    def held(self, node: str) -> int:
        """Return how many GPUs of a node are taken by pods that have not ended."""
        return sum(len(gpus) for where, gpus in self._held.values() if where == node)

    # What kinds do ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, pod: Json, gpus: frozenset[int]) -> None:
        """Run a pod that was admitted."""

    @abstractmethod
    def _changes(self, pod: Json) -> None:
        """Note what has changed: it is to end, or has other annotations."""

    @abstractmethod
    def _vanish(self, uid: str) -> None:
        """End a pod that is no longer known to the API server."""

    def _set_state(self, name: str, state: NodeState) -> None:
        with self._changed:
            self.states[name] = state
            self._changed.notify_all()

    # Watching -----------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        selector = "spec.nodeName!="
        while not self.closing.is_set():
            try:
                answer = self.api.get("/api/v1/pods", fieldSelector=selector)
                for pod in answer["items"]:
                    self._see(pod)
                for uid in set(self._pods) - {pod["metadata"]["uid"] for pod in answer["items"]}:
                    self._lose(uid)
                self._follow(answer["metadata"]["resourceVersion"], selector)
            except (*AWAY, KubeError, ValueError):
                self.closing.wait(0.1)

    def _follow(self, version: str, selector: str) -> None:
        """Follow until history is lost or the server is away."""
        while not self.closing.is_set():
            self._stream = self.api.watch("/api/v1/pods", version, fieldSelector=selector, allowWatchBookmarks=1)
            if self.closing.is_set():
                self._stream.close()
            for event in self._stream:
                if event["type"] == "ERROR":
                    return
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] == "DELETED":
                    self._lose(event["object"]["metadata"]["uid"])
                elif event["type"] != "BOOKMARK":
                    self._see(event["object"])

    def _see(self, pod: Json) -> None:
        uid, node = pod["metadata"]["uid"], pod["spec"]["nodeName"]
        if self.nodes is not None and node not in self.nodes:
            return
        is_new = uid not in self._pods
        self._pods[uid] = pod
        if not is_new:
            self._changes(pod)
        elif pod.get("status", {}).get("phase") in TERMINAL or "deletionTimestamp" in pod["metadata"]:
            if "deletionTimestamp" in pod["metadata"]:
                self.report(pod, None, deletes=True)
        else:
            try:
                self._admit(pod)
            except (*AWAY, KubeError):
                del self._pods[uid]  # it is new when it is seen again
                raise

    def _lose(self, uid: str) -> None:
        if self._pods.pop(uid, None) is not None:
            with self._changed:
                self._words.pop(uid, None)
            self._vanish(uid)

    def _admit(self, pod: Json) -> None:
        uid, node, wanted = pod["metadata"]["uid"], pod["spec"]["nodeName"], gpus_of(pod)
        found = self.api.find(f"/api/v1/nodes/{node}")
        capacity = int((found or {}).get("status", {}).get("allocatable", {}).get(GPU, 0))
        taken = {gpu for where, gpus in list(self._held.values()) if where == node for gpu in gpus}
        if refusals := self._refusals.get(node):
            reason, message = refusals.pop(0)
        elif wanted > capacity - len(taken):
            reason = f"OutOf{GPU}"
            amounts = f"requested: {wanted}, used: {len(taken)}, capacity: {capacity}"
            message = f"Pod was rejected: Node didn't have enough resource: {GPU}, {amounts}"
        else:
            free = itertools.filterfalse(taken.__contains__, itertools.count())
            gpus = frozenset(itertools.islice(free, wanted))
            self._held[uid] = node, gpus
            self._begin(pod, gpus)
            return
        self.report(pod, {"phase": "Failed", "reason": reason, "message": message, "startTime": now()})

    def release(self, uid: str) -> None:
        """Have the GPUs of a pod back."""
        self._held.pop(uid, None)

    # Reporting ----------------------------------------------------------------------------------------------------------

    def report(self, pod: Json, status: Json | None, *, deletes: bool = False) -> None:
        """Tell the API server of a pod, when it can be told: the last word counts. `deletes`: and then that it is gone."""
        meta = pod["metadata"]
        with self._changed:
            word = self._words.setdefault(meta["uid"], _Word(meta["namespace"], meta["name"], pod["spec"]["nodeName"]))
            word.status = status if status is not None else word.status
            word.deletes = word.deletes or deletes
            self._changed.notify_all()

    def _tell(self) -> None:
        while True:
            with self._changed:
                ready = [uid for uid, word in self._words.items() if self.states.get(word.node, "up") == "up"]
                if self.closing.is_set():
                    return
                if not ready:
                    self._changed.wait()
                    continue
                uid = ready[0]
                word = self._words.pop(uid)
            try:
                self._send(uid, word)
            except (*AWAY, KubeError) as error:
                if isinstance(error, KubeError) and error.code < 500 and error.code != 429:
                    self.problems.append(f"{word.name}: {error}")
                    continue
                with self._changed:  # what was said meanwhile is newer
                    later = self._words.setdefault(uid, word)
                    later.status, later.deletes = later.status or word.status, later.deletes or word.deletes
                self.closing.wait(0.1)

    def _send(self, uid: str, word: _Word) -> None:
        path = f"/api/v1/namespaces/{word.namespace}/pods/{word.name}"
        try:
            if word.status is not None:
                self.api.patch(f"{path}/status", {"metadata": {"uid": uid}, "status": word.status}, STRATEGIC)
            if word.deletes:
                self.api.delete(path, grace=0, uid=uid)
        except KubeError as error:
            if error.code not in (404, 409):  # gone, or another of that name
                raise


class Pretend(Kubelet):
    """Runs nothing: pods are said to run, and to end after a while.

    start_seconds   from admission to running
    """

    def __init__(self, server: KubeServer, nodes: Collection[str] | None = None, *, start_seconds: float = 0.0) -> None:
        super().__init__(server, nodes)
        self.start_seconds = start_seconds
        self._due: list[tuple[float, int, str, Callable[[Json], None]]] = []
        self._numbers = itertools.count()
        self._began: dict[str, str] = {}
        self._ips: dict[str, str] = {}
        self._ended: set[str] = set()
        self._ending: set[str] = set()
        self._timer = threading.Condition()

    def start(self) -> None:
        """Begin to look after pods."""
        super().start()
        thread = threading.Thread(target=self._work, daemon=True, name="kubelet timers")
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        """Report nothing more."""
        self.closing.set()
        with self._timer:
            self._timer.notify_all()
        super().close()

    def finish(self, namespace: str, name: str, code: int = 0) -> None:
        """End a pod that runs, now."""
        for uid, pod in list(self._pods.items()):
            if (pod["metadata"]["namespace"], pod["metadata"]["name"]) == (namespace, name):
                self._at(0.0, uid, lambda found: self._end(found, code))
                return
        raise KeyError(f"there is no pod {namespace}/{name} on these nodes")

    def _begin(self, pod: Json, gpus: frozenset[int]) -> None:
        self._ips[pod["metadata"]["uid"]] = an_ip()
        self._at(self.start_seconds, pod["metadata"]["uid"], self._run)

    def _changes(self, pod: Json) -> None:
        meta = pod["metadata"]
        uid = meta["uid"]
        if "deletionTimestamp" not in meta or uid in self._ending:
            return
        self._ending.add(uid)
        grace = float(meta.get("deletionGracePeriodSeconds") or 0)
        wanted = float(meta.get("annotations", {}).get("test/stop-seconds", 0))
        code = 143 if wanted <= grace else 137
        self._at(min(wanted, grace), uid, lambda found: self._end(found, code, deletes=True))

    def _vanish(self, uid: str) -> None:
        self.release(uid)

    def _run(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        if uid in self._ended or uid in self._ending:
            return
        self._began[uid] = now()
        self.report(pod, self._status(pod, "Running", {"running": {"startedAt": now()}}))
        notes = pod["metadata"].get("annotations", {})
        if "test/seconds" in notes:
            self._at(float(notes["test/seconds"]), uid, lambda found: self._end(found, int(notes.get("test/exit", 0))))

    def _end(self, pod: Json, code: int, *, deletes: bool = False) -> None:
        uid = pod["metadata"]["uid"]
        if uid in self._ended or uid not in self._held:
            self.report(pod, None, deletes=deletes)
            return
        self._ended.add(uid)
        self.release(uid)
        state: Json = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}}
        if uid in self._began:
            state["terminated"]["startedAt"] = self._began[uid]
        self.report(pod, self._status(pod, "Failed" if code else "Succeeded", state), deletes=deletes)

    def _status(self, pod: Json, phase: str, state: Json) -> Json:
        uid, is_running = pod["metadata"]["uid"], phase == "Running"
        containers = [
            {**named(each, uid), "ready": is_running, "started": is_running, "restartCount": 0, "state": state}
            for each in pod["spec"]["containers"]
        ]
        return pod_status(pod, phase, self._ips[uid], containers)

    def _set_state(self, name: str, state: NodeState) -> None:
        if state == "up" and self.states.get(name) == "dead":
            for uid, pod in list(self._pods.items()):
                if pod["spec"]["nodeName"] == name:
                    self._at(0.0, uid, lambda found: self._end(found, 137))
        super()._set_state(name, state)

    def _at(self, seconds: float, uid: str, what: Callable[[Json], None]) -> None:
        with self._timer:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), uid, what))
            self._timer.notify_all()

    def _work(self) -> None:
        while not self.closing.is_set():
            with self._timer:
                if not self._due or self._due[0][0] > time.monotonic():
                    self._timer.wait(self._due[0][0] - time.monotonic() if self._due else None)
                    continue
                _, _, uid, what = heapq.heappop(self._due)
            pod = self._pods.get(uid)
            if pod is None:
                continue
            if self.states.get(pod["spec"]["nodeName"], "up") != "up":
                self._at(0.1, uid, what)
                continue
            try:
                what(pod)
            except (*AWAY, KubeError) as error:
                if not isinstance(error, KubeError) or error.code != 404:  # the API server is away, the pod is not gone
                    self._at(0.1, uid, what)


class Processes(Kubelet):
    """Runs the containers of pods as processes of this machine, as root, each with mounts of its own (`container.py`).

    - Ordinary init containers one after the other; native sidecars started in order, each once its startup probe succeeds
      (commands only), restarted when they die, ended last and in reverse; main containers once, whatever the restart policy.
    - Volumes: emptyDir, hostPath, projected (service account tokens by the API, downward API, config maps, secrets), these
      alone, claims that `claims` maps to directories, images that have a root. The downward API follows at once.
    - Deletion: TERM to the first process of each main container (as container runtimes do; with `groups`, to its process
      group), then to the sidecars, KILL after the grace; then the pod is said to be gone.
    - Names: /etc/hosts of each container has the pods of headless services of its namespace, as DNS would: of services that
      exist, with a selector that fits, ready ones or with publishNotReadyAddresses; and of each other service of any
      namespace one ready pod. `resolve` may also rewrite the values of the environment and arguments.
    - Environment: PATH and HOME, HOSTNAME, what image and pod say, NVIDIA_VISIBLE_DEVICES as of a device plug-in, a mark.
    - Not: limits of cpu and memory, network, readiness and liveness probes, hooks, container logs by the API. All processes
      of this machine are seen by each (as if a node were a machine without PID namespaces).

    images   by name; what is not among them cannot be pulled. None: every image is there, with the programs of this machine
    """

    def __init__(
        self,
        server: KubeServer,
        nodes: Collection[str] | None = None,
        *,
        images: Mapping[str, Image] | None = None,
        claims: Mapping[str, Path] | None = None,
        resolve: Callable[[str], str] | None = None,
        restart_seconds: float = 0.2,
        groups: bool = False,
    ) -> None:
        super().__init__(server, nodes)
        self.images = images
        self.claims = dict(claims or {})
        self.resolve = resolve or (lambda text: text)
        self.restart_seconds = restart_seconds
        self.groups = groups
        self.root = Path(tempfile.mkdtemp(prefix="poise-kubelet-"))
        self.root.chmod(0o755)
        self.keeper = Keeper()
        self._running: dict[str, RunningPod] = {}

    def start(self) -> None:
        """Begin to look after pods."""
        super().start()
        thread = threading.Thread(target=self._name, daemon=True, name="kubelet names")
        thread.start()
        self._threads.append(thread)

    def _end_all(self) -> None:
        for pod in self._running.values():
            pod.wake.set()
            pod.thread.join(60)
        self.keeper.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def running(self, namespace: str, name: str) -> RunningPod:
        """Return a pod that runs here or did, the youngest of that name."""
        found = [each for each in self._running.values() if (each.namespace, each.name) == (namespace, name)]
        if not found:
            raise KeyError(f"there was no pod {namespace}/{name} on these nodes")
        return found[-1]

    def folder(self, namespace: str, name: str) -> Path:
        """Return the directory of a pod: `volumes/<name>` and `logs/<container>.log`."""
        return self.running(namespace, name).folder

    def log(self, namespace: str, name: str, container: str) -> str:
        """Return what a container has written to stdout and stderr."""
        return (self.folder(namespace, name) / "logs" / f"{container}.log").read_text(errors="replace")

    def processes(self, namespace: str, name: str, container: str | None = None) -> list[int]:
        """Return the processes of a pod, or of one container, the first of each container first."""
        chosen = [each for each in self.running(namespace, name).containers if container in (None, each.name)]
        return [pid for each in chosen for pid in each.processes()]

    def rotate_tokens(self, namespace: str, name: str) -> None:
        """Have new tokens in the volumes of a pod, as a kubelet does after most of their life."""
        pod = self.running(namespace, name)
        pod.provisions.rotate()
        pod.wake.set()

    def image(self, name: str) -> Image | None:
        """Return what there is of an image."""
        return Image(path=os.environ.get("PATH", os.defpath)) if self.images is None else self.images.get(name)

    def _begin(self, pod: Json, gpus: frozenset[int]) -> None:
        self._running[pod["metadata"]["uid"]] = RunningPod(self, pod, gpus)

    def _changes(self, pod: Json) -> None:
        running = self._running.get(pod["metadata"]["uid"])
        if running is not None:
            running.change(pod)
        elif "deletionTimestamp" in pod["metadata"]:  # one that was not admitted
            self.report(pod, None, deletes=True)

    def _vanish(self, uid: str) -> None:
        if uid in self._running:
            self._running[uid].vanish()

    def _set_state(self, name: str, state: NodeState) -> None:
        super()._set_state(name, state)
        pods = [each for each in list(self._running.values()) if each.node == name]
        number = {"hung": signal.SIGSTOP, "dead": signal.SIGKILL, "up": signal.SIGCONT}[state]
        for _ in range(2):  # twice: what was just being started, too
            for pod in pods:
                for container in pod.containers:
                    container.signal_all(number)
        for pod in pods:
            pod.wake.set()

    def _name(self) -> None:
        """Keep /etc/hosts of containers as DNS would have it."""
        while not self.closing.wait(0.2):
            wanted = {each.namespace for each in list(self._running.values()) if not each.is_over}
            if wanted:
                with suppress(*AWAY, KubeError):
                    services = self.api.list("/api/v1/services")
                    for namespace in wanted:
                        self._name_all(namespace, services)

    def _name_all(self, namespace: str, services: Sequence[Json]) -> None:
        running = [each for each in list(self._running.values()) if not each.is_over]
        pods = [each for each in running if each.namespace == namespace]
        ours = [each for each in services if each["metadata"]["namespace"] == namespace]
        lines = [line for service in ours for line in _addresses(service, pods)]
        lines += [line for service in services for line in _virtual_address(service, running)]
        for pod in pods:
            pod.provisions.write_hosts(lines)


def _addresses(service: Json, pods: Sequence[RunningPod]) -> Iterator[str]:
    """Lines of /etc/hosts for a headless service."""
    spec, meta = service["spec"], service["metadata"]
    selector = spec.get("selector")
    if spec.get("clusterIP") != "None" or not selector:
        return
    for pod in pods:
        labels = pod.object["metadata"].get("labels", {})
        if not selector.items() <= labels.items() or not (pod.is_ready or spec.get("publishNotReadyAddresses")):
            continue
        service_names = [f"{meta['name']}{rest}" for rest in _domains(meta["namespace"])]
        own = (
            [f"{pod.provisions.hostname}.{name}" for name in service_names]
            if pod.spec.get("subdomain") == meta["name"]
            else []
        )
        if "hostname" not in pod.spec:  # only a host name that was asked for is in DNS
            own = []
        yield " ".join([pod.ip, *own, *service_names])


def _virtual_address(service: Json, pods: Sequence[RunningPod]) -> Iterator[str]:
    """Lines of /etc/hosts for a service with an address of its own: one of a ready pod, to which packets would get."""
    spec, meta = service["spec"], service["metadata"]
    if spec.get("clusterIP") in (None, "", "None") or not spec.get("selector"):
        return
    for pod in pods:
        labels = pod.object["metadata"].get("labels", {})
        if pod.namespace == meta["namespace"] and pod.is_ready and spec["selector"].items() <= labels.items():
            yield " ".join([pod.ip, *(f"{meta['name']}{rest}" for rest in _domains(meta["namespace"])[1:])])
            return


def _domains(namespace: str) -> list[str]:
    return ["", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local"]


def cannot_run() -> str:
    """Say why `Processes` cannot be had on this machine; nothing if it can."""
    if os.geteuid() != 0:
        return "containers as processes with mounts of their own need root"
    if shutil.which("unshare") is None:
        return "there is no unshare here"
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/tmp"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "mounts in a namespace of one's own are not allowed here"
