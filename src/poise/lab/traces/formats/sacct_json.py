"""The rows that `sacct --json` prints.

Numbers are plain in Slurm 22.05. In later versions some are objects, with `set` and `number`, and a state is a list.
"""

from collections.abc import Iterator

from poise.lab.traces.formats.slurm_run import SlurmGpus, SlurmRun, SlurmStep, gpu_types_of, gpus_of, is_sliced
from poise.lab.traces.parsing import FieldError, Record, TraceInput, field_refusal, label
from poise.scheduler.model.cluster import MOST_GPUS

KEYS = ("association", "allocation_nodes")
"""Keys that every job of Slurm's accounting has, and no other format."""


def runs(source: TraceInput) -> Iterator[SlurmRun | SlurmStep]:
    """Yield every job of the list `jobs`, after its steps."""
    for line, record in source.listed("jobs"):
        try:
            yield from _rows(line, record)
        except FieldError as refused:
            raise source.error(line, refused.field, refused.problem) from None


def _rows(line: int, record: Record) -> Iterator[SlurmRun | SlurmStep]:
    key = str(_whole(record, "job_id"))
    cluster = _text(record, "cluster")
    for step in _objects(record, "steps"):
        yield SlurmStep(line, cluster, key, _tres(step, "allocated").total)
    allocated, requested = _tres(record, "allocated"), _tres(record, "requested")
    job, array = _names(record, key)
    submitted = _number(record, "time", "submission")
    if not submitted:
        raise field_refusal("time.submission", "seconds since 1970", submitted)
    tenant = _text(record, "account") or _text(record, "user")
    yield SlurmRun(
        line=line,
        cluster=cluster,
        key=key,
        job=job,
        array=array,
        tenant=label(tenant, "account") if tenant else "default",
        name=label(_text(record, "name"), "name") if record.get("name") else None,
        state=_state(record),
        submitted=submitted,
        eligible=_number(record, "time", "eligible") or None,
        start=_number(record, "time", "start") or None,
        end=_number(record, "time", "end") or None,
        seconds=_number(record, "time", "elapsed"),
        gpus=allocated.total or requested.total,
        gpu_types=gpu_types_of(requested, _text(record, "constraints")),
        sliced=is_sliced(allocated, requested),
        nodes=_whole(record, "allocation_nodes"),
    )


def _names(record: Record, key: str) -> tuple[str, str | None]:
    """Return the id as `sacct` prints it without `--json`, and that of the array; None if it is no task of one."""
    array = _object(record, "array")
    master = _whole(record, "array", "job_id")
    if master:
        task = _number(record, "array", "task_id")
        place = f"[{array.get('task') or ''}]" if task is None else f"{task:.0f}"
        return f"{master}_{place}", str(master)
    leader = _whole(record, "het", "job_id")
    if leader:
        return f"{leader}+{_whole(record, 'het', 'job_offset')}", None
    return key, None


def _state(record: Record) -> str:
    """Return the state; a list names it first, and then flags."""
    current = _object(record, "state").get("current")
    state = current[0] if isinstance(current, list) and current else current
    if not isinstance(state, str):
        raise field_refusal("state.current", "a state", current)
    return state


def _tres(record: Record, which: str) -> SlurmGpus:
    """Return the GPUs among trackable resources, as in `{"type": "gres", "name": "gpu:a100", "count": 2}`."""
    counts = []
    for each in _objects(_object(record, "tres"), which):
        kind, _, gpu_type = _text(each, "name").partition(":")
        if each.get("type") == "gres" and kind == "gpu":
            counts.append((gpu_type, _whole(each, "count")))
    return gpus_of(counts)


def _object(record: Record, key: str) -> Record:
    value = record.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise field_refusal(key, "an object", value)
    return value


def _objects(record: Record, key: str) -> list[Record]:
    value = record.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise field_refusal(key, "a list", value)
    for part in value:
        if not isinstance(part, dict):
            raise field_refusal(key, "a list of objects", part)
    return value


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise field_refusal(key, "text", value)
    return value


def _whole(record: Record, *path: str) -> int:
    """Return a whole number; 0 where there is none."""
    value = _number(record, *path) or 0.0
    most = MOST_GPUS if path[-1] in ("count", "allocation_nodes") else 1 << 53
    if not value.is_integer() or value > most:
        raise field_refusal(".".join(path), f"a whole number from 0 to {most:,}", value)
    return int(value)


def _number(record: Record, *path: str) -> float | None:
    """Return the number of at least 0 at the end of this path; None where it is not set."""
    *outer, key = path
    for name in outer:
        record = _object(record, name)
    value = record.get(key)
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") else None
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < 1e15:
        raise field_refusal(".".join(path), "a number of at least 0", value)
    return float(value)
