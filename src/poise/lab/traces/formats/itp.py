"""Microsoft ITP clusters, 2021 (published with ElasticFlow): CSV with a header, one file a cluster.

| column | becomes |
|---|---|
| `job_id` | id |
| `submission_time` | submitted: seconds since the trace began |
| `duration` | duration, s |
| `num_gpu` | gpus |
"""

from poise.lab.traces.parsing import Cells, TraceInput, amount, csv_rows, label, whole
from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.job import Job

COLUMNS = ("job_id", "submission_time", "duration", "num_gpu")


def read(intake: TraceInput) -> list[TraceJob]:
    """Every row is a job."""
    return intake.jobs(csv_rows(intake.lines(), intake.file, COLUMNS), _job)


def _job(cells: Cells, intake: TraceInput) -> TraceJob:
    job_id, submitted, duration, gpus = cells
    return TraceJob(
        Job(
            intake.prefix + label(job_id, "job_id"),
            amount(submitted, "submission_time"),
            whole(gpus, "num_gpu"),
            amount(duration, "duration"),
        )
    )
