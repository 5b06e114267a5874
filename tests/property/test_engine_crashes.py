"""The live engine is killed at every single point at which something is kept or done; nothing is lost or done twice."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.machine import ALICE, BOB, Service, a_request

from poise.engine.journal import read_entry, read_header
from poise.engine.loop import replay
from poise.lab.analysis.history import History
from poise.scheduler.model.action import JournalEntry
from poise.scheduler.model.cluster import Node
from poise.service.backends.api import NodeState, RunEnding
from poise.service.server.dependencies import core_of
from poise.service.server.service_api import RequestRefusedError, Verb
from poise.service.server.storage.store import StorageError
from poise.service.wire.request import Submission
from poise.service.wire.views import Account, JobState, NodeCondition, NodeRow, Role

POINTS = 130
"""More points than the scenario has: the last runs are not killed at all."""
NODE_POINTS = 140
"""Likewise, of the scenario with nodes that come and go."""
OPS = Account(name="ops", tenant="ops", role=Role.OPERATOR)


def scenario(service: Service) -> list[str]:
    """Some of everything, until nothing is left to do; ids of the jobs."""
    jobs = service.submit(a_request(), a_request(gpus=2), a_request(name="held", hold=True))
    jobs += service.submit(a_request(), a_request(), by=BOB)
    service.pass_time(12)
    _command(service, "hold", jobs[0])
    service.pass_time(12)
    _fail_one(service)
    _command(service, "cancel", jobs[4])
    _command(service, "release", jobs[0])
    service.pass_time(12)
    _adopt(service, "max-min")
    service.pass_time(25)
    _fail_one(service)
    _command(service, "release", jobs[2])
    _finish(service)
    return jobs


def _finish(service: Service) -> None:
    """Let every job do its work."""
    for _ in range(60):
        service.pass_time(11)
        for job, _epoch in list(service.machine.alive):
            if service.engine.show(job).job.ran > 30:
                service.machine.end(job, RunEnding.FINISHED, steps=1)
        service.settle()
        if not service.loop.state.records:
            return
    raise AssertionError("some job never ends")


def node_scenario(service: Service) -> list[str]:
    """Nodes join, are lost with what runs there, come back, are drained, used by others, and change; ids of the jobs."""
    machine = service.machine
    jobs = service.submit(a_request(), a_request(gpus=2), a_request(gpus=2))  # before there is any node
    machine.say(Node("gpu-a", "v100", 2))
    service.pass_time(3)
    machine.say(Node("gpu-b", "v100", 2))
    machine.say(Node("gpu-c", "k80", 1))
    service.pass_time(3)
    jobs += service.submit(a_request(gpus=2), a_request(), by=BOB)
    service.pass_time(12)
    machine.say("gpu-a", NodeState.UNREACHABLE, "silent for a while")
    service.settle()
    machine.say("gpu-a", NodeState.LOST, "silent for too long")
    service.settle()
    machine.bury()
    service.pass_time(12)
    _drain(service, "gpu-b", is_drain=True)
    service.pass_time(12)
    machine.say("gpu-a", NodeState.UP, "it is back", withheld=(0,))
    service.pass_time(12)
    _adopt(service, "max-min")
    machine.say("gpu-c", NodeState.LOST, "gone too")
    _drain(service, "gpu-b", is_drain=False)
    service.pass_time(12)
    machine.say("gpu-a", NodeState.UP, "all of it")
    machine.say(Node("gpu-c", "k80", 2), NodeState.UP, "with one more")
    service.pass_time(12)
    _drain(service, "gpu-c", is_drain=True)
    _finish(service)
    return jobs


def _drain(service: Service, node: str, *, is_drain: bool) -> None:
    """As a person would: once more if there was no answer."""
    for _ in range(3):
        reply = service.engine.drain(OPS, node, "to be cleaned") if is_drain else service.engine.return_node(OPS, node)
        service.settle()
        if reply.done():
            assert isinstance(reply.result(), NodeRow)
            return


def _command(service: Service, verb: str, job: str) -> None:
    """As a person would: once more if there was no answer."""
    for _ in range(3):
        with suppress(RequestRefusedError):
            reply = service.engine.change(ALICE, job, Verb(verb))
            service.settle()
            if reply.done():
                return


def _adopt(service: Service, policy: str) -> None:
    for _ in range(3):
        reply = service.engine.set_policy(ALICE, policy)
        service.settle()
        if reply.done():
            return


def _fail_one(service: Service) -> None:
    for job, _epoch in list(service.machine.alive)[:1]:
        service.machine.end(job, RunEnding.FAILED, cause="traceback-from-crash", code=1)
    service.settle()


def entries(service: Service) -> Iterator[JournalEntry]:
    return map(read_entry, service.loop.store.entries(1))


def check(service: Service, jobs: list[str]) -> None:
    """What has to hold whatever happened on the way."""
    details = {job: service.engine.show(job) for job in jobs}
    assert {job: each.job.state for job, each in details.items()} == {
        job: JobState.CANCELLED if job == jobs[4] else JobState.SUCCEEDED for job in jobs
    }
    assert sorted(service.machine.finished) == sorted(set(jobs) - {jobs[4]})
    assert not service.machine.alive
    check_journal(service, jobs)


def check_nodes(service: Service, jobs: list[str]) -> None:
    """All jobs have done their work once, no loss counts as their failure, and what is known of nodes is what was said."""
    details = {job: service.engine.show(job) for job in jobs}
    assert {each.job.state for each in details.values()} == {JobState.SUCCEEDED}
    assert sorted(service.machine.finished) == sorted(jobs)
    assert not service.machine.alive
    assert {job: each.failures for job, each in details.items() if each.failures} == {}
    for _ in range(2):
        nodes = {each.name: each for each in service.engine.nodes().nodes}
        assert {name: (each.state, each.gpus, each.withheld) for name, each in nodes.items()} == {
            "gpu-a": (NodeCondition.UP, 2, ()),
            "gpu-b": (NodeCondition.UP, 2, ()),
            "gpu-c": (NodeCondition.DRAINED, 2, ()),
        }
        assert (nodes["gpu-c"].drained_by, nodes["gpu-c"].drain_reason) == ("ops", "to be cleaned")
        service.restart()
        service.settle()
    told = [each.kind for each in service.engine.events(after=0, job=None, tenant=None, limit=1_000).events]
    assert (told.count("node-drained"), told.count("node-opened"), told.count("node-empty")) == (2, 1, 2)
    assert (told.count("node-joined"), told.count("node-lost"), told.count("node-withheld")) == (3, 2, 2)
    check_journal(service, jobs)


def check_journal(service: Service, jobs: list[str]) -> None:
    """The journal leads to the state, chapter by chapter, and the books agree with it."""
    details = {job: service.engine.show(job) for job in jobs}
    history = History.of(entries(service), service.loop.state.header.cluster)
    charged = {job: each.gpu_seconds for job, each in details.items()}
    assert charged == pytest.approx({job: history.jobs[job].gpu_seconds for job in jobs})
    books = service.engine.shares().tenants
    assert sum(each.gpu_seconds for each in books) == pytest.approx(sum(charged.values()))
    chapters = service.loop.store.chapters()
    ends = [first for _, first in chapters[1:]] + [None]
    for (header, first), end in zip(chapters, ends, strict=True):
        replay(core_of(read_header(header)), map(read_entry, service.loop.store.entries(first, end)))


@pytest.mark.parametrize(
    "point", [pytest.param(each, marks=pytest.mark.slow if each % 10 else ()) for each in range(POINTS)]
)
def test_killed_at_any_point_the_service_comes_back_and_every_job_runs_once(point: int, tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.crash_at = point
    jobs = scenario(service)
    assert len(jobs) == len(set(jobs)) == 5
    check(service, jobs)


@pytest.mark.parametrize(
    "point", [pytest.param(each, marks=pytest.mark.slow if each % 10 else ()) for each in range(NODE_POINTS)]
)
def test_killed_at_any_point_the_service_knows_its_nodes_and_every_job_ends_once(point: int, tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="")
    service.crash_at = point
    check_nodes(service, node_scenario(service))


@pytest.mark.parametrize("every", [3, 5, 7])
def test_killed_repeatedly_the_service_still_knows_its_nodes(every: int, tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="")
    start = service.start

    def doomed() -> None:
        service.crash_at = None
        start()
        service.crash_at = every

    service.start = doomed  # type: ignore[method-assign]
    service.crash_at = every
    jobs = node_scenario(service)
    service.crash_at = None
    service.start = start  # type: ignore[method-assign]
    check_nodes(service, jobs)


def test_the_scenario_with_nodes_has_fewer_points_than_are_tried(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="")
    service.crash_at = NODE_POINTS
    node_scenario(service)
    assert service.crash_at is not None


def test_the_crash_scenario_has_fewer_points_than_are_tried(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.crash_at = POINTS
    scenario(service)
    assert service.crash_at is not None


@pytest.mark.parametrize("every", [2, 3, 5, 7])
def test_killed_repeatedly_the_service_still_finishes_every_job(every: int, tmp_path: Path) -> None:
    service = Service(tmp_path)
    start = service.start

    def doomed() -> None:
        service.crash_at = None
        start()
        service.crash_at = every

    service.start = doomed  # type: ignore[method-assign]
    service.crash_at = every
    jobs = scenario(service)
    check(service, jobs)


def test_a_full_disk_stops_decisions_and_nothing_else(tmp_path: Path) -> None:
    """What runs goes on, commands are refused with one line, and once there is room all is as the journal has it."""
    service = Service(tmp_path)
    [first] = service.submit(a_request(gpus=2))
    store = service.loop.store
    commit = store.commit

    def full(_changes: object) -> None:
        raise StorageError("journal.db: cannot be written: database or disk is full")

    def emptied(_timeout: float | None = None) -> bool:
        store.commit = commit  # type: ignore[method-assign]
        return False

    store.commit = full  # type: ignore[assignment, method-assign]
    store.reserve.give = lambda: False  # type: ignore[method-assign]
    service.loop._closing.wait = emptied  # type: ignore[assignment, method-assign]
    reply = service.engine.submit(ALICE, Submission(jobs=(a_request(),)))
    service.loop.turn(0.0)
    with pytest.raises(RequestRefusedError, match="disk is full"):
        reply.result(0)
    assert [job for job, _ in service.machine.alive] == [first]
    assert service.engine.service().ready
    [second] = service.submit(a_request(gpus=1))
    assert second == "2"  # nothing is left of the one that was refused
