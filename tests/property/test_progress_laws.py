"""What is believed of a job's progress is the integral of its believed speed, however often that changes."""

from dataclasses import dataclass, replace
from math import floor

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tests.builders import a_job, simulate

from poise.lab.simulator.runs import SimulatedRun
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.action import JournalEntry
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.job_table import JobTable, JobView

STEPS, BEST = 10_000.0, 2.0

moments = st.sampled_from((0.0, 0.25, 1.0, 2.5, 7.0, 30.0))
rates = st.sampled_from((0.0, 0.5, 1.0, 1.75, 2.0))
changes = st.tuples(st.just("rate"), moments, rates)
reports = st.tuples(st.just("report"), moments, st.sampled_from((0.0, 3.0, 40.0)))
runs = st.tuples(rates, st.sampled_from((0.0, 1.5, 10.0)), st.lists(changes | reports, max_size=8), moments)
"""A run: speed and overhead at its start, what happens to it, each so much later, and what is left of it then."""


@dataclass
class Oracle:
    """A run as a list of spans of one speed, added up anew at every question."""

    before: float
    started: float
    spells: list[tuple[float, float]]
    """From when, how fast."""

    def done(self, now: float, since: float) -> float:
        """Work done by now if progress is made from `since` on."""
        ends = [at for at, _ in self.spells[1:]] + [now]
        spells = zip(self.spells, ends, strict=True)
        return self.before + sum(rate * max(0.0, end - max(at, since)) for (at, rate), end in spells)


@given(st.lists(runs, min_size=1, max_size=3), st.booleans())
def test_work_left_is_what_the_integral_of_the_speed_leaves(
    lives: list[tuple[float, float, list[tuple[str, float, float]], float]], waits: bool
) -> None:
    columns, now, done, held = JobTable(), 0.0, 0.0, 0.0
    row = columns.append(Job("a", 0.0, 1), STEPS, kind=0, best=BEST, skew=None, now=0.0)
    for rate, overhead, happens, rest in lives:
        columns.start(row, now, place=0, gpus=1, rate=rate, overhead=overhead)
        oracle = Oracle(done, now, [(now, rate)])
        for what, later, value in [*happens, ("look", rest, 0.0)]:
            now += later
            if what == "rate":
                columns.change_rate(row, now, value)
                oracle.spells.append((now, value))
            elif what == "report":
                columns.report(row, value)
                oracle.before = value
            view = JobView(columns, row, now)
            counted, worked = oracle.done(now, oracle.started), oracle.done(now, oracle.started + overhead)
            assert view.remaining_seconds * BEST == pytest.approx(STEPS - counted)
            assert view.attained_seconds == pytest.approx(held + now - oracle.started)
            assert columns.done_before(row) == pytest.approx(oracle.before)
            since = max(now - columns.progress_from[row], 0.0)
            assert columns.steps_done[row] + columns.rate[row] * since == pytest.approx(worked)
        held += now - oracle.started
        done = oracle.done(now, oracle.started + overhead)
        columns.stop(row, now, Status.WAITING)
        now += waits
        assert JobView(columns, row, now).remaining_seconds * BEST == pytest.approx(STEPS - done)
        assert columns.done_before(row) == pytest.approx(done)


MODELS = (("LM", 80), ("Recommendation", 2048), ("A3C", None), ("ResNet-18", 128))
"""Of which it is known how they do beside each other."""
sharing = st.sampled_from(("gandiva:quantum=300,period=600", "max-min+packed", "max-throughput:count=raw+packed"))
some_jobs = st.lists(
    st.tuples(st.sampled_from(MODELS), st.integers(0, 20), st.sampled_from((300.0, 2000.0, 5000.0))), min_size=2, max_size=8
)


@given(sharing, some_jobs, st.sampled_from((0.0, 45.0)))
def test_of_jobs_that_share_gpus_work_left_is_what_the_integral_of_the_speed_leaves(
    policy: str, drawn: list[tuple[tuple[str, int | None], int, float]], overhead: float
) -> None:
    """Instant by instant: what the core believed of a run's speed since the last instant is added up."""
    added: dict[tuple[int, int], tuple[float, float, float]] = {}
    changed: set[tuple[int, int]] = set()

    def watch(scheduler: Scheduler, entry: JournalEntry) -> None:
        state, columns = scheduler.state, scheduler.state.columns
        snapshot = state.snapshot(entry.now)
        for row, left in zip(snapshot.active, snapshot.steps_left.tolist(), strict=True):
            if not state.running(row):
                continue
            run, worked_from = (row, columns.epoch[row]), columns.started[row] + scheduler.lifecycle._overhead(row)
            counted, worked, rate = added.get(run, (0.0, 0.0, 0.0))
            since = last[0] if run in added else entry.now
            counted += rate * (entry.now - since)
            worked += rate * max(0.0, entry.now - max(since, worked_from))
            changed.update({run} if run in added and rate != columns.rate[row] else ())
            added[run] = counted, worked, columns.rate[row]
            view, total = JobView(columns, row, entry.now), columns.steps[row] - columns.done_before(row)
            assert view.remaining_seconds * columns.best[row] == pytest.approx(total - counted, abs=1e-6)
            assert left == pytest.approx(max(total - worked, 0.0), abs=1e-6)
        last[0] = entry.now

    last = [0.0]
    jobs = [
        replace(each, job=replace(each.job, batch_size=batch))
        for n, ((model, batch), at, seconds) in enumerate(drawn)
        for each in [a_job(f"{n}", at=100.0 * at, seconds=seconds, model=model)]
    ]
    simulate(jobs, policy, "v100:1", settings=Settings(restart_overhead=overhead), watch=watch)
    event("rates change" if changed else "no rate changes")


@given(rates, st.lists(st.tuples(moments, rates), max_size=6), moments, st.sampled_from((1.0, 4.0, 100.0)))
def test_what_a_run_has_saved_is_what_it_had_done_at_its_last_checkpoint(
    first: float, happens: list[tuple[float, float]], rest: float, every: float
) -> None:
    """Also of a run whose speed has changed since: that writes no checkpoint."""
    run, now = SimulatedRun(1, (), first, since=10.0, steps=5.0), 10.0
    oracle = Oracle(5.0, now, [(now, first)])
    for later, rate in happens:
        now += later
        run.change_rate(now, rate, every)
        oracle.spells.append((now, rate))
    now += rest
    assert run.steps_at(now) == pytest.approx(oracle.done(now, 0.0))
    last = 10.0 + every * floor((now - 10.0) / every)
    begun = Oracle(5.0, 10.0, [each for each in oracle.spells if each[0] <= last])
    assert run.saved_at(now, every) == pytest.approx(begun.done(last, 0.0))
