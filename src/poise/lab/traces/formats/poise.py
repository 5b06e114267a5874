"""Poise's own traces: one JSON object a line, or CSV with the same column names. Null and empty cells mean: not given.

| column | becomes | in CSV |
|---|---|---|
| `job` | id: a name, or a whole number | |
| `submitted` | seconds on the trace's clock, at least 0 | |
| `gpus` | the gang, 1 to 1,000,000; as many as `micro_batches` where only these are given | |
| `duration` | s on the reference type of the throughput table, at least 0; this or `steps` must be there | |
| `steps` | work in the steps of the throughput table, at least 0 | |
| `tenant`, `app`, `model`, `name` | as they stand; the tenant is `default` where none is given | |
| `batch_size` | a whole number of at least 1 | |
| `micro_batches` | tasks that a step divides into, 1 to 1,000,000: any GPUs will do; a `duration` is that on `gpus` GPUs | |
| `sync` | s of each step that its tasks take to be put together, at least 0; beside `micro_batches` only | |
| `weight` | a number above 0; 1 where none is given | |
| `priority` | a whole number; 0 where none is given | |
| `deadline` | seconds on the trace's clock, at least 0 | |
| `gpu_types` | the types that the job may run on, in lower case; any where none is given | `v100/p100` |
| `min_gpus`, `max_gpus` | bounds of an elastic gang: min_gpus <= gpus <= max_gpus; not beside `micro_batches` | |
| `unit` | GPUs that nodes cannot divide, e.g. a pod's: `gpus` and its bounds are multiples of it; 1 where none is given | |
| `outcome` | `passed`, `failed` or `killed`: how the job ends; passed where none is given | |
| `failures` | attempts that die before the last one, `[[seconds of running, cause], ...]` | `300:cuda-failure/20:x` |
| `broken` | true: the last of `failures` is final, its outcome is failed; false where nothing is given | `true` |
| `loss` | how the loss falls with steps k: `[a, b, c]` for 1/(a·k + b) + c, a >= 0, b > 0, c >= 0 | `0.01/1/0.2` |

The last four are what the world does to the job; a scheduler does not see them. Any other column is an error.
"""

import csv
import difflib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import chain
from typing import Any, NamedTuple, TextIO

from poise.lab.traces.parsing import (
    FieldError,
    Record,
    TraceInput,
    csv_cells,
    field_refusal,
    label,
    parse_object,
    shown,
    split_header,
)
from poise.lab.traces.schema import FailedAttempt, JobOutcome, LossCurve, Trace, TraceJob
from poise.scheduler.model.cluster import MOST_GPUS
from poise.scheduler.model.job import Job

REQUIRED = ("job", "submitted", "gpus")
_MOST = 10**15


class TraceColumn(NamedTuple):
    """One column: how a JSON value of it is checked, and how a CSV cell of it is read as a JSON value."""

    check: Callable[[Any, str], Any]
    decode: Callable[[str], object]


def records(source: TraceInput) -> Iterator[tuple[int, Record]]:
    """Yield the values of every line by column: of JSON objects, or of the rows below a CSV header."""
    rows = source.lines()
    first = next(rows, None)
    if first is None:
        return
    line, header = first
    if header.lstrip().startswith("{"):
        for number, text in chain([first], rows):
            try:
                yield number, parse_object(text)
            except ValueError as problem:
                raise source.error(number, None, f"expected a JSON object, got {problem}") from None
        return
    names = split_header(header)
    for name in names:
        if name not in COLUMNS:
            raise source.error(line, None, _unknown(name).problem)
        if names.count(name) > 1:
            raise source.error(line, name, "expected every column once, got it twice")
    for number, cells in csv_cells(rows, source.file, len(names)):
        yield number, {name: COLUMNS[name].decode(cell) for name, cell in zip(names, cells, strict=True) if cell}


def job_of(record: Record, source: TraceInput) -> TraceJob:
    """Return the job of a line."""
    values: dict[str, Any] = {}
    for name, value in record.items():
        column = COLUMNS.get(name)
        if column is None:
            raise _unknown(name)
        if value is not None:
            values[name] = column.check(value, name)
    if "micro_batches" in values:
        values.setdefault("gpus", values["micro_batches"])
    for name in REQUIRED:
        if name not in values:
            raise field_refusal(name, "a value", None)
    if "duration" not in values and "steps" not in values:
        raise field_refusal("duration", "seconds, or steps", None)
    _check_together(values)
    outcome, failures = values.pop("outcome", JobOutcome.PASSED), values.pop("failures", ())
    loss, broken = values.pop("loss", None), values.pop("broken", False)
    return TraceJob(Job(source.prefix + values.pop("job"), **values), outcome, failures, loss, broken=broken)


def _check_together(values: dict[str, Any]) -> None:
    """Check columns that depend on each other: bounds of the gang, tasks, and what breaks a job."""
    gpus, least, most = values["gpus"], values.get("min_gpus", 1), values.get("max_gpus", MOST_GPUS)
    if not least <= gpus <= most:
        field = "min_gpus" if least > gpus else "max_gpus"
        raise field_refusal(field, f"min_gpus <= gpus <= max_gpus, where gpus is {gpus}", values[field])
    _check_unit(values, values.get("unit", 1))
    if "micro_batches" in values:
        for bound in ("min_gpus", "max_gpus"):
            if bound in values:
                expected = "nothing beside micro_batches, with which any number of GPUs will do"
                raise field_refusal(bound, expected, values[bound])
    elif "sync" in values:
        raise field_refusal("sync", "nothing where no micro_batches are given", values["sync"])
    if values.get("broken"):
        if not values.get("failures"):
            raise field_refusal("broken", "false where no failures are given", values["broken"])
        if values.setdefault("outcome", JobOutcome.FAILED) is not JobOutcome.FAILED:
            raise field_refusal("broken", f"false where the outcome is {values['outcome']}", values["broken"])


def _check_unit(values: dict[str, Any], unit: int) -> None:
    """Check that all numbers of GPUs are whole units."""
    if unit > 1 and "micro_batches" in values:
        raise field_refusal("unit", "1 beside micro_batches, with which any GPUs will do", unit)
    for field in ("gpus", "min_gpus", "max_gpus"):
        if values.get(field, 0) % unit:
            raise field_refusal(field, f"a multiple of unit, which is {unit}", values[field])


def _unknown(name: str) -> FieldError:
    near = difflib.get_close_matches(name[:100].lower(), COLUMNS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COLUMNS)}"
    return FieldError(None, f"expected a column of a Poise trace, got {shown(name)}; {hint}")


def _name(value: object, field: str) -> str:
    if field == "job" and type(value) is int and abs(value) < _MOST:
        return str(value)
    if not isinstance(value, str):
        raise field_refusal(field, "a name", value)
    return label(value, field)


def _number(value: object, field: str) -> float:
    if type(value) not in (int, float):
        raise field_refusal(field, "a number", value)
    try:
        number = float(value)  # type: ignore[arg-type]  # it is an int or a float
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise field_refusal(field, "a finite number", value)
    return number


def _amount(value: object, field: str) -> float:
    number = _number(value, field)
    if number < 0:
        raise field_refusal(field, "a number of at least 0", value)
    return number


def _weight(value: object, field: str) -> float:
    number = _number(value, field)
    if number <= 0:
        raise field_refusal(field, "a number above 0", value)
    return number


def _whole_between(least: int, most: int) -> Callable[[object, str], int]:
    def check(value: object, field: str) -> int:
        number = _number(value, field)
        if not number.is_integer() or not least <= number <= most:
            raise field_refusal(field, f"a whole number from {least:,} to {most:,}", value)
        return int(number)

    return check


def _types(value: object, field: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise field_refusal(field, "a list of GPU types", value)
    if not value:
        raise FieldError(field, "names no GPU type; leave it out for any")
    return tuple(_name(part, field).lower() for part in value)


def _outcome(value: object, field: str) -> JobOutcome:
    if not isinstance(value, str) or value not in set(JobOutcome):
        raise field_refusal(field, f"one of {', '.join(JobOutcome)}", value)
    return JobOutcome(value)


def _failures(value: object, field: str) -> tuple[FailedAttempt, ...]:
    if not isinstance(value, list):
        raise field_refusal(field, "a list of [seconds, cause]", value)
    found: list[FailedAttempt] = []
    for part in value:
        if not isinstance(part, list) or len(part) != 2:
            raise field_refusal(field, "[seconds, cause]", part)
        found.append(FailedAttempt(_amount(part[0], field), _name(part[1], field)))
    return tuple(found)


def _flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise field_refusal(field, "true or false", value)
    return value


def _loss(value: object, field: str) -> LossCurve:
    expected = "[a, b, c] with a >= 0, b > 0, c >= 0"
    if not isinstance(value, list) or len(value) != 3:
        raise field_refusal(field, expected, value)
    speed, start, floor = (_amount(part, field) for part in value)
    if not start > 0:
        raise field_refusal(field, expected, value)
    return LossCurve(speed, start, floor)


def _decode_number(cell: str) -> object:
    """Return a number if the cell is one; else the cell itself, which the check then refuses in its own words."""
    for kind in (int, float):
        try:
            return kind(cell) if cell.isascii() and "_" not in cell else cell
        except ValueError:
            continue
    return cell


def _decode_failures(cell: str) -> object:
    parts = (part.partition(":") for part in cell.split("/"))
    return [[_decode_number(after), cause] for after, _, cause in parts]


_NAME = TraceColumn(_name, str)
_AMOUNT = TraceColumn(_amount, _decode_number)
_GPUS = TraceColumn(_whole_between(1, MOST_GPUS), _decode_number)
_COUNT = TraceColumn(_whole_between(1, _MOST), _decode_number)

COLUMNS = {
    "job": _NAME,
    "submitted": _AMOUNT,
    "gpus": _GPUS,
    "duration": _AMOUNT,
    "steps": _AMOUNT,
    "tenant": _NAME,
    "app": _NAME,
    "model": _NAME,
    "batch_size": _COUNT,
    "weight": TraceColumn(_weight, _decode_number),
    "priority": TraceColumn(_whole_between(-_MOST, _MOST), _decode_number),
    "deadline": _AMOUNT,
    "gpu_types": TraceColumn(_types, lambda cell: cell.split("/")),
    "min_gpus": _GPUS,
    "max_gpus": _GPUS,
    "unit": _GPUS,
    "micro_batches": _GPUS,
    "sync": _AMOUNT,
    "name": _NAME,
    "outcome": TraceColumn(_outcome, str),
    "failures": TraceColumn(_failures, _decode_failures),
    "broken": TraceColumn(_flag, lambda cell: {"true": True, "false": False}.get(cell, cell)),
    "loss": TraceColumn(_loss, lambda cell: [_decode_number(part) for part in cell.split("/")]),
}
"""In the order in which they are written."""


_WRITTEN = (
    "duration", "steps", "app", "model", "batch_size", "deadline", "min_gpus", "max_gpus", "unit", "micro_batches",
    "name", "tenant", "weight", "priority", "sync", "gpu_types",
)  # fmt: skip
_DEFAULTS = {each.name: each.default for each in fields(Job)}


def write_trace(trace: Trace, stream: TextIO) -> None:
    """Write the jobs as JSON lines, so that reading them gives the same jobs; what has its default value is left out."""
    for each in trace.jobs:
        stream.write(json.dumps(row_of(each), allow_nan=False) + "\n")


def write_csv(trace: Trace, stream: TextIO) -> None:
    """Write the jobs as CSV, so that reading them gives the same jobs; only columns that a job has a value in are there."""
    rows = [row_of(each) for each in trace.jobs]
    used = {name for row in rows for name in row}
    writer = csv.DictWriter(stream, [name for name in COLUMNS if name in used], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: cell_of(name, value) for name, value in row.items()} for row in rows)


def cell_of(name: str, value: Any) -> Any:  # noqa: ANN401 - whatever a column holds
    """Return a value as a CSV cell has it: lists as text, the inverse of the column's `decode`."""
    if name == "failures":
        return "/".join(f"{after}:{cause}" for after, cause in value)
    if name in ("gpu_types", "loss"):
        return "/".join(map(str, value))
    return "true" if value is True else value


def _is_default(value: object, default: object) -> bool:
    """Say so; a job of a caller's may hold values that cannot be compared, such as arrays."""
    return value is default or (type(value) in (int, float, str, tuple) and value == default)


def row_of(each: TraceJob) -> Record:
    """Return a job as a row of a trace; what has its default value is left out."""
    job = each.job
    row: Record = {"job": job.id, "submitted": job.submitted, "gpus": job.gpus}
    row |= {name: value for name in _WRITTEN if not _is_default(value := getattr(job, name), _DEFAULTS[name])}
    if each.outcome is not JobOutcome.PASSED:
        row["outcome"] = str(each.outcome)
    if each.failures:
        row["failures"] = each.failures
    if each.broken:
        row["broken"] = True
    if each.loss is not None:
        row["loss"] = each.loss
    return row
