"""News of runs that ended while nobody looked: told as of when they did, before anything is decided."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.machine import ALICE, Service, a_request
from tests.machine_laws import check_books

from poise.engine.journal import read_entry
from poise.scheduler.model.event import Belated
from poise.service.backends.api import RunEnding, RunProgressed
from poise.service.wire.views import JobState


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_a_crash_between_late_news_and_the_decision_after_it_delays_nobody(tmp_path: Path) -> None:
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


def test_a_report_that_the_journal_knows_nothing_of_dates_no_end_that_is_told_after_it(service: Service) -> None:
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


def test_work_that_a_run_lost_while_the_service_was_down_is_told(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2))
    service.pass_time(4)
    tell, service.machine.tell = service.machine.tell, lambda _news: None
    service.machine.end(job, RunEnding.FAILED, cause="killed")
    service.machine.now += 50
    tell(RunProgressed(job, 1, service.machine.wall - 50, 4.0, None, 1.0, 1.0, None))
    tell(replace(service.machine.ended[job, 1], steps=1.0))
    service.settle()
    assert service.engine.show(job).runs[0].lost == pytest.approx(2 * 4 * 3 / 4)


def test_news_from_before_a_chapter_is_not_told_as_of_before_it(service: Service) -> None:
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
