"""A server and the agents of several nodes as real processes, any of which may be killed, stopped or cut off.

Each node has a state directory of its own and, if there is a `Network`, a network namespace of its own: nothing but HTTP
is shared by server and nodes. By the state directory all processes of a node are found, besides its agent.
"""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any
from uuid import uuid4

from tests.e2e.service import ISOLATE, WORKERS, Process, Service, marked_with, until
from tests.shell import COMMAND

from poise.service.backends.local.processes import stat_of
from poise.service.backends.remote.identity import TOKEN_FILE
from poise.service.client import Client

NODES = {"v100-0": "v100:2", "v100-1": "v100:2", "v100-2": "v100:2", "k80-0": "k80:2"}


class Network:
    """Network namespaces on a bridge: one for each node, each with a cable that can be pulled.

    The server stays where the test is, at `server`; nodes are at `address(name)`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._mark = uuid4().hex[:6]
        self._subnet = f"10.{uuid4().int % 200 + 20}.{uuid4().int % 250}"
        self._numbers = {name: number for number, name in enumerate(names, 11)}
        self.server = f"{self._subnet}.1"
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.server}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for name in names:
                self._connect(name)
        except BaseException:
            self.close()
            raise

    @property
    def _bridge(self) -> str:
        return f"pz{self._mark}"

    def _namespace(self, name: str) -> str:
        return f"{self._bridge}-{self._numbers[name]}"

    def _cable(self, name: str) -> str:
        return f"{self._bridge}c{self._numbers[name]}"

    def _connect(self, name: str) -> None:
        there = self._namespace(name)
        _ip("netns", "add", there)
        _ip("link", "add", self._cable(name), "type", "veth", "peer", "name", "eth0", "netns", there)
        _ip("link", "set", self._cable(name), "master", self._bridge, "up")
        _ip("-n", there, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _ip("-n", there, "link", "set", "eth0", "up")
        _ip("-n", there, "link", "set", "lo", "up")

    def address(self, name: str) -> str:
        """Where other nodes reach this one."""
        return f"{self._subnet}.{self._numbers[name]}"

    def inside(self, name: str) -> tuple[str, ...]:
        """What comes before a command that is to run on this node."""
        return ("nsenter", f"--net=/run/netns/{self._namespace(name)}", "--")

    def cut(self, name: str) -> None:
        """Pull the cable of a node. Connections stay open, and nothing gets through."""
        _ip("link", "set", self._cable(name), "down")

    def heal(self, name: str) -> None:
        """Plug it in again."""
        _ip("link", "set", self._cable(name), "up")

    def close(self) -> None:
        """Remove everything."""
        for name in self._numbers:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self._namespace(name))
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def why_no_network() -> str | None:
    """Why there can be no `Network` here; None: there can be."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if not (shutil.which("ip") and shutil.which("nsenter")):
        return "there are no `ip` and `nsenter`"
    try:
        Network(["probe"]).close()
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.decode().strip()}"
    return None


class Machine:
    """One node: its agent, and all processes of its runs.

    inside    what comes before a command that runs there;  address: where other nodes reach it; None: on this machine
    options   of `poise agent`, besides those that every agent has
    """

    def __init__(
        self, folder: Path, name: str, gpus: str, inside: Sequence[str] = (), address: str | None = None, *options: object
    ) -> None:
        self.name, self.gpus, self.state = name, gpus, folder / name
        self._inside, self._address, self.options = tuple(inside), address, options
        self._log = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, url: str, token: Path, command: Sequence[str] = (COMMAND,)) -> None:
        """Start the agent, and do not wait for it."""
        where = () if self._address is None else ("--address", self._address)
        words = (
            *self._inside, *command, "agent", "--server", url, "--token-file", token, "--state", self.state,
            "--node", self.name, "--gpus", self.gpus, "--isolate", ISOLATE, *where, *self.options,
        )  # fmt: skip
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def agent(self) -> "subprocess.Popen[bytes]":
        """The agent's process."""
        assert self.process is not None
        return self.process

    @property
    def log(self) -> str:
        """What all agents of this node have said."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def runs(self) -> list[Process]:
        """Everything alive that carries a mark of this node."""
        return marked_with(self.state)

    def kill(self) -> None:
        """SIGKILL to the agent."""
        self.agent.kill()
        self.agent.wait()

    def stop(self) -> int:
        """SIGTERM to the agent; its exit code."""
        self.agent.terminate()
        return self.agent.wait(60.0)

    def pause(self) -> None:
        """SIGSTOP to the agent and all processes of its runs, as when the whole machine stands still."""
        pause(self._pids)

    def resume(self) -> None:
        """SIGCONT to all of them."""
        resume(self._pids())

    def _pids(self) -> set[int]:
        return {self.agent.pid, *(each.pid for each in self.runs())}


def pause(find: Callable[[], set[int]]) -> None:
    """SIGSTOP to all of these processes, and those that they start before they are stopped."""
    found: set[int] = set()
    while pids := find() - found:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        until(lambda pids=pids: all(stat_of(pid)[:1] in ([], ["T"], ["Z"], ["X"]) for pid in pids), "it does not stop")  # type: ignore[misc]
        found |= pids


def resume(pids: Iterable[int]) -> None:
    """SIGCONT to them."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Machines(Service):
    """A server with agents. `options` are those of `poise serve`.

    nodes     what each has, by name
    network   None: all are on this machine's loopback, and a node can only be cut off by stopping its processes
    """

    def __init__(
        self,
        folder: Path,
        *options: object,
        nodes: Mapping[str, str] = NODES,
        fence: float = 60.0,
        network: Network | None = None,
        **more: Any,
    ) -> None:
        self.network, self.fence = network, fence
        host = "127.0.0.1" if network is None else network.server
        with socket.create_server((host, 0)) as probe:
            self.port = probe.getsockname()[1]  # the same after each restart: agents know it
        self.host, self.url = host, f"http://{host}:{self.port}"
        remote = ("--backend", "remote", "--agents", f"{host}:{self.port}", "--fence", fence, "--insecure")
        super().__init__(folder, *remote, *options, **more)
        self.machines = {name: self._machine(folder, name, gpus) for name, gpus in nodes.items()}
        self.stamps = folder / "stamps"
        self.stamps.mkdir()

    def _machine(self, folder: Path, name: str, gpus: str) -> Machine:
        if self.network is None:
            return Machine(folder, name, gpus)
        return Machine(folder, name, gpus, self.network.inside(name), self.network.address(name))

    @property
    def token(self) -> Path:
        """File with the agents' token."""
        return self.state / TOKEN_FILE

    def start_agents(self, *names: str, command: Sequence[str] = (COMMAND,)) -> None:
        """Start the agents of these nodes; of all, if none is named."""
        until(self.token.exists, "there is no token for agents")
        for name in names or self.machines:
            self.machines[name].start(self.url, self.token, command)

    def up(self) -> Client:
        """Start the server and the agents; a client once all nodes have joined."""
        client = super().up()
        self.start_agents()
        self.joined(client, *self.machines)
        return client

    def processes(self) -> list[Process]:
        """Everything alive that carries a mark of a node."""
        return [each for machine in self.machines.values() for each in machine.runs()]

    def guarded(self, script: Path, *words: object) -> tuple[str, ...]:
        """A command that also stamps when it lives."""
        return super().guarded(WORKERS / "stamped.py", self.stamps, script, *words)

    def where(self, job: str) -> list[str]:
        """The nodes that have processes of a job."""
        return [name for name, machine in self.machines.items() if any(each.job == job for each in machine.runs())]

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Cut a node off: pull its cable, or stop all its processes where it has none."""
        self.cut(name)
        try:
            yield
        finally:
            self.heal(name)

    def cut(self, name: str) -> None:
        """Cut a node off."""
        if self.network is None:
            self.machines[name].pause()
        else:
            self.network.cut(name)

    def heal(self, name: str) -> None:
        """Undo that."""
        if self.network is None:
            self.machines[name].resume()
        else:
            self.network.heal(name)

    def close(self) -> None:
        """End everything that was started here."""
        for machine in self.machines.values():
            if machine.process is not None:
                machine.kill()
        super().close()
        while self.processes():  # what was stopped and is killed goes at once; a slow machine needs a moment
            sleep(0.02)


def check_epochs(stamps: Path) -> dict[str, int]:
    """No process of a run lived while one of another run of its job did, as their own stamps say; runs by job."""
    found = {}
    for job in sorted(stamps.iterdir()):
        spans: dict[int, list[float]] = {}
        for file in job.iterdir():
            # Lines end with a full stop: of the last one, only a part may be there.
            times = [float(line.split()[0]) for line in file.read_text().splitlines() if line.endswith(".")]
            spans.setdefault(int(file.name.partition("-")[0]), []).extend(times)
        order = sorted(epoch for epoch, times in spans.items() if times)
        for before, after in pairwise(order):
            late, early = max(spans[before]), min(spans[after])
            assert late < early, f"job {job.name}: run {after} lived at {early}, and run {before} at {late}"
        found[job.name] = len(order)
    return found
