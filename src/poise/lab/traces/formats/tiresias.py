"""Tiresias' simulator, and Muri's: CSV with a header.

| column | becomes |
|---|---|
| `job_id` | id |
| `num_gpu` | gpus |
| `submit_time` | submitted: seconds since the trace began |
| `model_name` | model |
| `duration` | duration, s |
| `iterations` | not read: it does not agree with any throughput table that goes with these traces |
| `interval` | not read: it is the time since the row above |
"""

from poise.lab.traces.parsing import Cells, TraceInput, amount, label, whole
from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.job import Job

COLUMNS = ("job_id", "num_gpu", "submit_time", "model_name", "duration")


def job_of(cells: Cells, source: TraceInput) -> TraceJob:
    """Return the job of a row."""
    job_id, gpus, submitted, model, duration = cells
    name, at = source.prefix + label(job_id, "job_id"), amount(submitted, "submit_time")
    gang, seconds = whole(gpus, "num_gpu"), amount(duration, "duration")
    return TraceJob(Job(name, at, gang, seconds, model=label(model, "model_name")))
