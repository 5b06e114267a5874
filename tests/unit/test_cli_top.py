"""What `poise top` draws: it fits any screen, counts what it leaves out, and says when it is old."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from poise.cli.top import MOST_ROWS, Watcher
from poise.cli.top_frame import Seen, SortOrder, TopView, frame
from poise.service.client import Client
from poise.service.wire.views import (
    JobRow,
    JobState,
    NodeCondition,
    NodeList,
    NodeRow,
    QueuePage,
    ReasonView,
    ServiceView,
    Shares,
    TenantShare,
)

SERVICE = ServiceView(
    version="1", policy="las", cluster="gpu:4", round=1.0, now=1_700_000_000.0, started=0.0, ready=True, problem=None, jobs=1
)


def a_job(number: int, *, name: str = "fit", gpus: int = 0, **more: Any) -> JobRow:
    return JobRow(
        id=str(number), name=name, tenant="vision", app=None, state=JobState.RUNNING if gpus else JobState.PENDING, flags=(),
        reason=ReasonView(code="capacity", text="waits for 2 GPUs of type v100; 3 jobs are before it"), position=number,
        gpus=gpus, wanted=1, gpu_type="v100" if gpus else None, gpu_types=(), submitted=0.0, started=None, finished=1.0,
        waited=61.0, ran=float(number), restarts=0, eta=None, share=None, **more,
    )  # fmt: skip


def a_node(number: int, gpus: int, used: int, kind: str = "v100", state: NodeCondition = NodeCondition.UP) -> NodeRow:
    jobs = tuple("1" if slot < used else None for slot in range(gpus))
    return NodeRow(
        name=f"node-{number}", gpu_type=kind, gpus=gpus, free=gpus - used, rack="r", alive=True, jobs=jobs, state=state
    )


def a_tenant(name: str, gpus: int) -> TenantShare:
    return TenantShare(
        tenant=name, weight=1.0, entitled=0.5, held=0.25, gpus=gpus, running=1, waiting=2, gpu_seconds=0.0, preemptions=0
    )


def seen(running: int = 0, waiting: int = 0, nodes: int = 1, tenants: int = 1, ended: int = 0, name: str = "fit") -> Seen:
    return Seen(
        SERVICE,
        NodeList(nodes=tuple(a_node(number, 4, number % 5, kind=f"type{number % 7}") for number in range(nodes))),
        Shares(tenants=tuple(a_tenant(f"tenant-{number}", number) for number in range(tenants))),
        tuple(a_job(number, gpus=1 + number % 3, name=name) for number in range(running)),
        tuple(a_job(1000 + number, name=name) for number in range(waiting)),
        tuple(a_job(2000 + number, name=name) for number in range(ended)),
        {"RUNNING": running, "PENDING": waiting},
    )


def texts(found: Seen, view: TopView | None = None, width: int = 80, height: int = 24) -> list[str]:
    return [line.text for line in frame(found, view or TopView(footer="q quit"), width, height)]


COUNTS = st.integers(0, 40)


@given(
    running=COUNTS, waiting=COUNTS, nodes=COUNTS, tenants=COUNTS, ended=COUNTS, width=st.integers(1, 300),
    height=st.integers(0, 80), name=st.sampled_from(["fit", "実験" * 20, "e\x1b[2J", "🧪" * 40]),
    order=st.sampled_from(SortOrder),
)  # fmt: skip
def test_it_fits_any_screen(width: int, height: int, order: SortOrder, **counts: Any) -> None:
    lines = texts(seen(**counts), TopView(order, ended=True, footer="q quit"), width, height)
    assert len(lines) <= height
    assert all(cell_len(line) <= width and "\x1b" not in line and "\n" not in line for line in lines)
    if height:
        assert lines[-1] == "q quit"[:width]


def test_a_usual_terminal_shows_something_of_everything() -> None:
    lines = texts(seen(running=300, waiting=50_000, nodes=900, tenants=70, ended=9), TopView(ended=True, footer="q quit"))
    assert len(lines) == 24
    text = "\n".join(lines)
    parts = (
        "poise 1 · las · 2023-11-14 22:13:20Z", "type0  [", "more GPU types", "more nodes", "tenant-69", "more tenants",
        "300 jobs on GPUs", "50,000 jobs waiting", "ended last", "waits for 2 GPUs",
    )  # fmt: skip
    assert [part for part in parts if part not in text] == []


def test_jobs_show_progress_speed_and_loss_as_far_as_they_report_them() -> None:
    job = a_job(1, gpus=2, steps=250.0, total_steps=1000.0, throughput=12.34, loss=0.5)
    row = texts(replace(seen(running=1), running=(job,)))[7].split()
    assert row == ["1", "fit", "vision", "2", "v100", "1s", "25%", "12.3", "0.5"]
    endless = job.model_copy(update={"total_steps": None, "loss": None})
    assert texts(replace(seen(running=1), running=(endless,)))[7].split()[-3:] == ["250", "12.3", "–"]


def test_running_jobs_are_sorted_as_wished() -> None:
    def ids(order: SortOrder) -> list[str]:
        lines = texts(seen(running=3), TopView(order))
        return [line.split()[0] for line in lines[lines.index("3 jobs on GPUs") + 2 :][:3]]

    assert ids(SortOrder.QUEUE) == ["0", "1", "2"]
    assert ids(SortOrder.GPUS) == ["2", "1", "0"]
    assert ids(SortOrder.QUEUE.next().next()) == ["2", "1", "0"]
    assert SortOrder.RAN.next() is SortOrder.QUEUE


def test_nodes_that_are_not_well_come_first_and_trouble_is_said_at_the_top() -> None:
    nodes = NodeList(nodes=(a_node(0, 4, 1), a_node(1, 4, 0, state=NodeCondition.LOST)))
    lines = texts(replace(seen(), nodes=nodes), TopView(trouble="no answer from http://x"))
    assert lines[0] == "as of 2023-11-14 22:13:20Z: no answer from http://x"
    assert lines[2] == "node-1 0/4 lost  node-0 1/4"
    broken = SERVICE.model_copy(update={"ready": False, "problem": "the disk is full"})
    assert texts(replace(seen(), service=broken))[0] == "the service cannot work: the disk is full"


class Counting(Client):
    """A client of a service with many jobs, which notes what is asked for."""

    def __init__(self, running: int, waiting: int) -> None:
        self.rows = [*(a_job(number, gpus=1) for number in range(running)), *map(a_job, range(running, running + waiting))]
        self.counts = {"RUNNING": running, "PENDING": waiting}
        self.asked: list[int] = []

    def queue(self, *, limit: int = 50, offset: int = 0, **_: Any) -> QueuePage:
        self.asked.append(limit)
        return QueuePage(jobs=tuple(self.rows[offset : offset + limit]), total=len(self.rows), counts=self.counts)

    def service(self) -> ServiceView:
        return SERVICE

    def nodes(self) -> NodeList:
        self.asked.append(-1)
        return NodeList(nodes=tuple(a_node(number, 1, 0) for number in range(1200)))

    def shares(self) -> Shares:
        return Shares(tenants=())


@pytest.mark.parametrize(("running", "waiting"), [(0, 0), (3, 2), (3, 5_000), (400, 5_000), (400, 0)])
def test_only_what_is_drawn_is_asked_for_of_jobs_however_many_there_are(running: int, waiting: int) -> None:
    client = Counting(running, waiting)
    found = Watcher(client).look(50, ended=False)
    assert [row.id for row in found.running] == [row.id for row in client.rows[:running][:50]]
    assert [row.id for row in found.waiting][:5] == [row.id for row in client.rows[running:][:5]]
    assert sum(each for each in client.asked if each > 0) <= 100 <= MOST_ROWS


def test_nodes_of_a_large_cluster_are_asked_for_less_often() -> None:
    client = Counting(0, 0)
    watcher = Watcher(client)
    for _ in range(6):
        watcher.look(1, ended=False)
    assert client.asked.count(-1) == 2
