"""A real `poise serve --backend kubernetes` on a real API server, whose pods are processes of this machine."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.service import Service
from tests.kube.kubelet import Kubelet, Processes
from tests.kube.pods import Image
from tests.kube.server import KubeServer

from poise.service.client import Client

HERE = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
IMAGES = {"poise": Image(path=HERE), "job": Image(path=HERE), "bare": Image(path="/nowhere")}
"""Images of `Processes`: Poise's own, one of users that has Python, and one that has nothing."""


class KubeService(Service):
    """A service that has an API server to itself, with nodes that this object makes: name to product and GPUs.

    kubelet   of those nodes; None: one that runs pods as processes
    """

    def __init__(
        self,
        folder: Path,
        server: KubeServer,
        nodes: dict[str, tuple[str, int]],
        *options: object,
        kubelet: Kubelet | None = None,
        **more: Any,
    ) -> None:
        self.kube, self.nodes = server, nodes
        self.namespace = server.namespace("jobs")
        server.service_account(self.namespace, "poise-job")
        for name, (product, gpus) in nodes.items():
            server.add_node(name, gpus, product)
        self.kubelet = kubelet or Processes(server, images=IMAGES)
        self.kubelet.start()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            agents = f"127.0.0.1:{probe.getsockname()[1]}"  # the same after each restart: pods know it
        where = ("--backend", "kubernetes", "--kubeconfig", server.kubeconfig("admin"), "--namespace", self.namespace)
        super().__init__(folder, *where, "--agents", agents, "--image", "poise", *options, **more)

    def talk_to_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let commands and clients of this process find the service."""
        for name in ("POISE_URL", "POISE_TOKEN", "POISE_CA"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(self._folder / "config"))
        monkeypatch.setenv("POISE_STATE", str(self.state))

    def up(self) -> Client:
        """Start the server; a client once all nodes have joined."""
        client = super().up()
        self.joined(client, *self.nodes)
        return client

    def close(self) -> None:
        """End the server, and everything that runs in pods."""
        super().close()
        self.kubelet.close()
