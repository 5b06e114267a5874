"""Worlds of jobs whose rounds divide into tasks, driven by hand: this action at that moment, without any scheduler."""

from collections.abc import Callable, Iterable, Mapping
from math import inf

from poise.lab.simulator.outages import Outage
from poise.lab.simulator.tasks import Switching, unknown_size
from poise.lab.simulator.world import Simulator, Truth
from poise.lab.traces.schema import FailedAttempt, JobOutcome, LossCurve, TraceJob
from poise.scheduler.model.action import Action, Compute, JournalEntry, Launch, Waited, WakeAt
from poise.scheduler.model.cluster import Cluster, Node, Slots
from poise.scheduler.model.event import (
    Cancelled,
    Computed,
    Event,
    Failed,
    Finished,
    Progressed,
    Stopped,
    Synchronised,
)
from poise.scheduler.model.job import Job
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Estimate
from poise.scheduler.throughput.speeds import Speeds

NO_WAIT = Waited(0, 0, 0)
FREE = Truth(switching=Switching(resident=0.0, size=0.0))
"""A world in which turning to another job costs nothing."""
V100, K80 = (0, 1), (1, 1)
"""The two GPUs of the worked example."""
PAIR = Cluster((Node("v", "v100", 1), Node("k", "k80", 1)))
FOUR = Cluster((Node("v", "v100", 2), Node("k", "k80", 2)))

Script = dict[float, list[Action]]


def divided(count: int, *seconds: float, sync: float = 0.0) -> Tasks:
    """So many tasks of so many seconds by type."""
    return Tasks(count, seconds, ((sync, sync, sync),) * len(seconds))


class Stated(Speeds):
    """Speeds that are just stated, a job."""

    def __init__(self, tasks: Mapping[str, Tasks | None]) -> None:
        self._stated_tasks = tasks

    def resolve(self, job: Job) -> tuple[str, Estimate, float]:
        return job.id, Estimate(((1.0, 1.0, 1.0), (0.25, 0.25, 0.25)), tasks=self._stated_tasks[job.id]), job.steps or 0.0


def a_job(
    name: str, steps: float, *, at: float = 0.0, dies: tuple[float, ...] = (), outcome: JobOutcome = JobOutcome.PASSED,
    loss: LossCurve | None = None,
) -> TraceJob:  # fmt: skip
    """A job of so many rounds."""
    failures = tuple(FailedAttempt(after, "out of memory") for after in dies)
    return TraceJob(Job(name, at, 1, steps=steps, micro_batches=1), outcome, failures, loss)


def compute(job: str, epoch: int, *gpus: tuple[int, int]) -> Compute:
    return Compute(job, epoch, tuple(Slots(*each) for each in gpus), NO_WAIT)


def launch(job: str, epoch: int, *gpus: tuple[int, int]) -> Launch:
    return Launch(job, epoch, tuple(Slots(*each) for each in gpus), NO_WAIT)


def driven(
    jobs: Iterable[TraceJob],
    tasks: Mapping[str, Tasks | None],
    script: Script,
    cluster: Cluster = PAIR,
    *,
    truth: Truth = FREE,
    outages: Iterable[Outage] = (),
    sizes: Callable[[Job], float | None] = unknown_size,
) -> list[JournalEntry]:
    """What happens if these actions come at these moments, the first instant of each."""
    speeds = Stated(tasks)
    world = Simulator([*jobs], cluster, beliefs=speeds, truths=speeds, truth=truth, outages=outages, sizes=sizes)
    left, entries = dict(script), []
    for now, events in world.batches():
        actions = [*left.pop(now, []), WakeAt(min(left, default=inf))]
        world.apply(now, actions)
        entries.append(JournalEntry(now, events, tuple(actions)))
        assert len(entries) < 1000
    assert not left, f"nothing happened at {sorted(left)}"
    return entries


def told(entries: list[JournalEntry], *kinds: type) -> list[tuple[float, Event]]:
    """Facts of these kinds with their moments; none given: of runs."""
    wanted = kinds or (Computed, Synchronised, Finished, Failed, Stopped, Cancelled, Progressed)
    return [(entry.now, fact) for entry in entries for fact in entry.events if isinstance(fact, wanted)]


def computed(job: str, epoch: int, *gpus: tuple[int, int]) -> Computed:
    return Computed(job, epoch, tuple(Slots(*each) for each in gpus))
