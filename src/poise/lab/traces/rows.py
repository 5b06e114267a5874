"""Traces from and to values of Python: jobs, rows, and the tables of other libraries."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from poise.lab.arguments import items_of
from poise.lab.columns import Column, Table, required
from poise.lab.traces.formats.poise import COLUMNS, cell_of, job_of, row_of, write_csv, write_trace
from poise.lab.traces.parsing import Record, TraceInput, field_refusal, shown
from poise.lab.traces.schema import JobOutcome, Trace, TraceJob
from poise.scheduler.model.errors import RequestError, TraceError, Where
from poise.scheduler.model.job import Job

_AS_TEXT = ("gpu_types", "failures", "loss")
"""Columns of lists, which a table may hold as text, written as in CSV."""
_MISSING = {"NAType", "NaTType", "NoneType"}
"""Types of the values by which pandas says that there is none."""


def jobs_of_rows(given: object, name: str) -> list[TraceJob]:
    """Return the jobs of rows or of a table, checked like the lines of a file; `name` stands for it in messages."""
    jobs = TraceInput(name, io.BytesIO()).jobs(enumerate(_rows(given, name), start=1), _job)
    if not jobs:
        raise TraceError(Where(name), "expected at least one job, got none")
    return jobs


def _rows(given: Any, name: str) -> Iterator[object]:  # noqa: ANN401 - whatever a caller takes for rows
    """The rows of whatever holds some; of a table as mappings."""
    if isinstance(given, Table):
        return iter(given.rows())
    kind = type(given).__module__.partition(".")[0]
    if kind == "pandas" and hasattr(given, "columns") and hasattr(given, "to_dict"):
        return (_without_nan(row) for row in given.to_dict("records"))
    if kind == "polars" and hasattr(given, "iter_rows"):
        return (_without_nan(row) for row in given.iter_rows(named=True))
    if hasattr(given, "__arrow_c_stream__") and not hasattr(given, "to_frame"):  # only columns alone have that
        table = required("pyarrow", "pyarrow", "reading an Arrow table").table(given)
        return (_without_nan(row) for row in table.to_pylist())
    items = None if isinstance(given, Mapping) else items_of(given)
    if items is not None:
        return items
    expected = "expected jobs, rows, a data frame or an Arrow table"
    raise RequestError(f"{name}: {expected}, got {shown(given) if given is not None else 'None'}")


def _without_nan(row: Mapping[Any, object]) -> Record:
    """A row of a data frame, in which NaN stands for what is not there."""
    return {
        str(key): None if type(value).__name__ in _MISSING or (isinstance(value, float) and isnan(value)) else value
        for key, value in row.items()
    }


def _job(row: object, source: TraceInput) -> TraceJob:
    if isinstance(row, Job):
        row = TraceJob(row)
    if isinstance(row, TraceJob):
        _check_parts(row)
        job = job_of(_values(row_of(row)), source).job
        # What files have no column for stays as it is.
        return replace(row, job=replace(job, yields=row.job.yields, tenant_weight=row.job.tenant_weight))
    if not isinstance(row, Mapping):
        raise field_refusal(None, "a Job, or a mapping with job, submitted, gpus and duration", row)
    return job_of(_values(row), source)


def _check_parts(row: TraceJob) -> None:
    """Refuse a TraceJob that is not made of what it says."""
    kinds = {"job": Job, "outcome": JobOutcome, "failures": tuple, "observed": tuple, "broken": bool}
    for name, kind in kinds.items():
        value = getattr(row, name)
        if not isinstance(value, kind):
            raise field_refusal(name, f"a value of type {kind.__name__}", value)


def _values(row: Mapping[Any, object]) -> Record:
    """The values of a row as JSON would have them."""
    return {str(name): _value(str(name), value) for name, value in row.items()}


def _value(name: str, value: object) -> object:
    """A value as JSON would have it."""
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, tuple | list):
        return [_value("", each) for each in value]
    if isinstance(value, str) and name in _AS_TEXT:
        return COLUMNS[name].decode(value) if value else None
    return value


def table_of(trace: Trace) -> Table:
    """Return a trace as a table, with the columns that some job has a value in."""
    rows = [row_of(each) for each in trace.jobs]
    used = {name for row in rows for name in row}
    return Table({name: _column(name, [row.get(name) for row in rows]) for name in COLUMNS if name in used})


def _column(name: str, values: list[Any]) -> Column:
    """Whole numbers or numbers as an array, with NaN for what is not there; anything else as a list."""
    known = [value for value in values if value is not None]
    if name in _AS_TEXT:
        return [None if value is None else cell_of(name, value) for value in values]
    if all(type(value) is int for value in known) and len(known) == len(values):
        return np.array(values, dtype=np.int64)
    if all(type(value) in (int, float) for value in known):
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return values


def write_file(trace: Trace, path: Path) -> None:
    """Write a trace in the form that the ending of the file asks for."""
    writers = {".jsonl": write_trace, ".csv": write_csv}
    if path.suffix not in writers:
        raise RequestError(f"{path}: expected a file that ends in .jsonl or .csv")
    with path.open("w", encoding="utf-8", newline="") as stream:
        writers[path.suffix](trace, stream)
