"""A pod whose containers are processes of this machine: started in order, watched, restarted, ended in order."""

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tests.kube.keeper import Kept
from tests.kube.pods import an_ip, named, pod_status
from tests.kube.provisions import AWAY, NotYetError, Provisions
from tests.kube.server import Json, KubeError, now

if TYPE_CHECKING:
    from tests.kube.kubelet import Processes

MARK = "POISE_TEST_KUBELET"
"""A variable of the environment of every process that a pod has here, by which it is found."""
LAUNCHER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("container.py"))]
LOST = {"reason": "ContainerStatusUnknown", "message": "The container could not be located when the pod was terminated"}


class OverError(Exception):
    """Nothing more is to be done for a pod: the kubelet closes."""


class RebootedError(Exception):
    """The node of a pod was killed, and is back."""


class Container:
    """A container of a pod."""

    def __init__(self, pod: "RunningPod", spec: Json, kind: Literal["init", "sidecar", "main"]) -> None:
        self.pod = pod
        self.spec = spec
        self.kind = kind
        self.name: str = spec["name"]
        self.process: Kept | None = None
        self.state: Json = {"waiting": {"reason": "ContainerCreating" if kind != "main" else "PodInitializing"}}
        self.last: Json = {}
        self.restarts = 0
        self.is_started = False
        self.restart_at = 0.0
        self._began = ""
        self._starts = itertools.count(1)

    @property
    def code(self) -> int | None:
        """The exit code; None: it has not ended."""
        return int(self.state["terminated"]["exitCode"]) if "terminated" in self.state else None

    @property
    def is_running(self) -> bool:
        """Whether its process lives, as far as was noticed."""
        return "running" in self.state

    @property
    def mark(self) -> str:
        """What its processes have in their environment."""
        return f"{self.pod.kubelet.root.name}/{self.pod.uid}/{self.name}"

    def start(self) -> bool:
        """Start it; say whether that could be tried: an image may be missing, or what its environment is made of."""
        image = self.pod.kubelet.image(self.spec["image"])
        if image is None:
            is_again = self.state.get("waiting", {}).get("reason") in ("ErrImagePull", "ImagePullBackOff")
            message = f'Back-off pulling image "{self.spec["image"]}": not found'
            self.state = {"waiting": {"reason": "ImagePullBackOff" if is_again else "ErrImagePull", "message": message}}
            return False
        try:
            self._file("termination").write_bytes(b"")
            self._file("termination").chmod(0o666)
            spec = self._order(self.spec, f"{self.name}.{next(self._starts)}")
        except (NotYetError, KubeError, *AWAY) as error:
            self.state = {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}}
            return False
        self._began = now()
        log = self.pod.folder / "logs" / f"{self.name}.log"
        self.process = self.pod.kubelet.keeper.start([*LAUNCHER, str(spec)], {MARK: self.mark}, log, ended=self.pod.wake.set)
        self.state = {"running": {"startedAt": self._began}}
        self.is_started = "startupProbe" not in self.spec
        return True

    def probe(self) -> None:
        """Try whether it has started: only a command can be asked."""
        command = self.spec["startupProbe"].get("exec", {}).get("command")
        if command is None:
            self.pod.kubelet.problems.append(f"{self.pod.name}: a startup probe that is no command")
            self.is_started = True
            return
        with suppress(NotYetError, KubeError, *AWAY):
            spec = self._order({**self.spec, "command": command, "args": []}, f"{self.name}.probe{next(self._starts)}")
            log = self.pod.folder / "logs" / "probes.log"
            asked = self.pod.kubelet.keeper.start([*LAUNCHER, str(spec)], {MARK: self.mark}, log)
            self.is_started = asked.wait(float(self.spec["startupProbe"].get("timeoutSeconds", 1))) == 0
            asked.signal(signal.SIGKILL)

    def _order(self, container: Json, name: str) -> Path:
        """Write what `container.py` is to do."""
        image = self.pod.kubelet.image(container["image"])
        assert image is not None
        folder = self.pod.folder / "containers" / name
        (folder / "scratch").mkdir(parents=True)
        environment = {**self.pod.provisions.environment(container, image), MARK: self.mark}
        order = self.pod.provisions.launch(container, image, environment)
        error = self._file("error") if container is self.spec else folder / "error"
        order |= {"scratch": str(folder / "scratch"), "error": str(error)}
        path = container.get("terminationMessagePath", "/dev/termination-log")
        order["mounts"].append({"source": str(self._file("termination")), "target": path, "read_only": False})
        (folder / "order.json").write_text(json.dumps(order))
        return folder / "order.json"

    def collect(self) -> bool:
        """Note that its process has ended; say whether that is news."""
        if not self.is_running or self.process is None or self.process.code is None:
            return False
        self.signal_all(signal.SIGKILL)  # what it left behind ends with it
        code = self.process.code if self.process.code >= 0 else 128 - self.process.code
        error = self._file("error").read_text() if self._file("error").exists() else ""
        if code == 128 and error:
            runtime = "failed to create containerd task: failed to create shim task: OCI runtime create failed"
            message = f"{runtime}: unable to start container process: {error}: unknown"
            ended = {"reason": "StartError", "message": message, "startedAt": "1970-01-01T00:00:00Z"}
        else:
            ended = {"reason": "Error" if code else "Completed", "message": self._message(code), "startedAt": self._began}
        self.end(code, ended)
        self.restart_at = time.monotonic() + self.pod.kubelet.restart_seconds
        return True

    def end(self, code: int, ended: Json) -> None:
        """Be in the state of one that has ended."""
        kept = {key: value for key, value in ended.items() if value}
        self.state = {"terminated": {"exitCode": code, **kept, "finishedAt": now(), "containerID": self._id}}
        self.is_started = False

    def restart(self) -> None:
        """Start it again; if that cannot be tried, it stays as it is."""
        ended, self.restarts = self.state, self.restarts + 1
        if self.start():
            self.last = ended
        else:
            self.state, self.restarts = ended, self.restarts - 1

    def signal(self, number: int) -> None:
        """Send a signal to its first process."""
        if self.process is not None and self.is_running:
            if self.pod.kubelet.groups:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
            else:
                self.process.signal(number)

    def signal_all(self, number: int) -> None:
        """Send a signal to all its processes."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def processes(self) -> list[int]:
        """Find all its processes: by their mark, or as they are in the session of the first."""
        if self.process is None:
            return []
        mark, first = f"{MARK}={self.mark}".encode(), self.process.pid
        found = []
        for pid in self.pod.kubelet.keeper.processes():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
                known = int(fields[3]) == first or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if known and fields[0] != "Z":
                    found.append(pid)
        return sorted(found, key=lambda pid: pid != first)

    def status(self) -> Json:
        """Return it as a pod's status has it."""
        return {
            **named(self.spec, self.pod.uid),
            "containerID": self._id if not self.state.get("waiting") else "",
            "ready": self.code == 0 if self.kind == "init" else self.is_running and self.is_started,
            "started": self.is_running and self.is_started,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last,
        }

    @property
    def _id(self) -> str:
        return f"containerd://{self.pod.uid}-{self.name}-{self.restarts}"

    def _file(self, name: str) -> Path:
        return self.pod.folder / "containers" / f"{self.name}.{name}"

    def _message(self, code: int) -> str:
        with self._file("termination").open("rb") as file:
            said = file.read(4096).decode(errors="replace")
        if not said and code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            log = self.pod.folder / "logs" / f"{self.name}.log"
            said = log.read_bytes()[-2048:].decode(errors="replace")
        return said


class RunningPod:
    """A pod that was admitted, with a thread that looks after it."""

    def __init__(self, kubelet: "Processes", pod: Json, gpus: frozenset[int]) -> None:
        self.kubelet = kubelet
        meta = pod["metadata"]
        self.folder = kubelet.root / str(meta["uid"])
        for each in ("logs", "containers"):
            (self.folder / each).mkdir(parents=True)
        self.provisions = Provisions(
            kubelet.api,
            pod,
            self.folder,
            an_ip(),
            gpus,
            claims=kubelet.claims,
            image=kubelet.image,
            resolve=kubelet.resolve,
        )
        self.spec: Json = pod["spec"]
        self.uid: str = meta["uid"]
        self.name: str = meta["name"]
        self.namespace: str = meta["namespace"]
        self.node: str = pod["spec"]["nodeName"]
        self.ip = self.provisions.ip
        self.wake = threading.Event()
        self.is_over = False
        self.is_ready = False
        self._gone = False
        self._began = time.monotonic()
        self._deadline: float | None = None
        self._late = False
        self.inits = [
            Container(self, each, "sidecar" if each.get("restartPolicy") == "Always" else "init")
            for each in self.spec.get("initContainers", [])
        ]
        self.mains = [Container(self, each, "main") for each in self.spec["containers"]]
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"pod {self.name}")
        self.thread.start()

    @property
    def object(self) -> Json:
        """The pod as it was last seen."""
        return self.provisions.object

    @property
    def containers(self) -> list[Container]:
        """All containers, in the order in which they start."""
        return [*self.inits, *self.mains]

    @property
    def is_deleted(self) -> bool:
        """Whether it is to end."""
        return self._gone or "deletionTimestamp" in self.object["metadata"]

    def change(self, pod: Json) -> None:
        """Note what has changed."""
        meta = pod["metadata"]
        self.provisions.object = pod
        if "deletionTimestamp" in meta:
            self._shorten(float(meta.get("deletionGracePeriodSeconds") or 0))
        self.wake.set()

    def vanish(self) -> None:
        """Note that it was removed from the API server without us: by force, or with its grace at 0."""
        if not self.is_over:
            self._gone = True
            self._shorten(1.0)
        self._gone = True
        self.wake.set()

    def _shorten(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    # Its life -----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            try:
                self._live()
            except RebootedError:
                for each in self.containers:
                    if each.is_running:
                        each.end(137, LOST)
            self._finish()
            while not self._gone:
                self._pause(None)
                if self.is_deleted:
                    self.kubelet.report(self.object, None, deletes=True)
        except OverError:
            pass
        finally:
            self.is_over = True

    def _live(self) -> None:
        self._report("Pending")
        if self._make_volumes() and self._initialise():
            self._start_mains()
            self._attend()
        self._stop([each for each in self.mains if each.is_running])
        if not self.is_deleted:
            self._deadline = time.monotonic() + float(self.spec.get("terminationGracePeriodSeconds", 30))
        for each in reversed(self.inits):
            self._stop([each] if each.is_running else [])

    def _make_volumes(self) -> bool:
        """Have all volumes, as soon as what they are made of exists; False: deleted before."""
        while not self.is_deleted:
            try:
                self.provisions.make()
            except (NotYetError, KubeError, *AWAY) as problem:
                self.kubelet.problems.append(f"{self.name}: {problem}")
                self._pause(0.3)
            else:
                return True
        return False

    def _initialise(self) -> bool:
        """Start sidecars and run init containers; False: one has failed, or the pod was deleted."""
        for each in self.inits:
            while not self.is_deleted and not each.start():
                self._report("Pending")
                self._pause(0.3)
            self._report("Pending")
            while not self.is_deleted:
                self._keep()
                if each.kind == "sidecar" and each.is_running and not each.is_started:
                    each.probe()
                if each.is_started and each.kind == "sidecar":
                    break
                if each.kind == "init" and each.code is not None:
                    break
                self._pause(0.1 if each.kind == "sidecar" else 1.0)
            if self.is_deleted or (each.kind == "init" and each.code != 0):
                return False
        return True

    def _start_mains(self) -> None:
        for each in self.mains:
            if not self.is_deleted:
                each.start()
        self._report("Running")

    def _attend(self) -> None:
        """Look after it until it is to end."""
        limit = self.spec.get("activeDeadlineSeconds")
        while not self.is_deleted and any(each.code is None for each in self.mains):
            self._keep()
            waiting = [each for each in self.mains if "waiting" in each.state]
            for each in waiting:
                each.start()
            if waiting:
                self._report("Running")
            if limit is not None and time.monotonic() > self._began + limit:
                self._late = True
                return
            if all(each.code is not None for each in self.mains):
                return
            self._pause(0.3 if waiting or limit is not None else 1.0)

    def _keep(self) -> None:
        """Note ends, start sidecars again, refresh volumes."""
        self._collect()
        for each in self.inits:
            if each.kind == "sidecar" and each.code is not None and each.restart_at <= time.monotonic():
                each.restart()
                self._report("Running")
        self.provisions.refresh()

    def _stop(self, containers: Sequence[Container]) -> None:
        """End containers: TERM, and KILL after the grace."""
        if self._deadline is None:
            self._deadline = time.monotonic() + float(self.spec.get("terminationGracePeriodSeconds", 30))
        for each in containers:
            each.signal(signal.SIGTERM)
        least = time.monotonic() + (2.0 if any(each.kind == "sidecar" for each in containers) else 0.0)
        while any(each.is_running for each in containers):
            self._collect()
            left = max(self._deadline, least) - time.monotonic()  # kubelets give sidecars that come too late a little, too
            if left <= 0:
                for each in containers:
                    each.signal_all(signal.SIGKILL)
                    if each.process is not None:
                        each.process.wait(5)
            elif any(each.is_running for each in containers):
                self._pause(min(left, 1.0))

    def _collect(self) -> bool:
        """Note which processes have ended; say whether any has, and report it unless it is time for the last report."""
        news = [each for each in self.containers if each.collect()]
        if news and not all(each.code is not None for each in self.mains):
            self._report("Running")
        return bool(news)

    def _finish(self) -> None:
        self.kubelet.release(self.uid)
        failed = any(each.code != 0 for each in self.mains) or any(each.code for each in self.inits if each.kind == "init")
        self.is_over = True
        for each in self.mains:
            if each.code is None and self.is_deleted:
                each.end(137, LOST)
        extra = {"reason": "DeadlineExceeded", "message": "Pod was active on the node longer than the specified deadline"}
        self._report("Failed" if failed or self._late else "Succeeded", extra if self._late else {}, deletes=self.is_deleted)

    def _pause(self, seconds: float | None) -> None:
        """Wait for news; no longer than the node works, or the kubelet."""
        due = [each.restart_at for each in self.inits if each.kind == "sidecar" and each.code is not None]
        if due and not self.is_over:
            seconds = min(1.0 if seconds is None else seconds, max(min(due) - time.monotonic(), 0.02))
        self.wake.wait(seconds)
        self.wake.clear()
        was_dead = False
        while True:
            if self.kubelet.closing.is_set():
                raise OverError
            state = self.kubelet.states.get(self.node, "up")
            was_dead = was_dead or state == "dead"
            if state == "up":
                break
            self.wake.wait(1.0)
            self.wake.clear()
        if was_dead and not self.is_over:
            raise RebootedError

    def _report(self, phase: str, extra: Json | None = None, *, deletes: bool = False) -> None:
        if phase == "Running" and any("waiting" in each.state for each in self.mains):
            phase = "Pending"
        self.is_ready = phase == "Running" and all(each.is_running for each in self.mains)
        status = pod_status(
            self.object, phase, self.ip, [each.status() for each in self.mains], [each.status() for each in self.inits]
        )
        self.kubelet.report(self.object, {**status, **(extra or {})}, deletes=deletes)
