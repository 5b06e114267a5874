"""A Ray back end under test, on the one Ray cluster of the test run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests.backends import Stage, _environ, _pids, until
from tests.ray_cluster import RayDaemons
from tests.remote import RemoteStage, listening

from poise.scheduler.model.cluster import Node
from poise.service.backends.ray.backend import RayBackend, RayOptions
from poise.service.backends.remote.backend import AgentAccess
from poise.service.server.logs import Level, Logbook

CLUSTER = (
    Node("v100-0", "v100", 4, "r1"),
    Node("v100-1", "v100", 4, "r1"),
    Node("p100-0", "p100", 2, "eu-1b"),
    Node("k80-0", "k80", 4),
)

RELEASE_SECONDS = 240.0  # the longest that letting go takes: a lease, and an agent that Ray starts again
_PORTS: dict[Path, int] = {}
"""Where the service of a directory listened last: in the next test at the same place, so that agents find it at once."""


class RayStage(RemoteStage):
    """A Ray back end in a directory, which may be closed and opened again under its agents.

    The directory is that of one service for the whole test run: a second service would have to wait for the first to let go
    of the cluster.
    """

    def __init__(self, daemons: RayDaemons, folder: Path, *, lease: float = 60.0, nodes: tuple[Node, ...] = CLUSTER) -> None:
        Stage.__init__(self)
        self.daemons, self.folder, self.lease, self.nodes = daemons, folder, lease, nodes
        self._bound = listening(_PORTS.get(folder, 0))
        _PORTS[folder] = self._bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        self.agents = {}
        self.backend = self.open()
        self.backend.adopt([])
        self.joined(*daemons.nodes)

    def open(self, **more: Any) -> RayBackend:
        """Open a server."""
        (self.folder / "server").mkdir(exist_ok=True)
        access = AgentAccess(self._bound, self.url)
        options = RayOptions(self.daemons.address, self.folder / "nodes", isolate="off")
        log = Logbook(least=Level.ERROR)
        lease = more.pop("lease", self.lease)
        nodes = more.pop("nodes", self.nodes)
        with mock.patch.dict(os.environ, self.daemons.environment | more.pop("environment", {})):
            made = RayBackend(nodes, self.folder / "server", self.tell, access, options, log, lease=lease, **more)
        self.backend = made
        return made

    def move(self) -> None:
        """From now on servers listen on another port."""
        self._bound.close()
        self._bound = listening()
        _PORTS[self.folder] = self._bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._bound.getsockname()[1]}"

    def withheld(self, name: str) -> tuple[int, ...] | None:
        """What the back end last said of GPUs of a node that others use."""
        return next((each.withheld for each in reversed([*self.reports]) if each.node.name == name), None)

    def processes(self, *names: str) -> list[int]:
        """Everything that carries a mark of these nodes; of all, if none is named."""
        roots = [*(self.folder / "nodes").glob("*")]
        marks = [b"POISE_RUN_DIR=" + bytes(root / name) + b"/" for root in roots for name in names or ("",)]
        marks = [mark.replace(b"//", b"/") for mark in marks]
        return [pid for pid in _pids() if any(each.startswith(mark) for each in _environ(pid) for mark in marks)]

    def close(self) -> None:
        """End what runs, as a server does that knows of nothing; the agents stay for the next test."""
        self.reopen()
        until(lambda: not self.processes())
        self.backend.close()
        self._bound.close()


def released(daemons: RayDaemons, settings: str = "") -> "subprocess.CompletedProcess[str]":
    """Let go of the cluster, as an operator does; `settings` are lines of Python that come before."""
    command = f"from poise.cli.app import main; from poise.service.backends.ray import driver\n{settings}\nmain()"
    argv = [sys.executable, "-c", command, "ray", "release", "--address", daemons.address]
    return subprocess.run(
        argv, env=daemons.environment, capture_output=True, text=True, check=False, timeout=RELEASE_SECONDS
    )


def release(daemons: RayDaemons) -> str:
    """Let go of the cluster, which has to succeed; return what the command says."""
    done = released(daemons)
    assert done.returncode == 0, done.stderr
    return done.stderr


def ray_script(daemons: RayDaemons, text: str, *arguments: str) -> subprocess.Popen[str]:
    """Start another user of the Ray cluster: a script that finds it connected."""
    begin = f"import ray; ray.init(address={daemons.address!r}, logging_level='ERROR', log_to_driver=False)\n"
    argv = [sys.executable, "-c", begin + text, *arguments]
    return subprocess.Popen(
        argv, env=daemons.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
