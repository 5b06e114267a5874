"""Apps in the live engine: a stranger's app of the same name is another app, whatever its jobs report."""

from pathlib import Path

from tests.machine import ALICE, BOB, Service, a_request

from poise.scheduler.core.settings import Settings
from poise.service.backends.api import RunProgressed
from poise.service.wire.views import Account, JobState

GOOD, BAD = (0.001, 0.002), (0.5, 0.6)


def judged(tmp_path: Path, *owners: Account) -> list[JobState]:
    """Four jobs of the app `sweep`, by their owners; the first two report far larger losses. What becomes of each.

    They report at 300 of 1,000 steps: beyond the first rung of four jobs (250), before the only one of two (500).
    """
    service = Service(tmp_path, policy="themis", cluster="v100:4", settings=Settings(round=10.0))
    request, machine = a_request(duration=1_000.0, app="sweep"), service.machine
    jobs = [job for owner in owners for job in service.submit(request, by=owner)]
    for (job, epoch), loss in zip(list(machine.alive), (*BAD, *GOOD), strict=True):
        machine.tell(RunProgressed(job, epoch, machine.wall, 300.0, 1_000.0, 300.0, 1.0, loss))
        service.settle()
    for _ in range(40):
        service.pass_time(10.0)
    return [service.engine.show(job).job.state for job in jobs]


def test_a_stranger_with_an_app_of_the_same_name_gets_no_job_of_its_owner_cancelled(tmp_path: Path) -> None:
    assert judged(tmp_path, ALICE, ALICE, BOB, BOB) == [JobState.RUNNING] * 4


def test_jobs_of_one_owner_are_given_up_on_the_same_reports(tmp_path: Path) -> None:
    assert judged(tmp_path, ALICE, ALICE, ALICE, ALICE) == [JobState.CANCELLED] * 2 + [JobState.RUNNING] * 2
