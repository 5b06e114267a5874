"""The same events give the same actions: runs repeat, journals replay, names mean nothing, and the unit of time neither."""

import re
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import VARIANTS, World, worlds

from poise.engine.assembly import with_rounds
from poise.lab.conformance.laws import renamed
from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import FailedAttempt, TraceJob
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.model.workload import Allocator
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import POLICIES, policy_named
from poise.scheduler.policies.hare.offline import Hare


@given(worlds(forever=True))
def test_two_runs_give_equal_journals(world: World) -> None:
    assert world.played().entries == world.played().entries


@given(worlds(forever=True))
def test_the_facts_of_a_journal_lead_to_its_wishes_again(world: World) -> None:
    again = Scheduler(
        world.cluster, with_rounds(world.how, world.settings), placement_named(world.placement), world.settings
    )
    for now, events, actions in world.played().entries:
        assert again.handle(now, events) == actions


@given(worlds(), st.randoms(use_true_random=False))
def test_names_of_jobs_mean_nothing(world: World, random: Any) -> None:
    """In particular, equal jobs in another order change nothing but who is called what."""
    old = [each.job.id for each in world.jobs]
    new = random.sample(old, len(old))
    names = dict(zip(old, new, strict=True))
    jobs = [replace(each, job=replace(each.job, id=names[each.job.id])) for each in world.jobs]
    got = replace(world, jobs=jobs).played().entries
    assert got == [renamed(entry, names) for entry in world.played().entries]


@given(worlds(), st.randoms(use_true_random=False))
def test_rows_in_another_order_change_nothing_if_submission_times_differ(world: World, random: Any) -> None:
    apart = [replace(each, job=replace(each.job, submitted=i / 2)) for i, each in enumerate(world.jobs)]
    shuffled = random.sample(apart, len(apart))
    assert replace(world, jobs=apart).played().entries == replace(world, jobs=shuffled).played().entries


TIMES = (
    "round", "restart_overhead", "minimum_run", "packed_wait", "rack_wait", "defragment", "validation_time", "backoff",
)  # fmt: skip
"""The settings that are seconds."""


def twice_as_slow(world: World) -> World:
    """All times doubled, which is exact in binary."""
    how, truth = world.settings, world.truth
    return World(
        jobs=[_doubled(each) for each in world.jobs],
        cluster=world.cluster,
        policy=re.sub(
            r"(limits|quantum|period|interval|window|backoff|lease|rest|cost)=([\d./]+)",
            _doubled_numbers,
            world.policy,
        ),
        placement=world.placement,
        settings=replace(how, **{name: 2 * getattr(how, name) for name in TIMES}),
        outages=[each._replace(time=each.time * 2, duration=each.duration * 2) for each in world.outages],
        truth=Truth(truth.restart_overhead * 2, truth.checkpoint_every * 2, report_every=truth.report_every * 2),
    )


def _doubled(each: TraceJob) -> TraceJob:
    job = replace(each.job, submitted=each.job.submitted * 2, duration=(each.job.duration or 0.0) * 2)
    loss = None if each.loss is None else each.loss._replace(speed=each.loss.speed / 2)
    failures = tuple(FailedAttempt(died.after * 2, died.cause) for died in each.failures)
    return replace(each, job=job, failures=failures, loss=loss)


def _doubled_numbers(found: re.Match[str]) -> str:
    return f"{found[1]}=" + "/".join(str(float(number) * 2) for number in found[2].split("/"))


STEPLESS = [
    spec
    for spec in (*(name for name, listing in POLICIES.items() if not listing.parameters), *VARIANTS)
    if not isinstance(policy_named(spec).answer, Allocator | Hare)
]
"""All parameters that are seconds are doubled. Not shares, of which time is received in whole steps, nor hare, which thinks

in tasks: a step of these jobs is a second, and does not become two.
"""


@given(worlds(policy=st.sampled_from(STEPLESS), divides=False))
def test_the_unit_of_time_means_nothing(world: World) -> None:
    slow, fast = twice_as_slow(world).played(), world.played()
    assert [entry.now for entry in slow.entries] == [2 * entry.now for entry in fast.entries]
    assert [(run.job, run.gpus, run.began) for run in slow.runs] == [(run.job, run.gpus, 2 * run.began) for run in fast.runs]
