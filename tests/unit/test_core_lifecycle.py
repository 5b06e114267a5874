"""The life cycle of a job: the table of transitions, the drawing of it in ARCHITECTURE.md, and what the core really does."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders import EVENTS, a_job, simulate
from tests.whims import a_plan, scripted

from poise.scheduler.core.lifecycle import TRANSITIONS, JobPhase, Lifecycle
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import RetryRule, Settings
from poise.scheduler.model.action import PreemptionCause
from poise.scheduler.model.cluster import Slots, parse_cluster
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import (
    Cancelled,
    Carried,
    Computed,
    Estimated,
    Event,
    Failed,
    Held,
    Released,
    Submitted,
)
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.plan import Claim, Grain
from poise.scheduler.model.speed import Estimate
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import policy_named

ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"
Edge = tuple[str, JobPhase, JobPhase]


def table() -> set[Edge]:
    return {(name, before, after) for name, (begin, end) in TRANSITIONS.items() for before in begin for after in end}


def test_the_drawing_in_architecture_shows_every_transition_and_no_other() -> None:
    drawing = re.search(r"```mermaid\nstateDiagram-v2\n(.*?)```", ARCHITECTURE.read_text(), re.DOTALL)
    assert drawing is not None
    drawn = set()
    for line in drawing[1].splitlines():
        if edge := re.fullmatch(r"\s*(\[\*\]|[A-Z_]+) --> ([A-Z_]+) ?: (.+)", line):
            before = JobPhase.NEW if edge[1] == "[*]" else JobPhase(edge[1])
            drawn |= {(name.strip(), before, JobPhase(edge[2])) for name in edge[3].split(",")}
    assert drawn == table()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[Edge]:
    """Every transition that the core makes while a test runs, with the phases before and after it."""
    edges: set[Edge] = set()

    def recorded(name: str) -> Any:
        method = getattr(Lifecycle, name)

        def record(self: Lifecycle, subject: Any, *more: Any) -> Any:
            is_new = isinstance(subject, Submitted | Carried)
            before = JobPhase.NEW if is_new else self.phase(subject)
            answer = method(self, subject, *more)
            after = self.phase(self._state.rows[subject.job.id] if is_new else subject)
            edges.add((name, before, after))
            return answer

        return record

    for name in TRANSITIONS:
        monkeypatch.setattr(Lifecycle, name, recorded(name))
    return edges


KNOWN = Estimated("k", Estimate(((1.0, 1.0, 1.0),)))
NEVER = Estimated("never", Estimate(((0.0, 0.0, 0.0),)))


def a_core(policy: str = "srtf", gpus: int = 4, **more: Any) -> Scheduler:
    settings = Settings(retry=RetryRule.CAUSE, **more)
    core = Scheduler(parse_cluster(f"gpu:{gpus}"), policy_named(policy), placement_named("consolidate"), settings)
    core.handle(0.0, [KNOWN, NEVER])
    return core


def a_gang(name: str, kind: str = "k", gpus: int = 2, steps: float = 100.0) -> Submitted:
    return Submitted(Job(name, 0.0, gpus), kind, steps)


def carried(name: str, kind: str = "k", *, slots: int = 0, **more: Any) -> Carried:
    given = {"epoch": 1, "done": 1.0, "received": 5.0, "failures": 1, "since": 0.0, "held": False} | more
    return Carried(Job(name, 0.0, 2), kind, 100.0, gpus=(Slots(0, slots),) if slots else (), **given)


def drive_by_commands() -> None:
    """Hold, release and cancel jobs in every phase, by hand."""
    core = a_core()
    core.handle(0.0, [a_gang("runs"), a_gang("backs-off"), a_gang("waits"), a_gang("stays"), a_gang("x", "never")])
    core.handle(1.0, [Failed("backs-off", 1, "network", 0.0)])
    core.handle(2.0, [Held("backs-off"), Held("runs"), Held("waits")])
    core.handle(3.0, [Released("runs"), Released("waits"), Cancelled("backs-off"), Cancelled("waits"), Cancelled("stays")])
    pool = a_core(validation_gpus=1)
    pool.handle(0.0, [a_gang("first"), a_gang("second")])
    pool.handle(1.0, [Held("first"), Held("second"), a_gang("third")])
    pool.handle(2.0, [Cancelled("third"), Cancelled("second")])
    new = a_core()
    held, later = carried("held", held=True), carried("later", until=9.0)
    new.handle(5.0, [carried("runs", slots=3), carried("waits"), held, later, carried("x", "never", slots=0)])


def test_the_core_makes_every_transition_of_the_table_and_no_other(seen: set[Edge]) -> None:
    drive_by_commands()
    transient = replace(EVENTS, retry=RetryRule.CAUSE, backoff=5.0)
    jobs = [a_job("a", seconds=50, dies=(40.0,)), a_job("b", at=10, seconds=5)]
    simulate(jobs, "srtf", "gpu:1", settings=EVENTS)
    core = a_core()
    core.handle(0.0, [a_gang("a")])
    core.handle(1.0, [Failed("a", 1, "network", 0.0)])
    core.handle(1e6, [])
    simulate(
        [a_job("a", gpus=4, seconds=100, dies=(10.0,))],
        "fifo",
        "gpu:8",
        settings=replace(transient, validation_gpus=1, validation_time=30.0),
    )
    tasks = Estimate(((0.4, 0.4, 0.4),), tasks=Tasks(4, (1.0,), ((0.5, 0.5, 0.5),), 2))
    plan = a_plan(Claim(0, mix=(1,), grain=Grain.TASK))
    divided = Scheduler(parse_cluster("gpu:2"), scripted({0.0: plan, 1.0: plan}), placement_named("consolidate"), EVENTS)
    divided.handle(0.0, [Estimated("k", tasks), Submitted(Job("a", 0.0, 2, micro_batches=4), "k", 10.0)])
    divided.handle(1.0, [Computed("a", 1, (Slots(0, 1),))])
    assert seen <= table()
    missing = table() - seen - {("join", JobPhase.WAITING, JobPhase.RUNNING)}  # two jobs on the same GPUs: below
    assert not missing


def test_two_jobs_on_the_same_gpus_make_the_transition_of_a_join(seen: set[Edge]) -> None:
    core = a_core("gandiva", gpus=2)
    core.handle(0.0, [a_gang("a"), a_gang("b")])
    rows = core.state.rows
    core.lifecycle.join(rows["b"], rows["a"], 1.0)
    assert ("join", JobPhase.WAITING, JobPhase.RUNNING) in seen


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "start": ((Slots(0, 1),), 1.0),
    "join": (0, 1.0),
    "compute": ((Slots(0, 1),), 1.0),
    "computed": ((Slots(0, 1),), 1.0),
    "preempt": (1.0, PreemptionCause.UNPLANNED, None),
    "begin_trial": ((Slots(0, 1),), 1.0),
    "end": (1.0, Status.CANCELLED),
}


def in_phase(phase: JobPhase) -> tuple[Scheduler, int]:
    """A core, and the row of a job in this phase: the second of two gangs waits, the first does whatever is asked of it."""
    core = a_core(validation_gpus=1 if phase is JobPhase.ON_TRIAL else 0)
    core.handle(0.0, [a_gang("a", gpus=3), a_gang("b", gpus=3)])
    follow: dict[JobPhase, Event] = {JobPhase.SUSPENDED: Held("a"), JobPhase.ENDED: Cancelled("a")}
    core.handle(0.5, [follow[phase]] if phase in follow else [])
    row = core.state.rows["b" if phase is JobPhase.WAITING else "a"]
    assert core.lifecycle.phase(row) is phase
    return core, row


REFUSED = [
    (name, phase)
    for name, (begins, _) in TRANSITIONS.items()
    for phase in JobPhase
    if JobPhase.NEW not in begins and phase not in begins and phase is not JobPhase.NEW
]


@pytest.mark.parametrize(("name", "phase"), REFUSED)
def test_a_transition_refuses_a_job_in_a_phase_that_it_does_not_begin_in(name: str, phase: JobPhase) -> None:
    core, row = in_phase(phase)
    with pytest.raises(InvariantError, match=f"is {phase}; {name} is for jobs that are"):
        getattr(core.lifecycle, name)(row, *ARGUMENTS.get(name, (1.0,)))
