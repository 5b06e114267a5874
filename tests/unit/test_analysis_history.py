"""What became of every job, read off events and actions."""

from math import isnan

import pytest
from tests.builders import a_cluster, a_job, simulate

from poise.lab.analysis.history import History, RunEnd, cumulated
from poise.lab.analysis.tenant_usage import HOUR, TenantUsage
from poise.scheduler.model.action import (
    Abandon,
    Action,
    Cancel,
    Compute,
    Entitled,
    JournalEntry,
    Launch,
    Preempt,
    PreemptionCause,
    Reject,
    Waited,
)
from poise.scheduler.model.cluster import Slots
from poise.scheduler.model.event import (
    Cancelled,
    Carried,
    Computed,
    Estimated,
    Event,
    Failed,
    Finished,
    NodeLost,
    NodeReturned,
    Stopped,
    Submitted,
    Synchronised,
    Woke,
)
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.speed import Estimate

CLUSTER = a_cluster("gpu:4")
NO_WAIT = Waited(0, 0, 0)
ESTIMATED = Estimated("k", Estimate(((2.0, 1.0, 0.5),)))


def submitted(job: str, at: float = 0, gpus: int = 1) -> Submitted:
    return Submitted(Job(job, at, gpus, 10.0, tenant=f"of {job}"), "k", 20.0)


def launch(job: str, epoch: int, mask: int = 1, waited: Waited = NO_WAIT) -> Launch:
    return Launch(job, epoch, (Slots(0, mask),), waited)


def history(*entries: tuple[float, list[Event], list[Action]]) -> History:
    return History.of((JournalEntry(now, tuple(events), tuple(actions)) for now, events, actions in entries), CLUSTER)


def levels(changes: list[tuple[float, int]]) -> dict[float, int]:
    moments, values = cumulated(changes)
    return dict(zip(moments.tolist(), values.tolist(), strict=True))


def test_a_job_that_runs_through_is_read_off() -> None:
    found = history(
        (0, [ESTIMATED, submitted("a", gpus=2)], []),
        (5, [Woke()], [launch("a", 1, 0b11, Waited(1, 0, 4))]),
        (15, [Finished("a", 1)], []),
    )
    job = found.jobs["a"]
    assert (job.submitted, job.started, job.ended, job.status) == (0, 5, 15, Status.FINISHED)
    assert (job.gpu_seconds, job.waited, job.tenant, job.steps) == (20, (1, 0, 4), "of a", 20)
    assert (job.preemptions, job.migrations, job.restarts) == (0, 0, 0)
    assert found.rates == {"k": (2.0,)}
    assert levels(found.held) == {5: 2, 15: 0}
    assert levels(found.waiting) == {0: 1, 5: 0}
    assert found.end == 15


def test_a_preempted_job_waits_and_its_waits_add_up() -> None:
    found = history(
        (0, [submitted("a")], [launch("a", 1)]),
        (10, [], [Preempt("a", 1, PreemptionCause.OUTRANKED, "b")]),
        (10, [Stopped("a", 1, 5.0)], []),
        (30, [], [launch("a", 2, waited=Waited(5, 0, 15))]),
        (40, [Finished("a", 2)], []),
    )
    job = found.jobs["a"]
    assert (job.preemptions, job.migrations, job.restarts, job.gpu_seconds) == (1, 0, 0, 20)
    assert job.waited == (5, 0, 15)
    assert job.started == 0
    assert levels(found.held) == {0: 1, 10: 0, 30: 1, 40: 0}
    assert levels(found.waiting) == {0: 0, 10: 1, 30: 0}


def test_a_job_moved_at_once_goes_on_whatever_event_comes_of_its_former_run() -> None:
    found = history(
        (0, [submitted("a")], [launch("a", 1, 0b01)]),
        (10, [], [Preempt("a", 1, PreemptionCause.MOVED, None), launch("a", 2, 0b10)]),
        (10, [Stopped("a", 1, 5.0)], []),
        (20, [Finished("a", 2)], []),
    )
    job = found.jobs["a"]
    assert (job.preemptions, job.migrations, job.restarts) == (1, 1, 0)
    assert (job.gpu_seconds, job.status) == (20, Status.FINISHED)
    assert levels(found.held) == {0: 1, 10: 1, 20: 0}


def test_moving_jobs_in_a_simulation_lose_no_gpu_seconds() -> None:
    """las on uneven work moves jobs; all the work there is must be held, and nothing restarts by itself."""
    jobs = [a_job(f"j{n}", at=n, gpus=1 + n % 3, seconds=10 + 7 * n) for n in range(12)]
    story = simulate(jobs, "las", "gpu:4")
    found = History.of(story.entries, story.cluster)
    assert sum(job.gpu_seconds for job in found.jobs.values()) == pytest.approx(
        sum(each.job.gpus * (each.job.duration or 0) for each in jobs)
    )
    assert sum(job.restarts for job in found.jobs.values()) == 0
    assert sum(job.preemptions for job in found.jobs.values()) == story.preemptions > 0


def test_failures_and_lost_nodes_are_restarts() -> None:
    found = history(
        (0, [submitted("a"), submitted("b")], [launch("a", 1, 1), launch("b", 1, 2)]),
        (5, [Failed("a", 1, "x", 0.0)], [launch("a", 2, 1)]),
        (10, [NodeLost(0), Stopped("a", 2, 0.0), Stopped("b", 1, 0.0)], []),
        (20, [NodeReturned(0)], [launch("a", 3, 1), launch("b", 2, 4)]),
        (30, [Finished("a", 3), Finished("b", 2)], []),
    )
    assert [(job.restarts, job.migrations, job.preemptions) for job in found.jobs.values()] == [(2, 0, 0), (1, 1, 0)]
    assert [job.gpu_seconds for job in found.jobs.values()] == [20, 20]
    assert levels(found.live) == {10: -4, 20: 0}
    assert levels(found.held) == {0: 2, 5: 2, 10: 0, 20: 2, 30: 0}


def test_every_way_to_end_is_counted_once() -> None:
    found = history(
        (0, [submitted("fails"), submitted("killed"), submitted("huge", gpus=9)], [Reject("huge", "needs 9 GPUs")]),
        (0, [Woke()], [launch("fails", 1, 1), launch("killed", 1, 2)]),
        (4, [Failed("fails", 1, "x", 0.0, final=True), Cancelled("killed")], [Abandon("fails", "run 1 failed: x")]),
        (9, [submitted("late", at=9), submitted("withdrawn", at=9)], []),
        (10, [Cancelled("withdrawn")], []),
    )
    assert {name: job.status.name for name, job in found.jobs.items()} == {
        "fails": "FAILED",
        "killed": "CANCELLED",
        "huge": "REJECTED",
        "late": "WAITING",
        "withdrawn": "CANCELLED",
    }
    assert [job.id for job in found.ended_jobs()] == ["fails", "killed", "withdrawn"]
    assert found.count(Status.CANCELLED) == 2
    assert found.rejections == [("huge", "needs 9 GPUs")]
    assert levels(found.waiting) == {0: 0, 4: 0, 9: 2, 10: 1}
    assert isnan(found.jobs["late"].ended)
    assert isnan(found.jobs["huge"].started)


def compute(job: str, epoch: int, mask: int, waited: Waited = NO_WAIT) -> Compute:
    return Compute(job, epoch, (Slots(0, mask),), waited)


def computed(job: str, epoch: int, mask: int) -> Computed:
    return Computed(job, epoch, (Slots(0, mask),))


ROUNDS: list[tuple[float, list[Event], list[Action]]] = [
    (0, [submitted("a"), submitted("b")], [Entitled("of a", (1.0,))]),
    (2, [Woke()], [compute("a", 1, 0b011, Waited(2, 0, 0))]),
    (4, [computed("a", 1, 0b001)], [compute("a", 1, 0b100, Waited(0, 1, 0))]),
    (5, [computed("a", 1, 0b110)], []),
    (6, [Synchronised("a", 1, 1.0)], []),
    (9, [], [compute("a", 2, 0b001, Waited(0, 0, 3))]),
]
"""A round of two tasks from 2 and one from 4, synchronised from 5 to 6; the next one begins at 9."""


def test_a_round_holds_gpus_task_by_task_and_ends_without_a_preemption() -> None:
    found = history(*ROUNDS, (10, [computed("a", 2, 0b001), Finished("a", 2)], []))
    job = found.jobs["a"]
    assert (job.started, job.ended, job.gpu_seconds, job.waited) == (2, 10, 2 + 3 + 1 + 1, (2, 1, 3))
    assert (job.preemptions, job.migrations, job.restarts) == (0, 0, 0)
    assert levels(found.held) == {2: 2, 4: 2, 5: 0, 9: 1, 10: 0}
    assert levels(found.waiting) == {0: 2, 2: 1, 6: 2, 9: 1}


@pytest.mark.parametrize(
    ("event", "action", "status", "restarts"),
    [
        (Failed("a", 2, "x", 1.0), None, Status.WAITING, 1),
        (Stopped("a", 2, 1.0), None, Status.WAITING, 1),
        (Failed("a", 2, "x", 1.0, final=True), Abandon("a", "x"), Status.FAILED, 1),
        (Cancelled("a"), None, Status.CANCELLED, 0),
        (Finished("a", 2), None, Status.FINISHED, 0),
        (None, Cancel("a", "enough"), Status.CANCELLED, 0),
        (None, Preempt("a", 2, PreemptionCause.OUTRANKED, "b"), Status.WAITING, 0),
    ],
)
def test_a_round_that_is_cut_short_gives_back_what_it_holds(
    event: Event | None, action: Action | None, status: Status, restarts: int
) -> None:
    late: Event = computed("a", 2, 0b001)
    found = history(*ROUNDS, (11, [event] if event else [], [action] if action else []), (12, [late], []))
    job = found.jobs["a"]
    assert (job.gpu_seconds, job.status, job.restarts, job.tasks) == (6 + 2, status, restarts, {})
    assert levels(found.held) == {2: 2, 4: 2, 5: 0, 9: 1, 11: 0}
    assert cumulated(found.waiting)[1][-1] == 1 + (status is Status.WAITING)


def test_a_round_that_fails_says_of_what_with_every_task_that_it_was_computing() -> None:
    more: Action = compute("a", 2, 0b010)
    found = history(*ROUNDS, (10, [], [more]), (11, [Failed("a", 2, "out of memory", 1.0)], []))
    assert [(run.ended, run.cause) for run in found.runs[-3:]] == [
        (RunEnd.COMPUTED, ""),
        (RunEnd.FAILED, "out of memory"),
        (RunEnd.FAILED, "out of memory"),
    ]


def test_a_journal_that_ends_in_the_middle_of_a_round_counts_what_was_held_until_then() -> None:
    assert history(*ROUNDS, (13, [Woke()], [])).jobs["a"].gpu_seconds == 6 + 4


def test_a_job_whose_rounds_divide_migrates_whatever_few_gpus_it_has() -> None:
    """Unlike a gang it is not on trial where it has fewer GPUs than it asks for."""
    job = Submitted(Job("a", 0, 4, 10.0, micro_batches=8), "k", 20.0)
    found = history(
        (0, [job], [launch("a", 1, 0b1)]), (5, [], [Preempt("a", 1, PreemptionCause.MOVED, None), launch("a", 2, 0b10)])
    )
    assert found.jobs["a"].migrations == 1


def test_tenant_usage_counts_gpus_of_tasks_and_knows_a_tenant_whose_job_is_being_synchronised() -> None:
    """`of a` has jobs and a job waits from 0 to 10: it is entitled to 10 GPU-seconds, and gets 7."""
    entries = [JournalEntry(now, tuple(events), tuple(actions)) for now, events, actions in ROUNDS]
    entries += [JournalEntry(10, (computed("a", 2, 0b001), Finished("a", 2)), ()), JournalEntry(12, (Woke(),), ())]
    tenant = TenantUsage.of(entries, CLUSTER).tenants["of a"]
    assert tenant.contended == 10
    assert tenant.entitled[0] * HOUR == pytest.approx(10)
    assert tenant.held[0] * HOUR == tenant.received[0] * HOUR == pytest.approx(7)


def test_nothing_is_a_history() -> None:
    found = History.of([], CLUSTER)
    assert (found.jobs, found.ended_jobs(), found.count(Status.FINISHED)) == ({}, [], 0)


def test_changes_at_one_time_count_as_one_and_order_does_not_matter() -> None:
    assert levels([(5, 1), (0, 2), (5, -3), (9, 0)]) == {0: 2, 5: 0, 9: 0}
    assert levels([]) == {}


def carried(job: str, at: float, *, gpus: bool) -> Carried:
    holding = (Slots(0, 1),) if gpus else ()
    return Carried(Job(job, 0, 1), "kind", 10.0, 1, 0.0, 0.0, 0, at, holding, held=False)


def test_the_first_of_two_ends_at_one_time_counts() -> None:
    found = history(
        (0, [submitted("a"), submitted("b")], [launch("a", 1), launch("b", 1, 2)]),
        (5, [Finished("a", 1), Cancelled("a"), Cancelled("b"), Finished("b", 1)], []),
    )
    assert (found.jobs["a"].status, found.jobs["b"].status) == (Status.FINISHED, Status.CANCELLED)
    assert [found.jobs[job].gpu_seconds for job in "ab"] == [5, 5]
    assert set(levels(found.waiting).values()) == {0}


@pytest.mark.parametrize(
    ("stays", "gpu_seconds", "held"), [(True, 10.0, {0: 1, 10: 0}), (False, 6.0, {0: 1, 4: 0, 8: 1, 10: 0})]
)
def test_a_job_that_a_new_chapter_finds_without_gpus_has_lost_them(
    stays: bool, gpu_seconds: float, held: dict[float, int]
) -> None:
    entries: list[tuple[float, list[Event], list[Action]]] = [
        (0, [submitted("a")], [launch("a", 1)]),
        (4, [carried("a", 0 if stays else 4, gpus=stays)], []),
        (8, [], [] if stays else [launch("a", 2)]),
        (10, [Finished("a", 1 if stays else 2)], []),
    ]
    found = history(*entries)
    assert found.jobs["a"].gpu_seconds == gpu_seconds
    assert levels(found.held) == held
    usage = TenantUsage.of((JournalEntry(now, tuple(events), tuple(actions)) for now, events, actions in entries), CLUSTER)
    assert usage.tenants["of a"].held == [pytest.approx(gpu_seconds / HOUR)]
