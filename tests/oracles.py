"""Slow and obvious ways to what the project does fast, to compare with.

`oracle` is a simulator of the Tiresias authors' semantics (docs/algorithms/tiresias.md), to compare with job by job.
`least_completion` is the optimum of Hare's problem (docs/algorithms/hare.md), by trying everything.

One list of jobs, or one list a queue; GPUs are counted; times are fractions. At one instant: completions, arrivals, changes
of queue, then a pass through the lists from the front, in which a job runs if its gang still fits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf
from typing import NamedTuple

from poise.scheduler.policies.hare.list_schedule import GpuPool, RoundWork

Limits = tuple[Fraction, ...]


@dataclass(eq=False)
class Task:
    """A job of the authors' simulator. `executed` and `pending` are what promotion looks at and sets back to 0."""

    name: str
    submit: Fraction
    gpus: int
    left: Fraction
    running: bool = False
    attained: Fraction = Fraction(0)
    executed: Fraction = Fraction(0)
    pending: Fraction = Fraction(0)
    queue: int = 0


class Outcome(NamedTuple):
    """When each job ended, and how often a running job had to stop."""

    finishes: dict[str, Fraction]
    preemptions: int


Key = Callable[[Task], Fraction]

SORTED: dict[str, Key] = {
    "smallest-first": lambda task: Fraction(task.gpus),
    "srtf": lambda task: task.left,
    "srsf": lambda task: task.left * task.gpus,
    "las": lambda task: task.attained,
    "lrtf": lambda task: -task.left,
}
"""Policies that sort the whole list anew at each event, stably, and preempt."""


class Authors:
    """The loop over events. A subclass says in which order jobs are looked at."""

    def __init__(self, tasks: Iterable[Task], gpus: int) -> None:
        self.coming = sorted(tasks, key=lambda task: task.submit)
        self.gpus = gpus
        self.now = Fraction(0)
        self.active: list[Task] = []
        self.finishes: dict[str, Fraction] = {}
        self.preemptions = 0

    def run(self) -> Outcome:
        while self.coming or self.active:
            then = min(self.events())
            for task in self.active:
                self.live(task, then - self.now)
            self.now = then
            ended = [task for task in self.active if task.running and task.left == 0]
            for task in ended:
                self.finishes[task.name] = then
                self.active.remove(task)
                self.remove(task)
            while self.coming and self.coming[0].submit == then:
                task = self.coming.pop(0)
                self.active.append(task)
                self.add(task)
            self.requeue()
            self.choose()
        return Outcome(self.finishes, self.preemptions)

    def events(self) -> list[Fraction]:
        """Moments at which something may happen."""
        arrivals = [self.coming[0].submit] if self.coming else []
        return arrivals + [self.now + task.left for task in self.active if task.running]

    def live(self, task: Task, seconds: Fraction) -> None:
        if task.running:
            task.left -= seconds
            task.attained += seconds
            task.executed += seconds
        else:
            task.pending += seconds

    def greedy(self, tasks: Iterable[Task]) -> None:
        """Each job in turn runs if it fits in what is left, and stops if it does not."""
        free = self.gpus
        for task in tasks:
            fits = task.gpus <= free
            free -= task.gpus if fits else 0
            self.preemptions += task.running and not fits
            if task.running and not fits:
                self.stop(task)
            task.running = fits

    def stop(self, task: Task) -> None:
        """A job has to stop; it begins to wait."""
        task.pending = Fraction(0)

    def add(self, task: Task) -> None:
        """A job arrives."""

    def remove(self, task: Task) -> None:
        """A job has ended."""

    def requeue(self) -> None:
        """Jobs change queues."""

    def choose(self) -> None:
        """Who runs from now on."""
        raise NotImplementedError


class Fifo(Authors):
    """Arrival order without preemption; the head of the line blocks, or is passed by those that fit."""

    def __init__(self, tasks: Iterable[Task], gpus: int, *, blocks: bool) -> None:
        super().__init__(tasks, gpus)
        self.blocks = blocks

    def choose(self) -> None:
        free = self.gpus - sum(task.gpus for task in self.active if task.running)
        for task in self.active:
            if not task.running:
                if task.gpus <= free:
                    task.running = True
                    free -= task.gpus
                elif self.blocks:
                    return


class Sorted(Authors):
    """The list kept from the previous event, new jobs at its end, sorted stably."""

    def __init__(self, tasks: Iterable[Task], gpus: int, key: Key) -> None:
        super().__init__(tasks, gpus)
        self.key = key

    def choose(self) -> None:
        self.active.sort(key=self.key)
        self.greedy(self.active)


class Queues(Authors):
    """Queues by attained service; `weigh` says how much service a second is."""

    def __init__(
        self, tasks: Iterable[Task], gpus: int, limits: Limits, promote: Fraction, weigh: Callable[[Task], int]
    ) -> None:
        super().__init__(tasks, gpus)
        self.limits = limits
        self.promote = promote
        self.weigh = weigh
        self.queues: list[list[Task]] = [[] for _ in range(len(limits) + 1)]

    def events(self) -> list[Fraction]:
        demotions = [
            self.now + (self.limits[task.queue] - task.executed * self.weigh(task)) / self.weigh(task)
            for task in self.active
            if task.running and task.queue < len(self.limits)
        ]
        promotions = [
            self.now + self.promote * task.executed - task.pending for task in self.active if self.is_promotable(task)
        ]
        return super().events() + demotions + promotions

    def is_promotable(self, task: Task) -> bool:
        return self.promote > 0 and not task.running and task.queue > 0 and task.executed > 0

    def add(self, task: Task) -> None:
        self.queues[0].append(task)

    def remove(self, task: Task) -> None:
        self.queues[task.queue].remove(task)

    def requeue(self) -> None:
        """In order of submission: demotion at the limit or beyond it, to the tail; promotion after long waiting."""
        for task in self.active:
            if task.running and task.queue < len(self.limits):
                if task.executed * self.weigh(task) >= self.limits[task.queue]:
                    self.move(task, task.queue + 1)
            elif self.is_promotable(task) and task.pending >= self.due(task):
                task.executed = task.pending = Fraction(0)
                self.move(task, 0)

    def due(self, task: Task) -> Fraction:
        """Seconds of waiting after which a job is promoted."""
        return self.promote * task.executed

    def move(self, task: Task, queue: int) -> None:
        self.queues[task.queue].remove(task)
        task.queue = queue
        self.queues[queue].append(task)

    def choose(self) -> None:
        self.greedy([task for queue in self.queues for task in queue])
        for queue in self.queues:
            queue.sort(key=lambda task: not task.running)


class WholeSeconds(Queues):
    """The same by whole seconds. Waiting counts once a job has run, and adds up until it is promoted."""

    def events(self) -> list[Fraction]:
        demotions = [
            self.now + ceil(self.limits[task.queue] / self.weigh(task) - task.executed)
            for task in self.active
            if task.running and task.queue < len(self.limits)
        ]
        promotions = [
            self.now + floor(self.promote * task.executed) - task.pending for task in self.active if self.is_promotable(task)
        ]
        return Authors.events(self) + demotions + [moment for moment in promotions if moment > self.now]

    def live(self, task: Task, seconds: Fraction) -> None:
        waited = task.pending
        super().live(task, seconds)
        if not task.executed:
            task.pending = waited

    def due(self, task: Task) -> Fraction:
        return Fraction(floor(self.promote * task.executed))

    def stop(self, task: Task) -> None:
        """What it has waited before still counts."""


def oracle(policy: str, tasks: list[Task], gpus: int, queues: type[Queues] = Queues) -> Outcome:
    """What the authors' simulator does with a policy of ours by this name."""
    name, _, arguments = policy.partition(":")
    given = dict(argument.split("=") for argument in arguments.split(",") if argument)
    if name.startswith("fifo"):
        return Fifo(tasks, gpus, blocks=name == "fifo").run()
    if name in SORTED:
        return Sorted(tasks, gpus, SORTED[name]).run()
    limits = tuple(map(Fraction, given.get("limits", "3250/7200").split("/")))
    by_seconds = given.get("service") == "seconds"
    return queues(
        tasks, gpus, limits, Fraction(given.get("promote", "0")), lambda task: 1 if by_seconds else task.gpus
    ).run()


class Progress(NamedTuple):
    """A job on the way: rounds done, tasks placed of the next, when that may start, and its last end and sync so far."""

    rounds: int
    placed: int
    ready: float
    end: float
    sync: float

    def after(self, job: RoundWork, kind: int, end: float) -> "Progress":
        """With one more task."""
        placed, last, sync = self.placed + 1, max(self.end, end), max(self.sync, job.sync[kind])
        if placed < job.tasks:
            return Progress(self.rounds, placed, self.ready, last, sync)
        return Progress(self.rounds + 1, 0, last + sync, 0.0, 0.0)

    def soonest(self, job: RoundWork) -> float:
        """No completion is sooner."""
        shortest = min(each for each in job.seconds if each > 0)
        return max(self.ready + (job.rounds - self.rounds) * shortest, self.end + self.sync)


def least_completion(jobs: Sequence[RoundWork], gpus: GpuPool) -> float:
    """The least Σ w C: all tasks in all orders of their starts, on all GPUs, each as early as it may then start.

    A schedule is its order on each GPU, and to start later is never better; so nothing else needs to be tried.
    """
    best = inf

    def search(progress: tuple[Progress, ...], free: tuple[float, ...], since: float) -> None:
        nonlocal best
        if sum(job.weight * each.soonest(job) for job, each in zip(jobs, progress, strict=True)) >= best:
            return
        open_jobs = [index for index, job in enumerate(jobs) if progress[index].rounds < job.rounds]
        if not open_jobs:
            best = sum(job.weight * each.ready for job, each in zip(jobs, progress, strict=True))
        moves = {
            (max(free[gpu], progress[index].ready) + jobs[index].seconds[kind], index, kind, free[gpu]): gpu
            for index in open_jobs
            for gpu, kind in enumerate(gpus.kinds)
            if jobs[index].seconds[kind] > 0 and max(free[gpu], progress[index].ready) >= since
        }
        for (end, index, kind, _), gpu in sorted(moves.items()):
            start = max(free[gpu], progress[index].ready)
            moved = progress[index].after(jobs[index], kind, end)
            search((*progress[:index], moved, *progress[index + 1 :]), (*free[:gpu], end, *free[gpu + 1 :]), start)

    search(tuple(Progress(0, 0, job.release, 0.0, 0.0) for job in jobs), gpus.free, 0.0)
    return best
