"""A Kubernetes back end under test, on a real API server with pretended nodes, or on one that is only pretended."""

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import Any

from tests.backends import QUICK, Stage, until
from tests.fake_kubernetes import FakeKubernetes, FakeTransport, a_node
from tests.kube.kubelet import Processes
from tests.kube.pods import Image
from tests.kube.server import KubeServer
from tests.remote import AgentThread, listening

from poise.service.agent.agent import AgentConfig
from poise.service.backends.api import DesiredState, NodeState, RunOrder
from poise.service.backends.kubernetes.backend import KubernetesBackend, KubernetesOptions, ServiceQueries
from poise.service.backends.remote.backend import AgentAccess
from poise.service.wire.agent_messages import NodeSpec

HERE = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
IMAGES = {"poise": Image(path=HERE), "job": Image(path=HERE)}
"""Images of `Processes`: Poise's own, and one of users that has Python."""
NODES = {"v100-0": ("Tesla-V100-SXM2-16GB", 4), "v100-1": ("Tesla-V100-SXM2-16GB", 4), "k80-0": ("Tesla-K80", 2)}


class SilentLog:
    """Keeps what an operator would read."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **values: object) -> None:
        self.lines.append((event, values))

    warning = info


class KubeStage(Stage):
    """A Kubernetes back end in a directory, which may be closed and opened again under its pods."""

    def __init__(self, folder: Path, options: KubernetesOptions, *, lease: float = 60.0) -> None:
        super().__init__()
        self.folder, self.options, self.lease = folder, options, lease
        self.log, self.highest = SilentLog(), 10**9
        self._bound = listening()
        self.url = f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        self.backend = self.open()
        self.backend.adopt([])

    def open(self, **more: Any) -> KubernetesBackend:
        """Open a server on the same port as before."""
        (self.folder / "server").mkdir(exist_ok=True)
        access = AgentAccess(self._bound, self.url)
        journal = ServiceQueries(lambda: self.highest, more.pop("explain", lambda _job: None))
        self.backend = KubernetesBackend(
            (), self.folder / "server", self.tell, access, self.options, self.log, journal, lease=self.lease, **more
        )
        return self.backend

    def reopen(self, *runs: tuple[RunOrder, DesiredState]) -> None:
        """As after a crash of the server: a new one that is told what the journal knows."""
        self.backend.close()
        self.open().adopt(runs)

    def joined(self, *names: str) -> None:
        """Wait until these nodes are up."""
        until(lambda: all(self.node_state(name) is NodeState.UP for name in names))

    def node_state(self, name: str) -> NodeState | None:
        """What the back end last said of a node."""
        return next((each.state for each in reversed([*self.reports]) if each.node.name == name), None)

    def close(self) -> None:
        """End the server; AssertionError if it has failed by itself."""
        self.backend.close()
        self._bound.close()
        assert self.failures == []


class RealKubeStage(KubeStage):
    """On a real API server; pods are run as processes of this machine."""

    def __init__(self, server: KubeServer, folder: Path, **more: Any) -> None:
        self.server = server
        self.namespace = server.namespace("jobs")
        server.service_account(self.namespace, "poise-job")
        for name, (product, gpus) in NODES.items():
            server.add_node(name, gpus, product)
        self.kubelet = Processes(server, images=IMAGES)
        self.kubelet.start()
        options = KubernetesOptions(kubeconfig=server.kubeconfig("admin"), namespace=self.namespace, lease_seconds=5.0)
        super().__init__(folder, options, **more)

    def close(self) -> None:
        super().close()
        self.kubelet.close()


class FakeKubeStage(KubeStage):
    """On a pretended API server. A pod of Poise is an agent in this process, whose runs are processes of this machine.

    options   of the back end, besides how it reaches the API server
    """

    def __init__(self, folder: Path, *, options: Mapping[str, Any] | None = None, **more: Any) -> None:
        self.fake = FakeKubernetes()
        for name, (product, gpus) in NODES.items():
            self.fake.add("nodes", a_node(name, gpus, product))
        self.namespace = "jobs"
        self.fake.add("namespaces", {"metadata": {"name": self.namespace}})
        config = self.fake.config()
        given = KubernetesOptions(
            namespace=self.namespace,
            transport=FakeTransport(self.fake),
            config=config,
            **{"lease_seconds": 5.0, **(options or {})},
        )
        self.pods: dict[str, AgentThread] = {}
        self._closing = Event()
        super().__init__(folder, given, **more)
        self._kubelet = Thread(target=self._watch, daemon=True)
        self._kubelet.start()

    def _watch(self) -> None:
        """Run pods that are bound, and end those that are deleted."""
        while not self._closing.is_set():
            for pod in self.fake.all("pods"):
                name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
                if "deletionTimestamp" in pod["metadata"]:
                    if uid in self.pods:
                        self._end(uid, name)
                    self.fake.remove("pods", name, pod["metadata"]["namespace"])
                elif uid not in self.pods and pod["spec"].get("nodeName") and "initContainers" in pod["spec"]:
                    self.pods[uid] = self._begin(pod)
            sleep(0.01)

    def _begin(self, pod: dict[str, Any]) -> AgentThread:
        name, command = pod["metadata"]["name"], pod["spec"]["initContainers"][1]["command"]
        gpu_type, gpus = command[command.index("--gpus") + 1].split(":")
        token = secrets.token_hex(16)
        extra = {
            "authentication.kubernetes.io/pod-name": [name],
            "authentication.kubernetes.io/pod-uid": [pod["metadata"]["uid"]],
        }
        self.fake.tokens[token] = {"username": f"system:serviceaccount:{self.namespace}:poise-job", "extra": extra}
        self.fake.set_phase(name, "Running", self.namespace)
        spec = NodeSpec(name=name, gpu_type=gpu_type, gpus=int(gpus))
        return AgentThread(AgentConfig(self.url, token, spec, self.folder / "pods" / name, settings=QUICK))

    def _end(self, uid: str, name: str) -> None:
        self.pods.pop(uid).stop()

    def close(self) -> None:
        super().close()
        self._closing.set()
        self._kubelet.join()
        for agent in self.pods.values():
            agent.stop()
