"""A slow and obvious simulator of the Tiresias authors' semantics (ALGORITHMS §7.2, §7.3), to compare with job by job.

One list of jobs, or one list a queue; GPUs are counted; times are fractions. At one instant: completions, arrivals, changes
of queue, then a pass through the lists from the front, in which a job runs if its gang still fits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

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
                task.pending = Fraction(0)
            task.running = fits

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
            elif self.is_promotable(task) and task.pending >= self.promote * task.executed:
                task.executed = task.pending = Fraction(0)
                self.move(task, 0)

    def move(self, task: Task, queue: int) -> None:
        self.queues[task.queue].remove(task)
        task.queue = queue
        self.queues[queue].append(task)

    def choose(self) -> None:
        self.greedy([task for queue in self.queues for task in queue])
        for queue in self.queues:
            queue.sort(key=lambda task: not task.running)


def oracle(policy: str, tasks: list[Task], gpus: int) -> Outcome:
    """What the authors' simulator does with a policy of ours by this name."""
    name, _, arguments = policy.partition(":")
    given = dict(argument.split("=") for argument in arguments.split(",") if argument)
    if name.startswith("fifo"):
        return Fifo(tasks, gpus, blocks=name == "fifo").run()
    if name in SORTED:
        return Sorted(tasks, gpus, SORTED[name]).run()
    limits = tuple(map(Fraction, given.get("limits", "3250/7200").split("/")))
    by_seconds = given.get("service") == "seconds"
    return Queues(
        tasks, gpus, limits, Fraction(given.get("promote", "0")), lambda task: 1 if by_seconds else task.gpus
    ).run()
