"""The engine at its edges: late and simultaneous news, work that is lost, many jobs, jobs that share GPUs."""

from pathlib import Path

import pytest
from tests.machine import ALICE, BOB, LingeringBackend, Service, a_request
from tests.machine_laws import check_books, check_standing, finish_all

from poise.engine.journal import read_entry
from poise.scheduler.model.event import Belated, Colocated, Estimated
from poise.scheduler.model.job_table import JobView
from poise.service.backends.api import RunEnding, RunProgressed
from poise.service.server import batch as batch_module
from poise.service.server import engine as engine_module
from poise.service.server.admission import MOST_KINDS
from poise.service.server.service_api import RequestRefusedError, Verb
from poise.service.wire.request import JobRequest, Submission
from poise.service.wire.views import JobState


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


@pytest.fixture
def slow(tmp_path: Path) -> Service:
    """Runs take their time to leave."""
    return Service(tmp_path, backend=LingeringBackend)


def two_that_restart(**more: object) -> tuple[JobRequest, JobRequest]:
    """Jobs that may be preempted before they have begun."""
    given = {"gpus": 2, "preemption": "restart", "checkpoint": {"deadline": 600}} | more
    return a_request(**given), a_request(**given)


def until_launched_again(slow: Service, job: str) -> None:
    """Its first run is still leaving, its second one never began, and its third one waits."""
    while slow.loop.state.records[job].launches < 3:
        slow.pass_time(10)
        assert slow.machine.now < 2_000


# News that crosses with decisions


def test_a_job_ends_when_a_run_finishes_after_two_later_launches(slow: Service) -> None:
    jobs = slow.submit(*two_that_restart())
    first = jobs[0]
    until_launched_again(slow, first)
    assert list(slow.machine.alive) == [(first, 1)]  # it still writes its checkpoint
    slow.machine.end(first, RunEnding.FINISHED)
    slow.settle()
    check_standing(slow)
    assert slow.engine.show(first).job.state is JobState.SUCCEEDED
    finish_all(slow)
    check_books(slow, jobs)


def test_a_job_goes_on_from_what_an_earlier_run_saved_after_a_later_launch(slow: Service) -> None:
    first, _ = slow.submit(*two_that_restart(steps=100, duration=100))
    until_launched_again(slow, first)
    state = slow.loop.state.scheduler.state
    slow.machine.end(first, RunEnding.YIELDED, steps=42.0)
    slow.settle()
    assert state.columns.steps_done[state.rows[first]] == 42
    assert slow.engine.show(first).runs[-1].begun == 42


@pytest.mark.parametrize("verb", ["hold", "cancel"])
@pytest.mark.parametrize("how", [RunEnding.FINISHED, RunEnding.FAILED])
def test_ends_of_runs_are_processed_before_commands_that_arrive_with_them(
    service: Service, verb: str, how: RunEnding
) -> None:
    [job] = service.submit(a_request(gpus=2))
    service.machine.now += 5
    reply = service.engine.change(ALICE, job, Verb(verb))
    service.machine.end(job, how, cause="traceback-from-crash", code=1)
    service.settle()
    check_standing(service)
    detail = service.engine.show(job)
    if how is RunEnding.FINISHED:
        assert detail.job.state is JobState.SUCCEEDED
        with pytest.raises(RequestRefusedError, match=f"job {job} has ended already"):
            reply.result(0)
    else:
        assert detail.failures == 1
        assert reply.result(0).state is (JobState.PAUSED if verb == "hold" else JobState.CANCELLED)
        if verb == "hold":
            service.engine.change(ALICE, job, Verb.RELEASE)
    finish_all(service)
    check_books(service, [job])


def test_a_clock_that_is_set_back_or_forward_changes_no_charge(service: Service) -> None:
    jobs = []
    for error in (0.0, -5_000.0, 90_000.0):
        service.machine.error = error
        [job] = service.submit(a_request(gpus=2))
        service.pass_time(7)
        service.machine.end(job, RunEnding.FINISHED)
        service.settle()
        assert service.engine.show(job).gpu_seconds == pytest.approx(14)
        jobs.append(job)
    events = (event for document in service.loop.store.entries(1) for event in read_entry(document).events)
    assert not any(isinstance(event, Belated) for event in events)
    check_books(service, jobs)


def test_the_wait_for_a_wake_up_is_bounded(service: Service) -> None:
    service.loop.state.wake = 1e300
    assert service.loop._timeout() == engine_module.LONGEST_WAIT


# What was done, kept and lost


def test_waiting_for_gpus_does_not_count_as_running(service: Service) -> None:
    """`max_duration` bounds that: a job may wait for long until those before it have left."""
    [job] = service.submit(a_request())
    record = service.loop.state.records[job]
    started = record.runs[0].started
    record.runs[0].began = None
    record.release(started + 5)
    assert (record.ran, record.busy) == (5, 0)
    record.runs[0].released, record.runs[0].began = None, started + 2
    record.release(started + 5)
    assert (record.ran, record.busy) == (10, 3)


def test_a_run_that_never_began_has_lost_nothing(slow: Service) -> None:
    first, _ = slow.submit(*two_that_restart())
    machine = slow.machine
    machine.tell(RunProgressed(first, 1, machine.wall, 50.0, 100.0, 30.0, None, None))
    until_launched_again(slow, first)
    detail = slow.engine.show(first)
    assert [run.how for run in detail.runs] == [None, "yielded", None]
    assert (detail.steps, detail.lost_gpu_seconds) == (50.0, 0.0)
    machine.tell(RunProgressed(first, 1, machine.wall, 60.0, 100.0, 30.0, None, None))  # on its way out
    slow.settle()
    assert slow.engine.show(first).steps == 60
    slow.machine.end(first, RunEnding.YIELDED, steps=40.0)
    slow.settle()
    run = slow.engine.show(first).runs[0]
    assert run.lost == pytest.approx(2 * 10 * 20 / 60)  # two GPUs for ten seconds, of which a third was not saved


@pytest.mark.parametrize(
    ("steps", "total", "expected"), [(50.0, None, 100.0), (50.0, 80.0, 80.0), (120.0, None, None), (120.0, 200.0, 200.0)]
)
def test_a_total_that_a_job_has_passed_is_not_shown_any_more(
    service: Service, steps: float, total: float | None, expected: float | None
) -> None:
    [job] = service.submit(a_request(steps=100))
    service.machine.tell(RunProgressed(job, 1, service.machine.wall, steps, total, 0.0, None, None))
    service.settle()
    assert service.engine.show(job).total_steps == expected


def test_gpu_seconds_of_a_running_job_count_until_now(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2))
    service.pass_time(7)
    assert service.engine.show(job).gpu_seconds == pytest.approx(14)
    assert "14 GPU-seconds received" in service.engine.why(job).evidence[0]


def test_a_job_past_its_maximum_duration_fails_whatever_its_exit_code(service: Service) -> None:
    [job] = service.submit(a_request(max_duration=60, retry={"exit_codes": [143]}))
    service.machine.end(job, RunEnding.FAILED, cause="max-duration", code=-15)
    service.settle()
    detail = service.engine.show(job)
    assert (detail.job.state, [flag.value for flag in detail.job.flags]) == (JobState.FAILED, ["TIMEOUT"])


def test_a_starting_job_waits_only_for_runs_on_its_own_gpus(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="v100:2", policy="fifo", backend=LingeringBackend)
    first, second, third = service.submit(a_request(), a_request(), a_request())
    service.call(lambda engine: engine.change(ALICE, first, Verb.HOLD))
    assert service.engine.why(third).reason.text == "waits until those who had its GPUs have left"
    service.machine.end(second, RunEnding.FINISHED)
    service.settle()
    [fourth] = service.submit(a_request())
    assert service.engine.show(fourth).job.state is JobState.RUNNING
    assert service.engine.show(third).job.state is JobState.STARTING


# Many jobs, and many kinds of them


def test_submissions_of_one_batch_count_together_against_the_limit(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "MOST_QUEUED", 5)
    replies = [service.engine.submit(ALICE, Submission(jobs=(a_request(),) * 2)) for _ in range(3)]
    service.settle()
    assert [reply.exception(0) is None for reply in replies] == [True, True, False]
    with pytest.raises(RequestRefusedError, match="4 jobs are queued, of at most 5"):
        replies[2].result(0)


def test_a_batch_holds_no_more_jobs_than_one_large_submission(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MOST_AT_ONCE", 4)
    for size in (3, 3, 5, 1, 1):
        service.engine.submit(ALICE, Submission(jobs=(a_request(),) * size))
    sizes = []
    while not service.loop.is_idle:
        before = len(service.loop.state.records)
        service.loop.turn(0.0)
        sizes.append(len(service.loop.state.records) - before)
    assert [each for each in sizes if each] == [6, 5, 2]


@pytest.mark.parametrize("limit", ["LONG_CHAPTER", "MANY_ENDED"])
def test_a_long_chapter_is_followed_by_another_without_visible_change(
    service: Service, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(engine_module, limit, 5)
    jobs = []
    for _ in range(12):
        jobs += service.submit(a_request(), a_request(), by=BOB)
        service.pass_time(10)
        for job, _ in sorted(service.machine.alive)[:1]:
            service.machine.end(job, RunEnding.FINISHED)
        service.settle()
        check_standing(service)
    assert len(service.loop.store.chapters()) > 2
    finish_all(service)
    check_books(service, jobs)


def test_unknown_model_names_do_not_grow_memory_without_bound(service: Service) -> None:
    admission = service.loop.state.admission
    for number in range(MOST_KINDS + 10):
        admission.admit(a_request(model=f"made-up-{number}"))
    assert len(admission._possible) <= MOST_KINDS
    assert len(admission._speeds._kinds) <= MOST_KINDS + 10
    with pytest.raises(RequestRefusedError, match="needs 3 GPUs"):
        admission.admit(a_request(model="made-up-1", gpus=3))


# Policies that put two jobs on the same GPUs


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Service, list[str]]:
    service = Service(tmp_path, policy="max-min+packed", cluster="v100:1", backend=LingeringBackend)
    known = {"model": "ResNet-18", "batch_size": 128, "duration": 1e4}
    jobs = service.submit(a_request(**known), a_request(**known | {"model": "LM", "batch_size": 80}))
    for _ in range(5):
        service.pass_time(10)
        for job, _ in sorted(service.machine.leaving):
            service.machine.end(job, RunEnding.YIELDED, steps=1.0)  # it has kept something, and may be asked again
        service.settle()
    return service, jobs


def test_jobs_that_gain_by_it_share_gpus(pair: tuple[Service, list[str]]) -> None:
    service, jobs = pair
    assert sorted(job for job, _ in service.machine.alive) == jobs
    assert any(order.beside for order in service.machine.alive.values())
    assert any(isinstance(event, Colocated) for event in read_entry(next(service.loop.store.entries(2))).events)
    service.restart()
    service.settle()
    assert sorted(job for job, _ in service.machine.alive) == jobs
    check_standing(service)


def test_one_of_two_sharing_jobs_leaves_under_a_policy_without_sharing(pair: tuple[Service, list[str]]) -> None:
    service, jobs = pair
    service.call(lambda engine: engine.set_policy(ALICE, "fifo"))
    check_standing(service)
    assert len(service.loop.state.running) == 1
    assert len(service.machine.leaving) == 1
    finish_all(service)
    check_books(service, jobs)


@pytest.mark.parametrize("policy", ["max-min+packed", "max-min", "las", "themis", "optimus"])
def test_sharing_jobs_that_may_not_be_preempted_go_on_in_a_new_chapter(policy: str, tmp_path: Path) -> None:
    service = Service(tmp_path, "max-min+packed", "v100:1")
    models = (("LM", 80), ("Recommendation", 2048), ("A3C", None), ("ResNet-18", 128))
    given = {"preemption": "never", "duration": 5000.0}
    service.submit(*(a_request(model=model, batch_size=batch, **given) for model, batch in models))
    service.pass_time(20)
    alive = sorted(service.machine.alive)
    assert len(alive) == 2
    service.call(lambda engine: engine.set_weight(ALICE, "alice", 2.0))
    service.call(lambda engine: engine.set_policy(ALICE, policy))
    for _ in range(5):
        service.pass_time(10)
    service.restart()
    service.pass_time(10)
    assert sorted(service.machine.alive) == alive
    check_standing(service)
    finish_all(service)


def test_work_done_while_sharing_counts_once_in_a_new_chapter(tmp_path: Path) -> None:
    """A run of 1,000 s at most has done that much at most; what it did before its speed changed was counted twice."""
    service = Service(tmp_path, "max-min+packed", "v100:1")
    given = {"preemption": "never", "duration": 5000.0}
    models = (("LM", 80), ("ResNet-18", 128))
    jobs = service.submit(*(a_request(model=model, batch_size=batch, **given) for model, batch in models))
    service.pass_time(500)
    assert len(service.machine.alive) == 2
    service.machine.end(jobs[1], RunEnding.FINISHED)
    service.pass_time(500)
    assert left(service, jobs[0]) >= 4000
    service.call(lambda engine: engine.set_policy(ALICE, "srtf"))
    assert left(service, jobs[0]) >= 4000


def left(service: Service, job: str) -> float:
    """Seconds that a job is believed to have left at its best."""
    state = service.loop.state.scheduler.state
    return JobView(state.columns, state.rows[job], service.loop.clock.now()).remaining_seconds


def test_speeds_of_a_kind_of_job_are_told_once_per_chapter(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.submit(a_request(), a_request(), a_request(gpus=2))
    service.restart()
    service.submit(a_request())
    service.call(lambda engine: engine.set_policy(ALICE, "fifo"))
    told = [
        [event.kind for event in read_entry(document).events if isinstance(event, Estimated)]
        for document in service.loop.store.entries(1)
    ]
    assert [kinds for kinds in told if kinds] == [["-/x1", "-/x2"], ["-/x1", "-/x2"]]


def test_the_weight_of_a_tenant_without_jobs_takes_no_chapter(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="max-min", cluster="v100:1")
    mine = service.submit(a_request(duration=1e6))[0]
    service.call(lambda engine: engine.set_weight(ALICE, "bob", 3.0))
    assert len(service.loop.store.chapters()) == 1
    service.restart()
    assert {each.tenant: each.weight for each in service.engine.shares().tenants} == {"alice": 1.0, "bob": 3.0}
    theirs = service.submit(a_request(duration=1e6), by=BOB)[0]
    for _ in range(200):
        service.pass_time(10)
    ran = [service.engine.show(job).job.ran for job in (mine, theirs)]
    assert ran[1] / sum(ran) == pytest.approx(0.75, abs=0.05)


def test_gpu_seconds_until_gpus_were_removed_are_charged_to_the_tenant(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="v100:4")
    jobs = service.submit(a_request(gpus=2), a_request(gpus=2))
    service.machine.now += 10
    service.cluster = "v100:2"
    service.restart()
    service.restart()
    service.settle()
    check_standing(service)
    assert service.engine.shares().tenants[0].gpu_seconds == pytest.approx(40)
    finish_all(service)
    check_books(service, jobs)
