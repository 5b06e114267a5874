"""An app is its tenant's own: apps of two tenants that have one name fare as apps of two names."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import Story
from tests.strategies import World, policies, worlds

from poise.lab.analysis.fairness import Fairness, rho
from poise.lab.analysis.history import History
from poise.lab.traces.schema import LossCurve, TraceJob
from poise.scheduler.model.action import JournalEntry
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.event import Submitted

SWEEPING = ("themis", "themis:lease=5", "themis:lease=3,f=0.4,error=0.2,payment=lease")
"""Policies that look at apps."""


def own(each: TraceJob) -> TraceJob:
    """The same job, its app called by its tenant as well."""
    app = None if each.job.app is None else f"{each.job.tenant}'s {each.job.app}"
    return replace(each, job=replace(each.job, app=app))


def unnamed(entries: list[JournalEntry]) -> list[JournalEntry]:
    """A journal without the names of apps."""
    return [
        entry._replace(
            events=tuple(
                replace(fact, job=replace(fact.job, app=None)) if isinstance(fact, Submitted) else fact
                for fact in entry.events
            )
        )
        for entry in entries
    ]


def by_app(story: Story) -> Floats:
    history = History.of(story.entries, story.cluster)
    lives = history.ended_jobs()
    return rho(history, lives, Fairness.APP) if lives else np.empty(0)


def swept(world: World) -> World:
    """The same, with all jobs in an app of one name, and reports that come to different ends."""
    curves = (LossCurve(0.5, 1.0, 0.1 * (n % 7)) for n in range(len(world.jobs)))
    jobs = [
        replace(each, job=replace(each.job, app="sweep"), loss=curve) for each, curve in zip(world.jobs, curves, strict=True)
    ]
    return replace(world, jobs=jobs)


@given(worlds(policy=st.sampled_from(SWEEPING)).map(swept) | worlds(policy=policies))
def test_apps_of_two_tenants_with_one_name_fare_as_apps_of_two_names(world: World) -> None:
    story, apart = world.played(), replace(world, jobs=[own(each) for each in world.jobs]).played()
    assert unnamed(story.entries) == unnamed(apart.entries)
    assert np.array_equal(by_app(story), by_app(apart), equal_nan=True)
