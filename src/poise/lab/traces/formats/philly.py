"""Philly's job log (Jeon et al., ATC'19): a JSON list of objects, in its original shape or in two derived ones.

| key | becomes |
|---|---|
| `jobid` or `id` | id |
| `submitted_time` | submitted: seconds since 1970, read as UTC |
| `vc` | tenant: the virtual cluster; may be missing |
| `status` | outcome: Pass, Killed, Failed; passed if it is missing |
| `attempts` | a list of `{start_time, end_time, detail}`; in the derived shape with one attempt, the job itself |
| `detail` | gpus: those of the first attempt, added up over `[{ip, gpus: [...]}]` |
| `num_gpus` | gpus, in the derived shape that has no `detail` |
| `user`, `runtime`, `runtime_min` | not read |

duration   the run times of all attempts added up, s
failures   every attempt before the last one: it died after its run time, of a cause that the log does not name
observed   the attempts, each with its start, its end and the number of GPUs in every entry of its `detail`

Attempts without a start or an end (or with an end before the start: clocks were changed) are left out; so are jobs
without a whole attempt, jobs whose last attempt has no end (they ran on when the log was taken), and jobs without a
GPU. All are counted.
"""

from collections.abc import Iterable

from poise.lab.traces.parsing import Record, TraceInput, field_refusal, label, timestamp
from poise.lab.traces.schema import FailedAttempt, JobOutcome, RunAttempt, TraceJob
from poise.scheduler.model.cluster import MOST_GPUS
from poise.scheduler.model.job import Job

KEYS = ("submitted_time", "attempts", "jobid")
OUTCOMES = {"Pass": JobOutcome.PASSED, "Killed": JobOutcome.KILLED, "Failed": JobOutcome.FAILED}
UNKNOWN_CAUSE = "unknown"


def job_of(record: Record, source: TraceInput) -> TraceJob | None:
    """Return the job of an object; None if it has no whole last attempt or no GPU."""
    if "attempts" in record:
        attempts = _records(record["attempts"], "attempts")
    else:
        attempts = [record] if "start_time" in record else []
    if not attempts:
        source.count("jobs left out because they have no attempt")
        return None
    gpus = record["num_gpus"] if "num_gpus" in record else sum(_nodes(attempts[0]))
    if type(gpus) is not int or not 0 <= gpus <= MOST_GPUS:
        raise field_refusal("num_gpus", f"a whole number from 0 to {MOST_GPUS:,}", gpus)
    if gpus == 0:
        source.count("jobs left out because they have no GPU")
        return None
    if _clock(attempts[-1], "end_time") is None:
        source.count("jobs left out because their last attempt has no end")
        return None
    observed = _observed(attempts, source)
    runs = [attempt.end - attempt.start for attempt in observed if attempt.end is not None]
    if not runs:
        source.count("jobs left out because no attempt of theirs has a start and an end")
        return None
    key = "jobid" if "jobid" in record else "id"
    name = source.prefix + label(_text(record, key), key)
    submitted = timestamp(_text(record, "submitted_time"), "submitted_time")
    tenant = label(_text(record, "vc"), "vc") if record.get("vc") is not None else "default"
    status = record.get("status", "Pass")
    if not isinstance(status, str) or status not in OUTCOMES:
        raise field_refusal("status", f"one of {', '.join(OUTCOMES)}", status)
    failures = tuple(FailedAttempt(run, UNKNOWN_CAUSE) for run in runs[:-1])
    return TraceJob(Job(name, submitted, gpus, sum(runs), tenant=tenant), OUTCOMES[status], failures, observed=observed)


def _nodes(attempt: Record) -> tuple[int, ...]:
    """Return GPUs of each entry of `detail`: a node, though in the public log some entries name one node twice."""
    return tuple(len(_list(part.get("gpus"), "gpus")) for part in _records(attempt.get("detail"), "detail"))


def _observed(attempts: Iterable[Record], source: TraceInput) -> tuple[RunAttempt, ...]:
    """Return attempts that have a start and no end before it, in order; of one without an end, only the start is known."""
    found = []
    for attempt in attempts:
        start, end = _clock(attempt, "start_time"), _clock(attempt, "end_time")
        if start is None or end is None:
            source.count("attempts left out because they have no start or no end")
        elif end < start:
            source.count("attempts left out because they end before they start")
            continue
        if start is not None:
            found.append(RunAttempt(start, end, _nodes(attempt)))
    return tuple(found)


def _clock(attempt: Record, key: str) -> float | None:
    """Return a time of an attempt; the log writes a missing one as null, as nothing or as `None`."""
    value = attempt.get(key)
    return None if value in (None, "", "None") else timestamp(_text(attempt, key), key)


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise field_refusal(key, "text", value)
    return value


def _list(value: object, key: str) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise field_refusal(key, "a list", value)
    return value


def _records(value: object, key: str) -> list[Record]:
    parts = _list(value, key)
    for part in parts:
        if not isinstance(part, dict):
            raise field_refusal(key, "a list of objects", part)
    return parts  # type: ignore[return-value]  # the loop has just seen to it
