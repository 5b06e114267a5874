"""Passed jobs of Philly (Jeon et al., ATC'19) as a table: CSV with a header, rows in no order.

| column | becomes |
|---|---|
| `timestamp` | submitted: seconds since 1970, read as UTC |
| `duration` | duration, s: the attempts of the job added up |
| `num_gpus` | gpus |
| `cluster` | tenant: the virtual cluster |
| `gpu_time` | not read: it is `duration` x `num_gpus` |

A row has no id: the job is called by the number of its row, from 0. Or durations and sizes alone, `duration_s` and
`num_gpus`, as Gavel's authors drew from Philly: then all jobs count as submitted at 0.
"""

from poise.lab.traces.parsing import Cells, TraceInput, amount, label, timestamp, whole
from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.job import Job

COLUMNS = ("timestamp", "duration", "num_gpus", "cluster")
ALONE = ("duration_s", "num_gpus")
"""Of a table that holds nothing else."""
CHOICES = (ALONE, COLUMNS)


def job_of(cells: Cells, source: TraceInput) -> TraceJob:
    """Return the job of a row, of COLUMNS or of ALONE."""
    name = f"{source.prefix}{source.rows}"
    if len(cells) == len(ALONE):
        duration, gpus = cells
        source.count("jobs taken to be submitted at 0, as the file holds no times")
        return TraceJob(Job(name, 0.0, whole(gpus, "num_gpus"), amount(duration, "duration_s")))
    submitted, duration, gpus, tenant = cells
    at = timestamp(submitted, "timestamp")
    gang, seconds = whole(gpus, "num_gpus"), amount(duration, "duration")
    return TraceJob(Job(name, at, gang, seconds, tenant=label(tenant, "cluster")))
