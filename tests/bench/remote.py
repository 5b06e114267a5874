"""`make bench`: what it takes to start and to end runs on other machines, with real agents, runners and processes.

Bars (issue "Several machines"): a gang over two nodes has begun within 1 s of its launch in 99 of 100 cases, once agents
are warm; a run with a small model has left with its checkpoint within 1 s; 100 runs that do nothing have begun within 10 s
of their submission, through the whole service. And of an agent that watches 8 runs: under 4 % of a core, a bar of our own.

Nodes are agents on this machine. Server, agents, runners and jobs are processes of their own and share its cores, so that
the figures are upper bounds.
"""

import argparse
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from time import monotonic, sleep

from tests.agents import AgentProcess, cpu_of
from tests.backends import N, Stage, a_request
from tests.bench.live import Service
from tests.bench.speed import say

from poise.scheduler.model.cluster import Node, parse_cluster
from poise.service.backends.api import (
    BackendEvent,
    BackendFailed,
    Finding,
    NodeReport,
    RunBegan,
    RunEnded,
    RunNotice,
    RunOrder,
    RunPart,
    RunProgressed,
)
from poise.service.backends.local.processes import children
from poise.service.backends.remote.backend import AgentAccess, RemoteBackend
from poise.service.backends.remote.identity import TOKEN_FILE
from poise.service.client import Client
from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobState

GANGS, LEAVES, NULL_RUNS, IDLE_RUNS = 100, 20, 100, 8
WARM = 5
"""Runs before those that count."""
MODEL_BYTES = 1 << 20
MOST_LAUNCH, MOST_LEAVE, MOST_START, MOST_IDLE = 1.0, 1.0, 10.0, 0.04
NODES = (Node("n-0", "v100", 8), Node("n-1", "v100", 8))

TRAINS = f"""
import os, time
from pathlib import Path
from poise.worker import attach
model = os.urandom({MODEL_BYTES})
def save(path):
    Path(path).write_bytes(model)
def load(path):
    global model
    model = Path(path).read_bytes()
for step in attach(save=save, load=load).steps(1_000_000):
    time.sleep(0.01)
"""
"""A model of 1 MiB, and steps of 10 ms."""


class TimedStage(Stage):
    """Events with the moments at which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[tuple[type[object], str], float] = {}

    def tell(self, news: BackendEvent) -> None:
        """Note the first of each kind for each job."""
        if not isinstance(news, NodeReport | Finding | BackendFailed):
            self.moments.setdefault((type(news), news.job), monotonic())
        super().tell(news)


class AgentCluster:
    """A remote back end in this process, with two agents as processes of their own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.stage = TimedStage()
        (folder / "server").mkdir()
        bound = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        access = AgentAccess(bound, url)
        self.backend = RemoteBackend(NODES, folder / "server", self.stage.tell, access)
        stack.callback(self.backend.close)
        self.backend.adopt([])
        self.agents = [
            AgentProcess(folder, url, folder / "server" / TOKEN_FILE, node.name, f"{node.gpu_type}:{node.gpus}")
            for node in NODES
        ]
        for agent in self.agents:
            stack.callback(agent.stop)
        for agent in self.agents:
            agent.wait()

    def launch(self, job: str, request: JobRequest, *parts: RunPart) -> float:
        """Launch a run; return when."""
        at = monotonic()
        self.backend.launch(RunOrder(job, 1, parts, request))
        return at

    def when(self, kind: type[N], job: str) -> float:
        """Wait for an event; return when it came."""
        self.stage.wait(kind, job)
        return self.stage.moments[kind, job]


def on(node: int, *slots: int) -> RunPart:
    """Slots of a node."""
    return RunPart(NODES[node].name, NODES[node].gpu_type, slots)


def gang_launches(cluster: AgentCluster, count: int) -> bool:
    """Gangs of two nodes with one rank each, one after the other: from the launch to RunBegan."""
    seconds = []
    for number in range(WARM + count):
        job = f"gang-{number}"
        at = cluster.launch(job, a_request(("true",), gpus=2), on(0, 0), on(1, 0))
        seconds.append(cluster.when(RunBegan, job) - at)
        cluster.when(RunEnded, job)
    return _took("gang over two nodes, launch to begin", seconds[WARM:], MOST_LAUNCH)


def leaves(cluster: AgentCluster, count: int) -> bool:
    """Runs of poise.worker with a small model, on one node: from the request to leave until nothing is left of them."""
    seconds = []
    request = a_request((sys.executable, "-c", TRAINS))
    for number in range(count):
        job = f"leave-{number}"
        cluster.launch(job, request, on(0, 0))
        cluster.when(RunProgressed, job)
        at = monotonic()
        cluster.backend.stop(job, 1, RunNotice("preempted", "bench", 30.0))
        seconds.append(cluster.when(RunEnded, job) - at)
        end = cluster.stage.wait(RunEnded, job)
        if end.steps is None or end.cause is not None:
            raise RuntimeError(f"it left without a checkpoint: {end}")
    return _took("leave to gone, with a checkpoint of 1 MiB", seconds, MOST_LEAVE)


def idle_agent(cluster: AgentCluster, runs: int, seconds: float) -> bool:
    """CPU time of agents and runners while runs do nothing but report progress; and while half of them are gangs."""
    request = a_request((sys.executable, "-c", TRAINS.replace("0.01", "0.5")), gpus=1)
    for number in range(runs):
        cluster.launch(f"idle-{number}", request, on(0, number))
        cluster.when(RunProgressed, f"idle-{number}")
    ok = _watching(cluster, f"{runs} runs", seconds)
    for number in range(runs):
        cluster.backend.kill(f"idle-{number}", 1, "bench")
        cluster.when(RunEnded, f"idle-{number}")
    request = a_request((sys.executable, "-c", TRAINS.replace("0.01", "0.5")), gpus=2)
    for number in range(runs):
        cluster.launch(f"idle-gang-{number}", request, on(0, number), on(1, number))
        cluster.when(RunProgressed, f"idle-gang-{number}")
    ok &= _watching(cluster, f"parts of {runs} gangs", seconds)
    for number in range(runs):
        cluster.backend.kill(f"idle-gang-{number}", 1, "bench")
        cluster.when(RunEnded, f"idle-gang-{number}")
    return ok


def _watching(cluster: AgentCluster, what: str, seconds: float) -> bool:
    agent = cluster.agents[0]
    runners = children(agent.process.pid)
    before, before_runners = agent.cpu(), sum(map(cpu_of, runners))
    sleep(seconds)
    busy, of_runners = (agent.cpu() - before) / seconds, (sum(map(cpu_of, runners)) - before_runners) / seconds
    text = f"agent that watches {what}: {busy:.2%} of a core; their {len(runners)} runners together {of_runners:.2%}"
    return say(text, busy < MOST_IDLE, f"agent under {MOST_IDLE:.0%}")


def _took(what: str, seconds: list[float], most: float) -> bool:
    cuts = quantiles(seconds, n=100, method="inclusive")
    middle, late = cuts[49] * 1e3, cuts[98] * 1e3
    text = f"{what}: p50 {middle:.0f} ms, p99 {late:.0f} ms, at most {max(seconds) * 1e3:.0f} ms, {len(seconds)} runs"
    return say(text, late < most * 1e3, f"p99 under {most:g} s")


def null_runs(folder: Path, stack: ExitStack, count: int) -> bool:
    """Jobs that do nothing, through the whole service: from the first submission until all have begun."""
    options = (
        "--backend",
        "remote",
        "--agents",
        "127.0.0.1:0",
        "--cluster",
        "v100:100@50",
        "--policy",
        "fifo",
        "--allow-root",
    )
    service = Service(folder / "state", options)
    service.start()
    stack.callback(service.kill)
    cluster = parse_cluster("v100:100@50")
    agents = [
        AgentProcess(folder, service.agents, folder / "state" / TOKEN_FILE, node.name, f"v100:{node.gpus}")
        for node in cluster.nodes
    ]
    for agent in agents:
        stack.callback(agent.stop)
    for agent in agents:
        agent.wait()
    with Client(service.url, service.token) as client:
        client.wait([client.submit(command=("true",)).id for _ in agents])
        at = monotonic()
        handles = client.submit_all([JobRequest(command=("true",)) for _ in range(count)])
        ids, begun = {each.id for each in handles}, 0
        while begun < count:
            jobs = client.queue(states=(JobState.RUNNING, JobState.SUCCEEDED), limit=1_000).jobs
            begun = len(ids.intersection(job.id for job in jobs))
            sleep(0.02)
        took = monotonic() - at
        client.wait([*ids])
    gone = monotonic() - at
    text = f"{count} runs that do nothing began within {took:.2f} s of their submission, and ended within {gone:.2f} s"
    return say(text, took < MOST_START, f"under {MOST_START:g} s")


def main() -> int:
    """Measure, print, and say by the exit code whether all bars hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0, help="of watching runs that do nothing")
    given = parser.parse_args()
    held = []
    with tempfile.TemporaryDirectory(prefix="poise-bench-") as folder, ExitStack() as stack:
        cluster = AgentCluster(Path(folder), stack)
        held.append(gang_launches(cluster, GANGS))
        held.append(leaves(cluster, LEAVES))
        held.append(idle_agent(cluster, IDLE_RUNS, given.seconds))
    with tempfile.TemporaryDirectory(prefix="poise-bench-") as folder, ExitStack() as stack:
        held.append(null_runs(Path(folder), stack, NULL_RUNS))
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
