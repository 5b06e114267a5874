"""The live half: a small workload drawn from a seed, a service of its own, real processes, and what became of the jobs."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import numpy as np

from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.errors import PoiseError
from poise.scheduler.model.job import Job
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import shipped
from poise.service.client import Client
from poise.service.fidelity import trainer
from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobDetail, JobState

STEP = 0.1
"""Seconds per step on the reference type."""
POLL = 0.2
"""Seconds between two looks whether all jobs have ended."""
CANCEL_TIMEOUT = 30.0
"""Seconds to wait for cancelled jobs to end."""
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


def draw_workload(jobs: int, seed: int, cluster: Cluster, load: float) -> list[FidelityJob]:
    """Jobs that arrive at such a rate that together they ask for `load` times what the cluster has.

    Durations are log-normal with a median of 6 s, between 1.5 s and 30 s; a quarter of the jobs want two GPUs.
    """
    stream = np.random.default_rng(seed)
    durations = np.clip(stream.lognormal(np.log(6.0), 0.7, jobs), 1.5, 30.0)
    gpus = np.where(stream.random(jobs) < 0.25, 2, 1)
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
        for job, seen in zip(jobs, self.jobs, strict=True):
            worked, before = 0.0, 0.0
            for run in seen.runs:
                kept = job.steps if run.how == "finished" else run.kept or 0.0
                gpu_type = next(iter(run.gpus)).rpartition("-")[0]
                worked += (kept - before) * STEP / speeds[gpu_type]
                before = kept
            lost += seen.job.ran - worked
            starts += len(seen.runs)
        return max(0.0, lost / starts)


def run_live(jobs: Sequence[FidelityJob], setup: FidelitySetup, progress: Callable[[int], None]) -> LiveResult:
    """Run the workload for real; `progress` is called with the number of jobs that have ended.

    Raises PoiseError if a job does not succeed, or the workload hangs.
    """
    speeds = [f"{name}={speed!r}" for name, speed in relative_speeds(setup.cluster).items()]
    with tempfile.TemporaryDirectory(prefix="poise-fidelity-") as folder, _service(Path(folder), setup) as client:
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
def _service(folder: Path, setup: FidelitySetup) -> Iterator[Client]:
    """A real `poise serve` on a free port; it is ended with everything that it runs."""
    command = [
        sys.executable, "-c", "from poise.cli import main; main()", "serve", "--json", "--quiet",
        "--state", str(folder / "state"), "--listen", "127.0.0.1:0", "--cluster", str(setup.cluster),
        "--policy", setup.policy, "--placement", setup.placement,
        "--round", f"{setup.round!r}s", "--minimum-run", "0",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            first = process.stdout.readline() if process.stdout else ""
            if not first:
                raise PoiseError("the service did not start")
            said = json.loads(first)
            with Client(said["url"], Path(said["token_file"]).read_text(encoding="ascii").strip()) as client:
                yield client
        finally:
            process.terminate()
