"""Helios clusters (Hu et al., SC'21): the Slurm log as CSV with a header, as published or as its simulator cuts it.

| column | becomes |
|---|---|
| `job_id` | id |
| `vc` | tenant: the virtual cluster |
| `gpu_num` | gpus; jobs that ask for none are left out and counted |
| `state` | outcome: COMPLETED (or Pass) passed; CANCELLED (or Killed) killed; FAILED, TIMEOUT, NODE_FAIL failed |
| `submit_time` | submitted: seconds since 1970, read as UTC |
| `duration` | duration, s |
| `user`, `jobname`, `cpu_num`, `node_num`, `start_time`, `end_time`, `queue` | not read; any of them may be missing |

A job in state SUSPENDED did not end in the log: it is left out and counted.
"""

from poise.model.job import Job
from poise.traces.fields import amount, label, moment, refusal, whole
from poise.traces.intake import Intake
from poise.traces.lines import Cells, csv_rows
from poise.traces.schema import Outcome, TraceJob

COLUMNS = ("job_id", "vc", "gpu_num", "state", "submit_time", "duration")
SUSPENDED = "SUSPENDED"
OUTCOMES = {
    "COMPLETED": Outcome.PASSED,
    "PASS": Outcome.PASSED,
    "CANCELLED": Outcome.KILLED,
    "KILLED": Outcome.KILLED,
    "FAILED": Outcome.FAILED,
    "TIMEOUT": Outcome.FAILED,
    "NODE_FAIL": Outcome.FAILED,
}


def read(intake: Intake) -> list[TraceJob]:
    """Every row with a GPU and an end is a job."""
    return intake.jobs(csv_rows(intake.lines(), intake.file, COLUMNS), _job)


def _job(cells: Cells, intake: Intake) -> TraceJob | None:
    job_id, tenant, gpus, state, submitted, duration = cells
    gang = whole(gpus, "gpu_num", 0)
    if gang == 0:
        intake.count("jobs left out because they ask for no GPU")
        return None
    word = state.upper().partition(" ")[0]  # Slurm may add who cancelled a job
    if word == SUSPENDED:
        intake.count("jobs left out because they are suspended where the log ends")
        return None
    outcome = OUTCOMES.get(word)
    if outcome is None:
        raise refusal("state", f"one of {', '.join([*OUTCOMES, SUSPENDED])}", state)
    job = Job(
        intake.prefix + label(job_id, "job_id"),
        moment(submitted, "submit_time"),
        gang,
        amount(duration, "duration"),
        tenant=label(tenant, "vc"),
    )
    return TraceJob(job, outcome)
