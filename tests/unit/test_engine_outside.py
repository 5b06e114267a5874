"""Policies from outside in the live service: who may choose which, and what happens if one is gone or raises."""

import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from tests.machine import ALICE, Service, a_request
from tests.machine_laws import check_standing, finish_all
from tests.outside import folder_of_modules, install, write_module

from poise.engine import outside
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.errors import PolicyError, RequestError
from poise.scheduler.policies import catalogue
from poise.service.server.logs import Logbook
from poise.service.server.service_api import RequestRefusedError
from poise.service.server.startup import BackendKind, Setup, open_service
from poise.service.wire.request import Submission

PRIORITIES = """
from poise.policies import *

POLICY = Listing(
    "by-priority", Family.QUEUE, "higher priorities first", "a test", (),
    lambda: Order(lambda job, _previous, _memory: Rank(-job.priority), PreemptionRule.NEVER, Unfitting.SKIPPED),
    can=frozenset({Capability.PRIORITIES}),
)
PICKY = Order(lambda job, _previous, _memory: Rank(1 / (job.gang - 2)), PreemptionRule.NEVER, Unfitting.SKIPPED)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    modules = tmp_path / "modules"
    modules.mkdir()
    with folder_of_modules(modules, monkeypatch) as found:
        write_module(found, "heavy")
        write_module(found, "urgent", PRIORITIES)
        yield found


@pytest.fixture
def service(tmp_path: Path, folder: Path) -> Service:
    """Its operator started it with `heavy:by_weight`, and nothing else from outside."""
    outside.find("heavy:by_weight")
    state = tmp_path / "state"
    state.mkdir()
    return Service(state, policy="heavy:by_weight")


def forget_policies() -> None:
    """As a process that has just started."""
    for registered in (catalogue._OUTSIDE, outside._targets, outside._files):
        registered.clear()
    outside._referenced.clear()


def test_jobs_run_under_a_policy_from_outside_and_survive_a_restart(service: Service) -> None:
    [light] = service.submit(a_request(gpus=2))
    heavy, heaviest = service.submit(a_request(gpus=2), a_request(gpus=2, weight=5.0))
    service.pass_time(10)
    assert service.engine.show(light).job.state == "RUNNING"
    service.restart()
    check_standing(service)
    assert service.engine.service().policy == "heavy:by_weight"
    assert service.loop.state.scheduler.in_line(2) == [heaviest, heavy]
    assert service.engine.why(heavy).reason.text
    finish_all(service)


def test_the_job_that_is_due_first_runs_first(folder: Path, tmp_path: Path) -> None:
    """The example of the tutorial, over a restart; a job that cannot make it comes last."""
    write_module(folder, "edf", (Path(__file__).parents[2] / "examples" / "policies" / "edf.py").read_text())
    outside.find("edf:POLICY")
    service = Service(tmp_path, policy="edf:POLICY")
    [first] = service.submit(a_request(gpus=2, deadline=1_200.0))
    none, late, soon, lost = service.submit(
        a_request(gpus=2), a_request(gpus=2, deadline=9_000.0), a_request(gpus=2, deadline=5_000.0),
        a_request(gpus=2, deadline=1_300.0, duration=1_000.0),
    )  # fmt: skip
    for _ in range(2):
        assert service.engine.show(first).job.state == "RUNNING"
        assert service.loop.state.scheduler.in_line(4) == [soon, late, none, lost]
        service.restart()
    finish_all(service)
    started = {job: service.engine.show(job).job.started or 0.0 for job in (first, soon, late, none, lost)}
    assert sorted(started, key=lambda job: started[job]) == [first, soon, late, none, lost]


def test_a_client_chooses_among_what_the_operator_allowed(service: Service) -> None:
    assert service.call(lambda engine: engine.set_policy(ALICE, "fifo")).policy == "fifo"
    wanted = "heavy:by_weight:factor=2+stable"
    assert service.call(lambda engine: engine.set_policy(ALICE, wanted)).policy == wanted


@pytest.mark.parametrize(
    "named", ["urgent:POLICY", "os:system", "subprocess:run", "heavy:other", "nowhere:POLICY", "heavy:by_weigh"]
)
def test_a_client_cannot_have_a_module_imported(service: Service, named: str) -> None:
    before = set(sys.modules)
    with pytest.raises(RequestRefusedError, match="is not allowed here; start the service with --allow-policy") as refused:
        service.call(lambda engine: engine.set_policy(ALICE, named))
    assert "\n" not in str(refused.value)
    assert "urgent" not in set(sys.modules) - before
    assert service.engine.service().policy == "heavy:by_weight"


def test_a_client_may_choose_what_is_installed_on_the_server(service: Service, folder: Path) -> None:
    install(folder, "plug", by_priority="urgent:POLICY", lame="nowhere:POLICY")
    assert service.call(lambda engine: engine.set_policy(ALICE, "by-priority")).policy == "by-priority"
    with pytest.raises(RequestRefusedError, match=r"policy 'lame' of plug 1\.0 .* there is no module 'nowhere'"):
        service.call(lambda engine: engine.set_policy(ALICE, "lame"))
    with pytest.raises(RequestRefusedError, match="did you mean by-priority"):
        service.call(lambda engine: engine.set_policy(ALICE, "by-prioritie"))


def test_priorities_have_an_effect_under_a_policy_that_looks_at_them(service: Service) -> None:
    outside.find("urgent:POLICY")
    submission = Submission(jobs=(a_request(priority=3),), key="the-first")
    assert "has no effect" in service.call(lambda engine: engine.submit(ALICE, submission)).notes[0]
    service.call(lambda engine: engine.set_policy(ALICE, "urgent:POLICY"))
    other = Submission(jobs=(a_request(priority=3, gpus=2), a_request(priority=9, gpus=2)), key="the-second")
    for _ in range(2):  # also when it was taken before
        answer = service.call(lambda engine: engine.submit(ALICE, other))
        assert answer.notes == ()
    assert service.loop.state.scheduler.in_line(2) == list(reversed(answer.jobs))


def test_a_policy_that_raises_is_refused_where_it_is_chosen(service: Service) -> None:
    service.submit(a_request(gpus=2), a_request(gpus=2))
    outside.find("urgent:PICKY")
    with pytest.raises(RequestRefusedError, match=r"policy 'urgent:PICKY': .*urgent\.py:\d+: ZeroDivisionError"):
        service.call(lambda engine: engine.set_policy(ALICE, "urgent:PICKY"))
    assert service.engine.service().policy == "heavy:by_weight"
    check_standing(service)


def test_a_policy_that_raises_later_stops_the_service_with_its_file_and_line(service: Service) -> None:
    outside.find("urgent:PICKY")
    service.call(lambda engine: engine.set_policy(ALICE, "urgent:PICKY"))
    service.submit(a_request(gpus=1))
    with pytest.raises(PolicyError, match=r"urgent\.py:\d+: ZeroDivisionError: division by zero"):
        service.submit(a_request(gpus=2))


def test_a_service_comes_back_under_another_policy_if_its_own_is_gone(service: Service) -> None:
    """Its jobs run on; what only the core knew of them is lost."""
    jobs = service.submit(a_request(), a_request(), a_request(gpus=2))
    service.pass_time(10)
    alive = sorted(service.machine.alive)
    forget_policies()
    service.policy = "fifo"
    service.restart()
    check_standing(service)
    assert sorted(service.machine.alive) == alive
    assert service.engine.service().policy == "fifo"
    assert [service.engine.show(job).job.state for job in jobs] == ["RUNNING", "RUNNING", "PENDING"]
    finish_all(service)


# As it is started


def setup(state: Path, policy: str | None, log: StringIO) -> Setup:
    state.mkdir(exist_ok=True)
    return Setup(state, parse_cluster("v100:2"), policy, "consolidate", Settings(round=1.0), BackendKind.NULL, Logbook(log))


def served(state: Path, policy: str | None = None) -> str:
    """The policy in force once the service is up, and what its log said."""
    log = StringIO()
    service = open_service(setup(state, policy, log))
    service.start()
    try:
        return f"{service.service().policy} {log.getvalue()}"
    finally:
        service.close()


def test_a_start_without_a_policy_finds_the_one_that_was_in_force(folder: Path, tmp_path: Path) -> None:
    outside.find("heavy:by_weight")
    assert served(tmp_path / "state", "heavy:by_weight:factor=3").startswith("heavy:by_weight:factor=3 ")
    forget_policies()
    assert served(tmp_path / "state").startswith("heavy:by_weight:factor=3 ")


def test_a_start_without_the_policy_that_was_in_force_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    outside.find("heavy:by_weight")
    served(tmp_path / "state", "heavy:by_weight")
    forget_policies()
    (folder / "heavy.py").unlink()
    sys.modules.pop("heavy")
    with pytest.raises(RequestError) as refused:
        served(tmp_path / "state")
    said = str(refused.value)
    assert said.startswith(
        "the policy that was in force cannot be found: policy 'heavy:by_weight': there is no module 'heavy'"
    )
    assert said.endswith("start from the folder that has it, or choose another with --policy; jobs that run go on")
    assert "\n" not in said
    went_on = served(tmp_path / "state", "fifo")
    assert went_on.startswith("fifo ")
    assert "policy-gone" in went_on
