"""Holds lose no work without being asked to, and GPUs are shown as free only once all processes have left them."""

from pathlib import Path

import pytest
from tests.machine import ALICE, LingeringBackend, Service, a_request
from tests.machine_laws import check_books, check_standing, finish_all

from poise.service.backends.api import RunEnding
from poise.service.server.service_api import Verb
from poise.service.wire.views import CommandResult, Flag, JobState, NodeRow


@pytest.fixture
def slow(tmp_path: Path) -> Service:
    """Runs that are asked to leave take their time."""
    return Service(tmp_path, backend=LingeringBackend, cluster="v100:2")


def unaware(service: Service, **given: str) -> str:
    """A job that runs, and reports nothing of itself."""
    service.machine.unaware.add("1")
    [job] = service.submit(a_request(gpus=2, **given))
    assert job == "1"
    return job


def held(service: Service, job: str) -> CommandResult:
    answer: CommandResult = service.call(lambda engine: engine.change(ALICE, job, Verb.HOLD))
    check_standing(service)
    return answer


def node(service: Service) -> NodeRow:
    return service.engine.nodes().nodes[0]


ASKED = "asks it to save and to leave, with TERM at its deadline of 1m00s: what it has not saved by then is lost"
ENDED = "sends it TERM now: what it has not saved itself is lost"


@pytest.mark.parametrize(("given", "costs"), [({}, ASKED), ({"preemption": "never"}, ENDED)])
def test_a_hold_on_a_job_that_cannot_save_is_deferred_and_every_view_says_so(
    slow: Service, given: dict[str, str], costs: str
) -> None:
    job = unaware(slow, **given)
    answer = held(slow, job)
    assert answer.state is JobState.RUNNING
    assert answer.text is not None
    assert answer.text.startswith("it goes on and keeps its GPUs: it is held ")
    assert answer.text.endswith(f"; poise hold --stop {job} {costs}")
    assert not slow.machine.leaving
    assert (node(slow).free, node(slow).jobs) == (0, (job, job))
    row = slow.engine.show(job).job
    assert (row.state, row.gpus) == (JobState.RUNNING, 2)
    assert Flag.HELD in row.flags
    why = slow.engine.why(job)
    assert "will be held" in why.reason.text
    assert why.reason == row.reason
    assert why.advice is not None
    assert f"poise hold --stop {job} {costs}" in why.advice
    assert f"poise release {job}" in why.advice
    [event] = [
        each for each in slow.engine.events(after=0, job=job, tenant="alice", limit=100).events if each.kind == "held"
    ]
    assert event.actor == "alice"


def test_a_deferred_hold_frees_no_gpus(slow: Service) -> None:
    job = unaware(slow)
    held(slow, job)
    [other] = slow.submit(a_request(gpus=2))
    for _ in range(5):
        slow.pass_time(10)
        check_standing(slow)
    assert slow.engine.show(other).job.state is JobState.PENDING
    assert slow.engine.show(job).gpu_seconds == pytest.approx(2 * 50)


def test_release_lifts_a_deferred_hold(slow: Service) -> None:
    job = unaware(slow)
    held(slow, job)
    answer = slow.call(lambda engine: engine.change(ALICE, job, Verb.RELEASE))
    assert (answer.state, answer.text) == (JobState.RUNNING, "it goes on, and is no longer to be held")
    slow.pass_time(100)
    check_standing(slow)
    assert (len(slow.engine.show(job).runs), slow.machine.leaving) == (1, set())
    assert Flag.HELD not in slow.engine.show(job).job.flags
    slow.machine.end(job, RunEnding.FINISHED)
    slow.settle()
    check_books(slow, [job])


def test_a_deferred_hold_takes_effect_once_the_job_can_save(slow: Service) -> None:
    job = unaware(slow)
    held(slow, job)
    slow.machine.report(job, steps=3.0, checkpoint=0.0, throughput=1.0)
    slow.settle()
    check_standing(slow)
    assert slow.machine.leaving == {(job, 1)}
    assert slow.engine.show(job).job.state is JobState.CHECKPOINTING
    slow.machine.end(job, RunEnding.YIELDED, steps=3.0)
    slow.settle()
    check_standing(slow)
    assert slow.engine.show(job).job.state is JobState.PAUSED
    assert slow.engine.why(job).advice == f"poise release {job}"


def test_a_job_that_is_never_preempted_is_not_held_because_it_can_save(slow: Service) -> None:
    job = unaware(slow, preemption="never")
    held(slow, job)
    slow.machine.report(job, steps=3.0, checkpoint=0.0, throughput=1.0)
    slow.settle()
    check_standing(slow)
    assert not slow.machine.leaving


def test_a_deferred_hold_takes_effect_when_the_run_fails(slow: Service) -> None:
    job = unaware(slow)
    held(slow, job)
    slow.machine.end(job, RunEnding.FAILED, cause="killed", code=-9)
    slow.settle()
    for _ in range(5):
        slow.pass_time(10)
        check_standing(slow)
    detail = slow.engine.show(job)
    assert (detail.job.state, len(detail.runs), node(slow).free) == (JobState.PAUSED, 1, 2)
    assert Flag.HELD in detail.job.flags


def test_a_job_that_ends_under_a_deferred_hold_has_ended(slow: Service) -> None:
    job = unaware(slow)
    held(slow, job)
    slow.machine.end(job, RunEnding.FINISHED)
    slow.settle()
    assert slow.engine.show(job).job.state is JobState.SUCCEEDED
    check_books(slow, [job])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "it is asked to save and to leave, with TERM at its deadline of 1m00s: what it has not saved by then is lost"),
        ({"preemption": "never"}, "it gets TERM now: what it has not saved itself is lost"),
    ],
)
def test_stop_says_what_is_lost_and_gpus_are_shown_as_held_until_the_run_is_gone(
    slow: Service, given: dict[str, str], said: str
) -> None:
    job = unaware(slow, **given)
    held(slow, job)
    answer = slow.call(lambda engine: engine.change(ALICE, job, Verb.STOP))
    check_standing(slow)
    assert answer.text == said
    assert (node(slow).free, node(slow).jobs, node(slow).leaving) == (0, (None, None), (job, job))
    assert "until it is gone it keeps 2 GPUs" in slow.engine.why(job).reason.text
    slow.machine.end(job, RunEnding.YIELDED)
    slow.settle()
    check_standing(slow)
    assert (node(slow).free, node(slow).leaving) == (2, (None, None))


def test_a_hold_with_preemption_restart_says_what_it_costs(slow: Service) -> None:
    job = unaware(slow, preemption="restart")
    answer = held(slow, job)
    assert (answer.state, answer.text) == (
        JobState.CHECKPOINTING,
        "it gets TERM now, as --preemption restart has it: what it has not saved itself is lost",
    )


def test_a_hold_on_a_job_that_can_save_takes_effect_at_once(slow: Service) -> None:
    [job] = slow.submit(a_request(gpus=2))
    answer = held(slow, job)
    assert (answer.state, answer.text) == (JobState.CHECKPOINTING, "it is asked to save its work and to leave")


@pytest.mark.parametrize("wait", [0, 30])
def test_a_deferred_hold_survives_a_crash_and_another_policy(slow: Service, wait: float) -> None:
    job = unaware(slow)
    held(slow, job)
    slow.restart()
    check_standing(slow)
    slow.call(lambda engine: engine.set_policy(ALICE, "fifo"))
    check_standing(slow)
    slow.pass_time(wait)
    assert Flag.HELD in slow.engine.show(job).job.flags
    assert not slow.machine.leaving
    slow.machine.end(job, RunEnding.FAILED, cause="killed", code=-9)
    slow.settle()
    slow.pass_time(100)
    check_standing(slow)
    assert slow.engine.show(job).job.state is JobState.PAUSED
    slow.engine.change(ALICE, job, Verb.RELEASE)
    slow.settle()
    finish_all(slow)
    check_books(slow, [job])


def test_commands_of_one_batch_take_effect_in_their_order(slow: Service) -> None:
    job = unaware(slow)
    for verbs, is_held, leaves in (
        (("hold", "release"), False, False),
        (("hold", "release", "hold"), True, False),
        (("release", "hold", "release"), False, False),
        (("hold", "stop", "release", "hold"), True, True),
    ):
        for verb in verbs:
            slow.engine.change(ALICE, job, Verb(verb))
        slow.settle()
        check_standing(slow)
        assert (Flag.HELD in slow.engine.show(job).job.flags, bool(slow.machine.leaving)) == (is_held, leaves), verbs


def test_gpus_of_a_cancelled_job_are_shown_as_held_until_its_run_is_gone(slow: Service) -> None:
    [job] = slow.submit(a_request(gpus=2))
    slow.call(lambda engine: engine.change(ALICE, job, Verb.CANCEL))
    [other] = slow.submit(a_request(gpus=1, gpu_types=("v100",)))
    check_standing(slow)
    assert (node(slow).free, node(slow).leaving) == (0, (job, job))
    slow.machine.end(job, RunEnding.YIELDED)
    slow.settle()
    check_standing(slow)
    assert (node(slow).free, node(slow).jobs) == (1, (other, None))
