"""Successive halving inside an app: rungs, who is given up and when, and that nobody is who reports nothing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import Story, a_job, simulate

from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import LossCurve, TraceJob
from poise.scheduler.model.action import Cancel
from poise.scheduler.model.job import Status
from poise.scheduler.model.plan import Policy
from poise.scheduler.policies.themis.halving import Halving
from poise.scheduler.policies.themis.planner import Themis

HOUR = 3600.0


def a_sweep(floors: list[float], *, seconds: float = 8 * HOUR, app: str | None = "sweep") -> list[TraceJob]:
    """Jobs of one app whose losses come down to these."""
    jobs = (replace(a_job(f"{n}", seconds=seconds), loss=LossCurve(0.01, 1.0, floor)) for n, floor in enumerate(floors))
    return [replace(each, job=replace(each.job, app=app)) for each in jobs]


def run(jobs: list[TraceJob], cluster: str = "gpu:8", halving: float = 2.0) -> Story:
    return simulate(jobs, Policy("themis", Themis(halving=halving)), cluster, truth=Truth(report_every=600.0))


def test_rungs_of_eight_are_at_an_eighth_a_quarter_and_a_half() -> None:
    halving = Halving()
    assert [halving.part(8, rung) for rung in (1, 2, 3)] == [1 / 8, 1 / 4, 1 / 2]
    assert [halving.kept(8, rung) for rung in (1, 2, 3)] == [4, 2, 1]


@given(st.integers(2, 100), st.floats(1.5, 4.0))
def test_each_rung_lies_before_the_end_and_keeps_fewer_until_one_is_left(jobs: int, eta: float) -> None:
    halving, live, rungs = Halving(eta), jobs, 0
    while live > 1:
        rung = halving.rung(jobs, live)
        assert 0 < halving.part(jobs, rung) < 1
        assert 1 <= halving.kept(jobs, rung) < live
        live, rungs = halving.kept(jobs, rung), rungs + 1
    assert rungs <= 100


def test_the_worst_half_is_given_up_at_each_rung_and_the_best_job_finishes() -> None:
    story = run(a_sweep([0.8, 0.1, 0.5, 0.7, 0.3, 0.6, 0.2, 0.4]))
    given_up = [(now, action.job) for now, action in story.actions(Cancel)]
    assert [job for _, job in given_up] == ["0", "2", "3", "5", "4", "7", "6"]
    assert [now / HOUR for now, _ in given_up] == pytest.approx([1, 1, 1, 1, 2, 2, 4])
    assert story.finishes == {"1": 8 * HOUR}
    assert all(story.status(job) is Status.CANCELLED for _, job in given_up)


def test_why_a_job_was_given_up_is_said() -> None:
    story = run(a_sweep([0.5, 0.1]))
    assert [action.reason for _, action in story.actions(Cancel)] == ["loss among the worst 1 of 2 after 0.5 of the work"]


def test_jobs_that_report_no_loss_are_never_given_up() -> None:
    silent = [replace(each, loss=None) for each in a_sweep([0.5, 0.1])]
    assert len(run(silent).finishes) == 2
    half = [silent[0], a_sweep([0.5, 0.1])[1]]
    assert len(run(half).finishes) == 2


def test_jobs_without_an_app_are_rivals_not_siblings() -> None:
    assert len(run(a_sweep([0.5, 0.1], app=None)).finishes) == 2


def test_two_tenants_may_call_their_apps_the_same() -> None:
    """Each app of two is judged by itself, at half of the work; taken for one, its four jobs would be at a quarter."""
    jobs = [
        replace(each, job=replace(each.job, tenant="owner" if number < 2 else "stranger"))
        for number, each in enumerate(a_sweep([0.8, 0.7, 0.2, 0.1]))
    ]
    story = run(jobs)
    assert [(now / HOUR, action.job) for now, action in story.actions(Cancel)] == [(4, "0"), (4, "2")]
    assert story.finishes == {"1": 8 * HOUR, "3": 8 * HOUR}


def test_halving_by_one_keeps_everybody() -> None:
    assert len(run(a_sweep([0.5, 0.1, 0.3]), halving=1.0).finishes) == 3


def test_jobs_of_a_sweep_take_turns_until_all_have_reached_the_rung() -> None:
    """Four jobs on two GPUs: nobody is judged before all four have done a quarter of their work, an hour each."""
    story = run(a_sweep([0.4, 0.3, 0.2, 0.1], seconds=4 * HOUR), "gpu:2")
    assert [action.job for _, action in story.actions(Cancel)] == ["0", "1", "2"]
    assert min(now for now, _ in story.actions(Cancel)) >= 2 * HOUR
    assert list(story.finishes) == ["3"]


def test_reports_that_are_rare_settle_several_rungs_at_once() -> None:
    """One report halfway: by then the rungs at a quarter and at a half have both been reached."""
    jobs = a_sweep([0.4, 0.3, 0.2, 0.1], seconds=2 * HOUR)
    story = simulate(jobs, "themis", "gpu:4", truth=Truth(report_every=HOUR))
    assert [now for now, _ in story.actions(Cancel)] == [HOUR] * 3
    assert story.finishes == {"3": 2 * HOUR}
