"""Helios clusters (Hu et al., SC'21): the Slurm log as CSV with a header, as published or as its simulator cuts it.

| column | becomes |
|---|---|
| `job_id` | id |
| `vc` | tenant: the virtual cluster |
| `gpu_num` | gpus; jobs that ask for none are left out and counted |
| `state` | outcome: COMPLETED (or Pass) passed; CANCELLED (or Killed) killed; FAILED, TIMEOUT, NODE_FAIL failed |
| `submit_time` | submitted: seconds since 1970, read as UTC |
| `duration` | duration, s |
| `start_time`, `end_time` | observed: when it ran, if they are there and are `duration` apart |
| `user`, `jobname`, `cpu_num`, `node_num`, `queue` | not read; any of them may be missing, and so may the two above |

A job in state SUSPENDED did not end in the log: it is left out and counted. The simulator's cuts give the time of submission
for a start and an end that are not known: such a pair says nothing.
"""

from poise.lab.traces.parsing import (
    Cells,
    FieldError,
    TraceInput,
    amount,
    field_refusal,
    label,
    timestamp,
    whole,
)
from poise.lab.traces.schema import JobOutcome, RunAttempt, TraceJob
from poise.scheduler.model.job import Job

COLUMNS = ("job_id", "vc", "gpu_num", "state", "submit_time", "duration")
RAN = ("start_time", "end_time")
CHOICES = ((*COLUMNS, *RAN), COLUMNS)
TOLERANCE = 0.5
"""Seconds by which a start and an end may differ from the duration between them."""
SUSPENDED = "SUSPENDED"
OUTCOMES = {
    **dict.fromkeys(("COMPLETED", "PASS"), JobOutcome.PASSED),
    **dict.fromkeys(("CANCELLED", "KILLED"), JobOutcome.KILLED),
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL"), JobOutcome.FAILED),
}


def job_of(cells: Cells, source: TraceInput) -> TraceJob | None:
    """Return the job of a row, of COLUMNS or of COLUMNS and RAN; None if it has no GPU or no end."""
    job_id, tenant, gpus, state, submitted, duration, *ran = cells
    gang = whole(gpus, "gpu_num", 0)
    if gang == 0:
        source.count("jobs left out because they ask for no GPU")
        return None
    word = state.upper().partition(" ")[0]  # Slurm may add who cancelled a job
    if word == SUSPENDED:
        source.count("jobs left out because they are suspended where the log ends")
        return None
    outcome = OUTCOMES.get(word)
    if outcome is None:
        raise field_refusal("state", f"one of {', '.join([*OUTCOMES, SUSPENDED])}", state)
    seconds = amount(duration, "duration")
    name, at = source.prefix + label(job_id, "job_id"), timestamp(submitted, "submit_time")
    job = Job(name, at, gang, seconds, tenant=label(tenant, "vc"))
    return TraceJob(job, outcome, observed=_observed(ran, seconds))


def _observed(ran: Cells, seconds: float) -> tuple[RunAttempt, ...]:
    """Return the one attempt of a job, if the log tells of it: a job that never started has no times, or words for them."""
    try:
        times = [timestamp(text, name) for text, name in zip(ran, RAN, strict=True)] if ran else []
    except FieldError:
        return ()
    known = times and times[0] < times[1] and abs(times[1] - times[0] - seconds) <= TOLERANCE
    return (RunAttempt(times[0], times[1]),) if known else ()
