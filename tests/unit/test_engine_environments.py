"""Environments that come with submissions: kept once and to themselves, given to runs, and gone when no job needs them."""

import os
import stat
from pathlib import Path

import pytest
from tests.machine import ALICE, BOB, Service, a_request

from poise.scheduler.model.errors import RequestError
from poise.service.backends.api import RunEnding
from poise.service.server.quotas import Allowance
from poise.service.server.service_api import RefusalCode, RequestRefusedError
from poise.service.server.shipped_archives import GRACE
from poise.service.wire.environments import sha256_of, text_of
from poise.service.wire.request import MOST_ENVIRONMENT, JobRequest, Submission
from poise.service.wire.views import JobState

SHELL = {"SEED": "1", "WANDB_API_KEY": "hunter2"}


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def kept(service: Service) -> list[Path]:
    return sorted((service.directory / "files").rglob("*.json"))


def env_of(service: Service, job: str) -> dict[str, str]:
    [order] = [order for (name, _), order in service.machine.alive.items() if name == job]
    assert order.request.exported is None
    return order.request.env


def test_runs_get_it_below_what_the_job_is_given_also_after_a_restart(service: Service) -> None:
    [job, later] = service.submit(a_request(env={"SEED": "2"}, gpus=2), a_request(gpus=2), exported=SHELL)
    assert env_of(service, job) == SHELL | {"SEED": "2"}
    service.restart()
    assert env_of(service, job) == SHELL | {"SEED": "2"}
    service.machine.end(job, RunEnding.FINISHED)
    service.settle()
    assert env_of(service, later) == SHELL


def test_a_submission_that_is_repeated_from_another_shell_is_the_same_and_keeps_its_environment(service: Service) -> None:
    [job] = service.submit(a_request(), exported=SHELL, key="the-same-key")
    assert service.submit(a_request(), exported={"SEED": "9"}, key="the-same-key") == [job]
    assert service.submit(a_request(), key="the-same-key") == [job]
    assert env_of(service, job) == SHELL
    with pytest.raises(RequestRefusedError, match="other jobs were submitted under it"):
        service.submit(a_request(env={"SEED": "9"}), exported=SHELL, key="the-same-key")


def test_a_thousand_jobs_keep_one_copy_that_nobody_else_can_read(service: Service) -> None:
    service.submit(*[a_request(gpus=2)] * 100, exported=SHELL)
    service.submit(a_request(), exported=dict(reversed(SHELL.items())))
    [path] = kept(service)
    assert (path.read_text(), path.parent.name) == (text_of(SHELL), ALICE.tenant)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_values_are_nowhere_in_the_journal_and_in_no_answer(service: Service) -> None:
    [job] = service.submit(a_request(), exported=SHELL)
    service.loop.store.checkpoint()
    for path in service.directory.glob("journal.db*"):
        assert b"hunter2" not in path.read_bytes()
    shown = service.engine.show(job)
    assert shown.request is not None
    assert shown.request.exported == sha256_of(text_of(SHELL))
    assert "hunter2" not in shown.model_dump_json()
    assert "hunter2" not in service.engine.events(after=0, job=job, tenant=None, limit=100).model_dump_json()


def test_what_a_job_would_run_with_is_checked_at_submission(tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []

    def check(request: JobRequest) -> None:
        seen.append(request.env)
        if request.env.get("PATH") == "/nowhere":
            raise RequestError("command: no program 'train' in the PATH of the job")

    service = Service(tmp_path, check=check)
    service.submit(a_request(env={"A": "1"}), exported=SHELL)
    assert seen == [SHELL | {"A": "1"}]
    with pytest.raises(RequestRefusedError, match="in the PATH of the job"):
        service.submit(a_request(), exported={"PATH": "/nowhere"})
    with pytest.raises(RequestError, match=r"^env: more than 500 variables and 65,536 characters, with what is exported"):
        service.submit(a_request(env={"B": "x"}), exported={"A": "x" * (MOST_ENVIRONMENT - 1)})
    assert len(kept(service)) == 1


def test_a_job_that_names_an_environment_which_its_submission_lacks_is_refused(service: Service) -> None:
    service.submit(a_request(), exported=SHELL)
    stolen = a_request(exported=sha256_of(text_of(SHELL)))
    for by in (ALICE, BOB):  # also one that the service has: who knows its name need not know what is in it
        with pytest.raises(RequestRefusedError, match=r"^exported: no environment of the submission has this SHA-256$"):
            service.engine.submit(by, Submission(jobs=(stolen,)))


def test_tenants_have_their_own_copies_within_their_bounds(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=Allowance(tenant_bytes=5_000))
    service.submit(a_request(), exported={"A": "x" * 3_000})
    service.submit(a_request(), exported={"A": "x" * 3_000})
    with pytest.raises(RequestRefusedError, match=f"^tenant {ALICE.tenant} keeps 0.0 MiB of files") as refused:
        service.submit(a_request(), exported={"A": "y" * 3_000})
    assert refused.value.fault is RefusalCode.QUOTA
    service.submit(a_request(), exported={"A": "y" * 3_000}, by=BOB)
    assert {path.parent.name for path in kept(service)} == {ALICE.tenant, BOB.tenant}


def test_it_is_gone_some_time_after_the_last_job_that_needs_it(service: Service) -> None:
    [needed] = service.submit(a_request(hold=True), exported={"A": "needed"})
    [over] = service.submit(a_request(), exported={"A": "over"})
    service.machine.end(over, RunEnding.FINISHED)
    service.settle()
    for path in kept(service):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - GRACE - 60))
    service.submit(a_request(), exported={"A": "new"})
    assert {path.read_text() for path in kept(service)} == {text_of({"A": "needed"}), text_of({"A": "new"})}
    assert service.engine.show(needed).job.state is JobState.PENDING


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_job_whose_environment_is_lost_does_not_run_without_it(service: Service, is_damaged: bool) -> None:
    [running, waiting] = service.submit(a_request(gpus=2), a_request(gpus=2), exported=SHELL)
    [path] = kept(service)
    if is_damaged:
        path.write_text(text_of({"SEED": "3"}))
    else:
        path.unlink()
    service.restart()
    assert service.machine.alive  # what runs has it
    service.machine.end(running, RunEnding.FINISHED)
    service.settle()
    found = service.engine.show(waiting)
    assert found.job.state is JobState.FAILED
    assert {run.cause for run in found.runs} == {"environment-missing"}
    assert not service.machine.alive
