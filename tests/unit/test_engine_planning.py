"""What readers see while the core plans, and what becomes of wake-ups that fall due meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.machine import ALICE, LingeringBackend, Service, a_request

from poise.engine.journal import read_entry
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import Progressed
from poise.service.backends.api import BackendFailed, RunEnding
from poise.service.server.service_api import JobFilter, RequestRefusedError
from poise.service.wire.request import Submission

ROUNDS = Settings(cadence=Cadence.ROUNDS, round=10.0, retries=2)


@pytest.fixture
def service(tmp_path: Path) -> Service:
    """There is always a GPU left, so that every arrival is planned for."""
    return Service(tmp_path, policy="max-min", cluster="v100:3", settings=ROUNDS, backend=LingeringBackend)


def while_thinking(service: Service, deed: Callable[[], None]) -> None:
    """Have something done whenever the core thinks."""

    @contextmanager
    def thinking() -> Iterator[None]:
        deed()
        yield

    service.loop.state.scheduler.thinking = thinking


def listed(service: Service) -> list[str]:
    page = service.engine.queue(JobFilter(), limit=100, offset=0)
    assert page.total == len(page.jobs) == sum(page.counts.values())
    return [row.id for row in page.jobs]


def test_readers_see_committed_jobs_once_each_while_the_core_plans(service: Service) -> None:
    jobs = service.submit(a_request(gpus=2), a_request(gpus=2), a_request(gpus=2))
    seen: list[list[str]] = []

    def look() -> None:
        seen.append(listed(service))
        assert [service.engine.show(job).job.id for job in seen[-1]] == seen[-1]
        assert [service.engine.why(job).job for job in seen[-1]] == seen[-1]

    while_thinking(service, look)
    service.submit(a_request(gpus=2))
    service.machine.end(jobs[0], RunEnding.FAILED, cause="killed", code=-9)  # for the core it waits, in the records it runs
    service.settle()
    service.pass_time(10)
    assert len(seen) >= 3
    assert sorted(seen[0]) == jobs
    assert all(len(set(each)) == len(each) for each in seen)


def test_a_round_that_ends_while_the_core_plans_ends_on_time(service: Service) -> None:
    service.submit(a_request(gpus=2), a_request(gpus=2))
    first = service.machine.now
    service.pass_time(6)

    def dawdle() -> None:
        service.machine.now += 8.0

    while_thinking(service, dawdle)
    service.engine.submit(ALICE, Submission(jobs=(a_request(gpus=2),)))
    service.loop.turn(0.0)
    assert service.machine.now > first + 10 + 2
    while_thinking(service, lambda: None)
    service.settle()
    moments = [read_entry(text).now for text in service.loop.store.entries(0)]
    assert any(now == pytest.approx(moments[0] + 10, abs=1e-9) for now in moments)


def test_a_round_that_the_engine_slept_through_is_decided_for_now(service: Service) -> None:
    service.submit(a_request(gpus=2), a_request(gpus=2))
    service.pass_time(6)
    service.pass_time(60)
    moments = [read_entry(text).now for text in service.loop.store.entries(0)]
    assert moments[-1] >= moments[0] + 60


def test_news_that_calls_for_no_decision_costs_no_plan(service: Service) -> None:
    service.submit(a_request(gpus=2), a_request(gpus=2))
    service.pass_time(3)
    service.submit(a_request(gpus=2))
    core = service.loop.state.scheduler
    before = core.decisions
    for moment in range(1, 5):
        core.handle(core.state.origin + 3 + moment / 10, [Progressed("1", 1, float(moment), 1.0 / moment)])  # type: ignore[operator]
    assert core.decisions == before


def test_a_back_end_that_fails_stops_the_engine_and_refuses_commands(service: Service) -> None:
    reply = service.engine.submit(ALICE, Submission(jobs=(a_request(),)))
    service.machine.tell(BackendFailed("ValueError('odd')"))
    with pytest.raises(InvariantError, match=r"back end has stopped: ValueError\('odd'\)"):
        service.loop.turn(0.0)
    with pytest.raises(RequestRefusedError, match="the engine has stopped"):
        reply.result(0)
