"""The rows that `sacct --parsable2` prints: a header, and cells with `|` between them, or what `--delimiter` says."""

import re
from collections.abc import Iterator

from poise.lab.traces.formats.slurm_run import SlurmGpus, SlurmRun, SlurmStep, gpu_types_of, gpus_of, is_sliced
from poise.lab.traces.parsing import FieldError, TraceInput, amount, field_refusal, label, shown, timestamp, whole

IDS = ("JobID", "JobIDRaw")
NEEDED = ("Submit", "Start", "End", "State")
COUNTS = ("AllocTRES", "ReqTRES", "AllocGRES")
"""Columns of which at least one tells the GPUs."""
MOST_NODES = 1_000_000
_HEADER = re.compile(r"[A-Za-z]+(?P<delimiter>[^\w\s,\"])")
_ELAPSED = re.compile(r"(?:(?:(?P<days>\d+)-)?(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)(?:\.\d+)?", re.ASCII)
_GRES = re.compile(r"(?:gpu|7696487)(?::(?P<type>[^:,()]+?))??(?::(?P<count>\d+))?(?:\(.*\))?", re.ASCII)
"""7696487 is the number of the kind `gpu`, which stands for it where sacct does not know its name."""
_ABSENT = ("", "Unknown", "None")


def is_header(line: str) -> bool:
    """Return whether this line is a header that `sacct` prints."""
    return _delimiter(line) != "" and not set(_columns(line)).isdisjoint(IDS) and "State" in _columns(line)


def runs(source: TraceInput) -> Iterator[SlurmRun | SlurmStep]:
    """Yield every row below the header."""
    lines = source.lines()
    number, header = next(lines, (1, ""))
    names = _columns(header)
    problem = _missing(names)
    if problem:
        raise source.error(number, None, f"expected a header that sacct --parsable2 prints{problem}, got {shown(header)}")
    delimiter = _delimiter(header)
    ends = header.endswith(delimiter)  # as --parsable ends its lines
    places = {name: place for place, name in enumerate(names)}
    for number, text in lines:
        if text == header:  # of another export behind the first
            continue
        cells = (text.removesuffix(delimiter) if ends else text).split(delimiter)
        if len(cells) != len(names):
            hint = f"leave out columns that may hold {delimiter!r}, such as JobName and Constraints, or choose a --delimiter"
            raise source.error(number, None, f"expected {len(names)} cells, as in the header, got {len(cells)}; {hint}")
        try:
            yield _row(number, {name: cells[place].strip() for name, place in places.items() if name in READ})
        except FieldError as refused:
            raise source.error(number, refused.field, refused.problem) from None


def _delimiter(header: str) -> str:
    match = _HEADER.match(header)
    return match["delimiter"] if match else "|" if "|" in header else ""


def _columns(header: str) -> list[str]:
    delimiter = _delimiter(header)
    return header.removesuffix(delimiter).split(delimiter) if delimiter else []


def _missing(names: list[str]) -> str:
    """Return what a header lacks, as words for a message; empty if it has all that is needed."""
    if not names:
        return " with | between its columns"
    if not set(IDS) & set(names):
        return " with the column JobID"
    for name in NEEDED:
        if name not in names:
            return f" with the column {name}"
    if not set(COUNTS) & set(names):
        return " with the column AllocTRES"
    twice = next((name for name in READ if names.count(name) > 1), None)
    return f" with each column once, not {twice} twice" if twice else ""


def _row(line: int, row: dict[str, str]) -> SlurmRun | SlurmStep:
    """Return one row by column."""
    named = "JobID" if row.get("JobID") else "JobIDRaw"
    job = label(row.get(named, ""), named)
    key, dot, _ = row.get("JobIDRaw", job).partition(".")
    cluster = row.get("Cluster", "")
    allocated, requested = _tres(row, "AllocTRES"), _tres(row, "ReqTRES")
    gpus = allocated.total or _gres(row).total
    if dot:
        return SlurmStep(line, cluster, key, gpus)
    array, underscore, _ = job.partition("_")
    submitted = _time(row, "Submit")
    if submitted is None:
        raise field_refusal("Submit", "a time such as 2026-01-02T03:04:05", row["Submit"])
    return SlurmRun(
        line=line,
        cluster=cluster,
        key=key,
        job=job,
        array=array if underscore else None,
        tenant=_tenant(row),
        name=label(row["JobName"], "JobName") if row.get("JobName") else None,
        state=row["State"].partition(" ")[0].rstrip("+"),
        submitted=submitted,
        eligible=_time(row, "Eligible"),
        start=_time(row, "Start"),
        end=_time(row, "End"),
        seconds=_seconds(row),
        gpus=gpus or requested.total,
        gpu_types=gpu_types_of(requested, row.get("Constraints", "")),
        sliced=is_sliced(allocated, requested),
        nodes=_nodes(row),
    )


def _tenant(row: dict[str, str]) -> str:
    for name in ("Account", "User"):
        if row.get(name):
            return label(row[name], name)
    return "default"


def _time(row: dict[str, str], column: str) -> float | None:
    """Return seconds since 1970; None where the time is not known."""
    text = row.get(column, "")
    if text in _ABSENT:
        return None
    return amount(text, column) if text.isdigit() else timestamp(text, column)


def _seconds(row: dict[str, str]) -> float | None:
    """Return the run time as accounted."""
    if row.get("ElapsedRaw"):
        return amount(row["ElapsedRaw"], "ElapsedRaw")
    text = row.get("Elapsed", "")
    if text in _ABSENT or text == "INVALID":
        return None
    match = _ELAPSED.fullmatch(text)
    if match is None:
        raise field_refusal("Elapsed", "a time such as 1-02:03:04", text)
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _tres(row: dict[str, str], column: str) -> SlurmGpus:
    """Return the GPUs among trackable resources, as in `cpu=8,gres/gpu=2,gres/gpu:a100=2`."""
    counts = []
    for part in row.get(column, "").split(","):
        name, _, count = part.partition("=")
        kind, _, gpu_type = name.partition(":")
        if kind == "gres/gpu":
            counts.append((gpu_type, whole(count, column, 0)))
    return gpus_of(counts)


def _gres(row: dict[str, str]) -> SlurmGpus:
    """Return the GPUs among generic resources, as old versions write them: `gpu:2`, `gpu:tesla:2`."""
    counts: list[tuple[str, int]] = []
    for part in row.get("AllocGRES", "").split(","):
        match = _GRES.fullmatch(part)
        if match:
            counts.append((match["type"] or "", int(match["count"] or 1)))
    return gpus_of(counts)


def _nodes(row: dict[str, str]) -> int:
    """Return how many nodes a job has, 0 where that is not told."""
    for column in ("AllocNodes", "NNodes"):
        text = row.get(column, "")
        if text not in (*_ABSENT, "0"):
            return whole(text, column, 1, MOST_NODES)
    return 0


READ = (
    *IDS, *NEEDED, *COUNTS, "JobName", "User", "Account", "Cluster", "Eligible", "Elapsed", "ElapsedRaw", "Constraints",
    "NNodes", "AllocNodes",
)  # fmt: skip
"""Columns that are read. Any others may be there."""
