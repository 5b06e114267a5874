"""News of runs: when they may be asked to leave, what ended while the service was down, and reports of their loss."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.machine import ALICE, LingeringBackend, Service, a_request
from tests.machine_laws import check_books

from poise.engine.journal import read_entry
from poise.scheduler.model.event import Belated, Progressed
from poise.service.backends.api import RunEnding, RunProgressed
from poise.service.wire.views import JobState

# When a run may be asked to leave: once it has attached, at any time, or never.


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_a_job_that_never_yields_is_not_preempted(service: Service) -> None:
    first, second = service.submit(a_request(gpus=2, preemption="never"), a_request(gpus=2))
    for _ in range(10):
        service.pass_time(10)
    assert service.engine.show(first).preemptions == 0
    assert service.engine.show(second).job.started is None


def test_a_script_that_does_not_use_poise_is_not_preempted(service: Service) -> None:
    service.machine.unaware.add("1")
    first, second = service.submit(a_request(gpus=2), a_request(gpus=2))
    for _ in range(10):
        service.pass_time(10)
    assert service.engine.show(first).preemptions == 0
    assert service.engine.show(second).job.started is None
    assert (
        "it is not preempted: it has not reported that it did a step and can save it" in service.engine.why(first).evidence
    )
    assert f"held by job {first} (tenant alice, 2 v100, not preempted)" in service.engine.why(second).evidence


def test_a_job_with_preemption_restart_is_preempted_without_having_attached(service: Service) -> None:
    service.machine.unaware.add("1")
    first, second = service.submit(a_request(gpus=2, preemption="restart"), a_request(gpus=2))
    for _ in range(3):
        service.pass_time(10)
    assert service.engine.show(first).preemptions >= 1
    assert service.engine.show(second).job.started is not None


@pytest.mark.parametrize(
    ("steps", "checkpoint", "throughput", "is_attached"),
    [(0.0, 0.0, None, False), (1.0, None, 2.0, False), (1.0, 0.0, None, True), (0.0, 0.0, 2.0, True)],
)
def test_a_run_is_attached_once_it_has_done_a_step_and_can_save(
    service: Service, steps: float, checkpoint: float | None, throughput: float | None, is_attached: bool
) -> None:
    service.machine.unaware.add("1")
    [job] = service.submit(a_request(gpus=2))
    service.machine.report(job, steps=steps, checkpoint=checkpoint, throughput=throughput)
    service.settle()
    run = service.loop.state.records[job].current
    assert run is not None
    assert (run.attached is not None) == is_attached
    service.restart()
    assert service.loop.state.records[job].current == run


def test_a_job_that_saved_nothing_when_preempted_is_not_preempted_again_before_it_saves(tmp_path: Path) -> None:
    service = Service(tmp_path, backend=LingeringBackend)
    first, second = service.submit(a_request(gpus=2), a_request(gpus=2))
    machine = service.machine
    service.pass_time(10)
    assert machine.leaving == {(first, 1)}
    machine.end(first, RunEnding.FAILED, cause="model-checkpoint-error", code=73)
    service.settle()
    service.pass_time(10)
    machine.end(second, RunEnding.YIELDED, steps=1.0)
    service.settle()
    for _ in range(5):
        service.pass_time(10)
    assert list(machine.alive) == [(first, 2)]
    assert not machine.leaving
    machine.report(first, steps=3.0, checkpoint=2.0, throughput=1.0)
    service.settle()
    service.pass_time(10)
    assert machine.leaving == {(first, 2)}


# Late news: runs that ended while the service was down are processed as of their end, before any decision.


def test_a_crash_between_late_news_and_the_decision_after_it_delays_no_start(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo")
    first, second = service.submit(a_request(gpus=2), a_request(gpus=2))
    service.loop.backend.close()
    service.machine.end(first, RunEnding.FINISHED)
    service.machine.now += 100
    service.restart()
    last = read_entry(list(service.loop.store.entries(1))[-1])
    assert isinstance(last.events[0], Belated)  # the news was kept, and nothing was decided yet
    service.restart()
    service.settle()
    assert [job for job, _ in service.machine.alive] == [second]


@pytest.mark.parametrize("policy", ["fifo", "las"], ids=["the same", "another"])
def test_a_run_that_ended_while_the_service_was_down_is_charged_until_it_ended(policy: str, tmp_path: Path) -> None:
    """Also if the service comes back under another policy, and if a round has ended meanwhile."""
    service = Service(tmp_path, policy="fifo")
    first, second = service.submit(a_request(), a_request())
    service.pass_time(3)
    service.loop.backend.close()
    service.machine.end(first, RunEnding.FINISHED)
    service.machine.now += 100
    service.policy = policy
    service.restart()
    service.settle()
    assert service.engine.show(first).gpu_seconds == pytest.approx(3)
    assert [job for job, _ in service.machine.alive] == [second]
    service.machine.end(second, RunEnding.FINISHED)
    service.settle()
    check_books(service, [first, second])


def test_a_report_without_a_journal_entry_does_not_delay_the_end_reported_after_it(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2))
    service.pass_time(3)
    tell, service.machine.tell = service.machine.tell, lambda _news: None
    service.machine.end(job, RunEnding.FINISHED)
    service.machine.now += 50
    tell(RunProgressed(job, 1, service.machine.wall, 5.0, None, 0.0, 1.0, None))
    service.loop.turn(0.0)
    tell(service.machine.ended[job, 1])
    service.settle()
    assert service.engine.show(job).gpu_seconds == pytest.approx(6)


def test_work_lost_while_the_service_was_down_is_counted(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2))
    service.pass_time(4)
    tell, service.machine.tell = service.machine.tell, lambda _news: None
    service.machine.end(job, RunEnding.FAILED, cause="killed")
    service.machine.now += 50
    tell(RunProgressed(job, 1, service.machine.wall - 50, 4.0, None, 1.0, 1.0, None))
    tell(replace(service.machine.ended[job, 1], steps=1.0))
    service.settle()
    assert service.engine.show(job).runs[0].lost == pytest.approx(2 * 4 * 3 / 4)


def test_news_from_before_a_chapter_is_dated_at_its_beginning(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2))
    service.machine.now += 100
    reply = service.engine.set_weight(ALICE, "alice", 2.0)
    service.machine.end(job, RunEnding.FINISHED)
    late = service.machine.ended[job, 1]
    service.machine.tell = lambda _news: None
    service.loop.turn(0.0)  # the news of it is on its way
    reply.result(0)
    service.machine.now += 50
    service.loop._inbox.put(late)
    service.settle()
    moments = [read_entry(document).now for document in service.loop.store.entries(1)]
    assert moments == sorted(moments)
    assert service.engine.show(job).job.state is JobState.SUCCEEDED


# What runs report of their losses: the core hears enough of it, and the journal does not grow for ever.


DAY = 86_400.0


def report(service: Service, job: str, loss: float) -> None:
    machine = service.machine
    epoch = next(epoch for name, epoch in machine.alive if name == job)
    machine.tell(RunProgressed(job, epoch, machine.wall, 1.0, None, 1.0, 1.0, loss))


def told(service: Service, first: int = 1) -> list[float]:
    """Moments at which the core was told of a loss."""
    entries = map(read_entry, service.loop.store.entries(first))
    return [entry.now for entry in entries if any(isinstance(event, Progressed) for event in entry.events)]


@pytest.mark.slow
def test_a_job_that_reports_its_loss_for_days_takes_few_journal_entries(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo")
    [job] = service.submit(a_request())
    began = service.machine.now
    while service.machine.now < began + 3 * DAY:
        service.machine.now += 30.0
        report(service, job, 1.0)
        service.loop.turn(0.0)
    moments = [moment - began for moment in told(service)]
    assert len(moments) < 130  # of 8,640
    assert moments[:10] == pytest.approx([30.0 * number for number in range(1, 11)])  # at first all of them
    assert all(later - earlier <= max(60.0, later / 15 + 30.0) for earlier, later in pairwise(moments))
    assert service.engine.show(job).loss == 1.0
    assert moments[-1] > 2.8 * DAY


def test_a_restart_does_not_repeat_reports_of_loss(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo")
    [job] = service.submit(a_request())
    service.machine.now += DAY
    service.restart()
    first = service.loop.store.last + 1
    for _ in range(100):
        service.machine.now += 30.0
        report(service, job, 1.0)
        service.loop.turn(0.0)
    assert len(told(service, first)) == 1
