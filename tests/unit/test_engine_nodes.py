"""Nodes as facts: what the back end reports of them, what operators want of them, and what becomes of the runs there."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from tests.machine import ALICE, LingeringBackend, Service, a_request
from tests.machine_laws import check_books, check_standing, finish_all

from poise.engine.journal import read_entry
from poise.lab.analysis.sources import Subject, journal_subject
from poise.lab.analysis.tenant_usage import TenantUsage
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.cluster import Node
from poise.service.backends.api import DesiredState, NodeReport, NodeState, RunEnded, RunEnding, RunOrder
from poise.service.server.engine import open_orders
from poise.service.server.service_api import RefusalCode, RequestRefusedError, Verb
from poise.service.server.storage.replay import last_chapter, replay_store
from poise.service.server.storage.store import Changes, StorageError
from poise.service.wire.views import Account, EventRow, JobState, NodeCondition, NodeRow, Role

OPS = Account(name="ops", tenant="ops", role=Role.OPERATOR)
A, B, C = (Node(f"gpu-{name}", "v100", 2) for name in "abc")


@pytest.fixture
def service(tmp_path: Path) -> Service:
    """Two nodes of two GPUs, which the back end has reported."""
    made = Service(tmp_path, cluster="")
    made.machine.say(A)
    made.settle()
    made.machine.say(B)
    made.pass_time(2)
    assert made.engine.service().cluster == "v100:4@2"
    return made


def node(service: Service, name: str) -> NodeRow:
    return next(each for each in service.engine.nodes().nodes if each.name == name)


def told(service: Service, *kinds: str, **which: Any) -> list[EventRow]:
    asked = {"after": 0, "job": None, "tenant": None, "limit": 1_000} | which
    return [each for each in service.engine.events(**asked).events if each.kind in kinds]


def drain(service: Service, name: str, reason: str | None = None) -> NodeRow:
    found = service.call(lambda engine: engine.drain(OPS, name, reason))
    assert isinstance(found, NodeRow)
    return found


def give_back(service: Service, name: str) -> NodeRow:
    found = service.call(lambda engine: engine.return_node(OPS, name))
    assert isinstance(found, NodeRow)
    return found


def where(service: Service, job: str) -> set[str]:
    [order] = [order for (each, _), order in service.machine.alive.items() if each == job]
    return {part.node for part in order.gpus}


def chapters(service: Service) -> int:
    return len(service.loop.store.chapters())


def analyzed(service: Service, folder: Path) -> Subject:
    """What `poise analyze` reads of the service's journal."""
    path = folder / "journal.jsonl"
    path.write_text("".join(f"{line}\n" for line in last_chapter(service.loop.store.path)))
    return journal_subject(path)


# A cluster of the nodes that have joined


def test_a_service_starts_without_nodes_and_keeps_what_is_submitted_until_one_joins(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="")
    [job, held] = service.submit(a_request(gpus=2), a_request(hold=True))
    for _ in range(2):
        assert service.engine.service().cluster == "no nodes yet"
        assert service.engine.nodes().nodes == ()
        assert service.engine.show(job).job.state is JobState.PENDING
        assert "no node has joined the cluster yet" in service.engine.why(job).reason.text
        assert [each.job for each in told(service, "submitted")] == [job, held]
        assert service.engine.shares().tenants[0].waiting == 2
        service.restart()
    service.machine.say(A)
    service.settle()
    check_standing(service)
    assert where(service, job) == {"gpu-a"}
    assert service.engine.show(held).job.state is JobState.PENDING
    [joined] = told(service, "node-joined")
    assert joined.node == "gpu-a"
    assert "2 GPUs of type v100, in rack-0: its agent says up" in joined.text
    service.machine.end(job, RunEnding.FINISHED)
    service.settle()
    replay_store(service.loop.store.path)


def test_while_there_are_no_nodes_jobs_are_cancelled_and_the_policy_is_changed_as_ever(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="")
    [gone, stays] = service.submit(a_request(), a_request(gpus=64, gpu_types=("h100",)))
    service.call(lambda engine: engine.change(ALICE, gone, Verb.CANCEL))
    service.call(lambda engine: engine.set_policy(ALICE, "fifo"))
    service.call(lambda engine: engine.set_weight(ALICE, "alice", 2.0))
    assert service.engine.show(gone).job.state is JobState.CANCELLED
    service.machine.say(A)
    service.settle()
    why = service.engine.why(stays)
    assert why.reason.text == "cannot run on the cluster as it is now: asks for h100; the cluster has v100"
    service.restart()
    assert service.engine.service().policy == "fifo"


def test_nodes_that_join_within_a_moment_make_one_chapter(service: Service) -> None:
    before = chapters(service)
    service.machine.say(C)
    service.settle()
    service.machine.say(Node("gpu-d", "k80", 1, "rack-1"))
    service.settle()
    assert chapters(service) == before
    assert [each.name for each in service.engine.nodes().nodes] == ["gpu-a", "gpu-b"]
    service.pass_time(1)
    assert chapters(service) == before + 1
    assert [each.name for each in service.engine.nodes().nodes] == ["gpu-a", "gpu-b", "gpu-c", "gpu-d"]
    service.restart()
    assert service.engine.service().cluster == "v100:6@2,k80:1@1"
    service.settle()
    assert chapters(service) == before + 1


def test_jobs_go_on_while_a_node_joins_and_wait_for_it_no_longer(service: Service) -> None:
    [first, second, third] = service.submit(*[a_request(gpus=2)] * 3)
    runs = dict(service.machine.alive)
    service.machine.say(C)
    service.pass_time(1)
    check_standing(service)
    assert runs.items() <= service.machine.alive.items()
    assert where(service, third) == {"gpu-c"}
    assert {first, second, third} == {job for job, _ in service.machine.alive}


def test_a_node_that_is_lost_before_it_was_part_of_the_cluster_never_is(service: Service) -> None:
    service.machine.say(C)
    service.settle()
    service.machine.say(C, NodeState.LOST)
    service.pass_time(10)
    assert [each.name for each in service.engine.nodes().nodes] == ["gpu-a", "gpu-b"]
    assert not told(service, "node-lost")


def test_a_node_that_has_fewer_gpus_than_before_keeps_the_runs_that_still_have_theirs(service: Service) -> None:
    [first, second, wide] = service.submit(a_request(), a_request(), a_request(gpus=2))
    [shared] = where(service, first)
    assert where(service, second) == {shared}
    service.machine.say(Node(shared, "v100", 1))
    service.pass_time(1)
    check_standing(service)
    assert sum(epoch == 1 for job, epoch in service.machine.alive if job in (first, second)) == 1
    assert service.engine.show(wide).job.state in {JobState.RUNNING, JobState.PAUSED}
    assert all(part.slots == (0,) for order in service.machine.alive.values() for part in order.gpus if part.node == shared)
    assert "1 GPU of type v100" in told(service, "node-changed")[0].text
    replay_store(service.loop.store.path)


@pytest.mark.parametrize("end", ["cancelled", *RunEnding])
def test_a_chapter_can_be_analyzed_that_tells_of_jobs_which_the_cluster_is_too_small_for(tmp_path: Path, end: str) -> None:
    service = Service(tmp_path, cluster="", backend=LingeringBackend)
    service.machine.say(A)
    service.settle()
    [wide, _] = service.submit(a_request(gpus=2), a_request(gpus=1))
    service.machine.say(Node("gpu-a", "v100", 1))
    service.pass_time(2)
    assert [*service.loop.state.stranded] == [wide]
    if end == "cancelled":
        service.call(lambda engine: engine.change(ALICE, wide, Verb.CANCEL))
    else:
        service.machine.end(wide, RunEnding(end))
    service.pass_time(2)
    assert analyzed(service, tmp_path).problem is None


def test_a_chapter_can_be_analyzed_that_begins_with_another_run_of_a_job(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="")
    service.machine.say(A)
    service.settle()
    service.submit(a_request(gpus=2), a_request(gpus=2))
    service.pass_time(100)
    service.machine.say(B)
    service.pass_time(2)
    assert len(service.machine.alive) == 2
    assert max(epoch for _, epoch in service.machine.alive) > 1
    assert analyzed(service, tmp_path).problem is None


def test_a_service_without_nodes_can_be_analyzed(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="")
    service.submit(a_request())
    assert analyzed(service, tmp_path).problem is None


def test_a_node_that_is_as_it_was_again_before_it_was_taken_in_stays_so(service: Service) -> None:
    service.machine.say(Node("gpu-a", "v100", 1))
    service.settle()
    service.machine.say(A)
    service.pass_time(5)
    assert service.engine.service().cluster == "v100:4@2"


def test_a_node_with_gpus_of_another_type_is_another_machine_for_its_runs(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2, gpu_types=("v100",)))
    [name] = where(service, job)
    service.machine.say(Node(name, "k80", 2))
    service.pass_time(1)
    check_standing(service)
    assert where(service, job) == {"gpu-a", "gpu-b"} - {name}


def test_a_cluster_that_was_named_at_the_start_grows_too_and_stays_so(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="v100:2")
    service.machine.say(C)
    service.pass_time(2)
    assert [each.name for each in service.engine.nodes().nodes] == ["v100-0", "gpu-c"]
    service.restart()
    assert [each.name for each in service.engine.nodes().nodes] == ["v100-0", "gpu-c"]


def test_nodes_that_make_no_cluster_for_the_options_are_left_out(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="v100:2", settings=Settings(round=10.0, validation_gpus=1))
    service.machine.say(Node("v100-0", "v100", 1))  # all of it would be the pool
    service.pass_time(2)
    assert [each.gpus for each in service.engine.nodes().nodes] == [2]
    [job] = service.submit(a_request())
    assert where(service, job) == {"v100-0"}


# Lost nodes


def test_runs_of_a_lost_node_go_on_elsewhere_and_that_is_no_fault_of_their_jobs(service: Service) -> None:
    [second, first] = service.submit(a_request(gpus=2), a_request(gpus=2))
    [lost] = where(service, first)
    service.machine.say(lost, NodeState.LOST, "no word from its agent for 61 s")
    service.settle()
    check_standing(service)
    assert [job for job, _ in service.machine.alive] == [second]
    row = node(service, lost)
    assert (row.state, row.alive, row.available, row.since) == (NodeCondition.LOST, False, 0, service.machine.now)
    assert row.evidence == "no word from its agent for 61 s"
    detail = service.engine.show(first)
    assert (detail.job.state, detail.failures) == (JobState.PAUSED, 0)
    assert detail.runs[-1].cause == f"node {lost} was lost: no word from its agent for 61 s; node-lost"
    why = service.engine.why(first)
    assert f"node {lost} (2 GPUs, v100) is lost since 1970-01-01 00:16:4" in "\n".join(why.evidence)
    assert "no word from its agent for 61 s" in "\n".join(why.evidence)
    [interrupted] = told(service, "interrupted", job=first)
    assert interrupted.text == f"run 1 is over: node {lost} was lost: no word from its agent for 61 s"
    service.machine.end(second, RunEnding.FINISHED)
    service.settle()
    assert where(service, first) == {"gpu-a", "gpu-b"} - {lost}
    service.machine.say(lost)
    service.pass_time(2)
    assert node(service, lost).state is NodeCondition.UP
    assert [each.kind for each in told(service, "node-lost", "node-returned")] == ["node-lost", "node-returned"]
    finish_all(service)
    replay_store(service.loop.store.path)


def test_a_job_may_lose_more_nodes_than_it_has_retries(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2))
    for _ in range(5):
        [lost] = where(service, job)
        service.machine.say(lost, NodeState.LOST)
        service.settle()
        service.machine.say(lost)
        service.settle()
    assert service.engine.show(job).failures == 0
    assert service.engine.show(job).job.state is JobState.RUNNING


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("preemption", ["never", "checkpoint"])
def test_a_hold_that_was_deferred_takes_effect_when_the_node_is_lost(
    service: Service, preemption: str, is_late: bool
) -> None:
    service.machine.unaware.add("1")
    [job] = service.submit(a_request(gpus=2, preemption=preemption))
    [lost] = where(service, job)
    if is_late:  # in the same turn
        service.machine.say(lost, NodeState.LOST)
    service.call(lambda engine: engine.change(ALICE, job, Verb.HOLD))
    if not is_late:
        service.machine.say(lost, NodeState.LOST)
    service.settle()
    service.pass_time(60)
    assert not service.machine.alive
    check_standing(service)
    service.call(lambda engine: engine.change(ALICE, job, Verb.RELEASE))
    service.settle()
    assert where(service, job) == {"gpu-a", "gpu-b"} - {lost}


def test_a_tenant_is_not_charged_for_a_lost_run_and_the_next_one_at_the_same_time(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="", backend=LingeringBackend)
    for each in (A, B, C):
        service.machine.say(each)
        service.pass_time(2)
    [job] = service.submit(a_request(gpus=4))
    service.pass_time(100)
    del service.machine.nodes["gpu-b"]  # so that the machine keeps its processes
    service.machine.tell(replaced(service, B, NodeState.LOST))
    service.settle()
    assert service.engine.show(job).runs[-1].epoch == 2
    service.pass_time(100)
    service.call(lambda engine: engine.change(ALICE, job, Verb.CANCEL))
    entries = service.loop.store.entries(service.loop.store.chapters()[-1][1])
    usage = TenantUsage.of(map(read_entry, entries), service.loop.state.header.cluster)
    assert sum(usage.tenants["alice"].held) * 3_600 == pytest.approx(service.engine.show(job).gpu_seconds)


@pytest.mark.parametrize("known", [None, 10.0])
def test_what_a_lost_run_has_kept_is_told_by_the_next_one_that_begins(service: Service, known: float | None) -> None:
    [job] = service.submit(a_request(gpus=2))
    service.machine.report(job, steps=30.0, checkpoint=30.0, throughput=1.0)
    service.settle()
    [lost] = where(service, job)
    service.machine.steps[job] = 50.0  # the node is cut off before it can say so
    tell, service.machine.tell = service.machine.tell, lambda _news: None
    service.machine.say(lost, NodeState.LOST)
    service.machine.bury()
    service.machine.tell = tell
    tell(service.machine.nodes[lost])
    tell(replace(service.machine.ended[job, 1], steps=known))
    service.settle()
    assert [(run.begun, run.kept) for run in service.engine.show(job).runs] == [(0.0, 50.0), (50.0, None)]
    assert service.engine.show(job).checkpoint_steps == 50.0
    check_standing(service)


def test_a_run_of_several_nodes_is_killed_where_it_lives(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="", backend=LingeringBackend)
    for each in (A, B):
        service.machine.say(each)
        service.pass_time(2)
    [wide] = service.submit(a_request(gpus=4))
    del service.machine.nodes["gpu-b"]  # so that the machine keeps its processes
    service.machine.tell(replaced(service, B, NodeState.LOST))
    service.settle()
    assert service.machine.leaving == {(wide, 1)}
    assert service.engine.show(wide).job.state is JobState.PAUSED
    [(order, desired)] = open_orders_of(service)
    assert (order.epoch, desired, order.reason) == (1, "gone", "node gpu-b was lost: its agent says lost")


def replaced(service: Service, node: Node, state: NodeState) -> NodeReport:
    return NodeReport(node, state, service.machine.wall, f"its agent says {state}")


def open_orders_of(service: Service) -> list[tuple[RunOrder, DesiredState]]:
    return open_orders(service.loop.deps, service.loop.state)


def test_a_run_that_finished_before_its_node_was_lost_has_finished_its_job(tmp_path: Path) -> None:
    """Its end is heard of late, when the next run of the job is under way."""
    service = Service(tmp_path, cluster="", backend=LingeringBackend)
    for each in (A, B):
        service.machine.say(each)
        service.pass_time(2)
    [job] = service.submit(a_request(gpus=2))
    [lost] = where(service, job)
    order = service.machine.alive.pop((job, 1))
    service.machine.say(lost, NodeState.LOST)
    service.settle()
    assert {epoch for each, epoch in service.machine.alive if each == job} == {2}
    service.machine.alive = {(job, 1): order}  # the machine is not aware of the next run
    service.machine.end(job, RunEnding.FINISHED)
    service.settle()
    assert service.engine.show(job).job.state is JobState.SUCCEEDED
    replay_store(service.loop.store.path)


def test_ends_of_lost_runs_do_no_harm_whether_they_come_before_or_after(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2))
    [lost] = where(service, job)
    other = ({"gpu-a", "gpu-b"} - {lost}).pop()
    tell = service.machine.tell
    said: list[Any] = []
    service.machine.tell = said.append
    service.machine.say(lost, NodeState.LOST)
    service.machine.bury()
    service.machine.tell = tell
    for each in reversed(said):
        tell(each)
    service.settle()
    service.pass_time(service.settings.backoff)
    service.pass_time(10)
    assert where(service, job) == {other}
    assert service.engine.show(job).job.state is JobState.RUNNING
    for each in said:  # once more, much later
        tell(each)
    service.settle()
    assert where(service, job) == {other}
    check_standing(service)


def test_losses_count_from_when_they_happened_even_if_the_engine_hears_of_them_late(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2))
    [lost] = where(service, job)
    service.machine.say(lost, NodeState.LOST)
    moment = service.machine.now
    service.machine.now += 30
    service.settle()
    runs = service.engine.show(job).runs
    assert runs[0].ended == pytest.approx(moment, abs=31)
    assert service.engine.show(job).job.ran <= 2 + 30
    assert node(service, lost).since == moment
    released = service.loop.state.records[job].runs[0].released
    assert released == moment


def test_time_never_goes_back_when_the_losses_of_several_nodes_are_heard_of_late(service: Service) -> None:
    jobs = service.submit(a_request(gpus=2), a_request(gpus=2))
    for job in jobs:
        [lost] = where(service, job)
        service.machine.say(lost, NodeState.LOST)
        service.machine.bury()
        service.machine.now += 5
    service.machine.now += 30
    service.settle()
    for lost in ("gpu-a", "gpu-b"):
        service.machine.say(lost)
    service.settle()
    finish_all(service)
    check_books(service, jobs)


def test_reports_that_say_the_same_again_are_no_news(service: Service) -> None:
    entries = service.loop.store.last
    for _ in range(3):
        service.machine.say("gpu-a")
        service.settle()
    assert service.loop.store.last == entries
    service.machine.say("gpu-a", NodeState.UP, "its agent has restarted")
    service.settle()
    assert service.loop.store.last == entries
    assert node(service, "gpu-a").evidence == "its agent has restarted"
    service.machine.say("gpu-a", NodeState.LOST, "silent")
    service.settle()
    entries, since = service.loop.store.last, node(service, "gpu-a").since
    service.restart()
    service.machine.now += 5
    service.machine.say("gpu-a", NodeState.LOST, "still silent")
    service.machine.say("gpu-a", NodeState.UNREACHABLE, "may be there")
    service.settle()
    assert service.loop.store.last == entries
    assert (node(service, "gpu-a").since, node(service, "gpu-a").evidence) == (since, "still silent")


def test_a_node_that_cannot_be_reached_keeps_its_runs(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2))
    [name] = where(service, job)
    service.machine.say(name, NodeState.UNREACHABLE, "no word for 30 s")
    service.settle()
    assert where(service, job) == {name}
    assert (node(service, name).state, node(service, name).alive) == (NodeCondition.UNREACHABLE, True)
    service.restart()
    assert node(service, name).state is NodeCondition.UNREACHABLE
    service.machine.say(name)
    service.settle()
    kinds = [each.kind for each in told(service, "node-unreachable", "node-reachable", "node-lost")]
    assert kinds == ["node-unreachable", "node-reachable"]


def test_a_node_that_cannot_be_reached_gets_no_new_runs_until_it_can_or_is_back(service: Service) -> None:
    service.machine.say("gpu-a", NodeState.UNREACHABLE, "no word for 30 s")
    service.settle()
    first, second = service.submit(a_request(gpus=2), a_request(gpus=2))
    assert where(service, first) == {"gpu-b"}
    assert (node(service, "gpu-a").free, node(service, "gpu-a").available) == (2, 0)
    assert "node gpu-a (2 GPUs, v100) cannot be reached since" in str(service.engine.why(second))
    service.restart()
    service.machine.say("gpu-a", NodeState.LOST, "no word for 60 s")
    service.settle()
    service.machine.say("gpu-a")
    service.settle()
    assert where(service, second) == {"gpu-a"}


# GPUs that others use


def test_withheld_gpus_get_no_new_runs_and_keep_those_that_they_have(service: Service) -> None:
    [job] = service.submit(a_request())
    [name] = where(service, job)
    service.machine.say(name, withheld=(0, 1, 7))
    service.settle()
    assert where(service, job) == {name}
    assert (node(service, name).withheld, node(service, name).available, node(service, name).free) == ((0, 1), 0, 1)
    [second, third, fourth] = service.submit(*[a_request()] * 3)
    assert where(service, second) == where(service, third) == {"gpu-a", "gpu-b"} - {name}
    evidence = "\n".join(service.engine.why(fourth).evidence)
    assert f"node {name} (v100) withholds 2 GPUs, which others use: its agent says up" in evidence
    service.restart()
    service.settle()
    assert service.engine.show(fourth).job.state is JobState.PENDING
    service.machine.say(name)
    service.settle()
    assert where(service, fourth) == {name}
    texts = [each.text for each in told(service, "node-withheld")]
    assert texts == [
        f"node {name}: GPUs 0, 1 are used by others, and not given out: its agent says up",
        f"node {name}: all its GPUs can be given out again: its agent says up",
    ]


# Drained nodes


def test_a_drained_node_is_emptied_and_its_runs_go_on_elsewhere(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2))
    [name] = where(service, job)
    other = ({"gpu-a", "gpu-b"} - {name}).pop()
    answer = drain(service, name, "new driver")
    assert (answer.drained_by, answer.drain_reason, answer.drained) == ("ops", "new driver", service.machine.now)
    assert where(service, job) == {other}
    cause = service.engine.show(job).runs[0].cause
    assert cause == f"preempted (drained): node {name} is drained by ops: new driver; it comes back by itself"
    row = node(service, name)
    assert (row.state, row.emptied, row.available, row.runs) == (NodeCondition.DRAINED, service.machine.now, 0, ())
    [second] = service.submit(a_request(gpus=2))
    for _ in range(2):
        [waits] = {job, second} - {each for each, _ in service.machine.alive}
        evidence = "\n".join(service.engine.why(waits).evidence)
        assert f"node {name} (2 GPUs, v100) is drained by ops: new driver since 1970-01-01 00:16:4" in evidence
        service.restart()
        service.settle()
        service.pass_time(30)
        assert node(service, name).drained_by == "ops"
    entries = service.loop.store.last
    assert drain(service, name).drain_reason == "new driver"
    assert service.loop.store.last == entries
    assert give_back(service, name).state is NodeCondition.UP
    assert where(service, job) | where(service, second) == {name, other}
    assert node(service, name).drained is None
    entries = service.loop.store.last
    give_back(service, name)
    assert service.loop.store.last == entries
    kinds = [(each.kind, each.actor) for each in told(service, "node-drained", "node-empty", "node-opened")]
    assert kinds == [("node-drained", "ops"), ("node-empty", "service"), ("node-opened", "ops")]
    finish_all(service)
    replay_store(service.loop.store.path)


def test_a_run_that_may_not_be_preempted_stays_until_its_end(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2, preemption="never"))
    [name] = where(service, job)
    answer = drain(service, name)
    assert answer.state is NodeCondition.DRAINING
    [run] = answer.runs
    assert (run.job, run.leaving, run.stays) == (job, False, "it stays until it ends: its owner wants it so")
    for _ in range(2):
        service.pass_time(20)
        service.restart()
        service.settle()
        assert where(service, job) == {name}
        assert node(service, name).state is NodeCondition.DRAINING
    service.machine.end(job, RunEnding.FINISHED)
    service.settle()
    assert node(service, name).state is NodeCondition.DRAINED


def test_a_run_that_cannot_save_yet_leaves_as_soon_as_it_can(service: Service) -> None:
    service.machine.unaware.add("1")
    [job] = service.submit(a_request(gpus=2))
    [name] = where(service, job)
    drain(service, name)
    service.pass_time(20)
    [run] = node(service, name).runs
    assert run.stays is not None
    assert run.stays.startswith("it stays until it can save its work, or ends")
    service.machine.unaware.clear()
    service.machine.report(job, steps=1.0, checkpoint=1.0, throughput=1.0)
    service.settle()
    assert node(service, name).state is NodeCondition.DRAINED
    assert where(service, job) == {"gpu-a", "gpu-b"} - {name}


def test_a_node_is_empty_when_the_last_process_has_left(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="v100:2", backend=LingeringBackend)
    [job] = service.submit(a_request(gpus=2))
    drain(service, "v100-0")
    for _ in range(2):
        [run] = node(service, "v100-0").runs
        assert (run.job, run.leaving, run.stays) == (job, True, None)
        assert node(service, "v100-0").state is NodeCondition.DRAINING
        service.restart()
        service.settle()
    service.machine.end(job, RunEnding.YIELDED)
    service.settle()
    assert node(service, "v100-0").state is NodeCondition.DRAINED
    give_back(service, "v100-0")
    assert where(service, job) == {"v100-0"}


def test_a_drain_outlives_the_loss_of_the_node_and_new_chapters(service: Service) -> None:
    drain(service, "gpu-a", "it is hot")
    service.machine.say("gpu-a", NodeState.LOST, "silent")
    service.settle()
    assert (node(service, "gpu-a").state, node(service, "gpu-a").drained_by) == (NodeCondition.LOST, "ops")
    service.machine.say(C)
    service.pass_time(2)
    service.call(lambda engine: engine.set_policy(ALICE, "max-min"))
    service.restart()
    service.settle()
    [job] = service.submit(a_request(gpus=2))
    assert where(service, job) <= {"gpu-b", "gpu-c"}
    service.machine.say("gpu-a")
    service.pass_time(20)
    assert node(service, "gpu-a").state is NodeCondition.DRAINED
    [second, third] = service.submit(a_request(gpus=2), a_request(gpus=2))
    service.pass_time(20)
    assert "gpu-a" not in {part.node for order in service.machine.alive.values() for part in order.gpus}
    give_back(service, "gpu-a")
    service.pass_time(20)
    assert {job, second, third} == {each for each, _ in service.machine.alive}
    replay_store(service.loop.store.path)


def test_withheld_gpus_are_closed_again_when_a_drain_ends(service: Service) -> None:
    drain(service, "gpu-a")
    service.machine.say("gpu-a", withheld=(0,))
    service.settle()
    give_back(service, "gpu-a")
    drain(service, "gpu-b")
    jobs = service.submit(a_request(), a_request())
    assert [order.gpus[0].slots for order in service.machine.alive.values()] == [(1,)]
    assert {job for job, _ in service.machine.alive} < set(jobs)


def test_an_unknown_node_is_refused_with_the_nearest_one(service: Service) -> None:
    for name, hint in (("gpu-x", "did you mean gpu-"), ("other", "known: gpu-a, gpu-b")):
        with pytest.raises(RequestRefusedError, match=hint) as refused:
            drain(service, name)
        assert refused.value.fault is RefusalCode.UNKNOWN


def test_every_state_of_nodes_counts_in_the_metrics(service: Service) -> None:
    service.loop.deps.metrics.watch(service.engine)
    drain(service, "gpu-a")
    service.machine.say("gpu-b", NodeState.LOST)
    service.settle()
    text = service.loop.deps.metrics.text().decode()
    assert 'poise_nodes{state="drained"} 1.0' in text
    assert 'poise_nodes{state="lost"} 1.0' in text
    assert 'poise_nodes{state="up"} 0.0' in text
    assert 'poise_gpus{state="closed",type="v100"} 2.0' in text
    assert 'poise_gpus{state="lost",type="v100"} 2.0' in text


@pytest.mark.parametrize("policy", ["fifo", "max-min", "gandiva-fair", "themis", "tiresias", "hare"])
def test_under_any_policy_nodes_come_and_go_and_all_jobs_end(policy: str, tmp_path: Path) -> None:
    service = Service(tmp_path, policy=policy, cluster="")
    for each in (A, B, C):
        service.machine.say(each)
        service.pass_time(2)
    service.submit(*[a_request(gpus=gpus, duration=100.0) for gpus in (1, 2, 2, 1, 4, 2)])
    service.pass_time(11)
    drain(service, "gpu-a")
    service.pass_time(11)
    service.machine.say("gpu-b", NodeState.LOST)
    service.pass_time(11)
    assert {part.node for order in service.machine.alive.values() for part in order.gpus} <= {"gpu-c"}
    service.restart()
    service.pass_time(11)
    give_back(service, "gpu-a")
    service.machine.say("gpu-b")
    service.pass_time(25)
    finish_all(service)
    replay_store(service.loop.store.path)


# A full disk


def test_on_a_full_disk_a_lost_node_is_noted_from_the_reserve_and_joins_wait(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2))
    [lost] = where(service, job)
    store = service.loop.store
    commit, room = store.commit, store.has_room
    failures = iter([True])

    def full_once(changes: Sequence[Changes]) -> None:
        if next(failures, False):
            raise StorageError("journal.db: cannot be written: database or disk is full")
        commit(changes)

    store.commit = full_once  # type: ignore[method-assign]
    store.has_room = lambda: False  # type: ignore[method-assign]
    service.machine.say(lost, NodeState.LOST)
    service.settle()
    assert not service.engine.service().ready
    assert node(service, lost).state is NodeCondition.LOST
    assert not service.machine.alive
    service.machine.say(C)
    with pytest.raises(RequestRefusedError, match="disk is full"):
        drain(service, "gpu-a")
    assert len(service.engine.nodes().nodes) == 2
    store.has_room = room  # type: ignore[method-assign]
    service.loop._looked = -inf
    service.pass_time(5)
    service.pass_time(5)
    assert service.engine.service().ready
    assert [each.name for each in service.engine.nodes().nodes] == ["gpu-a", "gpu-b", "gpu-c"]
    assert len(where(service, job)) == 1
    check_standing(service)


@pytest.mark.parametrize("delay", [0.0, 30.0])
def test_a_run_is_lost_with_its_node_whichever_is_reported_first(service: Service, delay: float) -> None:
    """In one turn of the engine, in time or late."""
    [job] = service.submit(a_request(gpus=2))
    [name] = where(service, job)
    tell = service.machine.tell
    said: list[Any] = []
    service.machine.tell = said.append
    service.machine.say(name, NodeState.LOST)
    service.machine.bury()
    service.machine.tell = tell
    for each in reversed(said):
        tell(replace(each, codes=(None,)) if isinstance(each, RunEnded) else each)
    service.machine.now += delay
    service.settle()
    assert service.engine.show(job).failures == 0
    assert where(service, job) == {"gpu-a", "gpu-b"} - {name}
    assert [each.kind for each in told(service, "failed", "interrupted")] == ["interrupted"]
    check_standing(service)
