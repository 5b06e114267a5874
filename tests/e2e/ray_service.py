"""A real `poise serve --backend ray` on a cluster of real Ray daemons."""

import socket
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.service import WORKERS, Process, Service, marked_with
from tests.ray_cluster import RayDaemons

from poise.service.client import Client


class RayService(Service):
    """A service that has a Ray cluster to itself; nodes keep their state in `agents`, by service and name."""

    def __init__(self, folder: Path, daemons: RayDaemons, *options: object, fence: float = 60.0, **more: Any) -> None:
        self.daemons, self.agents = daemons, folder / "agents"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            agents = (
                f"127.0.0.1:{probe.getsockname()[1]}"  # the same after each restart: else Ray has to tell all agents anew
            )
        ray = ("--backend", "ray", "--address", daemons.address, "--agents", agents, "--fence", fence)
        super().__init__(folder, *ray, "--agent-state", self.agents, "--allow-root", *options, **more)
        self.stamps = folder / "stamps"
        self.stamps.mkdir()
        self._config = folder / "config"

    def talk_to_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let commands and clients of this process find the service, and the server the Ray cluster."""
        for name in ("POISE_URL", "POISE_TOKEN", "POISE_CA"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(self._config))
        monkeypatch.setenv("POISE_STATE", str(self.state))
        for name, value in self.daemons.environment.items():
            if name.startswith("RAY_"):
                monkeypatch.setenv(name, value)

    def up(self) -> Client:
        """Start the server; a client once all nodes have joined."""
        client = super().up()
        self.joined(client, *self.daemons.nodes)
        return client

    def guarded(self, script: Path, *words: object) -> tuple[str, ...]:
        """A command that also stamps when it lives."""
        return super().guarded(WORKERS / "stamped.py", self.stamps, script, *words)

    def processes(self, node: str = "*") -> list[Process]:
        """Everything alive that carries a mark of a node, or of any."""
        return [each for state in self.agents.glob(f"*/{node}") for each in marked_with(state)]

    def where(self, job: str) -> list[str]:
        """The nodes that have processes of a job."""
        found = {node.name: marked_with(node) for node in self.agents.glob("*/*")}
        return sorted(name for name, runs in found.items() if any(each.job == job for each in runs))
