"""The life of jobs in the engine, with a fake machine under it: decisions, commits, chapters, restarts."""

from operator import methodcaller
from pathlib import Path

import pytest
from tests.machine import ALICE, BOB, FakeBackend, LingeringBackend, Service, a_request

from poise.engine.journal import read_entry, read_header
from poise.engine.loop import replay
from poise.service.backends.api import RunEnding
from poise.service.server.dependencies import core_of
from poise.service.server.engine import open_orders
from poise.service.server.service_api import JobFilter, RefusalCode, RequestRefusedError, Verb
from poise.service.wire.views import Flag, JobState


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def states(service: Service) -> dict[str, str]:
    page = service.engine.queue(JobFilter(frozenset(JobState)), limit=100, offset=0)
    return {row.id: row.state.value for row in page.jobs}


def test_a_job_that_fits_runs_at_once_and_ends_as_its_processes_do(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2, name="first"))
    assert states(service) == {job: "RUNNING"}
    service.pass_time(5)
    service.machine.end(job, RunEnding.FINISHED, steps=7)
    service.settle()
    detail = service.engine.show(job)
    assert detail.job.state is JobState.SUCCEEDED
    assert detail.gpu_seconds == pytest.approx(10)
    assert detail.job.ran == pytest.approx(5)
    assert detail.job.waited == 0
    assert detail.request == a_request(gpus=2, name="first")


def test_jobs_that_outnumber_the_gpus_share_them_in_rounds(service: Service) -> None:
    jobs = service.submit(*[a_request() for _ in range(3)])
    ran: set[str] = set()
    for _ in range(12):
        service.pass_time(10)
        ran |= {name for name, state in states(service).items() if state == "RUNNING"}
    assert ran == set(jobs)
    times = [service.engine.show(job).job.ran for job in jobs]
    assert max(times) - min(times) <= 20
    assert sum(times) == pytest.approx(240)
    assert any(service.engine.show(job).preemptions for job in jobs)


def test_a_victim_is_told_who_benefits_and_comes_back_by_itself(service: Service) -> None:
    first = service.submit(a_request(gpus=2))[0]
    second = service.submit(a_request(gpus=2, name="newcomer"), by=BOB)[0]
    for _ in range(3):
        service.pass_time(10)
    told = [each.text for each in service.engine.events(after=0, job=first, tenant=None, limit=50).events]
    assert any(f"preempted (outranked): job {second} (newcomer, tenant bob)" in text for text in told)
    assert service.engine.show(first).runs[0].cause == (
        f"preempted (outranked): job {second} (newcomer, tenant bob) stands before it under the policy in force;"
        " it comes back by itself"
    )


def test_a_run_that_finished_before_it_could_be_stopped_is_not_run_again(service: Service) -> None:
    """It does all its work between the request to leave and its end."""
    first, _second = service.submit(a_request(gpus=2), a_request(gpus=2))
    machine = service.machine
    stop = service.loop.backend._stop  # type: ignore[attr-defined]
    service.loop.backend._stop = lambda job, _epoch: machine.end(job, RunEnding.FINISHED)  # type: ignore[attr-defined]
    while (first not in machine.finished) and machine.now < 2_000:
        service.pass_time(10)
    service.loop.backend._stop = stop  # type: ignore[attr-defined]
    service.pass_time(50)
    assert states(service)[first] == "SUCCEEDED"
    assert machine.finished == [first]


def test_cancelling_ends_the_processes_and_gives_the_gpus_to_the_next(service: Service) -> None:
    first, second = service.submit(a_request(gpus=2, preemption="never"), a_request(gpus=2))
    service.call(lambda engine: engine.change(ALICE, first, Verb.CANCEL))
    assert [job for job, _ in service.machine.alive] == [second]
    assert states(service) == {first: "CANCELLED", second: "RUNNING"}


@pytest.mark.parametrize("backend", [FakeBackend, LingeringBackend])
def test_a_command_sent_twice_is_answered_twice_and_done_once(tmp_path: Path, backend: type[FakeBackend]) -> None:
    """A client that gets no answer sends it again: before the engine has looked at it, or after it was done."""
    service = Service(tmp_path, backend=backend)
    [job] = service.submit(a_request(preemption="never"))
    for verb in ("hold", "release", "cancel"):
        replies = [service.engine.change(ALICE, job, Verb(verb)) for _ in range(2)]
        service.settle()
        answers = [*(each.result(0) for each in replies), service.call(methodcaller("change", ALICE, job, Verb(verb)))]
        assert [answer.job for answer in answers] == [job] * 3
        assert (Flag.HELD in service.engine.show(job).job.flags) == (verb == "hold")
    assert {answer.state for answer in answers} == {JobState.CANCELLED}
    assert [each.kind for each in service.engine.events(after=0, job=job, tenant=None, limit=100).events][-1] == "cancelled"
    last = service.loop.store.last
    service.restart()
    assert service.call(lambda engine: engine.change(ALICE, job, Verb.CANCEL)).state is JobState.CANCELLED
    assert service.loop.store.last == last


@pytest.mark.parametrize("verb", ["cancel", "hold", "release"])
def test_commands_for_a_job_that_has_ended_are_a_conflict(service: Service, verb: str) -> None:
    done, broken, withdrawn = service.submit(a_request(), a_request(retry={"on_errors": 0}), a_request())
    service.machine.end(done, RunEnding.FINISHED)
    service.machine.end(broken, RunEnding.FAILED, cause="traceback-from-crash", code=1)
    service.settle()
    service.call(lambda engine: engine.change(ALICE, withdrawn, Verb.CANCEL))
    for job, state in [(done, "SUCCEEDED"), (broken, "FAILED"), *([(withdrawn, "CANCELLED")] if verb != "cancel" else [])]:
        with pytest.raises(RequestRefusedError, match=f"^job {job} is {state} already$") as refused:
            service.call(methodcaller("change", ALICE, job, Verb(verb)))
        assert refused.value.fault is RefusalCode.CONFLICT


def test_a_held_job_leaves_its_gpus_and_returns_when_released(service: Service) -> None:
    first, second = service.submit(a_request(gpus=2), a_request(gpus=2))
    service.call(lambda engine: engine.change(ALICE, first, Verb.HOLD))
    assert states(service) == {first: "PAUSED", second: "RUNNING"}
    why = service.engine.why(first)
    assert (why.reason.code, why.advice) == ("held-back", f"poise release {first}")
    assert Flag.HELD in service.engine.show(first).job.flags
    for _ in range(5):
        service.pass_time(10)
    assert states(service)[first] == "PAUSED"
    service.call(lambda engine: engine.change(ALICE, first, Verb.RELEASE))
    for _ in range(3):
        service.pass_time(10)
    assert service.engine.show(first).job.restarts >= 1


def test_a_job_submitted_on_hold_waits_for_its_release(service: Service) -> None:
    [job] = service.submit(a_request(hold=True))
    assert states(service) == {job: "PENDING"}
    service.call(lambda engine: engine.change(ALICE, job, Verb.RELEASE))
    assert states(service) == {job: "RUNNING"}


@pytest.mark.parametrize(
    ("cause", "given", "runs"),
    [
        ("traceback-from-crash", {}, 3),
        ("traceback-from-crash", {"retry": {"on_errors": 0}}, 1),
        ("import-error", {}, 1),
        ("traceback-from-crash", {"retry": {"on_errors": 0, "exit_codes": [3]}}, 9),
        ("killed", {"retry": {"on_errors": 1}}, 9),
        ("network-error", {"retry": {"on_errors": 1}}, 9),
        ("max-duration", {}, 1),
    ],
)
def test_retries_depend_on_cause_exit_code_and_count(
    service: Service, cause: str, given: dict[str, object], runs: int
) -> None:
    [job] = service.submit(a_request(**given))
    for _ in range(8):
        if any(each == job for each, _ in service.machine.alive):
            service.machine.end(job, RunEnding.FAILED, cause=cause, code=3)
        service.pass_time(10_000)
    detail = service.engine.show(job)
    assert len(detail.runs) == runs
    assert (detail.job.state is JobState.FAILED) == (runs < 9)


def test_another_policy_goes_on_from_where_jobs_stand(service: Service) -> None:
    jobs = service.submit(*[a_request() for _ in range(4)])
    for _ in range(5):
        service.pass_time(10)
    alive = sorted(job for job, _ in service.machine.alive)
    before = {job: service.engine.show(job).job.ran for job in jobs}
    assert service.call(lambda engine: engine.set_policy(ALICE, "fifo")).policy == "fifo"
    assert sorted(job for job, _ in service.machine.alive) == alive
    assert {job: service.engine.show(job).job.ran for job in jobs} == before
    for _ in range(5):
        service.pass_time(10)
    assert sorted(job for job, _ in service.machine.alive) == alive  # first come, first served: no preemption
    service.restart()
    assert service.engine.service().policy == "fifo"
    service.policy = "srtf"
    service.restart()
    assert service.engine.service().policy == "srtf"


def test_a_policy_that_does_not_exist_changes_nothing(service: Service) -> None:
    [job] = service.submit(a_request())
    with pytest.raises(RequestRefusedError, match="did you mean max-min"):
        service.call(lambda engine: engine.set_policy(ALICE, "maxmin"))
    assert states(service) == {job: "RUNNING"}
    assert service.engine.service().policy == "las"


def test_a_larger_weight_is_a_larger_share(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="max-min", cluster="v100:1")
    mine = service.submit(a_request(duration=1e6))[0]
    theirs = service.submit(a_request(duration=1e6), by=BOB)[0]
    shares = service.call(lambda engine: engine.set_weight(ALICE, "alice", 3.0))
    assert {each.tenant: each.entitled for each in shares.tenants} == {"alice": 0.75, "bob": 0.25}
    before = [service.engine.show(job).job.ran for job in (mine, theirs)]
    for _ in range(200):
        service.pass_time(10)
    got = [service.engine.show(job).job.ran - was for job, was in zip((mine, theirs), before, strict=True)]
    assert got[0] / sum(got) == pytest.approx(0.75, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["hierarchical", "gandiva-fair", "gandiva-fair:tickets=alice:2/bob:2", "max-min"])
def test_a_tenants_weight_counts_once_and_from_when_it_is_set(policy: str, tmp_path: Path) -> None:
    """Each has four jobs and half of the four GPUs; then alice weighs three times as much."""
    service = Service(tmp_path, policy=policy, cluster="v100:4")
    for by in (ALICE, BOB):
        service.submit(*[a_request(duration=1e6) for _ in range(4)], by=by)
    assert received(service, 100) == pytest.approx(0.5, abs=0.05)
    service.call(lambda engine: engine.set_weight(ALICE, "alice", 3.0))
    assert received(service, 40) == pytest.approx(0.75, abs=0.05)
    service.restart()
    assert received(service, 200) == pytest.approx(0.75, abs=0.05)
    service.submit(*[a_request(duration=1e6) for _ in range(4)])  # they bring the weight along
    alice = 0.75 if policy != "max-min" else 24 / 28
    assert received(service, 200) == pytest.approx(alice, abs=0.05)
    service.call(lambda engine: engine.set_weight(ALICE, "alice", 1.0))
    assert received(service, 200) == pytest.approx(0.5 if policy != "max-min" else 2 / 3, abs=0.05)
    assert replays(service) == 3


def test_the_weight_of_a_tenant_without_jobs_counts_as_soon_as_it_has_some(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="philly", cluster="v100:4")
    service.call(lambda engine: engine.set_weight(ALICE, "alice", 3.0))
    service.submit(*[a_request() for _ in range(4)], by=BOB)
    assert held(service) == {"bob": 4}
    service.submit(*[a_request() for _ in range(4)])
    assert held(service) == {"alice": 3, "bob": 1}
    service.call(lambda engine: engine.set_weight(ALICE, "bob", 3.0))
    assert held(service) == {"alice": 2, "bob": 2}


def held(service: Service) -> dict[str, int]:
    return {each.tenant: each.gpus for each in service.engine.shares().tenants if each.gpus}


def received(service: Service, rounds: int) -> float:
    """What alice gets of all that is received."""

    def so_far() -> dict[str, float]:
        return {each.tenant: each.gpu_seconds for each in service.engine.shares().tenants}

    before = so_far()
    for _ in range(rounds):
        service.pass_time(10)
    got = {tenant: seconds - before.get(tenant, 0.0) for tenant, seconds in so_far().items()}
    return got["alice"] / sum(got.values())


def test_runs_on_gpus_that_a_restart_removed_have_to_leave(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="v100:8")
    jobs = service.submit(a_request(gpus=4), a_request(gpus=4))
    service.cluster = "v100:4"
    service.restart()
    service.settle()
    assert len(service.machine.alive) == 1
    assert sorted(states(service)) == sorted(jobs)
    for _ in range(4):
        service.pass_time(10)
    assert all(service.engine.show(job).job.started is not None for job in jobs)


def test_a_run_that_ended_while_the_service_was_away_is_charged_until_its_end(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2))
    service.pass_time(10)
    service.loop.backend.close()
    service.machine.end(job, RunEnding.FINISHED)
    service.machine.now += 1_000
    service.restart()
    service.settle()
    assert service.engine.show(job).gpu_seconds == pytest.approx(20)
    assert service.engine.show(job).job.finished == pytest.approx(1_010)


def test_time_never_goes_backwards_whatever_the_machines_clock_does(service: Service) -> None:
    [job] = service.submit(a_request())
    service.pass_time(100)
    service.machine.error = -5_000
    service.pass_time(10)
    assert service.engine.show(job).job.ran == pytest.approx(110)
    service.restart()
    service.pass_time(10)
    assert service.engine.show(job).job.ran == pytest.approx(10)  # since the last moment that the journal knows
    moments = [read_entry(document).now for document in service.loop.store.entries(1)]
    assert moments == sorted(moments)


def test_every_chapter_of_the_journal_replays_to_the_same_actions(service: Service) -> None:
    service.submit(*[a_request() for _ in range(4)])
    for step in range(12):
        service.pass_time(7)
        if step == 5:
            service.call(lambda engine: engine.set_policy(ALICE, "max-min"))
    assert replays(service) == 2


def replays(service: Service) -> int:
    """How many chapters the journal has; all of them replay."""
    chapters = service.loop.store.chapters()
    ends = [first for _, first in chapters[1:]] + [None]
    for (header, first), end in zip(chapters, ends, strict=True):
        replayed = replay(core_of(read_header(header)), map(read_entry, service.loop.store.entries(first, end)))
        assert replayed.instants
    return len(chapters)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu_types": ["a100"]}, "gpu_types: the cluster has no 'a100'; it has v100"),
        ({"gpus": 3}, "needs 3 GPUs of one type; the cluster has at most 2"),
    ],
)
def test_a_job_that_can_never_run_is_refused_and_leaves_nothing(
    service: Service, given: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestRefusedError, match=message):
        service.submit(a_request(), a_request(**given))
    assert states(service) == {}


def test_only_the_owner_can_read_the_store(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.submit(a_request())
    files = list(tmp_path.iterdir())
    assert files
    assert [file.name for file in files if file.stat().st_mode & 0o077] == []


def test_rounds_end_on_time_though_the_engine_wakes_a_little_later(service: Service) -> None:
    jobs = service.submit(*[a_request() for _ in range(3)])
    for _ in range(12):
        service.pass_time(10.0017)
    assert min(service.engine.show(job).job.ran for job in jobs) > 60


def test_a_run_on_mixed_gpus_gets_the_speeds_that_were_decided_with(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="las", cluster="v100:2,k80:2")
    [divides] = service.submit(a_request(gpus=4, micro_batches=9))
    [(order, _)] = open_orders(service.loop.deps, service.loop.state)
    assert [part.gpu_type for part in order.gpus] == ["v100", "k80"]
    assert order.speeds["v100"] > order.speeds["k80"] > 0
    service.restart()
    service.machine.end(divides, RunEnding.FINISHED)
    service.settle()
    [gang] = service.submit(a_request(gpus=2))
    [(order, _)] = open_orders(service.loop.deps, service.loop.state)
    assert (order.job, order.speeds) == (gang, {})
