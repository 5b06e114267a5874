"""Microsoft ITP clusters, 2021 (published with ElasticFlow): CSV with a header, one file a cluster.

| column | becomes |
|---|---|
| `job_id` | id |
| `submission_time` | submitted: seconds since the trace began |
| `duration` | duration, s |
| `num_gpu` | gpus |
"""

from poise.lab.traces.parsing import Cells, TraceInput, amount, label, whole
from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.job import Job

COLUMNS = ("job_id", "submission_time", "duration", "num_gpu")


def job_of(cells: Cells, source: TraceInput) -> TraceJob:
    """Return the job of a row."""
    job_id, submitted, duration, gpus = cells
    name, at = source.prefix + label(job_id, "job_id"), amount(submitted, "submission_time")
    return TraceJob(Job(name, at, whole(gpus, "num_gpu"), amount(duration, "duration")))
