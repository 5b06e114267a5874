"""The simulated world of jobs whose rounds divide into tasks: exact times, task by task and on any mix. Numbers by hand."""

from collections.abc import Mapping
from math import inf

import pytest
from tests.driving import FOUR, K80, PAIR, V100, Script, a_job, compute, computed, divided, driven, launch, told

from poise.lab.analysis.history import History, cumulated
from poise.lab.simulator.outages import Outage
from poise.lab.simulator.tasks import Switching
from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import JobOutcome, LossCurve, TraceJob
from poise.scheduler.model.action import Abandon, Action, Cancel, Preempt, PreemptionCause
from poise.scheduler.model.cluster import Cluster, Node
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import (
    Cancelled,
    Computed,
    Event,
    Failed,
    Finished,
    NodeLost,
    Progressed,
    Stopped,
    Synchronised,
    Woke,
)
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.micro_batches import Tasks

EXAMPLE: Script = {
    0: [compute("J1", 1, V100), compute("J2", 1, K80)],
    1: [compute("J1", 1, V100)],
    2: [compute("J2", 1, V100)],
    2.5: [compute("J1", 2, K80)],
    4: [compute("J1", 2, V100)],
}
JOBS = (a_job("J1", 2), a_job("J2", 1))
TASKS: Mapping[str, Tasks | None] = {"J1": divided(2, 1, 3, sync=0.5), "J2": divided(2, 2, 2.5, sync=0.5)}


def test_the_worked_example_ends_at_6_and_at_4_and_a_half() -> None:
    """docs/algorithms/hare.md: list order J1r1 J1r1 J2 J2 J1r2 J1r2 on a V100 and a K80."""
    found = driven(JOBS, TASKS, EXAMPLE)
    assert told(found) == [
        (1, computed("J1", 1, V100)),
        (2, computed("J1", 1, V100)),
        (2.5, computed("J2", 1, K80)),
        (2.5, Synchronised("J1", 1, 1)),
        (4, computed("J2", 1, V100)),
        (4.5, Finished("J2", 1)),
        (5, computed("J1", 2, V100)),
        (5.5, computed("J1", 2, K80)),
        (6, Finished("J1", 2)),
    ]


def test_a_history_of_the_worked_example_counts_every_task() -> None:
    """J1 has the V100 for 3 s and the K80 for 3; J2 the V100 for 2 and the K80 for 2.5. J2 never waits, J1 for no time."""
    found = History.of(driven(JOBS, TASKS, EXAMPLE), PAIR)
    assert {name: job.gpu_seconds for name, job in found.jobs.items()} == {"J1": 6, "J2": 4.5}
    assert {name: (job.started, job.ended) for name, job in found.jobs.items()} == {"J1": (0, 6), "J2": (0, 4.5)}
    assert [(job.preemptions, job.migrations, job.restarts) for job in found.jobs.values()] == [(0, 0, 0)] * 2
    moments, levels = cumulated(found.held)
    assert [*zip(moments.tolist(), levels.tolist(), strict=True)] == [
        (0, 2), (1, 2), (2, 2), (2.5, 2), (4, 2), (5, 1), (5.5, 0),
    ]  # fmt: skip
    assert set(cumulated(found.waiting)[1].tolist()) == {0}


def test_gang_execution_of_the_worked_example_ends_at_7_and_at_10() -> None:
    """On both GPUs, a task each: rounds of 3.5 s, and of 3; the split of a lease would leave the K80 idle for J1."""
    both = (V100, K80)
    script: Script = {0: [compute("J1", 1, *both)], 3.5: [compute("J1", 2, *both)], 7: [compute("J2", 1, *both)]}
    assert told(driven(JOBS, TASKS, script), Finished) == [(7, Finished("J1", 2)), (10, Finished("J2", 1))]


def test_at_lease_grain_a_job_is_as_fast_as_the_best_split_over_its_mix() -> None:
    """Four tasks of 1 s or 2 s and 0.5 s of synchronisation: 3 s to compute on V100 + K80 (3 + 1), a round takes 3.5 s."""
    tasks: Mapping[str, Tasks | None] = {"a": divided(4, 1, 2, sync=0.5)}
    assert told(driven([a_job("a", 10)], tasks, {0: [launch("a", 1, V100, K80)]})) == [(35, Finished("a", 1))]
    assert told(driven([a_job("a", 10)], tasks, {0: [launch("a", 1, K80)]})) == [(85, Finished("a", 1))]


def test_at_lease_grain_a_mix_that_is_of_no_use_makes_no_progress() -> None:
    script: Script = {0: [launch("a", 1, K80)], 9: [Preempt("a", 1, PreemptionCause.MOVED, None), launch("a", 2, V100)]}
    assert told(driven([a_job("a", 2)], {"a": divided(2, 1, 0)}, script)) == [
        (9, Stopped("a", 1, 0)),
        (13, Finished("a", 2)),
    ]


def test_tasks_of_a_job_that_end_together_are_one_event() -> None:
    """Two V100 from 0 and two from 1 on, of 3 and of 2 seconds."""
    cluster = Cluster((Node("k", "k80", 2), Node("v", "v100", 3)))
    script: Script = {
        0: [compute("a", 1, (0, 0b10), (1, 0b1)), compute("b", 1, (1, 0b10))],
        1: [compute("a", 1, (1, 0b100))],
    }
    jobs = (a_job("a", 1), a_job("b", 1), a_job("late", 1, at=1))
    tasks = {"a": divided(3, 3, 2), "b": divided(1, 3, 3), "late": divided(1, 1, 1)}
    found = driven(jobs, tasks, script | {4: [Cancel("late", "enough")]}, cluster)
    assert told(found) == [
        (2, computed("a", 1, (1, 1))),
        (3, computed("a", 1, (0, 0b10), (1, 0b100))),
        (3, Finished("a", 1)),
        (3, computed("b", 1, (1, 0b10))),
        (3, Finished("b", 1)),
    ]


def test_without_synchronisation_a_round_is_complete_with_its_last_task() -> None:
    script: Script = {0: [compute("a", 1, V100)], 1: [compute("a", 2, V100)]}
    found = driven([a_job("a", 2)], {"a": divided(1, 1, 1)}, script)
    assert [entry.events for entry in found[1:]] == [
        (computed("a", 1, V100), Synchronised("a", 1, 1), Woke()),
        (computed("a", 2, V100), Finished("a", 2)),
    ]


def test_synchronisation_is_that_of_the_slowest_type_over_the_whole_distance() -> None:
    """The V100 needs 1/8 s on one node, 1/4 in a rack, 1/2 across; the K80 5/8, 6/8 and 7/8."""
    cluster = Cluster(
        (Node("a", "v100", 2, "r0"), Node("b", "v100", 2, "r0"), Node("c", "k80", 2, "r1"), Node("d", "k80", 2, "r1"))
    )
    tasks = {"a": Tasks(2, (1.0, 1.0), ((0.125, 0.25, 0.5), (0.625, 0.75, 0.875)))}

    def ends(*gpus: tuple[int, int]) -> float:
        return told(driven([a_job("a", 1)], tasks, {0: [compute("a", 1, *gpus)]}, cluster), Finished)[0][0]

    assert ends((0, 0b11)) == 1.125
    assert ends((0, 1), (1, 1)) == 1.25
    assert ends((2, 0b11)) == 1.625
    assert ends((2, 1), (3, 1)) == 1.75
    assert ends((1, 1), (2, 1)) == 1.875


def test_all_gpus_that_took_part_count_for_the_synchronisation() -> None:
    cluster = Cluster((Node("a", "v100", 1, "r0"), Node("b", "v100", 1, "r1")))
    tasks = {"a": Tasks(2, (1.0,), ((0.125, 0.25, 0.5),))}
    script: Script = {0: [compute("a", 1, (0, 1))], 1: [compute("a", 1, (1, 1))]}
    assert told(driven([a_job("a", 1)], tasks, script, cluster), Finished) == [(2.5, Finished("a", 1))]


def test_a_job_of_two_and_a_half_steps_has_three_rounds() -> None:
    script: Script = {0: [compute("a", 1, V100)], 1: [compute("a", 2, V100)], 2: [compute("a", 3, V100)]}
    found = told(driven([a_job("a", 2.5)], {"a": divided(1, 1, 1)}, script), Synchronised, Finished)
    assert found == [(1, Synchronised("a", 1, 1)), (2, Synchronised("a", 2, 2)), (3, Finished("a", 3))]


def test_a_crumb_that_rounding_left_is_no_round() -> None:
    found = told(driven([a_job("a", 1 + 1e-12)], {"a": divided(1, 1, 1)}, {0: [compute("a", 1, V100)]}), Finished)
    assert found == [(1, Finished("a", 1))]


@pytest.mark.parametrize(
    ("outcome", "last"),
    [
        (JobOutcome.KILLED, Cancelled("a")),
        (JobOutcome.FAILED, Failed("a", 1, "unsuccessful at its end", 1, final=True)),
    ],
)
def test_a_job_ends_with_its_outcome(outcome: JobOutcome, last: Event) -> None:
    script: Script = {0: [compute("a", 1, V100)], 1.5: [Abandon("a", "failed")] if outcome is JobOutcome.FAILED else []}
    found = driven([a_job("a", 1, outcome=outcome)], {"a": divided(1, 1, 1, sync=0.5)}, script)
    assert told(found)[-1] == (1.5, last)


def test_a_failure_stops_the_round_and_nothing_of_it_counts() -> None:
    """Rounds of 2 s on two GPUs; the attempt dies after 3 s of running, a second into its second round, after 5 s."""
    script: Script = {
        0: [compute("a", 1, V100, K80)],
        7: [compute("a", 2, V100, K80)],
        8: [compute("a", 3, V100, K80)],
    }
    found = driven([a_job("a", 2, dies=(3,))], {"a": divided(2, 2, 2)}, script)
    assert told(found, Synchronised, Failed, Finished) == [
        (2, Synchronised("a", 1, 1)),
        (8, Failed("a", 2, "out of memory", 1)),
        (10, Finished("a", 3)),
    ]
    assert History.of(found, PAIR).jobs["a"].gpu_seconds == 4 + 2 + 4


def test_synchronisation_is_running_time_of_an_attempt() -> None:
    found = driven([a_job("a", 1, dies=(1.25,))], {"a": divided(1, 1, 1, sync=0.5)}, {0: [compute("a", 1, V100)]})
    assert told(found[:3]) == [(1, computed("a", 1, V100)), (1.25, Failed("a", 1, "out of memory", 0))]


@pytest.mark.parametrize("sync", [0.0, 0.5])
def test_an_attempt_that_would_die_when_its_work_is_done_does_not(sync: float) -> None:
    found = driven([a_job("a", 1, dies=(1 + sync,))], {"a": divided(1, 1, 1, sync=sync)}, {0: [compute("a", 1, V100)]})
    assert told(found)[-1] == (1 + sync, Finished("a", 1))


def test_a_lost_node_stops_rounds_that_compute_there_and_no_others() -> None:
    """At 1.5 `hit` computes on the K80, `syncs` has only to be synchronised, `away` computes elsewhere."""
    jobs = [a_job("hit", 1), a_job("syncs", 1), a_job("away", 1)]
    tasks: Mapping[str, Tasks | None] = {
        "hit": divided(2, 4, 4),
        "syncs": divided(1, 1, 1, sync=1),
        "away": divided(1, 2, 2),
    }
    script: Script = {
        0: [compute("hit", 1, (0, 1), (1, 1)), compute("syncs", 1, (1, 2)), compute("away", 1, (0, 2))],
        2: [compute("hit", 2, (0, 0b11))],
    }
    found = driven(jobs, tasks, script, FOUR, outages=[Outage(1.5, 1, inf)])
    assert [fact for now, fact in told(found, NodeLost, Stopped) if now == 1.5] == [NodeLost(1), Stopped("hit", 1, 0)]
    assert told(found, Finished) == [(2, Finished("away", 1)), (2, Finished("syncs", 1)), (6, Finished("hit", 2))]
    history = History.of(found, FOUR)
    assert {name: job.gpu_seconds for name, job in history.jobs.items()} == {"hit": 11, "syncs": 1, "away": 2}
    assert [job.restarts for job in history.jobs.values()] == [1, 0, 0]
    assert cumulated(history.held)[1].tolist() == [4, 3, 1, 2, 0]


def test_a_round_that_is_preempted_or_cancelled_stops_and_frees_its_gpus() -> None:
    script: Script = {
        0: [compute("a", 1, V100, K80)],
        1: [Preempt("a", 1, PreemptionCause.OUTRANKED, "b"), compute("b", 1, V100, K80)],
        1.5: [Cancel("b", "enough"), compute("a", 2, V100, K80)],
    }
    found = driven([a_job("a", 1), a_job("b", 1)], dict.fromkeys("ab", divided(2, 2, 2)), script)
    assert told(found) == [(1, Stopped("a", 1, 0)), (3.5, computed("a", 2, V100, K80)), (3.5, Finished("a", 2))]
    history = History.of(found, PAIR)
    assert [(job.gpu_seconds, job.preemptions, job.restarts) for job in history.jobs.values()] == [(6, 1, 0), (1, 0, 0)]
    assert history.jobs["b"].status is Status.CANCELLED
    assert cumulated(history.held)[1].tolist() == [2, 2, 2, 0]


def test_loss_is_reported_at_the_end_of_a_round_once_in_a_while() -> None:
    """Every 2 s of running: after rounds 2 and 4 of a second each, and not at the very end."""
    curve = LossCurve(1.0, 1.0, 0.0)
    script: Script = {float(now): [compute("a", now + 1, V100)] for now in range(5)}
    truth = Truth(report_every=2.0, switching=Switching(size=0.0))
    found = driven([a_job("a", 5, loss=curve)], {"a": divided(1, 1, 1)}, script, truth=truth)
    assert told(found, Progressed) == [(2, Progressed("a", 2, 2, 1 / 3)), (4, Progressed("a", 4, 4, 1 / 5))]
    [entry] = [entry for entry in found if entry.now == 2]
    assert [type(fact) for fact in entry.events] == [Computed, Progressed, Synchronised, Woke]


COSTS = Truth(restart_overhead=9.0, switching=Switching(resident=0.25, bandwidth=100.0, size=50.0))
"""Half a second to load a model of unknown size."""


def test_each_task_takes_what_its_gpu_needs_to_turn_to_the_job() -> None:
    """a cold 0.5 + 1; a again 1; b, of 200 bytes, cold 2 + 1; a resident 0.25 + 1."""
    script: Script = {
        0: [compute("a", 1, V100)],
        1.5: [compute("a", 2, V100)],
        2.5: [compute("b", 1, V100)],
        5.5: [compute("a", 3, V100)],
    }
    jobs = [a_job("a", 3), a_job("b", 1)]
    tasks = dict.fromkeys("ab", divided(1, 1, 1))
    sizes = {"a": None, "b": 200.0}
    found = driven(jobs, tasks, script, truth=COSTS, sizes=lambda job: sizes[job.id])
    assert [now for now, _ in told(found, Computed)] == [1.5, 2.5, 5.5, 6.75]


def test_a_lost_node_keeps_no_model() -> None:
    script: Script = {0: [compute("a", 1, V100)], 5: [compute("a", 2, V100)]}
    found = driven([a_job("a", 2)], {"a": divided(1, 1, 1)}, script, truth=COSTS, outages=[Outage(2, 0, 1)])
    assert [now for now, _ in told(found, Computed)] == [1.5, 6.5]


def test_a_run_begins_to_make_progress_when_its_slowest_gpu_has_turned_to_it() -> None:
    """The V100 was last its own, the K80 is cold: 0.5 s; then both were its own: nothing."""
    script: Script = {
        0: [launch("a", 1, V100)],
        4: [Preempt("a", 1, PreemptionCause.RESIZED, None), launch("a", 2, V100, K80)],
        6: [Preempt("a", 2, PreemptionCause.RESIZED, None), launch("a", 3, V100, K80)],
    }
    found = driven([a_job("a", 10)], {"a": divided(2, 1, 1)}, script, truth=COSTS)
    assert told(found) == [(4, Stopped("a", 1, 1.75)), (6, Stopped("a", 2, 3.25)), (12.75, Finished("a", 3))]


def test_rigid_jobs_pay_the_restart_overhead_and_count_as_who_ran_last() -> None:
    jobs = [a_job("a", 2), TraceJob(Job("rigid", 0, 1, steps=1.0))]
    script: Script = {0: [compute("a", 1, V100)], 1.5: [launch("rigid", 1, V100)], 11.5: [compute("a", 2, V100)]}
    found = driven(jobs, {"a": divided(1, 1, 1), "rigid": None}, script, truth=COSTS)
    assert told(found, Finished) == [(11.5, Finished("rigid", 1)), (12.75, Finished("a", 2))]


def test_without_switching_such_jobs_restart_as_others_do() -> None:
    """At task grain where the GPU did not run the job last, at lease grain at every start."""
    truth = Truth(restart_overhead=9.0, switching=None)
    script: Script = {
        0: [compute("a", 1, V100)],
        10: [compute("a", 2, V100)],
        11: [compute("b", 1, V100)],
        21: [compute("a", 3, V100)],
        31: [launch("a", 4, V100)],
    }
    found = driven([a_job("a", 4), a_job("b", 1)], dict.fromkeys("ab", divided(1, 1, 1)), script, truth=truth)
    assert [now for now, _ in told(found, Computed)] == [10, 11, 21, 31]
    assert told(found, Finished) == [(21, Finished("b", 1)), (41, Finished("a", 4))]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (compute("b", 1, V100), "b is to run on node 0, slots 0b1, of which 0b1 are busy"),
        (launch("b", 1, V100), "b is to run on node 0"),
        (compute("leased", 1, V100), "leased is to compute for run 1, but run 1 has not ended"),
        (compute("b", 1, (0, 0b10), (1, 0b10), (1, 0b100)), "b is to compute 1 tasks more than its step has left"),
        (compute("a", 2, (0, 0b10)), "a is to compute for run 2, but run 1 has not ended"),
        (compute("rigid", 1, (0, 0b10)), "rigid is to compute tasks, but its steps do not divide"),
        (compute("choosy", 1, (1, 0b10)), "choosy is to compute on node 1, whose GPUs are of no use to it"),
        (compute("b", 1, (1, 1)), "b is to run on node 1"),
    ],
)
def test_an_action_that_cannot_be_carried_out_is_a_bug(action: Action, message: str) -> None:
    tasks = dict.fromkeys(("a", "b", "leased"), divided(2, 1, 1)) | {"rigid": None, "choosy": divided(1, 1, 0)}
    script: Script = {0: [compute("a", 1, V100), launch("leased", 1, K80), action]}
    with pytest.raises(InvariantError, match=message):
        driven([a_job(name, 9) for name in tasks], tasks, script, FOUR)
