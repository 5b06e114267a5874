"""Failures for jobs that have none: which jobs fail, of what, how often, after how long, and which pass in the end.

As published of Philly (`philly_shape`). A job that fails does so of one cause, a number of times; causes are drawn by their
numbers of jobs, attempts by attempts per job, and the running time of each attempt on its own. A job that dies of a
transient cause (`model.failures`) may heal: the run after its last failed attempt does the work. All others are broken:
they fail for good with their last failed attempt, as their owners give up, and no retry helps; unless all are to pass. How
many heal follows from the paper's numbers: its causes are those of 17,580 jobs, of which 16,568 were unsuccessful.

A job lives to see its failed attempts: where it would be done before, it is lengthened. So run times to failure are as
published whatever the jobs' own durations, as in Philly, where a failed job has no duration but that of its attempts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from poise.lab.traces import philly_shape
from poise.lab.traces.distributions import pick
from poise.lab.traces.parsing import FieldError, field_refusal, number
from poise.lab.traces.philly_shape import CAUSES, MOST_ATTEMPTS, STATUSES
from poise.lab.traces.schema import FailedAttempt, JobOutcome, Trace, TraceJob
from poise.scheduler.model.errors import UnknownNameError
from poise.scheduler.model.failures import Verdict, verdict
from poise.scheduler.model.job import Job

NONE, PHILLY = "none", "philly"
KNOBS = ("rate", "heal", "killed")
FORMS = "none, philly, philly:rate=FRACTION,heal=FRACTION,killed=FRACTION, or a fraction"

_PASSES = np.array([verdict(cause.name) is Verdict.TRANSIENT for cause in CAUSES])
_JOBS = np.array([cause.jobs for cause in CAUSES], float)
_ALL_JOBS, _FAILING = sum(STATUSES.values()), int(_JOBS.sum())
_HEALED = _FAILING - STATUSES["failed"]
_STREAM = 6
"""Beside the seed, so that failures are drawn from other numbers than outages are."""
_LONGER = 0.001
"""Seconds that a job lasts longer than its failed attempts, at least."""


@dataclass(frozen=True, slots=True)
class FailureModel:
    """Which jobs fail; all are fractions from 0 to 1.

    rate     of all jobs: those that fail at least once; 0.183 as published
    heal     of jobs that die of a transient cause: those that pass in the end; 0.593 makes 17.2 % of all unsuccessful
    killed   of jobs that do not fail: those that their owners cancel at their end; 0.165 makes 13.5 % of all jobs
    mended   of jobs that die of any other cause: those that pass in the end all the same
    """

    rate: float = _FAILING / _ALL_JOBS
    heal: float = float(_HEALED / _JOBS[_PASSES].sum())
    killed: float = STATUSES["killed"] / (_ALL_JOBS - _FAILING)
    mended: float = 0.0

    def __bool__(self) -> bool:
        """Whether anything is drawn at all."""
        return self.rate > 0 or self.killed > 0


def parse_failure_model(spec: str) -> FailureModel:
    """Read `none`; `philly`, as published; `philly:rate=0.3`, with other fractions; or `0.3`: 30 % fail at first, all pass.

    Raises FieldError for a wrong value, UnknownNameError for an unknown name.
    """
    kind, colon, body = spec.partition(":")
    if kind == PHILLY:
        given: dict[str, float] = {}
        for part in body.split(",") if colon else ():
            name, equals, text = part.partition("=")
            if not equals:
                raise field_refusal("failures", f"knob=value with a knob of {', '.join(KNOBS)}", part)
            if name not in KNOBS:
                raise UnknownNameError("knob of failures", name, KNOBS)
            if name in given:
                raise FieldError("failures", f"{name}: expected it once, got it twice")
            given[name] = _fraction(text, f"{name}: ")
        return FailureModel(**given)
    if spec == NONE:
        return FailureModel(0.0, 0.0, 0.0)
    try:
        float(spec)
    except ValueError:
        if kind == NONE or not kind:
            raise field_refusal("failures", FORMS, spec) from None
        raise UnknownNameError("kind of failures", kind, (NONE, PHILLY)) from None
    return FailureModel(_fraction(spec, ""), heal=1.0, killed=0.0, mended=1.0)


def _fraction(text: str, knob: str) -> float:
    try:
        value = number(text, "failures")
    except FieldError:
        value = -1.0
    if not 0 <= value <= 1:
        expected = "a fraction from 0 to 1" if knob else "philly, or a fraction from 0 to 1"
        raise FieldError("failures", knob + field_refusal("failures", expected, text).problem)
    return value


def with_failures(trace: Trace, model: FailureModel, seed: int, seconds: Callable[[Job], float]) -> Trace:
    """Return the trace with failures drawn for its jobs and a note of them; unchanged if it has some of its own.

    The same seed gives the same failures. `seconds` as in `add_failures`.
    """
    if not model:
        return trace
    own = sum(each.outcome is not JobOutcome.PASSED or bool(each.failures) for each in trace.jobs)
    if own:
        note = f"failures: the trace has its own, of {own:,} jobs that fail or are killed; none are drawn"
        return replace(trace, notes=(*trace.notes, note))
    chance, lengths = (np.random.default_rng(each) for each in np.random.SeedSequence((seed, _STREAM)).spawn(2))
    jobs, lengthened = add_failures(trace.jobs, model, chance, lengths, seconds)
    broken, killed = sum(each.broken for each in jobs), sum(each.outcome is JobOutcome.KILLED for each in jobs)
    heal = sum(bool(each.failures) for each in jobs) - broken
    note = (
        f"failures: of {len(jobs):,} jobs {broken:,} fail for good, {heal:,} fail and then pass, {killed:,} are killed; "
        f"{lengthened:,} were lengthened to last as long as their failed attempts"
    )
    return Trace(trace.name, jobs, (*trace.notes, note))


def add_failures(
    jobs: Sequence[TraceJob],
    model: FailureModel,
    chance: np.random.Generator,
    lengths: np.random.Generator,
    seconds: Callable[[Job], float],
) -> tuple[tuple[TraceJob, ...], int]:
    """Return the jobs with failures drawn for them, and how many of them had to be lengthened.

    seconds   that a job takes where it is fastest; one of no work has no time to fail, and is left as it is
    """
    found, lengthened = list(jobs), 0
    for place, (outcome, failures) in draw_failures(model, len(jobs), chance, lengths).items():
        each, job = jobs[place], jobs[place].job
        if failures:
            alone, needed = seconds(job), sum(attempt.after for attempt in failures) + _LONGER
            if not alone > 0:
                continue
            if alone < needed:
                times, lengthened = needed / alone, lengthened + 1
                duration = None if job.duration is None else job.duration * times
                job = replace(job, duration=duration, steps=None if job.steps is None else job.steps * times)
        broken = bool(failures) and outcome is JobOutcome.FAILED
        found[place] = replace(each, job=job, outcome=outcome, failures=failures or each.failures, broken=broken)
    return tuple(found), lengthened


class DrawnFailures(NamedTuple):
    """How a job fails, or that it is killed."""

    outcome: JobOutcome
    failures: tuple[FailedAttempt, ...] = ()


def draw_failures(
    model: FailureModel, jobs: int, chance: np.random.Generator, lengths: np.random.Generator
) -> dict[int, DrawnFailures]:
    """Return what is drawn for jobs by their place; those that are not in it just pass.

    What the first jobs get is the same whatever the number of jobs, and a job that fails at some rate fails at a higher
    one too.
    """
    uniform = chance.random((jobs, 4))
    fails = uniform[:, 0] < model.rate
    killed = ~fails & (uniform[:, 0] - model.rate < model.killed * (1 - model.rate))
    found = dict.fromkeys(np.flatnonzero(killed).tolist(), DrawnFailures(JobOutcome.KILLED))
    # Of jobs that fail, from three uniform numbers each: the cause, the number of attempts, and whether the job heals.
    uniform = uniform[fails, 1:]
    causes = pick(_JOBS, uniform[:, 0])
    heals = uniform[:, 2] < np.where(_PASSES[causes], model.heal, model.mended)
    drawn = lengths.random((len(causes), MOST_ATTEMPTS))
    counts = np.empty(len(causes), dtype=int)
    for cause in range(len(CAUSES)):
        there = causes == cause
        counts[there] = 1 + pick(philly_shape.attempt_shares(cause), uniform[there, 1])
        drawn[there] = philly_shape.seconds_to_failure(cause, drawn[there])
    seconds = np.maximum(np.round(drawn, 3), _LONGER).tolist()
    places = np.flatnonzero(fails).tolist()
    for place, cause, count, run, heals_ in zip(
        places, causes.tolist(), counts.tolist(), seconds, heals.tolist(), strict=True
    ):
        attempts = tuple(FailedAttempt(after, CAUSES[cause].name) for after in run[:count])
        found[place] = DrawnFailures(JobOutcome.PASSED if heals_ else JobOutcome.FAILED, attempts)
    return found
