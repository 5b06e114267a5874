"""The live half: a service of its own, real processes, and what its journal says of them afterwards."""

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

# The workload: a few dozen small jobs, drawn from a seed.

STEP = 0.1
"""Seconds of a step on the reference type."""


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


def drawn(jobs: int, seed: int, cluster: Cluster, load: float) -> list[FidelityJob]:
    """Jobs that arrive so fast that together they ask for `load` times what the cluster has.

    Durations are log-normal with a median of 6 s, between 1.5 s and 30 s; a quarter of the jobs want two GPUs.
    """
    stream = np.random.default_rng(seed)
    durations = np.clip(stream.lognormal(np.log(6.0), 0.7, jobs), 1.5, 30.0)
    gpus = np.where(stream.random(jobs) < 0.25, 2, 1)
    speed = relative_speeds(cluster)
    capacity = sum(cluster.gpus_of(name) * speed[name] for name in cluster.gpu_types)
    span = float((durations * gpus).sum()) / capacity / load
    arrivals = np.sort(stream.random(jobs)) * span
    drawn_jobs = zip(arrivals - arrivals[0], gpus, durations, strict=True)
    return [
        FidelityJob(f"job-{place}", float(at), int(gang), max(1, round(float(seconds) / STEP)))
        for place, (at, gang, seconds) in enumerate(drawn_jobs)
    ]


def relative_speeds(cluster: Cluster) -> dict[str, float]:
    """Speed of each GPU type for a job that nobody has measured, as it is believed; the trainer keeps to it."""
    _, estimate, _ = Speeds(shipped(), cluster).resolve(Job("any", 0.0, 1, duration=1.0))
    return {name: rates[0] for name, rates in zip(cluster.gpu_types, estimate.rates, strict=True)}


LOOK = 0.2
"""Seconds between two looks whether all have ended."""
GONE = 30.0
"""Seconds for which jobs that were withdrawn are waited for."""
SLOWEST = 600.0
"""Seconds after which a workload that has not ended is taken to hang."""


@dataclass(frozen=True, slots=True)
class LiveConditions:
    """How both halves are set up. Seconds."""

    cluster: Cluster
    policy: str
    round: float
    placement: str = "consolidate"


@dataclass(frozen=True, slots=True)
class Lived:
    """What became of the workload: moments since 1970, and each job with its runs. `origin`: rounds are counted from it."""

    origin: float
    jobs: tuple[JobDetail, ...]

    def overhead(self, works: Sequence[FidelityJob], cluster: Cluster) -> float:
        """Seconds a start that GPUs were held without progress, on average.

        Of each job: the time for which it held GPUs, less what its steps take on the types that it had.
        """
        lost, starts = 0.0, 0
        speeds = relative_speeds(cluster)
        for work, job in zip(works, self.jobs, strict=True):
            lost += job.job.ran - _worked(work, job, speeds)
            starts += len(job.runs)
        return max(0.0, lost / starts)


def _worked(work: FidelityJob, job: JobDetail, speeds: dict[str, float]) -> float:
    """Seconds that the steps took, run by run."""
    total, before = 0.0, 0.0
    for run in job.runs:
        kept = work.steps if run.how == "finished" else run.kept or 0.0
        gpu_type = next(iter(run.gpus)).rpartition("-")[0]
        total += (kept - before) * STEP / speeds[gpu_type]
        before = kept
    return total


def live(works: Sequence[FidelityJob], conditions: LiveConditions, progress: Callable[[int], None]) -> Lived:
    """Run the workload for real. `progress` is told how many jobs have ended."""
    with tempfile.TemporaryDirectory(prefix="poise-fidelity-") as folder, _service(Path(folder), conditions) as client:
        origin = client.service().started
        begun = monotonic()
        ids: list[str] = []
        try:
            ids.extend(_submitted(client, work, begun, conditions.cluster) for work in works)
            _wait(client, len(works), begun, progress)
        except BaseException:
            _withdraw(client, ids)
            raise
        return Lived(origin, tuple(client.show(job) for job in ids))


def _wait(client: Client, jobs: int, begun: float, progress: Callable[[int], None]) -> None:
    """Until all have succeeded; raises PoiseError if one does not."""
    final = [state for state in JobState if state.is_final]
    while monotonic() - begun < SLOWEST:
        ended = client.queue(states=final, limit=1000).jobs
        progress(len(ended))
        for job in ended:
            if job.state is not JobState.SUCCEEDED:
                raise PoiseError(f"{job.name} ended as {job.state}: {job.reason.text}")
        if len(ended) == jobs:
            return
        sleep(LOOK)
    raise PoiseError(f"the workload has not ended after {SLOWEST:g} s")


def _withdraw(client: Client, ids: Sequence[str]) -> None:
    """Leave no process behind."""
    for job in ids:
        with suppress(PoiseError):
            client.cancel(job)
    begun = monotonic()
    while client.queue().jobs and monotonic() - begun < GONE:
        sleep(LOOK)


def _submitted(client: Client, work: FidelityJob, begun: float, cluster: Cluster) -> str:
    sleep(max(0.0, begun + work.arrives - monotonic()))
    speeds = (f"{name}={speed!r}" for name, speed in relative_speeds(cluster).items())
    command = (sys.executable, trainer.__file__ or "", str(work.steps), str(STEP), *speeds)
    return client.submit(JobRequest(name=work.name, command=command, gpus=work.gpus, duration=work.duration)).id


@contextmanager
def _service(folder: Path, conditions: LiveConditions) -> Iterator[Client]:
    """A real `poise serve` on a port of its own; ended with everything that it runs."""
    command = [
        sys.executable, "-c", "from poise.cli import main; main()", "serve", "--json", "--quiet",
        "--state", str(folder / "state"), "--listen", "127.0.0.1:0", "--cluster", str(conditions.cluster),
        "--policy", conditions.policy, "--placement", conditions.placement,
        "--round", f"{conditions.round!r}s", "--minimum-run", "0",
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
