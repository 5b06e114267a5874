"""Passed jobs of Philly (Jeon et al., ATC'19) as a table: CSV with a header, rows in no order.

| column | becomes |
|---|---|
| `timestamp` | submitted: seconds since 1970, read as UTC |
| `duration` | duration, s: the attempts of the job added up |
| `num_gpus` | gpus |
| `cluster` | tenant: the virtual cluster |
| `gpu_time` | not read: it is `duration` x `num_gpus` |

A row has no id: the job is called by the number of its row, from 0.
"""

from poise.model.job import Job
from poise.traces.fields import amount, label, moment, whole
from poise.traces.intake import Intake
from poise.traces.lines import Cells, csv_rows
from poise.traces.schema import TraceJob

COLUMNS = ("timestamp", "duration", "num_gpus", "cluster")


def read(intake: Intake) -> list[TraceJob]:
    """Every row is a job."""
    return intake.jobs(csv_rows(intake.lines(), intake.file, COLUMNS), _job)


def _job(cells: Cells, intake: Intake) -> TraceJob:
    submitted, duration, gpus, tenant = cells
    return TraceJob(
        Job(
            f"{intake.prefix}{intake.rows}",
            moment(submitted, "timestamp"),
            whole(gpus, "num_gpus"),
            amount(duration, "duration"),
            tenant=label(tenant, "cluster"),
        )
    )
