"""What runs report of their losses: the core hears enough of it, and the journal does not grow for ever."""

from itertools import pairwise
from pathlib import Path

import pytest
from tests.machine import Service, a_request

from poise.engine.journal import read_entry
from poise.scheduler.model.event import Progressed
from poise.service.backends.api import RunProgressed

DAY = 86_400.0


def report(service: Service, job: str, loss: float) -> None:
    machine = service.machine
    epoch = next(epoch for name, epoch in machine.alive if name == job)
    machine.tell(RunProgressed(job, epoch, machine.wall, 1.0, None, 1.0, 1.0, loss))


def told(service: Service, first: int = 1) -> list[float]:
    """Moments at which the core was told of a loss."""
    entries = map(read_entry, service.loop.store.entries(first))
    return [entry.now for entry in entries if any(isinstance(event, Progressed) for event in entry.events)]


def test_a_job_that_reports_its_loss_for_days_takes_a_bounded_part_of_the_journal(tmp_path: Path) -> None:
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


def test_a_restart_does_not_begin_anew_with_all_reports(tmp_path: Path) -> None:
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
