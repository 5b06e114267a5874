"""The live half: a small workload drawn from a seed, a service of its own, real processes, and what became of the jobs."""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import numpy as np

from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.errors import PoiseError
from poise.scheduler.model.job import Job
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import shipped
from poise.service.agent.node_state import LEASE
from poise.service.client import Client
from poise.service.fidelity import trainer
from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobDetail, JobState

POISE = (sys.executable, "-c", "from poise.cli import main; main()")
STEP = 0.1
"""Seconds per step on the reference type."""
POLL = 0.2
"""Seconds between two looks whether all jobs have ended."""
CANCEL_TIMEOUT = 30.0
"""Seconds to wait for cancelled jobs to end."""
LARGE_PART = 0.25
"""Of all jobs: those that want more than one GPU."""
TIMEOUT = 600.0
"""Seconds after which a workload that has not ended is taken to hang."""


@dataclass(frozen=True, slots=True)
class FidelityJob:
    """One job: when it arrives (seconds from the start), its gang, and its steps."""

    name: str
    arrives: float
    gpus: int
    steps: int

    @property
    def duration(self) -> float:
        """Seconds on the reference type."""
        return self.steps * STEP


@dataclass(frozen=True, slots=True)
class FidelitySetup:
    """How both halves are set up. `round`: seconds."""

    cluster: Cluster
    policy: str
    round: float
    placement: str = "consolidate"


ServedBy = Callable[[Path, FidelitySetup], AbstractContextManager[Client]]
"""How the service is started, in a directory of its own: it ends when the context is left, with everything that it runs."""


def draw_workload(
    jobs: int, seed: int, cluster: Cluster, load: float, median: float = 6.0, longest: float = 5.0
) -> list[FidelityJob]:
    """Jobs that arrive at such a rate that together they ask for `load` times what the cluster has.

    Durations are log-normal, between a quarter of the median and `longest` times it; a quarter of the jobs want two GPUs.
    Where a GPU type has several nodes, a third of those want all GPUs of two nodes instead.
    """
    stream = np.random.default_rng(seed)
    durations = np.clip(stream.lognormal(np.log(median), 0.7, jobs), median / 4, median * longest)
    drawn = stream.random(jobs)
    gpus = np.where(drawn < LARGE_PART, 2, 1)
    sizes = Counter((node.gpu_type, node.gpus) for node in cluster.nodes)
    wide = max((2 * size for (_, size), nodes in sizes.items() if nodes > 1), default=2)
    gpus = np.where(drawn < LARGE_PART / 3, wide, gpus)
    speed = relative_speeds(cluster)
    capacity = sum(cluster.gpus_of(name) * speed[name] for name in cluster.gpu_types)
    span = float((durations * gpus).sum()) / capacity / load
    arrivals = np.sort(stream.random(jobs)) * span
    return [
        FidelityJob(f"job-{place}", float(at), int(gang), max(1, round(float(seconds) / STEP)))
        for place, (at, gang, seconds) in enumerate(zip(arrivals - arrivals[0], gpus, durations, strict=True))
    ]


def relative_speeds(cluster: Cluster) -> dict[str, float]:
    """Believed speed of each GPU type for a job that was never measured; the trainer runs at it."""
    _, estimate, _ = Speeds(shipped(), cluster).resolve(Job("any", 0.0, 1, duration=1.0))
    return {name: rates[0] for name, rates in zip(cluster.gpu_types, estimate.rates, strict=True)}


@dataclass(frozen=True, slots=True)
class LiveResult:
    """What became of the workload: each job with its runs. `origin`: timestamp from which rounds are counted."""

    origin: float
    jobs: tuple[JobDetail, ...]

    def overhead(self, jobs: Sequence[FidelityJob], cluster: Cluster) -> float:
        """Average seconds per start during which GPUs were held without progress.

        For each job: the time for which it held GPUs, less what its steps take on the GPU types that it had.
        """
        lost, starts = 0.0, 0
        speeds = relative_speeds(cluster)
        types = {node.name: node.gpu_type for node in cluster.nodes}
        for job, seen in zip(jobs, self.jobs, strict=True):
            worked, before = 0.0, 0.0
            for run in seen.runs:
                kept = job.steps if run.how == "finished" else run.kept or 0.0
                worked += (kept - before) * STEP / speeds[types[next(iter(run.gpus))]]
                before = kept
            lost += seen.job.ran - worked
            starts += len(seen.runs)
        return max(0.0, lost / starts)


def run_live(
    jobs: Sequence[FidelityJob], setup: FidelitySetup, progress: Callable[[int], None], served: ServedBy
) -> LiveResult:
    """Run the workload for real; `progress` is called with the number of jobs that have ended.

    Raises PoiseError if a job does not succeed, or the workload hangs.
    """
    speeds = [f"{name}={speed!r}" for name, speed in relative_speeds(setup.cluster).items()]
    with tempfile.TemporaryDirectory(prefix="poise-fidelity-") as folder, served(Path(folder), setup) as client:
        origin = client.service().started
        begun = monotonic()
        ids: list[str] = []
        try:
            for job in jobs:
                sleep(max(0.0, begun + job.arrives - monotonic()))
                command = (sys.executable, trainer.__file__ or "", str(job.steps), str(STEP), *speeds)
                request = JobRequest(name=job.name, command=command, gpus=job.gpus, duration=job.duration)
                ids.append(client.submit(request).id)
            _wait(client, len(jobs), begun, progress)
        except BaseException:
            # Leave no process behind.
            for each in ids:
                with suppress(PoiseError):
                    client.cancel(each)
            begun = monotonic()
            while client.queue().jobs and monotonic() - begun < CANCEL_TIMEOUT:
                sleep(POLL)
            raise
        return LiveResult(origin, tuple(client.show(each) for each in ids))


def _wait(client: Client, jobs: int, begun: float, progress: Callable[[int], None]) -> None:
    final = [state for state in JobState if state.is_final]
    while monotonic() - begun < TIMEOUT:
        ended = client.queue(states=final, limit=1000).jobs
        progress(len(ended))
        for job in ended:
            if job.state is not JobState.SUCCEEDED:
                raise PoiseError(f"{job.name} ended as {job.state}: {job.reason.text}")
        if len(ended) == jobs:
            return
        sleep(POLL)
    raise PoiseError(f"the workload has not ended after {TIMEOUT:g} s")


@contextmanager
def on_this_machine(folder: Path, setup: FidelitySetup) -> Iterator[Client]:
    """A service whose jobs are its own machine's processes."""
    with started(folder, setup, "--cluster", str(setup.cluster)) as said, client_of(said) as client:
        yield client


@contextmanager
def on_agents(folder: Path, setup: FidelitySetup) -> Iterator[Client]:
    """A service with an agent for each node of the cluster, all on this machine."""
    options = ("--backend", "remote", "--agents", "127.0.0.1:0", "--cluster", str(setup.cluster))
    with started(folder, setup, *options) as said, ExitStack() as stack:
        for node in setup.cluster.nodes:
            state = folder / "nodes" / node.name
            where = ("--server", said["agents"], "--token-file", said["agents_token_file"], "--state", str(state))
            what = ("--node", node.name, "--gpus", f"{node.gpu_type}:{node.gpus}", "--rack", node.rack)
            agent = stack.enter_context(subprocess.Popen([*POISE, "agent", "--quiet", *where, *what]))
            stack.callback(agent.terminate)
        begun = monotonic()
        while not all((folder / "nodes" / node.name / LEASE).exists() for node in setup.cluster.nodes):
            if monotonic() - begun > TIMEOUT:
                raise PoiseError("the agents did not start")
            sleep(POLL)
        yield stack.enter_context(client_of(said))


@contextmanager
def started(folder: Path, setup: FidelitySetup, *options: str) -> Iterator[dict[str, str]]:
    """Start a real `poise serve` on a free port; yield what it says of itself. It is ended afterwards."""
    command = [
        *POISE, "serve", "--json", "--quiet", "--state", str(folder / "state"), "--listen", "127.0.0.1:0",
        "--policy", setup.policy, "--placement", setup.placement, "--round", f"{setup.round!r}s", "--minimum-run", "0",
        *options,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            first = process.stdout.readline() if process.stdout else ""
            if not first:
                raise PoiseError("the service did not start")
            yield json.loads(first)
        finally:
            process.terminate()


def client_of(said: dict[str, str]) -> Client:
    """A client of the service that says this of itself."""
    return Client(said["url"], Path(said["token_file"]).read_text(encoding="ascii").strip())
