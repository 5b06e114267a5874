"""Jobs start only after others have ended, at a time, and as many of an array at once as it may have."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.machine import ALICE, BOB, LingeringBackend, Service, a_request
from tests.machine_laws import check_books, check_standing, finish_all

from poise.scheduler.model.cluster import Node
from poise.scheduler.model.errors import ReplayError
from poise.service.backends.api import NodeState, RunEnding
from poise.service.server import recovery
from poise.service.server.service_api import JobFilter, RequestRefusedError, Verb
from poise.service.server.storage.schema import FILE
from poise.service.wire.request import Submission
from poise.service.wire.views import Flag, JobState, ReasonView


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path, policy="fifo", cluster="v100:4")


def reason(service: Service, job: str) -> tuple[str, str]:
    """Why a job waits, which the queue and `why` say alike."""
    found: ReasonView = service.engine.why(job).reason
    assert service.engine.show(job).job.reason == found
    return found.code, found.text


def state(service: Service, job: str) -> JobState:
    return service.engine.show(job).job.state


def running(service: Service) -> list[str]:
    return sorted((job for job, _ in service.machine.alive), key=int)


def end(service: Service, job: str, how: RunEnding = RunEnding.FINISHED) -> None:
    service.machine.end(job, how, cause="traceback-from-crash" if how is RunEnding.FAILED else None)
    service.settle()
    check_standing(service)


def fail(service: Service, job: str) -> None:
    """Until it is given up."""
    while job in running(service):
        end(service, job, RunEnding.FAILED)


def change(service: Service, job: str, verb: Verb) -> str | None:
    text: str | None = service.call(lambda engine: engine.change(ALICE, job, verb)).text
    check_standing(service)
    return text


def told(service: Service, job: str) -> list[tuple[str, str, str]]:
    events = service.engine.events(after=0, job=job, tenant=None, limit=100).events
    return [(each.kind, each.actor, each.text) for each in events]


# Dependencies.


def test_a_job_waits_for_the_end_of_another_and_says_so_everywhere(service: Service) -> None:
    [first] = service.submit(a_request())
    [second] = service.submit(a_request(after=(first,)))
    check_standing(service)
    assert reason(service, second) == ("dependency", "waits for job 1 (RUNNING) to end")
    assert service.engine.why(second).advice == "Nothing to do: it competes once they have ended; poise why 1"
    assert service.engine.reasons()["dependency"] == 1
    end(service, first)
    assert running(service) == [second]
    assert [(kind, actor) for kind, actor, _ in told(service, second)] == [
        ("submitted", "alice"), ("waits", "service"), ("may-start", "service"), ("launched", "policy"),
    ]  # fmt: skip
    assert told(service, second)[1][2] == "waits for job 1 (RUNNING) to end"
    assert told(service, second)[2][2] == "may start: the jobs that it waited for have ended"
    assert "dependency" not in service.engine.reasons()
    finish_all(service)
    check_books(service, [first, second])


@pytest.mark.parametrize("how", ["ended", "succeeded", "failed"])
@pytest.mark.parametrize("end_it", ["finish", "fail", "cancel"])
def test_whether_a_job_starts_depends_on_how_the_other_ends(how: str, end_it: str, service: Service) -> None:
    [first] = service.submit(a_request())
    waiting = service.submit(a_request(after=(f"{first}:{how}",)))
    waiting += service.submit(a_request(after=(f"{waiting[0]}:succeeded",)))
    {"finish": end, "fail": fail, "cancel": lambda *_: change(service, first, Verb.CANCEL)}[end_it](service, first)
    check_standing(service)
    if how == "ended" or (how == "succeeded") == (end_it == "finish"):
        assert running(service) == waiting[:1]
        return
    assert [state(service, job) for job in waiting] == [JobState.CANCELLED] * 2
    became = {"finish": "succeeded", "fail": "failed", "cancel": "was cancelled"}[end_it]
    wanted = {"succeeded": "success", "failed": "failure"}[how]
    cause = f"was to start after the {wanted} of job {first}, which {became}"
    assert service.engine.why(waiting[0]).reason == ReasonView(code="cancelled", text=cause)
    assert reason(service, waiting[1])[1] == f"was to start after the success of job {waiting[0]}, which was cancelled"
    assert told(service, waiting[0])[-1] == ("cancelled", "service", f"cancelled: {cause}")
    assert told(service, waiting[1])[-1][0] == "cancelled"


def test_a_retry_is_no_end(service: Service) -> None:
    [first] = service.submit(a_request())
    [second] = service.submit(a_request(after=(f"{first}:failed",)))
    end(service, first, RunEnding.FAILED)
    service.pass_time(1)
    assert running(service) == [first]
    assert reason(service, second) == ("dependency", "waits for job 1 (RUNNING) to fail")
    fail(service, first)
    assert running(service) == [second]


def test_jobs_of_a_range_are_waited_for_together(service: Service) -> None:
    service.submit(*[a_request() for _ in range(4)])
    [last] = service.submit(a_request(after=("1-3", "4:succeeded")))
    assert reason(service, last) == ("dependency", "waits for 3 of 3 jobs to end: 1 (RUNNING), 2 (RUNNING), 3 (RUNNING)")
    assert service.engine.why(last).evidence == ("it waits for job 4 (RUNNING) to succeed",)
    end(service, "2")
    assert reason(service, last)[1] == "waits for 2 of 3 jobs to end: 1 (RUNNING), 3 (RUNNING)"
    fail(service, "1")
    end(service, "3")
    assert reason(service, last)[1] == "waits for job 4 (RUNNING) to succeed"
    end(service, "4")
    assert running(service) == [last]


def test_one_failure_of_a_range_is_enough_once_all_have_ended(service: Service) -> None:
    service.submit(*[a_request() for _ in range(3)])
    [clean, promote] = service.submit(a_request(after=("1-3:failed",)), a_request(after=("1,2,3:succeeded",)))
    fail(service, "2")
    assert state(service, promote) is JobState.CANCELLED
    text = "waits for 2 of 3 jobs to end, one of which has not succeeded: 1 (RUNNING), 3 (RUNNING)"
    assert reason(service, clean) == ("dependency", text)
    end(service, "1")
    end(service, "3")
    assert running(service) == [clean]


def test_a_dependency_on_a_job_that_ended_long_ago_is_met_or_hopeless_at_once(service: Service) -> None:
    service.submit(a_request(), a_request())
    end(service, "1")
    fail(service, "2")
    service.restart()
    assert not service.loop.state.records
    met = service.submit(a_request(after=("1:succeeded",)), a_request(after=("1-2",)), a_request(after=("2:failed",)))
    lost = service.submit(a_request(after=("2:succeeded",)), a_request(after=("1:failed",)))
    assert running(service) == met
    assert [state(service, job) for job in lost] == [JobState.CANCELLED] * 2
    assert [kind for kind, *_ in told(service, met[0])] == ["submitted", "launched"]  # it never waited
    check_standing(service)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("2", "after: there is no job '2'"),
        ("1-3", "after: there is no job '2'"),
        ("prep", "after: expected ids of jobs, such as 17 or 20-29, got 'prep'"),
        ("3-1", "after: expected the lower id first, got '3-1'"),
        ("1-100000000000", "after: a job waits for at most 10,000 others"),
    ],
)
def test_jobs_that_are_not_there_are_not_waited_for(after: str, said: str, service: Service) -> None:
    service.submit(a_request())
    with pytest.raises(RequestRefusedError) as caught:
        service.engine.submit(ALICE, Submission(jobs=(a_request(after=(after,)),)))
    assert str(caught.value) == said


def test_a_job_may_wait_for_one_of_another_tenant(service: Service) -> None:
    [theirs] = service.submit(a_request(), by=BOB)
    [mine] = service.submit(a_request(after=(theirs,)))
    assert reason(service, mine)[1] == f"waits for job {theirs} (RUNNING) to end"
    end(service, theirs)
    assert running(service) == [mine]


def test_a_thousand_jobs_that_wait_for_a_thousand_share_what_they_wait_for(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo", cluster="v100:2")
    service.submit(*[a_request(hold=True) for _ in range(1_000)])
    waiting = service.submit(*[a_request(after=("1-1000",)) for _ in range(1_000)])
    conditions = service.loop.state.conditions
    assert len(conditions._terms) == 1
    assert sum(map(len, conditions._awaited.values())) == 1_000
    service.call(lambda engine: engine.cancel_all(ALICE, JobFilter(tenant="alice")))
    assert {service.engine.show(job).job.state for job in waiting} == {JobState.CANCELLED}
    assert (conditions._terms, conditions._awaited, conditions._jobs) == ({}, {}, {})


def test_a_job_that_was_cancelled_is_waited_for_until_its_processes_are_gone(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo", cluster="v100:4", backend=LingeringBackend)
    [first] = service.submit(a_request())
    [then, never] = service.submit(a_request(after=(first,)), a_request(after=(f"{first}:succeeded",)))
    change(service, first, Verb.CANCEL)
    for _ in range(2):
        assert running(service) == [first]
        assert reason(service, then) == ("dependency", "waits for job 1 (CANCELLED) to end")
        assert state(service, never) is JobState.CANCELLED  # which is certain already
        [late] = service.submit(a_request(after=(first,)))
        assert reason(service, late)[0] == "dependency"
        change(service, late, Verb.CANCEL)
        service.restart()
        service.settle()
        check_standing(service)
    end(service, first, RunEnding.YIELDED)
    assert running(service) == [then]


# A time to begin.


def test_a_job_begins_at_its_time_and_the_engine_wakes_up_for_it(service: Service) -> None:
    [job] = service.submit(a_request(begin=1_500.25))
    assert reason(service, job) == ("begin-time", "does not start before 1970-01-01 00:25:00Z, in 8m20s")
    assert service.engine.why(job).advice == "Nothing to do: it competes from then on"
    assert service.loop._timeout() == 500.25
    service.pass_time(500)
    assert running(service) == []
    service.pass_time(0.25)
    assert running(service) == [job]
    assert told(service, job)[2] == ("may-start", "service", "may start: its time to begin has come")
    finish_all(service)
    check_books(service, [job])


def test_a_time_that_has_passed_means_now(service: Service) -> None:
    jobs = service.submit(a_request(begin=999.0), a_request(begin=1_000.0))
    assert running(service) == jobs
    assert [kind for kind, *_ in told(service, jobs[0])] == ["submitted", "launched"]


def test_conditions_are_met_all_together(service: Service) -> None:
    [first] = service.submit(a_request())
    [job] = service.submit(a_request(after=(first,), begin=1_100.0))
    end(service, first)
    assert reason(service, job)[0] == "begin-time"
    service.pass_time(100)
    assert running(service) == [job]


def test_a_time_that_came_while_the_service_was_away_counts_at_once(service: Service) -> None:
    [job] = service.submit(a_request(begin=1_100.0))
    service.machine.now += 200
    service.restart()
    service.settle()
    assert running(service) == [job]


# Capped arrays.


def array(service: Service, count: int, cap: int, **more: object) -> list[str]:
    return service.submit(*[a_request(array_cap=cap, array="grid", **more) for _ in range(count)])


def test_of_an_array_no_more_run_than_its_cap_in_order(service: Service) -> None:
    jobs = array(service, 5, 2)
    assert running(service) == jobs[:2]
    text = "waits for its turn: at most 2 of its array may hold GPUs at once, and 2 have theirs: 1 (RUNNING), 2 (RUNNING)"
    assert reason(service, jobs[2]) == ("array-cap", text)
    assert service.engine.reasons()["array-cap"] == 3
    [other] = service.submit(a_request(gpus=2))  # GPUs that the array leaves free are for others
    assert running(service) == [*jobs[:2], other]
    end(service, "1")
    assert running(service) == ["2", "3", other]
    fail(service, "2")
    change(service, "3", Verb.CANCEL)
    assert running(service) == ["4", "5", other]
    finish_all(service)
    check_books(service, [*jobs, other])
    conditions = service.loop.state.conditions
    assert (conditions._jobs, conditions._arrays, conditions._array_of) == ({}, {}, {})


def test_the_turn_goes_to_the_next_in_the_very_batch_in_which_one_ends(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo", cluster="v100:1")
    jobs = array(service, 2, 1)
    [other] = service.submit(a_request())
    end(service, jobs[0])
    assert running(service) == [jobs[1]]  # it was submitted before the other
    assert state(service, other) is JobState.PENDING


def test_a_held_job_gives_its_turn_to_the_next_once_its_processes_are_gone(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo", cluster="v100:4", backend=LingeringBackend)
    jobs = array(service, 3, 1)
    change(service, "1", Verb.HOLD)
    assert (running(service), service.machine.leaving) == (["1"], {("1", 1)})
    assert reason(service, "2")[0] == "array-cap"
    end(service, "1", RunEnding.YIELDED)
    assert running(service) == ["2"]
    waits = "waits for its turn: at most 1 of its array may hold GPUs at once, and one has it: 2 (RUNNING)"
    assert change(service, "1", Verb.RELEASE) == f"no longer held by its owner; it {waits}"
    assert reason(service, "1") == ("array-cap", waits)
    end(service, "2")
    assert running(service) == ["1"]  # it comes before those that have never run
    finish_all(service)
    check_books(service, jobs)


def test_a_cancelled_job_keeps_its_turn_until_its_processes_are_gone(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo", cluster="v100:4", backend=LingeringBackend)
    array(service, 2, 1)
    change(service, "1", Verb.CANCEL)
    assert reason(service, "2")[0] == "array-cap"
    end(service, "1", RunEnding.YIELDED)
    assert running(service) == ["2"]


def test_a_job_that_has_ended_keeps_its_turn_over_a_restart_until_its_processes_are_gone(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo", cluster="v100:4", backend=LingeringBackend)
    array(service, 2, 1)
    change(service, "1", Verb.CANCEL)
    service.restart()
    service.settle()
    check_standing(service)
    assert (running(service), reason(service, "2")[0]) == (["1"], "array-cap")
    end(service, "1", RunEnding.YIELDED)
    assert running(service) == ["2"]


def test_a_held_job_that_does_not_run_leaves_its_turn_to_the_next(service: Service) -> None:
    [first] = service.submit(a_request(gpus=4))
    array(service, 3, 2)
    change(service, "2", Verb.HOLD)
    end(service, first)
    assert running(service) == ["3", "4"]


def test_arrays_of_one_name_and_of_others_do_not_count_together(service: Service) -> None:
    mine = service.submit(*[a_request(array_cap=1, app="grid", array=key) for key in "aabb"])
    assert running(service) == [mine[0], mine[2]]
    theirs = service.submit(*[a_request(array_cap=1, app="grid") for _ in range(2)], by=BOB)
    assert running(service) == [mine[0], mine[2], theirs[0]]


def test_a_preempted_job_keeps_its_turn(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="las", cluster="v100:1")
    array(service, 3, 1)
    service.submit(a_request(), by=BOB)
    for _ in range(12):
        service.pass_time(10)
        check_standing(service)
        assert not {"2", "3"} & set(running(service))
    assert service.engine.show("1").preemptions > 0


# With what else happens to jobs.


def test_a_release_ends_the_hold_alone(service: Service) -> None:
    [first] = service.submit(a_request())
    [job] = service.submit(a_request(after=(first,), hold=True))
    assert reason(service, job) == ("held-back", "is held back by its owner")
    assert service.engine.why(job).evidence == ("it waits for job 1 (RUNNING) to end",)
    assert change(service, job, Verb.RELEASE) == "no longer held by its owner; it waits for job 1 (RUNNING) to end"
    assert reason(service, job)[0] == "dependency"
    assert change(service, job, Verb.RELEASE) == "no longer held by its owner; it waits for job 1 (RUNNING) to end"
    assert running(service) == [first]
    end(service, first)
    assert running(service) == [job]


def test_a_hold_goes_on_after_the_conditions_are_met(service: Service) -> None:
    [first] = service.submit(a_request())
    [job] = service.submit(a_request(after=(first,)))
    change(service, job, Verb.HOLD)
    end(service, first)
    assert reason(service, job)[0] == "held-back"
    assert Flag.HELD in service.engine.show(job).job.flags
    change(service, job, Verb.RELEASE)
    assert running(service) == [job]


def test_a_waiting_job_can_be_cancelled(service: Service) -> None:
    [first] = service.submit(a_request())
    [second] = service.submit(a_request(after=(first,)))
    [third] = service.submit(a_request(after=(second,)))
    change(service, second, Verb.CANCEL)
    assert service.engine.show(second).cause == "cancelled by its owner"
    assert sorted(running(service)) == [first, third]


def test_commands_of_one_batch_leave_conditions_as_they_are(service: Service) -> None:
    [first] = service.submit(a_request())
    [job] = service.submit(a_request(after=(first,)))
    for verbs, code in (
        ("hold release", "dependency"),
        ("release hold release", "dependency"),
        ("hold release hold", "held-back"),
        ("release", "dependency"),
    ):
        for verb in verbs.split():
            service.engine.change(ALICE, job, Verb(verb))
        service.settle()
        check_standing(service)
        assert running(service) == [first]
        assert reason(service, job)[0] == code, verbs


@pytest.mark.parametrize("policy", ["fifo", "max-min"])
def test_conditions_hold_over_restarts_and_other_policies(policy: str, tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo", cluster="v100:4")
    [first] = service.submit(a_request())
    waiting = [*service.submit(a_request(after=(first,)), a_request(begin=1_400.0)), *array(service, 3, 1)]
    change(service, waiting[-1], Verb.HOLD)
    for _ in range(2):
        service.restart()
        service.settle()
        check_standing(service)
        service.call(lambda engine: engine.set_policy(ALICE, policy))
        service.pass_time(20)
        check_standing(service)
        codes = [reason(service, job)[0] for job in waiting]
        assert codes == ["dependency", "begin-time", "running", "array-cap", "held-back"]
    end(service, waiting[2])
    assert running(service) == [first, waiting[3]]
    change(service, waiting[-1], Verb.RELEASE)
    finish_all(service)
    check_books(service, [first, *waiting])


def test_a_restart_lets_nobody_in_anew(tmp_path: Path) -> None:
    """A job that has its turn and waits for GPUs keeps it, though one comes before it that has lost its own by a hold."""
    service = Service(tmp_path, policy="fifo", cluster="v100:1")
    [first] = service.submit(a_request())
    array(service, 2, 1)
    for verb in (Verb.HOLD, Verb.RELEASE):
        change(service, "2", verb)
    assert [reason(service, job)[0] for job in ("2", "3")] == ["array-cap", "capacity"]
    last = service.loop.store.last
    service.restart()
    service.settle()
    check_standing(service)
    assert [reason(service, job)[0] for job in ("2", "3")] == ["array-cap", "capacity"]
    assert service.loop.store.last == last
    end(service, first)
    assert running(service) == ["3"]


def test_conditions_are_found_again_from_the_records_alone(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an upgrade to a Poise that decides differently: the journal cannot be replayed."""
    [first] = service.submit(a_request())
    jobs = [*service.submit(a_request(after=(first,)), a_request(begin=1_400.0)), *array(service, 3, 1)]
    codes = [reason(service, job)[0] for job in jobs]

    def differs(*_: object) -> None:
        raise ReplayError("it differs")

    monkeypatch.setattr(recovery, "replay", differs)
    service.restart()
    monkeypatch.undo()
    service.settle()
    check_standing(service)
    assert [reason(service, job)[0] for job in jobs] == codes
    assert running(service) == [first, jobs[2]]
    finish_all(service)
    check_books(service, [first, *jobs])


def test_a_job_whose_row_was_damaged_has_failed_for_those_that_wait_for_it(service: Service) -> None:
    [first] = service.submit(a_request(hold=True))
    [never] = service.submit(a_request(after=(f"{first}:succeeded",)))
    [then] = service.submit(a_request(after=(first,)))
    with closing(sqlite3.connect(service.directory / FILE)) as db, db:
        db.execute("UPDATE jobs SET record = 'x' WHERE id = ?", (first,))
    service.restart()
    service.settle()
    check_standing(service)
    assert [state(service, job) for job in (first, never)] == [JobState.FAILED, JobState.CANCELLED]
    assert running(service) == [then]


def test_before_there_is_any_node_conditions_are_kept(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo", cluster="")
    jobs = [*service.submit(a_request(hold=True)), *service.submit(a_request(after=("1",))), *array(service, 2, 1)]
    service.restart()
    service.machine.say(Node("gpu-a", "v100", 4))
    service.settle()
    check_standing(service)
    assert running(service) == [jobs[2]]
    assert [reason(service, job)[0] for job in jobs] == ["held-back", "dependency", "running", "array-cap"]


def test_a_lost_node_gives_no_turn_away(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo", cluster="")
    service.machine.say(Node("gpu-a", "v100", 1))
    service.machine.say(Node("gpu-b", "v100", 1))
    service.settle()
    array(service, 2, 1)
    assert running(service) == ["1"]
    lost = next(iter(service.machine.alive.values())).gpus[0].node
    service.machine.say(lost, NodeState.LOST, "silent")
    service.settle()
    assert "2" not in running(service)
    service.machine.bury()
    service.pass_time(1)
    assert running(service) == ["1"]
    check_standing(service)


@pytest.mark.parametrize(
    "given", [{"deadline": 999.0}, {"deadline": 1_000.0}], ids=["passed", "now"]
)  # fmt: skip
def test_a_deadline_that_has_passed_is_refused(given: dict[str, float], service: Service) -> None:
    with pytest.raises(
        RequestRefusedError, match=r"^deadline: 1970-01-01 00:16:.*Z has passed; here it is 1970-01-01 00:16:40Z$"
    ):
        service.engine.submit(ALICE, Submission(jobs=(a_request(**given),)))


def test_a_deadline_reaches_the_core_in_seconds_of_its_clock_and_stays_over_chapters(service: Service) -> None:
    near, far, none = service.submit(a_request(deadline=1_100.5), a_request(deadline=2_000.0), a_request())
    for _ in range(2):
        assert [_deadline(service, job) for job in (near, far, none)] == [1_100.5, 2_000.0, float("inf")]
        service.restart()
        service.call(lambda engine: engine.set_policy(ALICE, "las"))


def _deadline(service: Service, job: str) -> float:
    core = service.loop.state.scheduler.state
    return core.columns.deadline[core.rows[job]]


@pytest.mark.parametrize("urgent", [0, 1])
def test_a_policy_with_deadlines_sees_those_of_live_jobs(urgent: int, tmp_path: Path) -> None:
    """`min-cost` keeps deadlines: of two jobs that are alike, the one that has a deadline gets the fast GPU."""
    service = Service(tmp_path, policy="min-cost", cluster="k80:1,v100:1")
    alike = {"model": "resnet50", "batch_size": 64, "duration": 3_000.0}
    deadlines = [{"deadline": 1_000.0 + 3_300.0} if place == urgent else {} for place in range(2)]
    jobs = service.submit(*[a_request(**alike, **each) for each in deadlines])
    service.pass_time(30)
    assert service.engine.show(jobs[urgent]).job.gpu_type == "v100"
    assert service.engine.show(jobs[1 - urgent]).job.gpu_type != "v100"
