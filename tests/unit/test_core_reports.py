"""What running jobs report of their loss, and who gets to know."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from tests.builders import EVENTS, a_job, nodes, simulate
from tests.whims import a_plan, scripted

from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import LossCurve, TraceJob
from poise.scheduler.model.action import WakeAt
from poise.scheduler.model.cluster import NodeGpus
from poise.scheduler.model.event import Progressed
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim, Plan, Policy

CURVE = LossCurve(0.5, 1.0, 0.25)


def reporting(name: str, **fields: float) -> TraceJob:
    return replace(a_job(name, **fields), loss=CURVE)  # type: ignore[arg-type]  # at and seconds


def test_a_curve_falls_to_its_floor() -> None:
    assert [CURVE.loss(steps) for steps in (0.0, 2.0, 6.0)] == [1.25, 0.75, 0.5]


def test_a_run_reports_its_loss_at_even_times_of_progress() -> None:
    how, truth = replace(EVENTS, restart_overhead=2.0), Truth(restart_overhead=2.0, report_every=4.0)
    story = simulate([reporting("a"), a_job("silent")], settings=how, truth=truth)
    assert story.events(Progressed) == [
        (6, Progressed("a", 1, 4.0, CURVE.loss(4))),
        (10, Progressed("a", 1, 8.0, CURVE.loss(8))),
    ]


def test_a_run_that_begins_when_the_last_one_would_report_reports_once() -> None:
    plans = {0.0: a_plan(Claim(0, site=(NodeGpus(0, 1),))), 4.0: a_plan(Claim(0, site=(NodeGpus(1, 1),)))}
    story = simulate([reporting("a")], scripted(plans), nodes(1, 1), truth=Truth(report_every=4.0))
    assert [(now, fact.epoch, fact.steps) for now, fact in story.events(Progressed)] == [(4, 1, 4), (8, 2, 8)]


def test_reports_of_one_moment_are_in_the_order_of_launch() -> None:
    story = simulate([reporting("z"), reporting("a")], truth=Truth(report_every=4.0))
    assert [fact.job for _, fact in story.events(Progressed)] == ["z", "a", "z", "a"]


def test_a_report_calls_for_no_decision() -> None:
    story = simulate([reporting("a")], truth=Truth(report_every=4.0))
    assert story.scheduler.decisions == simulate([a_job("a")]).scheduler.decisions
    assert not story.actions(WakeAt)


class Listening:
    """Runs everybody, and keeps what it was told of losses."""

    def __init__(self) -> None:
        self.heard: list[Mapping[int, Sequence[tuple[float, float]]]] = []

    def start(self) -> None:
        return None

    def plan(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        self.heard.append({row: tuple(told) for row, told in snapshot.losses.items()})
        return a_plan(*map(Claim, snapshot.active), wake=inf), memory


def test_planners_see_what_active_jobs_have_reported() -> None:
    ear = Listening()
    jobs = [reporting("a", seconds=10.0), a_job("b", at=9.0), a_job("c", at=11.0)]
    simulate(jobs, Policy("listening", ear), truth=Truth(report_every=4.0))
    assert ear.heard[:2] == [{}, {0: ((4.0, CURVE.loss(4)), (8.0, CURVE.loss(8)))}]
    assert ear.heard[3] == {}, "a job that has ended is forgotten"
