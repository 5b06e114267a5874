"""What the core takes in from live services: holds, jobs of earlier journals, news that comes late, when jobs yield."""

from collections.abc import Sequence

import pytest

from poise.engine.assembly import with_rounds
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.action import Action, Launch, Preempt, PreemptionCause, Waited, WakeAt
from poise.scheduler.model.cluster import Slots, parse_cluster
from poise.scheduler.model.event import (
    Attached,
    Belated,
    Carried,
    Colocated,
    Estimated,
    Event,
    Failed,
    Finished,
    Held,
    Released,
    Stopped,
    Submitted,
    Woke,
)
from poise.scheduler.model.job import Job, Yields
from poise.scheduler.model.job_table import JobView
from poise.scheduler.model.speed import Estimate
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import POLICIES, policy_named

KNOWN = Estimated("k", Estimate(((1.0, 1.0, 1.0),)))


def a_core(policy: str = "srtf", gpus: int = 2) -> Scheduler:
    scheduler = Scheduler(
        parse_cluster(f"gpu:{gpus}"), policy_named(policy), placement_named("consolidate"), Settings(round=10.0)
    )
    scheduler.handle(0.0, [KNOWN])
    return scheduler


def a_job(name: str, steps: float = 100.0, **more: object) -> Submitted:
    return Submitted(Job(name, 0.0, 2, **more), "k", steps)  # type: ignore[arg-type]


def carried(name: str, *, gpus: bool, yields: Yields = Yields.ANY_TIME, **more: object) -> Carried:
    given = {"epoch": 3, "done": 40.0, "received": 50.0, "failures": 1, "since": 5.0, "held": False} | more
    job, held = Job(name, 0.0, 2, yields=yields), (Slots(0, 0b11),) if gpus else ()
    return Carried(job, "k", 100.0, gpus=held, **given)  # type: ignore[arg-type]


def names(actions: Sequence[Action]) -> list[tuple[str, str]]:
    return [(type(each).__name__, each.job) for each in actions if isinstance(each, Launch | Preempt)]


def left(core: Scheduler, job: str, now: float) -> float:
    """Seconds that the core believes a job has left at its best."""
    return JobView(core.state.columns, core.state.rows[job], now).remaining_seconds


def test_a_held_job_gives_its_gpus_away_and_gets_them_back_when_released() -> None:
    core = a_core()
    core.handle(0, [a_job("a", 10.0), a_job("b")])
    actions = core.handle(1, [Held("a")])
    assert names(actions) == [("Preempt", "a"), ("Launch", "b")]
    assert actions[0] == Preempt("a", 1, PreemptionCause.HELD, None)
    assert core.explain("a").text == "is held back by its owner"
    core.handle(2, [Stopped("a", 1, 1.0), Finished("b", 1)])
    assert core.explain("a").code == "held-back"
    assert names(core.handle(3, [Released("a")])) == [("Launch", "a")]


def waited(actions: Sequence[Action], job: str) -> Waited:
    [launch] = [each for each in actions if isinstance(each, Launch) and each.job == job]
    return launch.waited


def test_what_a_job_waited_before_it_was_held_is_part_of_its_wait() -> None:
    """5 s behind a job that holds all GPUs, 3 s held by its owner, 2 s behind it again; then once more, all in one wait."""
    core = a_core("fifo")
    core.handle(0, [a_job("a"), a_job("b")])
    core.handle(5, [Held("b")])
    core.handle(8, [Released("b")])
    assert waited(core.handle(10, [Finished("a", 1)]), "b") == (3, 0, 7)
    core.handle(11, [Held("b")])
    assert waited(core.handle(15, [Released("b")]), "b") == (4, 0, 0)


def test_who_waits_for_gpus_that_came_free_unnoticed_does_not_wait_for_capacity() -> None:
    core = a_core()
    core.handle(0, [a_job("a"), a_job("b")])
    core.handle(5, [Belated(), Finished("a", 1)])
    assert waited(core.handle(9, []), "b") == (4, 0, 5)


def test_holding_and_releasing_twice_is_the_same_as_once() -> None:
    core = a_core()
    core.handle(0, [a_job("a")])
    assert len(core.handle(1, [Held("a")])) >= 1
    assert names(core.handle(2, [Held("a")])) == []
    assert names(core.handle(3, [Released("a"), Released("a")])) == [("Launch", "a")]


def test_a_held_job_can_be_cancelled_and_finish_late() -> None:
    core = a_core()
    core.handle(0, [a_job("a")])
    core.handle(1, [Held("a")])
    core.handle(2, [Finished("a", 1)])
    assert core.explain("a").code == "finished"


def test_a_run_that_finished_while_it_was_to_be_stopped_ends_its_job() -> None:
    core = a_core()
    core.handle(0, [a_job("long", 100.0)])
    assert names(core.handle(1, [a_job("short", 5.0)])) == [("Preempt", "long"), ("Launch", "short")]
    core.handle(2, [Finished("long", 1)])
    assert core.explain("long").code == "finished"
    assert names(core.handle(6, [Finished("short", 1)])) == []


def test_a_run_that_failed_cannot_have_finished_too() -> None:
    core = a_core()
    core.handle(0, [a_job("a")])
    assert names(core.handle(1, [Failed("a", 1, "died", 0.0)])) == [("Launch", "a")]
    assert core.handle(2, [Finished("a", 1)]) == ()
    assert core.explain("a").code == "running"


def test_a_carried_job_runs_on_where_it_ran() -> None:
    core = a_core()
    assert names(core.handle(10.0, [carried("a", gpus=True), carried("b", gpus=False)])) == []
    columns, row = core.state.columns, core.state.rows["a"]
    assert (columns.epoch[row], columns.received[row], columns.started[row], columns.failures[row]) == (3, 50.0, 5.0, 1)
    assert core.state.of(row) == (Slots(0, 0b11),)
    assert names(core.handle(60.0, [Finished("a", 3)])) == [("Launch", "b")]
    assert columns.epoch[core.state.rows["b"]] == 4


def test_a_carried_job_that_is_held_stays_so() -> None:
    core = a_core()
    assert names(core.handle(10.0, [carried("a", gpus=False, held=True)])) == []
    assert names(core.handle(11.0, [Released("a")])) == [("Launch", "a")]


def test_a_carried_job_that_can_run_here_no_more_is_rejected() -> None:
    core = a_core(gpus=1)
    [action] = core.handle(10.0, [carried("a", gpus=False)])
    assert type(action).__name__ == "Reject"


def test_nothing_is_decided_for_an_instant_that_was_learnt_of_late() -> None:
    core = a_core()
    core.handle(0, [a_job("a"), a_job("b")])
    late: list[Event] = [Belated(), Finished("a", 1)]
    assert names(core.handle(5, late)) == []
    assert names(core.handle(9, [])) == [("Launch", "b")]


@pytest.mark.parametrize("policy", ["srtf", "las", "max-min"])
def test_a_job_that_never_yields_keeps_its_gpus_until_it_ends(policy: str) -> None:
    settings = Settings(round=10.0)
    chosen = with_rounds(policy_named(policy), settings)
    core = Scheduler(parse_cluster("gpu:2"), chosen, placement_named("consolidate"), settings)
    core.handle(0.0, [KNOWN, a_job("a", 1e6, yields=Yields.NEVER)])
    assert names(core.handle(1.0, [a_job("b", 1.0)])) == []
    assert all(names(core.handle(now, [])) == [] for now in (10.0, 20.0, 30.0, 40.0))
    assert names(core.handle(50.0, [Finished("a", 1)])) == [("Launch", "b")]


@pytest.mark.parametrize("policy", ["srtf", "las", "max-min"])
@pytest.mark.parametrize("minimum_run", [0.0, 15.0])
def test_a_job_that_yields_once_attached_is_preempted_from_then_on(policy: str, minimum_run: float) -> None:
    settings = Settings(round=10.0, minimum_run=minimum_run)
    chosen = with_rounds(policy_named(policy), settings)
    core = Scheduler(parse_cluster("gpu:2"), chosen, placement_named("consolidate"), settings)
    core.handle(0.0, [KNOWN, a_job("a", 1e6, yields=Yields.ATTACHED)])
    core.handle(1.0, [a_job("b", 1.0, yields=Yields.ATTACHED)])
    assert all(names(core.handle(now, [])) == [] for now in (10.0, 20.0, 30.0))
    core.handle(31.0, [Attached("a", 2)])  # of a run that is not there
    assert names(core.handle(40.0, [])) == []
    happened = [(41.0, names(core.handle(41.0, [Attached("a", 1)])))]
    happened += [(now, names(core.handle(now, [Woke()]))) for now in (50.0, 56.0, 60.0, 70.0)]
    acts = [(now, each) for now, each in happened if each]
    assert acts[0][1] == [("Preempt", "a"), ("Launch", "b")]
    assert 41.0 + minimum_run <= acts[0][0] <= 60.0


@pytest.mark.parametrize(("attached", "moment"), [(None, None), (5.0, 15.0), (12.0, 22.0)])
def test_a_run_of_an_earlier_journal_is_protected_from_when_it_attached(
    attached: float | None, moment: float | None
) -> None:
    core = Scheduler(
        parse_cluster("gpu:2"), policy_named("srtf"), placement_named("consolidate"), Settings(minimum_run=10.0)
    )
    job = Job("a", 0.0, 2, yields=Yields.ATTACHED)
    fact = Carried(job, "k", 100.0, 1, 0.0, 0.0, 0, 1.0, (Slots(0, 0b11),), held=False, attached=attached)
    core.handle(12.5, [KNOWN, fact, a_job("b", 1.0)])
    preempted = [now for now in range(13, 60) if ("Preempt", "a") in names(core.handle(now, [Woke()]))]
    assert preempted[:1] == ([] if moment is None else [moment])


@pytest.mark.parametrize("policy", ["srtf", "stride", "gandiva-fair"])
def test_a_job_of_an_earlier_journal_backs_off_for_as_long_as_it_was_to(policy: str) -> None:
    core = a_core(policy)
    actions = core.handle(10.0, [carried("a", gpus=False, until=25.0)])
    assert names(actions) == []
    assert core.backs_off_until("a") == 25
    assert min(each.time for each in actions if isinstance(each, WakeAt)) <= 25
    assert core.explain("a").text == "is tried again later, after 1 failed run"
    assert names(core.handle(24.0, [Woke()])) == []
    launched = [now for now in range(25, 60) if ("Launch", "a") in names(core.handle(now, [Woke()]))]
    assert launched[0] <= 40  # at once, or in the round that follows


def test_runs_that_take_their_time_to_leave_are_all_still_heard_of() -> None:
    """The core cannot know which of them was ever begun: whatever is said last of its work counts."""
    core = a_core()
    core.handle(0, [a_job("a", 100.0)])
    for now in (1.0, 3.0):
        core.handle(now, [Held("a")])
        core.handle(now + 1, [Released("a")])
    columns, row = core.state.columns, core.state.rows["a"]
    assert columns.epoch[row] == 3
    core.handle(5.0, [Stopped("a", 2, 0.0)])  # it had not begun yet
    core.handle(6.0, [Stopped("a", 1, 42.0)])
    assert columns.steps_done[row] == 42
    core.handle(7.0, [Finished("a", 2)])
    assert core.explain("a").code == "running"  # that run is known to be over
    core.handle(8.0, [Held("a"), Finished("a", 3)])
    assert core.explain("a").code == "finished"


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_any_run_of_an_earlier_journal_may_still_finish_its_job(epoch: int) -> None:
    core = a_core()
    core.handle(10.0, [carried("a", gpus=True)])
    core.handle(11.0, [Finished("a", epoch)])
    assert core.explain("a").code == "finished"
    assert core.state.free.idle == [2]


@pytest.mark.parametrize("policy", ["srtf", "max-min"])
def test_of_two_carried_jobs_that_share_gpus_the_later_one_makes_way(policy: str) -> None:
    settings = Settings(round=10.0)
    chosen = with_rounds(policy_named(policy), settings)
    core = Scheduler(parse_cluster("gpu:2"), chosen, placement_named("consolidate"), settings)
    actions = core.handle(10.0, [KNOWN, carried("a", gpus=True), carried("b", gpus=True)])
    assert actions[0] == Preempt("b", 3, PreemptionCause.UNPLANNED, None)
    assert names(actions) == [("Preempt", "b")]
    columns, row = core.state.columns, core.state.rows["b"]
    assert (columns.epoch[row], columns.received[row], columns.waiting_since[row]) == (3, 55.0, 10.0)
    core.handle(12.0, [Stopped("b", 3, 44.0)])
    assert columns.steps_done[row] == 44
    assert names(core.handle(20.0, [Finished("a", 3)])) == [("Launch", "b")]


PAIRED = Colocated("k", "k", ((0.7, 0.7),))
BLIND = [name for name in POLICIES if name != "gandiva"]


def a_new_chapter(policy: str, one: Yields, other: Yields, *known: Event) -> tuple[Scheduler, list[tuple[str, str]]]:
    """Two jobs that shared the GPUs of a cluster are carried over; what becomes of them at once, and in the first rounds."""
    settings = Settings(round=10.0)
    core = Scheduler(
        parse_cluster("gpu:2"), with_rounds(policy_named(policy), settings), placement_named("consolidate"), settings
    )
    both = [carried("a", gpus=True, yields=one), carried("b", gpus=True, yields=other)]
    did = names(core.handle(10.0, [KNOWN, *known, *both]))
    for now in (20.0, 30.0, 40.0):
        did += names(core.handle(now, [Woke()]))
    return core, did


@pytest.mark.parametrize("yields", Yields)
@pytest.mark.parametrize("policy", ["max-min+packed", "gandiva"])
def test_two_carried_jobs_go_on_sharing_under_a_policy_that_lets_jobs_share(policy: str, yields: Yields) -> None:
    core, did = a_new_chapter(policy, yields, yields, PAIRED)
    assert did == []
    assert core.state.ledger.partner == {0: 1, 1: 0}
    assert list(core.state.columns.rate[:2]) == [0.7, 0.7]


@pytest.mark.parametrize("policy", BLIND)
def test_two_carried_jobs_that_may_not_be_preempted_go_on_sharing_under_any_policy(policy: str) -> None:
    core, did = a_new_chapter(policy, Yields.NEVER, Yields.ATTACHED)
    assert did == []
    assert list(core.state.columns.rate[:2]) == [0.5, 0.5]
    assert core.state.free.idle == [0]
    core.handle(45.0, [Attached("b", 3), a_job("c", 1.0)])
    for now in range(50, 2000, 50):
        assert names(core.handle(float(now), [Woke()])) == []
    core.handle(2000.0, [Finished("a", 3)])  # so `b` is alone, and may be preempted
    assert sorted(core.state.columns.rate[:3]) == [0.0, 0.0, 1.0]
    assert core.state.ledger.partner == {}


def two_pinned(*since: float) -> Scheduler:
    """A core that two jobs of 1,000 steps are carried to at 100, in their second runs, which began then on the same GPUs."""
    core, gpus = a_core(), (Slots(0, 0b11),)
    runs = [
        Carried(Job(name, 0.0, 2, yields=Yields.NEVER), "k", 1000.0, 2, 0.0, 0.0, 0, at, gpus, held=False)
        for name, at in zip("ab", since, strict=True)
    ]
    core.handle(100.0, runs)
    return core


def test_what_a_carried_job_has_left_counts_its_speed_beside_another_and_then_alone() -> None:
    """300 of 1,000 steps in 600 s beside another one, then 2 in 2 s alone: 698 are left."""
    core = two_pinned(0.0, 0.0)
    assert left(core, "a", 100.0) == left(core, "b", 100.0) == 950.0
    core.handle(600.0, [Finished("b", 2)])
    assert left(core, "a", 602.0) == 698.0


@pytest.mark.parametrize(("since", "want"), [((0.0, 40.0), (930.0, 970.0)), ((40.0, 0.0), (970.0, 930.0))])
def test_two_carried_jobs_share_since_the_younger_run_is_there(
    since: tuple[float, float], want: tuple[float, float]
) -> None:
    core = two_pinned(*since)
    assert (left(core, "a", 100.0), left(core, "b", 100.0)) == want


def test_news_of_an_earlier_run_takes_nothing_from_what_the_current_one_has_done() -> None:
    core = two_pinned(0.0, 0.0)
    core.handle(600.0, [Finished("b", 2)])
    core.handle(601.0, [Stopped("a", 1, 42.0)])
    assert left(core, "a", 602.0) == 698.0 - 42.0


@pytest.mark.parametrize("policy", BLIND)
@pytest.mark.parametrize(("one", "other", "leaver"), [("any-time", "never", "a"), ("never", "any-time", "b")])
def test_of_two_carried_jobs_that_share_the_one_leaves_that_may_be_preempted(
    policy: str, one: str, other: str, leaver: str
) -> None:
    core, did = a_new_chapter(policy, Yields(one), Yields(other))
    assert did == [("Preempt", leaver)]
    assert core.explain(leaver).code != "running"
    assert core.state.columns.rate[1 - "ab".index(leaver)] == 1.0
    assert core.state.columns.received["ab".index(leaver)] == 55.0


def test_beside_a_carried_job_that_may_not_be_preempted_others_take_turns() -> None:
    core, _ = a_new_chapter("max-min+packed", Yields.NEVER, Yields.ANY_TIME, PAIRED)
    core.handle(45.0, [a_job("c", 1e6)])
    did = [each for now in range(50, 400, 10) for each in names(core.handle(float(now), [Woke()]))]
    assert did[:4] == [("Preempt", "b"), ("Launch", "c"), ("Preempt", "c"), ("Launch", "b")]
    assert core.explain("a").code == "running"


def test_a_carried_job_leaves_gpus_that_it_cannot_use_any_more() -> None:
    core = Scheduler(
        parse_cluster("v100:2,k80:2"), policy_named("srtf"), placement_named("consolidate"), Settings(round=10.0)
    )
    known = Estimated("k", Estimate(((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))))
    assert names(core.handle(10.0, [known, carried("a", gpus=True)])) == [("Preempt", "a"), ("Launch", "a")]


@pytest.mark.parametrize("policy", ["srtf", "fifo", "las+stable", "max-min"])
def test_some_jobs_stand_in_line_as_all_do(policy: str) -> None:
    settings = Settings(round=10.0)
    core = Scheduler(
        parse_cluster("gpu:2"), with_rounds(policy_named(policy), settings), placement_named("consolidate"), settings
    )
    core.handle(0.0, [KNOWN, *(a_job(str(number), 100.0 - number) for number in range(8))])
    line = core.in_line(100)
    assert len(line) == 7
    assert core.lined_up(["nobody", *sorted(map(str, range(8)), reverse=True)]) == line
    assert core.lined_up(line[1::2]) == line[1::2]
