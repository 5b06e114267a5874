"""Traces of our own, written: one JSON object a line, as `formats/poise.py` describes and reads."""

import json
from typing import Any, TextIO

from poise.model.job import Job
from poise.traces.schema import Outcome, Trace, TraceJob

_OPTIONAL = (
    "duration",
    "steps",
    "app",
    "model",
    "batch_size",
    "deadline",
    "min_gpus",
    "max_gpus",
    "micro_batches",
    "name",
)


def write_trace(trace: Trace, stream: TextIO) -> None:
    """Writes the jobs so that reading them gives the same jobs; what has its default value is left out."""
    for each in trace.jobs:
        stream.write(json.dumps(_row(each), allow_nan=False))
        stream.write("\n")


def _row(each: TraceJob) -> dict[str, Any]:
    job = each.job
    row: dict[str, Any] = {"job": job.id, "submitted": job.submitted, "gpus": job.gpus}
    row |= {name: value for name in _OPTIONAL if (value := getattr(job, name)) is not None}
    row |= _beside_defaults(job)
    if each.outcome is not Outcome.PASSED:
        row["outcome"] = str(each.outcome)
    if each.failures:
        row["failures"] = [list(failure) for failure in each.failures]
    if each.broken:
        row["broken"] = True
    if each.loss is not None:
        row["loss"] = list(each.loss)
    return row


def _beside_defaults(job: Job) -> dict[str, Any]:
    """The columns that every job has, where they are not what they are by default."""
    row: dict[str, Any] = {}
    if job.tenant != "default":
        row["tenant"] = job.tenant
    if job.weight != 1.0:
        row["weight"] = job.weight
    if job.priority:
        row["priority"] = job.priority
    if job.sync:
        row["sync"] = job.sync
    if job.gpu_types:
        row["gpu_types"] = list(job.gpu_types)
    return row
