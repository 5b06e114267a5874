"""A Ray cluster of real daemons on this machine: a head, and nodes with pretended GPUs, each on an address of its own.

With token authentication, on ports that were free, in a directory of its own. All of it ends with the test run, however that
ends (`orphanage.py`); nothing is looked for by name outside what was started here.
"""

import json
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.orphanage import descendants

HEAD = "127.0.0.2"
RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
START_SECONDS = 120.0
TRIES = 3
HEALTH = {"period_ms": 1000, "failure_threshold": 5, "timeout_ms": 1000, "initial_delay_ms": 1000}
"""Health checks of Ray, quicker than by default: a node that is killed is dead after about 5 s."""


@dataclass(frozen=True, slots=True)
class PretendedNode:
    """A Ray node, on a loopback address of its own."""

    name: str
    address: str
    gpu_type: str
    gpus: int
    labels: dict[str, str] = field(default_factory=dict)


NODES = (
    PretendedNode("v100-0", "127.0.0.3", "V100", 4, {"rack": "r1"}),
    PretendedNode("v100-1", "127.0.0.4", "V100", 4, {"rack": "r1"}),
    PretendedNode("p100-0", "127.0.0.5", "NVIDIA_TESLA_P100", 2, {"ray.io/availability-zone": "eu-1b"}),
    PretendedNode("k80-0", "127.0.0.6", "K80", 4),
)


class RayDaemons:
    """The daemons of one cluster, from `start` to `close`."""

    def __init__(self, nodes: Sequence[PretendedNode] = NODES, **settings: str) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.root = Path(tempfile.mkdtemp(prefix="pr-"))  # short: paths of sockets have at most 107 bytes
        self.token = secrets.token_hex(24)
        self.address = ""
        self._heads = 0
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONDONTWRITE"))}
        self.environment = {
            **plain,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            **{f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()},
            **settings,
        }
        argv = [sys.executable, str(Path(__file__).with_name("orphanage.py")), str(self.root)]
        self._keeper = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def start(self) -> None:
        """Start the head, then the nodes, one after the other: each takes all the processors there are for some seconds."""
        self.start_head()
        for name in self.nodes:
            self.start_node(name)

    def start_head(self, *, again: bool = False) -> None:
        """Start the head, which has no GPUs; where a busy machine was too slow for Ray, once more, at another place.

        again   at the address of the head before it, as one that comes back
        """
        for _ in range(TRIES):
            if not again:
                self.address = f"{HEAD}:{_free_ports(HEAD, 1)[0]}"
            self._heads += 1
            port, folder = self.address.rpartition(":")[2], self.root / f"h{self._heads}"
            self._order(
                [*RAY, "start", "--head", f"--node-ip-address={HEAD}", f"--port={port}", "--include-dashboard=false",
                 "--no-monitor", "--num-gpus=0", "--labels=role=head", f"--temp-dir={folder}", *_common(HEAD)]
            )  # fmt: skip
            answer = self._answers.get(timeout=START_SECONDS)
            if answer["code"] == 0:
                return
            assert not again, answer["output"]  # its nodes may live: nothing is to be killed
            for pid in descendants(self._keeper.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        raise AssertionError(answer["output"])

    def start_node(self, name: str) -> None:
        """Start a node, or start it again; once more where Ray gives up, as on a helper that takes 15 s to start."""
        for _ in range(TRIES):
            self._order(self._node_argv(self.nodes[name]))
            answer = self._answers.get(timeout=START_SECONDS)
            if answer["code"] == 0:
                return
        raise AssertionError(answer["output"])

    def kill_node(self, name: str) -> None:
        """Kill the raylet of a node: its workers end with it, and what they have started elsewhere does not."""
        os.kill(self.raylet(name), signal.SIGKILL)

    def kill_head(self) -> None:
        """Kill the control store and the head's raylet."""
        for pid in [self._pid("gcs_server"), self._pid(f"--node_ip_address={HEAD}", "raylet")]:
            os.kill(pid, signal.SIGKILL)

    def raylet(self, name: str) -> int:
        """Return the process of a node."""
        return self._pid(f"--node_ip_address={self.nodes[name].address}", "raylet")

    def lives(self, name: str) -> bool:
        """Say whether a node has its process."""
        try:
            return self.raylet(name) > 0
        except LookupError:
            return False

    def agent(self, name: str) -> int | None:
        """Return the process of the actor on a node; None: there is none."""
        found = [pid for pid in descendants(self.raylet(name)) if _command(pid).startswith("ray::NodeAgent")]
        return found[0] if found else None

    def close(self) -> None:
        """End everything, and remove the directory."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(60)
        assert self._keeper.stdout is not None
        self._keeper.stdout.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def _node_argv(self, node: PretendedNode) -> list[str]:
        labels = {"node-name": node.name, "ray.io/accelerator-type": node.gpu_type, **node.labels}
        return [
            *RAY, "start", f"--address={self.address}", f"--node-ip-address={node.address}", f"--num-gpus={node.gpus}",
            f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}", f"--temp-dir={self.root / node.name}",
            *_common(node.address),
        ]  # fmt: skip

    def _pid(self, *words: str) -> int:
        for pid in descendants(self._keeper.pid):
            command = _command(pid)
            if (
                command.split("/")[-1]
                and all(word in command for word in words)
                and command.split("\0")[0].endswith(_DAEMONS)
            ):
                return pid
        raise LookupError(f"no daemon with {words}")

    def _order(self, argv: list[str]) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(json.dumps({"argv": argv, "environment": self.environment}) + "\n")
        self._keeper.stdin.flush()

    def _read(self) -> None:
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            self._answers.put(json.loads(line))


_DAEMONS = ("gcs_server", "raylet")


def _common(address: str) -> list[str]:
    """Options of head and nodes. A raylet does not wait for helpers whose ports it was given."""
    names = ("dashboard-agent-grpc", "dashboard-agent-listen", "runtime-env-agent", "metrics-export")
    ports = zip(names, _free_ports(address, len(names)), strict=True)
    return [
        "--num-cpus=1", "--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0",
        "--disable-usage-stats", "--include-log-monitor=false", *(f"--{name}-port={port}" for name, port in ports),
    ]  # fmt: skip


def _free_ports(address: str, count: int) -> list[int]:
    """Find ports that nothing listens on, no two of them the same."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server((address, 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


@contextmanager
def ray_daemons(nodes: Sequence[PretendedNode] = NODES, **settings: str) -> Iterator[RayDaemons]:
    """A cluster that runs; `settings` are further variables of its environment."""
    daemons = RayDaemons(nodes, **settings)
    try:
        daemons.start()
        yield daemons
    finally:
        daemons.close()
