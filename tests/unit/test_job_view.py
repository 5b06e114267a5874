"""What policies see of jobs: one by one as views, all at once as columns, and both say the same."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from inspect import getdoc
from math import inf, isnan
from typing import Any

import pytest
from tests.builders import EVENTS, a_cluster, a_job, simulate

from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import TraceJob
from poise.policies import Claim, JobView, Plan, Policy, PreemptionRule, Snapshot, Unfitting
from poise.scheduler.model.job_table import JobTable

ATTRIBUTES = tuple(name for name, value in vars(JobView).items() if isinstance(value, property))
UNSTATED = {"skew": float("nan"), "batch_size": 0}
"""What columns hold where a view has None."""


@dataclass
class Onlooker:
    """Jobs in order of submission; keeps what it sees of them, as text, which must not change afterwards."""

    seen: list[tuple[float, dict[str, list[Any]], dict[str, list[Any]]]] = field(default_factory=list)

    def start(self) -> None:
        return None

    def plan(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        views = {name: [getattr(view, name) for view in snapshot.jobs()] for name in ATTRIBUTES}
        columns = {name: _listed(getattr(snapshot, name)) for name in ATTRIBUTES}
        self.seen.append((snapshot.now, views, columns))
        claims = tuple(map(Claim, snapshot.active))
        return Plan(claims, Unfitting.SKIPPED, PreemptionRule.BY_RANK), memory


def _listed(column: Any) -> list[Any]:
    return list(column) if isinstance(column, tuple) else column.tolist()


def _same(one: object, other: object) -> bool:
    return one == other or (isinstance(one, float) and isinstance(other, float) and isnan(one) and isnan(other))


def jobs() -> Iterable[TraceJob]:
    yield a_job("wide", gpus=4, seconds=50)
    stated = {
        "name": "night run",
        "tenant": "vision",
        "app": "sweep",
        "priority": 7,
        "deadline": 900.0,
        "tenant_weight": 2.0,
    }
    long = a_job("long", at=1, seconds=100, weight=3, model="ResNet50")
    yield replace(long, job=replace(long.job, batch_size=32, **stated))  # type: ignore[arg-type]
    yield a_job("again", at=5, gpus=2, seconds=30, dies=(3.0, 4.0))
    elastic = a_job("elastic", at=6, gpus=2, seconds=40)
    yield replace(elastic, job=replace(elastic.job, min_gpus=1, max_gpus=4))
    yield a_job("shares", at=7, gpus=2, seconds=20, batches=8)
    steps = a_job("steps", at=8)
    yield replace(steps, job=replace(steps.job, steps=12.0, duration=None, model="ResNet50", gpu_types=("v100",)))


@pytest.fixture(scope="module")
def seen() -> list[tuple[float, dict[str, list[Any]], dict[str, list[Any]]]]:
    watching = Onlooker()
    simulate(
        list(jobs()), Policy("onlooker", watching), a_cluster("v100:4,k80:2"), settings=replace(EVENTS, restart_overhead=2)
    )
    return watching.seen


def test_every_attribute_of_a_view_is_a_column_of_the_snapshot(seen: list[Any]) -> None:
    assert len(seen) > 10
    for _, views, columns in seen:
        for name in ATTRIBUTES:
            want = [UNSTATED.get(name) if each is None and name in UNSTATED else each for each in views[name]]
            assert all(map(_same, want, columns[name])), (name, want, columns[name])
            assert len(want) == len(columns[name])


def test_a_view_has_what_the_owner_said(seen: list[Any]) -> None:
    _, views, _ = next(each for each in seen if "steps" in each[1]["id"])
    job = {name: values[views["id"].index("long")] for name, values in views.items()}
    assert (job["name"], job["tenant"], job["app"], job["model"]) == ("night run", "vision", "sweep", "ResNet50")
    assert (job["priority"], job["deadline"], job["weight"], job["tenant_weight"]) == (7, 900.0, 3.0, 2.0)
    assert (job["batch_size"], job["submitted"]) == (32, 1.0)
    assert (job["declared_seconds"], job["declared_steps"]) == (100.0, inf)
    steps = {name: values[views["id"].index("steps")] for name, values in views.items()}
    assert (steps["declared_seconds"], steps["declared_steps"], steps["believed_steps"]) == (inf, 12.0, 12.0)
    assert steps["gpu_types"] == ("v100",)
    elastic = {name: values[views["id"].index("elastic")] for name, values in views.items()}
    assert (elastic["min_gpus"], elastic["gang"], elastic["max_gpus"]) == (1, 2, 4)
    shares = views["micro_batches"][views["id"].index("shares")]
    assert shares == 8


def test_work_done_and_left_add_up_to_all_work(seen: list[Any]) -> None:
    for _, views, _ in seen:
        for done, left, steps in zip(views["steps_so_far"], views["steps_left"], views["believed_steps"], strict=True):
            assert done + left == pytest.approx(steps, abs=1e-6) or done > steps


def test_every_attribute_says_what_it_is_in_both_places() -> None:
    for name in ATTRIBUTES:
        assert getdoc(getattr(JobView, name)), name
        assert getdoc(vars(Snapshot)[name]), name


def test_what_an_owner_said_is_kept_until_the_job_has_ended() -> None:
    """The table holds the job itself, so a long service does not keep all jobs that it ever had."""
    story = simulate(list(jobs()), "fifo", "v100:4,k80:2")
    table: JobTable = story.scheduler.state.columns
    assert len(table.ids) == len(list(jobs()))
    assert not table.jobs


def test_jobs_that_are_rejected_or_cancelled_are_not_kept() -> None:
    huge = a_job("huge", gpus=64)
    story = simulate([huge, *jobs()], "fifo", "v100:4,k80:2", truth=Truth(0.0))
    assert not story.scheduler.state.columns.jobs
